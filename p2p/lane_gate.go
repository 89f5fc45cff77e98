package p2p

import (
	"context"
	"fmt"
)

type preface struct {
	Network  string `cbor:"1,keyasint"`
	Protocol string `cbor:"2,keyasint"`
}

func decodePreface(b []byte) (preface, error) {
	var p preface
	if err := decMode.Unmarshal(b, &p); err != nil {
		return preface{}, fmt.Errorf("lane preface: %w", err)
	}
	if checkText(p.Network) != nil || !protocolPattern.MatchString(p.Protocol) {
		return preface{}, fmt.Errorf("lane preface: network %q or protocol %q is malformed", p.Network, p.Protocol)
	}
	return p, nil
}

// letIn makes c, which came in, a lane, once prove has learned who is at its other end. With
// an error the caller closes c.
func (s *laneServer) letIn(ctx context.Context, c member, prove func(context.Context) error) (p *Peer, handler Handler, err error) {
	ctx, cancel := context.WithTimeout(ctx, s.h.cfg.HelloTimeout)
	defer cancel()
	stop := context.AfterFunc(ctx, c.drop)
	defer stop()
	if err = prove(ctx); err == nil {
		p, handler, err = s.welcome(ctx, c)
	}
	if err == nil && !stop() {
		s.h.peers.detach(c, true)
		err = ctx.Err()
	}
	return p, handler, err
}

// welcome reads the preface of a lane whose dialler is proved, and answers it.
func (s *laneServer) welcome(ctx context.Context, c member) (*Peer, Handler, error) {
	w, r := NewFrameWriter(c, maxPreface), NewFrameReader(c, maxPreface)
	payload, err := nextOfType(r, frameLane)
	if err != nil {
		return nil, nil, err
	}
	pre, err := decodePreface(payload)
	if err != nil {
		return nil, nil, err
	}
	p, handler, v := s.judge(ctx, c, pre)
	if err = sendVerdict(w, v); err == nil {
		err = v.err(c.Remote(), false)
	}
	if err != nil {
		s.h.peers.detach(c, true)
		return nil, nil, err
	}
	return p, handler, nil
}

// judge decides on a lane and, when it is let in, ties it to its peer.
func (s *laneServer) judge(ctx context.Context, c member, pre preface) (*Peer, Handler, verdict) {
	if pre.Network != s.h.cfg.Network {
		return nil, nil, verdict{"network", s.h.cfg.Network, pre.Network}
	}
	handler := s.h.handler(pre.Protocol)
	if handler == nil {
		return nil, nil, verdict{"protocol", "one that is served", pre.Protocol}
	}
	p, err := s.h.peers.await(ctx, c.Remote())
	if err != nil {
		return nil, nil, verdict{"hello", "passed", "not passed"}
	}
	if err := s.h.peers.attach(p, c, s.h.cfg.Limits.LanesPerPeer); err != nil {
		return nil, nil, verdict{"lanes", fmt.Sprintf("at most %d of a ready peer", s.h.cfg.Limits.LanesPerPeer), "one more"}
	}
	return p, handler, verdict{}
}

// ask makes c, which was dialled, a lane to p for a protocol, once prove has learned that it is
// p at its other end. With an error c is closed.
func (s *laneServer) ask(ctx context.Context, c member, prove func(context.Context) error, p *Peer, proto string) error {
	stop := context.AfterFunc(ctx, c.drop)
	defer stop()
	err := prove(ctx)
	if err == nil {
		err = requestProtocol(c, preface{s.h.cfg.Network, proto})
	}
	if err == nil && !stop() {
		err = ctx.Err()
	}
	if err == nil {
		err = s.h.peers.attach(p, c, 0)
	}
	if err != nil {
		c.drop()
	}
	return err
}

// requestProtocol sends the preface on a lane to a proved peer and reads the verdict.
func requestProtocol(c Conn, pre preface) error {
	b, err := encMode.Marshal(pre)
	if err != nil {
		return err
	}
	w, r := NewFrameWriter(c, maxPreface), NewFrameReader(c, maxPreface)
	if err := w.Write(Frame{Type: frameLane, Payload: b}); err != nil {
		return err
	}
	return readAccepted(r, c.Remote())
}
