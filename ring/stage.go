package ring

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"kvasird/ggml/gguf"
	"kvasird/p2p"
)

// Stage computes a window of a model's layers for the sessions of any number of entries.
type Stage struct {
	cfg         StageConfig
	first, last bool
	window      int // rows of a session that may wait here
	ways        ways
	count       struct{ steps, rowsIn, rowsOut, drawn, drafted, accepted, lost, failed atomic.Uint64 }
	goroutines  sync.WaitGroup // loop and pulse
	serving     sync.WaitGroup // calls of Serve
	wake        chan struct{}  // the loop has something to do; capacity 1
	done        chan struct{}  // closed by Close

	step step // the loop's

	mu       sync.Mutex // guards the rest
	sessions map[uint64]*session
	slots    []slot // by sequence
	links    map[*link]struct{}
	reserved int64 // bytes, of sessions
	turn     uint64
	leaving  bool
	closing  bool
	left     chan struct{} // closed and replaced when a session is freed
	inBatch  int           // sessions of the Decode that runs that are still there
	abort    context.CancelFunc
	began    time.Time // of the Decode that runs
	alone    time.Duration
	beside   time.Duration
	segments []segment // scratch of flushLocked
	senders  []*session
}

// slot is a sequence of the Compute.
type slot struct {
	s       *session // nil: free
	sampler Sampler  // of s, or of the one before if dirty; the loop makes and closes it
	dirty   bool     // the loop has still to drop what is in it
}

// NewStage returns a stage that serves until Close.
func NewStage(cfg StageConfig) (*Stage, error) {
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	st := &Stage{
		cfg: cfg, first: cfg.Layers.Begin == 0, last: cfg.Layers.End == cfg.Total, window: max(cfg.Batch, 4*(MaxDraft+1)),
		sessions: map[uint64]*session{}, slots: make([]slot, cfg.Sequences), links: map[*link]struct{}{},
		wake: make(chan struct{}, 1), done: make(chan struct{}), left: make(chan struct{}),
	}
	st.ways = ways{dialer: cfg.Dialer, timing: &st.cfg.Timing, logger: cfg.Logger, hello: st.hello, owner: st, mu: &st.mu}
	st.ways.init()
	st.goroutines.Go(st.loop)
	st.goroutines.Go(st.pulse)
	return st, nil
}

// Layers is the window of the stage.
func (st *Stage) Layers() gguf.Range { return st.cfg.Layers }

func (st *Stage) hello(h Hop) hello {
	return hello{
		Version: wireVersion, Pack: st.cfg.Pack, Model: st.cfg.Model, Total: st.cfg.Total,
		Begin: h.Layers.Begin, End: h.Layers.End, Width: st.cfg.Width, Precision: st.cfg.Precision,
	}
}

// kick wakes the loop.
func (st *Stage) kick() {
	select {
	case st.wake <- struct{}{}:
	default:
	}
}

// Serve runs one incoming link over conn, which it closes, until the predecessor leaves, ctx ends
// or the stage is closed (nil), or something is wrong (the error says what).
func (st *Stage) Serve(ctx context.Context, conn net.Conn) error {
	return Serve(ctx, conn, st.cfg.DialTimeout, func(model string, layers gguf.Range) (*Stage, error) { return st, nil })
}

// Serve runs one incoming link for whichever of a node's stages it asks for, as Stage.Serve does.
// The error of find is told to the peer. It greets for at most timeout.
func Serve(ctx context.Context, conn net.Conn, timeout time.Duration, find func(model string, layers gguf.Range) (*Stage, error)) error {
	l := newLink(conn, &Timing{DeadAfter: timeout})
	defer l.stop()
	stop := context.AfterFunc(ctx, func() { l.end(ErrClosed) })
	defer stop()
	st, err := welcomeLink(l, time.Now().Add(timeout), find)
	if err != nil {
		return l.cause(err)
	}
	defer st.serving.Done()
	defer st.linkDown(l)
	l.startWriter(func() {}) // no rows go back
	st.greeted(l)
	err = st.read(l)
	if errors.Is(err, ErrProtocol) {
		l.goodbye(report{code: CodeProtocol, text: err.Error()})
		st.cfg.Logger.Warn("ring link broke the protocol", "peer", l.peer, "error", err)
	}
	l.end(err)
	if err = l.cause(err); quiet(err) || errors.Is(err, ErrClosed) {
		return nil
	}
	return err
}

// welcomeLink reads the hello of a link and answers it. The link then belongs to the stage.
func welcomeLink(l *link, deadline time.Time, find func(model string, layers gguf.Range) (*Stage, error)) (*Stage, error) {
	l.conn.SetDeadline(deadline)
	f, err := l.next()
	if err != nil && !errors.Is(err, ErrProtocol) {
		return nil, fmt.Errorf("hello: %w", err)
	}
	var h hello
	if err == nil && (f.Type != frameHello || f.ID != 0) {
		err = violation(fmt.Errorf("first frame is of type %d, want a hello", f.Type))
	}
	if err == nil {
		if h, err = decodeHello(f.Payload); err != nil {
			err = violation(err)
		}
	}
	if err != nil {
		l.refuse(CodeProtocol, err.Error())
		return nil, err
	}
	st, err := find(h.Model, h.layers())
	if err != nil {
		l.refuse(CodeModel, err.Error())
		return nil, err
	}
	if err := st.admit(l, &h); err != nil {
		var refused *RefusedError
		if errors.As(err, &refused) {
			l.refuse(refused.Code, refused.Text)
		}
		return nil, err
	}
	w := p2p.NewFrameWriter(l.conn, MaxFrame)
	err = w.Write(p2p.Frame{Type: frameWelcome, Payload: encodeControl(welcome{wireVersion, st.cfg.Width})})
	if err == nil {
		err = l.conn.SetDeadline(time.Time{})
	}
	if err = l.cause(err); err != nil {
		st.linkDown(l)
		st.serving.Done()
	}
	return st, err
}

// admit takes a link in, or says why not.
func (st *Stage) admit(l *link, h *hello) error {
	c := &st.cfg
	switch {
	case h.Pack != c.Pack:
		return &RefusedError{CodeModel, fmt.Sprintf("the runtime pack here is %s, there %s", c.Pack, h.Pack)}
	case h.Model != c.Model:
		return &RefusedError{CodeModel, fmt.Sprintf("the model here is %s, not %s", c.Model, h.Model)}
	case h.Total != c.Total || h.layers() != c.Layers:
		return &RefusedError{CodeModel, fmt.Sprintf("this stage has layers %v of %d, not %v of %d", c.Layers, c.Total, h.layers(), h.Total)}
	case h.Width != 0 && h.Width != c.Width:
		return &RefusedError{CodeModel, fmt.Sprintf("rows here have %d elements, not %d", c.Width, h.Width)}
	}
	if c.Admit != nil {
		if err := c.Admit(l.peer); err != nil {
			return &RefusedError{CodeRights, err.Error()}
		}
	}
	st.mu.Lock()
	defer st.mu.Unlock()
	if st.closing {
		return ErrClosed
	}
	if len(st.links) >= c.MaxLinks {
		return &RefusedError{CodeLimit, fmt.Sprintf("%d links are open already", len(st.links))}
	}
	l.patience = c.DeadAfter
	st.links[l] = struct{}{}
	st.serving.Add(1)
	return nil
}

// greeted tells a new neighbour what it would have heard earlier.
func (st *Stage) greeted(l *link) {
	st.mu.Lock()
	defer st.mu.Unlock()
	if st.leaving {
		l.send(frameDrain, 0, nil)
	}
}

// read serves the frames of a link until it ends.
func (st *Stage) read(l *link) error {
	for {
		f, err := l.next()
		if err == nil {
			err = st.frame(l, f)
		}
		if err != nil {
			return err
		}
	}
}

// linkDown lets go of a link: an entry's sessions are freed, others wait for a new predecessor.
func (st *Stage) linkDown(l *link) {
	st.mu.Lock()
	defer st.mu.Unlock()
	delete(st.links, l)
	for _, s := range st.sessions {
		switch {
		case s.pred == l && st.first:
			st.freeLocked(s, l, nil)
		case s.pred == l:
			s.pred, s.alone = nil, time.Now()
		case s.ret == l:
			s.ret = nil
			st.count.lost.Add(1)
			st.reportLocked(s, CodeLost, len(s.chain)-1, "its link to the first stage ended")
		}
	}
}

// pulse keeps the time of links and sessions.
func (st *Stage) pulse() {
	tick := time.NewTicker(st.cfg.beat())
	defer tick.Stop()
	for {
		select {
		case <-st.done:
			return
		case <-tick.C:
		}
		st.mu.Lock()
		st.ways.beatLocked()
		for l := range st.links {
			if l.beat() {
				l.end(fmt.Errorf("silent for %v", st.cfg.DeadAfter))
			}
		}
		now := time.Now()
		for _, s := range st.sessions {
			switch {
			case s.pred == nil && now.Sub(s.alone) >= st.cfg.Grace:
				st.cfg.Logger.Info("ring session freed: nobody took it over", "session", s.id)
				st.freeLocked(s, nil, nil)
			case now.Sub(s.heard) >= st.cfg.SessionIdle:
				st.cfg.Logger.Info("ring session freed: idle", "session", s.id)
				st.freeLocked(s, nil, nil)
			}
		}
		if st.abort != nil && now.Sub(st.began) >= st.cfg.StepTimeout {
			st.abort()
		}
		st.mu.Unlock()
	}
}

// Drain tells the neighbours that the stage will leave, so that sessions are opened elsewhere
// while it still serves, and returns when it has none, or with the error of ctx when that ends
// first. New sessions are refused from now on. Close ends what is left.
func (st *Stage) Drain(ctx context.Context) error {
	st.mu.Lock()
	if !st.leaving {
		st.leaving = true
		for l := range st.links {
			l.send(frameDrain, 0, nil)
		}
	}
	for {
		n, left := len(st.sessions), st.left
		st.mu.Unlock()
		if n == 0 {
			return nil
		}
		select {
		case <-left:
		case <-ctx.Done():
			return ctx.Err()
		case <-st.done:
			return ErrClosed
		}
		st.mu.Lock()
	}
}

// Close ends all links and sessions and waits for them, and for the Decode that runs.
func (st *Stage) Close() error {
	st.mu.Lock()
	if !st.closing {
		st.closing = true
		close(st.done)
		for l := range st.links {
			l.end(ErrClosed)
		}
		if st.abort != nil {
			st.abort()
		}
	}
	st.mu.Unlock()
	st.serving.Wait()
	st.ways.close()
	st.goroutines.Wait()
	return nil
}

// Stats is the state of a stage, and what it counted since it was made.
type Stats struct {
	Sequences int // sessions at once
	Free      int // of these, now
	Sessions  int // open now
	Orphans   int // of these, without a predecessor
	Links     int // incoming, open now
	Ways      int // onward, open now or being opened
	Leaving   bool
	Reserved  int64 // bytes that the sessions may take
	Kept      int64 // bytes that the rows kept take

	Steps    uint64 // calls of Decode
	RowsIn   uint64 // that came
	RowsOut  uint64 // that were sent
	Drawn    uint64 // tokens drawn here
	Drafted  uint64 // tokens drafted here
	Accepted uint64 // of these
	Lost     uint64 // neighbours lost under a session
	Failed   uint64 // sessions that could not be computed

	Token   time.Duration // smoothed, of a Decode of one row; 0: none yet
	Batched time.Duration // smoothed, per row, of a Decode of several
}

// Stats returns the state of the stage.
func (st *Stage) Stats() Stats {
	st.mu.Lock()
	defer st.mu.Unlock()
	s := Stats{
		Sequences: len(st.slots), Sessions: len(st.sessions), Links: len(st.links), Ways: len(st.ways.open),
		Leaving: st.leaving, Reserved: st.reserved, Token: st.alone, Batched: st.beside,
		Steps: st.count.steps.Load(), RowsIn: st.count.rowsIn.Load(), RowsOut: st.count.rowsOut.Load(), Drawn: st.count.drawn.Load(),
		Drafted: st.count.drafted.Load(), Accepted: st.count.accepted.Load(), Lost: st.count.lost.Load(), Failed: st.count.failed.Load(),
	}
	for i := range st.slots {
		if sl := &st.slots[i]; sl.s == nil && !sl.dirty {
			s.Free++
		}
	}
	for _, o := range st.sessions {
		s.Kept += o.out.bytes()
		if o.pred == nil {
			s.Orphans++
		}
	}
	return s
}
