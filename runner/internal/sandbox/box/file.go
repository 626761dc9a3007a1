package box

import (
	"fmt"
	"path"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/bigwave/bigwave/runner/internal/inside"
	"github.com/bigwave/bigwave/runner/internal/sandbox"
)

// fileRequest confines the path by its words; the kernel then confines where
// it really leads. What is outside by its words is refused here.
func fileRequest(p sandbox.Process, roots []string) (inside.Request, []byte, *sandbox.FileResult) {
	if strings.ContainsRune(p.Path, 0) {
		return inside.Request{}, nil, &sandbox.FileResult{Errno: "EINVAL", Message: "a path can't hold a NUL byte"}
	}
	root, name, ok := beneathRoots(p.Path, roots)
	if !ok {
		return inside.Request{}, nil, &sandbox.FileResult{Errno: "EACCES", Denied: true, Message: outside(p.Path, roots)}
	}
	if len(name) > maxPath {
		return inside.Request{}, nil, &sandbox.FileResult{Errno: "ENAMETOOLONG", Message: "the path is too long"}
	}
	r := inside.Request{Op: inside.OpRead, Path: name, Root: root, Max: uint64(max(p.MaxRead, 0))}
	if p.Program == sandbox.FileRead {
		return r, nil, nil
	}
	r.Op, r.Max, r.Body = inside.OpWrite, uint64(len(p.Input)), true
	if p.Input == nil {
		return r, []byte{}, nil
	}
	return r, p.Input, nil
}

const maxPath = 4096

// beneathRoots is the root that name lies in and name relative to it. No two
// roots overlap. A trailing slash is kept, since it says that a directory is
// meant; what is relative is so to the workspace.
func beneathRoots(name string, roots []string) (root, rest string, ok bool) {
	clean := path.Join(workspace, name)
	if path.IsAbs(name) {
		clean = path.Clean(name)
	}
	for _, root := range roots {
		if clean == root {
			return root, ".", true
		}
		if rest, ok := strings.CutPrefix(clean, root+"/"); ok {
			if strings.HasSuffix(name, "/") {
				rest += "/"
			}
			return root, rest, true
		}
	}
	return "", "", false
}

func outside(name string, roots []string) string {
	return fmt.Sprintf("%q is outside %s", name, strings.Join(roots, ", "))
}

// fileResult is a note of a file operation in words.
func fileResult(p sandbox.Process, n inside.Note, roots []string) *sandbox.FileResult {
	r := &sandbox.FileResult{Size: n.B}
	if n.A == 0 {
		return r
	}
	errno := syscall.Errno(n.A)
	r.Errno = unix.ErrnoName(errno)
	switch errno {
	case syscall.EXDEV:
		r.Denied, r.Message = true, outside(p.Path, roots)
	case syscall.EFBIG:
		r.Message = fmt.Sprintf("the file has %d bytes, which is more than the %d that can be read at once", n.B, p.MaxRead)
	case syscall.EINVAL, syscall.ENXIO:
		r.Message = "it is not a regular file"
	default:
		r.Message = errno.Error()
	}
	return r
}
