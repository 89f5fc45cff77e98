package kv

import (
	"bytes"
	"cmp"
	"slices"

	"github.com/dgraph-io/badger/v4"
)

// loading is what is found in badger of a space.
type loading struct {
	space   *Space
	entries []*entry
	parts   map[uint64][]uint32 // by serial, until their head comes
	stray   [][]byte            // keys of what belongs to no value
}

// load reads the index from the heads, and removes what a crash left half written
// or half removed.
func (s *Space) load() error {
	l := &loading{space: s, parts: map[uint64][]uint32{}}
	err := s.db.badger.View(func(txn *badger.Txn) error {
		it := txn.NewIterator(badger.IteratorOptions{Prefix: append([]byte(s.name), 0)})
		defer it.Close()
		for it.Rewind(); it.Valid(); it.Next() { // parts come before heads
			l.take(it.Item())
		}
		return nil
	})
	if err != nil {
		return err
	}
	slices.SortFunc(l.entries, func(x, y *entry) int { return cmp.Or(cmp.Compare(x.at, y.at), cmp.Compare(x.serial, y.serial)) })
	now := s.db.cfg.Now().UnixMilli()
	s.mu.Lock()
	for _, e := range l.entries {
		e.at = min(e.at, now) // the clock may have been wrong
		s.countLocked(e)
	}
	s.mu.Unlock()
	if err := l.clean(); err != nil {
		return err
	}
	return s.forget()
}

// take sorts out one key.
func (l *loading) take(item *badger.Item) {
	key := item.KeyCopy(nil)
	rest := bytes.TrimPrefix(key, append([]byte(l.space.name), 0))
	if len(rest) > 0 && rest[0] == tagPart {
		if serial, part, ok := parsePart(rest[1:]); ok {
			l.parts[serial] = append(l.parts[serial], part)
			l.space.serial = max(l.space.serial, serial)
			return
		}
	}
	if len(rest) > 1 && rest[0] == tagHead && len(rest) <= maxKey+1 {
		e := &entry{key: string(rest[1:])}
		err := item.Value(func(b []byte) (err error) {
			e.head, err = decodeHead(b)
			return err
		})
		if err == nil && int64(len(l.parts[e.serial])) == e.parts() {
			l.entries = append(l.entries, e)
			l.space.serial = max(l.space.serial, e.serial)
			delete(l.parts, e.serial)
			return
		}
	}
	l.stray = append(l.stray, key)
}

// clean removes what belongs to no value.
func (l *loading) clean() error {
	for serial, parts := range l.parts {
		for _, part := range parts {
			l.stray = append(l.stray, l.space.partKey(serial, int64(part)))
		}
	}
	if len(l.stray) == 0 {
		return nil
	}
	l.space.db.cfg.Logger.Info("halves of stored values are removed", "space", l.space.name, "records", len(l.stray))
	batch := l.space.batch()
	defer batch.Cancel()
	for _, key := range l.stray {
		if err := batch.Delete(key); err != nil {
			return err
		}
	}
	return batch.Flush()
}
