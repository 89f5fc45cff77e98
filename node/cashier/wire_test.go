package cashier

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"reflect"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/libp2p/go-libp2p/core/peer"

	"kvasird/p2p"
	"kvasird/settle"
)

// echo is a Service whose answers have in them what was asked and by whom. It waits where a
// test says so.
type echo struct {
	node settle.Node
	err  error
	wait chan struct{}
	got  *[]any
}

func (e *echo) take(ctx context.Context, in any) error {
	if e.got != nil {
		*e.got = append(*e.got, in)
	}
	if e.wait != nil {
		select {
		case <-e.wait:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return e.err
}

var echoRequest = settle.Request{Quote: quoteOf(1, keyOf("payer")), State: settle.Running, Signature: settle.Signature{1}, Message: hashOf("m"),
	Payer: keyOf("payer"), Paid: 1 << 62, Lease: 1, Started: 2, Tokens: 3, Reason: "none"}

var echoLedger = Ledger{Owner: keyOf("o"), Wallet: keyOf("w"), Balance: 1, Vesting: make([]settle.Pending, settle.MaxVesting),
	Payouts: []Payout{{ID: hashOf("p"), Amount: 7, Outcome: 1}}}

func (e *echo) Terms(ctx context.Context) (Terms, error) {
	return Terms{Node: e.node, Decimals: 6, Params: map[string]uint64{"fee": 1}, Prices: []ModelPrice{{Model: "m", Record: []byte{1}}}}, e.take(ctx, nil)
}
func (e *echo) Quote(ctx context.Context, a Ask) (Offer, error) {
	q := quoteOf(1, a.Owner)
	q.Entry = e.node
	return Offer{Quote: q, Secret: []byte("secret")}, e.take(ctx, a)
}
func (e *echo) Pay(ctx context.Context, p Proof) (settle.Request, error) {
	return echoRequest, e.take(ctx, p)
}
func (e *echo) PayX402(ctx context.Context, p Partial) (settle.Request, error) {
	return echoRequest, e.take(ctx, p)
}
func (e *echo) Debit(ctx context.Context, id settle.QuoteID) (settle.Request, error) {
	return echoRequest, e.take(ctx, id)
}
func (e *echo) Request(ctx context.Context, id settle.QuoteID) (settle.Request, error) {
	return echoRequest, e.take(ctx, id)
}
func (e *echo) Run(ctx context.Context, id settle.QuoteID) (Started, error) {
	return Started{echoRequest, hashOf("seed"), []byte{9}}, e.take(ctx, id)
}
func (e *echo) Credits(ctx context.Context, ids []settle.QuoteID) ([]WorkerCredit, error) {
	return []WorkerCredit{{true, 1 << 55}, {}}, e.take(ctx, ids)
}
func (e *echo) End(ctx context.Context, in Ended) (Settled, error) {
	return Settled{Used: 1, Refund: 2, Fee: 3, Paid: 4, Emitted: 5}, e.take(ctx, in)
}
func (e *echo) Link(ctx context.Context, l Link) (Linked, error) {
	return Linked{e.node, l.Wallet, l.Spend, l.Since}, e.take(ctx, l)
}
func (e *echo) Deposit(ctx context.Context, d Deposit) (Ledger, error) {
	return echoLedger, e.take(ctx, d)
}
func (e *echo) Unstake(ctx context.Context, m Move) (Ledger, error) {
	return echoLedger, e.take(ctx, m)
}
func (e *echo) Claim(ctx context.Context, m Move) (Payout, error) {
	return echoLedger.Payouts[0], e.take(ctx, m)
}
func (e *echo) Complain(ctx context.Context, c Complaint) (Complained, error) {
	return Complained{Asked: c.Amount, Due: 5, Over: true, Recovered: 4}, e.take(ctx, c)
}
func (e *echo) Ledger(ctx context.Context, owner settle.Key) (Ledger, error) {
	return echoLedger, e.take(ctx, owner)
}
func (e *echo) Propose(ctx context.Context, c Change) (Proposed, error) {
	return Proposed{[]byte{1}, map[string]string{"w": "text"}}, e.take(ctx, c)
}
func (e *echo) Activate(ctx context.Context, a Activation) (Activated, error) {
	return Activated{1, 2}, e.take(ctx, a)
}

func testPeer(t testing.TB) peer.ID {
	t.Helper()
	return must[p2p.Identity](t)(p2p.NewIdentity()).ID()
}

// doorTo is a door to s, and a Remote of a peer through it. Breaches are kept.
type doorTo struct {
	*Door
	id       peer.ID
	remote   *Remote
	mu       sync.Mutex // guards breaches and dials
	breaches []error
	dials    int
	serving  sync.WaitGroup
}

func newDoorTo(t testing.TB, s *echo, refuse int) *doorTo {
	d := &doorTo{id: testPeer(t)}
	d.Door = NewDoor(DoorConfig{Logger: slog.New(slog.DiscardHandler), As: func(n settle.Node) Service {
		as := *s
		as.node = n
		return &as
	}})
	d.remote = NewRemote(func(context.Context) (Conn, error) {
		d.mu.Lock()
		d.dials++
		n := d.dials
		d.mu.Unlock()
		if n <= refuse {
			return nil, errors.New("no route")
		}
		return d.open(), nil
	})
	t.Cleanup(d.serving.Wait)
	return d
}

func (d *doorTo) open() Conn {
	here, there := net.Pipe()
	d.serving.Go(func() {
		if err := d.Serve(d.id, there); err != nil {
			d.mu.Lock()
			defer d.mu.Unlock()
			d.breaches = append(d.breaches, err)
		}
	})
	return here
}

// Every call crosses the wire as it was made, in the name of the peer that made it.
func TestCallsCross(t *testing.T) {
	var got []any
	d := newDoorTo(t, &echo{got: &got}, 0)
	ctx, r, local := t.Context(), d.remote, &echo{}
	local.node = must[[32]byte](t)(p2p.KeyOf(d.id))
	a := Ask{"m", 1, 2, hashOf("body"), keyOf("owner")}
	id := settle.QuoteID{7}
	end := Ended{id, 12, "late", bytes.Repeat([]byte{1}, settle.MaxReport), [][]byte{{1}, nil, {2}}}
	move := Move{hashOf("id"), 1<<64 - 1}
	check := func(asked any, there, here any, err error) {
		t.Helper()
		if err != nil || !reflect.DeepEqual(there, here) {
			t.Errorf("%T: %+v, %v, want %+v", asked, there, err, here)
		}
		if asked != nil && (len(got) == 0 || !reflect.DeepEqual(got[len(got)-1], asked)) {
			t.Errorf("asked %+v, taken %+v", asked, got)
		}
	}
	both := func(asked any, call func(Service) (any, error)) {
		t.Helper()
		there, err := call(r)
		here, _ := call(local)
		check(asked, there, here, err)
	}
	both(nil, func(s Service) (any, error) { return s.Terms(ctx) })
	both(a, func(s Service) (any, error) { return s.Quote(ctx, a) })
	proof, part := Proof{id, settle.Signature{1}, keyOf("p")}, Partial{id, []byte{1, 2}}
	both(proof, func(s Service) (any, error) { return s.Pay(ctx, proof) })
	both(part, func(s Service) (any, error) { return s.PayX402(ctx, part) })
	both(id, func(s Service) (any, error) { return s.Debit(ctx, id) })
	both(id, func(s Service) (any, error) { return s.Request(ctx, id) })
	both(id, func(s Service) (any, error) { return s.Run(ctx, id) })
	both([]settle.QuoteID{id, {8}}, func(s Service) (any, error) { return s.Credits(ctx, []settle.QuoteID{id, {8}}) })
	both(end, func(s Service) (any, error) { return s.End(ctx, end) })
	link, deposit := Link{keyOf("w"), true, 5, "v0", settle.Signature{3}}, Deposit{settle.Signature{4}, keyOf("w"), 9, true}
	both(link, func(s Service) (any, error) { return s.Link(ctx, link) })
	both(deposit, func(s Service) (any, error) { return s.Deposit(ctx, deposit) })
	both(move, func(s Service) (any, error) { return s.Unstake(ctx, move) })
	both(move, func(s Service) (any, error) { return s.Claim(ctx, move) })
	complaint := Complaint{id, 8, "raw", settle.Signature{6}}
	both(complaint, func(s Service) (any, error) { return s.Complain(ctx, complaint) })
	both(settle.Key{1}, func(s Service) (any, error) { return s.Ledger(ctx, settle.Key{1}) })
	change := Change{map[string]uint64{"fee": 3, "floor": 4}, 9, 10}
	both(change, func(s Service) (any, error) { return s.Propose(ctx, change) })
	act := Activation{[]byte{1}, []Signature{{keyOf("w"), "v1", settle.Signature{5}}}, "123456"}
	both(act, func(s Service) (any, error) { return s.Activate(ctx, act) })
	if len(d.breaches) > 0 {
		t.Error(d.breaches)
	}
}

func TestCallLiteralBytes(t *testing.T) {
	raw := encodeCall(Move{settle.Hash{1}, 500})
	want := "a2" + "62" + hex.EncodeToString([]byte("id")) + "5820" + "01" + strings.Repeat("00", 31) +
		"66" + hex.EncodeToString([]byte("amount")) + "1901f4"
	if hex.EncodeToString(raw) != want {
		t.Errorf("got %x, want %s", raw, want)
	}
	if got := fmt.Sprintf("%x", encodeCall(noArgs{})); got != "a0" {
		t.Errorf("nothing is %s", got)
	}
}

// What a settlement refuses is told as it is; what breaks in it stays there.
func TestRefusalsCross(t *testing.T) {
	want := &Refusal{CodeNotYet, "signature", "not final", 3}
	d := newDoorTo(t, &echo{err: want}, 0)
	_, err := d.remote.Terms(t.Context())
	var got *Refusal
	if !errors.As(err, &got) || *got != *want || d.dials != 1 {
		t.Errorf("%v after %d calls, want %v", err, d.dials, want)
	}
	d = newDoorTo(t, &echo{err: errors.New("disk /var/secret is full")}, 0)
	if _, err := d.remote.Terms(t.Context()); !errors.Is(err, ErrFailed) || strings.Contains(err.Error(), "secret") || d.dials != 1 {
		t.Errorf("%v after %d calls, want ErrFailed alone", err, d.dials)
	}
}

func TestRemoteTriesAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDoorTo(t, &echo{}, 2)
		if _, err := d.remote.Terms(t.Context()); err != nil || d.dials != 3 {
			t.Errorf("%v after %d calls", err, d.dials)
		}
		d = newDoorTo(t, &echo{}, 3)
		if _, err := d.remote.Terms(t.Context()); !errors.Is(err, ErrAway) || d.dials != 3 {
			t.Errorf("%v after %d calls, want ErrAway after 3", err, d.dials)
		}
		lost := 0
		breaking := NewRemote(func(context.Context) (Conn, error) {
			lost++
			here, there := net.Pipe()
			go func() {
				p2p.NewFrameReader(there, maxEnd).Next()
				there.Close()
			}()
			return here, nil
		})
		if _, err := breaking.Claim(t.Context(), Move{}); !errors.Is(err, ErrAway) || lost != 3 {
			t.Errorf("claim: %v after %d calls", err, lost)
		}
		lost = 0
		if _, err := breaking.Activate(t.Context(), Activation{}); !errors.Is(err, ErrAway) || lost != 1 {
			t.Errorf("activate: %v after %d calls, a code counts once", err, lost)
		}
		lost = 0
		if _, err := breaking.Run(t.Context(), settle.QuoteID{1}); !errors.Is(err, ErrLost) || lost != 1 {
			t.Errorf("run: %v after %d calls, what runs is refused", err, lost)
		}
		d = newDoorTo(t, &echo{}, 2)
		if _, err := d.remote.Run(t.Context(), settle.QuoteID{1}); err != nil || d.dials != 3 {
			t.Errorf("run: %v after %d calls, of which two reached nobody", err, d.dials)
		}
		if _, err := breaking.Quote(t.Context(), Ask{Model: strings.Repeat("m", maxCall)}); err == nil || !strings.Contains(err.Error(), "at most") {
			t.Errorf("a large question: %v", err)
		}
	})
}

// A settlement that does not answer costs its caller the time of a call, no more.
func TestRemoteWaitsSoLong(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDoorTo(t, &echo{wait: make(chan struct{})}, 0)
		began := time.Now()
		_, err := d.remote.Terms(t.Context())
		var r *Refusal
		if took := time.Since(began); !errors.As(err, &r) || r.Code != CodeNotYet || took > callTime+time.Second {
			t.Errorf("%v after %v", err, took)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		began = time.Now()
		if _, err := d.remote.Terms(ctx); err == nil || time.Since(began) > 2*time.Second {
			t.Errorf("%v after %v, the context ended after 1 s", err, time.Since(began))
		}
	})
}

// frameOf writes a frame as a hostile peer may.
func frameOf(typ, flags uint8, id uint64, payload []byte) []byte {
	var b bytes.Buffer
	p2p.NewFrameWriter(&b, 1<<24).Write(p2p.Frame{Type: typ, Flags: flags, ID: id, Payload: payload})
	return b.Bytes()
}

func TestReadAnswerRefuses(t *testing.T) {
	for name, f := range map[string]p2p.Frame{
		"a call":    {Type: uint8(opClaim), Payload: encodeDone(Payout{})},
		"flags":     {Type: frameDone, Flags: 1, Payload: encodeDone(Payout{})},
		"an id":     {Type: frameDone, ID: 1, Payload: encodeDone(Payout{})},
		"no answer": {Type: frameDone},
		"another":   {Type: frameDone, Payload: encodeDone(Settled{})},
		"no reason": {Type: frameNo, Payload: encodeDone(Payout{})},
		"too large": {Type: frameDone, Payload: make([]byte, maxDone+1)},
	} {
		var bad *protocolError
		if err := readAnswer(f, &Payout{}); !errors.As(err, &bad) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func FuzzCall(f *testing.F) {
	f.Add(uint8(opTerms), encodeCall(noArgs{}))
	f.Add(uint8(opEnd), encodeCall(Ended{Receipt: []byte{1}, Statements: [][]byte{{2}}}))
	f.Add(uint8(opActivate), encodeCall(Activation{Signatures: []Signature{{}}, Code: "1"}))
	f.Add(uint8(opPropose), encodeCall(Change{Values: map[string]uint64{"fee": 1}}))
	f.Add(uint8(opCredits), encodeCall([]settle.QuoteID{{1}}))
	f.Add(uint8(opLedger), encodeCall(settle.Key{}))
	f.Add(uint8(opComplain), encodeCall(Complaint{ID: settle.QuoteID{1}, Amount: 2, Format: "v0"}))
	f.Add(uint8(frameNo), encodeDone(&Refusal{Text: "no"}))
	f.Fuzz(func(t *testing.T, typ uint8, payload []byte) {
		var got []any
		s := &echo{got: &got}
		frame := p2p.Frame{Type: typ, Payload: payload}
		if handle, err := readCall(frame); err == nil {
			if _, err := handle(t.Context(), s, payload); err == nil && got[0] != nil && !bytes.Equal(encodeCall(got[0]), payload) {
				t.Errorf("%x was taken for %+v", payload, got[0])
			}
		}
		for _, out := range []any{&Terms{}, &Started{}, &Ledger{}, &Proposed{}} {
			var r *Refusal
			if err := readAnswer(frame, out); errors.As(err, &r) && r.Code == "" {
				t.Errorf("a refusal without a code: %v", err)
			}
		}
	})
}

func BenchmarkCall(b *testing.B) {
	d := newDoorTo(b, &echo{}, 0)
	id := settle.QuoteID{}
	rand.Read(id[:])
	for b.Loop() {
		d.Door.callers = map[peer.ID]*caller{}
		if _, err := d.remote.Debit(b.Context(), id); err != nil {
			b.Fatal(err)
		}
	}
}
