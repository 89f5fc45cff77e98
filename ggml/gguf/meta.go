package gguf

import (
	"errors"
	"fmt"
)

// ErrNoKey is wrapped by the getters of Metadata when the key is not there.
var ErrNoKey = errors.New("key is not in the metadata")

// KV is one metadata entry.
type KV struct {
	Key   string
	Value Value
}

// Metadata is an ordered list of entries with unique keys. The zero value is empty.
type Metadata struct {
	list  []KV
	index map[string]int
}

// Len returns the number of entries.
func (m Metadata) Len() int { return len(m.list) }

// At returns entry i in file order; 0 <= i < Len.
func (m Metadata) At(i int) KV { return m.list[i] }

// Get returns the value of a key.
func (m Metadata) Get(key string) (Value, bool) {
	i, ok := m.index[key]
	if !ok {
		return Value{}, false
	}
	return m.list[i].Value, true
}

// has reports whether a key is there.
func (m Metadata) has(key string) bool {
	_, ok := m.index[key]
	return ok
}

// set replaces the value of a key, or appends it.
func (m *Metadata) set(key string, v Value) {
	if i, ok := m.index[key]; ok {
		m.list[i].Value = v
		return
	}
	if m.index == nil {
		m.index = make(map[string]int)
	}
	m.index[key] = len(m.list)
	m.list = append(m.list, KV{key, v})
}

// Int returns an integer of any width; 0 <= value is not checked.
func (m Metadata) Int(key string) (int64, error) { return getter(m, key, "integer", Value.Int) }

// Float returns a number.
func (m Metadata) Float(key string) (float64, error) { return getter(m, key, "number", Value.Float) }

// Bool returns a bool.
func (m Metadata) Bool(key string) (bool, error) { return getter(m, key, "bool", Value.Bool) }

// Text returns a string.
func (m Metadata) Text(key string) (string, error) { return getter(m, key, "string", Value.Text) }

// Strings returns an array of strings.
func (m Metadata) Strings(key string) ([]string, error) {
	return getter(m, key, "array of strings", Value.Strings)
}

// Ints returns an array of integers.
func (m Metadata) Ints(key string) ([]int64, error) {
	return getter(m, key, "array of integers", Value.Ints)
}

func getter[T any](m Metadata, key, want string, get func(Value) (T, bool)) (T, error) {
	var zero T
	v, ok := m.Get(key)
	if !ok {
		return zero, fmt.Errorf("gguf: %s: %w", key, ErrNoKey)
	}
	x, ok := get(v)
	if !ok {
		return zero, fmt.Errorf("gguf: %s is %s %v, want %s", key, v.Type(), v, want)
	}
	return x, nil
}

// count returns an integer within [0, limit], or missing when the key is not there.
func (m Metadata) count(key string, missing, limit int) (int, error) {
	n, err := m.Int(key)
	switch {
	case errors.Is(err, ErrNoKey):
		return missing, nil
	case err != nil:
		return 0, err
	case n < 0 || n > int64(limit):
		return 0, fmt.Errorf("gguf: %s is %d, must be in [0, %d]", key, n, limit)
	}
	return int(n), nil
}
