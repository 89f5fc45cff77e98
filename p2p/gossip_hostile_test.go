package p2p

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"strings"
	"testing"
	"time"

	pb "github.com/libp2p/go-libp2p-pubsub/pb"
	"github.com/libp2p/go-libp2p/core/peer"
	"google.golang.org/protobuf/proto"
)

// sealFor seals an envelope of now on testTopic; change may spoil it.
func sealFor(t testing.TB, id Identity, body string, change func(*Envelope)) []byte {
	t.Helper()
	now := time.Now()
	e := Envelope{Topic: testTopic, From: id.ID(), Seq: uint64(now.UnixMicro()), Issued: now, Validity: time.Minute, Body: []byte(body)}
	if change != nil {
		change(&e)
	}
	raw, err := id.Seal("testnet", e)
	if err != nil {
		t.Fatal(err)
	}
	return raw
}

// gossips has a hostile host send whatever it wants by gossip.
func gossips(t testing.TB, topic *Topic, raw []byte) {
	t.Helper()
	if err := topic.mesh.Publish(context.Background(), raw); err != nil {
		t.Fatal(err)
	}
}

// target is a node under attack, its attacker, and an honest peer that it must serve.
type target struct {
	a, mallory, honest    *Host
	ta, tmallory, thonest *Topic
	heard                 *hearings
	id                    Identity // mallory's
}

func newTarget(t *testing.T) *target {
	t.Helper()
	var x target
	var err error
	if x.id, err = NewIdentity(); err != nil {
		t.Fatal(err)
	}
	x.a, x.ta, x.heard = startGossip(t, nil)
	x.ta.cfg.Check = func(e Envelope) error {
		if bytes.HasPrefix(e.Body, []byte("absurd")) {
			return errors.New("absurd")
		}
		return nil
	}
	x.mallory, x.tmallory, _ = startGossip(t, func(c *Config) { c.Identity = x.id })
	x.honest, x.thonest, _ = startGossip(t, nil)
	hello(t, x.mallory, x.a)
	hello(t, x.honest, x.a)
	x.meshed(t, x.tmallory, "hello from mallory")
	return &x
}

// meshed waits until what is gossiped on topic arrives.
func (x *target) meshed(t *testing.T, topic *Topic, body string) {
	t.Helper()
	if err := topic.Publish([]byte(body), time.Minute); err != nil {
		t.Fatal(err)
	}
	eventually(t, body+" arrives", func() bool { return x.heard.heard(body) })
}

func (x *target) refused(why string) uint64 { return x.a.GossipStats().Refused[why] }

// served fails unless the node serves its honest peer and finds no fault in it.
func (x *target) served(t *testing.T) {
	t.Helper()
	x.meshed(t, x.thonest, "honest")
	if st := x.a.Standing(x.honest.ID()); st.Score != 0 {
		t.Errorf("the honest peer has a fault: %+v", st)
	}
}

func TestHostileEnvelopes(t *testing.T) {
	victim, err := NewIdentity()
	if err != nil {
		t.Fatal(err)
	}
	const none = faultKinds
	tests := []struct {
		name  string
		why   string // counted
		fault Fault  // of the sender
		raw   func(id Identity) []byte
	}{
		{"signature changed", "forged", Forged, func(id Identity) []byte {
			raw := sealFor(t, id, "x", nil)
			raw[len(raw)-1] ^= 1
			return raw
		}},
		{"body of another changed", "forged", Forged, func(Identity) []byte {
			raw := sealFor(t, victim, "x", nil)
			raw[len(raw)-65] ^= 1
			return raw
		}},
		{"in the name of another", "forged", Forged, func(id Identity) []byte {
			return sealFor(t, Identity{id: victim.id, key: id.key}, "x", nil)
		}},
		{"of another network", "forged", Forged, func(id Identity) []byte {
			now := time.Now()
			raw, err := id.Seal("othernet", Envelope{Topic: testTopic, From: id.ID(), Seq: uint64(now.UnixMicro()), Issued: now, Validity: time.Minute})
			if err != nil {
				t.Fatal(err)
			}
			return raw
		}},
		{"of another topic", "malformed", Malformed, func(id Identity) []byte {
			return sealFor(t, id, "x", func(e *Envelope) { e.Topic = "other" })
		}},
		{"oversized", "malformed", Malformed, func(id Identity) []byte { return sealFor(t, id, strings.Repeat("x", 1001), nil) }},
		{"garbage", "malformed", Malformed, func(Identity) []byte { return bytes.Repeat([]byte("garbage"), 30) }},
		{"future-dated", "future", FutureDated, func(id Identity) []byte {
			return sealFor(t, id, "x", func(e *Envelope) { e.Issued = e.Issued.Add(2 * time.Minute) })
		}},
		{"future-dated, of another", "future", none, func(Identity) []byte {
			return sealFor(t, victim, "x", func(e *Envelope) { e.Issued = e.Issued.Add(2 * time.Minute) })
		}},
		{"sequence number of all time", "future", FutureDated, func(id Identity) []byte {
			return sealFor(t, id, "x", func(e *Envelope) { e.Seq = 1<<64 - 1 })
		}},
		{"expired", "expired", none, func(Identity) []byte {
			return sealFor(t, victim, "x", func(e *Envelope) { e.Issued = e.Issued.Add(-time.Hour); e.Validity = 59 * time.Minute })
		}},
		{"absurd", "check", Invalid, func(id Identity) []byte { return sealFor(t, id, "absurd", nil) }},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			x := newTarget(t)
			before := len(x.heard.bodies())
			gossips(t, x.tmallory, tt.raw(x.id))
			eventually(t, "it is counted as "+tt.why, func() bool { return x.refused(tt.why) == 1 })
			if tt.fault != none {
				eventually(t, "it costs standing", func() bool {
					st := x.a.Standing(x.mallory.ID())
					return st.Score > 0 && st.Last == tt.fault
				})
			} else if st := x.a.Standing(x.mallory.ID()); st.Score != 0 {
				t.Errorf("blamed for what it may not have known: %+v", st)
			}
			if got := x.heard.bodies(); len(got) != before {
				t.Errorf("handed over: %q", got)
			}
			x.served(t)
		})
	}
}

// Who passes on what another signed is not taken for its author, and not blamed for it.
func TestRelayedEnvelope(t *testing.T) {
	x := newTarget(t)
	author, err := NewIdentity()
	if err != nil {
		t.Fatal(err)
	}
	raw := sealFor(t, author, "relayed", nil)
	gossips(t, x.tmallory, raw)
	eventually(t, "it arrives", func() bool { return latestOf(x.ta, author.ID()) == "relayed" })
	gossips(t, x.tmallory, sealFor(t, author, "absurd", nil))
	eventually(t, "its author is blamed", func() bool { return x.a.Standing(author.ID()).Last == Invalid })
	// The same again, by another way, costs nothing more.
	for range 3 {
		x.ta.take(x.mallory.ID(), raw, true)
	}
	if st := x.a.Standing(author.ID()); x.a.Faults()[Invalid] != 1 || st.Score > faultWeights[Invalid] {
		t.Errorf("a replay costs the author: %+v", st)
	}
	if st := x.a.Standing(x.mallory.ID()); st.Score != 0 {
		t.Errorf("who passed it on is blamed: %+v", st)
	}
	// What its author said before does not count any more either way.
	if got := latestOf(x.ta, author.ID()); got != "" {
		t.Errorf("latest of the author is %q", got)
	}
	x.served(t)
}

// A departed peer is not revived by what it said once.
func TestReplay(t *testing.T) {
	x := newTarget(t)
	author, err := NewIdentity()
	if err != nil {
		t.Fatal(err)
	}
	old := sealFor(t, author, "old", func(e *Envelope) { e.Seq-- })
	last := sealFor(t, author, "last", func(e *Envelope) { e.Validity = 2 * time.Second })
	for _, raw := range [][]byte{old, last} {
		gossips(t, x.tmallory, raw)
		eventually(t, "it arrives", func() bool { return x.heard.heard("old") })
	}
	eventually(t, "the last arrives", func() bool { return latestOf(x.ta, author.ID()) == "last" })
	eventually(t, "its time is over", func() bool { return latestOf(x.ta, author.ID()) == "" })
	x.ta.sweep(time.Now())
	heard := len(x.heard.bodies())
	for _, raw := range [][]byte{old, last} {
		x.ta.take(x.mallory.ID(), raw, true)
	}
	if n := x.refused("stale"); n < 2 {
		t.Errorf("%d stale envelopes counted, want 2", n)
	}
	if got := x.heard.bodies(); len(got) != heard || latestOf(x.ta, author.ID()) != "" {
		t.Errorf("revived: %q", got)
	}
	if st := x.a.Standing(x.mallory.ID()); st.Score != 0 {
		t.Errorf("a replay or two are no fault: %+v", st)
	}
	// Returned, it counts at once.
	gossips(t, x.tmallory, sealFor(t, author, "back", nil))
	eventually(t, "the author is back", func() bool { return latestOf(x.ta, author.ID()) == "back" })
	// A flood of replays is a fault.
	for i := 0; i < 100000 && x.a.Peer(x.mallory.ID()) != nil; i++ {
		x.ta.take(x.mallory.ID(), old, true)
	}
	if st := x.a.Standing(x.mallory.ID()); !st.CutOff || st.Last != Flood {
		t.Errorf("after a flood of replays: %+v", st)
	}
	x.served(t)
}

// Sequence numbers are kept for as long as an envelope could still count.
func TestSequenceIsKept(t *testing.T) {
	h, topic, _ := startGossip(t, nil)
	id, err := NewIdentity()
	if err != nil {
		t.Fatal(err)
	}
	now := time.Now()
	topic.take(h.ID(), sealFor(t, id, "x", nil), true)
	topic.sweep(now.Add(MaxValidity + maxFuture))
	if topic.seqOf(id.ID()) == 0 {
		t.Error("forgotten too early")
	}
	topic.sweep(now.Add(MaxValidity + 3*maxFuture))
	if topic.seqOf(id.ID()) != 0 || topic.bytes != 0 || len(topic.via) != 0 {
		t.Errorf("not forgotten: %d authors, %d bytes, %d shares", len(topic.authors), topic.bytes, len(topic.via))
	}
}

// A flooder is heard for as much as is allowed and then cut off.
func TestFloodOfValidEnvelopes(t *testing.T) {
	x := newTarget(t)
	begin := time.Now()
	for i := 0; i < 1000 && x.a.Peer(x.mallory.ID()) != nil; i++ {
		gossips(t, x.tmallory, sealFor(t, x.id, fmt.Sprint("flood ", i), func(e *Envelope) { e.Seq += uint64(i) }))
		time.Sleep(time.Millisecond)
	}
	eventually(t, "the flooder is cut off", func() bool { return x.a.Standing(x.mallory.ID()).CutOff })
	if st := x.a.Standing(x.mallory.ID()); st.Last != Flood {
		t.Errorf("cut off for %+v", st)
	}
	allowed := tolerantBurst + 1 + int(time.Since(begin)/tolerantPause)
	if n := len(x.heard.bodies()); n > allowed {
		t.Errorf("%d envelopes were heard, at most %d are allowed", n, allowed)
	}
	x.served(t)
	if x.honest.Standing(x.a.ID()).Score != 0 {
		t.Error("the flood was passed on")
	}
}

// Own publishing keeps to what others allow.
func TestPublishRefused(t *testing.T) {
	_, topic, _ := startGossip(t, nil)
	if err := topic.Publish(make([]byte, 1001), time.Minute); !errors.Is(err, ErrOversized) {
		t.Errorf("oversized: %v", err)
	}
	if err := topic.Publish(nil, 2*time.Hour); !errors.Is(err, ErrOversized) {
		t.Errorf("validity: %v", err)
	}
	var err error
	for range 10 * publishBurst {
		if err = topic.Publish([]byte("x"), time.Minute); err != nil {
			break
		}
	}
	if !errors.Is(err, ErrTooOften) {
		t.Errorf("too often: %v", err)
	}
}

// Authors that one peer made up do not fill the table, and do not keep real ones out.
func TestTableOfAuthorsIsBounded(t *testing.T) {
	x := newTarget(t)
	for _, h := range []*Host{x.mallory, x.honest} { // nobody pulls what is invented below
		for range pullsAtOnce {
			h.gossip.pulling <- struct{}{}
		}
	}
	now := time.Now()
	invent := func(via peer.ID, n int) (kept int) {
		for range n {
			var id [8]byte
			binary.LittleEndian.PutUint64(id[:], rand.Uint64())
			e := &Envelope{Topic: testTopic, From: peer.ID(id[:]), Seq: 1, Issued: now, Validity: time.Minute}
			if x.ta.keep(via, e, make([]byte, 200), renewal{}, true, now) {
				kept++
			}
		}
		return kept
	}
	if n := invent(x.mallory.ID(), maxAuthors); n != maxAuthors/viaShare {
		t.Errorf("one peer brought in %d authors, want %d", n, maxAuthors/viaShare)
	}
	for _, via := range []peer.ID{"accomplice 1", "accomplice 2", "accomplice 3"} {
		invent(via, maxAuthors)
	}
	if n := len(x.ta.authors); n < maxAuthors-2 || n > maxAuthors {
		t.Errorf("%d authors, want about %d", n, maxAuthors)
	}
	x.served(t)
	if n := len(x.ta.authors); n > maxAuthors {
		t.Errorf("%d authors, at most %d", n, maxAuthors)
	}
	// Large bodies are bounded too.
	big := &Envelope{Topic: testTopic, From: x.mallory.ID(), Seq: 1 << 40, Issued: now, Validity: time.Minute}
	if x.ta.keep("glutton", &Envelope{From: "g", Issued: now, Validity: time.Minute}, make([]byte, maxTopicBytes/viaShare+1), renewal{}, true, now) {
		t.Error("one peer brought in more bytes than its share")
	}
	if x.ta.keep(x.mallory.ID(), big, make([]byte, maxTopicBytes+1), renewal{}, true, now) {
		t.Error("more bytes than all may have")
	}
}

// rawGossip writes on a stream of gossipsub.
func (x *target) rawGossip(t *testing.T, b []byte) {
	t.Helper()
	s, err := x.mallory.node.NewStream(t.Context(), x.a.ID(), x.mallory.gossip.meshProtocol())
	if err != nil {
		return // cut off
	}
	t.Cleanup(func() { s.Reset() })
	s.SetWriteDeadline(time.Now().Add(patience))
	s.Write(b)
}

func rpcBytes(t *testing.T, rpc *pb.RPC) []byte {
	t.Helper()
	b, err := proto.Marshal(rpc)
	if err != nil {
		t.Fatal(err)
	}
	return append(binary.AppendUvarint(nil, uint64(len(b))), b...)
}

func TestHostileGossipsub(t *testing.T) {
	topic, other := testTopic, "unjoined"
	raw := func(id Identity) []byte { return sealFor(t, id, "raw", nil) }
	tests := []struct {
		name  string
		why   string
		fault Fault
		bytes func(id Identity) []byte
	}{
		{"garbage", "malformed", Malformed, func(Identity) []byte { return append([]byte{20}, bytes.Repeat([]byte{0xff}, 20)...) }},
		{"claims a gigabyte", "malformed", Malformed, func(Identity) []byte { return binary.AppendUvarint(nil, 1<<30) }},
		{"unjoined topic", "unjoined topic", Flood, func(id Identity) []byte {
			return rpcBytes(t, &pb.RPC{Publish: []*pb.Message{{Topic: &other, Data: raw(id)}}})
		}},
		{"signed outside of the envelope", "malformed", Malformed, func(id Identity) []byte {
			return rpcBytes(t, &pb.RPC{Publish: []*pb.Message{{Topic: &topic, Data: raw(id), From: []byte(id.ID()), Seqno: []byte("12345678"), Signature: make([]byte, 64)}}})
		}},
		{"subscribes to everything", "malformed", Malformed, func(Identity) []byte {
			var rpc pb.RPC
			for i := range maxSubscriptions + 1 {
				rpc.Subscriptions = append(rpc.Subscriptions, &pb.RPC_SubOpts{Subscribe: proto.Bool(true), Topicid: proto.String(fmt.Sprint("topic-", i))})
			}
			return rpcBytes(t, &rpc)
		}},
		{"subscribes to no topic's name", "malformed", Malformed, func(Identity) []byte {
			return rpcBytes(t, &pb.RPC{Subscriptions: []*pb.RPC_SubOpts{{Subscribe: proto.Bool(true), Topicid: proto.String("/a b/")}}})
		}},
		{"flood of empty messages", "too often", Flood, func(Identity) []byte {
			return bytes.Repeat(rpcBytes(t, &pb.RPC{Control: &pb.ControlMessage{}}), 20000)
		}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			x := newTarget(t)
			// The attacker's own gossipsub takes its stream back when it can.
			for range 20 {
				x.rawGossip(t, tt.bytes(x.id))
				time.Sleep(100 * time.Millisecond)
				if x.refused(tt.why) > 0 {
					break
				}
			}
			eventually(t, "it is counted as "+tt.why, func() bool { return x.refused(tt.why) > 0 })
			eventually(t, "it costs standing", func() bool {
				st := x.a.Standing(x.mallory.ID())
				return st.Score > 0 && st.Last == tt.fault
			})
			if x.heard.heard("raw") {
				t.Error("handed over")
			}
			x.served(t)
		})
	}
}

// A libp2p host that did not say hello gets nowhere with gossip.
func TestGossipOfAStranger(t *testing.T) {
	a, _, heard := startGossip(t, nil)
	s := stranger(t)
	if err := s.Connect(t.Context(), infoOf(t, a)); err != nil {
		t.Fatal(err)
	}
	id, err := NewIdentity()
	if err != nil {
		t.Fatal(err)
	}
	topic := testTopic
	stream, err := s.NewStream(t.Context(), a.ID(), a.gossip.meshProtocol())
	if err == nil {
		stream.Write(rpcBytes(t, &pb.RPC{Publish: []*pb.Message{{Topic: &topic, Data: sealFor(t, id, "stranger", nil)}}}))
		stream.SetReadDeadline(time.Now().Add(patience))
		_, err = stream.Read(make([]byte, 1))
	}
	if err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("stream of a stranger: %v", err)
	}
	if heard.heard("stranger") {
		t.Error("heard a stranger")
	}
}
