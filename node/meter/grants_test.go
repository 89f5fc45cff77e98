package meter

import (
	"context"
	"errors"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"kvasird/ggml/gguf"
	"kvasird/settle"
)

// till is who settles, as grants ask it, and the clock.
type till struct {
	t       *testing.T
	now     time.Time
	settled map[settle.QuoteID]uint64 // what each credited to this node
	asked   int
}

func newTill(t *testing.T) (*till, *Grants) {
	t.Helper()
	d := &till{t: t, now: time.Unix(1_800_000_000, 0), settled: map[settle.QuoteID]uint64{}}
	g, err := NewGrants(GrantsConfig{Network: testNetwork, Self: node("worker"), Settlement: node("settlement"), Params: settle.DefaultParams(),
		Credits: d.credits, Now: func() time.Time { return d.now }})
	if err != nil {
		t.Fatal(err)
	}
	return d, g
}

func (d *till) credits(_ context.Context, ids []settle.QuoteID) (out []Credit, err error) {
	d.asked++
	for _, id := range ids {
		tokens, ok := d.settled[id]
		out = append(out, Credit{ok, tokens})
	}
	return out, nil
}

func (d *till) pass(entry string, request int, tokens uint64) (settle.Pass, []byte) {
	d.t.Helper()
	p := settle.Pass{Network: testNetwork, Request: settle.QuoteID{1, byte(request), byte(request >> 8)}, Signer: node("settlement"),
		Entry: node(entry), Model: "model", Tokens: tokens, Expires: uint64(d.now.Unix()) + 600 + tokens}
	return p, d.sign(p)
}

func (d *till) sign(p settle.Pass) []byte {
	d.t.Helper()
	b, err := p.Sign(keyOf("settlement"))
	if err != nil {
		d.t.Fatal(err)
	}
	return b
}

// shows has an entry show a pass to the worker.
func (d *till) shows(g *Grants, entry string, request int, tokens uint64) settle.Pass {
	d.t.Helper()
	p, record := d.pass(entry, request, tokens)
	if _, err := g.Take(peerOf(entry), record, p.Lend(keyOf(entry), node("worker"))); err != nil {
		d.t.Fatal(err)
	}
	return p
}

// takes is how many rows are computed for a peer until it is refused.
func takes(t *testing.T, spend func(string, int) error, peer string) (rows int) {
	t.Helper()
	for ; rows < 1<<21; rows++ {
		if err := spend(peerOf(peer), 1); err != nil {
			if !errors.Is(err, ErrUnpaid) {
				t.Fatal(err)
			}
			return rows
		}
	}
	t.Fatal("it is never refused")
	return 0
}

var wholeModel = gguf.Range{End: 3}

// TestFreeWindow: without a pass there is a small window, for all strangers together too, and it
// comes again. What is carried has none.
func TestFreeWindow(t *testing.T) {
	d, g := newTill(t)
	pairs := g.Pairs(testModel())
	rows := g.Window(testModel(), wholeModel, true, true)
	if err := pairs(peerOf("a"), 0, freePairs+1); !errors.Is(err, ErrUnpaid) {
		t.Errorf("more than the window: %v", err)
	}
	for range 2 {
		if err := pairs(peerOf("a"), 0, freePairs); err != nil {
			t.Error(err)
		}
		if err := pairs(peerOf("a"), 0, 1); !errors.Is(err, ErrUnpaid) || !strings.Contains(err.Error(), "nothing is left") {
			t.Errorf("after the window: %v", err)
		}
		if err := pairs(peerOf("a"), 2, freePairs); err != nil { // each part has its own
			t.Error(err)
		}
		if n := takes(t, rows, "b"); n != 16 {
			t.Errorf("%d rows without a pass", n)
		}
		d.now = d.now.Add(freeEvery)
	}
	if n := takes(t, g.Window(testModel(), wholeModel, false, false), "c"); n != 0 {
		t.Errorf("%d rows were carried without a pass", n)
	}
	sum := 0
	for i := range strangers/16 + 10 {
		sum += takes(t, rows, "stranger "+string(rune(i)))
	}
	if sum != strangers {
		t.Errorf("%d rows for all strangers together, want %d", sum, strangers)
	}
}

// TestPassAllows: a pass allows half more than its tokens, of each part, once for all who show it.
func TestPassAllows(t *testing.T) {
	d, g := newTill(t)
	rows := g.Window(testModel(), wholeModel, true, false)
	d.shows(g, "entry", 1, 100)
	d.shows(g, "entry", 1, 100) // again
	if n := takes(t, rows, "entry"); n != 150 {
		t.Errorf("%d rows by a pass of 100 tokens", n)
	}
	p, record := d.pass("entry", 2, 100)
	if _, err := g.Take(peerOf("entry"), record, p.Lend(keyOf("entry"), node("worker"))); err != nil {
		t.Fatal(err)
	}
	for range 40 {
		if err := rows(peerOf("entry"), 1); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := g.Take(peerOf("carrier"), record, p.Lend(keyOf("entry"), node("carrier"))); err != nil {
		t.Fatal(err)
	}
	if n := takes(t, rows, "carrier"); n != 110 {
		t.Errorf("%d rows by what is left of a pass that is lent", n)
	}
	d.shows(g, "entry", 3, 10)
	d.now = d.now.Add(time.Hour)
	if n := takes(t, rows, "entry"); n != 0 {
		t.Errorf("%d rows by a pass that has expired", n)
	}
}

// TestLargePass: as much can be computed by a pass as one can be for, and it is not too much for what
// is kept of all.
func TestLargePass(t *testing.T) {
	d, g := newTill(t)
	rows := g.Window(testModel(), wholeModel, true, false)
	d.shows(g, "entry", 1, 250_000)
	if err := rows(peerOf("entry"), 375_000); err != nil {
		t.Error(err)
	}
	if err := rows(peerOf("entry"), 1); !errors.Is(err, errNoPass) {
		t.Errorf("more than half above its tokens: %v", err)
	}
	refused := 0
	for request := range 100 {
		p, record := d.pass("large", 2+request, 2*settle.MaxTokens)
		_, err := g.Take(peerOf("large"), record, p.Lend(keyOf("large"), node("worker")))
		if err != nil && !strings.Contains(err.Error(), "allow too much") {
			t.Fatal(err)
		}
		if err != nil {
			refused++
		}
	}
	if st := g.standings[shower{node("large"), node("large")}]; refused == 0 || refused > 20 || st.open <= 0 || len(g.passes) != 101-refused {
		t.Errorf("%d refused, %d open, %d passes", refused, st.open, len(g.passes))
	}
}

func TestTakeRefuses(t *testing.T) {
	d, g := newTill(t)
	g.Pairs(testModel())
	p, good := d.pass("entry", 1, 100)
	lent := p.Lend(keyOf("entry"), node("worker"))
	other := func(change func(*settle.Pass)) []byte {
		p := p
		change(&p)
		return d.sign(p)
	}
	stranger := p
	stranger.Signer = node("entry")
	forged, err := stranger.Sign(keyOf("entry"))
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name, by string
		record   []byte
		lent     settle.Signature
		want     string
	}{
		{"no pass", "entry", good[1:], lent, "not well formed"},
		{"not by who settles", "entry", forged, lent, "not by who settles"},
		{"another network", "entry", other(func(p *settle.Pass) { p.Network = settle.Hash{9} }), lent, "another network"},
		{"expired", "entry", other(func(p *settle.Pass) { p.Expires = 5 }), lent, "has expired"},
		{"another model", "entry", other(func(p *settle.Pass) { p.Model = "x" }), lent, "nothing of model x"},
		{"not lent to this node", "entry", good, p.Lend(keyOf("entry"), node("a")), "not lent to"},
		{"not lent to who shows it", "a", good, lent, "not lent to"},
		{"lent by another", "a", good, p.Lend(keyOf("a"), node("a")), "not lent to"},
	} {
		if _, err := g.Take(peerOf(tt.by), tt.record, tt.lent); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v, want %q", tt.name, err, tt.want)
		}
	}
	for i := range mostPresenters + 1 {
		by := string(rune('a' + i))
		_, err := g.Take(peerOf(by), good, p.Lend(keyOf("entry"), node(by)))
		if (err != nil) != (i == mostPresenters) {
			t.Errorf("presenter %d: %v", i, err)
		}
	}
	twice := p
	twice.Entry = node("a")
	if _, err := g.Take(peerOf("a"), d.sign(twice), twice.Lend(keyOf("a"), node("worker"))); err == nil || !strings.Contains(err.Error(), "another pass") {
		t.Errorf("another pass of the request: %v", err)
	}
}

// TestLiarIsCutOff: of who shows passes that credit nothing, so many are believed, then none for a
// while that grows. One that credits again is believed.
func TestLiarIsCutOff(t *testing.T) {
	d, g := newTill(t)
	rows := g.Window(testModel(), wholeModel, true, true)
	request := 0
	lies := func() (passes int) {
		for ; passes < 100; passes++ {
			request++
			p, record := d.pass("liar", request, 1000)
			if _, err := g.Take(peerOf("liar"), record, p.Lend(keyOf("liar"), node("worker"))); err != nil {
				if !errors.Is(err, ErrUnpaid) || !strings.Contains(err.Error(), "not believed") {
					t.Fatal(err)
				}
				break
			}
			if err := rows(peerOf("liar"), 1000); err != nil {
				t.Fatal(err)
			}
			d.settled[p.Request] = 0
			d.now = d.now.Add(askAfter)
			if err := g.Ask(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		return passes
	}
	for _, wait := range []time.Duration{doubtTime, 2 * doubtTime, 4 * doubtTime} {
		if n := lies(); n != judgedPasses {
			t.Errorf("%d passes of a liar were believed", n)
		}
		if err := rows(peerOf("liar"), 1); !errors.Is(err, errDoubted) {
			t.Errorf("it has its window: %v", err)
		}
		d.now = d.now.Add(wait - time.Second)
		if n := lies(); n != 0 {
			t.Errorf("it is believed after less than %v", wait)
		}
		d.now = d.now.Add(2 * time.Second)
	}
	if n := takes(t, rows, "honest"); n != 16 {
		t.Errorf("another one has %d rows free", n)
	}
}

// TestOneFailureIsForgiven: an entry whose requests are credited is believed after one with a long
// prompt failed, though it takes many to make up for that.
func TestOneFailureIsForgiven(t *testing.T) {
	d, g := newTill(t)
	rows := g.Window(testModel(), wholeModel, true, false)
	for request := range 80 {
		n := 500
		if request == 30 {
			n = 30_000
		}
		p := d.shows(g, "entry", request, uint64(n))
		if err := rows(peerOf("entry"), n); err != nil {
			t.Fatalf("request %d: %v", request, err)
		}
		d.settled[p.Request] = uint64(n) * uint64(settle.Whole)
		if request == 30 {
			d.settled[p.Request] = 0
		}
		if err := g.AskNow(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
}

// TestLiarBlamesNobodyElse: an entry that lends a carrier what is never credited is refused there, and
// the carrier's own passes and those that others lend it are taken and used.
func TestLiarBlamesNobodyElse(t *testing.T) {
	d, g := newTill(t)
	rows := g.Window(testModel(), wholeModel, true, false)
	lends := func(entry string, request int) (settle.Pass, error) {
		p, record := d.pass(entry, request, 1000)
		to := "carrier"
		if entry == to {
			to = "worker"
		}
		_, err := g.Take(peerOf("carrier"), record, p.Lend(keyOf(entry), node(to)))
		return p, err
	}
	for request := range judgedPasses {
		p, err := lends("liar", request)
		if err != nil {
			t.Fatal(err)
		}
		if err := rows(peerOf("carrier"), 1500); err != nil {
			t.Fatal(err)
		}
		d.settled[p.Request] = 0
		if err := g.AskNow(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := lends("liar", 100); !errors.Is(err, errDoubted) {
		t.Errorf("the liar is believed: %v", err)
	}
	for i, entry := range []string{"carrier", "honest"} {
		p, err := lends(entry, 200+i)
		if err != nil {
			t.Fatalf("%s: %v", entry, err)
		}
		if err := rows(peerOf("carrier"), 1000); err != nil {
			t.Errorf("%s: %v", entry, err)
		}
		d.settled[p.Request] = 1000 * uint64(settle.Whole)
	}
	if err := g.AskNow(t.Context()); err != nil {
		t.Fatal(err)
	}
	if st := g.standings[shower{node("carrier"), node("carrier")}]; st.requests() != 2 {
		t.Errorf("the carrier is known by %d requests, want its own and the one lent", st.requests())
	}
}

// TestStandingsAreKept: one pass that is lent to many makes few standings, and what says something of
// a node stays when many come of which nothing is known.
func TestStandingsAreKept(t *testing.T) {
	d, g := newTill(t)
	g.Pairs(testModel())
	p := d.shows(g, "honest", 1, 100)
	d.settled[p.Request] = 100 * uint64(settle.Whole)
	if err := g.AskNow(t.Context()); err != nil {
		t.Fatal(err)
	}
	p, record := d.pass("liar", 2, 100)
	for i := range 4 * mostPresenters {
		d.now = d.now.Add(time.Second)
		by := "key " + string(rune('a'+i))
		g.Take(peerOf(by), record, p.Lend(keyOf("liar"), node(by)))
	}
	if n := len(g.standings); n != 1+mostPresenters {
		t.Errorf("%d standings by one pass", n-1)
	}
	for i := range mostStandings {
		n := settle.Node{1, byte(i), byte(i >> 8)}
		g.standingLocked(shower{n, n}, d.now.Add(time.Second))
	}
	if st := g.standings[shower{node("honest"), node("honest")}]; st.requests() != 1 || len(g.standings) != mostStandings {
		t.Errorf("%d standings, that of a credited one is %+v", len(g.standings), st)
	}
	for i := range 2 * mostLenders {
		g.standingLocked(shower{node("carrier"), settle.Node{2, byte(i)}}, d.now.Add(time.Minute))
	}
	n := 0
	for who := range g.standings {
		if who.node == node("carrier") {
			n++
		}
	}
	if n != mostLenders {
		t.Errorf("%d standings of one carrier", n)
	}
}

// TestUncreditedIsBounded: so much is computed for passes before it is known what they credit.
func TestUncreditedIsBounded(t *testing.T) {
	d, g := newTill(t)
	rows := g.Window(testModel(), wholeModel, true, false)
	n := 0
	for i := range 100 {
		d.shows(g, "entry", i, 50_000)
		for range 60 {
			if rows(peerOf("entry"), 1000) == nil {
				n += 1000
			}
		}
	}
	if n < mostUncredited || n > mostUncredited+1000 {
		t.Errorf("%d rows, want about %d", n, mostUncredited)
	}
}

// TestHonestIsNeverRefused: whatever answers run together, for one entry or several by one node
// that carries them, with quotes far above what is used, some failed, and extra rows: nothing is
// refused, and nobody doubted.
func TestHonestIsNeverRefused(t *testing.T) {
	type running struct {
		p          settle.Pass
		need, done int // tokens
	}
	for seed := range uint64(6) {
		rng := rand.New(rand.NewPCG(seed, 3))
		d, g := newTill(t)
		rows := g.Window(testModel(), wholeModel, true, false)
		entries := []string{"entry"}
		if seed%2 == 1 {
			entries = []string{"e1", "e2", "e3"}
		}
		const by = "by"
		var live []*running
		for request := range 800 {
			entry := entries[rng.IntN(len(entries))]
			need := 1 + rng.IntN(40)
			if rng.IntN(10) == 0 {
				need = 2000 + rng.IntN(6000)
			}
			p, record := d.pass(entry, request, uint64(need+rng.IntN(3000)))
			if _, err := g.Take(peerOf(by), record, p.Lend(keyOf(entry), node(by))); err != nil {
				t.Fatalf("seed %d, request %d: %v", seed, request, err)
			}
			live = append(live, &running{p: p, need: need})
			for len(live) > rng.IntN(30) { // each step of some of them
				i := rng.IntN(len(live))
				r := live[i]
				n := min(r.need-r.done, 1+rng.IntN(500))
				r.done += n
				n += min(n, rng.IntN(1+n/2)) // hedged, retried
				if err := rows(peerOf(by), n); err != nil {
					t.Fatalf("seed %d, request %d: %v", seed, request, err)
				}
				if r.done == r.need {
					credit := uint64(r.need) * uint64(settle.Whole)
					if rng.IntN(20) == 0 {
						credit = 0 // it failed
					}
					d.settled[r.p.Request] = credit
					live = append(live[:i], live[i+1:]...)
				}
			}
			d.now = d.now.Add(time.Duration(rng.IntN(3000)) * time.Millisecond)
			if request%5 == 0 {
				if err := g.Ask(t.Context()); err != nil {
					t.Fatal(err)
				}
			}
		}
		for _, entry := range entries {
			if st := g.standings[shower{node(by), node(entry)}]; st.strikes > 0 || st.settled == 0 || d.asked == 0 {
				t.Errorf("seed %d: %s: %+v", seed, entry, st)
			}
		}
	}
}

// TestGrantsAreBounded: passes, peers and standings that are remembered have a limit each.
func TestGrantsAreBounded(t *testing.T) {
	d, g := newTill(t)
	g.Pairs(testModel())
	for i := range mostPasses + 20 {
		p, record := d.pass("entry", i, 10)
		if _, err := g.Take(peerOf("entry"), record, p.Lend(keyOf("entry"), node("worker"))); err != nil {
			t.Fatal(err)
		}
	}
	l := g.models["model"]
	if a := l.peers[peerOf("entry")]; len(g.passes) != mostPasses || len(a.grants) != mostPasses {
		t.Errorf("%d passes, %d of the entry", len(g.passes), len(a.grants))
	}
	pairs := g.Pairs(testModel())
	for i := range l.most + 20 {
		pairs(peerOf("peer "+string(rune(i))), 0, 1)
	}
	if len(l.peers) != l.most || l.peers[peerOf("entry")] == nil {
		t.Errorf("%d peers, and the one with passes is %v", len(l.peers), l.peers[peerOf("entry")])
	}
	d.now = d.now.Add(24 * time.Hour)
	if g.due(askAfter); len(g.passes) != 0 {
		t.Errorf("%d passes are kept after their end", len(g.passes))
	}
}

func TestGrantsDoNotAllocate(t *testing.T) {
	d, g := newTill(t)
	pairs := g.Pairs(testModel())
	d.shows(g, "entry", 1, 100_000)
	peer := peerOf("entry")
	if n := testing.AllocsPerRun(1000, func() {
		if err := pairs(peer, 0, 4); err != nil {
			t.Fatal(err)
		}
	}); n > 0 {
		t.Errorf("%v allocations per call", n)
	}
}

func BenchmarkGrants(b *testing.B) {
	d, g := newTill(&testing.T{})
	pairs := g.Pairs(testModel())
	peer := peerOf("entry")
	for i := range 500 {
		d.shows(g, "entry", i, 20)
	}
	for b.Loop() {
		pairs(peer, 0, 0)
	}
}
