package store

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// keeping opens a store that keeps imported files in one way: where the file system of
// the tests cannot clone, a copy stands for a clone.
func keeping(t *testing.T, way, dir string, limit int64) *Store {
	t.Helper()
	d := &disk{clone: copyFile}
	d.before = func(op, _ string) error {
		if (op == keptClone || op == keptLink) && op != way {
			return errors.ErrUnsupported
		}
		return nil
	}
	s, err := open(dir, limit, d)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

// copyFile does what cloneFile does, at some cost.
func copyFile(from, to string) error {
	b, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	info, err := os.Stat(from)
	if err != nil {
		return err
	}
	return errors.Join(os.WriteFile(to, b, 0o644), os.Chtimes(to, info.ModTime(), info.ModTime()))
}

// checkKept checks where the bytes of a model are read.
func checkKept(t *testing.T, m *Model, way string, paths []string) {
	t.Helper()
	for i, path := range paths {
		got, err := os.Stat(m.Path(i))
		if err != nil {
			t.Fatal(err)
		}
		user, err := os.Stat(path)
		if err != nil {
			t.Fatal(err)
		}
		if inside := filepath.Dir(m.Path(i)) == m.dir; inside != (way != "") || os.SameFile(got, user) != (way != keptClone) {
			t.Errorf("file %d is read at %s, want it kept as %q", i, m.Path(i), way)
		}
	}
}

// TestImportOfSymbolicLink: what is kept is the file, not the link to it.
func TestImportOfSymbolicLink(t *testing.T) {
	fx := tinyFixture(t)
	path := writeFiles(t, t.TempDir(), fx.data[0])[0]
	name := filepath.Join(t.TempDir(), "name.gguf")
	if err := os.Symlink(path, name); err != nil {
		t.Fatal(err)
	}
	m := mustImport(t, keeping(t, keptLink, t.TempDir(), 0), fx.sums[0].Size, name)
	checkKept(t, m, keptLink, []string{path})
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	fx.checkHeld(t, m)
}

// TestKeptFileStays has the user delete or change what he gave: a clone is not touched by
// it, a link only by changes, and neither is written to.
func TestKeptFileStays(t *testing.T) {
	fx := tinyFixture(t)
	for _, tt := range []struct {
		name, way string
		change    func(path string) error
		noted     bool
	}{
		{"clone, deleted", keptClone, os.Remove, false},
		{"clone, changed", keptClone, func(p string) error { return os.Truncate(p, 1000) }, false},
		{"link, deleted", keptLink, os.Remove, false},
		{"link, replaced", keptLink, func(p string) error {
			return errors.Join(os.WriteFile(p+"x", []byte("another"), 0o644), os.Rename(p+"x", p))
		}, false},
		{"link, changed", keptLink, func(p string) error { return os.Chtimes(p, time.Time{}, time.Unix(1e9, 0)) }, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir, path := t.TempDir(), writeFiles(t, t.TempDir(), fx.data[0])[0]
			s := keeping(t, tt.way, dir, 0)
			m := mustImport(t, s, fx.sums[0].Size, path)
			if err := tt.change(path); err != nil {
				t.Fatal(err)
			}
			want := fx.sums[0].Size
			if tt.noted {
				want = 0
			}
			for range 2 {
				if _, err := m.ReadAt(0, make([]byte, 10), 100); (err != nil) != tt.noted || heldBytes(m) != want {
					t.Errorf("read: %v, %d bytes held", err, heldBytes(m))
				}
				if err := fx.write(m, 0, Span{0, Group}); (err != nil) != tt.noted {
					t.Errorf("write: %v", err)
				}
				s.Close()
				s = keeping(t, tt.way, dir, 0)
				m = s.Model(fx.id)
			}
			if b, err := os.ReadFile(m.Path(0)); err != nil || !bytes.Equal(b, fx.data[0]) {
				t.Errorf("what is kept is not what was given: %v", err)
			}
			if tt.noted {
				mustImport(t, s, fx.sums[0].Size, path)
			} else {
				checkKept(t, m, tt.way, nil)
			}
			fx.checkHeld(t, m)
		})
	}
}

// TestImportCutShort lets each change on disk of an import into a model that is held in part be
// the last one. The user's file stays as it is, and another import mends the model.
func TestImportCutShort(t *testing.T) {
	fx := tinyFixture(t)
	for _, way := range []string{keptClone, keptLink, ""} {
		for n := 0; ; n += stride() {
			base := memoryDir(t)
			dir := filepath.Join(base, "store")
			path := writeFiles(t, base, fx.data[0])[0]
			s := keeping(t, way, dir, 0)
			m := fx.create(t, s)
			fx.mustWrite(t, m, 0, Span{0, 4 * Group})
			if err := m.Flush(); err != nil {
				t.Fatal(err)
			}
			left, allowed := n, s.disk.before
			s.disk.before = func(op, path string) error {
				if left--; left < 0 {
					return errCrash
				}
				return allowed(op, path)
			}
			_, cut := s.Import(t.Context(), []string{path}, nil)
			s.Close()
			s = keeping(t, way, dir, 0)
			if m = s.Model(fx.id); m == nil {
				t.Fatalf("%q, change %d: the model is lost: %v", way, n, s.Problems())
			}
			if _, err := s.Import(t.Context(), []string{path}, nil); err != nil {
				t.Errorf("%q, change %d: imported again: %v", way, n, err)
			}
			fx.checkHeld(t, m)
			if b, err := os.ReadFile(path); err != nil || !bytes.Equal(b, fx.data[0]) {
				t.Fatalf("%q, change %d: the user's file was changed: %v", way, n, err)
			}
			s.Close()
			os.RemoveAll(base)
			if cut == nil && left >= 0 {
				break
			}
		}
	}
}
