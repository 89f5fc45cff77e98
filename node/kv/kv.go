// Package kv keeps values on the disk of one node, over badger: by namespace
// (Space), each with a bound on the age and on the bytes of what it keeps. It is
// for what may be forgotten, such as stored responses: a value that is too old,
// or that the bound has no room for, is gone, and what was put in the last
// seconds before a power cut may be. It is not for money, which needs every write
// on the disk before it counts.
//
// A store that cannot be read is moved aside and a new one begun, so that a node
// always starts. What a crash left is checked before use; an opening that ended
// the process twice counts as damage too. A value is never given out changed: it
// has a checksum of its own, and one that fails it is forgotten.
//
// Invariants: the values of a space, with their keys and entryOverhead each, are
// at most Bounds.Bytes; the files are at most about twice that and compactAfter. The
// process is not killed by a full disk: badger writes through mapped memory, so
// nothing is written unless diskReserve is free.
//
// Layout of keys in badger, with the name of the space in front of each: see
// record.go. A DB and its Spaces are safe for concurrent use; a DB owns one
// goroutine beside badger's.
package kv

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"regexp"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/dgraph-io/badger/v4"
)

// Limits and times of a store.
const (
	diskReserve   = 256 << 20 // free on the disk, or nothing is written
	maxOpenings   = 2         // that did not end, until the store counts as damaged
	sweepPause    = 5 * time.Minute
	compactAfter  = 64 << 20 // bytes that were put and removed since the last time
	compactTables = 16       // not yet merged into the others
	deadPart      = 0.5      // of a file of the value log, from which on what lives in it is moved
)

// Errors of a store.
var (
	ErrBusy     = errors.New("is in use by another process")
	ErrNoRoom   = errors.New("too little room on the disk")
	ErrTooLarge = errors.New("is larger than the store takes")
	ErrClosed   = errors.New("the store is closed")
)

// Bounds are what a space keeps. Both are above zero.
type Bounds struct {
	Age   time.Duration
	Bytes int64
}

// Config says where a store is and what is in it.
type Config struct {
	Path   string            // folder of the store; beside it are Path.state and, after damage, Path.damaged
	Spaces map[string]Bounds // by name: a to z
	Logger *slog.Logger
	Now    func() time.Time // nil: the clock

	reserve int64 // diskReserve, but in tests
}

// DB is an open store.
type DB struct {
	cfg    Config
	badger *badger.DB
	spaces map[string]*Space
	state  *stateFile
	churn  atomic.Int64  // bytes that were put and removed since the last compaction
	due    chan struct{} // has one when the sweeper shall not wait
	quit   chan struct{} // closed to end the sweeper,
	swept  chan struct{} // which closes this

	mu     sync.RWMutex // guards closed, and is read-locked by whoever reads or writes values
	closed bool
}

var spaceName = regexp.MustCompile(`^[a-z]{1,16}$`)

// Open opens the store, or begins one. Errors: ErrBusy, ErrNoRoom, or one of the
// folder around it.
func Open(cfg Config) (*DB, error) {
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	if cfg.reserve == 0 {
		cfg.reserve = diskReserve
	}
	for name, b := range cfg.Spaces {
		if !spaceName.MatchString(name) || b.Age <= 0 || b.Bytes <= 0 {
			return nil, fmt.Errorf("kv: space %q with %v and %d bytes: want a name of a to z and bounds above zero", name, b.Age, b.Bytes)
		}
	}
	state, err := lockState(cfg.Path + ".state")
	if err != nil {
		return nil, fmt.Errorf("kv: %s %w", cfg.Path, err)
	}
	d, err := open(cfg, state)
	if err != nil {
		state.Close()
		return nil, fmt.Errorf("kv: %s: %w", cfg.Path, err)
	}
	go d.sweep()
	return d, nil
}

// open tries the store that is there, and begins another when it is damaged.
func open(cfg Config, state *stateFile) (*DB, error) {
	if err := checkRoom(filepath.Dir(cfg.Path), cfg.reserve); err != nil {
		return nil, err
	}
	var damage error
	if state.openings >= maxOpenings {
		damage = fmt.Errorf("the process ended %d times while it was opened", state.openings)
	} else {
		d, err := tryOpen(cfg, state)
		if err == nil || errors.Is(err, errState) {
			return d, err
		}
		damage = err
	}
	aside := cfg.Path + ".damaged"
	if err := moveAside(cfg.Path, aside); err != nil {
		return nil, fmt.Errorf("it is damaged (%v) and cannot be moved aside: %w", damage, err)
	}
	cfg.Logger.Warn("the store of values was damaged: a new one is begun, the old one is kept aside", "damage", damage, "aside", aside)
	state.openings, state.clean = 0, true
	return tryOpen(cfg, state)
}

// moveAside renames the store. Of what was aside before, nothing is kept.
func moveAside(path, aside string) error {
	if err := os.RemoveAll(aside); err != nil {
		return err
	}
	if err := os.Rename(path, aside); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// tryOpen opens badger and reads what the spaces have. A panic in there is
// damage, as badger does not check all that it reads.
func tryOpen(cfg Config, state *stateFile) (_ *DB, err error) {
	if err := state.opening(); err != nil {
		return nil, err
	}
	d := &DB{cfg: cfg, state: state, spaces: map[string]*Space{},
		due: make(chan struct{}, 1), quit: make(chan struct{}), swept: make(chan struct{})}
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("it cannot be read: %v", r)
		}
		if err != nil && d.badger != nil {
			d.badger.Close()
		}
	}()
	if d.badger, err = badger.Open(options(cfg)); err != nil {
		d.badger = nil
		return nil, err
	}
	if !state.clean {
		if err := d.badger.VerifyChecksum(); err != nil {
			return nil, err
		}
	}
	for name, b := range cfg.Spaces {
		s := newSpace(d, name, b)
		if err := s.load(); err != nil {
			return nil, fmt.Errorf("space %s: %w", name, err)
		}
		d.spaces[name] = s
	}
	return d, state.opened()
}

// Space returns the space of that name, which was configured.
func (d *DB) Space(name string) *Space { return d.spaces[name] }

// Close writes out what is in memory. It waits for running calls, and may be
// called again.
func (d *DB) Close() error {
	d.mu.Lock()
	closed := d.closed
	d.closed = true
	d.mu.Unlock()
	if closed {
		return nil
	}
	close(d.quit)
	<-d.swept
	err := d.badger.Close()
	if err == nil {
		err = d.state.closed()
	}
	return errors.Join(err, d.state.Close())
}

// use keeps the store open until done is called.
func (d *DB) use() (done func(), err error) {
	d.mu.RLock()
	if d.closed {
		d.mu.RUnlock()
		return nil, ErrClosed
	}
	return d.mu.RUnlock, nil
}

// sweep forgets what is too old, and gives its room back to the disk.
func (d *DB) sweep() {
	defer close(d.swept)
	tick := time.NewTicker(sweepPause)
	defer tick.Stop()
	for {
		select {
		case <-d.quit:
			return
		case <-tick.C:
		case <-d.due:
		}
		if err := d.reclaim(); err != nil {
			d.cfg.Logger.Warn("the store of values was not swept", "err", err)
		}
	}
}

// reclaim is one round of the sweeper, which alone calls it: Close waits for it, so
// every step is short. Badger's own compaction is off: it wakes up 40 times a second,
// whether there is something to do or not.
func (d *DB) reclaim() error {
	for _, s := range d.spaces {
		if err := s.forget(); err != nil {
			return err
		}
	}
	if d.churn.Load() < compactAfter && d.badger.Levels()[0].NumTables < compactTables {
		return nil
	}
	if err := checkRoom(d.cfg.Path, d.cfg.reserve); err != nil {
		return err
	}
	d.churn.Store(0)
	if err := d.badger.Flatten(1); err != nil {
		return err
	}
	for {
		select {
		case <-d.quit:
			return nil
		default:
		}
		if err := d.cleanLog(); errors.Is(err, badger.ErrNoRewrite) {
			return nil
		} else if err != nil {
			return err
		}
	}
}

// cleanLog frees one file of the value log, or returns badger.ErrNoRewrite. Nobody
// writes meanwhile: badger reads a number there that its writes change.
func (d *DB) cleanLog() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.badger.RunValueLogGC(deadPart)
}

// moved counts what was put or removed.
func (d *DB) moved(n int64) {
	if d.churn.Add(n) < compactAfter {
		return
	}
	select {
	case d.due <- struct{}{}:
	default:
	}
}

// checkRoom says whether something may be written to the disk of a folder.
func checkRoom(dir string, reserve int64) error {
	var st syscall.Statfs_t
	if err := syscall.Statfs(dir, &st); err != nil {
		return err
	}
	if free := int64(st.Bavail) * int64(st.Bsize); free < reserve {
		return fmt.Errorf("%w: %d MB are free at %s, and %d MB stay free", ErrNoRoom, free>>20, dir, reserve>>20)
	}
	return nil
}
