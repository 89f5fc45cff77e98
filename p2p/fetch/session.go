package fetch

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"kvasird/p2p"
)

const (
	// A session starts with small pieces and doubles them while they leave fast, so that one
	// piece fits in the write timeout at a slow reader's too.
	firstPiece = 64 << 10
	fastPiece  = 100 * time.Millisecond
	slowPiece  = 2 * time.Second
)

// session is one requester's conversation with a server: one goroutine reads requests, one
// answers them in order.
type session struct {
	s     *Server
	c     p2p.Conn
	r     *p2p.FrameReader
	w     *p2p.FrameWriter
	most  int // bytes of a piece
	piece int // bytes of the next one
	shelf Shelf
	files []File

	mu     sync.Mutex // guards what follows
	flight map[uint64]*request
}

// request is one that is not answered yet.
type request struct {
	ask
	typ       uint8
	id        uint64
	cancelled atomic.Bool
	refusal   refusal // of a farewell, which is no request: typ is frameError, id 0
}

func newSession(s *Server, c p2p.Conn) *session {
	most := maxPiece
	if !c.Lane() {
		most = maxSharedPiece
	}
	return &session{
		s: s, c: c, most: most, piece: firstPiece, flight: make(map[uint64]*request),
		r: p2p.NewFrameReader(c, maxAsk), w: p2p.NewFrameWriter(c, maxPiece),
	}
}

// hello reads what the requester wants and answers it. A reason says that the session is
// refused anyhow.
func (ses *session) hello(reason string) error {
	if err := ses.c.SetReadDeadline(time.Now().Add(ses.s.cfg.HelloTimeout)); err != nil {
		return err
	}
	f, err := ses.r.Next()
	if err != nil {
		return ses.readError(err)
	}
	if f.Type != frameWant || f.ID != 0 || f.Flags != 0 {
		return ses.end(codeMalformed, RefusedMalformed, malformed("frame of type %d, want %d", f.Type, frameWant))
	}
	model, err := decodeWant(f.Payload)
	switch {
	case errors.Is(err, errVersion):
		return ses.end(codeVersion, RefusedVersion, err)
	case err != nil:
		return ses.end(codeMalformed, RefusedMalformed, err)
	case reason != "":
		return ses.end(codeBusy, reason, errors.New(reason))
	}
	shelf := ses.s.cfg.Library.Shelf(model)
	if shelf == nil {
		return ses.end(codeNoModel, RefusedModel, fmt.Errorf("model %x", model))
	}
	ses.shelf, ses.files = shelf, shelf.Files()
	return ses.send(p2p.Frame{Type: frameManifest, Payload: encodeManifest(ses.files)})
}

// end tells the requester why the session ends, counts it, and returns err.
func (ses *session) end(c code, reason string, err error) error {
	ses.s.refused(reason)
	ses.send(p2p.Frame{Type: frameError, Payload: refusal{c, err.Error()}.encode()})
	return err
}

func (ses *session) readError(err error) error {
	switch {
	case errors.Is(err, io.EOF):
		return nil
	case errors.Is(err, p2p.ErrFrame), errors.Is(err, p2p.ErrFrameTooLarge):
		ses.s.refused(RefusedMalformed)
		return malformed("%v", err)
	case errors.Is(err, os.ErrDeadlineExceeded):
		return errors.New("no request came in time")
	}
	return err
}

// run reads requests until the requester leaves or breaks the rules.
func (ses *session) run(ctx context.Context, cancel context.CancelFunc) error {
	queue := make(chan *request, ses.s.cfg.Requests+1) // one more for the farewell
	answered := make(chan error, 1)
	go func() {
		err := ses.answer(ctx, queue)
		ses.c.Close() // wakes the reader
		answered <- err
	}()
	farewell, err := ses.read(queue)
	if farewell != nil {
		ses.cancelAll()
		queue <- farewell
	} else {
		cancel()
	}
	close(queue)
	failed := <-answered
	if err != nil && farewell == nil && failed != nil && !errors.Is(failed, context.Canceled) {
		return failed // which closed the connection and so ended the reading
	}
	return err
}

// read queues requests. A farewell is the last thing to be told to the requester.
func (ses *session) read(queue chan<- *request) (farewell *request, err error) {
	ses.rest()
	for {
		f, err := ses.r.Next()
		if err != nil {
			return nil, ses.readError(err)
		}
		if f.Type == frameCancel && len(f.Payload) == 0 && f.Flags == 0 {
			ses.cancel(f.ID)
			continue
		}
		r, reason, err := ses.accept(f)
		if err != nil {
			ses.s.refused(reason)
			return &request{typ: frameError, refusal: refusal{codeMalformed, err.Error()}}, err
		}
		queue <- r
	}
}

// accept checks the form of a request and counts it as in flight.
func (ses *session) accept(f p2p.Frame) (r *request, reason string, err error) {
	if f.Flags != 0 || f.Type != frameAskHeld && f.Type != frameAskTree && f.Type != frameAskData {
		return nil, RefusedMalformed, malformed("frame of type %d with flags %d", f.Type, f.Flags)
	}
	a, err := decodeAsk(f.Type, f.Payload)
	if err != nil {
		return nil, RefusedMalformed, err
	}
	ses.mu.Lock()
	defer ses.mu.Unlock()
	if f.ID == 0 || ses.flight[f.ID] != nil {
		return nil, RefusedMalformed, malformed("request id %d is 0 or in use", f.ID)
	}
	if len(ses.flight) >= ses.s.cfg.Requests {
		return nil, RefusedRequests, malformed("%s: more than %d", RefusedRequests, ses.s.cfg.Requests)
	}
	if len(ses.flight) == 0 {
		ses.c.SetReadDeadline(time.Time{}) // an error shows in the next read
	}
	r = &request{ask: a, typ: f.Type, id: f.ID}
	ses.flight[f.ID] = r
	return r, "", nil
}

// done counts a request as answered. While none is in flight the requester has the idle
// timeout to ask again.
func (ses *session) done(r *request) {
	ses.mu.Lock()
	delete(ses.flight, r.id)
	idle := len(ses.flight) == 0
	if idle {
		ses.restLocked()
	}
	ses.mu.Unlock()
}

func (ses *session) rest() {
	ses.mu.Lock()
	defer ses.mu.Unlock()
	ses.restLocked()
}

func (ses *session) restLocked() {
	ses.c.SetReadDeadline(time.Now().Add(ses.s.cfg.IdleTimeout)) // likewise
}

func (ses *session) cancel(id uint64) {
	ses.mu.Lock()
	defer ses.mu.Unlock()
	if r := ses.flight[id]; r != nil {
		r.cancelled.Store(true)
	}
}

func (ses *session) cancelAll() {
	ses.mu.Lock()
	defer ses.mu.Unlock()
	for _, r := range ses.flight {
		r.cancelled.Store(true)
	}
}
