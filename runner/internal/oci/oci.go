// Package oci says in the words of the OCI runtime specification what a
// sandbox's container is. It is pure: the same Container gives the same Spec.
//
// The container is the outer half of the fence: namespaces, a read-only root,
// few devices, cgroups. Its one process is the init, which makes the inner half
// for every call: a uid of its own, no capabilities, the system call filter,
// Landlock, a pid and mount namespace, a masked /proc.
package oci

import (
	"github.com/opencontainers/runtime-spec/specs-go"
)

// Nothing of /proc is masked here: this one is the init's alone. What user code
// has is mounted, and masked, anew for each call.

// Where the init finds itself and the runner's socket, until it has
// connected; then they are gone.
const (
	initPath   = "/run/bigwave/init"
	socketPath = "/run/bigwave/socket"
)

// Container is what differs from one sandbox to the next.
type Container struct {
	Init        string // the init program on the host
	Socket      string // the runner's listening socket on the host
	CgroupsPath string // from the root of each hierarchy; empty: the runtime's own choice
	Rootfs      string // as the runtime takes it; rootfs in its bundle if empty
}

// Spec is the container's specification.
func Spec(c Container) *specs.Spec {
	root := c.Rootfs
	if root == "" {
		root = "rootfs"
	}
	return &specs.Spec{
		Version:  "1.0.2", // of what runtimes have understood for long
		Process:  process(),
		Root:     &specs.Root{Path: root, Readonly: true},
		Hostname: "sandbox",
		Mounts:   mounts(c),
		Linux: &specs.Linux{
			CgroupsPath:       c.CgroupsPath,
			Namespaces:        namespaces(),
			Resources:         resources(),
			Sysctl:            sysctl(),
			RootfsPropagation: "private",
		},
	}
}

// process is the init: root, so that it can give each call away, with no more
// capabilities than that takes.
func process() *specs.Process {
	capabilities := []string{
		"CAP_KILL", "CAP_NET_ADMIN", "CAP_SETGID", "CAP_SETPCAP", "CAP_SETUID", "CAP_SYS_ADMIN", "CAP_SYS_CHROOT",
		"CAP_DAC_OVERRIDE", // until the root is furnished
	}
	score := 0
	return &specs.Process{
		Args: []string{initPath, socketPath},
		Env:  []string{"GOMAXPROCS=1"},
		Cwd:  "/",
		Capabilities: &specs.LinuxCapabilities{
			Bounding:  capabilities,
			Effective: capabilities,
			Permitted: capabilities,
		},
		NoNewPrivileges: true,
		OOMScoreAdj:     &score,
	}
}

func mounts(c Container) []specs.Mount {
	return []specs.Mount{
		{Destination: "/proc", Type: "proc", Source: "proc", Options: []string{"nosuid", "noexec", "nodev"}},
		{Destination: "/dev", Type: "tmpfs", Source: "tmpfs", Options: []string{"nosuid", "noexec", "strictatime", "mode=755", "size=64k"}},
		{Destination: "/run", Type: "tmpfs", Source: "tmpfs", Options: []string{"nosuid", "nodev", "mode=755", "size=64k"}},
		{Destination: initPath, Type: "bind", Source: c.Init, Options: []string{"bind", "ro", "nosuid", "nodev"}},
		{Destination: socketPath, Type: "bind", Source: c.Socket, Options: []string{"bind", "nosuid", "nodev", "noexec"}},
	}
}

// namespaces are all but the user's, which would need a copy of each image per
// range of ids, and the cgroup's, which each call has for itself. The network
// namespace is empty; what a policy lists comes in through the runner.
func namespaces() []specs.LinuxNamespace {
	return []specs.LinuxNamespace{
		{Type: specs.PIDNamespace},
		{Type: specs.MountNamespace},
		{Type: specs.NetworkNamespace},
		{Type: specs.IPCNamespace},
		{Type: specs.UTSNamespace},
	}
}

// resources leave the limits of memory, processes and CPU to the cgroup that
// the container is put in; they are the policy's, which comes later.
func resources() *specs.LinuxResources {
	major := func(n int64) *int64 { return &n }
	devices := []specs.LinuxDeviceCgroup{{Allow: false, Access: "rwm"}}
	for _, minor := range []int64{3, 5, 7, 8, 9} { // null, zero, full, random, urandom
		devices = append(devices, specs.LinuxDeviceCgroup{Allow: true, Type: "c", Major: major(1), Minor: major(minor), Access: "rwm"})
	}
	return &specs.LinuxResources{Devices: devices}
}

// sysctl bounds what System V's objects may take, which outlive the calls that
// made them.
func sysctl() map[string]string {
	return map[string]string{
		"kernel.shmall": "16384", // pages: 64 MiB
		"kernel.msgmni": "64",
		"kernel.sem":    "250 16000 32 64", // in a set, in all, at once, sets
	}
}
