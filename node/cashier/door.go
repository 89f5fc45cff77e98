package cashier

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"sync"
	"time"

	"github.com/libp2p/go-libp2p/core/peer"

	"kvasird/p2p"
	"kvasird/settle"
)

const (
	// readTime is how long a caller may take to ask, writeTime to take the answer.
	readTime  = 10 * time.Second
	writeTime = 10 * time.Second
	// callTime is how long a call may take. A payment is final after about 13 s.
	callTime = 90 * time.Second

	// Calls of one peer: so many a second for long, so many at once after a pause. A
	// request takes four.
	callRate  = 100
	callBurst = 400
	// maxCallers bounds the peers that are remembered for their rate.
	maxCallers = 4096
)

// stage is what a call is at. Each has places of its own, so that who asks slowly, or
// waits for the chain, is in nobody's way.
type stage uint8

// The stages. What runs does not wait for anybody but the disk.
const (
	reads stage = iota
	runs
	waits // runs, and waits for the chain
	stages
)

// places are how many calls may be at a stage: of one peer, and of all.
var places = [stages]struct{ each, all int }{reads: {16, 1024}, runs: {32, 128}, waits: {64, 256}}

// share is how many of a peer may be at a stage where so many are: of what is free a
// quarter, so that it takes many peers to fill it.
func (s stage) share(taken int) int {
	return min(places[s].each, (places[s].all-taken)/4+1)
}

// stageOf is where a call runs.
func stageOf(o op) stage {
	switch o {
	case opPay, opPayX402, opDeposit, opClaim:
		return waits
	}
	return runs
}

// Conn is a stream between two nodes. Close ends both directions and may be called at any
// time, and again.
type Conn interface {
	io.ReadWriteCloser
	SetReadDeadline(t time.Time) error
	SetWriteDeadline(t time.Time) error
}

// DoorConfig is what a Door needs. Now may be nil: the clock.
type DoorConfig struct {
	As     func(settle.Node) Service // the settlement as a node sees it
	Logger *slog.Logger
	Now    func() time.Time
}

// Door answers the calls of other nodes. It is safe for concurrent use.
type Door struct {
	cfg     DoorConfig
	end     chan struct{} // closed: no call goes on
	running sync.WaitGroup

	mu      sync.Mutex // guards what follows
	closing bool
	taken   [stages]int
	callers map[peer.ID]*caller
}

// caller is how often a peer called, and where its calls are.
type caller struct {
	taken  [stages]int
	calls  float64 // that it may still make now
	filled time.Time
}

// NewDoor returns a door that waits for Serve.
func NewDoor(cfg DoorConfig) *Door {
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	return &Door{cfg: cfg, end: make(chan struct{}), callers: map[peer.ID]*caller{}}
}

// Close takes no new calls, waits for those that run until ctx ends, and then ends them.
func (d *Door) Close(ctx context.Context) {
	d.mu.Lock()
	first := !d.closing
	d.closing = true
	d.mu.Unlock()
	stop := context.AfterFunc(ctx, func() {
		if first {
			close(d.end)
		}
	})
	defer stop()
	d.running.Wait()
}

// enter takes a place for a call at a stage, or refuses it. Each call is read first, and
// counted then.
func (d *Door) enter(id peer.ID, at stage) error {
	busy := func(text string) error { return &Refusal{Code: CodeBusy, Text: text, Retry: 1} }
	d.mu.Lock()
	defer d.mu.Unlock()
	now := d.cfg.Now()
	c := d.callerLocked(id, now)
	switch {
	case d.closing:
		return busy("the settlement is stopping: ask again")
	case c == nil || d.taken[at] >= places[at].all:
		return busy("the settlement is busy: ask again")
	case c.taken[at] >= at.share(d.taken[at]):
		return busy("too many calls of this node run already: wait for one to end")
	case at == reads && c.calls < 1:
		return busy("this node calls too often: wait a second")
	}
	if at == reads {
		c.calls--
	}
	c.taken[at]++
	d.taken[at]++
	d.running.Add(1)
	return nil
}

// callerLocked is who calls, or nil when there is no room to remember one more.
func (d *Door) callerLocked(id peer.ID, now time.Time) *caller {
	c := d.callers[id]
	if c == nil {
		if len(d.callers) >= maxCallers {
			d.forgetLocked(now)
		}
		if len(d.callers) >= maxCallers {
			return nil
		}
		c = &caller{calls: callBurst, filled: now}
		d.callers[id] = c
	}
	c.fill(now)
	return c
}

func (c *caller) fill(now time.Time) {
	c.calls = min(callBurst, c.calls+max(0, now.Sub(c.filled).Seconds())*callRate)
	c.filled = now
}

// forgetLocked drops the callers of whom nothing is to be known.
func (d *Door) forgetLocked(now time.Time) {
	for id, c := range d.callers {
		if c.fill(now); c.taken == [stages]int{} && c.calls == callBurst {
			delete(d.callers, id)
		}
	}
}

func (d *Door) leave(id peer.ID, at stage) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.taken[at]--
	d.callers[id].taken[at]--
	d.running.Done()
}

// Serve answers the call of a peer, proved to be who it is, and returns when that is over.
// It closes c. The error says how the peer broke the protocol.
func (d *Door) Serve(id peer.ID, c Conn) error {
	var watching sync.WaitGroup
	defer watching.Wait()
	defer c.Close()
	var answer any
	f, at, err := d.read(id, c)
	if err == nil {
		defer d.leave(id, at)
		answer, err = d.call(id, c, f, &watching)
	}
	if errors.Is(err, errGone) {
		return nil
	}
	typ, payload := d.reply(id, answer, err)
	if c.SetWriteDeadline(time.Now().Add(writeTime)) == nil {
		// A caller that has left asks again.
		_ = p2p.NewFrameWriter(c, maxDone).Write(p2p.Frame{Type: typ, Payload: payload})
	}
	var bad *protocolError
	if errors.As(err, &bad) {
		return bad
	}
	return nil
}

// errGone says that the caller has left, or never asked.
var errGone = errors.New("the caller left")

// read reads what is asked, and takes a place at the stage where that runs.
func (d *Door) read(id peer.ID, c Conn) (f p2p.Frame, at stage, err error) {
	if err := d.enter(id, reads); err != nil {
		return f, 0, err
	}
	defer d.leave(id, reads)
	if c.SetReadDeadline(time.Now().Add(readTime)) != nil {
		return f, 0, errGone
	}
	f, err = p2p.NewFrameReader(c, maxEnd).Next()
	switch {
	case errors.Is(err, p2p.ErrFrame), errors.Is(err, p2p.ErrFrameTooLarge):
		return f, 0, &protocolError{err.Error()}
	case err != nil:
		return f, 0, errGone
	}
	at = stageOf(op(f.Type))
	return f, at, d.enter(id, at)
}

// call has done what is asked.
func (d *Door) call(id peer.ID, c Conn, f p2p.Frame, watching *sync.WaitGroup) (any, error) {
	node, err := p2p.KeyOf(id)
	if err != nil {
		return nil, &Refusal{Code: CodeRights, Text: err.Error()}
	}
	handle, err := readCall(f)
	if err != nil {
		return nil, err
	}
	if err := c.SetReadDeadline(time.Now().Add(callTime)); err != nil {
		return nil, errGone
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	watching.Go(func() { // whatever comes now, the caller does not wait for the answer
		c.Read(make([]byte, 1))
		cancel()
	})
	watching.Go(func() {
		select {
		case <-d.end:
			cancel()
		case <-ctx.Done():
		}
	})
	return handle(ctx, d.cfg.As(node), f.Payload)
}

// reply is the frame of an answer. Only refusals are told in words: other errors are the
// operator's to read.
func (d *Door) reply(id peer.ID, answer any, err error) (typ uint8, payload []byte) {
	if err == nil {
		if payload = encodeDone(answer); len(payload) <= maxDone {
			return frameDone, payload
		}
		err = errors.New("the answer is too large")
	}
	var r *Refusal
	var bad *protocolError
	switch {
	case errors.As(err, &r):
	case errors.As(err, &bad):
		r = &Refusal{Code: CodeBad, Text: bad.text}
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		r = &Refusal{Code: CodeNotYet, Text: "it takes longer: ask again", Retry: 1}
	default:
		d.cfg.Logger.Error("a call of the settlement failed", "peer", id.String(), "error", err)
		r = &Refusal{Text: "the settlement failed: its operator finds the reason in its log"}
	}
	return frameNo, encodeDone(r)
}
