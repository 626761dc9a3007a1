package embeddednats_test

import (
	"errors"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

func TestItGoesOnAfterAFullDisk(t *testing.T) {
	disk := t.TempDir()
	if err := syscall.Mount("small", disk, "tmpfs", 0, "size=16m"); err != nil {
		t.Fatalf("a small disk (this test needs root): %v", err)
	}
	t.Cleanup(func() { _ = syscall.Unmount(disk, syscall.MNT_DETACH) })
	s := start(t, filepath.Join(disk, "nats"))
	nc, err := s.Connect("test")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := js.CreateStream(t.Context(), jetstream.StreamConfig{Name: "S", Subjects: []string{"s"}}); err != nil {
		t.Fatal(err)
	}
	publish := func(data []byte) error {
		_, err := js.Publish(t.Context(), "s", data, jetstream.WithRetryAttempts(0))
		return err
	}
	if err := publish([]byte("kept")); err != nil {
		t.Fatal(err)
	}
	filler := filepath.Join(disk, "filler")
	fill(t, filler)
	for began := time.Now(); publish(make([]byte, 1<<20)) == nil; {
		if time.Since(began) > 5*time.Second {
			t.Fatal("a full disk took every message")
		}
	}
	time.Sleep(1500 * time.Millisecond)
	if err := publish(make([]byte, 1<<20)); err == nil {
		t.Fatal("it took a message while the disk was full")
	}
	if err := os.Remove(filler); err != nil {
		t.Fatal(err)
	}
	for began := time.Now(); ; time.Sleep(50 * time.Millisecond) {
		if err = publish([]byte("after")); err == nil {
			break
		}
		if time.Since(began) > 10*time.Second {
			t.Fatalf("it takes no messages again: %v", err)
		}
	}
	stream, err := js.Stream(t.Context(), "S")
	if err != nil {
		t.Fatal(err)
	}
	if first, err := stream.GetMsg(t.Context(), 1); err != nil || string(first.Data) != "kept" {
		t.Errorf("the first message is %v, %v", first, err)
	}
}

// fill leaves no room on the disk of path.
func fill(t *testing.T, path string) {
	t.Helper()
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	for block := make([]byte, 4096); err == nil; {
		_, err = f.Write(block)
	}
	if !errors.Is(err, syscall.ENOSPC) {
		t.Fatalf("fill the disk: %v", err)
	}
	_ = f.Close()
}
