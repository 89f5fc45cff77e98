package store

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// flipByte changes a byte of a file, but not the time that the file shows.
func flipByte(t *testing.T, path string, off int64) {
	t.Helper()
	info, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	b := make([]byte, 1)
	if _, err := f.ReadAt(b, off); err != nil {
		t.Fatal(err)
	}
	b[0] ^= 1
	if _, err := f.WriteAt(b, off); err != nil {
		t.Fatal(err)
	}
	if err := os.Chtimes(path, info.ModTime(), info.ModTime()); err != nil {
		t.Fatal(err)
	}
}

func TestVerifyDropsWhatRotted(t *testing.T) {
	fx, dir := newFixture(randomData(1, 1000), randomData(2, 5*Group+8)), t.TempDir()
	s := openStore(t, dir, 0)
	m := fx.create(t, s)
	fx.mustWrite(t, m, 0, fx.whole(0))
	fx.mustWrite(t, m, 1, fx.whole(1))
	if err := m.Drop(1, []Span{{0, Group}}); err != nil {
		t.Fatal(err)
	}
	for _, off := range []int64{Group, 3*Group - 1, 5*Group + 7} {
		flipByte(t, m.Path(1), off)
	}
	w := &watch{t: t}
	err := s.Verify(t.Context(), fx.id, w.progress)
	var damaged *DamagedError
	if !errors.As(err, &damaged) || len(damaged.Spans) != 1 || len(damaged.Spans[1]) != 2 ||
		damaged.Spans[1][0] != (Span{Group, 2 * Group}) || damaged.Spans[1][1] != (Span{5 * Group, 8}) {
		t.Fatalf("Verify = %v, want the three groups", err)
	}
	if w.last != 1000+4*Group+8 {
		t.Errorf("%d bytes were verified", w.last)
	}
	for range 2 {
		fx.checkHeld(t, m)
		if heldBytes(m) != 1000+2*Group {
			t.Errorf("%d bytes are held", heldBytes(m))
		}
		if err := s.Verify(t.Context(), fx.id, nil); err != nil {
			t.Errorf("after the drop: %v", err)
		}
		s.Close()
		s = openStore(t, dir, 0)
		m = s.Model(fx.id)
	}
	fx.mustWrite(t, m, 1, fx.whole(1))
	if err := s.Verify(t.Context(), fx.id, nil); err != nil || !m.Complete() {
		t.Errorf("fetched again: complete %v, %v", m.Complete(), err)
	}
}

func TestVerifyOfImport(t *testing.T) {
	fx, dir := tinyFixture(t), t.TempDir()
	path := writeFiles(t, t.TempDir(), fx.data[0])[0]
	s := openStore(t, dir, 0)
	m := mustImport(t, s, fx.sums[0].Size, path)
	flipByte(t, path, 3*Group)
	var damaged *DamagedError
	if err := s.Verify(t.Context(), fx.id, nil); !errors.As(err, &damaged) || damaged.Spans[0][0] != (Span{3 * Group, Group}) {
		t.Fatalf("Verify = %v, want the group", err)
	}
	if err := s.Pin(fx.id, true); err != nil {
		t.Fatal(err)
	}
	w := &watch{t: t}
	other, err := s.Import(t.Context(), []string{path}, w.progress)
	if err != nil || w.last != fx.sums[0].Size || other == m {
		t.Fatalf("the damaged file was imported as %v after %d bytes: %v", other.ID(), w.last, err)
	}
	if err := s.Remove(other.ID()); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if m.Err() == nil || heldBytes(m) != 0 {
			t.Errorf("a damaged import: Err %v, %d bytes held", m.Err(), heldBytes(m))
		}
		s.Close()
		s = openStore(t, dir, 0)
		m = s.Model(fx.id)
	}
	flipByte(t, path, 3*Group)
	mustImport(t, s, fx.sums[0].Size, path)
	fx.checkHeld(t, m)
}

// TestLostState damages each file of the store's own: nothing wrong may be held, and
// nothing may keep the store from opening.
func TestLostState(t *testing.T) {
	fx := newFixture(randomData(1, 6*Group+8))
	for _, tt := range []struct {
		name, file string
		damage     func(path string) error
		held, back int64 // after Open, after Verify
	}{
		{"set torn", heldName(0), func(p string) error { return os.Truncate(p, 30) }, 0, 4 * Group},
		{"set empty", heldName(0), func(p string) error { return os.Truncate(p, 0) }, 0, 4 * Group},
		{"set flipped", heldName(0), func(p string) error { flipByte(t, p, 49); return nil }, 0, 4 * Group},
		{"set gone", heldName(0), os.Remove, 0, 0}, // as in a new model: the data are given back
		{"data gone", dataName(0, 1), os.Remove, 0, 0},
		{"data shorter", dataName(0, 1), func(p string) error { return os.Truncate(p, 3*Group) }, 0, 3 * Group},
		{"data longer", dataName(0, 1), func(p string) error { return os.Truncate(p, 9*Group) }, 0, 4 * Group},
		{"tree gone", treeName(0), os.Remove, 4 * Group, 4 * Group},
		{"tree flipped", treeName(0), func(p string) error { flipByte(t, p, 90); return nil }, 4 * Group, 4 * Group},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir := t.TempDir()
			s := openStore(t, dir, 0)
			m := fx.create(t, s)
			fx.mustWrite(t, m, 0, Span{0, 4 * Group})
			if err := s.Close(); err != nil {
				t.Fatal(err)
			}
			if err := tt.damage(filepath.Join(m.dir, tt.file)); err != nil {
				t.Fatal(err)
			}
			s = openStore(t, dir, 100*Group)
			m = s.Model(fx.id)
			if m == nil || heldBytes(m) != tt.held {
				t.Fatalf("opened as %v, want %d bytes held", m, tt.held)
			}
			checkLimit(t, s)
			fx.checkHeld(t, m)
			if err := m.SetTree(0, fx.trees[0]); err != nil {
				t.Fatal(err)
			}
			if err := s.Verify(t.Context(), fx.id, nil); err != nil {
				t.Error(err)
			}
			if heldBytes(m) != tt.back {
				t.Errorf("%d bytes are held after Verify, want %d", heldBytes(m), tt.back)
			}
			checkLimit(t, s)
			fx.checkHeld(t, m)
			s.Close()
			s = openStore(t, dir, 100*Group)
			if m = s.Model(fx.id); heldBytes(m) != tt.back || len(s.Problems()) > 0 {
				t.Errorf("the next time %d bytes are held, problems %v", heldBytes(m), s.Problems())
			}
			checkLimit(t, s)
			fx.mustWrite(t, m, 0, fx.whole(0))
			if !m.Complete() {
				t.Error("it could not be completed")
			}
		})
	}
}

func TestBrokenManifest(t *testing.T) {
	fx, other, dir := newFixture(randomData(1, Group)), newFixture(randomData(2, 10)), t.TempDir()
	s := openStore(t, dir, 0)
	m := fx.create(t, s)
	fx.mustWrite(t, m, 0, fx.whole(0))
	other.create(t, s)
	s.Close()
	if err := os.Truncate(filepath.Join(m.dir, manifestName), 20); err != nil {
		t.Fatal(err)
	}
	s = openStore(t, dir, 100*Group)
	if len(s.Problems()) != 1 || s.Model(fx.id) != nil || s.Model(other.id) == nil {
		t.Errorf("problems %v, models %v", s.Problems(), s.Models())
	}
	checkLimit(t, s)
	if _, err := s.Create(fx.id, fx.sums); err == nil || !strings.Contains(err.Error(), "remove it first") {
		t.Errorf("created over one that cannot be read: %v", err)
	}
	if err := s.Remove(fx.id); err != nil {
		t.Error(err)
	}
	fx.create(t, s)
	checkLimit(t, s)
}
