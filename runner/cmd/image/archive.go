package main

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"time"

	"github.com/distribution/reference"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/partial"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// writeArchive writes an OCI image layout with one image as a tar and returns
// the digest of the image's manifest.
func writeArchive(w io.Writer, image v1.Image, name reference.Named) (v1.Hash, error) {
	manifest, err := partial.Descriptor(image)
	if err != nil {
		return v1.Hash{}, err
	}
	cfg, err := image.ConfigFile()
	if err != nil {
		return v1.Hash{}, err
	}
	manifest.Platform = cfg.Platform()
	manifest.Annotations = annotations(name)
	index, err := json.Marshal(v1.IndexManifest{
		SchemaVersion: 2,
		MediaType:     types.OCIImageIndex,
		Manifests:     []v1.Descriptor{*manifest},
	})
	if err != nil {
		return v1.Hash{}, err
	}

	a := archive{tar: tar.NewWriter(w), mtime: cfg.Created.Time}
	a.dir("blobs")
	a.dir("blobs/sha256")
	a.image(image)
	a.bytes("index.json", index)
	a.bytes("oci-layout", []byte(`{"imageLayoutVersion":"1.0.0"}`))
	if a.err == nil {
		a.err = a.tar.Close()
	}
	return manifest.Digest, a.err
}

// annotations are the image's names: the reference for tools that read the
// layout, the whole name for containerd.
func annotations(name reference.Named) map[string]string {
	names := map[string]string{"io.containerd.image.name": name.String()}
	if tagged, ok := name.(reference.Tagged); ok {
		names["org.opencontainers.image.ref.name"] = tagged.Tag()
	}
	return names
}

// archive writes files of one owner and age, until the first error.
type archive struct {
	tar   *tar.Writer
	mtime time.Time
	err   error
}

// image writes the blobs of an image: its layers, its config, its manifest.
func (a *archive) image(image v1.Image) {
	layers, err := image.Layers()
	if err != nil {
		a.err = err
		return
	}
	for _, layer := range layers {
		a.layer(layer)
	}
	a.blob(image.ConfigName, image.RawConfigFile)
	a.blob(image.Digest, image.RawManifest)
}

func (a *archive) layer(layer v1.Layer) {
	if a.err != nil {
		return
	}
	digest, err := layer.Digest()
	if err != nil {
		a.err = err
		return
	}
	size, err := layer.Size()
	if err != nil {
		a.err = err
		return
	}
	r, err := layer.Compressed()
	if err != nil {
		a.err = err
		return
	}
	defer r.Close()
	a.file(blobPath(digest), size, r)
}

func (a *archive) blob(digest func() (v1.Hash, error), content func() ([]byte, error)) {
	if a.err != nil {
		return
	}
	hash, err := digest()
	if err != nil {
		a.err = err
		return
	}
	b, err := content()
	if err != nil {
		a.err = err
		return
	}
	a.bytes(blobPath(hash), b)
}

func blobPath(h v1.Hash) string { return fmt.Sprintf("blobs/%s/%s", h.Algorithm, h.Hex) }

func (a *archive) dir(name string) {
	if a.err == nil {
		a.err = a.tar.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: name + "/", Mode: 0o755, ModTime: a.mtime})
	}
}

func (a *archive) bytes(name string, b []byte) { a.file(name, int64(len(b)), bytes.NewReader(b)) }

func (a *archive) file(name string, size int64, r io.Reader) {
	if a.err == nil {
		a.err = a.tar.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: name, Size: size, Mode: 0o644, ModTime: a.mtime})
	}
	if a.err == nil {
		_, a.err = io.Copy(a.tar, r)
	}
}
