package store

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"kvasird/ggml/gguf"
)

// Drop gives up spans of a file, widened to groups: first durably in the set, then the
// space goes back to the disk. An imported file is not touched: it is refused.
func (m *Model) Drop(file int, spans []Span) error {
	if err := m.checkFile(file); err != nil {
		return err
	}
	m.flushMu.Lock()
	defer m.flushMu.Unlock()
	m.mu.Lock()
	f, closed, imported := m.files[file], m.closed, m.files[file].source != nil
	m.mu.Unlock()
	switch {
	case closed:
		return fmt.Errorf("store: model %s: %w", m.Name(), os.ErrClosed)
	case imported:
		return fmt.Errorf("store: %s was imported and stays as it is: remove the model to forget it", f.path)
	}
	return m.evict(file, align(m.sums[file].Size, spans))
}

// evict takes groups out of the set, on disk too if they may be in there, and frees
// them. flushMu is held.
func (m *Model) evict(file int, spans []Span) error {
	m.mu.Lock()
	f := m.waitGroupsLocked(file, spans)
	out := f.held.spans(spans, true)
	gone := newGroupSet(f.held.size)
	for i := range groupsIn(out) {
		gone.add(i)
		f.held.remove(i)
		f.busy[i] = true
	}
	m.settledLocked(f, gone)
	f.drops++
	durable := f.durableLocked()
	m.mu.Unlock()
	var err error
	if f.saved.intersects(gone) {
		err = m.saveLess(file, durable)
	}
	if err == nil {
		m.giveBack(file, out, costOf(gone))
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.release(f, out, func(i int) {
		if err != nil { // they are still held, and the set on disk may say so
			f.held.add(i)
			f.pending.add(i)
			m.waiting += f.held.len(i)
		}
	})
	return err
}

// saveLess writes the set of a file that gives space back. On a full disk there is
// no room for a second one: then it is overwritten. A crash in that moment loses the
// set, which Verify brings back, and never makes it claim too much.
func (m *Model) saveLess(file int, set *groupSet) error {
	path := filepath.Join(m.dir, heldName(file))
	text := encodeHeld(m.sums[file].Root, set)
	err := m.save(file, set)
	var full *gguf.DiskFullError
	if !errors.As(err, &full) {
		return err
	}
	f, openErr := os.OpenFile(path, os.O_WRONLY, 0)
	if openErr != nil {
		return err
	}
	err = m.store.disk.writeAt(f, text, 0)
	if err == nil {
		err = m.store.disk.sync(f)
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return diskError(path, int64(len(text)), err)
	}
	m.files[file].saved = set
	return nil
}
