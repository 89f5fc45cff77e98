package p2p

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"
	"time"

	"github.com/libp2p/go-libp2p/core/network"
	"github.com/libp2p/go-libp2p/core/peer"
	"github.com/libp2p/go-libp2p/core/protocol"
	"github.com/libp2p/go-libp2p/p2p/net/swarm"
	ma "github.com/multiformats/go-multiaddr"
	manet "github.com/multiformats/go-multiaddr/net"
	"github.com/multiformats/go-multistream"
)

// Codes with which a stream is reset.
const (
	codeNotAdmitted network.StreamErrorCode = 0x4b01 // the peer has not passed the hello
	codeMalformed   network.StreamErrorCode = 0x4b02 // what it sent is not the protocol
	codeDropped     network.StreamErrorCode = 0x4b03 // the peer, or this host, is gone
)

// refusedLinger is how long a refused peer has to read why.
const refusedLinger = time.Second

// Hello connects to a peer, unless it is connected, and passes the gate with it. Its
// error is a *RefusedError when one side refuses the other.
func (h *Host) Hello(ctx context.Context, ai peer.AddrInfo) (*Peer, error) {
	leave, err := h.enter()
	if err != nil {
		return nil, err
	}
	defer leave()
	node, err := h.up()
	if err != nil {
		return nil, err
	}
	if err := h.standings.refusal(ai.ID).err(ai.ID, false); err != nil {
		return nil, err
	}
	defer h.greetings.keepFor(ai.ID)()
	dialCtx, cancel := context.WithTimeout(network.WithAllowLimitedConn(ctx, "hello"), h.cfg.HelloTimeout)
	defer cancel()
	// The swarm would refuse to dial again for seconds to minutes: the pace is ours.
	if sw, ok := node.Network().(*swarm.Swarm); ok {
		sw.Backoff().Clear(ai.ID)
	}
	if err := node.Connect(dialCtx, ai); err != nil {
		return nil, fmt.Errorf("connect to peer %s: %w", ai.ID, explainDial(err))
	}
	c := newestConn(node.Network().ConnsToPeer(ai.ID))
	if c == nil {
		return nil, fmt.Errorf("connect to peer %s: it closed the connection at once: %w", ai.ID, errLimited)
	}
	return h.greet(ctx, c)
}

// sayHello is the dialling side of the hello, over one connection.
func (h *Host) sayHello(ctx context.Context, c network.Conn) (*Peer, error) {
	id := c.RemotePeer()
	s, err := h.openHello(ctx, c)
	if err != nil {
		h.turnAway(c, false)
		return nil, fmt.Errorf("hello to peer %s: %w", id, err)
	}
	p, err := h.exchange(s)
	if err == nil {
		s.Close()
		return p, nil
	}
	var refused *RefusedError
	if errors.As(err, &refused) {
		s.Close()
	} else {
		s.ResetWithError(codeMalformed)
		err = fmt.Errorf("hello to peer %s: %w", id, err)
	}
	h.turnAway(c, refused != nil)
	return nil, err
}

// openHello opens the stream of the hello on c itself: the host would choose among the
// connections to the peer.
func (h *Host) openHello(ctx context.Context, c network.Conn) (network.Stream, error) {
	s, err := c.NewStream(network.WithAllowLimitedConn(ctx, "hello"))
	if err != nil {
		return nil, err
	}
	own := h.helloID()
	err = s.SetDeadline(time.Now().Add(h.cfg.HelloTimeout))
	if err == nil {
		_, err = multistream.SelectOneOf([]protocol.ID{own}, s)
	}
	if err == nil {
		err = s.SetProtocol(own)
	}
	if err != nil {
		s.ResetWithError(codeMalformed)
		return nil, wireErr(err)
	}
	return s, nil
}

// helloID is the protocol id of the hello.
func (h *Host) helloID() protocol.ID { return h.protocolID(fmt.Sprintf("hello/%d", helloVersion)) }

// handleHello takes the hello of any network and version.
func (h *Host) handleHello() {
	match := func(id protocol.ID) bool {
		return strings.HasPrefix(string(id), "/kvasir/") && strings.Contains(string(id), "/hello/")
	}
	h.node.SetStreamHandlerMatch(h.helloID(), match, h.answerHello)
}

// answerHello is the listening side of the hello.
func (h *Host) answerHello(s network.Stream) {
	leave, err := h.enter()
	if err != nil {
		s.ResetWithError(codeDropped)
		return
	}
	defer leave()
	id := s.Conn().RemotePeer()
	if p := h.peers.get(id); p != nil && !p.stay.hellos.Allow() {
		s.ResetWithError(codeMalformed)
		h.Blame(id, Flood, "said hello too often")
		return
	}
	_, err = h.exchange(s)
	if err == nil {
		s.Close()
		return
	}
	h.refused.tell(s.Conn(), "hello failed", err)
	var refused *RefusedError
	if !errors.As(err, &refused) {
		s.ResetWithError(codeMalformed)
		h.turnAway(s.Conn(), false)
		return
	}
	// The dialler closes as soon as it has read the verdict.
	s.CloseWrite()
	s.SetReadDeadline(time.Now().Add(refusedLinger))
	s.Read(make([]byte, 1))
	s.Close()
	h.turnAway(s.Conn(), true)
}

// turnAway disconnects a peer after a failed hello over c. A peer that was not refused
// loses c alone, and a ready one that is slow to repeat the hello not even that: that it is
// slow is for its streams to judge.
func (h *Host) turnAway(c network.Conn, refused bool) {
	id := c.RemotePeer()
	if refused {
		h.peers.lose(id, nil)
		h.node.Network().ClosePeer(id)
	} else if !h.peers.passed(c) {
		c.Close()
	}
}

// exchange runs the hello on s. It neither closes nor resets s.
func (h *Host) exchange(s network.Stream) (*Peer, error) {
	via := s.Conn()
	id := via.RemotePeer()
	defer h.peers.begin(id)()
	if err := s.SetDeadline(time.Now().Add(h.cfg.HelloTimeout)); err != nil {
		return nil, err
	}
	ours, said := h.ownHello()
	if isRelayed(via) {
		ours.Addrs = h.directAddrs(scopeOf(via.RemoteMultiaddr()))
	}
	theirs, admitted, err := h.judgeEachOther(s, ours, id)
	if err != nil {
		h.noteRefusal(via, err)
		return nil, err
	}
	p, fresh := h.peers.pass(theirs, admitted, via)
	if fresh {
		h.hearts.begin(p)
	}
	// disconnected, Revoke, or a cut for a fault, may have come before pass.
	if via.IsClosed() || !h.members.stands(p) {
		h.peers.lose(id, via)
		return nil, fmt.Errorf("peer %s disconnected, or its invitation has ended", id)
	}
	if err := h.standings.refusal(id).err(id, false); err != nil {
		return nil, err
	}
	h.pullFrom(p)
	if !h.upToDate(said) {
		h.rehello(id)
	}
	return p, nil
}

// noteRefusal counts the hello that this node refused. To come to it for another network
// costs standing; to be called by it and be of another is no fault.
func (h *Host) noteRefusal(via network.Conn, err error) {
	var refused *RefusedError
	if !errors.As(err, &refused) || refused.ByPeer {
		return
	}
	h.members.countRefusal(refused.Field)
	if refused.Field == "network" && via.Stat().Direction == network.DirInbound {
		h.Blame(refused.Peer, WrongNetwork, "it said it is of network "+refused.Got)
	}
}

// judgeEachOther exchanges records and verdicts, and says what the peer may do.
func (h *Host) judgeEachOther(s network.Stream, ours Hello, id peer.ID) (Hello, admission, error) {
	w, r := NewFrameWriter(s, maxHello), NewFrameReader(s, maxHello)
	record, err := encodeHello(ours)
	if err != nil {
		return Hello{}, admission{}, err
	}
	if err := w.Write(Frame{Type: frameHello, Payload: record}); err != nil {
		return Hello{}, admission{}, wireErr(err)
	}
	payload, err := nextOfType(r, frameHello)
	if err != nil {
		return Hello{}, admission{}, err
	}
	theirs, err := decodeHello(payload)
	if err != nil {
		return Hello{}, admission{}, err
	}
	var admitted admission
	v := h.standings.refusal(id)
	if v.Field == "" {
		v = judge(ours, theirs, id)
	}
	if v.Field == "" {
		admitted, v = h.members.admit(id, theirs.Ticket)
	}
	tv, err := exchangeVerdicts(w, r, v)
	switch {
	case v.Field != "":
		err = v.err(id, false)
	case err == nil:
		err = tv.err(id, true)
	}
	return theirs, admitted, err
}

func exchangeVerdicts(w *FrameWriter, r *FrameReader, v verdict) (verdict, error) {
	if err := sendVerdict(w, v); err != nil {
		return verdict{}, err
	}
	return readVerdict(r)
}

func sendVerdict(w *FrameWriter, v verdict) error {
	b, err := encodeVerdict(v)
	if err != nil {
		return err
	}
	return wireErr(w.Write(Frame{Type: frameVerdict, Payload: b}))
}

func readVerdict(r *FrameReader) (verdict, error) {
	payload, err := nextOfType(r, frameVerdict)
	if err != nil {
		return verdict{}, err
	}
	return decodeVerdict(payload)
}

// readAccepted reads the verdict of the peer id; one that refuses is a *RefusedError.
func readAccepted(r *FrameReader, id peer.ID) error {
	v, err := readVerdict(r)
	if err != nil {
		return err
	}
	return v.err(id, true)
}

// nextOfType reads a frame of a conversation in which each step has one type.
func nextOfType(r *FrameReader, typ uint8) ([]byte, error) {
	f, err := r.Next()
	if err != nil {
		return nil, wireErr(err)
	}
	if f.Type != typ {
		return nil, fmt.Errorf("%w: type %d, want %d", ErrFrame, f.Type, typ)
	}
	return f.Payload, nil
}

// protocolID is the id on the wire of a protocol of this network.
func (h *Host) protocolID(name string) protocol.ID {
	return protocol.ID("/kvasir/" + h.cfg.Network + "/" + name)
}

// laneAddr is where a peer connected from addr has its lane listener. A peer can not send
// its lanes to a third party: the address is the one that it proved to have. Behind a
// relay there is none.
func laneAddr(addr ma.Multiaddr, port uint16) string {
	if isCircuit(addr) || port == 0 {
		return ""
	}
	ip, err := manet.ToIP(addr)
	if err != nil {
		return ""
	}
	return net.JoinHostPort(ip.String(), strconv.Itoa(int(port)))
}
