package experts

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
	// directBytes bounds what may be on its way to a peer for a frame to be written by the
	// goroutine that has it. Below it the socket's buffer takes the frame even if the peer
	// has stopped; above it the writer goroutine waits instead.
	directBytes = 64 << 10
)

// buffer is a pooled payload that is sent from where it is, to whichever link.
type buffer struct {
	b  []byte // the payload, in the buffer of w
	w  *p2p.FrameWriter
	to io.Writer // of w, while it sends
}

var buffers = sync.Pool{New: func() any {
	buf := new(buffer)
	buf.w = p2p.NewFrameWriter(buf, MaxFrame)
	return buf
}}

// getBuffer returns a buffer of n bytes of unspecified content, aligned for numbers. Its user
// has checked that n is at most MaxFrame.
func getBuffer(n int) *buffer {
	buf := buffers.Get().(*buffer)
	b, err := buf.w.Payload(n)
	if err != nil {
		panic(err)
	}
	buf.b = b
	return buf
}

// Write is for the buffer's own frame writer.
func (buf *buffer) Write(frame []byte) (int, error) { return buf.to.Write(frame) }

// send writes the buffer as a frame; the link's wmu is held.
func (buf *buffer) send(to io.Writer, typ uint8, id uint64) error {
	buf.to = to
	err := buf.w.Send(typ, 0, id)
	buf.to, buf.b = nil, nil
	return err
}

// outFrame is a frame for the writer goroutine. Either payload or pooled is used.
type outFrame struct {
	typ     uint8
	id      uint64
	payload []byte  // not changed until written
	pooled  *buffer // returned to the pool once written
}

// link is the connection of one session, the same on both sides. One goroutine reads. Anyone
// writes under wmu, or leaves the frame to the writer goroutine.
type link struct {
	conn   net.Conn
	source frameSource // conn, for r
	r      *p2p.FrameReader
	heard  atomic.Bool // a frame came since this was last cleared

	wmu sync.Mutex       // guards w
	w   *p2p.FrameWriter // one Write per frame

	omu    sync.Mutex // guards out, ended
	out    []outFrame // bounded by the calls, programs and heartbeats outstanding
	ended  bool
	kick   chan struct{} // the writer has something to do; capacity 1
	writer sync.WaitGroup
}

func newLink(conn net.Conn) *link {
	l := &link{
		conn: conn, source: frameSource{Conn: conn},
		w:    p2p.NewFrameWriter(conn, MaxFrame),
		kick: make(chan struct{}, 1),
	}
	l.r = p2p.NewFrameReader(bufio.NewReaderSize(&l.source, readBuffer), MaxFrame)
	return l
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
	l.source.consumed += int64(p2p.FrameHeader + len(f.Payload))
	l.heard.Store(true)
	if f.Flags != 0 {
		return f, violation(fmt.Errorf("frame of type %d with flags %#x, want 0", f.Type, f.Flags))
	}
	return f, nil
}

// write sends a small frame at once. It may wait for the peer.
func (l *link) write(typ uint8, id uint64, payload []byte) error {
	l.wmu.Lock()
	defer l.wmu.Unlock()
	return l.w.Write(p2p.Frame{Type: typ, ID: id, Payload: payload})
}

// post leaves a frame to the writer goroutine.
func (l *link) post(f outFrame) {
	l.omu.Lock()
	if l.ended {
		l.omu.Unlock()
		f.release()
		return
	}
	l.out = append(l.out, f)
	l.omu.Unlock()
	select {
	case l.kick <- struct{}{}:
	default:
	}
}

func (f *outFrame) release() {
	if f.pooled != nil {
		buffers.Put(f.pooled)
	}
}

// startWriter starts the writer goroutine; stopWriter ends it. written, if not nil, is called
// for each frame after it was sent or given up.
func (l *link) startWriter(written func(typ uint8)) {
	l.writer.Go(func() {
		var batch []outFrame
		for range l.kick {
			l.omu.Lock()
			batch, l.out = l.out, batch[:0]
			ended := l.ended
			l.omu.Unlock()
			for i := range batch {
				l.writeOut(&batch[i])
				if written != nil {
					written(batch[i].typ)
				}
				batch[i] = outFrame{}
			}
			if ended {
				return
			}
		}
	})
}

// writeOut writes a posted frame. A failure closes the connection: the reader reports it.
func (l *link) writeOut(f *outFrame) {
	var err error
	if f.pooled == nil {
		err = l.write(f.typ, f.id, f.payload)
	} else {
		l.wmu.Lock()
		err = f.pooled.send(l.conn, f.typ, f.id)
		l.wmu.Unlock()
	}
	if err != nil {
		l.conn.Close()
	}
	f.release()
}

// stopWriter closes the connection and waits for the writer goroutine.
func (l *link) stopWriter() {
	l.conn.Close()
	l.omu.Lock()
	l.ended = true
	l.omu.Unlock()
	select {
	case l.kick <- struct{}{}:
	default:
	}
	l.writer.Wait()
}

// refuse tells a peer that broke the protocol that the session ends and why, without waiting
// long for it, and returns err.
func (l *link) refuse(err error) error {
	if errors.Is(err, ErrProtocol) {
		l.conn.SetWriteDeadline(time.Now().Add(time.Second))
		l.write(frameError, 0, putError(nil, CodeProtocol, err.Error()))
	}
	return err
}

// quiet says whether err is how a session ends when its peer or this side closes it.
func quiet(err error) bool {
	return errors.Is(err, io.EOF) || errors.Is(err, io.ErrClosedPipe) || errors.Is(err, net.ErrClosed)
}
