package store

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"kvasird/ggml/gguf"
	"lukechampine.com/blake3"
	"lukechampine.com/blake3/bao"
)

// TestParallel has writers, liars, droppers and readers at one model at once.
func TestParallel(t *testing.T) {
	fx := newFixture(randomData(1, 24*Group+5), randomData(2, 3*Group))
	dir := t.TempDir()
	s := openStore(t, dir, 26*Group)
	m := fx.create(t, s)
	base, _ := s.Used()
	work := []func() error{
		func() error {
			file, span := fx.randomSpan()
			err := fx.write(m, file, span)
			var full *LimitError
			if errors.As(err, &full) {
				return m.Drop(0, []Span{{0, 12 * Group}})
			}
			return err
		},
		func() error {
			file, span := fx.randomSpan()
			bad := bytes.Clone(fx.data[file][span.Off:span.end()])
			bad[rand.IntN(len(bad))] ^= 0x40
			var wrong *WrongDataError
			if err := m.WriteGroups(file, span.Off, bad); !errors.As(err, &wrong) {
				return fmt.Errorf("a lie was taken: %v", err)
			}
			return nil
		},
		func() error {
			file, span := fx.randomSpan()
			return m.Drop(file, []Span{span})
		},
		func() error {
			file, span := fx.randomSpan()
			got := make([]byte, span.Len)
			n, err := m.ReadAt(file, got, span.Off)
			if err != nil && err != io.EOF && !errors.Is(err, gguf.ErrNotHeld) {
				return err
			}
			if !bytes.Equal(got[:n], fx.data[file][span.Off:][:n]) {
				return fmt.Errorf("wrong bytes were read in %v", span)
			}
			return nil
		},
		m.Flush,
	}
	weights := []int{0, 0, 0, 1, 2, 3, 3, 3, 4}
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 150 {
				if err := work[weights[rand.IntN(len(weights))]](); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
	checkLimit(t, s)
	fx.checkHeld(t, m)
	want := base
	for i := range fx.data {
		want += costOf(m.files[i].held)
	}
	if used, _ := s.Used(); used != want {
		t.Errorf("%d bytes are counted, %d are held", used, want)
	}
	if err := s.Verify(t.Context(), fx.id, nil); err != nil {
		t.Error(err)
	}
	held := heldBytes(m)
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	s = openStore(t, dir, 26*Group)
	if m = s.Model(fx.id); heldBytes(m) != held {
		t.Errorf("%d bytes are held after a restart, %d were", heldBytes(m), held)
	}
	fx.checkHeld(t, m)
}

// randomSpan returns up to four groups of a file.
func (fx *fixture) randomSpan() (file int, s Span) {
	file = rand.IntN(len(fx.data))
	size := fx.sums[file].Size
	off := int64(rand.IntN(groupCount(size))) * Group
	return file, Span{off, min(size-off, int64(1+rand.IntN(4))*Group)}
}

// benchBytes is the size of the file that the benchmarks work on.
const benchBytes = 256 << 20

func BenchmarkWriteGroups(b *testing.B) {
	fx := newFixture(randomData(1, 64<<20))
	s := openStore(b, b.TempDir(), 0)
	m := fx.create(b, s)
	b.SetBytes(1 << 20)
	for i := 0; b.Loop(); i++ {
		off := int64(i%64) << 20
		if off == 0 && i > 0 {
			b.StopTimer()
			if err := m.Drop(0, []Span{fx.whole(0)}); err != nil {
				b.Fatal(err)
			}
			b.StartTimer()
		}
		fx.mustWrite(b, m, 0, Span{off, 1 << 20})
	}
}

// BenchmarkPlain is what WriteGroups is measured against: the same bytes hashed with
// BLAKE3 and written to a file.
func BenchmarkPlain(b *testing.B) {
	data := randomData(1, 1<<20)
	f, err := os.Create(filepath.Join(b.TempDir(), "plain"))
	if err != nil {
		b.Fatal(err)
	}
	defer f.Close()
	b.SetBytes(1 << 20)
	for i := 0; b.Loop(); i++ {
		blake3.Sum256(data)
		if _, err := f.WriteAt(data, int64(i%64)<<20); err != nil {
			b.Fatal(err)
		}
		if i%64 == 63 {
			b.StopTimer()
			if err := errors.Join(f.Sync(), f.Truncate(0)); err != nil {
				b.Fatal(err)
			}
			b.StartTimer()
		}
	}
}

func BenchmarkVerify(b *testing.B) {
	data := randomData(1, 64<<20)
	tree, root := bao.EncodeBuf(data, 8, true)
	leaves, _ := checkTree(int64(len(data)), root, tree)
	b.Run("group", func(b *testing.B) {
		b.SetBytes(Group)
		for i := 0; b.Loop(); i++ {
			if g := i % len(leaves); hashGroup(data[g*Group:(g+1)*Group], g, false) != leaves[g] {
				b.Fatal("wrong")
			}
		}
	})
	b.Run("bao.VerifyChunk", func(b *testing.B) {
		b.SetBytes(Group)
		for i := 0; b.Loop(); i++ {
			if g := i % len(leaves); !bao.VerifyChunk(data[g*Group:(g+1)*Group], tree, 8, uint64(g*Group), root) {
				b.Fatal("wrong")
			}
		}
	})
	b.Run("plain BLAKE3", func(b *testing.B) {
		b.SetBytes(Group)
		for i := 0; b.Loop(); i++ {
			g := i % len(leaves)
			blake3.Sum256(data[g*Group : (g+1)*Group])
		}
	})
}

// BenchmarkTree checks the tree of a file of 77.6 GB.
func BenchmarkTree(b *testing.B) {
	const size = 77_600_000_000
	leaves := make([]words, groupCount(size))
	for i := range leaves {
		leaves[i][0] = uint32(i)
	}
	tree, root := buildTree(size, leaves)
	b.SetBytes(int64(len(tree)))
	for b.Loop() {
		if _, reason := checkTree(size, root, tree); reason != "" {
			b.Fatal(reason)
		}
	}
}

func BenchmarkImport(b *testing.B) {
	path := filepath.Join(b.TempDir(), "data")
	if err := os.WriteFile(path, randomData(1, benchBytes), 0o644); err != nil {
		b.Fatal(err)
	}
	info, err := os.Stat(path)
	if err != nil {
		b.Fatal(err)
	}
	b.SetBytes(benchBytes)
	for b.Loop() {
		if _, _, err := hashFile(b.Context(), stamp(path, info), func(int64) {}); err != nil {
			b.Fatal(err)
		}
	}
}
