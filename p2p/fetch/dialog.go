package fetch

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"kvasird/p2p"
)

// outbox is how many frames may wait to be sent to a source. Requests in flight are few.
const outbox = 16

// dialog is a requester's side of a session. One goroutine calls next; others may post.
type dialog struct {
	src   string
	conn  p2p.Conn
	stall time.Duration
	meter meter
	r     *p2p.FrameReader
	out   chan p2p.Frame
	ids   uint64 // the last one used

	armed  time.Time // when the read deadline was set
	closed chan struct{}
	once   sync.Once
	sender sync.WaitGroup
}

// open begins a session about a model. The caller closes the dialog.
func (c *Client) open(ctx context.Context, src Source, model [32]byte) (*dialog, []File, error) {
	ctx, cancel := context.WithTimeout(ctx, c.cfg.OpenTimeout)
	defer cancel()
	conn, err := src.Open(ctx)
	if err != nil {
		return nil, nil, err
	}
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	d := newDialog(src.ID(), conn, c.cfg.StallTimeout)
	files, err := d.hello(model)
	if !stop() {
		err = fmt.Errorf("no session within %v: %w", c.cfg.OpenTimeout, ctx.Err())
	}
	if err != nil {
		d.close()
		return nil, nil, err
	}
	return d, files, nil
}

func newDialog(src string, conn p2p.Conn, stall time.Duration) *dialog {
	d := &dialog{
		src: src, conn: conn, stall: stall,
		out: make(chan p2p.Frame, outbox), closed: make(chan struct{}),
	}
	d.r = p2p.NewFrameReader(d, maxPiece)
	d.sender.Go(d.send)
	return d
}

// close ends the session. It may be called again and beside everything else.
func (d *dialog) close() {
	d.once.Do(func() {
		close(d.closed)
		d.conn.Close()
	})
	d.sender.Wait()
}

func (d *dialog) send() {
	w := p2p.NewFrameWriter(d.conn, maxAsk)
	for {
		select {
		case f := <-d.out:
			if d.conn.SetWriteDeadline(time.Now().Add(d.stall)) != nil || w.Write(f) != nil {
				d.conn.Close() // the reader sees it
				return
			}
		case <-d.closed:
			return
		}
	}
}

// post hands a frame to the sender. It reports false when there is no room, since the source
// does not read.
func (d *dialog) post(f p2p.Frame) bool {
	select {
	case d.out <- f:
		return true
	default:
		return false
	}
}

// ask sends a request and returns its id.
func (d *dialog) ask(typ uint8, a ask) (id uint64, err error) {
	d.ids++
	if !d.post(p2p.Frame{Type: typ, ID: d.ids, Payload: a.append(nil)}) {
		return 0, d.fault(FaultStalled, errors.New("does not read requests"))
	}
	return d.ids, nil
}

// cancel says that the answer to a request is not wanted. That is an economy: it may be lost.
func (d *dialog) cancel(id uint64) { d.post(p2p.Frame{Type: frameCancel, ID: id}) }

func (d *dialog) hello(model [32]byte) ([]File, error) {
	if !d.post(p2p.Frame{Type: frameWant, Payload: encodeWant(model)}) {
		return nil, errLeft
	}
	f, err := d.next()
	if err != nil {
		return nil, err
	}
	if f.Type != frameManifest {
		return nil, d.unexpected(f, 0)
	}
	files, err := decodeManifest(f.Payload)
	if err != nil {
		return nil, d.fault(FaultProtocol, err)
	}
	return files, nil
}

// Read is what the frames are read from: the connection, with the stall timeout and the
// meter. The deadline is renewed when an eighth of it has passed.
func (d *dialog) Read(b []byte) (int, error) {
	if now := time.Now(); now.Sub(d.armed) > d.stall/8 {
		if err := d.conn.SetReadDeadline(now.Add(d.stall)); err != nil {
			return 0, err
		}
		d.armed = now
	}
	n, err := d.conn.Read(b)
	d.meter.add(n, time.Now())
	return n, err
}

// next returns the next frame, of any type but ERROR for the whole session.
func (d *dialog) next() (p2p.Frame, error) { return d.nextInto(nil) }

// nextInto is next, but reads a payload that fits into dst there.
func (d *dialog) nextInto(dst []byte) (p2p.Frame, error) {
	d.armed = time.Time{}
	d.meter.run(time.Now())
	f, err := d.r.NextInto(dst)
	d.meter.stop(time.Now())
	switch {
	case errors.Is(err, p2p.ErrFrame), errors.Is(err, p2p.ErrFrameTooLarge):
		return f, d.fault(FaultProtocol, err)
	case errors.Is(err, os.ErrDeadlineExceeded):
		return f, d.fault(FaultStalled, fmt.Errorf("nothing for %v", d.stall))
	case err != nil:
		return f, fmt.Errorf("%w: %v", errLeft, err)
	case f.Type == frameError && f.ID == 0:
		no, err := decodeRefusal(f.Payload)
		if err != nil {
			return f, d.fault(FaultProtocol, err)
		}
		return f, no
	}
	return f, nil
}

// readRange reads the answer to a request into dst, as long as the range, and tells got of
// every piece how far it is. An error that is a refusal leaves the dialog of use.
func (d *dialog) readRange(id uint64, dst []byte, got func(n int)) error {
	for n := 0; n < len(dst); {
		f, err := d.nextInto(dst[n:])
		if err != nil {
			return err
		}
		if f.ID > id && f.ID <= d.ids {
			return d.fault(FaultTruncated, fmt.Errorf("%d of %d bytes, then another answer", n, len(dst)))
		}
		if f.Type != framePiece || f.ID != id || len(f.Payload) == 0 || len(f.Payload) > len(dst)-n {
			return d.unexpected(f, id)
		}
		n += len(f.Payload)
		if f.Flags == flagLast && n < len(dst) {
			return d.fault(FaultTruncated, fmt.Errorf("%d of %d bytes", n, len(dst)))
		}
		if last := n == len(dst); f.Flags > flagLast || last != (f.Flags == flagLast) {
			return d.fault(FaultProtocol, malformed("flags %d at %d of %d bytes", f.Flags, n, len(dst)))
		}
		got(n)
	}
	return nil
}

// held asks what the source holds of a file of size bytes.
func (d *dialog) held(file int, size int64) ([]Span, error) {
	var spans []Span
	for from := uint64(0); ; {
		id, err := d.ask(frameAskHeld, ask{file: uint32(file), off: from})
		if err != nil {
			return nil, err
		}
		f, err := d.next()
		if err != nil {
			return nil, err
		}
		if f.Type != frameHeld || f.ID != id {
			return nil, d.unexpected(f, id)
		}
		page, next, err := decodeHeld(f.Payload, size, from)
		if err != nil {
			return nil, d.fault(FaultProtocol, err)
		}
		spans = append(spans, page...)
		if next == 0 || len(spans) >= maxHeldKept {
			return merge(spans), nil
		}
		from = next
	}
}

// maxHeldKept bounds the spans that are remembered of one file at one source, to within a
// frame. An honest source of whole tensors or experts has a few hundred.
const maxHeldKept = 1 << 16

// unexpected turns a frame that does not answer request id into an error: a refusal when it
// is one.
func (d *dialog) unexpected(f p2p.Frame, id uint64) error {
	if f.Type == frameError && f.ID == id {
		no, err := decodeRefusal(f.Payload)
		if err == nil {
			return no
		}
		return d.fault(FaultProtocol, err)
	}
	return d.fault(FaultProtocol, malformed("frame of type %d, %d bytes, for request %d, not for %d",
		f.Type, len(f.Payload), f.ID, id))
}

func (d *dialog) fault(kind Fault, err error) error { return &BadSourceError{d.src, kind, err} }
