package containerd

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	"github.com/containerd/containerd"
	"github.com/containerd/containerd/content"
	"github.com/containerd/containerd/errdefs"
	"github.com/containerd/containerd/platforms"
	"github.com/containerd/containerd/reference/docker"
	"github.com/opencontainers/image-spec/identity"
	imagespec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sys/unix"

	"github.com/bigwave/bigwave/runner/internal/sandbox"
	"github.com/bigwave/bigwave/runner/internal/sandbox/box"
)

// ready is an image that containers can be made of.
type ready struct {
	chain    string   // the snapshot that its layers come to
	env      []string // as its configuration says
	programs *box.Programs
}

func unavailable(cause error, format string, args ...any) error {
	return &sandbox.StartError{Code: "image_unavailable", Field: "base_image", Message: fmt.Sprintf(format, args...), Cause: cause}
}

// Image finds an image by its name, pulls it where the operator allows that,
// and unpacks it.
func (m *maker) Image(ctx context.Context, base string) (box.Image, error) {
	named, err := docker.ParseDockerRef(base)
	if err != nil {
		return box.Image{}, unavailable(err, "base_image %q is not the name of an image", base)
	}
	client, err := m.connect()
	if err != nil {
		return box.Image{}, err
	}
	ctx = m.scope(ctx)
	image, err := m.look(ctx, client, named.String())
	if errdefs.IsNotFound(err) {
		if err := m.pull(ctx, named); err != nil {
			return box.Image{}, err
		}
		image, err = m.look(ctx, client, named.String())
	}
	if err != nil {
		return box.Image{}, startError(fmt.Errorf("look for the image: %w", err))
	}
	found := box.Image{Name: base, Digest: image.Target().Digest.String()}
	m.mu.Lock()
	_, known := m.ready[found.Digest]
	m.mu.Unlock()
	if known {
		return found, nil
	}
	r, err := m.unpack(ctx, image)
	if err != nil {
		return box.Image{}, broken(base, err)
	}
	m.mu.Lock()
	m.ready[found.Digest] = r
	m.mu.Unlock()
	return found, nil
}

// look asks containerd for an image, and does not wait for one that hangs.
func (m *maker) look(ctx context.Context, client *containerd.Client, name string) (containerd.Image, error) {
	timed, cancel := context.WithTimeout(ctx, answerTimeout)
	defer cancel()
	image, err := client.GetImage(timed, name)
	if err != nil && timed.Err() != nil && ctx.Err() == nil {
		return nil, m.silent(err)
	}
	return image, err
}

// broken says why an image that is there can't be used.
func broken(name string, err error) error {
	if foreign, ok := errors.AsType[*foreignError](err); ok {
		return unavailable(nil, "the image %s %v", name, foreign)
	}
	if e := startError(err); !strings.HasPrefix(e.Error(), unknownFailure) {
		return e
	}
	return unavailable(err, "the image %s is on this runner, but can't be unpacked", name)
}

// foreignError is an image of another kind of machine.
type foreignError struct{ platform string }

func (e *foreignError) Error() string {
	return fmt.Sprintf("is for %s, and this runner is %s", e.platform, platforms.DefaultString())
}

// unpack makes the image's layers a snapshot, if they are not one.
func (m *maker) unpack(ctx context.Context, image containerd.Image) (ready, error) {
	unpacked, err := image.IsUnpacked(ctx, m.cfg.Snapshotter)
	if err == nil && !unpacked {
		err = image.Unpack(ctx, m.cfg.Snapshotter)
	}
	if err != nil {
		return ready{}, err
	}
	layers, err := image.RootFS(ctx)
	if err != nil {
		return ready{}, err
	}
	descriptor, err := image.Config(ctx)
	if err != nil {
		return ready{}, err
	}
	blob, err := content.ReadBlob(ctx, image.ContentStore(), descriptor)
	if err != nil {
		return ready{}, err
	}
	var config imagespec.Image
	if err := json.Unmarshal(blob, &config); err != nil {
		return ready{}, fmt.Errorf("the image's configuration: %w", err)
	}
	if p := config.Platform; p.Architecture != "" && !platforms.Default().Match(platforms.Normalize(p)) {
		return ready{}, &foreignError{platforms.Format(p)}
	}
	return ready{chain: identity.ChainID(layers).String(), env: config.Config.Env}, nil
}

// prepared is what Image has found.
func (m *maker) prepared(image box.Image) (ready, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	r, ok := m.ready[image.Digest]
	if !ok {
		return ready{}, unavailable(nil, "the image %s is not on this runner any more", image.Name)
	}
	return r, nil
}

const usualPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// programs looks once for an image's interpreters in the root of the process
// pid, where nothing but the image is yet.
func (m *maker) programs(image box.Image, r ready, pid int) (box.Programs, error) {
	if r.programs != nil {
		return *r.programs, nil
	}
	root, err := unix.Open(fmt.Sprintf("/proc/%d/root", pid), unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return box.Programs{}, fmt.Errorf("look into the sandbox: %w", err)
	}
	defer unix.Close(root)
	p := box.Programs{Path: usualPath}
	for _, variable := range r.env {
		if path, ok := strings.CutPrefix(variable, "PATH="); ok && path != "" {
			p.Path = path
		} else {
			p.Env = append(p.Env, variable)
		}
	}
	p.Bash, p.BashErr = find(root, "bash", p.Path)
	p.Python, p.PythonErr = find(root, "python3", p.Path)
	m.mu.Lock()
	defer m.mu.Unlock()
	r.programs = &p
	m.ready[image.Digest] = r
	return p, nil
}

// find looks for a program along path, below root.
func find(root int, name, path string) (string, error) {
	for dir := range strings.SplitSeq(path, ":") {
		if !strings.HasPrefix(dir, "/") {
			continue
		}
		file := strings.TrimSuffix(dir, "/") + "/" + name
		how := unix.OpenHow{Flags: unix.O_PATH | unix.O_CLOEXEC, Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS}
		fd, err := unix.Openat2(root, file, &how)
		if err != nil {
			continue
		}
		var s unix.Stat_t
		err = unix.Fstat(fd, &s)
		_ = unix.Close(fd)
		if err == nil && s.Mode&unix.S_IFMT == unix.S_IFREG && s.Mode&0o111 != 0 {
			return file, nil
		}
	}
	return "", fmt.Errorf("the image has no %s in %s", name, path)
}
