package store

import (
	"errors"
	"testing"

	"golang.org/x/sys/unix"
)

// TestFullTmpfs fills a real file system. Where this process may not mount one,
// TestFullDisk alone shows what a full disk does.
func TestFullTmpfs(t *testing.T) {
	dir := t.TempDir()
	err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=5m")
	if errors.Is(err, unix.EPERM) {
		t.Log("this process may not mount a file system")
		return
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Error(err)
		}
	})
	fx := newFixture(randomData(1, 30*Group+3))
	checkFullDisk(t, fx, dir, &disk{}, func() {
		if err := unix.Mount("tmpfs", dir, "tmpfs", unix.MS_REMOUNT, "size=64m"); err != nil {
			t.Fatal(err)
		}
	})
}
