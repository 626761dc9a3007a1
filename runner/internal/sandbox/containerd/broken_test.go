package containerd

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/containerd"
	"github.com/containerd/containerd/content"
	"github.com/containerd/containerd/images"
	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/specs-go"
	imagespec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sys/unix"

	"github.com/bigwave/bigwave/runner/internal/sandbox"
	"github.com/bigwave/bigwave/runner/internal/sandbox/box"
	"github.com/bigwave/bigwave/runner/internal/sandbox/boxtest"
	"github.com/bigwave/bigwave/runner/internal/sandbox/containerd/containerdtest"
	"github.com/bigwave/bigwave/runner/internal/sandbox/sandboxtest"
)

// smallImage is one of a single layer, to be broken before it is stored.
type smallImage struct {
	layer    []byte // as it is stored
	config   []byte
	manifest imagespec.Manifest
	without  []digest.Digest // of what is not stored
}

// small makes an image with these files, and with others that have no content.
func small(files map[string]string, others ...tar.Header) *smallImage {
	var plain, packed bytes.Buffer
	w := tar.NewWriter(&plain)
	for name, text := range files {
		must(w.WriteHeader(&tar.Header{Name: name, Mode: 0o755, Size: int64(len(text)), Typeflag: tar.TypeReg}))
		_, err := w.Write([]byte(text))
		must(err)
	}
	for _, other := range others {
		must(w.WriteHeader(&other))
	}
	must(w.Close())
	z := gzip.NewWriter(&packed)
	_, err := z.Write(plain.Bytes())
	must(errors.Join(err, z.Close()))
	i := &smallImage{layer: packed.Bytes()}
	i.config = encode(imagespec.Image{
		Platform: imagespec.Platform{OS: "linux", Architecture: runtime.GOARCH},
		RootFS:   imagespec.RootFS{Type: "layers", DiffIDs: []digest.Digest{digest.FromBytes(plain.Bytes())}},
	})
	return i.link()
}

// link has the manifest name what there is now.
func (i *smallImage) link() *smallImage {
	describe := func(kind string, blob []byte) imagespec.Descriptor {
		return imagespec.Descriptor{MediaType: kind, Digest: digest.FromBytes(blob), Size: int64(len(blob))}
	}
	i.manifest = imagespec.Manifest{
		Versioned: specs.Versioned{SchemaVersion: 2},
		MediaType: imagespec.MediaTypeImageManifest,
		Config:    describe(imagespec.MediaTypeImageConfig, i.config),
		Layers:    []imagespec.Descriptor{describe(imagespec.MediaTypeImageLayerGzip, i.layer)},
	}
	return i
}

func encode(v any) []byte {
	blob, err := json.Marshal(v)
	must(err)
	return blob
}

func must(err error) {
	if err != nil {
		panic(err)
	}
}

// store puts the image into containerd under a name, until the test ends, or
// moves the name to it.
func (i *smallImage) store(ctx context.Context, t testing.TB, c *containerd.Client, name string) string {
	t.Helper()
	manifest := encode(i.manifest)
	target := imagespec.Descriptor{MediaType: imagespec.MediaTypeImageManifest, Digest: digest.FromBytes(manifest), Size: int64(len(manifest))}
	for _, blob := range [][]byte{i.layer, i.config, manifest} {
		d := imagespec.Descriptor{Digest: digest.FromBytes(blob), Size: int64(len(blob))}
		missing := false
		for _, w := range i.without {
			missing = missing || w == d.Digest
		}
		if missing {
			continue
		}
		kept := content.WithLabels(map[string]string{gcRootLabel: time.Now().UTC().Format(time.RFC3339)})
		if err := content.WriteBlob(ctx, c.ContentStore(), d.Digest.String(), bytes.NewReader(blob), d, kept); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.ContentStore().Delete(ctx, d.Digest) })
	}
	image := images.Image{Name: name, Target: target}
	if _, err := c.ImageService().Create(ctx, image); err != nil {
		if _, err := c.ImageService().Update(ctx, image); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() { _ = c.ImageService().Delete(ctx, name) })
	return target.Digest.String()
}

// TestBrokenImages are there, but of no use.
func TestBrokenImages(t *testing.T) {
	ctx, c := client(t)
	b, cfg := plain(t)
	for name, broken := range map[string]func() *smallImage{
		"a configuration that is missing": func() *smallImage {
			i := small(map[string]string{"a": "1"})
			i.without = []digest.Digest{i.manifest.Config.Digest}
			return i
		},
		"a layer that is missing": func() *smallImage {
			i := small(map[string]string{"a": "2"})
			i.without = []digest.Digest{i.manifest.Layers[0].Digest}
			return i
		},
		"a manifest that is missing": func() *smallImage {
			i := small(map[string]string{"a": "3"})
			i.without = []digest.Digest{digest.FromBytes(encode(i.manifest))}
			return i
		},
		"a configuration that is no JSON": func() *smallImage {
			i := small(map[string]string{"a": "4"})
			i.config = []byte("configuration")
			return i.link()
		},
		"a layer that is no archive": func() *smallImage {
			i := small(map[string]string{"a": "5"})
			i.layer = []byte("a layer that nobody can unpack")
			return i.link()
		},
		"a layer that ends early": func() *smallImage {
			i := small(map[string]string{"a": strings.Repeat("6", 1<<16)})
			i.layer = i.layer[:len(i.layer)/2]
			return i.link()
		},
		"another layer than the configuration says": func() *smallImage {
			i := small(map[string]string{"a": "7"})
			i.layer = small(map[string]string{"a": "8"}).layer
			return i.link()
		},
		"no layers for a configuration of one": func() *smallImage {
			i := small(map[string]string{"a": "9"})
			i.manifest.Layers = nil
			return i
		},
		"another machine's": func() *smallImage {
			i := small(map[string]string{"a": "10"})
			i.config = bytes.ReplaceAll(i.config, []byte(runtime.GOARCH), []byte("s390x"))
			return i.link()
		},
		"a file where a mount is to be": func() *smallImage { return small(map[string]string{"proc": "11"}) },
	} {
		t.Run(name, func(t *testing.T) {
			broken().store(ctx, t, c, "docker.io/test/broken:1")
			_, err := b.Start(t.Context(), sandbox.Spec{ID: "broken", Policy: of("test/broken:1")})
			t.Log(err)
			code, says := "image_unavailable", "test/broken:1"
			if strings.HasPrefix(name, "a file") {
				code, says = "start_failed", "could not"
			}
			mustBeNamed(t, err, code, says)
		})
	}
	mustLeaveNothing(t, cfg)
	mustWork(t, b)
}

// of is a policy with another base image.
func of(image string) sandbox.Policy {
	p := sandboxtest.Policy()
	p.BaseImage = image
	return p
}

func TestImageNames(t *testing.T) {
	b, cfg := plain(t)
	for _, name := range []string{"", " ", "bigwave/UPPER", "a b", "../etc", "x@sha256:0", "http://host/x", "a:b:c", strings.Repeat("a", 300), "x\x00y", "-", "$(id)"} {
		_, err := b.Start(t.Context(), sandbox.Spec{ID: "name", Policy: of(name)})
		mustBeNamed(t, err, "image_unavailable", "is not the name of an image")
	}
	for _, name := range []string{"nobody/has-it", "registry.test:5000/a/b:c", "bigwave/sandbox-base@sha256:" + strings.Repeat("0", 64)} {
		_, err := b.Start(t.Context(), sandbox.Spec{ID: "name", Policy: of(name)})
		mustBeNamed(t, err, "image_unavailable", "is not on this runner")
	}
	mustLeaveNothing(t, cfg)
}

// TestImageWithoutInterpreters starts: what is missing is a call's affair.
func TestImageWithoutInterpreters(t *testing.T) {
	ctx, c := client(t)
	b, cfg := plain(t)
	digest := small(map[string]string{"etc/motd": "hello"}).store(ctx, t, c, "docker.io/test/bare:1")
	s, err := b.Start(t.Context(), sandbox.Spec{ID: "bare", Policy: of("test/bare:1")})
	if err != nil {
		t.Fatal(err)
	}
	if got := s.Info().ImageDigest; got != digest {
		t.Errorf("the digest is %s, want %s", got, digest)
	}
	for program, p := range map[string]sandbox.Process{"bash": sandboxtest.Bash("true"), "python3": sandboxtest.Python("pass")} {
		p.Stdout, p.Stderr = &bytes.Buffer{}, &bytes.Buffer{}
		if e, err := s.Exec(t.Context(), p); err == nil || !strings.Contains(err.Error(), "the image has no "+program) {
			t.Errorf("%s: got %+v, %v", program, e, err)
		}
	}
	if err := s.Close(t.Context()); err != nil {
		t.Error(err)
	}
	mustLeaveNothing(t, cfg)
}

// TestHostileImages have something else where the sandbox's own files go. A
// start works or fails, but neither hangs nor touches anything of the host.
func TestHostileImages(t *testing.T) {
	ctx, c := client(t)
	b, cfg := plain(t, func(c *Config) { c.MakeWithin = 5 * time.Second })
	link := func(name, to string) tar.Header {
		return tar.Header{Name: name, Linkname: to, Typeflag: tar.TypeSymlink, Mode: 0o777}
	}
	pipe := func(name string) tar.Header { return tar.Header{Name: name, Typeflag: tar.TypeFifo, Mode: 0o666} }
	device := func(name string, major, minor int64) tar.Header {
		return tar.Header{Name: name, Typeflag: tar.TypeChar, Mode: 0o666, Devmajor: major, Devminor: minor}
	}
	host := filepath.Join(t.TempDir(), "host")
	if err := os.WriteFile(host, []byte("untouched"), 0o666); err != nil {
		t.Fatal(err)
	}
	hostname, _ := os.Hostname()
	for name, image := range map[string]*smallImage{
		"pipes":         small(nil, pipe("etc/passwd"), pipe("etc/group"), pipe("etc/hosts"), pipe("etc/resolv.conf"), pipe("etc/hostname")),
		"directories":   small(map[string]string{"etc/passwd/x": "x", "etc/hosts/x/y": "x", "etc/group/x": "x", "dev/null/x": "x"}),
		"links":         small(nil, link("etc/passwd", host), link("etc/hosts", host), link("etc/group", "/proc/1/root"+host), link("etc/resolv.conf", "../../../.."+host)),
		"kernel":        small(nil, link("etc", "/proc/sys/kernel")),
		"run":           small(nil, link("run", "/etc"), link("tmp", "/proc/1/root"), link("var/tmp", "/")),
		"dev":           small(nil, link("dev", "/")),
		"workspace":     small(nil, link("workspace", "/etc")),
		"workspace too": small(map[string]string{"workspace": "a file"}),
		"memory":        small(nil, device("dev/null", 1, 1), device("dev/zero", 1, 2), device("etc/hosts", 1, 1)),
		"proc":          small(map[string]string{"proc": "a file"}),
		"own":           small(map[string]string{"run/bigwave/init": "x", "run/bigwave/socket": "x", "run/empty": "x"}),
	} {
		image.store(ctx, t, c, "docker.io/test/hostile:1")
		begun := time.Now()
		s, err := b.Start(t.Context(), sandbox.Spec{ID: "hostile", Policy: of("test/hostile:1")})
		if took := time.Since(begun); took > 20*time.Second {
			t.Errorf("%s: took %v", name, took)
		}
		if err != nil {
			t.Logf("%s: %v", name, err)
			if e, ok := errors.AsType[*sandbox.StartError](err); !ok || e.Code != "start_failed" {
				t.Errorf("%s: got %v", name, err)
			}
		} else {
			e, err := s.Exec(t.Context(), sandbox.Process{ID: "w", Program: sandbox.FileWrite, Path: "f", Input: []byte("x")})
			if err != nil || e.File == nil || e.File.Errno != "" {
				t.Errorf("%s: got %+v, %v", name, e, err)
			}
			if err := s.Close(t.Context()); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		}
		if content, err := os.ReadFile(host); string(content) != "untouched" {
			t.Fatalf("%s: the host's file holds %q, %v", name, content, err)
		}
		if now, _ := os.Hostname(); now != hostname {
			t.Fatalf("%s: the host is called %s", name, now)
		}
	}
	mustLeaveNothing(t, cfg)
	s, err := b.Start(t.Context(), sandbox.Spec{ID: "good", Policy: sandboxtest.Policy()})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Close(t.Context()); err != nil {
		t.Error(err)
	}
}

// TestWrongSettings name what containerd does not have.
func TestWrongSettings(t *testing.T) {
	program := filepath.Join(t.TempDir(), "containerd-shim-test-v1")
	must(os.WriteFile(program, []byte("#!/bin/sh\necho broken >&2\nexit 1\n"), 0o755))
	for name, c := range map[string]struct {
		change func(*Config)
		code   string
		says   string
	}{
		"a runtime that is not installed":  {func(c *Config) { c.Runtime = "io.containerd.nope.v1" }, "start_failed", "container runtime"},
		"a runtime that is no runtime":     {func(c *Config) { c.Runtime = "nope" }, "start_failed", "container runtime"},
		"a runtime's program that is gone": {func(c *Config) { c.Runtime = "/nonexistent/containerd-shim-runc-v2" }, "start_failed", "container runtime"},
		"a runtime that ends":              {func(c *Config) { c.Runtime = program }, "start_failed", "container runtime"},
		"a snapshotter that is not there":  {func(c *Config) { c.Snapshotter = "nope" }, "start_failed", "snapshotter"},
		"a socket that is not there":       {func(c *Config) { c.Address = filepath.Join(t.TempDir(), "none.sock") }, "start_failed", "containerd does not answer"},
		"a namespace without the image":    {func(c *Config) { c.Namespace = "elsewhere" }, "image_unavailable", "is not on this runner"},
	} {
		t.Run(name, func(t *testing.T) {
			b, cfg := plain(t, c.change)
			for range 3 {
				begun := time.Now()
				_, err := b.Start(t.Context(), sandbox.Spec{ID: "wrong", Policy: sandboxtest.Policy()})
				t.Log(err)
				mustBeNamed(t, err, c.code, c.says)
				if took := time.Since(begun); took > 5*time.Second {
					t.Errorf("it took %v", took)
				}
			}
			if len(b.Check(t.Context()).Missing()) == 0 {
				t.Error("a runner would announce itself")
			}
			mustLeaveNothing(t, cfg)
		})
	}
	b, _ := plain(t)
	mustWork(t, b)
}

// TestDiskOfContainerdIsFull gives one containerd a small disk of its own.
func TestDiskOfContainerdIsFull(t *testing.T) {
	dir, err := os.MkdirTemp("", "bwf-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=16m,mode=755"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) })
	full, err := containerdtest.Start(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = full.Stop() })
	shared := daemon
	daemon = full
	t.Cleanup(func() { daemon = shared })
	ctx, c := client(t)
	b, cfg := plain(t)
	small(map[string]string{"etc/motd": "hello"}).store(ctx, t, c, "docker.io/test/bare:1")
	small(map[string]string{"etc/motd": strings.Repeat("more", 1000)}).store(ctx, t, c, "docker.io/test/more:1")
	try := func(image string) error {
		s, err := b.Start(t.Context(), sandbox.Spec{ID: "full", Policy: of(image)})
		if err == nil {
			err = s.Close(t.Context())
		}
		return err
	}
	if err := try("test/bare:1"); err != nil {
		t.Fatal(err)
	}
	mustLeaveNothing(t, cfg)
	ballast := filepath.Join(dir, "ballast")
	if err := os.WriteFile(ballast, bytes.Repeat([]byte{1}, 32<<20), 0o600); !errors.Is(err, unix.ENOSPC) {
		t.Fatal(err)
	}
	for _, image := range []string{"test/bare:1", "test/more:1", "test/bare:1"} {
		err := try(image)
		t.Log(err)
		mustBeNamed(t, err, "start_failed", "disk that holds this runner's containers is full")
	}
	if err := os.Remove(ballast); err != nil {
		t.Fatal(err)
	}
	for _, image := range []string{"test/bare:1", "test/more:1"} {
		if err := try(image); err != nil {
			t.Errorf("with room again, %s: %v", image, err)
		}
	}
	mustLeaveNothing(t, cfg)
}

// TestSpares takes many sandboxes at once from few that are ready.
func TestSpares(t *testing.T) {
	const spares, starts = 10, 50
	ctx, c := client(t)
	const name = "docker.io/test/spares:1"
	base, err := c.GetImage(ctx, "docker.io/"+sandboxtest.Image)
	if err != nil {
		t.Fatal(err)
	}
	tag := func(target imagespec.Descriptor) string {
		image := images.Image{Name: name, Target: target}
		if _, err := c.ImageService().Create(ctx, image); err != nil {
			if _, err := c.ImageService().Update(ctx, image); err != nil {
				t.Fatal(err)
			}
		}
		return target.Digest.String()
	}
	t.Cleanup(func() { _ = c.ImageService().Delete(ctx, name) })
	old := tag(base.Target())
	var cfg box.Config
	b := boxtest.Make(t, func(given box.Config) (*box.Backend, error) {
		given.Spares = spares
		cfg = given
		own := config(given)
		own.Image = name
		return New(own)
	})
	if err := b.Sweep(t.Context()); err != nil {
		t.Fatal(err)
	}
	b.Settle()

	var mu sync.Mutex
	seen := map[string]string{}
	unique := func(kind, what, id string) {
		mu.Lock()
		defer mu.Unlock()
		if other, ok := seen[kind+what]; ok && other != id {
			t.Errorf("%s and %s have the same %s %s", id, other, kind, what)
		}
		seen[kind+what] = id
	}
	const fresh = `id -u; readlink /proc/self/ns/net; ls -A /workspace /tmp /dev/shm | grep -v : | grep .; echo x | tee /workspace/used /tmp/used > /dev/shm/used`
	all := func(want string) []sandbox.Sandbox {
		boxes := make([]sandbox.Sandbox, starts)
		var wait sync.WaitGroup
		for i := range starts {
			wait.Go(func() {
				id := want[7:15] + "-" + string(rune('a'+i/26)) + string(rune('a'+i%26))
				s, err := b.Start(t.Context(), sandbox.Spec{ID: id, Policy: of(name)})
				if err != nil {
					t.Errorf("start: %v", err)
					return
				}
				boxes[i] = s
				if got := s.Info().ImageDigest; got != want {
					t.Errorf("%s is of %s, want %s", id, got, want)
				}
				r := sandboxtest.Exec(t, s, sandboxtest.Bash(fresh))
				lines := strings.Fields(r.Stdout)
				if r.Code != 0 || len(lines) != 2 {
					t.Errorf("%s: got %+v, %q, %q", id, r.Exit, r.Stdout, r.Stderr)
					return
				}
				unique("uid", lines[0], id)
				unique("network namespace", lines[1], id)
				unique("init", strconv.Itoa(box.InitPID(s)), id)
			})
		}
		wait.Wait()
		return boxes
	}
	closeAll := func(boxes []sandbox.Sandbox) {
		var wait sync.WaitGroup
		for _, s := range boxes {
			if s != nil {
				wait.Go(func() {
					if err := s.Close(context.WithoutCancel(t.Context())); err != nil {
						t.Errorf("close: %v", err)
					}
				})
			}
		}
		wait.Wait()
	}
	begun := time.Now()
	first := all(old)
	t.Logf("%d starts with %d ready took %v", starts, spares, time.Since(begun).Round(time.Millisecond))
	b.Settle()
	if n := left(cfg) / 2; n != starts+spares {
		t.Errorf("%d sandboxes are there, want %d and %d ready", n, starts, spares)
	}
	// The same layers under another configuration are another image.
	changed := variant(ctx, t, c, base)
	if changed.Digest.String() == old {
		t.Fatal("the image did not change")
	}
	closeAll(first)
	seen = map[string]string{} // ids may come again, once their sandboxes are gone
	second := all(tag(changed))
	b.Settle()
	if !eventually(20*time.Second, func() bool { return left(cfg)/2 == starts+spares }) {
		t.Errorf("%d sandboxes are there, want %d and %d ready", left(cfg)/2, starts, spares)
	}
	containers, err := c.ContainerService().List(ctx, `labels."`+ownerLabel+`"=="`+box.Owner(cfg)+`"`)
	if err != nil {
		t.Fatal(err)
	}
	for _, found := range containers {
		if found.CreatedAt.Before(begun) {
			t.Errorf("%s is of the image before", found.ID)
		}
	}
	closeAll(second)
	if err := b.Close(t.Context()); err != nil {
		t.Error(err)
	}
	mustLeaveNothing(t, cfg)
}

// variant stores an image with the same layers and another configuration.
func variant(ctx context.Context, t testing.TB, c *containerd.Client, of containerd.Image) imagespec.Descriptor {
	t.Helper()
	manifest, err := images.Manifest(ctx, of.ContentStore(), of.Target(), of.Platform())
	if err != nil {
		t.Fatal(err)
	}
	blob, err := content.ReadBlob(ctx, of.ContentStore(), manifest.Config)
	if err != nil {
		t.Fatal(err)
	}
	var config imagespec.Image
	must(json.Unmarshal(blob, &config))
	config.Author = "another"
	blob = encode(config)
	manifest.Config.Digest, manifest.Config.Size = digest.FromBytes(blob), int64(len(blob))
	changed := encode(manifest)
	target := imagespec.Descriptor{MediaType: imagespec.MediaTypeImageManifest, Digest: digest.FromBytes(changed), Size: int64(len(changed))}
	for _, blob := range [][]byte{blob, changed} {
		d := imagespec.Descriptor{Digest: digest.FromBytes(blob), Size: int64(len(blob))}
		kept := content.WithLabels(map[string]string{gcRootLabel: time.Now().UTC().Format(time.RFC3339)})
		if err := content.WriteBlob(ctx, c.ContentStore(), d.Digest.String(), bytes.NewReader(blob), d, kept); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.ContentStore().Delete(ctx, d.Digest) })
	}
	return target
}
