package store

import (
	"errors"
	"fmt"
	"io"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"

	"kvasird/ggml/gguf"
)

// Model is a model in the store, in full or in part.
type Model struct {
	store *Store
	id    gguf.ModelID
	dir   string
	sums  []gguf.FileSum

	used, reserved int64 // bytes on disk; guarded by store.mu

	flushMu sync.Mutex // held while sets are written, groups dropped, files replaced

	mu       sync.Mutex // guards what follows and what files point to
	idle     sync.Cond  // a group is no longer busy
	files    []*file    // as many as sums
	pinned   bool
	waiting  int64 // bytes that are not durable yet
	flushErr error // of a flush in the background, until somebody is told
	closed   bool
}

// file is one file of a model.
type file struct {
	path   string  // does not change
	source *source // of an imported file, which is only read

	data    *os.File // nil if trouble
	tree    *os.File // nil until it is known
	leaves  []words  // of the tree, once needed
	trouble error    // why nothing of an imported file is held
	suspect bool     // the set was lost: there may be good data that is not in it
	extra   int64    // bytes on disk that are in no held group, and could not be freed

	held    *groupSet
	pending *groupSet    // held, but not surely in the set on disk
	saved   *groupSet    // what the set on disk may hold; guarded by flushMu
	busy    map[int]bool // being written or given back
	drops   uint64       // how often groups left the set, for reads that ran meanwhile
}

func newModel(s *Store, id gguf.ModelID, dir string, man *manifest) *Model {
	m := &Model{store: s, id: id, dir: dir, sums: man.sums(), pinned: man.Pinned}
	m.idle.L = &m.mu
	return m
}

// ID returns the id.
func (m *Model) ID() gguf.ModelID { return m.id }

var splitName = regexp.MustCompile(`-\d{5}-of-\d{5}$`)

// Name returns the name of the first file without what says that it is a file.
func (m *Model) Name() string {
	return splitName.ReplaceAllString(strings.TrimSuffix(m.sums[0].Name, ".gguf"), "")
}

// Files returns the sums of the model's files, in order.
func (m *Model) Files() []gguf.FileSum {
	return slices.Clone(m.sums)
}

// Pinned reports whether Pin marked the model.
func (m *Model) Pinned() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.pinned
}

// Err says in words what is wrong with the model's imported files; nil if nothing is.
func (m *Model) Err() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	var errs []error
	for _, f := range m.files {
		if f.trouble != nil {
			errs = append(errs, f.trouble)
		}
	}
	return errors.Join(errs...)
}

// Bytes returns how many bytes are held, and how many there are.
func (m *Model) Bytes() (held, total int64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, f := range m.files {
		held += f.held.bytes
		total += f.held.size
	}
	return held, total
}

// Complete reports whether every byte is held.
func (m *Model) Complete() bool {
	held, total := m.Bytes()
	return held == total
}

// Path returns where the bytes of a file are: a sparse file, zero where bytes are not
// held, or the imported file as it is kept.
func (m *Model) Path(file int) string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.files[file].path
}

// Held returns the verified groups of a file, merged.
func (m *Model) Held(file int) []Span { return m.spans(file, nil, true) }

// Missing returns what of the given spans, widened to groups, is not held.
func (m *Model) Missing(file int, want []Span) []Span {
	if want == nil {
		return nil
	}
	return m.spans(file, want, false)
}

func (m *Model) spans(file int, within []Span, in bool) []Span {
	if m.checkFile(file) != nil {
		return nil
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	f := m.files[file]
	if within == nil {
		within = []Span{{0, f.held.size}}
	}
	return f.held.spans(align(f.held.size, within), in)
}

// Holds reports whether all of the n bytes at off are held.
func (m *Model) Holds(file int, off, n int64) bool {
	if m.checkFile(file) != nil {
		return false
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.files[file].held.covers(off, n)
}

func (m *Model) checkFile(file int) error {
	if file < 0 || file >= len(m.sums) {
		return fmt.Errorf("store: file %d: %s has %d files", file, m.Name(), len(m.sums))
	}
	return nil
}

// ReadAt reads verified bytes of a file. It stops, with an error that wraps
// gguf.ErrNotHeld, where bytes are not held, and with io.EOF at the end of the file.
func (m *Model) ReadAt(file int, p []byte, off int64) (int, error) {
	if err := m.checkFile(file); err != nil {
		return 0, err
	}
	for {
		n, again, err := m.readOnce(file, p, off)
		if !again {
			return n, err
		}
	}
}

// readOnce reports that it must be done again when groups were dropped meanwhile, as
// it may then have read a hole.
func (m *Model) readOnce(file int, p []byte, off int64) (n int, again bool, err error) {
	m.mu.Lock()
	f := m.files[file]
	drops, data := f.drops, f.data
	left := f.held.size - off
	want := p[:max(0, min(int64(len(p)), left))]
	switch {
	case m.closed:
		err = fmt.Errorf("store: model %s: %w", m.Name(), os.ErrClosed)
	case off < 0:
		err = fmt.Errorf("store: offset %d is negative", off)
	case left <= 0:
		err = io.EOF
	default:
		begin, end := groupsOf(Span{off, int64(len(want))})
		held := int64(f.held.next(begin, end, false))*Group - off
		if held < int64(len(want)) {
			want = want[:max(0, held)]
			err = m.notHeldLocked(file, off+int64(len(want)))
		} else if len(want) < len(p) {
			err = io.EOF
		}
	}
	m.mu.Unlock()
	if len(want) == 0 || err != nil && !errors.Is(err, gguf.ErrNotHeld) && err != io.EOF {
		return 0, false, err
	}
	n, readErr := data.ReadAt(want, off)
	m.mu.Lock()
	defer m.mu.Unlock()
	if f.drops != drops || m.files[file] != f {
		return 0, true, nil
	}
	if f.source != nil {
		if changed := f.unchanged(); changed != nil {
			f.lose(fmt.Errorf("store: the imported file was changed (import it again or remove the model): %w", changed))
			return 0, false, m.notHeldLocked(file, off)
		}
	}
	if readErr != nil && n < len(want) {
		return n, false, fmt.Errorf("store: read %s: %w", f.path, readErr)
	}
	return n, false, err
}

func (m *Model) notHeldLocked(file int, off int64) error {
	f := m.files[file]
	if f.trouble != nil {
		return fmt.Errorf("%w: %w", f.trouble, gguf.ErrNotHeld)
	}
	return fmt.Errorf("store: model %s, file %d, offset %d: %w", m.Name(), file+1, off, gguf.ErrNotHeld)
}

// unchanged says how an imported file differs from what was imported.
func (f *file) unchanged() error {
	info, err := f.data.Stat()
	if err != nil {
		return err
	}
	if now := stamp(f.source.Path, info); !now.sameFile(*f.source) {
		path := f.source.Path
		if f.source.Kept == keptClone {
			path = f.path
		}
		return fmt.Errorf("%s is another file, or has another size or time, than when it was imported", path)
	}
	return nil
}

// lose makes nothing of an imported file held.
func (f *file) lose(why error) {
	if f.data != nil {
		f.data.Close() // it was only read
		f.data = nil
	}
	f.trouble = why
	f.held = newGroupSet(f.held.size)
	f.drops++
}

func (m *Model) manifest() *manifest {
	m.mu.Lock()
	defer m.mu.Unlock()
	man := &manifest{Version: manifestVersion, Pinned: m.pinned}
	for i, f := range m.files {
		man.Files = append(man.Files, manifestFile{m.sums[i], f.source})
	}
	return man
}

// close waits for writers and makes every later call fail.
func (m *Model) close() {
	m.flushMu.Lock()
	defer m.flushMu.Unlock()
	m.mu.Lock()
	defer m.mu.Unlock()
	m.closed = true // so that no group becomes busy
	m.waitIdleLocked()
	m.closeFiles()
}

// waitIdleLocked waits until no group is busy.
func (m *Model) waitIdleLocked() {
	for slices.ContainsFunc(m.files, func(f *file) bool { return len(f.busy) > 0 }) {
		m.idle.Wait()
	}
}

func (m *Model) closeFiles() {
	for _, f := range m.files {
		if f.data != nil {
			f.data.Close() // flushed by who cares for what is in it
		}
		if f.tree != nil {
			f.tree.Close() // it was only read
		}
	}
}
