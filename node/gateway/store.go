package gateway

import (
	"container/list"
	"context"
	"sync"
	"time"
)

// Store keeps responses, so that a later request may go on from them. It is safe
// for concurrent use, and may forget what is old or large.
type Store interface {
	// Get returns the value under key; false when there is none.
	Get(ctx context.Context, key string) ([]byte, bool, error)
	// Put keeps a value, which is the store's from then on.
	Put(ctx context.Context, key string, value []byte) error
	// Delete says whether there was a value.
	Delete(ctx context.Context, key string) (bool, error)
}

// Bounds of the store in memory.
const (
	memoryAge   = time.Hour
	memoryBytes = 64 << 20
)

// memory is a Store that forgets the oldest values.
type memory struct {
	now func() time.Time

	mu     sync.Mutex // guards what follows
	bytes  int
	order  *list.List // of *kept, the oldest in front
	values map[string]*list.Element
}

type kept struct {
	key   string
	value []byte
	at    time.Time
}

func newMemory(now func() time.Time) *memory {
	return &memory{now: now, order: list.New(), values: map[string]*list.Element{}}
}

func (m *memory) Get(_ context.Context, key string) ([]byte, bool, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.forgetLocked()
	e, ok := m.values[key]
	if !ok {
		return nil, false, nil
	}
	return e.Value.(*kept).value, true, nil
}

func (m *memory) Put(_ context.Context, key string, value []byte) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.dropLocked(m.values[key])
	m.values[key] = m.order.PushBack(&kept{key, value, m.now()})
	m.bytes += len(value)
	m.forgetLocked()
	return nil
}

func (m *memory) Delete(_ context.Context, key string) (bool, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.forgetLocked()
	_, ok := m.values[key]
	m.dropLocked(m.values[key])
	return ok, nil
}

// forgetLocked keeps to the bounds.
func (m *memory) forgetLocked() {
	for e := m.order.Front(); e != nil; e = m.order.Front() {
		if m.bytes <= memoryBytes && m.now().Sub(e.Value.(*kept).at) <= memoryAge {
			return
		}
		m.dropLocked(e)
	}
}

func (m *memory) dropLocked(e *list.Element) {
	if e == nil {
		return
	}
	k := m.order.Remove(e).(*kept)
	delete(m.values, k.key)
	m.bytes -= len(k.value)
}
