package p2p

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"time"

	pubsub "github.com/libp2p/go-libp2p-pubsub"
	"github.com/libp2p/go-libp2p/core/peer"
	"golang.org/x/time/rate"
)

// take judges an envelope that src sent, keeps and hands over what is news, and says
// whether it is to be passed on. Blamed is src for what it should have seen before passing
// it on, and the author for what it signed, or sent itself; nobody for what a third peer
// can bring about.
func (t *Topic) take(src peer.ID, raw []byte, pulled bool) pubsub.ValidationResult {
	return t.takeRenewed(src, raw, renewal{}, pulled)
}

// takeRenewed is take of an envelope and the latest renewal of it.
func (t *Topic) takeRenewed(src peer.ID, raw []byte, r renewal, pulled bool) pubsub.ValidationResult {
	t.order.Lock()
	defer t.order.Unlock()
	now := time.Now()
	e, err := t.read(src, raw, r, now)
	if err != nil {
		return pubsub.ValidationReject
	}
	if e == nil {
		return pubsub.ValidationIgnore
	}
	if t.cfg.Check != nil {
		err = t.cfg.Check(*e)
	}
	if !t.keep(src, e, raw, r, err == nil, now) {
		return t.ignore("no room")
	}
	if err != nil {
		t.g.count("check")
		t.g.h.Blame(e.From, Invalid, fmt.Sprintf("%s: %v", t.cfg.Name, err))
		return pubsub.ValidationReject
	}
	t.g.countAccepted(pulled)
	if t.cfg.Handle != nil {
		t.cfg.Handle(*e)
	}
	if pulled && src == e.From && r.n == 0 {
		// It spoke before it was in the mesh: others have not heard it either.
		t.mesh.Publish(context.Background(), bytes.Clone(raw))
	}
	return pubsub.ValidationAccept
}

// read opens an envelope. It returns an error for what costs src its standing, and nil for
// what is of no use. The checks that cost little come first.
func (t *Topic) read(src peer.ID, raw []byte, r renewal, now time.Time) (*Envelope, error) {
	e, err := parseEnvelope(raw)
	switch {
	case err == nil && e.Topic != t.cfg.Name:
		err = fmt.Errorf("%w: topic %s on topic %s", ErrEnvelope, e.Topic, t.cfg.Name)
	case err == nil && len(e.Body) > t.cfg.MaxBody:
		err = fmt.Errorf("%w: body of %d bytes, at most %d", ErrOversized, len(e.Body), t.cfg.MaxBody)
	}
	if err != nil {
		t.g.count("malformed")
		t.g.h.Blame(src, Malformed, err.Error())
		return nil, err
	}
	why := ""
	if r.n > 0 {
		switch err := e.checkRenewal(r, renewal{}, now); {
		case errors.Is(err, ErrFuture): // whose clock is wrong is not known: seldom that of who passes it on
			why = "future"
		case err != nil:
			t.g.count("forged")
			t.g.h.Blame(src, Forged, err.Error())
			return nil, err
		}
		e.Renewed = time.Duration(r.n) * e.Step
	}
	if why == "" {
		why = t.uselessNow(src, &e, now)
	}
	if why != "" {
		t.ignore(why)
		if !t.g.useless.allow(src, now) {
			t.g.h.Blame(src, Flood, "envelopes that are no news: "+why)
		}
		return nil, nil
	}
	if err := verifyEnvelope(t.g.h.cfg.Network, e.From, raw); err != nil {
		t.g.count("forged")
		t.g.h.Blame(src, Forged, err.Error())
		return nil, err
	}
	if e.From == t.g.h.ID() {
		t.adopt(e.Seq)
		t.ignore("own")
		return nil, nil
	}
	if !t.paceOf(e.From).AllowN(now, 1) {
		t.ignore("too often")
		if src == e.From {
			t.g.h.Blame(src, Flood, "envelopes on "+t.cfg.Name)
		}
		return nil, nil
	}
	e.Body = bytes.Clone(e.Body)
	return &e, nil
}

// uselessNow says why an envelope whose signature was not looked at yet is of no use.
func (t *Topic) uselessNow(src peer.ID, e *Envelope, now time.Time) string {
	if t.g.h.standings.cutOff(e.From) {
		return "author cut off"
	}
	if !t.lacks(e) {
		return "stale"
	}
	err := e.checkTime(now)
	switch {
	case errors.Is(err, ErrExpired):
		return "expired"
	case err != nil:
		if src == e.From {
			t.g.h.Blame(src, FutureDated, err.Error())
		}
		return "future"
	}
	return ""
}

func (t *Topic) ignore(why string) pubsub.ValidationResult {
	t.g.count(why)
	return pubsub.ValidationIgnore
}

func (t *Topic) seqOf(id peer.ID) uint64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	if id == t.g.h.ID() {
		return t.seq
	}
	if a := t.authors[id]; a != nil {
		return a.seq
	}
	return 0
}

// lacks reports whether e is news: newer than all before, or the newest, renewed, whose time
// seemed to be over here.
func (t *Topic) lacks(e *Envelope) bool {
	seq := t.seqOf(e.From)
	if e.Seq != seq || e.Renewed == 0 || e.From == t.g.h.ID() {
		return e.Seq > seq
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	a := t.authors[e.From]
	return a == nil || a.env == nil && !a.wrong
}

// adopt takes the sequence number of an own envelope of an earlier run, which a clock that
// was set back would not reach.
func (t *Topic) adopt(seq uint64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.seq = max(t.seq, seq)
}

func newPace() *rate.Limiter { return rate.NewLimiter(rate.Every(tolerantPause), tolerantBurst) }

// paceOf is the author's limiter, a new one when it is not known yet.
func (t *Topic) paceOf(id peer.ID) *rate.Limiter {
	t.mu.Lock()
	defer t.mu.Unlock()
	if a := t.authors[id]; a != nil {
		return a.pace
	}
	return newPace()
}

// keep remembers e as the latest of its author; when it is not valid, only that there was
// one. It reports whether there was room.
func (t *Topic) keep(src peer.ID, e *Envelope, raw []byte, r renewal, valid bool, now time.Time) bool {
	ready := t.g.h.peers.get(e.From) != nil
	t.mu.Lock()
	defer t.mu.Unlock()
	a := t.authors[e.From]
	if a == nil {
		a = &author{pace: newPace(), via: src}
		if src == e.From || ready {
			a.via = ""
		}
		a.pace.AllowN(now, 1)
	}
	size, isNew := 0, t.authors[e.From] == nil
	if valid {
		size = len(raw)
	}
	if !t.fitsLocked(a, size, isNew) && !t.makeRoomLocked(a, size, isNew, now) {
		return false
	}
	if isNew {
		t.addLocked(e.From, a)
	}
	if valid {
		t.setLocked(a, e, bytes.Clone(raw))
	} else {
		t.setLocked(a, nil, nil)
	}
	a.seq, a.issued, a.last, a.wrong = e.Seq, e.Issued, r, !valid
	if valid && r.n > 0 { // the mesh will not carry it any more
		t.fresh[e.From] = src
	}
	return true
}

func (t *Topic) addLocked(id peer.ID, a *author) {
	t.authors[id] = a
	t.byHash[authorHash(id)] = id
	t.shareLocked(a.via).authors++
}

// setLocked replaces what a said.
func (t *Topic) setLocked(a *author, e *Envelope, raw []byte) {
	grown := len(raw) - len(a.raw)
	t.bytes += grown
	t.shareLocked(a.via).bytes += grown
	a.env, a.raw, a.last = e, raw, renewal{}
	if e != nil {
		a.seq, a.issued = e.Seq, e.Issued
	}
}

func (t *Topic) shareLocked(via peer.ID) *share {
	s := t.via[via]
	if s == nil {
		s = &share{}
		t.via[via] = s
	}
	return s
}

// fitsLocked reports whether a may hold size bytes.
func (t *Topic) fitsLocked(a *author, size int, isNew bool) bool {
	more, grown := 0, size-len(a.raw)
	if isNew {
		more = 1
	}
	if len(t.authors)+more > maxAuthors || t.bytes+grown > maxTopicBytes {
		return false
	}
	s := t.shareLocked(a.via)
	return a.via == "" || s.authors+more <= maxAuthors/viaShare && s.bytes+grown <= maxTopicBytes/viaShare
}

// makeRoomLocked drops what is over, and for a peer that is here itself also authors that
// others brought in, of whoever brought in most.
func (t *Topic) makeRoomLocked(a *author, size int, isNew bool, now time.Time) bool {
	if now.Sub(t.swept) > time.Second {
		t.sweepLocked(now)
	}
	if a.via != "" {
		return t.fitsLocked(a, size, isNew)
	}
	var most peer.ID
	for via, s := range t.via {
		if via != "" && (most == "" || s.authors > t.via[most].authors) {
			most = via
		}
	}
	for id, b := range t.authors {
		if most == "" || t.fitsLocked(a, size, isNew) {
			break
		}
		if b.via == most {
			t.dropLocked(id, b)
		}
	}
	return t.fitsLocked(a, size, isNew)
}

func (t *Topic) dropLocked(id peer.ID, a *author) {
	t.setLocked(a, nil, nil)
	s := t.shareLocked(a.via)
	s.authors--
	if *s == (share{}) {
		delete(t.via, a.via)
	}
	delete(t.authors, id)
	delete(t.byHash, authorHash(id))
}

// sweepLocked forgets envelopes whose time is over at once, and sequence numbers when no older
// envelope of the author can still count: so none comes back. An author stops renewing one when
// it says something else, so that counts for MaxValidity more at most.
func (t *Topic) sweepLocked(now time.Time) {
	t.swept = now
	for id, a := range t.authors {
		if a.env != nil && !a.counts(now) {
			t.setLocked(a, nil, nil)
		}
		if a.env == nil && now.Sub(a.issued) > MaxValidity+2*maxFuture {
			t.dropLocked(id, a)
		}
	}
}

func (t *Topic) sweep(now time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.sweepLocked(now)
}
