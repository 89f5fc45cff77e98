package store

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
)

// WrongDataError says that bytes are not those of the model: whoever sent them is at
// fault.
type WrongDataError struct {
	Model  string
	File   int   // from 0
	Offset int64 // of the wrong group
}

func (e *WrongDataError) Error() string {
	return fmt.Sprintf("store: model %s, file %d: the bytes at offset %d are wrong", e.Model, e.File+1, e.Offset)
}

// Wrong tells this from an error of this machine.
func (e *WrongDataError) Wrong() bool { return true }

// WrongTreeError says that a tree is not that of the model's file: whoever sent it is
// at fault.
type WrongTreeError struct {
	Model  string
	File   int // from 0
	Reason string
}

func (e *WrongTreeError) Error() string {
	return fmt.Sprintf("store: model %s, file %d: this is not the file's tree: %s", e.Model, e.File+1, e.Reason)
}

// Wrong tells this from an error of this machine.
func (e *WrongTreeError) Wrong() bool { return true }

// ErrNoTree is wrapped when groups are to be verified without the tree of their file.
var ErrNoTree = errors.New("the tree is not known yet")

// HasTree reports whether the tree of a file is known, in full.
func (m *Model) HasTree(file int) bool {
	if m.checkFile(file) != nil {
		return false
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.files[file].tree != nil
}

// TreeSize returns the size of a file's tree in bytes, also when it is not known yet;
// 0 for a file that there is not.
func (m *Model) TreeSize(file int) int64 {
	if m.checkFile(file) != nil {
		return 0
	}
	return treeSize(m.sums[file].Size)
}

// ReadTree reads bytes of a file's tree, as os.File.ReadAt does.
func (m *Model) ReadTree(file int, p []byte, off int64) (int, error) {
	if err := m.checkFile(file); err != nil {
		return 0, err
	}
	m.mu.Lock()
	tree := m.files[file].tree
	m.mu.Unlock()
	if tree == nil {
		return 0, fmt.Errorf("store: model %s, file %d: %w", m.Name(), file+1, ErrNoTree)
	}
	return tree.ReadAt(p, off)
}

// SetTree takes the tree of a file, all TreeSize bytes, after walking all of it up to
// the root hash. A wrong one is a *WrongTreeError. One that is known stays.
func (m *Model) SetTree(file int, tree []byte) error {
	if err := m.checkFile(file); err != nil {
		return err
	}
	sum := m.sums[file]
	leaves, reason := checkTree(sum.Size, sum.Root, tree)
	if reason != "" {
		return &WrongTreeError{m.Name(), file, reason}
	}
	m.flushMu.Lock()
	defer m.flushMu.Unlock()
	if m.HasTree(file) {
		return nil
	}
	cost := blocks(int64(len(tree)))
	if err := m.store.charge(m, cost); err != nil {
		return err
	}
	path := filepath.Join(m.dir, treeName(file))
	err := m.store.disk.replace(path, tree)
	var opened *os.File
	if err == nil {
		opened, err = os.Open(path)
	}
	if err != nil {
		m.store.discharge(m, cost)
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.files[file].tree, m.files[file].leaves = opened, leaves
	return nil
}

// leavesOf returns the chaining values of a file's groups.
func (m *Model) leavesOf(file int) ([]words, error) {
	m.mu.Lock()
	f := m.files[file]
	leaves, known := f.leaves, f.tree != nil
	m.mu.Unlock()
	if leaves != nil {
		return leaves, nil
	}
	if !known {
		return nil, fmt.Errorf("store: model %s, file %d: %w", m.Name(), file+1, ErrNoTree)
	}
	sum := m.sums[file]
	tree := make([]byte, treeSize(sum.Size))
	if _, err := m.ReadTree(file, tree, 0); err != nil && err != io.EOF {
		return nil, fmt.Errorf("store: %w", err)
	}
	leaves, reason := checkTree(sum.Size, sum.Root, tree)
	if reason != "" {
		return nil, fmt.Errorf("store: %s was damaged since the store was opened: %s", filepath.Join(m.dir, treeName(file)), reason)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	f.leaves = leaves
	return leaves, nil
}

// WriteGroups takes groups of a file: off is a multiple of Group, and so is the length
// but at the end of the file. All of them are verified before any is written; a wrong
// one is a *WrongDataError. Groups that are held are left alone. A full disk is a
// *gguf.DiskFullError, a full store a *LimitError; both leave the store valid.
//
// The groups are held when it returns, and durable a second or mostWaiting bytes later, or
// after Flush.
func (m *Model) WriteGroups(file int, off int64, data []byte) error {
	if err := m.checkFile(file); err != nil {
		return err
	}
	size := m.sums[file].Size
	end := off + int64(len(data))
	if off < 0 || off%Group != 0 || len(data) == 0 || off >= size || end > size || end%Group != 0 && end != size {
		return fmt.Errorf("store: model %s, file %d: %d bytes at offset %d are not whole groups of %d bytes", m.Name(), file+1, len(data), off, Group)
	}
	leaves, err := m.leavesOf(file)
	if err != nil {
		return err
	}
	first := int(off / Group)
	for i := 0; i*Group < len(data); i++ {
		p := data[i*Group : min((i+1)*Group, len(data))]
		if hashGroup(p, first+i, len(leaves) == 1) != leaves[first+i] {
			return &WrongDataError{m.Name(), file, off + int64(i)*Group}
		}
	}
	if err := m.write(file, off, data); err != nil {
		return err
	}
	m.mu.Lock()
	waiting := m.waiting
	m.mu.Unlock()
	if waiting >= mostWaiting {
		return m.Flush()
	}
	wake(m.store.kick)
	if waiting >= flushBytes {
		wake(m.store.hurry)
	}
	return m.failed(nil)
}

// write writes verified groups, but those that are held.
func (m *Model) write(file int, off int64, data []byte) error {
	f, claimed, cost, err := m.claim(file, Span{off, int64(len(data))})
	if err != nil || len(claimed) == 0 {
		return err
	}
	if err = m.store.charge(m, cost); err == nil {
		for i, s := range claimed {
			if err = m.store.disk.writeAt(f.data, data[s.Off-off:s.end()-off], s.Off); err != nil {
				err = diskError(f.path, length(claimed[i:]), err)
				m.giveBack(file, claimed, cost)
				break
			}
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.release(f, claimed, func(i int) {
		if err == nil {
			f.held.add(i)
			f.pending.add(i)
			m.waiting += f.held.len(i)
		}
	})
	return err
}

// claim waits until none of the groups of a span is busy, and makes those busy that
// are not held. cost is what they may take on disk.
func (m *Model) claim(file int, span Span) (f *file, claimed []Span, cost int64, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	f = m.waitGroupsLocked(file, []Span{span})
	switch {
	case m.closed:
		return nil, nil, 0, fmt.Errorf("store: model %s: %w", m.Name(), os.ErrClosed)
	case f.trouble != nil:
		return nil, nil, 0, f.trouble
	case f.source != nil:
		return nil, nil, 0, nil // all of it is held
	}
	claimed = f.held.spans([]Span{span}, false)
	for i := range groupsIn(claimed) {
		f.busy[i] = true
		cost += groupCost(f.held.len(i))
	}
	return f, claimed, cost, nil
}

// waitGroupsLocked waits until no group of some spans is busy. It returns the file,
// which may have been replaced meanwhile.
func (m *Model) waitGroupsLocked(file int, spans []Span) *file {
	for {
		f := m.files[file]
		if !f.anyBusy(spans) {
			return f
		}
		m.idle.Wait()
	}
}

func (f *file) anyBusy(spans []Span) bool {
	if len(f.busy) == 0 {
		return false
	}
	for i := range groupsIn(spans) {
		if f.busy[i] {
			return true
		}
	}
	return false
}

// release makes claimed groups idle; done is called for each. m.mu is held.
func (m *Model) release(f *file, claimed []Span, done func(i int)) {
	for i := range groupsIn(claimed) {
		done(i)
		delete(f.busy, i)
	}
	m.idle.Broadcast()
}

// giveBack frees the disk space of claimed groups that were charged with cost.
func (m *Model) giveBack(file int, claimed []Span, cost int64) {
	if m.punch(file, claimed) {
		m.store.discharge(m, cost)
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.files[file].extra += cost // until Open looks again
}

// punch gives spans back to the disk, and reports whether that worked.
func (m *Model) punch(file int, spans []Span) bool {
	f := m.files[file]
	for _, s := range spans {
		if ok, err := m.store.disk.punch(f.data, s); !ok || err != nil {
			return false
		}
	}
	return true
}

// costOf returns what the groups of a set are charged with.
func costOf(set *groupSet) (n int64) {
	for i := range set.each() {
		n += groupCost(set.len(i))
	}
	return n
}

// failed remembers an error for who calls next, or returns and forgets it.
func (m *Model) failed(err error) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err == nil {
		err, m.flushErr = m.flushErr, nil
		return err
	}
	m.flushErr = err
	return nil
}

// Flush makes all groups durable that were written before.
func (m *Model) Flush() error {
	err := m.flush()
	if err == nil {
		m.failed(nil) // what failed before has been done now
	}
	return err
}

func (m *Model) flush() error {
	m.flushMu.Lock()
	defer m.flushMu.Unlock()
	var errs []error
	for i := range m.sums {
		errs = append(errs, m.flushFile(i))
	}
	return errors.Join(errs...)
}

// flushFile makes the data durable, then the set that says so. flushMu is held.
func (m *Model) flushFile(file int) error {
	m.mu.Lock()
	f := m.files[file]
	pend := f.pending.clone()
	closed := m.closed
	m.mu.Unlock()
	if pend.bytes == 0 || closed {
		return nil
	}
	all := []Span{{0, pend.size}}
	if err := m.store.disk.sync(f.data); err != nil {
		// The system may have dropped the bytes: nobody can say what is on disk.
		return errors.Join(diskError(f.path, pend.bytes, err), m.evict(file, pend.spans(all, true)))
	}
	m.mu.Lock()
	durable := f.durableLocked()
	m.mu.Unlock()
	durable.union(pend)
	if err := m.save(file, durable); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.settledLocked(f, pend)
	return nil
}

// durableLocked returns the groups that are surely in the set on disk.
func (f *file) durableLocked() *groupSet {
	set := f.held.clone()
	for i := range f.pending.each() {
		set.remove(i)
	}
	return set
}

// save writes the set of a file. flushMu is held.
func (m *Model) save(file int, set *groupSet) error {
	f := m.files[file]
	f.saved.union(set) // as it may be on disk after an error too
	err := m.store.disk.replace(filepath.Join(m.dir, heldName(file)), encodeHeld(m.sums[file].Root, set))
	if err == nil {
		f.saved = set
	}
	return err
}

// settledLocked takes groups out of what waits to become durable.
func (m *Model) settledLocked(f *file, groups *groupSet) {
	for i := range groups.each() {
		if f.pending.has(i) {
			f.pending.remove(i)
			m.waiting -= f.held.len(i)
		}
	}
}
