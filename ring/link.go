package ring

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"kvasird/p2p"
)

const (
	// readBuffer lets one read take the header and the payload of a small frame.
	readBuffer = 64 << 10
	// roomBytes is what may wait to be written for more rows to be added.
	roomBytes = MaxFrame
	// mostQueued bounds the frames that wait to be written: beside rows they are small, few for
	// each session and heartbeat. A peer that lets more wait does not read.
	mostQueued = 1 << 14
)

// buffer is a pooled frame.
type buffer struct {
	b   []byte // the payload, in the buffer of w
	w   *p2p.FrameWriter
	to  io.Writer // of w, while it sends
	typ uint8
	id  uint64
}

var buffers = sync.Pool{New: func() any {
	buf := new(buffer)
	buf.w = p2p.NewFrameWriter(buf, MaxFrame)
	return buf
}}

// getBuffer returns a frame with n bytes of payload of unspecified content, aligned for numbers.
// Its user has checked that n is at most MaxFrame.
func getBuffer(typ uint8, id uint64, n int) *buffer {
	buf := buffers.Get().(*buffer)
	b, err := buf.w.Payload(n)
	if err != nil {
		panic(err)
	}
	buf.b, buf.typ, buf.id = b, typ, id
	return buf
}

// Write is for the buffer's own frame writer.
func (buf *buffer) Write(frame []byte) (int, error) { return buf.to.Write(frame) }

// link is a connection, the same on both sides. One goroutine reads; all frames are left to the
// writer goroutine, so that nobody waits for the peer.
type link struct {
	conn     net.Conn
	peer     string        // text of the remote address
	patience time.Duration // for the peer to take a frame
	r        *p2p.FrameReader
	heard    atomic.Bool // a frame came since the last beat

	silent    int       // beats without a frame; the owner's
	precision Precision // of the rows that are sent here; set before the writer starts

	mu        sync.Mutex // guards the rest
	out       []*buffer
	bytes     int // of out and of what is being written
	starved   bool
	ended     error
	finishing bool          // the writer ends when it has written what there is
	drained   func()        // tells the owner that there is room again
	kick      chan struct{} // the writer has something to do; capacity 1
	writer    sync.WaitGroup
}

func newLink(conn net.Conn, t *Timing) *link {
	return &link{
		conn: conn, peer: fmt.Sprint(conn.RemoteAddr()), patience: t.DeadAfter,
		r: p2p.NewFrameReader(bufio.NewReaderSize(conn, readBuffer), MaxFrame), kick: make(chan struct{}, 1),
	}
}

// next reads a frame; its payload is valid until the following call.
func (l *link) next() (p2p.Frame, error) {
	f, err := l.r.Next()
	if errors.Is(err, p2p.ErrFrameTooLarge) || errors.Is(err, p2p.ErrFrame) {
		return f, violation(err)
	}
	if err != nil {
		return f, err
	}
	l.heard.Store(true)
	if f.Flags != 0 {
		return f, violation(fmt.Errorf("frame of type %d with flags %#x, want 0", f.Type, f.Flags))
	}
	return f, nil
}

// post leaves a frame to the writer goroutine.
func (l *link) post(buf *buffer) {
	l.mu.Lock()
	switch {
	case l.ended != nil:
		l.mu.Unlock()
		buffers.Put(buf)
		return
	case len(l.out) >= mostQueued:
		l.mu.Unlock()
		buffers.Put(buf)
		l.end(fmt.Errorf("%d frames wait for the peer to read", mostQueued))
		return
	}
	l.out = append(l.out, buf)
	l.bytes += len(buf.b)
	l.mu.Unlock()
	l.wake()
}

// send posts a frame with a copy of payload.
func (l *link) send(typ uint8, id uint64, payload []byte) {
	buf := getBuffer(typ, id, len(payload))
	copy(buf.b, payload)
	l.post(buf)
}

func (l *link) wake() {
	select {
	case l.kick <- struct{}{}:
	default:
	}
}

// room says whether rows may be added. If not, drained is called once they may.
func (l *link) room() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.starved = l.bytes >= roomBytes && l.ended == nil
	return !l.starved
}

// end has the reader close the connection, without waiting for it; the first reason is kept.
func (l *link) end(err error) {
	l.mu.Lock()
	if l.ended == nil {
		l.ended = err
	}
	l.mu.Unlock()
	l.conn.SetDeadline(time.Unix(1, 0))
	l.wake()
}

// cause is why the link ended: what end was told first, or else err.
func (l *link) cause(err error) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ended != nil {
		return l.ended
	}
	return err
}

// startWriter starts the writer goroutine; stop ends it.
func (l *link) startWriter(drained func()) {
	l.drained = drained
	l.writer.Go(func() {
		var batch []*buffer
		for range l.kick {
			l.mu.Lock()
			batch, l.out = l.out, batch[:0]
			ended, finishing := l.ended != nil, l.finishing
			l.mu.Unlock()
			for i, buf := range batch {
				l.write(buf, ended)
				batch[i] = nil
			}
			if ended || finishing {
				return
			}
		}
	})
}

// write writes a posted frame or lets go of it. A failure ends the link: the reader reports it.
func (l *link) write(buf *buffer, ended bool) {
	n := len(buf.b)
	if !ended {
		l.conn.SetWriteDeadline(time.Now().Add(l.patience))
		buf.to = l.conn
		if err := buf.w.Send(buf.typ, 0, buf.id); err != nil {
			l.end(fmt.Errorf("write: %w", err))
		}
		buf.to = nil
	}
	buf.b = nil
	buffers.Put(buf)
	l.mu.Lock()
	l.bytes -= n
	again := l.starved && l.bytes < roomBytes
	if again {
		l.starved = false
	}
	l.mu.Unlock()
	if again {
		l.drained()
	}
}

// goodbye sends a last frame, after what waits, and waits for that.
func (l *link) goodbye(r report) {
	l.send(frameError, 0, putReport(nil, r))
	l.mu.Lock()
	l.finishing = true
	l.mu.Unlock()
	l.wake()
	l.writer.Wait()
}

// stop closes the connection and waits for the writer goroutine. The reader calls it.
func (l *link) stop() {
	l.end(net.ErrClosed)
	l.conn.Close()
	l.writer.Wait()
}

// refuse tells the peer why the link ends, without waiting long for it. The writer goroutine does
// not run yet, or has ended.
func (l *link) refuse(code Code, text string) {
	l.conn.SetWriteDeadline(time.Now().Add(time.Second))
	w := p2p.NewFrameWriter(l.conn, MaxFrame)
	w.Write(p2p.Frame{Type: frameError, Payload: putReport(nil, report{code: code, text: text})})
}

// exchange sends a frame and reads the answer, both before the deadline. The writer goroutine
// does not run yet.
func (l *link) exchange(typ uint8, payload []byte, deadline time.Time) (p2p.Frame, error) {
	l.conn.SetDeadline(deadline)
	if err := p2p.NewFrameWriter(l.conn, MaxFrame).Write(p2p.Frame{Type: typ, Payload: payload}); err != nil {
		return p2p.Frame{}, err
	}
	f, err := l.next()
	if err != nil {
		return f, err
	}
	l.conn.SetDeadline(time.Time{}) // fails if the peer has closed; its frame counts all the same
	return f, l.cause(nil)          // end may have set the deadline before that
}

// beat counts a time without a frame and says whether the peer is silent for too long.
func (l *link) beat() bool {
	if l.heard.Swap(false) {
		l.silent = 0
		return false
	}
	l.silent++
	return l.silent >= beatsPerDeath
}

// quiet says whether err is how a link ends when its peer or this side closes it.
func quiet(err error) bool {
	return errors.Is(err, io.EOF) || errors.Is(err, io.ErrClosedPipe) || errors.Is(err, net.ErrClosed)
}
