package main

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
)

var built = time.Date(2025, 8, 9, 0, 0, 0, 0, time.UTC)

// rootfs writes a tar of two files, the newer one of the time built.
func rootfs(t *testing.T) string {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	write(t, w, "./bin/sh", built)
	write(t, w, "./etc/hosts", built.Add(-time.Hour))
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "rootfs.tar")
	if err := os.WriteFile(path, b.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func write(t *testing.T, w *tar.Writer, name string, mtime time.Time) {
	t.Helper()
	content := strings.Repeat(name, 1000)
	if err := w.WriteHeader(&tar.Header{Name: name, Mode: 0o755, Size: int64(len(content)), ModTime: mtime}); err != nil {
		t.Fatal(err)
	}
	if _, err := io.WriteString(w, content); err != nil {
		t.Fatal(err)
	}
}

// unpack returns the files of the archive at path by name.
func unpack(t *testing.T, path string) map[string][]byte {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	files := map[string][]byte{}
	for r := tar.NewReader(f); ; {
		h, err := r.Next()
		if err == io.EOF {
			return files
		}
		if err != nil {
			t.Fatal(err)
		}
		if files[h.Name], err = io.ReadAll(r); err != nil {
			t.Fatal(err)
		}
	}
}

func decode[T any](t *testing.T, b []byte) T {
	t.Helper()
	var v T
	if err := json.Unmarshal(b, &v); err != nil {
		t.Fatalf("%s: %v", b, err)
	}
	return v
}

func TestImageSaysWhatItIs(t *testing.T) {
	out := filepath.Join(t.TempDir(), "out.tar")
	digest, err := convert("bigwave/sandbox-base", rootfs(t), out)
	if err != nil {
		t.Fatal(err)
	}
	files := unpack(t, out)

	index := decode[v1.IndexManifest](t, files["index.json"])
	if len(index.Manifests) != 1 || index.Manifests[0].Digest.String() != digest {
		t.Fatalf("the index has %+v, want one image, %s", index.Manifests, digest)
	}
	for key, want := range map[string]string{
		"io.containerd.image.name":          "docker.io/bigwave/sandbox-base:latest",
		"org.opencontainers.image.ref.name": "latest",
	} {
		if got := index.Manifests[0].Annotations[key]; got != want {
			t.Errorf("%s is %q, want %q", key, got, want)
		}
	}

	manifest := decode[v1.Manifest](t, files[blobPath(index.Manifests[0].Digest)])
	if len(manifest.Layers) != 1 || int64(len(files[blobPath(manifest.Layers[0].Digest)])) != manifest.Layers[0].Size {
		t.Errorf("layers are %+v, want one of the size that it says", manifest.Layers)
	}
	cfg := decode[v1.ConfigFile](t, files[blobPath(manifest.Config.Digest)])
	if !cfg.Created.Equal(built) {
		t.Errorf("created is %s, want the time of the newest file, %s", cfg.Created, built)
	}
	if cfg.OS != "linux" || cfg.Config.WorkingDir != "/workspace" || cfg.Config.User != "" {
		t.Errorf("config is %+v", cfg)
	}
	if env := strings.Join(cfg.Config.Env, " "); !strings.Contains(env, "PATH=/") || !strings.Contains(env, "LANG=C.UTF-8") {
		t.Errorf("env is %q", env)
	}
}

func TestSameTarGivesSameBytes(t *testing.T) {
	in, dir := rootfs(t), t.TempDir()
	var archives [2][]byte
	for i := range archives {
		out := filepath.Join(dir, "out.tar")
		if _, err := convert("bigwave/sandbox-base:latest", in, out); err != nil {
			t.Fatal(err)
		}
		var err error
		if archives[i], err = os.ReadFile(out); err != nil {
			t.Fatal(err)
		}
	}
	if !bytes.Equal(archives[0], archives[1]) {
		t.Error("two runs from one tar differ")
	}
}

func TestWhatIsNoRootIsNamedAndLeavesNothing(t *testing.T) {
	good, err := os.ReadFile(rootfs(t))
	if err != nil {
		t.Fatal(err)
	}
	for name, content := range map[string][]byte{
		"text.tar":  []byte(strings.Repeat("no tar at all\n", 100)),
		"cut.tar":   good[:3000],
		"empty.tar": make([]byte, 1024),
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			in, out := filepath.Join(dir, name), filepath.Join(dir, "out.tar")
			if err := os.WriteFile(in, content, 0o600); err != nil {
				t.Fatal(err)
			}
			_, err := convert("bigwave/sandbox-base:latest", in, out)
			if err == nil || !strings.Contains(err.Error(), in) {
				t.Errorf("the error is %v, want one that names %s", err, in)
			}
			if _, err := os.Stat(out); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("there is an archive: %v", err)
			}
		})
	}
}

func TestNameMustBeOne(t *testing.T) {
	if _, err := convert("Not A Name", rootfs(t), filepath.Join(t.TempDir(), "out.tar")); err == nil {
		t.Error("no error")
	}
}
