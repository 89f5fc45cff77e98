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

	// Calls of one peer: so many a second for long, so many at once after a pause, so
	// many that run. A request takes four.
	callRate  = 100
	callBurst = 400
	runsEach  = 32
	runsAll   = 128
	// maxCallers bounds the peers that are remembered for their rate.
	maxCallers = 4096
)

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
	runs    int
	callers map[peer.ID]*caller
}

// caller is how often a peer called.
type caller struct {
	runs   int
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

// enter counts a call, or refuses it.
func (d *Door) enter(id peer.ID) error {
	busy := func(text string) error { return &Refusal{Code: CodeBusy, Text: text, Retry: 1} }
	d.mu.Lock()
	defer d.mu.Unlock()
	now := d.cfg.Now()
	c := d.callerLocked(id, now)
	switch {
	case d.closing:
		return busy("the settlement is stopping: ask again")
	case c == nil || d.runs >= runsAll:
		return busy("the settlement is busy: ask again")
	case c.runs >= runsEach:
		return busy("too many calls of this node run already: wait for one to end")
	case c.calls < 1:
		return busy("this node calls too often: wait a second")
	}
	c.calls--
	c.runs++
	d.runs++
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
		if c.fill(now); c.runs == 0 && c.calls == callBurst {
			delete(d.callers, id)
		}
	}
}

func (d *Door) leave(id peer.ID) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.runs--
	d.callers[id].runs--
	d.running.Done()
}

// Serve answers the call of a peer, proved to be who it is, and returns when that is over.
// It closes c. The error says how the peer broke the protocol.
func (d *Door) Serve(id peer.ID, c Conn) error {
	var watching sync.WaitGroup
	defer watching.Wait()
	defer c.Close()
	answer, err := any(nil), d.enter(id)
	if err == nil {
		defer d.leave(id)
		answer, err = d.call(id, c, &watching)
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

// call reads what is asked and has it done.
func (d *Door) call(id peer.ID, c Conn, watching *sync.WaitGroup) (any, error) {
	node, err := p2p.KeyOf(id)
	if err != nil {
		return nil, &Refusal{Code: CodeRights, Text: err.Error()}
	}
	if err := c.SetReadDeadline(time.Now().Add(readTime)); err != nil {
		return nil, errGone
	}
	f, err := p2p.NewFrameReader(c, maxEnd).Next()
	switch {
	case errors.Is(err, p2p.ErrFrame), errors.Is(err, p2p.ErrFrameTooLarge):
		return nil, &protocolError{err.Error()}
	case err != nil:
		return nil, errGone
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
