package store

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"kvasird/ggml/gguf"
)

// ErrNoModel is wrapped when the store has no model of an id.
var ErrNoModel = errors.New("no such model in the store")

// When new groups are made durable, beside those who write: once so many bytes of a model
// wait, or so long after the first of them. Who writes waits for the disk only when mostWaiting
// bytes are behind.
const (
	flushBytes  = 64 << 20
	flushDelay  = time.Second
	mostWaiting = 4 * flushBytes
)

// Prefixes of folders that are being made or removed.
const (
	newPrefix   = ".new-"
	trashPrefix = ".trash-"
)

// Store is a folder of models. Close it, or the last second's groups are lost.
type Store struct {
	dir   string
	limit int64
	disk  *disk

	opMu     sync.Mutex // held while a model is added, removed, pinned or replaced
	importMu sync.Mutex // one import at a time, as the disk is what it waits for

	kick  chan struct{} // something waits to be flushed
	hurry chan struct{} // and is flushBytes or more
	stop  chan struct{}
	done  sync.WaitGroup

	mu       sync.Mutex // guards what follows, Model.used and Model.reserved
	models   map[gguf.ModelID]*Model
	problems []error
	used     int64
	reserved int64
	closed   bool
}

// Open opens the store in a folder, which it makes if need be. limit bounds the bytes
// on disk, trees and the store's own files included, imported files not; 0 is no
// limit. What a crash left behind is removed. A model that cannot be read does not
// keep the others from it, see Problems.
func Open(dir string, limit int64) (*Store, error) { return open(dir, limit, &disk{}) }

func open(dir string, limit int64, d *disk) (*Store, error) {
	if limit < 0 {
		return nil, fmt.Errorf("store: a limit of %d bytes: it must not be negative", limit)
	}
	dir, err := filepath.Abs(dir)
	if err == nil {
		err = os.MkdirAll(dir, 0o755)
	}
	if err != nil {
		return nil, fmt.Errorf("store: %w", err)
	}
	s := &Store{
		dir: dir, limit: limit, disk: d, models: make(map[gguf.ModelID]*Model),
		kick: make(chan struct{}, 1), hurry: make(chan struct{}, 1), stop: make(chan struct{}),
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("store: %w", err)
	}
	for _, e := range entries {
		if err := s.openEntry(e.Name()); err != nil {
			s.report(err)
		}
	}
	s.done.Go(s.flushLoop)
	return s, nil
}

func (s *Store) openEntry(name string) error {
	path := filepath.Join(s.dir, name)
	if strings.HasPrefix(name, newPrefix) || strings.HasPrefix(name, trashPrefix) {
		return os.RemoveAll(path)
	}
	id, err := gguf.ParseModelID(name)
	if err != nil {
		return nil // not ours
	}
	m, err := s.load(id)
	if err != nil {
		s.used += folderBytes(path)
		return fmt.Errorf("store: model %v cannot be read (remove it and fetch it again): %w", id, err)
	}
	s.models[id] = m
	s.used += m.used
	return nil
}

// folderBytes returns the disk space of the files in a folder, as it is counted.
func folderBytes(path string) (n int64) {
	entries, _ := os.ReadDir(path)
	for _, e := range entries {
		if info, err := e.Info(); err == nil && !Kept(e.Name()) {
			n += allocated(info)
		}
	}
	return n
}

// Close makes everything durable and closes all files.
func (s *Store) Close() error {
	s.mu.Lock()
	closed := s.closed
	s.closed = true
	s.mu.Unlock()
	if closed {
		return nil
	}
	close(s.stop)
	s.done.Wait()
	var errs []error
	for _, m := range s.Models() {
		errs = append(errs, m.Flush())
		m.close()
	}
	return errors.Join(errs...)
}

// flushLoop makes durable what the writers left waiting.
func (s *Store) flushLoop() {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-s.stop:
			return
		case <-s.kick:
		}
		timer.Reset(flushDelay)
		select {
		case <-s.stop:
			return
		case <-s.hurry:
		case <-timer.C:
		}
		for _, m := range s.Models() {
			if err := m.flush(); err != nil {
				m.failed(err)
				wake(s.kick) // to try again when there may be space
			}
		}
	}
}

// wake has the loop that waits for c look again.
func wake(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// Models returns all models, by id.
func (s *Store) Models() []*Model {
	s.mu.Lock()
	defer s.mu.Unlock()
	list := make([]*Model, 0, len(s.models))
	for _, m := range s.models {
		list = append(list, m)
	}
	slices.SortFunc(list, func(a, b *Model) int { return cmp.Compare(string(a.id[:]), string(b.id[:])) })
	return list
}

// Model returns a model, or nil.
func (s *Store) Model(id gguf.ModelID) *Model {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.models[id]
}

// Problems says what could not be read of the folder. Remove takes the id of such a model too.
func (s *Store) Problems() []error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.problems)
}

func (s *Store) report(problem error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.problems = append(s.problems, problem)
}

// Create adds an empty model, to be filled, or returns the one that is there. It
// refuses files that do not hash to the id.
func (s *Store) Create(id gguf.ModelID, files []gguf.FileSum) (*Model, error) {
	if err := checkSums(id, files); err != nil {
		return nil, fmt.Errorf("store: model %v: %w", id, err)
	}
	s.opMu.Lock()
	defer s.opMu.Unlock()
	if m := s.Model(id); m != nil {
		return m, nil
	}
	man := &manifest{Version: manifestVersion}
	for _, f := range files {
		man.Files = append(man.Files, manifestFile{FileSum: f})
	}
	return s.install(id, man, nil)
}

// install makes the folder of a new model; trees may be nil. opMu is held.
func (s *Store) install(id gguf.ModelID, man *manifest, trees [][]byte) (*Model, error) {
	if _, err := os.Stat(s.folder(id)); err == nil {
		return nil, fmt.Errorf("store: model %v is there and cannot be read: remove it first", id)
	}
	tmp := filepath.Join(s.dir, newPrefix+id.String())
	text, err := s.beginFolder(tmp, man)
	if err != nil {
		os.RemoveAll(tmp)
		return nil, fmt.Errorf("store: model %v: %w", id, err)
	}
	need := baseCost(text)
	for i, f := range man.Files {
		if need += fileCost(f.Size); trees != nil {
			need += blocks(int64(len(trees[i])))
		}
	}
	m := &Model{store: s} // who is charged until the real one is
	if err := s.charge(m, need); err != nil {
		os.RemoveAll(tmp)
		return nil, err
	}
	err = s.fillFolder(tmp, man, text, trees)
	if err == nil {
		err = s.disk.rename(tmp, s.folder(id))
	}
	if err != nil {
		os.RemoveAll(tmp) // err says what matters
		os.RemoveAll(s.folder(id))
		s.discharge(m, need)
		return nil, diskError(s.folder(id), need, err)
	}
	m, err = s.load(id)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.used -= need
	if err != nil {
		return nil, fmt.Errorf("store: model %v: %w", id, err)
	}
	s.used += m.used
	s.models[id] = m
	return m, nil
}

// baseCost returns what a model takes beside its files: the manifest twice, as it is
// replaced by a second one, and the folder.
func baseCost(manifest []byte) int64 { return 2*blocks(int64(len(manifest))) + diskBlock }

// beginFolder makes a model's folder with the imported files that it keeps, and returns
// the manifest that says so.
func (s *Store) beginFolder(dir string, man *manifest) ([]byte, error) {
	if err := os.RemoveAll(dir); err != nil {
		return nil, err
	}
	if err := os.Mkdir(dir, 0o755); err != nil {
		return nil, err
	}
	var sources []source
	for _, f := range man.Files {
		if f.Source != nil {
			sources = append(sources, *f.Source)
		}
	}
	if len(sources) > 0 { // all files have one, or none has
		for i, kept := range s.keep(dir, sources) {
			man.Files[i].Source = &kept
		}
	}
	return man.encode()
}

// fillFolder writes all other files of a model that holds nothing.
func (s *Store) fillFolder(dir string, man *manifest, text []byte, trees [][]byte) error {
	if err := s.disk.create(filepath.Join(dir, manifestName), text); err != nil {
		return err
	}
	for i, f := range man.Files {
		if trees != nil {
			if err := s.disk.create(filepath.Join(dir, treeName(i)), trees[i]); err != nil {
				return err
			}
		}
		if f.Source != nil {
			continue
		}
		if err := s.makeSparse(filepath.Join(dir, dataName(i, len(man.Files))), f.Size); err != nil {
			return err
		}
	}
	return s.disk.syncFolder(dir)
}

func (s *Store) makeSparse(path string, size int64) error {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return err
	}
	err = f.Truncate(size)
	if err == nil {
		err = s.disk.sync(f)
	}
	return errors.Join(err, f.Close())
}

func (s *Store) folder(id gguf.ModelID) string { return filepath.Join(s.dir, id.String()) }

// Remove deletes a model and gives its space back. The user's files stay where they are.
func (s *Store) Remove(id gguf.ModelID) error {
	s.opMu.Lock()
	defer s.opMu.Unlock()
	dir := s.folder(id)
	m := s.Model(id)
	if m == nil {
		if _, err := os.Stat(dir); err != nil {
			return fmt.Errorf("store: model %v: %w", id, ErrNoModel)
		}
	} else {
		m.close()
	}
	n := folderBytes(dir)
	trash := filepath.Join(s.dir, trashPrefix+id.String())
	err := s.disk.rename(dir, trash)
	s.mu.Lock()
	if m != nil {
		n = m.used
		delete(s.models, id)
	}
	s.mu.Unlock()
	if err == nil {
		err = os.RemoveAll(trash)
	}
	if err != nil {
		return fmt.Errorf("store: remove model %v: %w", id, err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.used -= n
	if m != nil {
		s.reserved -= m.reserved
		m.used, m.reserved = 0, 0
	}
	return nil
}

// Pin marks a model as one that must not be dropped to make room, or unmarks it. The
// store only remembers that.
func (s *Store) Pin(id gguf.ModelID, pinned bool) error {
	s.opMu.Lock()
	defer s.opMu.Unlock()
	m := s.Model(id)
	if m == nil {
		return fmt.Errorf("store: model %v: %w", id, ErrNoModel)
	}
	man := m.manifest()
	man.Pinned = pinned
	if err := s.writeManifest(id, man); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.pinned = pinned
	return nil
}

func (s *Store) writeManifest(id gguf.ModelID, man *manifest) error {
	text, err := man.encode()
	if err != nil {
		return fmt.Errorf("store: model %v: %w", id, err)
	}
	return s.disk.replace(filepath.Join(s.folder(id), manifestName), text)
}

// readLimited reads a file of at most limit bytes.
func readLimited(path string, limit int64) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err == nil && int64(len(b)) > limit {
		err = fmt.Errorf("%s: more than %d bytes", path, limit)
	}
	return b, err
}
