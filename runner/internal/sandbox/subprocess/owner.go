package subprocess

import (
	"errors"
	"fmt"
	"runtime"

	"golang.org/x/sys/unix"
)

// Keeps a thread's capabilities when its effective uid changes
// (SECBIT_NO_SETUID_FIXUP).
const noSetUIDFixup = 1 << 2

// asOwner calls start on a thread whose effective uid is uid, with all
// capabilities. The user namespace that it makes then belongs to that uid: the
// kernel counts inotify instances, pending signals, message queues and more of
// a namespace for its owner too, and if all were root's, one sandbox could
// leave none to the others and to the host.
func asOwner(uid int, start func() error) error {
	// The thread is the caller's again only when it is as it was; else it
	// ends with this goroutine.
	result := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		err := become(uid)
		if err == nil {
			err = start()
		}
		if back := unbecome(); back == nil {
			runtime.UnlockOSThread()
		}
		result <- err
	}()
	return <-result
}

func become(uid int) error {
	before, err := unix.PrctlRetInt(unix.PR_GET_SECUREBITS, 0, 0, 0, 0)
	if err == nil {
		err = unix.Prctl(unix.PR_SET_SECUREBITS, uintptr(before|noSetUIDFixup), 0, 0, 0)
	}
	if err == nil {
		err = setEffectiveUID(uid)
	}
	if err != nil {
		return fmt.Errorf("make the sandbox's uid the owner of its user namespace: %w", err)
	}
	return nil
}

// unbecome makes the thread root's again.
func unbecome() error {
	bits, err := unix.PrctlRetInt(unix.PR_GET_SECUREBITS, 0, 0, 0, 0)
	if err != nil {
		return err
	}
	return errors.Join(setEffectiveUID(0), unix.Prctl(unix.PR_SET_SECUREBITS, uintptr(bits&^noSetUIDFixup), 0, 0, 0))
}

// setEffectiveUID is that of this thread only; syscall.Setresuid changes all.
func setEffectiveUID(uid int) error {
	const same = ^uintptr(0)
	if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, same, uintptr(uid), same); errno != 0 {
		return errno
	}
	return nil
}
