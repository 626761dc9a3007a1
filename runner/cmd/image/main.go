// Command image turns the tar of a root file system into an OCI image that
// containerd, Podman and Docker can load without a registry:
//
//	image [-name NAME] ROOTFS.tar OUT.tar
//
// The same tar gives the same bytes.
package main

import (
	"flag"
	"fmt"
	"os"
	"runtime"

	"github.com/distribution/reference"
)

func main() {
	name := flag.String("name", "bigwave/sandbox-base:latest", "what the image is called, as in a policy's base_image")
	flag.Parse()
	if flag.NArg() != 2 {
		fmt.Fprintln(os.Stderr, "usage: image [-name NAME] ROOTFS.tar OUT.tar")
		os.Exit(2)
	}
	digest, err := convert(*name, flag.Arg(0), flag.Arg(1))
	if err != nil {
		fmt.Fprintln(os.Stderr, "image:", err)
		os.Exit(1)
	}
	fmt.Println(digest)
}

// convert writes the root file system in the tar rootfs to out, as an archive
// of the image called name, and returns the digest of its manifest. When it
// fails it leaves no file.
func convert(name, rootfs, out string) (digest string, err error) {
	ref, err := reference.ParseDockerRef(name)
	if err != nil {
		return "", fmt.Errorf("name %q: %w", name, err)
	}
	image, err := newImage(rootfs, runtime.GOARCH)
	if err != nil {
		return "", err
	}
	f, err := os.Create(out)
	if err != nil {
		return "", err
	}
	defer func() {
		if err != nil {
			_ = f.Close()
			_ = os.Remove(out)
		}
	}()
	hash, err := writeArchive(f, image, ref)
	if err != nil {
		return "", fmt.Errorf("write %s: %w", out, err)
	}
	if err := f.Close(); err != nil {
		return "", err
	}
	return hash.String(), nil
}
