package store

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"kvasird/ggml/gguf"
)

// load reads a model's folder. What of a file cannot be trusted is not held.
func (s *Store) load(id gguf.ModelID) (*Model, error) {
	dir := s.folder(id)
	text, err := readLimited(filepath.Join(dir, manifestName), maxManifestBytes)
	if err != nil {
		return nil, err
	}
	man, err := parseManifest(id, text)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", filepath.Join(dir, manifestName), err)
	}
	m := newModel(s, id, dir, man)
	m.used = baseCost(text)
	for i, mf := range man.Files {
		f := &file{source: mf.Source, busy: make(map[int]bool)}
		m.files = append(m.files, f)
		f.held, f.pending, f.saved = newGroupSet(mf.Size), newGroupSet(mf.Size), newGroupSet(mf.Size)
		err := m.loadTree(i)
		if f.source != nil {
			f.path = m.sourcePath(i, f.source)
			f.open()
			m.removeData(i) // a crash may have left it
		} else {
			f.path = filepath.Join(dir, dataName(i, len(man.Files)))
			err = errors.Join(err, m.loadData(i))
		}
		if f.source == nil || f.source.Kept == "" {
			err = errors.Join(err, removeKept(dir, i, len(man.Files)))
		}
		if err != nil {
			m.closeFiles()
			return nil, err
		}
	}
	return m, m.sweep()
}

// sweep removes what a crash left in the folder.
func (m *Model) sweep() error {
	entries, err := os.ReadDir(m.dir)
	for _, e := range entries {
		if strings.HasSuffix(e.Name(), ".tmp") {
			err = errors.Join(err, os.Remove(filepath.Join(m.dir, e.Name())))
		}
	}
	return err
}

// loadTree opens the tree of file i if it is there and right; a wrong one is removed.
func (m *Model) loadTree(i int) error {
	f, sum := m.files[i], m.sums[i]
	path := filepath.Join(m.dir, treeName(i))
	tree, err := readLimited(path, treeSize(sum.Size))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err == nil {
		if _, reason := checkTree(sum.Size, sum.Root, tree); reason != "" {
			err = errors.New(reason)
		}
	}
	if err != nil {
		m.store.report(fmt.Errorf("store: %s is damaged, it was removed: %w", path, err))
		return os.Remove(path)
	}
	if f.tree, err = os.Open(path); err != nil {
		return err
	}
	m.used += blocks(treeSize(sum.Size))
	return nil
}

// open opens an imported file, unless it is not what it was.
func (f *file) open() {
	data, err := os.Open(f.path)
	if err == nil {
		f.data = data
		err = f.unchanged()
	}
	if err != nil {
		f.lose(fmt.Errorf("store: the imported file is gone or was changed (import it again or remove the model): %w", err))
		return
	}
	f.held.fill()
}

// sourcePath returns where the bytes of an imported file are read.
func (m *Model) sourcePath(i int, src *source) string {
	if src.Kept != "" {
		return filepath.Join(m.dir, keptName(i, len(m.sums)))
	}
	return src.Path
}

// loadData opens the sparse file of a model that the store fills.
func (m *Model) loadData(i int) error {
	f, sum := m.files[i], m.sums[i]
	var err error
	if f.data, err = os.OpenFile(f.path, os.O_RDWR|os.O_CREATE, 0o644); err != nil {
		return err
	}
	info, err := f.data.Stat()
	if err != nil {
		return err
	}
	path := filepath.Join(m.dir, heldName(i))
	text, err := readLimited(path, heldSize(sum.Size))
	held := f.held
	if err == nil {
		held, err = decodeHeld(sum.Size, sum.Root, text)
	}
	if err == nil && info.Size() != sum.Size {
		err = fmt.Errorf("%s has %d bytes, want %d", f.path, info.Size(), sum.Size)
	}
	if err == nil || errors.Is(err, fs.ErrNotExist) && info.Size() == sum.Size {
		f.held, f.saved = held, held.clone()
		m.punch(i, f.held.spans([]Span{{0, sum.Size}}, false))
	} else {
		f.suspect = true
		m.store.report(fmt.Errorf("store: %s: nothing of this file counts as held until it is verified: %w", path, err))
		// The set first: it must not speak of what the data are from now on.
		if err := errors.Join(m.store.disk.create(path, nil), f.data.Truncate(sum.Size)); err != nil {
			return err
		}
	}
	if info, err = f.data.Stat(); err != nil {
		return err
	}
	cost := costOf(f.held)
	f.extra = max(0, allocated(info)-cost-2*diskBlock)
	m.used += fileCost(sum.Size) + cost + f.extra
	return nil
}
