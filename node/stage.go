package node

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/libp2p/go-libp2p/core/peer"

	"kvasird/ggml/gguf"
	"kvasird/p2p"
	"kvasird/ring"
)

const (
	// ringProtocol is the protocol of package ring, as hosts name it.
	ringProtocol = "ring/1"
	// greetTime is how long a peer may take to name the stage that it wants.
	greetTime = 10 * time.Second
)

// stages are the windows that this node runs, and how it reaches those of others.
type stages struct {
	host  *p2p.Host
	admit func(id peer.ID) error
	log   *slog.Logger

	mu   sync.Mutex // guards list
	list []*stagePart
}

// stagePart is a window that is loaded.
type stagePart struct {
	model gguf.ModelID
	*ring.Stage
	compute *stageCompute
}

func (p *stagePart) Close() error { return errors.Join(p.Stage.Close(), p.compute.Close()) }

// mayUse says whether a peer may have a stage compute for it: for itself as an entry,
// or as a stage of a ring.
func (s *stages) mayUse(peerID string) error {
	id, err := peer.Decode(peerID)
	if err != nil || id == s.host.ID() {
		return err
	}
	return s.admit(id)
}

func (s *stages) add(p *stagePart) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.list = append(s.list, p)
}

// remove lets the sessions of a stage go elsewhere, until ctx ends, and frees it.
func (s *stages) remove(ctx context.Context, p *stagePart) error {
	drained := p.Drain(ctx)
	s.mu.Lock()
	s.list = slices.DeleteFunc(s.list, func(o *stagePart) bool { return o == p })
	s.mu.Unlock()
	if drained != nil {
		s.log.Info("a stage ends while sessions run on it", "layers", p.Layers().String(), "reason", drained)
	}
	return p.Close()
}

// find returns the stage of a window.
func (s *stages) find(model string, layers gguf.Range) (*ring.Stage, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, p := range s.list {
		if p.model.String() == model && p.Layers() == layers {
			return p.Stage, nil
		}
	}
	return nil, fmt.Errorf("layers %v of model %s are not here", layers, model)
}

// serve answers a peer that uses a stage.
func (s *stages) serve(p *p2p.Peer, c p2p.Conn) {
	if err := ring.Serve(context.Background(), netConn{c}, greetTime, s.find); err != nil {
		s.log.Info("link of a ring ended", "peer", p.ID.String(), "error", err)
	}
}

// Dial makes stages a ring.Dialer. A stage of this node is reached without a network.
func (s *stages) Dial(ctx context.Context, peerID string) (net.Conn, error) {
	if id := s.host.ID(); peerID == id.String() {
		near, far := net.Pipe()
		go func() {
			if err := ring.Serve(context.Background(), pipeConn{far, id}, greetTime, s.find); err != nil {
				s.log.Info("link of a ring within this node ended", "error", err)
			}
		}()
		return near, nil
	}
	return dialLane(ctx, s.host, peerID, ringProtocol)
}

// pipeConn is a connection within this node, of which the other end is it too.
type pipeConn struct {
	net.Conn
	self peer.ID
}

func (c pipeConn) RemoteAddr() net.Addr { return peerAddr(c.self) }

// Close ends all stages.
func (s *stages) Close() error {
	s.mu.Lock()
	list := s.list
	s.list = nil
	s.mu.Unlock()
	var errs []error
	for _, p := range list {
		errs = append(errs, p.Close())
	}
	return errors.Join(errs...)
}
