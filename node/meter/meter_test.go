package meter

import (
	"slices"
	"testing"
	"time"

	"kvasird/p2p"
	"kvasird/settle"
)

// job is what a settlement knows of a paid request of so many tokens.
func job(m *Model, id settle.QuoteID, tokens uint64) settle.Job {
	return settle.Job{
		Network: testNetwork, Parts: m.parts, Seconds: 10,
		Request: settle.Request{
			State: settle.Running, Tokens: tokens,
			Quote: settle.Quote{ID: id, Entry: node("entry"), PromptTokens: tokens, AnswerTokens: tokens},
		},
		Rates: map[settle.Node]uint64{},
	}
}

// credit is what a settlement credits of a request that the entry reports.
func credit(t *testing.T, m *Model, id settle.QuoteID, tokens uint64, work []settle.Work, statements [][]byte) []settle.Work {
	t.Helper()
	b, err := settle.Report{
		Role: settle.Receipt, Network: testNetwork, Request: id, Signer: node("entry"), Seq: 1, Tokens: tokens, Work: work,
	}.Sign(keyOf("entry"))
	if err != nil {
		t.Fatal(err)
	}
	receipt, err := settle.ParseReport(b)
	if err != nil {
		t.Fatal(err)
	}
	var stated []settle.Report
	for _, s := range statements {
		r, err := settle.ParseReport(s)
		if err != nil {
			t.Fatal(err)
		}
		stated = append(stated, r)
	}
	j := job(m, id, tokens)
	for _, w := range work {
		j.Rates[w.Worker] = 1 << 40
	}
	got, err := j.Credit(receipt, stated)
	if err != nil {
		t.Fatal(err)
	}
	return got
}

// TestStatements: what honest workers did is credited whole, that of those who do not
// answer or answer something else is not.
func TestStatements(t *testing.T) {
	m := testModel()
	w := &swarm{asker: peerOf("entry"), serve: map[string]func(string, Conn){}}
	meter := newTestMeter(t, w)
	pool := meter.Pool(m)
	pool.Own(10, false)
	other, _ := settle.Report{Role: settle.Statement, Network: testNetwork, Request: settle.QuoteID{9}, Signer: node("other request"), Seq: 1,
		Work: []settle.Work{{Worker: node("other request"), Lines: lines(2, 99)}}}.Sign(keyOf("other request"))
	foreign, _ := settle.Report{Role: settle.Statement, Network: testNetwork, Request: testRequest, Signer: node("x"), Seq: 1,
		Work: []settle.Work{{Worker: node("x"), Lines: lines(2, 99)}}}.Sign(keyOf("x"))
	says := func(b []byte) func(string, Conn) {
		return func(_ string, c Conn) {
			p2p.NewFrameReader(c, maxAsk).Next()
			p2p.NewFrameWriter(c, maxStatement).Write(p2p.Frame{Type: frameStatement, Payload: b})
		}
	}
	signer := newTestSigner(t, "a", newMemory())
	signer.Counts(m).Pairs(peerOf("entry"), 0, 20)
	w.add("a", signer)
	w.serve[peerOf("other request")] = says(other)
	w.serve[peerOf("foreign")] = says(foreign)
	w.serve[peerOf("garbage")] = says([]byte("garbage"))
	w.serve[peerOf("hangs up")] = func(string, Conn) {}
	silent := make(chan struct{})
	defer close(silent)
	w.serve[peerOf("silent")] = func(string, Conn) { <-silent }
	for _, name := range []string{"a", "other request", "foreign", "garbage", "hangs up", "silent", "gone"} {
		pool.Pairs(peerOf(name), 0, 5)
	}
	began := time.Now()
	work, statements := meter.Report(t.Context(), "model", testRequest, 10)
	if took := time.Since(began); took > 3*time.Second {
		t.Errorf("it took %v", took)
	}
	if len(statements) != 2 {
		t.Errorf("%d statements, want that of the entry and that of a", len(statements))
	}
	got := credit(t, m, testRequest, 10, work, statements)
	if len(got) != 2 || !slices.Equal(workOf(got, "a"), lines(2, 5)) || !slices.Equal(workOf(got, "entry"), lines(0, 10, 1, 10, 3, 10, 5, 10, 7, 10)) {
		t.Errorf("credited %v", got)
	}
	if work, statements := meter.Report(t.Context(), "unknown", testRequest, 5); work != nil || statements != nil {
		t.Error("work of an unknown model")
	}
}

// TestLiesGainNothing: an entry that claims more for a worker than it did, a worker that
// states more than an entry accepted, and a worker that was never asked.
func TestLiesGainNothing(t *testing.T) {
	m := testModel()
	w := &swarm{asker: peerOf("entry"), serve: map[string]func(string, Conn){}}
	signer := newTestSigner(t, "a", newMemory())
	signer.Counts(m).Pairs(peerOf("entry"), 0, 8)
	w.add("a", signer)
	w.serve[peerOf("liar")] = func(_ string, c Conn) {
		p2p.NewFrameReader(c, maxAsk).Next()
		b, _ := settle.Report{Role: settle.Statement, Network: testNetwork, Request: testRequest, Signer: node("liar"), Seq: 1,
			Work: []settle.Work{{Worker: node("liar"), Lines: lines(2, 40, 6, 40)}}}.Sign(keyOf("liar"))
		p2p.NewFrameWriter(c, maxStatement).Write(p2p.Frame{Type: frameStatement, Payload: b})
	}
	meter := newTestMeter(t, w)
	meter.Pool(m).Pairs(peerOf("a"), 0, 32)
	meter.Pool(m).Pairs(peerOf("liar"), 0, 3)
	claimed, statements := meter.Report(t.Context(), "model", testRequest, 10)
	got := credit(t, m, testRequest, 10, claimed, statements)
	if !slices.Equal(workOf(got, "a"), lines(2, 8)) {
		t.Errorf("a is credited %v of the 8 pairs that it computed", workOf(got, "a"))
	}
	if !slices.Equal(workOf(got, "liar"), lines(2, 3)) {
		t.Errorf("the liar is credited %v of the 3 pairs that were accepted", workOf(got, "liar"))
	}
}
