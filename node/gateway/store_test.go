package gateway

import (
	"bytes"
	"context"
	"errors"
	"testing"
	"time"
)

func TestMemory(t *testing.T) {
	now := time.Unix(1700000000, 0)
	m := newMemory(func() time.Time { return now })
	has := func(key string, want bool) {
		t.Helper()
		if _, ok, err := m.Get(t.Context(), key); ok != want || err != nil {
			t.Errorf("%s: there %v, %v", key, ok, err)
		}
	}
	put := func(key string, size int) {
		t.Helper()
		if err := m.Put(t.Context(), key, make([]byte, size)); err != nil {
			t.Fatal(err)
		}
	}
	put("a", 10)
	now = now.Add(memoryAge)
	put("b", 20)
	has("a", true)
	now = now.Add(time.Second)
	has("a", false)
	has("b", true)
	put("c", memoryBytes-20)
	has("b", true)
	put("d", 1)
	has("b", false)
	has("c", true)
	put("c", 5)
	if m.bytes != 6 || len(m.values) != 2 || m.order.Len() != 2 {
		t.Errorf("%d bytes, %d values", m.bytes, len(m.values))
	}
	if err := m.Put(t.Context(), "v", []byte("value")); err != nil {
		t.Fatal(err)
	}
	if got, _, err := m.Get(t.Context(), "v"); err != nil || !bytes.Equal(got, []byte("value")) {
		t.Errorf("got %q, %v", got, err)
	}
	for _, want := range []bool{true, false} {
		if ok, err := m.Delete(t.Context(), "v"); ok != want || err != nil {
			t.Errorf("deleted %v, %v", ok, err)
		}
	}
	put("e", memoryBytes+1) // larger than all: is not kept
	has("e", false)
	if m.bytes != 0 || len(m.values) != 0 {
		t.Errorf("%d bytes, %d values are left", m.bytes, len(m.values))
	}
}

// brokenStore fails.
type brokenStore struct{ Store }

func (brokenStore) Put(context.Context, string, []byte) error { return errors.New("disk full") }

// A response that could not be stored says so.
func TestStoreFails(t *testing.T) {
	url, _ := serveCases(t, &scriptEngine{pieces: []string{"a"}}, func(c *Config) { c.Store = brokenStore{} })
	want(t, "store", ask(t, url+responsesPath, input(`"hi"`))["store"], `false`)
}
