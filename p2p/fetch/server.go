package fetch

import (
	"context"
	"errors"
	"maps"
	"sync"
	"time"

	"kvasird/p2p"

	"github.com/libp2p/go-libp2p/core/peer"
)

// ServerConfig says what a server gives and how much of it. Zero values stand for the
// defaults.
type ServerConfig struct {
	Library         Library     // required
	Rate            int64       // bytes/s to all peers together; 0: no limit
	Busy            func() bool // the node computes now: an eighth of the rate is left; nil: never
	Sessions        int         // at a time, 64
	SessionsPerPeer int         // at a time, 4
	Requests        int         // in flight in one session, 8

	HelloTimeout time.Duration // for the first message, 10 s
	IdleTimeout  time.Duration // without a request, 2 min
	WriteTimeout time.Duration // for one piece, of at least 64 KiB at a slow reader's, 30 s
}

// Reasons for which a server ends a session or refuses a request: keys of Stats.Refused.
const (
	RefusedSessions  = "too many sessions"
	RefusedPeer      = "too many sessions of one peer"
	RefusedRequests  = "too many requests in flight"
	RefusedMalformed = "malformed"
	RefusedVersion   = "unknown version"
	RefusedModel     = "model not here"
	RefusedNotHeld   = "range not held"
	RefusedSlow      = "reader too slow"

	// RefusedUnreadable counts faults of this node: what is held could not be read.
	RefusedUnreadable = "held but not readable"
)

// statsPeers bounds the peers that are counted one by one.
const statsPeers = 1024

// Stats are a server's counters. They only grow, but Sessions and but for Peers, of which
// at most statsPeers are remembered.
type Stats struct {
	Sessions int // now
	Bytes    int64
	Peers    map[peer.ID]int64 // bytes
	Refused  map[string]int64
}

// Server gives what a library holds to peers.
type Server struct {
	cfg  ServerConfig
	pace *pacer

	mu       sync.Mutex // guards what follows
	sessions int        // those refused too, until they are told
	open     map[peer.ID]int
	stats    Stats
}

// NewServer makes a server. It panics without a library.
func NewServer(cfg ServerConfig) *Server {
	if cfg.Library == nil {
		panic("fetch: server without a library")
	}
	setDefault(&cfg.Sessions, 64)
	setDefault(&cfg.SessionsPerPeer, 4)
	setDefault(&cfg.Requests, 8)
	setDefault(&cfg.HelloTimeout, 10*time.Second)
	setDefault(&cfg.IdleTimeout, 2*time.Minute)
	setDefault(&cfg.WriteTimeout, 30*time.Second)
	return &Server{
		cfg: cfg, pace: newPacer(cfg.Rate, cfg.Busy), open: make(map[peer.ID]int),
		stats: Stats{Peers: make(map[peer.ID]int64), Refused: make(map[string]int64)},
	}
}

func setDefault[T int | int64 | time.Duration](v *T, d T) {
	if *v <= 0 {
		*v = d
	}
}

// Stats returns a copy of the counters.
func (s *Server) Stats() Stats {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := s.stats
	out.Peers, out.Refused = maps.Clone(out.Peers), maps.Clone(out.Refused)
	for _, n := range s.open {
		out.Sessions += n
	}
	return out
}

// Serve answers the requester on c until it leaves or ctx ends, and closes c. The error says
// why the session ended otherwise; it is ErrMalformed when the requester is to blame.
func (s *Server) Serve(ctx context.Context, c p2p.Conn) error {
	defer c.Close()
	reason, err := s.enter(c.Remote())
	if err != nil {
		return err
	}
	defer s.leave(c.Remote(), reason == "")
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stop := context.AfterFunc(ctx, func() { c.Close() })
	defer stop()
	ses := newSession(s, c)
	if err := ses.hello(reason); err != nil {
		return err
	}
	return ses.run(ctx, cancel)
}

// enter counts a session. One that is too many is told the reason after its first message,
// unless there are too many of those as well.
func (s *Server) enter(id peer.ID) (reason string, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	served := 0
	for _, n := range s.open {
		served += n
	}
	switch {
	case s.sessions >= 2*s.cfg.Sessions:
		s.stats.Refused[RefusedSessions]++
		return "", errors.New(RefusedSessions)
	case served >= s.cfg.Sessions:
		reason = RefusedSessions
	case s.open[id] >= s.cfg.SessionsPerPeer:
		reason = RefusedPeer
	default:
		s.open[id]++
	}
	s.sessions++
	return reason, nil
}

func (s *Server) leave(id peer.ID, served bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.sessions--
	if !served {
		return
	}
	if s.open[id]--; s.open[id] == 0 {
		delete(s.open, id)
	}
}

func (s *Server) refused(reason string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stats.Refused[reason]++
}

func (s *Server) sent(id peer.ID, n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, known := s.stats.Peers[id]; !known && len(s.stats.Peers) >= statsPeers {
		s.forgetLocked()
	}
	s.stats.Peers[id] += int64(n)
	s.stats.Bytes += int64(n)
}

// forgetLocked drops the count of one peer that is not here, if there is one.
func (s *Server) forgetLocked() {
	for id := range s.stats.Peers {
		if s.open[id] == 0 {
			delete(s.stats.Peers, id)
			return
		}
	}
}
