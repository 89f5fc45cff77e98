package meter

import (
	"bytes"
	"io"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"

	"kvasird/ggml/gguf"
	"kvasird/p2p"
	"kvasird/settle"
)

// carrying is an entry without the model, a backbone that answers for it, and the workers a and
// b, of which each has half of the experts. The entry computes for the backbone too.
type carrying struct {
	t               *testing.T
	model           *Model
	entry, backbone *Meter
	signers         map[string]*Signer
	near, far       *swarm // that of the entry, that of the backbone
}

func newCarrying(t *testing.T) *carrying {
	c := &carrying{t: t, model: testModel(), signers: map[string]*Signer{},
		near: &swarm{asker: peerOf("entry"), serve: map[string]func(string, Conn){}},
		far:  &swarm{asker: peerOf("backbone"), serve: map[string]func(string, Conn){}}}
	for _, name := range []string{"entry", "backbone", "a", "b"} {
		c.signers[name] = newTestSigner(t, name, newMemory())
		c.far.add(name, c.signers[name])
	}
	c.entry = meterOf(t, c.signers["entry"], c.near)
	c.backbone = meterOf(t, c.signers["backbone"], c.far)
	c.near.serve[peerOf("backbone")] = func(peerID string, conn Conn) { c.backbone.Serve(peerID, conn) }
	c.entry.Pool(c.model)
	return c
}

// computes is rows that the backbone computes, for the entry or for itself, with the experts of
// some workers in equal parts.
func (c *carrying) computes(rows int, carried bool, workers ...string) {
	pool := c.backbone.Pool(c.model)
	pool.Own(rows, false)
	for _, layer := range []int{0, 2} {
		for _, w := range workers {
			pairs := 4 * rows / len(workers)
			pool.Pairs(peerOf(w), layer, pairs)
			c.signers[w].Counts(c.model).Pairs(peerOf("backbone"), layer, pairs)
		}
	}
	if carried {
		c.signers["backbone"].Counts(c.model).Window(peerOf("entry"), gguf.Range{End: 3}, rows)
		c.entry.Pool(c.model).Carried(peerOf("backbone"), rows)
	}
}

// ends is what a settlement credits of a request of the entry.
func (c *carrying) ends(id settle.QuoteID, tokens uint64) []settle.Work {
	c.t.Helper()
	work, statements := c.entry.Report(c.t.Context(), "model", id, tokens)
	chains := map[settle.Node]settle.Chain{}
	for _, b := range statements {
		r, err := settle.ParseReport(b)
		if err == nil {
			chains[r.Signer], err = chains[r.Signer].Take(r)
		}
		if err != nil {
			c.t.Error(err)
		}
	}
	return credit(c.t, c.model, id, tokens, work, statements)
}

func (c *carrying) credits(what string, got []settle.Work, want map[string][]settle.Line) {
	c.t.Helper()
	if len(got) != len(want) {
		c.t.Errorf("%s: %d nodes are credited, want %d", what, len(got), len(want))
	}
	for name, lines := range want {
		if l := workOf(got, name); !slices.Equal(l, lines) {
			c.t.Errorf("%s: %s is credited %v, want %v", what, name, l, lines)
		}
	}
}

func dense(rows uint64) []settle.Line { return lines(0, rows, 1, rows, 3, rows, 5, rows, 7, rows) }

// TestDivided: who computed for a request that was carried is paid for it, also the entry itself
// and whatever the backbone did for itself meanwhile.
func TestDivided(t *testing.T) {
	c := newCarrying(t)
	c.computes(10, true, "a", "b")
	c.credits("two workers", c.ends(settle.QuoteID{1}, 10),
		map[string][]settle.Line{"backbone": dense(10), "a": lines(2, 20, 6, 20), "b": lines(2, 20, 6, 20)})
	c.credits("nothing is left", c.ends(settle.QuoteID{2}, 10), nil)
	c.computes(30, true, "a")
	c.computes(10, false, "b")
	first := c.ends(settle.QuoteID{3}, 20)
	c.credits("beside the backbone's own", first, map[string][]settle.Line{"backbone": dense(20), "a": lines(2, 60, 6, 60), "b": lines(2, 20, 6, 20)})
	c.credits("the rest", c.ends(settle.QuoteID{4}, 20), map[string][]settle.Line{"backbone": dense(10), "a": lines(2, 30, 6, 30), "b": lines(2, 10, 6, 10)})
	left, _ := c.backbone.Report(t.Context(), "model", settle.QuoteID{5}, 100)
	c.credits("the backbone's own", left, map[string][]settle.Line{"backbone": dense(10), "a": lines(2, 30, 6, 30), "b": lines(2, 10, 6, 10)})

	c = newCarrying(t)
	c.computes(10, true, "a", "entry")
	c.entry.Pool(c.model).Own(2, true) // which the entry signs for the same request
	c.credits("the entry is a worker", c.ends(settle.QuoteID{1}, 12), map[string][]settle.Line{
		"backbone": dense(10), "a": lines(2, 20, 6, 20), "entry": lines(0, 2, 1, 2, 2, 28, 3, 2, 5, 2, 6, 28, 7, 2)})
}

// asksDivision puts a DIVIDE in the name of a peer.
func (c *carrying) asksDivision(who string, q question) ([]byte, error) {
	near, far := net.Pipe()
	defer near.Close()
	go func() {
		defer far.Close()
		c.backbone.Serve(peerOf(who), far)
	}()
	record, err := ask(near, frameDivide, q)
	return bytes.Clone(record), err
}

// TestDivideIsBounded: more than was carried is not divided, for nobody else, and not again.
func TestDivideIsBounded(t *testing.T) {
	c := newCarrying(t)
	c.computes(10, true, "a", "b")
	c.computes(90, false, "a", "b")
	q := about(testRequest, lines(1, 50, 2, 1000))
	if _, err := c.asksDivision("a", q); err == nil || !strings.Contains(err.Error(), "nothing was answered here") {
		t.Errorf("for another peer: %v", err)
	}
	var answers sync.Map
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			record, err := c.asksDivision("entry", q)
			if err != nil {
				t.Error(err)
			}
			answers.Store(string(record), true)
		})
	}
	all.Wait()
	again, err := c.asksDivision("entry", q)
	answers.Store(string(again), true)
	n := 0
	answers.Range(func(any, any) bool { n++; return true })
	if n != 1 || err != nil {
		t.Errorf("%d answers to one question, %v", n, err)
	}
	shares, err := decodeDivision(again)
	if err == nil {
		err = checkDivision(about(testRequest, lines(1, 10, 2, 40)), shares, room{10, 100})
	}
	if err != nil || len(shares) != 3 {
		t.Errorf("%d shares of 10 rows: %v", len(shares), err)
	}
	q.Request = settle.QuoteID{9}
	if _, err := c.asksDivision("entry", q); err == nil || !strings.Contains(err.Error(), "not divided already") {
		t.Errorf("once more: %v", err)
	}
	q.Model = "other"
	if _, err := c.asksDivision("entry", q); err == nil || !strings.Contains(err.Error(), "nothing of model other") {
		t.Errorf("another model: %v", err)
	}
}

// TestLostDivision: the answer that is lost on its way comes again, and is not counted twice.
func TestLostDivision(t *testing.T) {
	c := newCarrying(t)
	c.computes(10, true, "a", "b")
	tries := 0
	c.near.serve[peerOf("backbone")] = func(peerID string, conn Conn) {
		if tries++; tries == 1 {
			c.backbone.Serve(peerID, lossy{conn})
			return
		}
		c.backbone.Serve(peerID, conn)
	}
	c.credits("the second time", c.ends(settle.QuoteID{1}, 10),
		map[string][]settle.Line{"backbone": dense(10), "a": lines(2, 20, 6, 20), "b": lines(2, 20, 6, 20)})
	if tries != divideTries {
		t.Errorf("%d tries", tries)
	}
}

// lossy loses what is written.
type lossy struct{ Conn }

func (l lossy) Write(b []byte) (int, error) { return len(b), nil }

// TestLyingDivision: a backbone that says what cannot be has no more than it signs for itself.
func TestLyingDivision(t *testing.T) {
	state := func(name string, id settle.QuoteID, l []settle.Line) []byte {
		b, err := settle.Report{Role: settle.Statement, Network: testNetwork, Request: id, Signer: node(name), Seq: 1,
			Work: []settle.Work{{Worker: node(name), Lines: l}}}.Sign(keyOf(name))
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	good := divisionShare{[]uint64{2, 40}, state("a", testRequest, lines(2, 40))}
	other := divisionShare{[]uint64{2, 1}, state("b", testRequest, lines(2, 1))}
	says := func(shares ...divisionShare) []byte { return encodeDivision(division{version, shares}) }
	many := make([]divisionShare, settle.MaxWorkers+1)
	for i := range many {
		many[i] = good
	}
	for name, answer := range map[string][]byte{
		"garbage":                     []byte("x"),
		"version":                     encodeDivision(division{1, []divisionShare{good}}),
		"no shares":                   says(),
		"too many shares":             says(many...),
		"more than the tokens need":   says(good, other),
		"more of one worker":          says(divisionShare{[]uint64{2, 41}, good.Statement}),
		"a part that nobody asked":    says(divisionShare{[]uint64{4, 1}, good.Statement}),
		"a worker twice":              says(divisionShare{[]uint64{2, 1}, good.Statement}, divisionShare{[]uint64{6, 1}, good.Statement}),
		"half a pair":                 says(divisionShare{[]uint64{2}, good.Statement}),
		"nothing of a worker":         says(divisionShare{nil, good.Statement}),
		"parts out of order":          says(divisionShare{[]uint64{6, 1, 2, 1}, good.Statement}),
		"a part twice":                says(divisionShare{[]uint64{2, 1, 2, 1}, good.Statement}),
		"a part above all":            says(divisionShare{[]uint64{settle.MaxParts, 1}, good.Statement}),
		"no units":                    says(divisionShare{[]uint64{2, 0}, good.Statement}),
		"no statement":                says(divisionShare{[]uint64{2, 1}, nil}),
		"of another request":          says(divisionShare{[]uint64{2, 1}, state("a", settle.QuoteID{7}, lines(2, 1))}),
		"sums that do not fit a word": says(divisionShare{[]uint64{2, 1 << 63}, good.Statement}, divisionShare{[]uint64{2, 1 << 63}, other.Statement}),
	} {
		c := newCarrying(t)
		c.computes(10, true, "a", "b")
		c.near.serve[peerOf("backbone")] = func(peerID string, conn Conn) {
			kind, payload := readFrame(conn)
			if kind != frameDivide {
				c.signers["backbone"].serve(peerID, replay{conn, bytes.NewReader(payload)}, nil)
				return
			}
			p2p.NewFrameWriter(conn, maxDivision).Write(p2p.Frame{Type: frameDivision, Payload: answer})
		}
		got := c.ends(testRequest, 10)
		if len(got) != 1 || got[0].Worker != node("backbone") {
			t.Errorf("%s: credited %v", name, got)
		}
	}
}

// readFrame reads a frame, and returns its type and all of its bytes.
func readFrame(c Conn) (kind uint8, all []byte) {
	var got bytes.Buffer
	f, err := p2p.NewFrameReader(io.TeeReader(c, &got), maxAsk).Next()
	if err != nil {
		return 0, nil
	}
	return f.Type, got.Bytes()
}

// replay reads something again.
type replay struct {
	Conn
	again io.Reader
}

func (r replay) Read(b []byte) (int, error) { return r.again.Read(b) }

// TestRoom: what a division may have beside others fits a receipt.
func TestRoom(t *testing.T) {
	direct := []settle.Work{{Worker: node("a"), Lines: lines(1, 1, 2, 1)}}
	if r := roomBeside(direct, 3); r != (room{(settle.MaxWorkers - 1) / 3, (mostLines - 2) / 3}) {
		t.Errorf("%+v", r)
	}
	shares := []share{{settle.Work{Lines: lines(2, 1)}, nil}, {settle.Work{Lines: lines(2, 1)}, nil}}
	c := newCarrying(t)
	for i, name := range []string{"a", "b"} {
		shares[i].statement, _ = c.signers[name].own(t.Context(), peerOf("x"), testRequest, lines(2, 1))
	}
	for _, r := range []room{{1, 10}, {2, 1}} {
		if err := checkDivision(about(testRequest, lines(2, 9)), shares, r); err == nil || !strings.Contains(err.Error(), "more than the receipt") {
			t.Errorf("%+v: %v", r, err)
		}
	}
	if err := checkDivision(about(testRequest, lines(2, 9)), shares, room{2, 2}); err != nil {
		t.Error(err)
	}
}

// TestToldIsBounded: divisions are kept up to so many bytes, those that failed are not.
func TestToldIsBounded(t *testing.T) {
	d := divisions{by: map[asked]*told{}}
	for i := range 100 {
		key := asked{request: settle.QuoteID{byte(i)}}
		d.by[key] = &told{answer: make([]byte, maxDivision)}
		d.keep(key, d.by[key])
	}
	if len(d.by) != 16 || len(d.order) != 16 || d.bytes != mostTold || d.by[asked{request: settle.QuoteID{99}}] == nil {
		t.Errorf("%d are kept, %d bytes", len(d.by), d.bytes)
	}
	key := asked{peerID: "failed"}
	d.by[key] = &told{err: io.EOF}
	if d.keep(key, d.by[key]); len(d.by) != 16 {
		t.Error("what failed is kept")
	}
}

// FuzzDivision: whatever a node says that carried a request, its shares are no more than what it
// was asked about.
func FuzzDivision(f *testing.F) {
	f.Add(encodeDivision(division{version, []divisionShare{{[]uint64{2, 40}, []byte("x")}}}))
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, payload []byte) {
		shares, err := decodeDivision(payload)
		if err != nil {
			return
		}
		d := division{Version: version}
		for _, s := range shares {
			d.Shares = append(d.Shares, shareOf(s))
		}
		if !bytes.Equal(encodeDivision(d), payload) {
			t.Error("another encoding of a division was taken")
		}
		if checkDivision(about(testRequest, lines(2, 40)), shares, room{10, 10}) == nil {
			for _, s := range shares {
				for _, l := range s.work.Lines {
					if l.Part != 2 || l.Units > 40 {
						t.Errorf("%v of 40 units of part 2", l)
					}
				}
			}
		}
	})
}
