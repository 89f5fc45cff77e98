package sim

import (
	"errors"
	"io"
	"os"
	"sync"
	"time"

	"github.com/libp2p/go-libp2p/core/network"
)

const (
	tick    = 5 * time.Millisecond // what is under way arrives at multiples of it, so together
	lineCap = 16 << 20             // bytes under way: nobody sends that much in a simulation
)

var errFull = errors.New("sim: more bytes are under way than a line of the simulation holds")

// line is one direction of a stream. Who writes never waits; who reads, one at a time, waits
// until the bytes have arrived.
type line struct {
	link *link

	mu      sync.Mutex // guards what follows
	parts   []part
	size    int
	lost    error // what readers and writers get, once they are cut off
	ended   bool  // nothing more is written
	deaf    bool  // nothing more is read
	until   time.Time
	arrival *time.Timer   // of the first part
	poke    chan struct{} // something else changed; capacity 1
}

// part is what was written at once; no bytes are the end.
type part struct {
	at    time.Time
	bytes []byte
}

func newLine(l *link) *line {
	t := time.NewTimer(time.Hour)
	t.Stop()
	return &line{link: l, arrival: t, poke: make(chan struct{}, 1)}
}

func (l *line) write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.lost != nil:
		return 0, l.lost
	case l.ended:
		return 0, os.ErrClosed
	case l.deaf || len(p) == 0:
		return len(p), nil
	case l.size+len(p) > lineCap:
		return 0, errFull
	}
	l.size += len(p)
	l.link.net.bytes.Add(int64(len(p)))
	l.sendLocked(append([]byte(nil), p...))
	return len(p), nil
}

func (l *line) sendLocked(p []byte) {
	at := time.Now().Add(l.link.oneWay + tick - 1).Truncate(tick)
	l.parts = append(l.parts, part{at, p})
	if len(l.parts) == 1 {
		l.arrival.Reset(time.Until(at))
	}
}

// end tells the reader that nothing more comes.
func (l *line) end() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.ended && l.lost == nil {
		l.ended = true
		l.sendLocked(nil)
	}
}

// mute ends the reading.
func (l *line) mute() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.deaf = true
	l.parts, l.size = nil, 0
	l.wake()
}

// cut ends both.
func (l *line) cut(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.lost == nil {
		l.lost = err
		l.parts, l.size = nil, 0
		l.arrival.Stop()
		l.wake()
	}
}

func (l *line) wake() {
	select {
	case l.poke <- struct{}{}:
	default:
	}
}

func (l *line) setDeadline(t time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.until = t
	l.wake()
}

func (l *line) read(p []byte) (int, error) {
	for {
		healed := l.link.healed()
		n, wait, err := l.take(p)
		if n > 0 || err != nil || len(p) == 0 {
			return n, err
		}
		var late <-chan time.Time
		if wait > 0 {
			late = time.After(wait)
		}
		select {
		case <-l.arrival.C:
		case <-l.poke:
		case <-late:
		case <-healed:
		}
	}
}

// take returns what has arrived. Without anything, wait is the time until the deadline, if any.
func (l *line) take(p []byte) (n int, wait time.Duration, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := time.Now()
	switch {
	case l.lost != nil:
		return 0, 0, l.lost
	case l.deaf:
		return 0, 0, os.ErrClosed
	case !l.until.IsZero() && !now.Before(l.until):
		return 0, 0, os.ErrDeadlineExceeded
	}
	cut := l.link.isCut()
	for len(l.parts) > 0 && !l.parts[0].at.After(now) && !cut {
		first := &l.parts[0]
		if len(first.bytes) == 0 { // the end stays
			if n == 0 {
				err = io.EOF
			}
			return n, 0, err
		}
		k := copy(p[n:], first.bytes)
		n, l.size = n+k, l.size-k
		if first.bytes = first.bytes[k:]; len(first.bytes) > 0 {
			return n, 0, nil
		}
		l.parts = l.parts[1:]
	}
	if len(l.parts) > 0 && !cut {
		l.arrival.Reset(max(0, l.parts[0].at.Sub(now)))
	}
	if !l.until.IsZero() {
		wait = l.until.Sub(now)
	}
	return n, wait, nil
}

// stream is two lines.
type stream struct {
	conn    *conn
	in, out *line
}

func (s *stream) Read(p []byte) (int, error)         { return s.in.read(p) }
func (s *stream) Write(p []byte) (int, error)        { return s.out.write(p) }
func (s *stream) SetDeadline(t time.Time) error      { return s.SetReadDeadline(t) }
func (s *stream) SetReadDeadline(t time.Time) error  { s.in.setDeadline(t); return nil }
func (s *stream) SetWriteDeadline(t time.Time) error { return nil } // a write does not wait

func (s *stream) CloseWrite() error { s.out.end(); return nil }
func (s *stream) CloseRead() error  { s.in.mute(); return nil }

func (s *stream) Close() error {
	s.out.end()
	s.in.mute()
	s.conn.forget(s)
	return nil
}

func (s *stream) Reset() error { return s.ResetWithError(0) }

func (s *stream) ResetWithError(code network.StreamErrorCode) error {
	err := &network.StreamError{ErrorCode: code}
	s.in.cut(err)
	s.out.cut(err)
	s.conn.forget(s)
	return nil
}
