package kv

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
)

// The test binary is also the process that a crash test ends.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == "child" {
		os.Exit(child(os.Args[2], os.Args[3]))
	}
	os.Exit(m.Run())
}

// clock is the time of a test.
type clock struct {
	mu  sync.Mutex // guards now
	now time.Time
}

func (c *clock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now
}

func (c *clock) add(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now = c.now.Add(d)
}

// fixture is a store that may be closed and opened again.
type fixture struct {
	t     *testing.T
	cfg   Config
	clock *clock
	log   bytes.Buffer
	db    *DB
	space *Space
}

func newFixture(t *testing.T, b Bounds) *fixture {
	t.Helper()
	f := &fixture{t: t, clock: &clock{now: time.Now()}}
	f.cfg = Config{
		Path: filepath.Join(t.TempDir(), "kv"), Spaces: map[string]Bounds{"a": b, "b": {time.Hour, 1 << 20}},
		Logger: slog.New(slog.NewTextHandler(&f.log, nil)), Now: f.clock.Now, reserve: 1,
	}
	f.open()
	t.Cleanup(func() { f.db.Close() })
	return f
}

func (f *fixture) open() {
	f.t.Helper()
	db, err := Open(f.cfg)
	if err != nil {
		f.t.Fatal(err)
	}
	f.db, f.space = db, db.Space("a")
}

func (f *fixture) reopen() {
	f.t.Helper()
	if err := errors.Join(f.db.Close(), f.db.Close()); err != nil {
		f.t.Fatal(err)
	}
	f.open()
}

func (f *fixture) put(key string, value []byte) {
	f.t.Helper()
	if err := f.space.Put(f.t.Context(), key, value); err != nil {
		f.t.Fatal(err)
	}
}

// want checks what is under key; nil is nothing.
func (f *fixture) want(key string, value []byte) {
	f.t.Helper()
	got, ok, err := f.space.Get(f.t.Context(), key)
	if err != nil || ok != (value != nil) || !bytes.Equal(got, value) {
		f.t.Errorf("%s: %d bytes, there %v, %v; want %d bytes", key, len(got), ok, err, len(value))
	}
}

// noise is a value that does not repeat itself.
func noise(seed uint64, size int) []byte {
	b := make([]byte, size)
	r := rand.NewChaCha8([32]byte{byte(seed), byte(seed >> 8)})
	r.Read(b)
	return b
}

func TestRestart(t *testing.T) {
	f := newFixture(t, Bounds{time.Hour, 64 << 20})
	sizes := []int{0, 1, maxPart - 1, maxPart, maxPart + 1, 5 << 20}
	for i, size := range sizes {
		f.put(fmt.Sprint("k", i), noise(uint64(i), size))
	}
	f.put("twice", noise(1, 200_000))
	f.put("twice", noise(2, 100))
	f.put("gone", noise(3, 200_000))
	if ok, err := f.space.Delete(t.Context(), "gone"); !ok || err != nil {
		t.Errorf("deleted %v, %v", ok, err)
	}
	other := f.db.Space("b")
	if err := other.Put(t.Context(), "k0", []byte("other")); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		for i, size := range sizes {
			f.want(fmt.Sprint("k", i), noise(uint64(i), size))
		}
		f.want("twice", noise(2, 100))
		f.want("gone", nil)
		f.want("never", nil)
		if ok, err := f.space.Delete(t.Context(), "gone"); ok || err != nil {
			t.Errorf("deleted %v, %v", ok, err)
		}
		if got, ok, err := f.db.Space("b").Get(t.Context(), "k0"); string(got) != "other" || !ok || err != nil {
			t.Errorf("other space: %q, %v, %v", got, ok, err)
		}
		f.reopen()
	}
	if f.log.Len() > 0 {
		t.Errorf("log: %s", f.log.String())
	}
	f.db.Close()
	if _, _, err := f.space.Get(t.Context(), "k0"); !errors.Is(err, ErrClosed) {
		t.Errorf("get after close: %v", err)
	}
	if err := f.space.Put(t.Context(), "k0", nil); !errors.Is(err, ErrClosed) {
		t.Errorf("put after close: %v", err)
	}
}

func TestAge(t *testing.T) {
	f := newFixture(t, Bounds{time.Hour, 64 << 20})
	f.put("old", noise(1, 100_000))
	f.clock.add(30 * time.Minute)
	f.put("new", noise(2, 10))
	f.clock.add(30 * time.Minute)
	f.want("old", noise(1, 100_000))
	f.clock.add(time.Second)
	f.want("old", nil)
	f.want("new", noise(2, 10))
	f.reopen()
	f.want("old", nil)
	f.want("new", noise(2, 10))
	f.clock.add(time.Hour)
	f.want("new", nil)
	if err := f.db.reclaim(); err != nil || len(f.space.index) != 0 || f.space.bytes != 0 {
		t.Errorf("%d values, %d bytes are left, %v", len(f.space.index), f.space.bytes, err)
	}
	f.put("future", noise(3, 10))
	f.clock.add(-24 * time.Hour) // what a wrong clock wrote is kept no longer than from now
	f.reopen()
	f.want("future", noise(3, 10))
	f.clock.add(time.Hour + time.Second)
	f.want("future", nil)
}

func TestBytes(t *testing.T) {
	const bound = 4 << 20
	f := newFixture(t, Bounds{time.Hour, bound})
	const each = 100_000
	for i := range 400 { // ten times the bound
		f.put(fmt.Sprint("k", i), noise(uint64(i), each))
		if f.space.bytes > bound {
			t.Fatalf("%d bytes are kept", f.space.bytes)
		}
	}
	kept := bound / (each + entryOverhead + 4)
	for range 2 {
		for i := range 400 {
			var want []byte
			if i >= 400-kept {
				want = noise(uint64(i), each)
			}
			f.want(fmt.Sprint("k", i), want)
		}
		f.reopen()
	}
	if err := f.space.Put(t.Context(), "large", make([]byte, bound)); !errors.Is(err, ErrTooLarge) {
		t.Errorf("a value as large as the store: %v", err)
	}
	for _, key := range []string{"", strings.Repeat("k", maxKey+1)} {
		if err := f.space.Put(t.Context(), key, nil); err == nil {
			t.Errorf("a key of %d bytes was taken", len(key))
		}
	}
	f.cfg.Spaces["a"] = Bounds{time.Hour, bound / 2} // set lower meanwhile
	f.reopen()
	if f.space.bytes > bound/2 {
		t.Errorf("%d bytes are kept of %d", f.space.bytes, bound/2)
	}
	f.want("k399", noise(399, each))
	f.cfg.reserve = 1 << 60
	f.db.Close()
	if _, err := Open(f.cfg); !errors.Is(err, ErrNoRoom) {
		t.Errorf("open on a full disk: %v", err)
	}
}

func TestFullDisk(t *testing.T) {
	f := newFixture(t, Bounds{time.Hour, 1 << 20})
	f.put("a", []byte("before"))
	f.db.cfg.reserve = 1 << 60
	if err := f.space.Put(t.Context(), "a", []byte("after")); !errors.Is(err, ErrNoRoom) {
		t.Errorf("put: %v", err)
	}
	f.want("a", []byte("before"))
}

// The files do not grow with what was forgotten.
func TestDisk(t *testing.T) {
	const bound = 8 << 20
	f := newFixture(t, Bounds{time.Hour, bound})
	var most int64
	for i := range 1500 { // 200 MB
		f.put(fmt.Sprint("k", i%700), noise(uint64(i), 30_000+(i%20)*10_000))
		if i%20 == 19 {
			most = max(most, diskBytes(t, f.cfg.Path))
		}
	}
	t.Logf("at most %d MB on disk for %d MB", most>>20, bound>>20)
	if limit := int64(2*bound + compactAfter + 2*logFileBytes); most > limit {
		t.Errorf("%d bytes on disk, want at most %d", most, limit)
	}
	f.reopen()
	f.want("k99", noise(1499, 30_000+(1499%20)*10_000))
}

// diskBytes is what the files of a folder take, holes left out.
func diskBytes(t *testing.T, dir string) (n int64) {
	t.Helper()
	err := filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		n += blocks(t, path)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func TestConcurrent(t *testing.T) {
	f := newFixture(t, Bounds{time.Hour, 2 << 20})
	var group sync.WaitGroup
	for w := range 8 {
		group.Go(func() {
			r := rand.New(rand.NewPCG(uint64(w), 1))
			for range 60 {
				key := fmt.Sprint("k", r.IntN(12))
				switch r.IntN(4) {
				case 0:
					if _, err := f.space.Delete(t.Context(), key); err != nil {
						t.Error(err)
					}
				case 1:
					n := r.IntN(300_000)
					if err := f.space.Put(t.Context(), key, bytes.Repeat([]byte{byte(n)}, n)); err != nil {
						t.Error(err)
					}
				default:
					got, _, err := f.space.Get(t.Context(), key)
					if err != nil || len(got) > 0 && (got[0] != byte(len(got)) || bytes.Count(got, got[:1]) != len(got)) {
						t.Errorf("%s: %d bytes mixed of several, %v", key, len(got), err)
					}
				}
			}
		})
	}
	group.Wait()
	if f.log.Len() > 0 {
		t.Errorf("log: %s", f.log.String())
	}
	if _, err := Open(f.cfg); !errors.Is(err, ErrBusy) {
		t.Errorf("a second opening: %v", err)
	}
	f.reopen()
	if f.log.Len() > 0 {
		t.Errorf("log: %s", f.log.String())
	}
}

func TestOpenRefuses(t *testing.T) {
	for _, tt := range []struct {
		name string
		b    Bounds
	}{{"", Bounds{1, 1}}, {"A", Bounds{1, 1}}, {"a\x00", Bounds{1, 1}}, {"a", Bounds{0, 1}}, {"a", Bounds{1, 0}}} {
		if _, err := Open(Config{Path: filepath.Join(t.TempDir(), "kv"), Spaces: map[string]Bounds{tt.name: tt.b}}); err == nil {
			t.Errorf("space %q with %+v was taken", tt.name, tt.b)
		}
	}
}

func FuzzHead(f *testing.F) {
	f.Add(head{serial: 1, at: 2, size: 3, sum: 4}.encode())
	f.Add([]byte{headFormat})
	f.Fuzz(func(t *testing.T, b []byte) {
		h, err := decodeHead(b)
		if err == nil && !bytes.Equal(h.encode(), b) {
			t.Errorf("%x is not the one encoding of %+v", b, h)
		}
	})
}

// Every reason to refuse a head.
func TestHeadRefuses(t *testing.T) {
	good := head{serial: 1, at: 2, size: 3, sum: 4}.encode()
	if _, err := decodeHead(good); err != nil {
		t.Fatal(err)
	}
	damaged := bytes.Clone(good)
	damaged[3]++
	for want, b := range map[string][]byte{
		"bytes, want":    good[:headBytes-1],
		"of format":      append([]byte{2}, good[1:]...),
		"wrong checksum": damaged,
		"negative":       head{size: -1}.encode(),
		"negative size":  head{at: -1}.encode(),
	} {
		if _, err := decodeHead(b); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%x: %v, want %q", b, err, want)
		}
	}
}
