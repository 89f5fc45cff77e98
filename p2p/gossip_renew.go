package p2p

import (
	"context"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/libp2p/go-libp2p/core/peer"
)

// Protocol renew/1: renewals pass from peer to peer in lists. Every few seconds a node sends
// what it learned since to a few of its peers, drawn anew each time, which reaches nearly all;
// and what it has of authors whose renewal is overdue here, so that who knows more says so. It
// costs a node about 100 bytes for each renewal, where an envelope by gossipsub costs thousands.
//
//	teller:   one frame of type renewTold: the length of the topic, 1 byte; the topic; then at
//	          most maxTold entries
//	listener: one frame of type renewKnown: how many authors it lacks the envelope of that is
//	          renewed, 1 byte, at most maxWanted; the first 8 bytes of the SHA-256 of the peer
//	          id of each; then an entry for each that was told of which it has a later one
//	teller:   if the listener lacks any, those envelopes as gossip/2 sends them, and pullEnd
//
//	entry:    the first 8 bytes of the SHA-256 of the author's peer id; the sequence number of
//	          the envelope, in units of 65,536, modulo 2^32, 4 bytes little-endian; the renewal
//	          (see renewal.go), all 0 for none
//
// So who missed an envelope learns that it did. Flags and ids are 0.
const (
	renewProtocol = "renew/1"

	renewTold  = 1
	renewKnown = 4 // beside the types of gossip/2

	renewTick   = 5 * time.Second
	renewFan    = 3                // peers that are told at a time
	renewGrace  = 20 * time.Second // after which a renewal is overdue
	seqMarkBits = 16
	toldSize    = 8 + 4 + renewalSize
	maxTold     = 2048
	maxWanted   = 64

	maxRenewTold  = 1 + 32 + maxTold*toldSize
	maxRenewKnown = 1 + 8*maxWanted + maxTold*toldSize
)

// told is the latest renewal of an author's envelope, of some node.
type told struct {
	author uint64 // authorHash
	seq    uint32 // seqMark
	renewal
}

func seqMark(seq uint64) uint32 { return uint32(seq >> seqMarkBits) }

// afterMark is the least sequence number with a later mark: no two envelopes of an author share
// one, or a renewal of one would be taken for a wrong one of the other, and whoever told it be
// blamed.
func afterMark(seq uint64) uint64 { return (seq>>seqMarkBits + 1) << seqMarkBits }

func (r told) append(b []byte) []byte {
	b = binary.LittleEndian.AppendUint64(b, r.author)
	return r.renewal.append(binary.LittleEndian.AppendUint32(b, r.seq))
}

// parseTold reads entries.
func parseTold(b []byte) (list []told, err error) {
	if len(b)%toldSize != 0 || len(b)/toldSize > maxTold {
		return nil, fmt.Errorf("%w: renewals of %d bytes", errMalformedPull, len(b))
	}
	for ; len(b) > 0; b = b[toldSize:] {
		list = append(list, told{binary.LittleEndian.Uint64(b), binary.LittleEndian.Uint32(b[8:]), parseRenewal(b[12:])})
	}
	return list, nil
}

// parseKnown reads the payload of a renewKnown frame.
func parseKnown(b []byte) (lacking []uint64, later []told, err error) {
	if len(b) < 1 || b[0] > maxWanted || len(b) < 1+8*int(b[0]) {
		return nil, nil, fmt.Errorf("%w: answer of %d bytes to renewals", errMalformedPull, len(b))
	}
	n := int(b[0])
	for b = b[1:]; n > 0; n-- {
		lacking, b = append(lacking, binary.LittleEndian.Uint64(b)), b[8:]
	}
	later, err = parseTold(b)
	return lacking, later, err
}

// passOn renews the own envelope when that is due, and tells a few peers what is fresh.
func (g *gossip) passOn(t *Topic, now time.Time) {
	if t.ownDue(now) && (t.cfg.Well == nil || t.cfg.Well()) {
		t.renewOwn(now)
	}
	list, from := t.takeFresh(now)
	if len(list) == 0 {
		return
	}
	peers := g.h.peers.list()
	rand.Shuffle(len(peers), func(i, j int) { peers[i], peers[j] = peers[j], peers[i] })
	for _, p := range peers[:min(len(peers), renewFan)] {
		var news []told
		for i, r := range list {
			if from[i] != p.ID && len(news) < maxTold {
				news = append(news, r)
			}
		}
		if len(news) == 0 {
			continue
		}
		leave, err := g.h.enter()
		if err != nil {
			return
		}
		go func() {
			defer leave()
			if err := g.tellRenewals(t, p.ID, news); err != nil {
				g.h.cfg.Logger.Debug("renewals not told", "peer", p.ID, "topic", t.cfg.Name, "err", err)
			}
		}()
	}
}

// takeFresh returns the renewals that were not passed on yet, and from whom each came; and the
// latest of authors of whom another is overdue, whoever sent it.
func (t *Topic) takeFresh(now time.Time) (list []told, from []peer.ID) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for id, a := range t.authors {
		src, fresh := t.fresh[id]
		if !a.counts(now) || !fresh && !a.overdue(now) {
			continue
		}
		list = append(list, a.told(id))
		from = append(from, src)
	}
	clear(t.fresh)
	return list, from
}

func (a *author) told(id peer.ID) told { return told{authorHash(id), seqMark(a.seq), a.last} }

// overdue reports whether it is time to ask others for the next renewal.
func (a *author) overdue(now time.Time) bool {
	step := a.env.Step
	if step == 0 || now.Sub(a.issued) < time.Duration(a.last.n+1)*step+renewGrace || now.Sub(a.asked) < step/2 {
		return false
	}
	a.asked = now
	return true
}

// ownDue reports whether the own envelope is to be renewed.
func (t *Topic) ownDue(now time.Time) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	_, due := t.ownDueLocked(now)
	return due
}

func (t *Topic) ownDueLocked(now time.Time) (n int, due bool) {
	a := t.authors[t.g.h.ID()]
	if a == nil || a.env == nil || a.env.Step == 0 {
		return 0, false
	}
	n = min(int(now.Sub(a.issued)/a.env.Step), t.renews.most)
	return n, n > a.last.n
}

func (t *Topic) renewOwn(now time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if n, due := t.ownDueLocked(now); due {
		id := t.g.h.ID()
		t.renewLocked(id, t.authors[id], t.renews.at(n), id)
	}
}

// renewLocked extends what an author said.
func (t *Topic) renewLocked(id peer.ID, a *author, r renewal, from peer.ID) {
	e := *a.env
	e.Renewed = time.Duration(r.n) * e.Step
	a.env, a.last = &e, r
	t.fresh[id] = from
}

// tellRenewals is the teller's side of renew/1.
func (g *gossip) tellRenewals(t *Topic, id peer.ID, list []told) error {
	ctx, cancel := context.WithTimeout(context.Background(), g.pullTimeout)
	defer cancel()
	c, err := g.h.OpenStream(ctx, id, renewProtocol)
	if err != nil {
		return err
	}
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(g.pullTimeout)); err != nil {
		return err
	}
	b := append([]byte{byte(len(t.cfg.Name))}, t.cfg.Name...)
	for _, r := range list {
		b = r.append(b)
	}
	if err := NewFrameWriter(c, maxRenewTold).Write(Frame{Type: renewTold, Payload: b}); err != nil {
		return err
	}
	lacking, err := t.readKnown(c, id)
	g.blameFor(id, err, "answer to renewals")
	if err != nil || len(lacking) == 0 {
		return err
	}
	return sendEnvelopes(c, t.wanted(lacking))
}

// readKnown takes the later renewals that the listener has, and returns of whom it lacks the
// envelope.
func (t *Topic) readKnown(c Conn, from peer.ID) ([]uint64, error) {
	f, err := NewFrameReader(c, maxRenewKnown).Next()
	if err != nil {
		return nil, err
	}
	if f.Type != renewKnown {
		return nil, fmt.Errorf("%w: frame of type %d", errMalformedPull, f.Type)
	}
	lacking, later, err := parseKnown(f.Payload)
	if err == nil {
		t.renewAll(from, later)
	}
	return lacking, err
}

// wanted picks the sealed envelopes of some authors, each once.
func (t *Topic) wanted(authors []uint64) (out [][]byte) {
	t.mu.Lock()
	defer t.mu.Unlock()
	now, sent := time.Now(), make(map[uint64]bool)
	for _, hash := range authors {
		if a := t.authors[t.byHash[hash]]; a != nil && a.counts(now) && !sent[hash] {
			sent[hash] = true
			out = append(out, a.sealed())
		}
	}
	return out
}

// answerRenewals is the listener's side of renew/1.
func (g *gossip) answerRenewals(p *Peer, c Conn) {
	if !g.tells.allow(p.ID, time.Now()) {
		g.count("too often")
		g.h.Blame(p.ID, Flood, "renewals")
		return
	}
	if err := g.takeRenewals(p.ID, c); err != nil {
		g.h.cfg.Logger.Debug("renewals not taken", "peer", p.ID, "err", err)
		g.blameFor(p.ID, err, "renewals")
	}
}

func (g *gossip) takeRenewals(from peer.ID, c Conn) error {
	if err := c.SetDeadline(time.Now().Add(g.pullTimeout)); err != nil {
		return err
	}
	f, err := NewFrameReader(c, maxRenewTold).Next()
	if err != nil {
		return err
	}
	if f.Type != renewTold {
		return fmt.Errorf("%w: frame of type %d", errMalformedPull, f.Type)
	}
	name, entries, err := parseTopic(f.Payload)
	if err != nil {
		return err
	}
	list, err := parseTold(entries)
	if err != nil {
		return err
	}
	var lacking []uint64
	var later []told
	t := g.topic(name)
	if t != nil {
		lacking, later = t.renewAll(from, list)
	}
	b := []byte{byte(len(lacking))}
	for _, hash := range lacking {
		b = binary.LittleEndian.AppendUint64(b, hash)
	}
	for _, r := range later {
		b = r.append(b)
	}
	if err := NewFrameWriter(c, maxRenewKnown).Write(Frame{Type: renewKnown, Payload: b}); err != nil || len(lacking) == 0 {
		return err
	}
	before := g.accepted()
	err = t.readPull(NewFrameReader(c, maxPullEnvelope), from)
	// Who tells of authors that it cannot show is as one who sends what is no news.
	for range max(0, len(lacking)-int(g.accepted()-before)) {
		g.tellsNothing(from)
	}
	return err
}

func (g *gossip) accepted() uint64 {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.stats.Accepted
}

// tellsNothing counts a renewal of nothing.
func (g *gossip) tellsNothing(from peer.ID) {
	g.count("renewal of nothing")
	if !g.useless.allow(from, time.Now()) {
		g.h.Blame(from, Flood, "renewals of nothing")
	}
}

// renewAll takes what a peer told. It returns the authors whose envelope it has and this node
// lacks, at most maxWanted, and what this node has later.
func (t *Topic) renewAll(from peer.ID, list []told) (lacking []uint64, later []told) {
	wrong := 0
	for _, r := range list {
		// Who lacks more pulls. What is made up costs no more than maxWanted looks at it.
		if len(lacking) == maxWanted || wrong == maxWanted {
			break
		}
		v, mine := t.renew(from, r, time.Now())
		switch v {
		case renewalLacking:
			lacking = append(lacking, r.author)
		case renewalEarlier:
			later = append(later, mine)
		case renewalWrong:
			wrong++
			t.g.tellsNothing(from)
		}
	}
	return lacking, later
}

// renewalVerdict is what is to be made of a renewal.
type renewalVerdict int

const (
	renewalUseless renewalVerdict = iota // known, or of no interest
	renewalTaken
	renewalLacking // of an envelope that is not here
	renewalEarlier // this node has a later one
	renewalWrong   // it is none of that envelope
)

// renew takes a renewal, and returns what this node has if that is later.
func (t *Topic) renew(src peer.ID, r told, now time.Time) (renewalVerdict, told) {
	t.order.Lock()
	defer t.order.Unlock()
	v, a, mine := t.extend(src, r, now)
	if v != renewalTaken {
		return v, mine
	}
	t.g.mu.Lock()
	t.g.stats.Renewed++
	t.g.mu.Unlock()
	if t.cfg.Renew != nil {
		t.cfg.Renew(*a)
	}
	return v, mine
}

// extend extends the envelope that r renews.
func (t *Topic) extend(src peer.ID, r told, now time.Time) (v renewalVerdict, e *Envelope, mine told) {
	t.mu.Lock()
	defer t.mu.Unlock()
	id, known := t.byHash[r.author]
	if !known {
		return renewalLacking, nil, mine
	}
	a := t.authors[id]
	newer := int32(r.seq - seqMark(a.seq))
	switch {
	case id == t.g.h.ID() || t.g.h.standings.cutOff(id):
	case newer > 0 || newer == 0 && a.env == nil && !a.wrong:
		v = renewalLacking
	case newer < 0 || a.env == nil || a.env.Step == 0 || r.renewal == a.last:
	case r.n < a.last.n:
		v, mine = renewalEarlier, a.told(id)
	case a.env.checkRenewal(r.renewal, a.last, now) != nil:
		v = renewalWrong
	default:
		t.renewLocked(id, a, r.renewal, src)
		v, e = renewalTaken, a.env
	}
	return v, e, mine
}
