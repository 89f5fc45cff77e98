//go:build linux && reflink

package store

import (
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

// freeBytes returns what is free on a file system, once all is written.
func freeBytes(t *testing.T, path string) int64 {
	t.Helper()
	unix.Sync()
	var s unix.Statfs_t
	if err := unix.Statfs(path, &s); err != nil {
		t.Fatal(err)
	}
	return int64(s.Bfree) * s.Bsize
}

// TestReflink imports on a file system that shares blocks between files, in the folder that
// KVASIR_REFLINK names (`make test-reflink`): the clone costs no space, and what the user does
// with his file does not reach it.
func TestReflink(t *testing.T) {
	base := os.Getenv("KVASIR_REFLINK")
	if base == "" {
		t.Fatal("KVASIR_REFLINK does not name a folder")
	}
	fx := tinyFixture(t)
	user, err := os.MkdirTemp(base, "user")
	if err != nil {
		t.Fatal(err)
	}
	path := writeFiles(t, user, fx.data[0])[0]
	dir, err := os.MkdirTemp(base, "store")
	if err != nil {
		t.Fatal(err)
	}
	s := openStore(t, dir, 1<<20)
	before := freeBytes(t, base)
	m := mustImport(t, s, fx.sums[0].Size, path)
	if took := before - freeBytes(t, base); took > fx.sums[0].Size/4 {
		t.Errorf("a clone of %d bytes took %d", fx.sums[0].Size, took)
	}
	checkKept(t, m, keptClone, []string{path})
	mustImport(t, s, 0, path)
	flipByte(t, path, 3*Group)
	if err := s.Verify(t.Context(), fx.id, nil); err != nil {
		t.Errorf("the user's change reached the clone: %v", err)
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	s.Close()
	s = openStore(t, dir, 1<<20)
	fx.checkHeld(t, s.Model(fx.id))
	if err := s.Remove(fx.id); err != nil {
		t.Fatal(err)
	}
}
