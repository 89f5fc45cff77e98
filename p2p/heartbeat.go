package p2p

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/libp2p/go-libp2p/core/network"
	"github.com/libp2p/go-libp2p/core/peer"
	"github.com/libp2p/go-libp2p/core/protocol"
	"github.com/multiformats/go-multistream"
	"golang.org/x/time/rate"
)

// Protocol ctl/1: one stream to every ready peer, opened by the side with the lower peer
// id. Both sides send a frame of type heartPing every 1.5 s; it is answered at once, by
// who reads, with one of type heartPong and the same id, which the pinger chose at random:
// so the round trip is measured and can not be claimed. Flags are 0, payloads empty. A peer
// is watched from its hello on if it says there that it speaks ctl/1, else from its first ping.
//
// libp2p notices a frozen peer, or a path that swallows everything, after 20 to 44 s. Here
// a peer of which nothing was read for heartSilence, on any of its streams and lanes, is
// lost. That all of them count keeps a peer whose pings wait behind bulk data.
//
// It may be this process that did not run: suspended, or starved on a busy machine, where
// its peers may be starved as well. So the watch counts ticks of its own instead of time,
// and only those that came on time and before which no goroutine waited long for a thread
// (rundelay.go); after a long gap all peers get their time anew.
//
// With over heartCrowd peers, those to which nothing is open are pinged and missed four
// times later.
const (
	ctlProtocol = "ctl/1"
	heartPing   = 1
	heartPong   = 2

	heartPeriod  = 1500 * time.Millisecond
	heartSilence = 5 * time.Second        // in ticks that came on time
	heartTick    = 500 * time.Millisecond // of the watch
	heartLate    = 250 * time.Millisecond // a tick that came so much later proves nothing
	heartGap     = 3 * time.Second        // and after one so late everybody starts anew
	heartCrowd   = 64
	heartSlow    = 4 // times

	heartWrite = 10 * time.Second // for one frame
	heartsKept = 4                // pings whose answer is still awaited
)

// pulse is what is heard of a peer while it stays. It is safe for concurrent use.
type pulse struct {
	mu      sync.Mutex // guards what follows
	watched bool       // the peer has spoken ctl/1
	heard   time.Time  // when anything was last read
	seen    time.Time  // heard at the last tick
	missed  int        // ticks since then that came on time
	idle    bool       // nothing was open to it at the last tick
	rtt     time.Duration
	from    *heartbeat // who measured rtt
}

// hear notes that something was read.
func (s *stay) hear() {
	if s == nil {
		return
	}
	now := time.Now()
	s.pulse.mu.Lock()
	defer s.pulse.mu.Unlock()
	s.pulse.heard = now
}

// RTT is the smoothed round-trip time; 0: not measured yet.
func (p *Peer) RTT() time.Duration {
	p.stay.pulse.mu.Lock()
	defer p.stay.pulse.mu.Unlock()
	return p.stay.pulse.rtt
}

// silent reports, at a tick that came on time, whether the peer is to be given up.
func (p *pulse) silent(idle bool) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.watched || p.heard != p.seen || p.idle && !idle {
		p.missed = 0
	} else {
		p.missed++
	}
	p.seen, p.idle = p.heard, idle
	limit := int(heartSilence / heartTick)
	if idle {
		limit *= heartSlow
	}
	return p.missed >= limit
}

// startAnew gives the peer its time again.
func (p *pulse) startAnew() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.missed = 0
}

// hearts keeps the heartbeats of a host.
type hearts struct {
	h      *Host
	waited func() time.Duration // how long goroutines did since the latest tick
	last   time.Time            // the latest tick; of run alone

	mu      sync.Mutex // guards streams
	streams map[peer.ID]network.Stream
}

func newHearts(h *Host) *hearts {
	return &hearts{h: h, waited: newRunDelay().since, streams: make(map[peer.ID]network.Stream)}
}

// begin opens the stream to a peer that has become ready, when that is this side's part. It
// does not wait for its turn among the watchers: the other side counts from the hello on.
func (hs *hearts) begin(p *Peer) {
	if hs.h.ID() > p.ID {
		return
	}
	leave, err := hs.h.enter()
	if err != nil {
		return
	}
	go func() {
		defer leave()
		hs.keepOpen(p)
	}()
}

// keepOpen has a stream open as long as the peer stays and speaks ctl/1.
func (hs *hearts) keepOpen(p *Peer) {
	for {
		ctx, cancel := context.WithTimeout(context.Background(), hs.h.cfg.HelloTimeout)
		ctx = network.WithAllowLimitedConn(network.WithNoDial(ctx, ctlProtocol), ctlProtocol)
		s, err := hs.h.node.NewStream(ctx, p.ID, hs.h.protocolID(ctlProtocol))
		cancel()
		var unknown multistream.ErrNotSupported[protocol.ID]
		if errors.As(err, &unknown) {
			return
		}
		if err == nil {
			err = hs.beat(p, s)
		}
		hs.h.cfg.Logger.Debug("heartbeat ended", "peer", p.ID, "err", err)
		select {
		case <-p.Done():
			return
		case <-time.After(jitter(heartPeriod, rand.Float64())):
		}
	}
}

// answer is the handler of ctl/1.
func (hs *hearts) answer(s network.Stream) {
	p, leave, err := hs.h.admitStream(s)
	if err != nil {
		return
	}
	defer leave()
	if p.ID > hs.h.ID() {
		s.ResetWithError(codeMalformed)
		return
	}
	err = hs.beat(p, s)
	hs.h.cfg.Logger.Debug("heartbeat ended", "peer", p.ID, "err", err)
}

// beat pings and answers on s, which replaces an earlier stream of the peer, until it or
// the peer's stay ends.
func (hs *hearts) beat(p *Peer, s network.Stream) error {
	hs.mu.Lock()
	before := hs.streams[p.ID]
	hs.streams[p.ID] = s
	hs.mu.Unlock()
	if before != nil {
		before.ResetWithError(codeDropped)
	}
	defer func() {
		hs.mu.Lock()
		defer hs.mu.Unlock()
		if hs.streams[p.ID] == s {
			delete(hs.streams, p.ID)
		}
	}()
	b := &heartbeat{h: hs.h, peer: p, stream: s, w: NewFrameWriter(s, 0)}
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		b.ping(stop)
	}()
	err := b.read()
	close(stop)
	s.ResetWithError(codeDropped)
	<-stopped
	return err
}

// heartbeat is one ctl/1 stream.
type heartbeat struct {
	h      *Host
	peer   *Peer
	stream network.Stream

	mu   sync.Mutex // guards what follows
	w    *FrameWriter
	sent []sentPing // the latest
}

type sentPing struct {
	id uint64
	at time.Time
}

// ping sends pings until stop is closed; it ends the stream with the peer's stay.
func (b *heartbeat) ping(stop <-chan struct{}) {
	tick := time.NewTicker(heartPeriod)
	defer tick.Stop()
	for n := 0; ; n++ {
		if n%heartSlow == 0 || !b.h.hearts.idle(b.peer.ID) {
			if err := b.send(heartPing, rand.Uint64()); err != nil {
				b.stream.ResetWithError(codeDropped)
				return
			}
		}
		select {
		case <-tick.C:
		case <-b.peer.Done():
			b.stream.ResetWithError(codeDropped)
			return
		case <-stop:
			return
		}
	}
}

func (b *heartbeat) send(typ uint8, id uint64) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	now := time.Now()
	if typ == heartPing {
		b.sent = append(b.sent, sentPing{id, now})
		if len(b.sent) > heartsKept {
			b.sent = b.sent[1:]
		}
	}
	if err := b.stream.SetWriteDeadline(now.Add(heartWrite)); err != nil {
		return err
	}
	return b.w.Write(Frame{Type: typ, ID: id})
}

// read takes frames until the stream ends, and says why it did.
func (b *heartbeat) read() error {
	r, pace := NewFrameReader(b.stream, 0), rate.NewLimiter(10, 100)
	for {
		f, err := r.Next()
		if err == nil && f.Type != heartPing && f.Type != heartPong {
			err = fmt.Errorf("%w: type %d", ErrFrame, f.Type)
		}
		switch {
		case errors.Is(err, ErrFrame), errors.Is(err, ErrFrameTooLarge):
			b.h.Blame(b.peer.ID, Malformed, "heartbeat: "+err.Error())
			return err
		case err != nil:
			return wireErr(err)
		case !pace.AllowN(time.Now(), 1):
			b.h.Blame(b.peer.ID, Flood, "heartbeats")
			return errors.New("too many heartbeats")
		}
		b.peer.stay.watch()
		if f.Type == heartPong {
			b.measure(f.ID)
		} else if err := b.send(heartPong, f.ID); err != nil {
			return err
		}
	}
}

// measure takes the round-trip time of an answered ping.
func (b *heartbeat) measure(id uint64) {
	b.mu.Lock()
	i := slices.IndexFunc(b.sent, func(p sentPing) bool { return p.id == id })
	var rtt time.Duration
	if i >= 0 {
		rtt = max(time.Since(b.sent[i].at), 1)
		b.sent = slices.Delete(b.sent, i, i+1)
	}
	b.mu.Unlock()
	if rtt == 0 {
		return
	}
	p := &b.peer.stay.pulse
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.rtt == 0 || p.from != b {
		p.rtt, p.from = rtt, b // the path may be another one
	}
	p.rtt += (rtt - p.rtt) / 8
}

// watch notes that the peer speaks ctl/1.
func (s *stay) watch() {
	s.hear()
	s.pulse.mu.Lock()
	defer s.pulse.mu.Unlock()
	s.pulse.watched = true
}

// idle reports whether a peer is one of many, and nothing is open to it.
func (hs *hearts) idle(id peer.ID) bool {
	if hs.h.peers.count() <= heartCrowd {
		return false
	}
	streams, lanes := hs.h.peers.open(id)
	return streams+lanes == 0
}

// run gives up silent peers until ctx ends.
func (hs *hearts) run(ctx context.Context) {
	tick := time.NewTicker(heartTick)
	defer tick.Stop()
	hs.last = time.Now()
	for {
		select {
		case <-tick.C:
			hs.tick(time.Now())
		case <-ctx.Done():
			return
		}
	}
}

func (hs *hearts) tick(now time.Time) {
	late := now.Sub(hs.last) - heartTick
	hs.last = now
	hs.judge(max(late, hs.waited()))
}

// judge gives up silent peers at a tick that came so late.
func (hs *hearts) judge(late time.Duration) {
	for _, p := range hs.h.peers.list() {
		switch {
		case late > heartGap:
			p.stay.pulse.startAnew()
		case late > heartLate:
		case p.stay.pulse.silent(hs.idle(p.ID)):
			hs.h.cfg.Logger.Warn("peer does not answer", "peer", p.ID, "for", heartSilence)
			hs.h.Blame(p.ID, Unresponsive, "heartbeat")
			hs.h.disconnect(p.ID)
		}
	}
}
