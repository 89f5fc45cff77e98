package p2p

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"time"

	"github.com/libp2p/go-libp2p/core/peer"
)

// Protocol gossip/2: one side pulls what the other knows of a topic, on a stream of its
// own, when a peer becomes ready and from a random one every few minutes.
//
//	asker:    one frame of type pullWant: the length of the topic, 1 byte; the topic; then
//	          what it has of each author, 16 bytes each: the first 8 bytes of the SHA-256
//	          of the peer id, and the sequence number, little-endian
//	answerer: frames of type pullEnvelope, each the latest renewal (see renewal.go, all 0 for
//	          none) of an envelope that is newer, and that envelope; at most maxPull of them
//	          and maxPullBytes; then one of type pullEnd, empty
//
// Flags and ids are 0. Each envelope is judged as if it had been gossiped by the answerer.
// What did not fit comes with a later pull, since the choice is random.
//
// Version history: 1; 2 has the renewals.
const (
	pullProtocol = "gossip/2"

	pullWant     = 1
	pullEnvelope = 2
	pullEnd      = 3

	pullHave     = 16
	maxPullWant  = 1 + 32 + pullHave*maxAuthors
	maxPull      = 4096
	maxPullBytes = 8 << 20

	maxPullEnvelope = renewalSize + maxEnvelope

	pullTimeout = 20 * time.Second // for all of one pull, of either side
	pullsAtOnce = 4                // own
	settlePulls = 3 * time.Second  // from the first of a peer to the second
	firstPulls  = 15 * time.Second // pause until one was answered
	laterPulls  = 5 * time.Minute  // for each started pullCrowd authors
	pullCrowd   = 1000
)

// errMalformedPull says that the other side does not speak gossip/2.
var errMalformedPull = errors.New("not gossip/2")

// run pulls, keeps gossipsub's view of the ready peers right, and forgets, until ctx ends.
func (g *gossip) run(ctx context.Context) {
	sweep := time.NewTicker(sweepTopics)
	defer sweep.Stop()
	pull := time.NewTimer(jitter(firstPulls, rand.Float64()))
	defer pull.Stop()
	renew := time.NewTicker(renewTick)
	defer renew.Stop()
	for {
		select {
		case now := <-sweep.C:
			for _, t := range g.joined() {
				t.sweep(now)
			}
			for _, p := range g.h.peers.list() {
				g.meet(p.ID)
			}
		case <-pull.C:
			if all := g.h.peers.list(); len(all) > 0 {
				g.pullSoon(all[rand.IntN(len(all))].ID)
			}
			pause := g.pullPause()
			if g.pulled.Load() == 0 {
				pause = firstPulls
			}
			pull.Reset(jitter(pause, rand.Float64()))
		case now := <-renew.C:
			for _, t := range g.joined() {
				g.passOn(t, now)
			}
		case <-ctx.Done():
			return
		}
	}
}

// pullPause grows with what a pull costs: it names all authors.
func (g *gossip) pullPause() time.Duration {
	most := 0
	for _, t := range g.joined() {
		t.mu.Lock()
		most = max(most, len(t.authors))
		t.mu.Unlock()
	}
	return laterPulls * time.Duration(1+most/pullCrowd)
}

// pullSoon pulls all topics from a peer in the background, unless enough pulls are under
// way: then the news is on its way too.
func (g *gossip) pullSoon(id peer.ID) {
	leave, err := g.h.enter()
	if err != nil {
		return
	}
	go func() {
		defer leave()
		g.pullAll(id)
	}()
}

// pullTwice pulls from a peer that became ready, and again when gossip has settled: what
// is published in between gets lost, as neither side knows yet what the other has joined.
func (g *gossip) pullTwice(p *Peer) {
	leave, err := g.h.enter()
	if err != nil {
		return
	}
	go func() {
		defer leave()
		g.pullAll(p.ID)
		select {
		case <-time.After(settlePulls):
			g.pullAll(p.ID)
		case <-p.Done():
		}
	}()
}

func (g *gossip) pullAll(id peer.ID) {
	select {
	case g.pulling <- struct{}{}:
	default:
		return
	}
	defer func() { <-g.pulling }()
	for _, t := range g.joined() {
		if err := g.pull(t, id); err != nil {
			g.h.cfg.Logger.Debug("pull of gossip failed", "peer", id, "topic", t.cfg.Name, "err", err)
			return
		}
		g.pulled.Add(1)
	}
}

// pull asks a peer for what it knows of a topic.
func (g *gossip) pull(t *Topic, id peer.ID) error {
	ctx, cancel := context.WithTimeout(context.Background(), g.pullTimeout)
	defer cancel()
	c, err := g.h.OpenStream(ctx, id, pullProtocol)
	if err != nil {
		return err
	}
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(g.pullTimeout)); err != nil {
		return err
	}
	if err := NewFrameWriter(c, maxPullWant).Write(Frame{Type: pullWant, Payload: t.have()}); err != nil {
		return err
	}
	err = t.readPull(NewFrameReader(c, maxPullEnvelope), id)
	g.blameFor(id, err, "pull of gossip")
	return err
}

// blameFor blames a peer for how it did its part of what.
func (g *gossip) blameFor(id peer.ID, err error, what string) {
	switch {
	case errors.Is(err, errMalformedPull), errors.Is(err, ErrFrame), errors.Is(err, ErrFrameTooLarge):
		g.count("malformed")
		g.h.Blame(id, Malformed, what+": "+err.Error())
	case errors.Is(err, os.ErrDeadlineExceeded):
		g.h.Blame(id, Unresponsive, what)
	}
}

// readPull takes the answer to a pull.
func (t *Topic) readPull(r *FrameReader, from peer.ID) error {
	left := maxPullBytes
	for range maxPull + 1 {
		f, err := r.Next()
		if err != nil {
			return err
		}
		left -= len(f.Payload)
		switch {
		case f.Type == pullEnd && len(f.Payload) == 0:
			return nil
		case f.Type != pullEnvelope || left < 0 || len(f.Payload) < renewalSize:
			return fmt.Errorf("%w: frame of type %d, %d bytes over the limit", errMalformedPull, f.Type, max(-left, 0))
		}
		t.takeRenewed(from, f.Payload[renewalSize:], parseRenewal(f.Payload), true)
		if t.g.h.peers.get(from) == nil {
			return ErrNotAdmitted // cut off for what it sent, or gone
		}
	}
	return fmt.Errorf("%w: over %d envelopes", errMalformedPull, maxPull)
}

// have is the payload of a pullWant frame.
func (t *Topic) have() []byte {
	t.mu.Lock()
	defer t.mu.Unlock()
	b := append([]byte{byte(len(t.cfg.Name))}, t.cfg.Name...)
	for id, a := range t.authors {
		seq := a.seq
		if a.env == nil && !a.wrong {
			seq-- // its author may have renewed it
		}
		b = binary.LittleEndian.AppendUint64(b, authorHash(id))
		b = binary.LittleEndian.AppendUint64(b, seq)
	}
	return b
}

func authorHash(id peer.ID) uint64 {
	sum := sha256.Sum256([]byte(id))
	return binary.LittleEndian.Uint64(sum[:])
}

// parseTopic reads the topic that a payload begins with, and returns what follows.
func parseTopic(b []byte) (topic string, rest []byte, err error) {
	if len(b) < 1 || len(b) < 1+int(b[0]) || !topicPattern.Match(b[1:1+int(b[0])]) {
		return "", nil, fmt.Errorf("%w: topic", errMalformedPull)
	}
	n := 1 + int(b[0])
	return string(b[1:n]), b[n:], nil
}

// parseWant reads the payload of a pullWant frame.
func parseWant(b []byte) (topic string, have map[uint64]uint64, err error) {
	if topic, b, err = parseTopic(b); err != nil {
		return "", nil, err
	}
	if len(b)%pullHave != 0 || len(b)/pullHave > maxAuthors {
		return "", nil, fmt.Errorf("%w: list of %d bytes", errMalformedPull, len(b))
	}
	have = make(map[uint64]uint64, len(b)/pullHave)
	for ; len(b) > 0; b = b[pullHave:] {
		have[binary.LittleEndian.Uint64(b)] = binary.LittleEndian.Uint64(b[8:])
	}
	return topic, have, nil
}

// answerPull is the handler of gossip/2.
func (g *gossip) answerPull(p *Peer, c Conn) {
	if !g.pulls.allow(p.ID, time.Now()) {
		g.count("too often")
		g.h.Blame(p.ID, Flood, "pulls of gossip")
		return
	}
	if err := g.sendPull(c); err != nil {
		g.h.cfg.Logger.Debug("answer to a pull of gossip failed", "peer", p.ID, "err", err)
		if errors.Is(err, errMalformedPull) || errors.Is(err, ErrFrame) || errors.Is(err, ErrFrameTooLarge) {
			g.count("malformed")
			g.h.Blame(p.ID, Malformed, "asked for gossip: "+err.Error())
			c.(member).drop() // it may still be writing
		}
	}
}

func (g *gossip) sendPull(c Conn) error {
	if err := c.SetDeadline(time.Now().Add(g.pullTimeout)); err != nil {
		return err
	}
	f, err := NewFrameReader(c, maxPullWant).Next()
	if err != nil {
		return err
	}
	if f.Type != pullWant {
		return fmt.Errorf("%w: frame of type %d", errMalformedPull, f.Type)
	}
	name, have, err := parseWant(f.Payload)
	if err != nil {
		return err
	}
	var list [][]byte
	if t := g.topic(name); t != nil {
		list = t.newerThan(have)
	}
	return sendEnvelopes(c, list)
}

// sendEnvelopes writes what newerThan or wanted returned.
func sendEnvelopes(c Conn, list [][]byte) error {
	w := NewFrameWriter(c, maxPullEnvelope)
	for _, b := range list {
		if err := w.Write(Frame{Type: pullEnvelope, Payload: b}); err != nil {
			return err
		}
	}
	return w.Write(Frame{Type: pullEnd})
}

// newerThan picks the sealed envelopes that somebody who has these sequence numbers lacks, each
// after its renewal.
func (t *Topic) newerThan(have map[uint64]uint64) [][]byte {
	t.mu.Lock()
	defer t.mu.Unlock()
	now, size := time.Now(), 0
	var out [][]byte
	for id, a := range t.authors {
		if !a.counts(now) || have[authorHash(id)] >= a.seq {
			continue
		}
		size += len(a.raw)
		if len(out) == maxPull || size > maxPullBytes {
			break
		}
		out = append(out, a.sealed())
	}
	return out
}

// sealed is the payload of a pullEnvelope frame.
func (a *author) sealed() []byte {
	return append(a.last.append(make([]byte, 0, renewalSize+len(a.raw))), a.raw...)
}
