package ring

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"kvasird/p2p"
)

// way is the onward link to a hop, shared by all sessions that go there. It is used once: what
// comes after its loss is another way.
type way struct {
	hop     Hop
	l       *link // nil until it is up
	leaving bool  // the stage there will stop
	idle    int   // beats without a session
	pings   uint64
}

// waysOwner is told of ways; all but wayFrame with its lock held.
type waysOwner interface {
	wayUpLocked(w *way)
	wayDownLocked(w *way, err error)
	wayFrame(w *way, f p2p.Frame) error // the error ends the link
	wayUsedLocked(w *way) bool
	wayDrained() // there is room for rows again; no lock is held
}

// ways are the onward links of a Stage or an Entry.
type ways struct {
	dialer Dialer
	timing *Timing
	logger *slog.Logger
	hello  func(h Hop) hello
	owner  waysOwner
	mu     *sync.Mutex // the owner's; guards open and the fields of ways

	open map[Hop]*way

	ctx  context.Context // ends when the owner closes; of the dials that it began
	stop context.CancelFunc
	wg   sync.WaitGroup
}

func (ws *ways) init() {
	ws.open = map[Hop]*way{}
	ws.ctx, ws.stop = context.WithCancel(context.Background())
}

// mostWays bounds the onward links, which whoever opens sessions can cause to be opened.
const mostWays = 256

// roomLocked says whether there is or may be a way to a hop.
func (ws *ways) roomLocked(h Hop) bool { return len(ws.open) < mostWays || ws.open[h] != nil }

// getLocked returns the way to a hop, which it begins to open if there is none.
func (ws *ways) getLocked(h Hop) *way {
	if w := ws.open[h]; w != nil {
		return w
	}
	w := &way{hop: h}
	ws.open[h] = w
	ws.wg.Go(func() { ws.run(w) })
	return w
}

// run opens a way and reads what comes back until it ends.
func (ws *ways) run(w *way) {
	err := ws.serve(w)
	ws.mu.Lock()
	defer ws.mu.Unlock()
	if ws.open[w.hop] == w {
		delete(ws.open, w.hop)
	}
	if ws.ctx.Err() == nil {
		ws.logger.Info("ring link ended", "peer", w.hop.Peer, "layers", w.hop.Layers.String(), "error", err)
	}
	ws.owner.wayDownLocked(w, err)
}

func (ws *ways) serve(w *way) error {
	ctx, cancel := context.WithTimeout(ws.ctx, ws.timing.DialTimeout)
	defer cancel()
	conn, err := ws.dialer.Dial(ctx, w.hop.Peer)
	if err != nil {
		return fmt.Errorf("dial: %w", err)
	}
	l := newLink(conn, ws.timing)
	defer l.stop()
	stop := context.AfterFunc(ws.ctx, func() { l.end(ErrClosed) })
	defer stop()
	deadline, _ := ctx.Deadline()
	if err := ws.greet(w.hop, l, deadline); err != nil {
		return l.cause(err)
	}
	l.startWriter(ws.owner.wayDrained)
	ws.mu.Lock()
	w.l = l
	ws.owner.wayUpLocked(w)
	ws.mu.Unlock()
	for {
		f, err := l.next()
		if err == nil {
			err = ws.frame(w, f)
		}
		if err != nil {
			l.end(err)
			return l.cause(err)
		}
	}
}

func (ws *ways) greet(h Hop, l *link, deadline time.Time) error {
	hi := ws.hello(h)
	l.precision = hi.Precision
	f, err := l.exchange(frameHello, encodeControl(hi), deadline)
	if err != nil {
		return fmt.Errorf("hello: %w", err)
	}
	if f.Type == frameError && f.ID == 0 {
		return refusal(f.Payload)
	}
	if f.Type != frameWelcome || f.ID != 0 {
		return violation(fmt.Errorf("frame of type %d answers the hello", f.Type))
	}
	back, err := decodeWelcome(f.Payload)
	if err != nil {
		return violation(err)
	}
	if hi.Width != 0 && back.Width != hi.Width {
		return violation(fmt.Errorf("rows of %d elements there, %d here", back.Width, hi.Width))
	}
	return nil
}

// trouble is what a session is told of a way that ended: a refusal by its own code.
func trouble(err error) (Code, string) {
	var refused *RefusedError
	if errors.As(err, &refused) && refused.Code != CodeProtocol && !refused.Code.final() {
		return refused.Code, refused.Text
	}
	return CodeLost, err.Error()
}

// refusal is the error of a link that the other side ends.
func refusal(payload []byte) error {
	r, err := decodeReport(payload)
	if err != nil {
		return violation(err)
	}
	return &RefusedError{r.code, r.text}
}

func (ws *ways) frame(w *way, f p2p.Frame) error {
	switch {
	case f.Type == framePong && len(f.Payload) == 0:
		return nil
	case f.Type == frameError && f.ID == 0:
		return refusal(f.Payload)
	}
	return ws.owner.wayFrame(w, f)
}

// beatLocked sends heartbeats, and ends the links of silent peers and those not used.
func (ws *ways) beatLocked() {
	for _, w := range ws.open {
		if w.l == nil {
			continue
		}
		if w.l.beat() {
			w.l.end(fmt.Errorf("silent for %v", ws.timing.DeadAfter))
			continue
		}
		w.idle++
		if ws.owner.wayUsedLocked(w) {
			w.idle = 0
		} else if time.Duration(w.idle)*ws.timing.beat() >= ws.timing.IdleLink {
			delete(ws.open, w.hop)
			w.l.end(errors.New("not used"))
			continue
		}
		w.pings++
		w.l.post(getBuffer(framePing, w.pings, 0))
	}
}

// close ends all links and waits for them.
func (ws *ways) close() {
	ws.stop()
	ws.wg.Wait()
}
