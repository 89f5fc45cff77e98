package kv

import (
	"container/list"
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/dgraph-io/badger/v4"
)

// entryOverhead is counted for each value beside its bytes and its key's, so that
// the index in memory is bounded too.
const entryOverhead = 512

// ttlSlack is how much longer than a space badger keeps values: its own clock
// only sees to what was left behind.
const ttlSlack = time.Hour

// Space is a namespace of a store. Keys are 1 to 512 bytes.
type Space struct {
	db     *DB
	name   string
	bounds Bounds

	mu     sync.Mutex // guards what follows, and is held while heads are written
	serial uint64     // of the last value
	bytes  int64
	order  *list.List // of *entry, the oldest in front
	index  map[string]*list.Element
}

// entry is a value in the index.
type entry struct {
	key string
	head
}

func (e *entry) bytes() int64 { return int64(len(e.key)) + e.size + entryOverhead }

func newSpace(d *DB, name string, b Bounds) *Space {
	return &Space{db: d, name: name, bounds: b, order: list.New(), index: map[string]*list.Element{}}
}

// Get returns the value under key; false when there is none, or when it was
// damaged, of which the log tells.
func (s *Space) Get(ctx context.Context, key string) ([]byte, bool, error) {
	done, err := s.db.use()
	if err != nil {
		return nil, false, err
	}
	defer done()
	for ctx.Err() == nil {
		h, ok := s.find(key)
		if !ok {
			return nil, false, nil
		}
		value, err := s.read(key, h)
		if err == nil {
			return value, true, nil
		}
		if now, ok := s.find(key); ok && now == h { // else it was replaced or removed meanwhile
			s.db.cfg.Logger.Warn("a stored value is damaged and forgotten", "space", s.name, "err", err)
			return nil, false, s.drop(key, h)
		}
	}
	return nil, false, ctx.Err()
}

// find looks a key up in the index. What is too old is not there.
func (s *Space) find(key string) (head, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	e, ok := s.index[key]
	if !ok || s.tooOld(e.Value.(*entry)) {
		return head{}, false
	}
	return e.Value.(*entry).head, true
}

func (s *Space) tooOld(e *entry) bool {
	return s.db.cfg.Now().UnixMilli()-e.at > s.bounds.Age.Milliseconds()
}

// read joins the parts of a value.
func (s *Space) read(key string, h head) ([]byte, error) {
	value := make([]byte, 0, h.size)
	err := s.db.badger.View(func(txn *badger.Txn) error {
		for part := range h.parts() {
			item, err := txn.Get(s.partKey(h.serial, part))
			if err != nil {
				return err
			}
			err = item.Value(func(b []byte) error {
				if int64(len(b)) > h.size-int64(len(value)) {
					return errors.New("it is longer than its head says")
				}
				value = append(value, b...)
				return nil
			})
			if err != nil {
				return err
			}
		}
		return nil
	})
	if err == nil && (int64(len(value)) != h.size || checksum(key, value) != h.sum) {
		err = errors.New("its checksum is wrong")
	}
	return value, err
}

// Put keeps a value, which is the store's from then on, in place of the one that
// the key had. Errors: ErrTooLarge, ErrNoRoom; then the key has what it had.
func (s *Space) Put(ctx context.Context, key string, value []byte) error {
	done, err := s.db.use()
	if err != nil {
		return err
	}
	defer done()
	e := &entry{key: key, head: head{at: s.db.cfg.Now().UnixMilli(), size: int64(len(value)), sum: checksum(key, value)}}
	switch {
	case len(key) == 0 || len(key) > maxKey:
		return fmt.Errorf("kv: a key of %d bytes: want 1 to %d", len(key), maxKey)
	case e.bytes() > s.bounds.Bytes:
		return fmt.Errorf("kv: a value of %d bytes %w: %d bytes", len(value), ErrTooLarge, s.bounds.Bytes)
	case ctx.Err() != nil:
		return ctx.Err()
	}
	if err := checkRoom(s.db.cfg.Path, s.db.cfg.reserve); err != nil {
		return err
	}
	s.mu.Lock()
	s.serial++
	e.serial = s.serial
	s.mu.Unlock()
	s.db.moved(e.bytes())
	replaced, err := s.write(e, value)
	if err != nil {
		return errors.Join(err, s.removeParts(e.head))
	}
	return errors.Join(s.removeParts(replaced...), s.forget())
}

// write puts the parts of a value, then its head, and counts it. It returns the
// value that it replaced.
func (s *Space) write(e *entry, value []byte) (replaced []head, err error) {
	batch := s.batch()
	defer batch.Cancel()
	for part := range e.parts() {
		b := value[part*maxPart : min((part+1)*maxPart, e.size)]
		// parts outlive their head
		if err := batch.SetEntry(badger.NewEntry(s.partKey(e.serial, part), b).WithTTL(s.bounds.Age + 2*ttlSlack)); err != nil {
			return nil, err
		}
	}
	if err := batch.Flush(); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	err = s.db.badger.Update(func(txn *badger.Txn) error {
		return txn.SetEntry(badger.NewEntry(s.headKey(e.key), e.encode()).WithTTL(s.bounds.Age + ttlSlack))
	})
	if err != nil {
		return nil, err
	}
	if old, ok := s.index[e.key]; ok {
		replaced = append(replaced, s.uncountLocked(old))
	}
	s.countLocked(e)
	return replaced, nil
}

// batch has one transaction on its way at a time, which bounds memory.
func (s *Space) batch() *badger.WriteBatch {
	b := s.db.badger.NewWriteBatch()
	b.SetMaxPendingTxns(1)
	return b
}

func (s *Space) countLocked(e *entry) {
	s.index[e.key] = s.order.PushBack(e)
	s.bytes += e.bytes()
}

func (s *Space) uncountLocked(el *list.Element) head {
	e := s.order.Remove(el).(*entry)
	delete(s.index, e.key)
	s.bytes -= e.bytes()
	return e.head
}

// Delete removes a value and says whether there was one.
func (s *Space) Delete(_ context.Context, key string) (bool, error) {
	done, err := s.db.use()
	if err != nil {
		return false, err
	}
	defer done()
	h, ok := s.find(key)
	if !ok {
		return false, nil
	}
	return true, s.drop(key, h)
}

// drop removes a value, unless the key has another one by now.
func (s *Space) drop(key string, h head) error {
	return s.remove(func() []*list.Element {
		if el, ok := s.index[key]; ok && el.Value.(*entry).head == h {
			return []*list.Element{el}
		}
		return nil
	})
}

// forget keeps to the bounds.
func (s *Space) forget() error {
	return s.remove(func() (gone []*list.Element) {
		left := s.bytes
		for el := s.order.Front(); el != nil; el = el.Next() {
			e := el.Value.(*entry)
			if left <= s.bounds.Bytes && !s.tooOld(e) {
				break
			}
			left -= e.bytes()
			gone = append(gone, el)
		}
		return gone
	})
}

// remove removes what choose returns, which is called with mu held. After an error
// it may be back when the store is opened again.
func (s *Space) remove(choose func() []*list.Element) error {
	gone, err := s.removeHeads(choose)
	if err != nil || len(gone) == 0 {
		return err
	}
	return s.removeParts(gone...)
}

func (s *Space) removeHeads(choose func() []*list.Element) (gone []head, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	chosen := choose()
	if len(chosen) == 0 {
		return nil, nil
	}
	batch := s.batch()
	defer batch.Cancel()
	for _, el := range chosen {
		err = errors.Join(err, batch.Delete(s.headKey(el.Value.(*entry).key)))
		gone = append(gone, s.uncountLocked(el))
	}
	return gone, errors.Join(err, batch.Flush())
}

// removeParts frees the room of values that are gone.
func (s *Space) removeParts(gone ...head) error {
	if len(gone) == 0 {
		return nil
	}
	batch := s.batch()
	defer batch.Cancel()
	for _, h := range gone {
		s.db.moved(h.size)
		for part := range h.parts() {
			if err := batch.Delete(s.partKey(h.serial, part)); err != nil {
				return err
			}
		}
	}
	return batch.Flush()
}
