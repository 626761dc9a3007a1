package subprocess

import (
	"context"
	"errors"
	"fmt"
	"os"
	"syscall"

	"github.com/bigwave/bigwave/runner/internal/inside"
	"github.com/bigwave/bigwave/runner/internal/sandbox/box"
)

// Launch starts the init in its namespaces.
func (m *maker) Launch(_ context.Context, p box.Place) (box.Guest, error) {
	ours, theirs, err := box.NewSocket()
	if err != nil {
		return box.Guest{}, err
	}
	defer theirs.Close()
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return box.Guest{}, errors.Join(err, ours.Close())
	}
	defer null.Close()
	var init *os.Process
	// By descriptor, since its ids may not lead it to the file. The program
	// is number 4 in the child.
	start := func() (err error) {
		init, err = os.StartProcess("/proc/self/fd/4", []string{"bigwave-init"}, &os.ProcAttr{
			Dir:   "/",
			Env:   []string{"GOMAXPROCS=1"},
			Files: []*os.File{null, null, os.Stderr, theirs.File, m.init},
			Sys:   m.attributes(p),
		})
		return err
	}
	if m.root {
		err = asOwner(p.IDs.First, start)
	} else {
		err = start()
	}
	if err != nil {
		return box.Guest{}, errors.Join(fmt.Errorf("start the init: %w", err), ours.Close())
	}
	return box.Guest{
		Process:  process{init},
		Control:  ours,
		Layout:   inside.Layout{Steps: m.host.layout(p)},
		Programs: m.host.programs(),
	}, nil
}

func (m *maker) attributes(p box.Place) *syscall.SysProcAttr {
	attr := &syscall.SysProcAttr{
		Cloneflags: syscall.CLONE_NEWUSER | syscall.CLONE_NEWNS | syscall.CLONE_NEWPID |
			syscall.CLONE_NEWNET | syscall.CLONE_NEWIPC | syscall.CLONE_NEWUTS,
		UidMappings:                []syscall.SysProcIDMap{{ContainerID: 0, HostID: p.IDs.First, Size: p.IDs.Count}},
		GidMappings:                []syscall.SysProcIDMap{{ContainerID: 0, HostID: p.IDs.First, Size: p.IDs.Count}},
		GidMappingsEnableSetgroups: m.root,
		Credential:                 &syscall.Credential{NoSetGroups: !m.root},
		Setsid:                     true,
	}
	if !m.root {
		attr.GidMappings[0].HostID = os.Getegid()
	}
	if p.Group != nil && p.Group.InitFD() >= 0 {
		attr.UseCgroupFD, attr.CgroupFD = true, p.Group.InitFD()
	}
	return attr
}

// process is the init as this process's child.
type process struct{ *os.Process }

func (p process) PID() int { return p.Pid }

func (p process) Wait() { _, _ = p.Process.Wait() }
