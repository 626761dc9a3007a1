package main

import (
	"archive/tar"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// newImage is the tar rootfs as an image of one layer for Linux on arch. It
// was created when the newest file in it was: the clock does not count.
func newImage(rootfs, arch string) (v1.Image, error) {
	created, err := newest(rootfs)
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", rootfs, err)
	}
	// Compressed once and kept: the bytes are needed for the digest and again
	// for the archive. The default level is the fastest.
	layer, err := tarball.LayerFromFile(rootfs, tarball.WithMediaType(types.OCILayer), tarball.WithCompressedCaching)
	if err != nil {
		return nil, fmt.Errorf("compress %s: %w", rootfs, err)
	}
	base := mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.OCIConfigJSON)
	image, err := mutate.Append(base, mutate.Addendum{
		Layer:   layer,
		History: v1.History{Created: v1.Time{Time: created}, CreatedBy: "rootfs.sh"},
	})
	if err != nil {
		return nil, err
	}
	cfg, err := image.ConfigFile()
	if err != nil {
		return nil, err
	}
	cfg = cfg.DeepCopy()
	cfg.OS, cfg.Architecture, cfg.Created = "linux", arch, v1.Time{Time: created}
	// The Dockerfile beside the recipe says the same.
	cfg.Config = v1.Config{
		Env: []string{
			"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
			"LANG=C.UTF-8",
		},
		Cmd:        []string{"bash"},
		WorkingDir: "/workspace",
	}
	return mutate.ConfigFile(image, cfg)
}

// newest reads a tar to its end and returns its newest time stamp.
func newest(path string) (time.Time, error) {
	f, err := os.Open(path)
	if err != nil {
		return time.Time{}, err
	}
	defer f.Close()
	var newest time.Time
	r := tar.NewReader(f)
	for {
		h, err := r.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			return time.Time{}, err
		}
		if h.ModTime.After(newest) {
			newest = h.ModTime
		}
	}
	if newest.IsZero() {
		return time.Time{}, errors.New("no files in it")
	}
	return newest.UTC(), nil
}
