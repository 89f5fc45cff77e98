package store

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"sync/atomic"

	"kvasird/ggml/gguf"
)

// maxHashers bounds how many groups are read and hashed at a time.
const maxHashers = 4

// Import takes a complete local model in: one path of it, or all in order. It reads
// every byte once, for the tree and the hash. The store keeps a clone of the files where
// the file system can make one (Linux: XFS, Btrfs, …), else a hard link where they are on
// the store's file system, else only their names; see keep. They are only read, and are
// not counted against the limit; their trees are. Import of files that are known and
// unchanged, also under new names, reads nothing. A model that was held in part gives its
// own copy up.
//
// Slices, stages and backbones are refused: they are not the whole model.
func (s *Store) Import(ctx context.Context, paths []string, progress func(done, total int64)) (*Model, error) {
	if progress == nil {
		progress = func(int64, int64) {}
	}
	s.importMu.Lock()
	defer s.importMu.Unlock()
	sources, err := wholeModel(paths)
	if err != nil {
		return nil, err
	}
	if m, err := s.known(sources); m != nil || err != nil {
		return m, err
	}
	total, before := int64(0), int64(0)
	for _, src := range sources {
		total += src.Size
	}
	man := &manifest{Version: manifestVersion}
	var trees [][]byte
	for i := range sources {
		src := &sources[i]
		tree, root, err := hashFile(ctx, *src, func(done int64) { progress(before+done, total) })
		if err != nil {
			return nil, fmt.Errorf("store: import %s: %w", src.Path, err)
		}
		before += src.Size
		trees = append(trees, tree)
		man.Files = append(man.Files, manifestFile{gguf.FileSum{Name: filepath.Base(src.Path), Size: src.Size, Root: root}, src})
	}
	id := gguf.ManifestID(man.sums())
	if err := checkSums(id, man.sums()); err != nil {
		return nil, fmt.Errorf("store: import %s: %w", sources[0].Path, err)
	}
	s.opMu.Lock()
	defer s.opMu.Unlock()
	if m := s.Model(id); m != nil {
		return m, s.refer(m, s.keep(m.dir, sources), trees)
	}
	return s.install(id, man, trees)
}

// wholeModel returns the files of a stock model, as they are now.
func wholeModel(paths []string) ([]source, error) {
	if len(paths) == 0 {
		return nil, errors.New("store: no file to import")
	}
	open := gguf.Open
	if len(paths) == 1 {
		open = func(paths ...string) (*gguf.Model, error) { return gguf.OpenModel(paths[0]) }
	}
	g, err := open(paths...)
	if err != nil {
		return nil, err
	}
	defer g.Close()
	if g.Kind() != gguf.Full {
		return nil, fmt.Errorf("store: %s is a %v: only a whole model can be imported", paths[0], g.Kind())
	}
	var sources []source
	for _, p := range g.Parts() {
		path, err := filepath.Abs(p.Path)
		if err != nil {
			return nil, fmt.Errorf("store: %w", err)
		}
		info, err := os.Stat(path)
		if err != nil {
			return nil, fmt.Errorf("store: %w", err)
		}
		sources = append(sources, stamp(path, info))
	}
	return sources, nil
}

// known returns the model whose files these are, unchanged, or nil. It remembers their
// new names.
func (s *Store) known(sources []source) (*Model, error) {
	s.opMu.Lock()
	defer s.opMu.Unlock()
	for _, m := range s.Models() {
		man := m.manifest()
		same, renamed := len(man.Files) == len(sources), false
		moved := make([]source, len(sources))
		for i := 0; same && i < len(sources); i++ {
			old := man.Files[i].Source
			if same = old != nil && old.user().sameFile(sources[i]) && m.HasTree(i); same {
				renamed = renamed || old.Path != sources[i].Path
				moved[i] = *old
				moved[i].Path = sources[i].Path
			}
		}
		switch {
		case same && m.Err() != nil:
			return m, s.refer(m, s.keep(m.dir, sources), nil)
		case same && renamed:
			return m, s.refer(m, moved, nil)
		case same:
			return m, nil
		}
	}
	return nil, nil
}

// refer makes a model that is there one whose bytes are in the given files. trees may
// be nil if they are known. opMu is held.
func (s *Store) refer(m *Model, sources []source, trees [][]byte) error {
	for i, tree := range trees {
		if err := m.SetTree(i, tree); err != nil {
			return err
		}
	}
	m.flushMu.Lock()
	defer m.flushMu.Unlock()
	man := m.manifest()
	for i := range sources {
		man.Files[i].Source = &sources[i]
	}
	if err := s.writeManifest(m.id, man); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.waitIdleLocked()
	for i := range sources {
		old := m.files[i]
		f := &file{
			path: m.sourcePath(i, &sources[i]), source: &sources[i], tree: old.tree, leaves: old.leaves, busy: old.busy,
			held: newGroupSet(sources[i].Size), pending: newGroupSet(sources[i].Size), saved: newGroupSet(sources[i].Size),
		}
		if old.data != nil {
			old.data.Close() // nothing in it is needed any more
		}
		m.files[i] = f
		f.open()
		if old.source == nil && m.removeData(i) {
			s.discharge(m, costOf(old.held)+old.extra)
		}
	}
	m.waiting = 0
	return nil
}

// removeData removes the own data of a file that has a source, and reports whether
// they are gone.
func (m *Model) removeData(i int) bool {
	gone := true
	for _, name := range []string{heldName(i), dataName(i, len(m.sums))} {
		if err := os.Remove(filepath.Join(m.dir, name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			m.store.report(fmt.Errorf("store: %w", err))
			gone = false
		}
	}
	return gone
}

// hashFile computes the tree and the hash of a file in one pass. progress is told how
// many bytes are done, one call at a time.
func hashFile(ctx context.Context, src source, progress func(done int64)) (tree []byte, root [32]byte, err error) {
	f, err := os.Open(src.Path)
	if err != nil {
		return nil, root, err
	}
	defer f.Close()
	if src.Size < 1 || src.Size > MaxModelBytes {
		return nil, root, fmt.Errorf("%d bytes, a file has 1 to %d", src.Size, int64(MaxModelBytes))
	}
	leaves := make([]words, groupCount(src.Size))
	all := func(i int) int { return i }
	err = eachGroup(ctx, f, src.Size, len(leaves), all, func(i int, p []byte) {
		leaves[i] = hashGroup(p, i, len(leaves) == 1)
	}, progress)
	if err != nil {
		return nil, root, err
	}
	info, err := f.Stat()
	if err == nil && !stamp(src.Path, info).sameFile(src) {
		err = errors.New("the file was changed while it was read: import it again")
	}
	tree, root = buildTree(src.Size, leaves)
	return tree, root, err
}

// eachGroup reads the groups group(0), …, group(n-1) of a file of size bytes and calls
// do for each, on several processors at once.
func eachGroup(ctx context.Context, r io.ReaderAt, size int64, n int, group func(int) int,
	do func(i int, p []byte), progress func(done int64)) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var next atomic.Int64
	var mu sync.Mutex // guards done and progress
	done := int64(0)
	var wg sync.WaitGroup
	for range min(runtime.GOMAXPROCS(0), maxHashers, n) {
		wg.Go(func() {
			buf := make([]byte, Group)
			for ctx.Err() == nil {
				at := int(next.Add(1)) - 1
				if at >= n {
					return
				}
				i := group(at)
				off := int64(i) * Group
				p := buf[:min(Group, size-off)]
				if k, err := r.ReadAt(p, off); k < len(p) {
					cancel(fmt.Errorf("read %d of %d bytes at offset %d: %w", k, len(p), off, err))
					return
				}
				do(i, p)
				mu.Lock()
				done += int64(len(p))
				progress(done)
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	return context.Cause(ctx)
}
