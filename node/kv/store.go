package kv

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"path/filepath"
	"slices"
	"sync"

	"github.com/dgraph-io/badger/v4"
	badgeropts "github.com/dgraph-io/badger/v4/options"
	"github.com/dgraph-io/badger/v4/skl"
)

// Limits of a Store.
const (
	storeBatch    = 512     // updates that go to the disk together
	storeBytes    = 1 << 20 // of them, from which on no further one joins
	maxUpdate     = 9 << 19 // bytes that one update writes
	storeMemtable = 40 << 20

	// recordBytes is added for each record that is written. So badger's two limits of a
	// write hold, 15 % of storeMemtable in bytes, and in records of skl.MaxNodeSize: it is
	// storeBytes + maxUpdate, or less.
	recordBytes = skl.MaxNodeSize + 16
)

// Store keeps what must not be lost, such as money: an Update is on the disk when it
// returns, all of it or nothing. Updates run one after the other, each on what those
// before it left; those that wait share one write to the disk. A store that is damaged
// is not opened, and nothing of it is moved.
//
// It is safe for concurrent use. It owns one goroutine beside badger's.
type Store struct {
	dir    string
	badger *badger.DB
	state  *stateFile
	queue  chan *update
	ended  chan struct{} // closed when the writer is over

	mu     sync.RWMutex // guards closed, and is read-locked by whoever uses badger or queues
	closed bool

	failed error // the writer's alone: a write that badger refused, after which nothing is written
}

type update struct {
	fn   func(*Tx) error
	done chan error
}

// Tx is a view of a Store, for the time of one call.
type Tx struct {
	txn   *badger.Txn
	ahead map[string][]byte // of earlier updates that are written together; nil: removed
	own   map[string][]byte // of this update; nil in a View
	bytes int               // of own
}

// ErrReadOnly says that a View was to write.
var ErrReadOnly = errors.New("only an Update writes")

// OpenStore opens the store in a folder, or begins one. Errors: ErrBusy, ErrNoRoom, or
// what is wrong with the folder or the store in it.
func OpenStore(dir string, log *slog.Logger) (*Store, error) {
	fail := func(err error) (*Store, error) { return nil, fmt.Errorf("kv: %s: %w", dir, err) }
	state, err := lockState(dir + ".state")
	if err != nil {
		return fail(err)
	}
	s := &Store{dir: dir, state: state, queue: make(chan *update, storeBatch), ended: make(chan struct{})}
	if err := s.open(log); err != nil {
		state.Close()
		return fail(err)
	}
	go s.write()
	return s, nil
}

func (s *Store) open(log *slog.Logger) (err error) {
	if err := checkRoom(filepath.Dir(s.dir), diskReserve); err != nil {
		return err
	}
	if s.state.openings >= maxOpenings { // badger also panics where nobody can recover
		return fmt.Errorf("the process ended %d times while it was opened, so it is damaged: put a copy back and remove %s.state", s.state.openings, s.dir)
	}
	if err := s.state.opening(); err != nil {
		return err
	}
	defer func() {
		if r := recover(); r != nil { // badger does not check all that it reads
			err = fmt.Errorf("it cannot be read: %v", r)
		}
		if err != nil && s.badger != nil {
			s.badger.Close()
		}
		err = errors.Join(err, s.state.opened())
	}()
	s.badger, err = badger.Open(badger.DefaultOptions(s.dir).
		WithLogger(badgerLog{log}).
		WithSyncWrites(true).WithDetectConflicts(false). // there is one writer
		WithMemTableSize(storeMemtable).WithNumMemtables(2).
		WithCompression(badgeropts.None).WithBlockCacheSize(0).WithIndexCacheSize(0).
		WithChecksumVerificationMode(badgeropts.OnTableAndBlockRead).WithVerifyValueChecksum(true).
		WithMetricsEnabled(false).
		WithBypassLockGuard(true)) // the state file is the lock
	if err != nil {
		s.badger = nil
		return err
	}
	if !s.state.clean {
		return s.badger.VerifyChecksum()
	}
	return nil
}

// Close waits for the updates that are queued, and may be called again.
func (s *Store) Close() error {
	s.mu.Lock()
	closed := s.closed
	s.closed = true
	s.mu.Unlock()
	if closed {
		return nil
	}
	close(s.queue)
	<-s.ended
	err := s.badger.Close()
	if err == nil && s.failed == nil {
		err = s.state.closed()
	}
	return errors.Join(err, s.state.Close())
}

// View calls fn with what the updates before it left. Errors: fn's, ErrClosed.
func (s *Store) View(fn func(*Tx) error) error {
	s.mu.RLock()
	defer s.mu.RUnlock()
	if s.closed {
		return ErrClosed
	}
	return s.badger.View(func(txn *badger.Txn) error { return fn(&Tx{txn: txn}) })
}

// Update calls fn, once, which does not call the store, and keeps what it writes unless it returns an error. It returns
// when that is on the disk. Errors: fn's, then with nothing written; ErrClosed, ErrNoRoom;
// and what the disk says: then it is open whether anything was written, and no more is,
// until the store is opened again.
func (s *Store) Update(fn func(*Tx) error) error {
	u := &update{fn, make(chan error, 1)}
	s.mu.RLock()
	if s.closed {
		s.mu.RUnlock()
		return ErrClosed
	}
	s.queue <- u
	s.mu.RUnlock()
	return <-u.done
}

// write is the writer: it runs what waits, as far as it fits one write.
func (s *Store) write() {
	defer close(s.ended)
	for first := range s.queue {
		batch := []*update{first}
		ahead, size := map[string][]byte{}, 0
		var accepted []*update
		err := s.failed
		if err == nil {
			err = checkRoom(s.dir, diskReserve)
		}
		txn := s.badger.NewTransaction(true)
		for i := 0; i < len(batch); i++ {
			u := batch[i]
			tx := &Tx{txn: txn, ahead: ahead, own: map[string][]byte{}}
			if err == nil {
				if failed := u.fn(tx); failed != nil {
					u.done <- failed
				} else {
					maps.Copy(ahead, tx.own)
					size += tx.bytes
					accepted = append(accepted, u)
				}
			} else {
				u.done <- err
			}
			if len(batch) < storeBatch && size < storeBytes {
				select {
				case next, ok := <-s.queue:
					if ok {
						batch = append(batch, next)
					}
				default:
				}
			}
		}
		if err == nil {
			err = s.commit(txn, ahead)
		}
		txn.Discard()
		for _, u := range accepted {
			u.done <- err
		}
	}
}

// commit writes what a batch of updates left.
func (s *Store) commit(txn *badger.Txn, ahead map[string][]byte) error {
	for key, value := range ahead {
		var err error
		if value == nil {
			err = txn.Delete([]byte(key))
		} else {
			err = txn.Set([]byte(key), value)
		}
		if err != nil {
			return err
		}
	}
	if err := txn.Commit(); err != nil {
		s.failed = fmt.Errorf("kv: %s: nothing more is written since this failed: %w", s.dir, err)
		return s.failed
	}
	return nil
}

// Get returns the value of a key, which is the caller's, and whether there is one.
func (t *Tx) Get(key []byte) ([]byte, bool, error) {
	for _, written := range []map[string][]byte{t.own, t.ahead} {
		if v, ok := written[string(key)]; ok {
			return bytes.Clone(v), v != nil, nil
		}
	}
	item, err := t.txn.Get(key)
	if errors.Is(err, badger.ErrKeyNotFound) {
		return nil, false, nil
	}
	if err != nil {
		return nil, false, err
	}
	v, err := item.ValueCopy(nil)
	return v, err == nil, err
}

// Put sets the value of a key, of 1 byte at least, as the keys.
func (t *Tx) Put(key, value []byte) error {
	if len(key) == 0 || len(value) == 0 {
		return errors.New("kv: an empty key or value")
	}
	return t.set(key, bytes.Clone(value))
}

// Delete removes a key, if it is there.
func (t *Tx) Delete(key []byte) error { return t.set(key, nil) }

func (t *Tx) set(key, value []byte) error {
	if t.own == nil {
		return ErrReadOnly
	}
	if t.bytes += len(key) + len(value) + recordBytes; t.bytes > maxUpdate {
		return fmt.Errorf("%w: an update of more than %d bytes", ErrTooLarge, maxUpdate)
	}
	t.own[string(key)] = value
	return nil
}

// Each calls fn for every key that begins with prefix, in order, until fn returns an
// error. Key and value are valid within the call.
func (t *Tx) Each(prefix []byte, fn func(key, value []byte) error) error {
	written := map[string][]byte{}
	for _, m := range []map[string][]byte{t.ahead, t.own} {
		for k, v := range m {
			if bytes.HasPrefix([]byte(k), prefix) {
				written[k] = v
			}
		}
	}
	mine := slices.Sorted(maps.Keys(written))
	pass := func(before []byte) error { // what was written with keys below
		for len(mine) > 0 && (before == nil || mine[0] < string(before)) {
			k := mine[0]
			mine = mine[1:]
			if v := written[k]; v != nil {
				if err := fn([]byte(k), v); err != nil {
					return err
				}
			}
		}
		return nil
	}
	opt := badger.DefaultIteratorOptions
	opt.Prefix = prefix
	it := t.txn.NewIterator(opt)
	defer it.Close()
	for it.Seek(prefix); it.Valid(); it.Next() {
		item := it.Item()
		if err := pass(item.Key()); err != nil {
			return err
		}
		if _, ok := written[string(item.Key())]; ok {
			continue
		}
		if err := item.Value(func(v []byte) error { return fn(item.Key(), v) }); err != nil {
			return err
		}
	}
	return pass(nil)
}
