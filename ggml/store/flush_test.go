package store

import (
	"path/filepath"
	"testing"
	"time"
)

// Who writes does not wait for a disk that is slow to make things durable, unless it is far
// behind.
func TestWriteBesideFlush(t *testing.T) {
	const size = mostWaiting + flushBytes
	fx := newFixture(make([]byte, size))
	begun, end := make(chan struct{}, 100), make(chan struct{})
	armed := false
	s, err := open(t.TempDir(), 0, &disk{before: func(op, path string) error {
		if armed && op == "sync" && filepath.Base(path) == "model.gguf" {
			begun <- struct{}{}
			<-end
		}
		return nil
	}})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	m := fx.create(t, s)
	armed = true
	written := make(chan int64, size/flushBytes)
	go func() {
		for off := int64(0); off < size; off += flushBytes {
			if err := fx.write(m, 0, Span{off, flushBytes}); err != nil {
				t.Error(err)
			}
			written <- off + flushBytes
		}
		close(written)
	}()
	for want := int64(flushBytes); want < mostWaiting; want += flushBytes {
		if got := <-written; got != want {
			t.Fatalf("%d bytes are written, want %d", got, want)
		}
	}
	<-begun
	select {
	case got := <-written:
		t.Errorf("%d bytes are written and none is durable", got)
	case <-time.After(50 * time.Millisecond):
	}
	close(end)
	for range written {
	}
	if err := m.Flush(); err != nil {
		t.Error(err)
	}
	if !m.Complete() {
		t.Error("not all is held")
	}
}
