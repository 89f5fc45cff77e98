package p2p

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/libp2p/go-libp2p/core/peer"
)

// OpenLane opens a lane to a ready peer, or a stream when the peer has no lane listener
// or it can not be reached. Conn.Lane tells which.
func (h *Host) OpenLane(ctx context.Context, id peer.ID, proto string) (Conn, error) {
	return h.openApart(ctx, id, proto, false)
}

// OpenBulk opens a connection of its own to a ready peer for data that would hold up what
// else goes there: a lane; where none can be dialled, one over QUIC beside the peer's
// connection, as through a hole in a NAT, or one that the peer's relay carries. If all that
// fails it is a stream, and the log says why.
func (h *Host) OpenBulk(ctx context.Context, id peer.ID, proto string) (Conn, error) {
	return h.openApart(ctx, id, proto, true)
}

// way is a way to open a lane.
type way struct {
	to   string // the address, by which it is remembered that it leads nowhere
	dial func(ctx context.Context, p *Peer, proto string) (Conn, error)
}

// ways are those to a peer, the best first.
func (s *laneServer) ways(p *Peer, bulk bool) []way {
	var out []way
	if p.lane != "" {
		out = append(out, way{p.lane, func(ctx context.Context, p *Peer, proto string) (Conn, error) {
			return orNil(s.dial(ctx, p, proto))
		}})
	}
	switch {
	case !bulk || p.LanePort == 0:
	case p.Path() == Relayed:
		out = append(out, way{p.Addr, s.dialCarried})
	case strings.Contains(p.Addr, "/quic-v1"):
		out = append(out, way{p.Addr, func(ctx context.Context, p *Peer, proto string) (Conn, error) {
			return orNil(s.h.quic.dial(ctx, p, proto))
		}})
	}
	return out
}

// orNil makes of a nil pointer a nil Conn.
func orNil[C Conn](c C, err error) (Conn, error) {
	if err != nil {
		return nil, err
	}
	return c, nil
}

func (h *Host) openApart(ctx context.Context, id peer.ID, proto string, bulk bool) (Conn, error) {
	if _, err := h.up(); err != nil {
		return nil, err
	}
	p := h.peers.get(id)
	if p == nil {
		return nil, fmt.Errorf("%w: %s", ErrNotAdmitted, id)
	}
	if h.lanes == nil {
		return h.OpenStream(ctx, id, proto)
	}
	var failed error
	for _, w := range h.lanes.ways(p, bulk) {
		if p.stay.dead.has(w.to) {
			continue
		}
		c, err := w.dial(ctx, p, proto)
		if err == nil {
			return c, nil
		}
		if ctx.Err() != nil {
			return nil, fmt.Errorf("lane to peer %s: %w", id, err)
		}
		var refused *RefusedError
		if !errors.As(err, &refused) {
			p.stay.dead.add(w.to)
		}
		failed = errors.Join(failed, fmt.Errorf("%s: %w", w.to, err))
	}
	if failed != nil {
		h.cfg.Logger.Info("no lane, using a stream", "peer", id, "protocol", proto, "err", failed)
	}
	return h.OpenStream(ctx, id, proto)
}

// maxDeadWays bounds the addresses that are remembered of a peer.
const maxDeadWays = 16

// deadWays are addresses at which a peer was not reached, and until when none is tried again.
// The zero value is ready.
type deadWays struct {
	mu    sync.Mutex // guards until
	until map[string]time.Time
}

func (d *deadWays) has(addr string) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return time.Now().Before(d.until[addr])
}

func (d *deadWays) add(addr string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.until == nil || len(d.until) >= maxDeadWays {
		d.until = make(map[string]time.Time)
	}
	d.until[addr] = time.Now().Add(laneRetry)
}
