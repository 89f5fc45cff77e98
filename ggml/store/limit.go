package store

import "fmt"

// LimitError says that the store would take more of the disk than it may.
type LimitError struct {
	Limit, Used, Need int64 // in bytes; Used counts what is reserved for others
}

func (e *LimitError) Error() string {
	return fmt.Sprintf("store: %d more bytes are needed, %d of %d are in use: raise the limit or remove a model", e.Need, e.Used, e.Limit)
}

// Disk space is counted in blocks of 4 KiB; a run of groups may take some more for
// the file system to find it.
const (
	diskBlock     = 4096
	groupOverhead = 64
)

func blocks(n int64) int64 { return (n + diskBlock - 1) / diskBlock * diskBlock }

// groupCost returns what a group of n bytes may take on disk.
func groupCost(n int64) int64 { return blocks(n) + groupOverhead }

// fileCost returns what a file takes before it holds anything: its set twice, as it
// is replaced by a second one, and the blocks in which the file system finds groups.
func fileCost(size int64) int64 { return 2*blocks(heldSize(size)) + 2*diskBlock }

// charge counts n bytes as used before they are; those that are reserved for m first.
func (s *Store) charge(m *Model, n int64) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	own := min(n, m.reserved)
	if s.limit > 0 && s.used+s.reserved+n-own > s.limit {
		return &LimitError{s.limit, s.used + s.reserved - m.reserved, n}
	}
	m.reserved -= own
	s.reserved -= own
	s.used += n
	m.used += n
	return nil
}

// discharge gives back n bytes of what was charged.
func (s *Store) discharge(m *Model, n int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.used -= n
	m.used -= n
}

// Used returns the bytes on disk as they are counted against the limit, and the bytes
// reserved beyond them.
func (s *Store) Used() (used, reserved int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.used, s.reserved
}

// Reserve sets disk space aside for spans that this model lacks, so that two downloads
// do not count on the same space. What is written to the model comes out of its
// reservations; release gives back what is left of this one. The reservations of one
// model are a single pool. Without room it is a *LimitError and nothing is reserved.
func (m *Model) Reserve(want map[int][]Span) (release func(), err error) {
	n := int64(0)
	for file, spans := range want {
		if err := m.checkFile(file); err != nil {
			return nil, err
		}
		if !m.HasTree(file) {
			n += blocks(m.TreeSize(file))
		}
		for _, s := range m.Missing(file, spans) {
			from, to := groupsOf(s)
			n += int64(to-from) * groupCost(Group)
		}
	}
	s := m.store
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.limit > 0 && s.used+s.reserved+n > s.limit {
		return nil, &LimitError{s.limit, s.used + s.reserved, n}
	}
	m.reserved += n
	s.reserved += n
	released := false
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if !released {
			left := min(n, m.reserved)
			m.reserved -= left
			s.reserved -= left
			released = true
		}
	}, nil
}
