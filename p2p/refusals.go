package p2p

import (
	"errors"
	"log/slog"
	"sync"
	"time"

	"github.com/libp2p/go-libp2p/core/network"
)

const (
	refusalEvery = time.Minute // a line of one peer and reason
	maxRefusals  = 1024        // peers and reasons that are told apart
)

// refusals logs who is turned away: a peer that comes again and again fills no log. Each
// peer and reason has a line at once and then one a minute, which says how often it was.
type refusals struct {
	log *slog.Logger
	now func() time.Time

	mu    sync.Mutex // guards lines
	lines map[refusalKey]*refusalLine
}

// refusalKey is a peer and why. All for which there is no room share the zero key.
type refusalKey struct{ event, peer, reason string }

type refusalLine struct {
	said  time.Time
	times int // since then
	addr  string
	err   error // the latest
}

func newRefusals(log *slog.Logger) *refusals {
	return &refusals{log: log, now: time.Now, lines: make(map[refusalKey]*refusalLine)}
}

// tell notes that a peer was turned away over c.
func (r *refusals) tell(c network.Conn, event string, err error) {
	r.note(event, c.RemotePeer().String(), c.RemoteMultiaddr().String(), err)
}

// note is tell for a peer that is known by name or by address only.
func (r *refusals) note(event, who, addr string, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	key := refusalKey{event, who, refusalReason(err)}
	l := r.lines[key]
	if l == nil && len(r.lines) >= maxRefusals {
		key = refusalKey{}
		l = r.lines[key]
	}
	if l == nil {
		l = &refusalLine{said: r.now().Add(-refusalEvery)}
		r.lines[key] = l
	}
	l.times, l.addr, l.err = l.times+1, addr, err
	r.sayLocked(key, l)
}

// sayLocked logs a line whose time has come.
func (r *refusals) sayLocked(key refusalKey, l *refusalLine) {
	if l.times == 0 || r.now().Sub(l.said) < refusalEvery {
		return
	}
	event, who := key.event, key.peer
	if key == (refusalKey{}) {
		event, who = "turned away", "many"
	}
	r.log.Info(event, "peer", who, "addr", l.addr, "times", l.times, "err", l.err)
	l.said, l.times = r.now(), 0
}

// sweep logs what was not told yet and forgets peers that stay away.
func (r *refusals) sweep() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for key, l := range r.lines {
		r.sayLocked(key, l)
		if r.now().Sub(l.said) >= refusalEvery {
			delete(r.lines, key)
		}
	}
}

// refusalReason is a constant for errors that differ in numbers only.
func refusalReason(err error) string {
	var refused *RefusedError
	switch {
	case errors.As(err, &refused):
		return refused.Field
	case errors.Is(err, ErrNotAdmitted):
		return "not admitted"
	}
	return "failed"
}
