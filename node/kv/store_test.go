package kv

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
)

func openStore(t testing.TB, dir string) *Store {
	t.Helper()
	s, err := OpenStore(dir, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

// listed is every key of a prefix with its value.
func listed(tx *Tx, prefix string) (all []string, err error) {
	err = tx.Each([]byte(prefix), func(k, v []byte) error {
		all = append(all, string(k)+"="+string(v))
		return nil
	})
	return all, err
}

func set(t testing.TB, s *Store, pairs ...string) {
	t.Helper()
	err := s.Update(func(tx *Tx) error {
		for _, p := range pairs {
			k, v, _ := strings.Cut(p, "=")
			if err := tx.Put([]byte(k), []byte(v)); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

func TestStoreUpdate(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "books")
	s := openStore(t, dir)
	set(t, s, "a1=x", "a3=y", "b=z")
	refused := errors.New("refused")
	err := s.Update(func(tx *Tx) error {
		for _, err := range []error{tx.Put([]byte("a2"), []byte("m")), tx.Put([]byte("a3"), []byte("n")), tx.Delete([]byte("a1"))} {
			if err != nil {
				return err
			}
		}
		if all, err := listed(tx, "a"); err != nil || !slices.Equal(all, []string{"a2=m", "a3=n"}) {
			t.Errorf("an update sees %q of its own, %v", all, err)
		}
		if _, ok, err := tx.Get([]byte("a1")); ok || err != nil {
			t.Errorf("what an update removed is there: %v", err)
		}
		return refused
	})
	if err != refused {
		t.Errorf("the update's error is %v", err)
	}
	for range 2 { // and once more after a restart
		if err := s.View(func(tx *Tx) error {
			if all, err := listed(tx, "a"); err != nil || !slices.Equal(all, []string{"a1=x", "a3=y"}) {
				t.Errorf("after an update that failed: %q, %v", all, err)
			}
			if err := tx.Put([]byte("a"), []byte("b")); err != ErrReadOnly {
				t.Errorf("a view writes: %v", err)
			}
			v, ok, err := tx.Get([]byte("b"))
			if string(v) != "z" || !ok || err != nil {
				t.Errorf("b is %q, %v, %v", v, ok, err)
			}
			return nil
		}); err != nil {
			t.Error(err)
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		s = openStore(t, dir)
	}
	for what, fn := range map[string]func(*Tx) error{
		"empty key":   func(tx *Tx) error { return tx.Put(nil, []byte("x")) },
		"empty value": func(tx *Tx) error { return tx.Put([]byte("x"), nil) },
		"much":        func(tx *Tx) error { return tx.Put([]byte("x"), make([]byte, maxUpdate)) },
	} {
		if err := s.Update(fn); err == nil {
			t.Errorf("%s was written", what)
		}
	}
}

// TestStoreTogether: updates that are written together see what those before them left,
// and only those that fail are without effect.
func TestStoreTogether(t *testing.T) {
	s := openStore(t, filepath.Join(t.TempDir(), "books"))
	const callers, each = 40, 25
	var sum, together atomic.Int64
	var last *Tx
	var all sync.WaitGroup
	for c := range callers {
		all.Go(func() {
			for i := range each {
				fail := (c+i)%5 == 0
				err := s.Update(func(tx *Tx) error {
					if last != nil && last.txn == tx.txn { // one goroutine runs all updates
						together.Add(1)
					}
					last = tx
					v, _, err := tx.Get([]byte("n"))
					if err != nil {
						return err
					}
					n, _ := strconv.Atoi(string(v))
					if err := tx.Put([]byte("n"), []byte(strconv.Itoa(n+1))); err != nil {
						return err
					}
					if fail {
						return errors.New("no")
					}
					return nil
				})
				if (err != nil) != fail {
					t.Errorf("update %d of %d: %v", i, c, err)
				}
				if !fail {
					sum.Add(1)
				}
			}
		})
	}
	all.Wait()
	if err := s.View(func(tx *Tx) error {
		v, _, err := tx.Get([]byte("n"))
		if string(v) != fmt.Sprint(sum.Load()) {
			t.Errorf("%s after %d updates", v, sum.Load())
		}
		return err
	}); err != nil {
		t.Error(err)
	}
	if together.Load() == 0 {
		t.Error("no two updates shared a write")
	}
}

func TestStoreRefuses(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "books")
	s := openStore(t, dir)
	if _, err := OpenStore(dir, slog.New(slog.DiscardHandler)); !errors.Is(err, ErrBusy) {
		t.Errorf("opened twice: %v", err)
	}
	set(t, s, "a=1")
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if err := s.Update(func(*Tx) error { return nil }); err != ErrClosed {
		t.Errorf("an update of a closed store: %v", err)
	}
	if err := s.View(func(*Tx) error { return nil }); err != ErrClosed {
		t.Errorf("a view of a closed store: %v", err)
	}
	// Damage is an error, and what is there stays for somebody to look at.
	tables, err := filepath.Glob(filepath.Join(dir, "*.sst"))
	if err != nil || len(tables) == 0 {
		t.Fatalf("tables: %q, %v", tables, err)
	}
	b, err := os.ReadFile(tables[0])
	if err != nil {
		t.Fatal(err)
	}
	for _, at := range []int{2, len(b) / 2, len(b) - 3} {
		if err := errors.Join(flip(tables[0], slices.Clone(b), at), os.Remove(dir+".state")); err != nil {
			t.Fatal(err)
		}
		for range maxOpenings { // badger may panic
			out, err := exec.Command(os.Args[0], "child", "store", dir).CombinedOutput()
			if err == nil || strings.Contains(string(out), "put ") {
				t.Errorf("a store with flipped bits at %d of %d was opened: %.300s", at, len(b), out)
			}
		}
		s, err := OpenStore(dir, slog.New(slog.DiscardHandler))
		if err == nil {
			s.Close()
			t.Errorf("a store with flipped bits at %d of %d was opened", at, len(b))
		} else if !strings.Contains(err.Error(), dir) {
			t.Errorf("the error does not say which store: %v", err)
		}
	}
	if err := errors.Join(os.WriteFile(tables[0], b, 0o600), os.Remove(dir+".state")); err != nil {
		t.Fatal(err)
	}
	if err := openStore(t, dir).View(func(tx *Tx) error {
		if all, err := listed(tx, ""); err != nil || !slices.Equal(all, []string{"a=1"}) {
			t.Errorf("after a copy was put back: %q, %v", all, err)
		}
		return nil
	}); err != nil {
		t.Error(err)
	}
}

// storeChild counts until it is killed, in some updates at a time, and prints what is
// written.
func storeChild(dir string) int {
	s, err := OpenStore(dir, slog.New(slog.NewTextHandler(os.Stdout, nil)))
	if err != nil {
		fmt.Println("cannot open:", err)
		return 3
	}
	for range 4 {
		go func() {
			for {
				var n uint64
				err := s.Update(func(tx *Tx) error {
					v, ok, err := tx.Get([]byte("n"))
					if err != nil {
						return err
					}
					if ok {
						n = binary.BigEndian.Uint64(v)
					}
					n++
					b := binary.BigEndian.AppendUint64(nil, n)
					return errors.Join(tx.Put([]byte("n"), b), tx.Put(append([]byte("j"), b...), noise(n, 300)))
				})
				if err != nil {
					fmt.Println("cannot update:", err)
					os.Exit(3)
				}
				fmt.Println("put", n)
			}
		}()
	}
	select {}
}

// TestStoreKilled: what an update returned for is there after a kill, and of each
// update all or nothing.
func TestStoreKilled(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "books")
	var least uint64
	for round := range 5 {
		cmd := exec.Command(os.Args[0], "child", "store", dir)
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		seen := 0
		for lines := bufio.NewScanner(out); lines.Scan(); {
			text, ok := strings.CutPrefix(lines.Text(), "put ")
			n, err := strconv.ParseUint(text, 10, 64)
			if !ok || err != nil {
				t.Fatal(lines.Text())
			}
			least = max(least, n)
			if seen++; seen == 40+17*round {
				cmd.Process.Kill()
			}
		}
		cmd.Wait()
		s := openStore(t, dir)
		var n, entries uint64
		if err := s.View(func(tx *Tx) error {
			v, _, err := tx.Get([]byte("n"))
			if err == nil {
				n = binary.BigEndian.Uint64(v)
			}
			return errors.Join(err, tx.Each([]byte("j"), func(k, v []byte) error {
				entries++
				if at := binary.BigEndian.Uint64(k[1:]); at != entries || !slices.Equal(v, noise(at, 300)) {
					return fmt.Errorf("entry %d of %d is wrong", at, entries)
				}
				return nil
			}))
		}); err != nil {
			t.Fatal(err)
		}
		if n < least || n != entries {
			t.Errorf("round %d: %d were written, the count is %d with %d entries", round, least, n, entries)
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// BenchmarkStoreUpdate: updates of three keys of many, each on the disk before it counts.
func BenchmarkStoreUpdate(b *testing.B) {
	for _, accounts := range []int{1_000, 1_000_000} {
		s := openStore(b, filepath.Join(b.TempDir(), "books"))
		key := func(i int) []byte { return binary.BigEndian.AppendUint64([]byte("a"), uint64(i)*0x9e3779b97f4a7c15) }
		for i := 0; i < accounts; {
			err := s.Update(func(tx *Tx) error {
				for range min(accounts, 10_000) {
					if err := tx.Put(key(i), []byte("00000000")); err != nil {
						return err
					}
					i++
				}
				return nil
			})
			if err != nil {
				b.Fatal(err)
			}
		}
		for _, callers := range []int{1, 16, 256} {
			b.Run(fmt.Sprintf("accounts=%d/callers=%d", accounts, callers), func(b *testing.B) {
				var next atomic.Int64
				var all sync.WaitGroup
				for range callers {
					all.Go(func() {
						for i := next.Add(1); i <= int64(b.N); i = next.Add(1) {
							if err := s.Update(func(tx *Tx) error {
								for j := range 3 {
									k := key(int(i*7919+int64(j)*104729) % accounts)
									if _, ok, err := tx.Get(k); err != nil || !ok {
										return fmt.Errorf("%v, %w", ok, err)
									}
									if err := tx.Put(k, binary.BigEndian.AppendUint64(nil, uint64(i))); err != nil {
										return err
									}
								}
								return nil
							}); err != nil {
								b.Error(err)
								return
							}
						}
					})
				}
				all.Wait()
				b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "updates/s")
			})
		}
	}
}

// TestStoreLargestBatch: the most that updates may write together is not too much for
// badger, after which nothing more would be written.
func TestStoreLargestBatch(t *testing.T) {
	for _, size := range []int{1, 20, 1000, 100_000} {
		t.Run(fmt.Sprint(size), func(t *testing.T) { largestBatch(t, size) })
	}
}

func largestBatch(t *testing.T, size int) {
	s := openStore(t, filepath.Join(t.TempDir(), "books"))
	fill := func(tx *Tx, prefix string, most int) error { // as many records as fit
		for i := 0; ; i++ {
			key := fmt.Sprint(prefix, i)
			if tx.bytes+len(key)+size+recordBytes > most {
				return nil
			}
			if err := tx.Put([]byte(key), make([]byte, size)); err != nil {
				return err
			}
		}
	}
	begun, proceed := make(chan bool), make(chan bool)
	errs := make(chan error, 2)
	go func() {
		errs <- s.Update(func(tx *Tx) error { close(begun); <-proceed; return fill(tx, "a", storeBytes-1) })
	}()
	<-begun
	go func() { errs <- s.Update(func(tx *Tx) error { return fill(tx, "b", maxUpdate) }) }()
	for len(s.queue) == 0 {
		runtime.Gosched()
	}
	close(proceed)
	for range 2 {
		if err := <-errs; err != nil {
			t.Fatal(err)
		}
	}
	set(t, s, "c=after")
}
