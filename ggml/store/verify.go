package store

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"kvasird/ggml/gguf"
)

// DamagedError says that bytes were not any more what they had been when they were
// verified. They are not held now.
type DamagedError struct {
	Model string
	Spans map[int][]Span // by file, from 0
}

func (e *DamagedError) Error() string {
	n := int64(0)
	for _, spans := range e.Spans {
		n += length(spans)
	}
	return fmt.Sprintf("store: model %s: %d bytes had changed on disk, they are not held any more: fetch or import them again, and check the disk", e.Model, n)
}

// Verify hashes everything that is held of a model again. What is wrong is dropped and
// reported as a *DamagedError; an imported file that is wrong is not used any more.
// What a lost set of groups does not say any more is found again.
func (s *Store) Verify(ctx context.Context, id gguf.ModelID, progress func(done, total int64)) error {
	m := s.Model(id)
	if m == nil {
		return fmt.Errorf("store: model %v: %w", id, ErrNoModel)
	}
	if progress == nil {
		progress = func(int64, int64) {}
	}
	total, before := int64(0), int64(0)
	check := make([][]Span, len(m.sums))
	for i := range m.sums {
		check[i] = m.toVerify(i)
		total += length(check[i])
	}
	damaged := &DamagedError{m.Name(), make(map[int][]Span)}
	errs := []error{m.Err()}
	for i, spans := range check {
		if len(spans) == 0 {
			continue
		}
		wrong, err := m.verifyFile(ctx, i, spans, func(done int64) { progress(before+done, total) })
		if len(wrong) > 0 {
			damaged.Spans[i] = wrong
		}
		if err != nil {
			errs = append(errs, err)
		}
		before += length(spans)
	}
	if len(damaged.Spans) > 0 {
		errs = append(errs, damaged)
	}
	return errors.Join(errs...)
}

// toVerify returns what is held of a file, or all of one whose set was lost.
func (m *Model) toVerify(file int) []Span {
	m.mu.Lock()
	defer m.mu.Unlock()
	f := m.files[file]
	all := []Span{{0, f.held.size}}
	if f.suspect && f.tree != nil {
		return all
	}
	return f.held.spans(all, true)
}

func (m *Model) verifyFile(ctx context.Context, file int, spans []Span, progress func(int64)) (wrong []Span, err error) {
	leaves, err := m.leavesOf(file)
	if err != nil {
		return nil, err
	}
	m.mu.Lock()
	f := m.files[file]
	held, data := f.held.clone(), f.data
	m.mu.Unlock()
	if data == nil {
		return nil, m.Err()
	}
	var groups []int
	for i := range groupsIn(spans) {
		groups = append(groups, i)
	}
	var mu sync.Mutex // guards bad and found
	bad, found := newGroupSet(held.size), newGroupSet(held.size)
	err = eachGroup(ctx, data, held.size, len(groups), func(at int) int { return groups[at] }, func(i int, p []byte) {
		right := hashGroup(p, i, len(leaves) == 1) == leaves[i]
		mu.Lock()
		defer mu.Unlock()
		switch {
		case right && !held.has(i):
			found.add(i)
		case !right && held.has(i):
			bad.add(i)
		}
	}, progress)
	if err != nil {
		return nil, fmt.Errorf("store: verify %s: %w", f.path, err)
	}
	wrong = bad.spans([]Span{{0, bad.size}}, true)
	return wrong, errors.Join(m.discard(file, f, wrong), m.recover(file, found))
}

// discard makes wrong groups of f not held, unless another file has taken its place.
// Some of them may have been dropped and fetched again since they were read: then they
// are fetched once more.
func (m *Model) discard(i int, f *file, wrong []Span) error {
	if len(wrong) == 0 {
		return nil
	}
	m.store.opMu.Lock()
	defer m.store.opMu.Unlock()
	m.mu.Lock()
	replaced, imported := m.files[i] != f, f.source != nil
	m.mu.Unlock()
	switch {
	case replaced:
		return nil
	case !imported:
		return m.Drop(i, wrong)
	}
	man, bad := m.manifest(), &source{Path: f.source.Path, Kept: f.source.Kept} // which no file is like
	man.Files[i].Source = bad
	if err := m.store.writeManifest(m.id, man); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	f.source = bad
	f.lose(fmt.Errorf("store: the imported file %s is not what it was (import it again or remove the model)", f.path))
	return nil
}

// recover makes groups held that turned out to be right after their set was lost.
func (m *Model) recover(file int, found *groupSet) error {
	m.flushMu.Lock()
	defer m.flushMu.Unlock()
	m.mu.Lock()
	f := m.files[file]
	if !f.suspect || f.source != nil {
		m.mu.Unlock()
		return nil
	}
	durable := f.durableLocked()
	for i := range found.each() {
		if f.held.has(i) || f.busy[i] {
			continue
		}
		f.held.add(i)
		f.pending.add(i)
		m.waiting += f.held.len(i)
		// Its space was counted with what is in no group.
		cost := groupCost(f.held.len(i))
		known := min(cost, f.extra)
		f.extra -= known
		m.store.discharge(m, known-cost)
	}
	m.mu.Unlock()
	if found.bytes == 0 {
		if err := m.save(file, durable); err != nil { // a set again, if an empty one
			return err
		}
	}
	err := m.flushFile(file)
	if err == nil {
		m.mu.Lock()
		defer m.mu.Unlock()
		f.suspect = false
	}
	return err
}
