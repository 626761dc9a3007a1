package inside

import (
	"io"
	"os"
	"reflect"
	"strings"
	"syscall"
	"testing"
)

func TestPackets(t *testing.T) {
	layout := Layout{
		Hostname: "h", UID: 1000, GID: 1001, Groups: true, CgroupFD: -1,
		Filter: "\x06\x00\x00", Landlock: 7,
		Limits: Rlimits{AddressSpace: 1 << 40, Processes: 7},
		Steps: []Step{
			{Kind: StepDir, Path: "/a", Mode: 0o755},
			{Kind: StepBind, Path: "/usr", Data: "/usr", FD: -1, Writable: true, Device: true, File: true},
			{Kind: StepFile, Path: "/etc/x", Data: strings.Repeat("x", 5000), FD: 3},
		},
	}
	layout.Offers = []Offer{{Path: "/srv/a"}, {Path: "/srv/b"}}
	limits := Limits{TmpBytes: 1 << 33, ShmBytes: 5, WorkspaceBytes: 1 << 34, Rlimits: Rlimits{Processes: 9}, Mounts: []Mount{
		{Path: "/data/proj", FD: -1, Offer: 1, Sub: "proj", Writable: true}, {Path: "/x", FD: 2},
	}}
	trouble := Trouble{Step: "mount", Errno: 13}
	sockets := []Socket{{Family: 2, Type: 1}, {Family: 16, Type: 3, Protocol: 12}}
	ended := Ended{ID: 9, Errno: 11, Status: 0x8b, CPU: 1 << 50}
	for name, c := range map[string]struct {
		packet []byte
		parse  func([]byte) (any, error)
		want   any
	}{
		"layout":  {AppendLayout(nil, layout), func(b []byte) (any, error) { return wrap(ParseLayout(b)) }, layout},
		"limits":  {AppendLimits(nil, limits), func(b []byte) (any, error) { return wrap(ParseLimits(b)) }, limits},
		"trouble": {AppendTrouble(nil, KindUp, trouble), func(b []byte) (any, error) { return wrap(ParseTrouble(b)) }, trouble},
		"ended":   {AppendEnded(nil, ended), func(b []byte) (any, error) { return wrap(ParseEnded(b)) }, ended},
		"sockets": {AppendSockets(nil, sockets), func(b []byte) (any, error) { return wrap(ParseSockets(b)) }, sockets},
		"id":      {AppendID(nil, KindKill, 77), func(b []byte) (any, error) { return wrap(ParseID(b)) }, uint32(77)},
	} {
		got, err := c.parse(c.packet[1:])
		if err != nil || !reflect.DeepEqual(got, c.want) {
			t.Errorf("%s: got %+v, %v", name, got, err)
		}
		for n := range len(c.packet) - 1 {
			if _, err := c.parse(c.packet[1 : 1+n]); err == nil {
				t.Errorf("%s: %d bytes of %d were enough", name, n, len(c.packet)-1)
			}
		}
	}
}

func wrap[T any](v T, err error) (any, error) { return v, err }

func FuzzParseLayout(f *testing.F) {
	f.Add(AppendLayout(nil, Layout{Steps: []Step{{Path: "x"}}})[1:])
	f.Fuzz(func(t *testing.T, b []byte) {
		l, err := ParseLayout(b)
		if err != nil {
			return
		}
		again, err := ParseLayout(AppendLayout(nil, l)[1:])
		if err != nil || !reflect.DeepEqual(l, again) {
			t.Errorf("%+v became %+v, %v", l, again, err)
		}
	})
}

func TestNotes(t *testing.T) {
	want := Note{Kind: NoteExited, Status: 9, Killed: 2, A: -1, B: 1 << 60, CPU: 3, MaxRSS: 4}
	var packet [NoteSize]byte
	PutNote(&packet, &want)
	if got, err := ParseNote(packet[:]); err != nil || got != want {
		t.Errorf("got %+v, %v", got, err)
	}
	if _, err := ParseNote(packet[1:]); err == nil {
		t.Error("a short note was read")
	}
}

func TestRequest(t *testing.T) {
	b := AppendRequest(nil, Request{Op: OpExec, Path: "/bin/bash", Argv: []string{"bash", "-c", ""}, Env: []string{"A=b"}, Body: true, Max: 5})
	if want := "/bin/bash\x00\x00bash\x00-c\x00\x00A=b\x00"; string(b[RequestHeader:]) != want {
		t.Errorf("got %q", b[RequestHeader:])
	}
}

func TestSockets(t *testing.T) {
	pair, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_SEQPACKET|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer syscall.Close(pair[1])
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if err := Send(pair[0], []byte("hello"), int(w.Fd()), int(w.Fd())); err != nil {
		t.Fatal(err)
	}
	_ = w.Close()
	buffer := make([]byte, 16)
	n, fds, err := Receive(pair[1], buffer)
	if err != nil || string(buffer[:n]) != "hello" || len(fds) != 2 {
		t.Fatalf("got %q, %v, %v", buffer[:n], fds, err)
	}
	if _, err := syscall.Write(fds[1], []byte("x")); err != nil {
		t.Error(err)
	}
	closeAll(fds)
	if content, err := io.ReadAll(r); err != nil || string(content) != "x" {
		t.Errorf("got %q, %v", content, err)
	}
	if err := Send(pair[0], make([]byte, 100)); err != nil {
		t.Fatal(err)
	}
	if _, _, err := Receive(pair[1], buffer); err == nil {
		t.Error("a packet was cut short without a word")
	}
	_ = syscall.Close(pair[0])
	if _, _, err := Receive(pair[1], buffer); err != io.EOF {
		t.Errorf("got %v at the end", err)
	}
	if err := Send(pair[1], []byte("x")); err == nil {
		t.Error("sent to nobody")
	}
}
