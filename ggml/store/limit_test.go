package store

import (
	"errors"
	"io/fs"
	"math/rand/v2"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"

	"kvasird/ggml/gguf"
)

// treeBytes returns the disk space of everything in a folder but what the user has too.
func treeBytes(t *testing.T, dir string) (n int64) {
	t.Helper()
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || path == dir || Kept(d.Name()) {
			return err
		}
		info, err := d.Info()
		if err == nil {
			n += allocated(info)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// checkLimit fails when more is on disk than is counted, or than may be.
func checkLimit(t *testing.T, s *Store) {
	t.Helper()
	used, reserved := s.Used()
	if disk := treeBytes(t, s.dir); disk > used || used+reserved > s.limit {
		t.Fatalf("%d bytes on disk, %d counted, %d reserved, the limit is %d", disk, used, reserved, s.limit)
	}
}

func TestLimit(t *testing.T) {
	fx := newFixture(randomData(1, 40*Group+3))
	const limit = 20 * Group
	dir := t.TempDir()
	c := newCrasher(1 << 30)
	for round := range 3 { // half-done downloads, each ended by a crash
		s, err := open(dir, limit, &disk{before: c.before})
		if err != nil {
			t.Fatal(err)
		}
		m := fx.create(t, s)
		checkLimit(t, s)
		refused := 0
		for _, g := range rand.Perm(40) {
			err := fx.write(m, 0, Span{int64(g) * Group, Group})
			var full *LimitError
			switch {
			case errors.As(err, &full):
				refused++
				if full.Limit != limit || full.Used+full.Need <= limit {
					t.Errorf("refused without a cause: %v", err)
				}
			case err != nil:
				t.Fatal(err)
			}
			checkLimit(t, s)
			if g%8 == 0 {
				if err := m.Flush(); err != nil {
					t.Fatal(err)
				}
				checkLimit(t, s)
			}
		}
		if held := heldBytes(m); refused == 0 || held < limit-2*Group {
			t.Errorf("round %d: %d refused, %d bytes held under a limit of %d", round, refused, held, limit)
		}
		if err := m.Drop(0, []Span{{0, 13 * Group}}); err != nil {
			t.Fatal(err)
		}
		checkLimit(t, s)
		if round == 1 {
			c.dieAfter(0) // what was not flushed is lost, its space must come back
		}
		s.Close()
		c.dieAfter(1 << 30)
	}
	// A lower limit leaves what is there, and takes no more.
	s := openStore(t, dir, Group)
	m := s.Model(fx.id)
	missing := m.Missing(0, []Span{fx.whole(0)})
	var full *LimitError
	if err := fx.write(m, 0, Span{missing[0].Off, min(missing[0].Len, Group)}); !errors.As(err, &full) {
		t.Errorf("above the limit: %v", err)
	}
	fx.checkHeld(t, m)
	other := newFixture(randomData(2, 10))
	if _, err := s.Create(other.id, other.sums); !errors.As(err, &full) {
		t.Errorf("a new model above the limit: %v", err)
	}
}

func TestReserve(t *testing.T) {
	a, b := newFixture(randomData(1, 12*Group)), newFixture(randomData(2, 12*Group))
	s := openStore(t, t.TempDir(), 20*Group)
	ma, mb := a.create(t, s), b.create(t, s)
	release, err := ma.Reserve(map[int][]Span{0: {a.whole(0)}})
	if err != nil {
		t.Fatal(err)
	}
	var full *LimitError
	if _, err := mb.Reserve(map[int][]Span{0: {b.whole(0)}}); !errors.As(err, &full) {
		t.Errorf("two downloads of 12 groups were promised 20: %v", err)
	}
	if err := b.write(mb, 0, b.whole(0)); !errors.As(err, &full) {
		t.Errorf("reserved space was taken by another model: %v", err)
	}
	b.mustWrite(t, mb, 0, Span{0, 4 * Group})
	a.mustWrite(t, ma, 0, Span{0, 10 * Group}) // out of the reservation
	checkLimit(t, s)
	if _, reserved := s.Used(); reserved != 2*groupCost(Group) {
		t.Errorf("%d bytes are still reserved, want two groups", reserved)
	}
	release()
	release()
	if _, reserved := s.Used(); reserved != 0 {
		t.Errorf("%d bytes are reserved after the release", reserved)
	}
	again, err := mb.Reserve(map[int][]Span{0: {b.whole(0)}})
	if err == nil {
		t.Error("8 more groups were promised, 5 are free")
		again()
	}
	if again, err = mb.Reserve(map[int][]Span{0: {{0, 8 * Group}}}); err != nil {
		t.Errorf("4 of the 8 groups are held, 4 fit: %v", err)
	}
	if err := s.Remove(b.id); err != nil {
		t.Fatal(err)
	}
	again()
	if _, reserved := s.Used(); reserved != 0 {
		t.Errorf("%d bytes are reserved by a model that was removed", reserved)
	}
	if _, err := ma.Reserve(map[int][]Span{1: {a.whole(0)}}); err == nil {
		t.Error("space for a file that there is not was reserved")
	}
}

// fillUp writes all it can, and returns the first error of a full disk.
func (fx *fixture) fillUp(t *testing.T, m *Model) *gguf.DiskFullError {
	t.Helper()
	var first *gguf.DiskFullError
	for _, s := range m.Missing(0, []Span{fx.whole(0)}) {
		for g := range groupsIn([]Span{s}) {
			off := int64(g) * Group
			err := fx.write(m, 0, Span{off, min(Group, fx.sums[0].Size-off)})
			var full *gguf.DiskFullError
			if errors.As(err, &full) {
				if first == nil {
					first = full
				}
			} else if err != nil {
				t.Fatal(err)
			}
		}
	}
	return first
}

// checkFullDisk fills a store whose disk is too small, gives it room, and looks on.
func checkFullDisk(t *testing.T, fx *fixture, dir string, d *disk, grow func()) {
	s, err := open(dir, 0, d)
	if err != nil {
		t.Fatal(err)
	}
	m := fx.create(t, s)
	fx.mustWrite(t, m, 0, Span{0, 2 * Group})
	if err := m.Flush(); err != nil {
		t.Fatal(err)
	}
	full := fx.fillUp(t, m)
	if full == nil || full.Path != m.Path(0) || full.Missing != Group || !strings.Contains(full.Error(), m.Path(0)) {
		t.Fatalf("the full disk is %v, want a *gguf.DiskFullError with path and bytes", full)
	}
	held := heldBytes(m)
	if held < 2*Group || m.Complete() {
		t.Fatalf("%d bytes are held on a full disk", held)
	}
	fx.checkHeld(t, m)
	// Space can be given back, and be used again.
	if err := m.Drop(0, []Span{{0, Group}}); err != nil {
		t.Fatalf("Drop on a full disk: %v", err)
	}
	fx.checkHeld(t, m)
	s.Close() // may fail: the set needs room too

	if s, err = open(dir, 0, d); err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	m = s.Model(fx.id)
	fx.checkHeld(t, m)
	if m.Holds(0, 0, 1) || !m.Holds(0, Group, 1) {
		t.Error("what was dropped or flushed is not remembered")
	}
	grow()
	if full := fx.fillUp(t, m); full != nil || !m.Complete() {
		t.Fatalf("with space again: %v, complete %v", full, m.Complete())
	}
	if err := m.Flush(); err != nil {
		t.Fatal(err)
	}
	fx.checkHeld(t, m)
}

func TestFullDisk(t *testing.T) {
	fx := newFixture(randomData(1, 30*Group+3))
	for _, errno := range []syscall.Errno{syscall.ENOSPC, syscall.EDQUOT} {
		var left atomic.Int64 // changes until the disk is full
		left.Store(30)
		d := &disk{before: func(op, path string) error {
			if left.Add(-1) < 0 && (op == "write" && strings.HasSuffix(path, ".gguf") || op == "create") {
				return errno
			}
			return nil
		}}
		checkFullDisk(t, fx, t.TempDir(), d, func() { left.Store(1 << 30) })
	}
}
