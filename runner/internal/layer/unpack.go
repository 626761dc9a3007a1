package layer

import (
	"archive/tar"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"
)

const (
	maxFiles = 100_000
	maxName  = 1024 // bytes of a path
	maxDepth = 64
	block    = 4096 // what a file takes at least
)

// unpack writes a tar stream into root and returns the size of what it wrote.
// Nobody has checked the stream: only files and folders come out of it, below
// root, without owner, special bits or dates of its choosing.
func unpack(root *os.Root, r io.Reader, limit int64, files int) (int64, error) {
	archive := tar.NewReader(r)
	var size int64
	for n := 0; ; n++ {
		h, err := archive.Next()
		if errors.Is(err, io.EOF) {
			_, err = io.Copy(io.Discard, io.LimitReader(r, 1<<20)) // padding
			return size, err
		}
		if err != nil {
			return 0, fmt.Errorf("read the installed packages: %w", err)
		}
		if n == files {
			return 0, fmt.Errorf("the packages have more than %d files", files)
		}
		name, err := cleanName(h.Name)
		if err != nil {
			return 0, err
		}
		if h.Size < 0 || h.Size > limit-size-block {
			return 0, fmt.Errorf("the packages take more than %d MiB", limit>>20)
		}
		size += (h.Size+block-1)/block*block + block
		if err := place(root, name, h, archive); err != nil {
			return 0, fmt.Errorf("unpack the installed packages: %w", err)
		}
	}
}

func cleanName(name string) (string, error) {
	clean := path.Clean(name)
	if len(name) > maxName || strings.ContainsRune(name, 0) || !filepath.IsLocal(clean) || strings.Count(clean, "/") >= maxDepth ||
		strings.Contains("/"+name+"/", "/../") {
		return "", fmt.Errorf("the packages have a file named %.80q", name)
	}
	return clean, nil
}

func place(root *os.Root, name string, h *tar.Header, content io.Reader) error {
	switch h.Typeflag {
	case tar.TypeDir:
		return folder(root, name)
	case tar.TypeReg:
	default:
		return fmt.Errorf("%.80q is neither a file nor a folder", name)
	}
	if err := folder(root, path.Dir(name)); err != nil {
		return err
	}
	f, err := root.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	_, err = io.Copy(f, content)
	mode := fs.FileMode(0o644)
	if h.Mode&0o111 != 0 {
		mode = 0o755
	}
	return errors.Join(err, f.Chmod(mode), f.Close())
}

// folder makes a folder and those above it, with the mode that all have.
func folder(root *os.Root, name string) error {
	if name == "." {
		return nil
	}
	if info, err := root.Lstat(name); err == nil && info.IsDir() {
		return nil
	}
	if err := folder(root, path.Dir(name)); err != nil {
		return err
	}
	if err := root.Mkdir(name, 0o700); err != nil {
		return err
	}
	return root.Chmod(name, 0o755)
}
