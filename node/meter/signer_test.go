package meter

import (
	"bytes"
	"context"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"kvasird/ggml/gguf"
	"kvasird/p2p"
	"kvasird/settle"
)

// asks puts a question to a signer in the name of a peer.
func asks(t *testing.T, s *Signer, who string, q question) (settle.Report, []byte, error) {
	t.Helper()
	near, far := net.Pipe()
	defer near.Close()
	go func() {
		defer far.Close()
		s.serve(peerOf(who), far, nil)
	}()
	record, err := ask(near, frameAsk, q)
	if err != nil {
		return settle.Report{}, nil, err
	}
	record = bytes.Clone(record)
	r, err := settle.ParseReport(record)
	if err != nil {
		t.Fatal(err)
	}
	return r, record, nil
}

func about(request settle.QuoteID, l []settle.Line) question {
	return question{version, testNetwork, request, "model", l}
}

func TestSignerSignsWhatItComputed(t *testing.T) {
	s := newTestSigner(t, "w", newMemory())
	c := s.Counts(testModel())
	c.Pairs(peerOf("entry"), 0, 10)
	c.Window(peerOf("entry"), gguf.Range{Begin: 1, End: 3}, 6)
	c.Pairs(peerOf("other"), 0, 100)
	tests := []struct {
		name    string
		who     string
		request settle.QuoteID
		ask     []settle.Line
		want    []settle.Line // nil: refused
		seq     uint64
	}{
		{"less than there is", "entry", settle.QuoteID{1}, lines(2, 4, 3, 5), lines(2, 4, 3, 5), 1},
		{"again", "entry", settle.QuoteID{1}, lines(2, 4, 3, 5), lines(2, 4, 3, 5), 1},
		{"more than there is", "entry", settle.QuoteID{2}, lines(1, 9, 2, 1000, 7, 1000), lines(2, 6, 7, 6), 1},
		{"nothing is left", "entry", settle.QuoteID{3}, lines(2, 4), nil, 0},
		{"what others had computed", "stranger", settle.QuoteID{4}, lines(2, 4), nil, 0},
		{"another asker, same request: it covers the first", "other", settle.QuoteID{1}, lines(2, 7), lines(2, 11, 3, 5), 2},
		{"the first one again, more", "entry", settle.QuoteID{1}, lines(2, 4, 3, 6), lines(2, 11, 3, 6), 3},
	}
	chains := map[settle.QuoteID]settle.Chain{}
	for _, tt := range tests {
		r, _, err := asks(t, s, tt.who, about(tt.request, tt.ask))
		if tt.want == nil {
			if err == nil || !strings.Contains(err.Error(), "nothing was computed here") {
				t.Errorf("%s: %v, %v", tt.name, r, err)
			}
			continue
		}
		if err != nil || !slices.Equal(r.Work[0].Lines, tt.want) || r.Seq != tt.seq || r.Signer != node("w") {
			t.Errorf("%s: %v, %v; want %v, sequence %d", tt.name, r, err, tt.want, tt.seq)
		}
		if chains[tt.request], err = chains[tt.request].Take(r); err != nil {
			t.Errorf("%s: %v", tt.name, err)
		}
	}
}

// TestSignerStartsAgain: what was signed before is covered, and not signed again.
func TestSignerStartsAgain(t *testing.T) {
	keep := newMemory()
	s := newTestSigner(t, "w", keep)
	s.Counts(testModel()).Pairs(peerOf("entry"), 0, 10)
	r, first, err := asks(t, s, "entry", about(testRequest, lines(2, 8)))
	if err != nil {
		t.Fatal(err)
	}
	var chain settle.Chain
	if chain, err = chain.Take(r); err != nil {
		t.Fatal(err)
	}
	s = newTestSigner(t, "w", keep)
	c := s.Counts(testModel())
	if _, again, err := asks(t, s, "entry", about(testRequest, lines(2, 8))); err != nil || !bytes.Equal(again, first) {
		t.Errorf("it does not say the same again: %v", err)
	}
	c.Pairs(peerOf("entry"), 0, 100)
	r, _, err = asks(t, s, "entry", about(testRequest, lines(2, 9)))
	if err != nil || !slices.Equal(r.Work[0].Lines, lines(2, 9)) || r.Seq != 2 {
		t.Errorf("%v, %v", r, err)
	}
	if _, err = chain.Take(r); err != nil {
		t.Error(err)
	}
}

// TestSignerCannotKeep: what is not kept is not signed, and stays to be signed.
func TestSignerCannotKeep(t *testing.T) {
	keep := newMemory()
	s := newTestSigner(t, "w", keep)
	s.Counts(testModel()).Pairs(peerOf("entry"), 0, 10)
	keep.full = true
	if _, _, err := asks(t, s, "entry", about(testRequest, lines(2, 8))); err == nil || !strings.Contains(err.Error(), "no room") {
		t.Error(err)
	}
	keep.full = false
	if r, _, err := asks(t, s, "entry", about(testRequest, lines(2, 20))); err != nil || r.Work[0].Lines[0].Units != 10 || r.Seq != 1 {
		t.Errorf("%v, %v", r, err)
	}
	keep.values[settle.QuoteID{9}.String()] = []byte("damaged")
	if _, _, err := asks(t, s, "entry", about(settle.QuoteID{9}, lines(2, 8))); err == nil || !strings.Contains(err.Error(), "cannot be read") {
		t.Error(err)
	}
}

func TestSignerIsBounded(t *testing.T) {
	s := newTestSigner(t, "w", newMemory())
	c := s.Counts(testModel())
	for range 10 {
		c.Pairs(peerOf("entry"), 0, 3*mostTokens)
	}
	for i := range mostRequests + 5 {
		if _, _, err := asks(t, s, "entry", about(settle.QuoteID{byte(i), byte(i >> 8), 1}, lines(2, 1))); err != nil {
			t.Fatal(err)
		}
	}
	if len(s.signed) != mostRequests || len(s.order) != mostRequests {
		t.Errorf("%d requests are kept", len(s.signed))
	}
	r, _, err := asks(t, s, "entry", about(settle.QuoteID{7, 7, 7}, lines(2, 1<<40)))
	if want := uint64(4*mostTokens - mostRequests - 5); err != nil || r.Work[0].Lines[0].Units != want {
		t.Errorf("%v, %v: want what is kept of a part, %d", r, err, want)
	}
	for i := range mostAskers + 1 {
		who := string(rune('a' + i))
		c.Pairs(peerOf(who), 0, 1)
		_, _, err := asks(t, s, who, about(testRequest, lines(2, 1)))
		if (err != nil) != (i == mostAskers) {
			t.Errorf("asker %d: %v", i, err)
		}
	}
	for i := range 2 * mostPeers {
		c.Pairs(peerOf(strings.Repeat("x", i)), 0, 1)
	}
	if n := len(c.accounts.by); n != mostPeers {
		t.Errorf("%d peers are kept", n)
	}
}

func TestSignerRefuses(t *testing.T) {
	good := about(testRequest, lines(2, 1))
	with := func(change func(q *question)) p2p.Frame {
		q := good
		change(&q)
		return p2p.Frame{Type: frameAsk, Payload: encodeAsk(q)}
	}
	tests := []struct {
		name  string
		frame p2p.Frame
		want  string
	}{
		{"another frame", p2p.Frame{Type: frameStatement, Payload: encodeAsk(good)}, "want an ask"},
		{"flags", p2p.Frame{Type: frameAsk, Flags: 1, Payload: encodeAsk(good)}, "want an ask"},
		{"id", p2p.Frame{Type: frameAsk, ID: 1, Payload: encodeAsk(good)}, "want an ask"},
		{"no record", p2p.Frame{Type: frameAsk, Payload: []byte("x")}, "ask: "},
		{"trailing bytes", p2p.Frame{Type: frameAsk, Payload: append(encodeAsk(good), 0)}, "ask: "},
		{"version", with(func(q *question) { q.Version = 1 }), "version 1"},
		{"no request", with(func(q *question) { q.Request = settle.QuoteID{} }), "names no request"},
		{"no model", with(func(q *question) { q.Model = "" }), "model id"},
		{"long model", with(func(q *question) { q.Model = strings.Repeat("m", maxModel+1) }), "model id"},
		{"no lines", with(func(q *question) { q.Lines = nil }), "no lines"},
		{"no units", with(func(q *question) { q.Lines = lines(2, 0) }), "0 units"},
		{"twice the same part", with(func(q *question) { q.Lines = lines(2, 1, 2, 1) }), "parts ascending"},
		{"another network", with(func(q *question) { q.Network[0]++ }), "another network"},
		{"another model", with(func(q *question) { q.Model = "other" }), "nothing of model other"},
		{"a part that there is not", with(func(q *question) { q.Lines = lines(2, 1, 8, 1) }), "none is number 8"},
	}
	s := newTestSigner(t, "w", newMemory())
	c := s.Counts(testModel())
	c.Pairs(peerOf("entry"), 0, 5)
	for _, tt := range tests {
		near, far := net.Pipe()
		served := make(chan error, 1)
		go func() { served <- s.serve(peerOf("entry"), far, nil) }()
		if err := p2p.NewFrameWriter(near, maxAsk).Write(tt.frame); err != nil {
			t.Fatal(err)
		}
		f, err := p2p.NewFrameReader(near, maxStatement).Next()
		if err != nil || f.Type != frameRefused || !strings.Contains(string(f.Payload), tt.want) {
			t.Errorf("%s: frame %d %q, %v; want %q", tt.name, f.Type, f.Payload, err, tt.want)
		}
		if err := <-served; err == nil {
			t.Errorf("%s: served", tt.name)
		}
		near.Close()
	}
	if got := c.accounts.by[peerOf("entry")].units[2]; got != 5 {
		t.Errorf("%d pairs are left of 5", got)
	}
}

// TestSilentAskers: those who open a stream and say nothing, and who do not read, hold up nobody.
func TestSilentAskers(t *testing.T) {
	s := newTestSigner(t, "w", newMemory())
	s.Counts(testModel()).Pairs(peerOf("entry"), 0, 100)
	for i := range 50 {
		near, far := net.Pipe()
		done := make(chan error, 1)
		go func() { done <- s.serve(peerOf("entry"), far, nil) }()
		if i%2 == 0 {
			q := about(settle.QuoteID{1, byte(i)}, lines(2, 1))
			if err := p2p.NewFrameWriter(near, maxAsk).Write(p2p.Frame{Type: frameAsk, Payload: encodeAsk(q)}); err != nil {
				t.Fatal(err)
			}
		}
		defer func() {
			near.Close()
			if err := <-done; err == nil {
				t.Error("served nobody")
			}
		}()
	}
	began := time.Now()
	if _, _, err := asks(t, s, "entry", about(testRequest, lines(2, 1))); err != nil || time.Since(began) > answerTime/2 {
		t.Errorf("%v after %v", err, time.Since(began))
	}
}

func TestNewRefuses(t *testing.T) {
	if _, err := NewSigner(SignerConfig{Self: peerOf("a"), Key: keyOf("b"), Keep: newMemory()}); err == nil {
		t.Error("a signer with another's key")
	}
	if _, err := NewSigner(SignerConfig{Self: peerOf("a"), Key: keyOf("a")}); err == nil {
		t.Error("a signer that keeps nothing")
	}
	if _, err := New(Config{Dialer: &swarm{}}); err == nil {
		t.Error("a meter without a signer")
	}
	if _, err := New(Config{Signer: newTestSigner(t, "a", newMemory())}); err == nil {
		t.Error("a meter without a dialer")
	}
	for _, id := range []string{"", "x", "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"} {
		if n, err := NodeOf(id); err == nil {
			t.Errorf("peer %q is node %s", id, n)
		}
	}
}

func FuzzAsk(f *testing.F) {
	f.Add(encodeAsk(about(testRequest, lines(2, 1, 3, 9))))
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, payload []byte) {
		q, err := decodeAsk(payload)
		if err == nil && !bytes.Equal(encodeAsk(q), payload) {
			t.Error("another encoding of a question was taken")
		}
		s := newTestSigner(t, "w", newMemory())
		s.Counts(testModel()).Pairs(peerOf("entry"), 0, 5)
		if err != nil {
			return
		}
		record, err := s.statement(context.Background(), peerOf("entry"), q)
		if err != nil {
			return
		}
		r, err := settle.ParseReport(record)
		if err != nil || r.Work[0].Lines[0].Units > 5 {
			t.Errorf("%v, %v", r, err)
		}
	})
}

// FuzzAnswer: whatever a worker answers, an entry has a statement of it or an error.
func FuzzAnswer(f *testing.F) {
	f.Add(byte(frameStatement), []byte("x"))
	f.Add(byte(frameRefused), []byte("no"))
	f.Fuzz(func(t *testing.T, typ byte, payload []byte) {
		m := newTestMeter(t, &swarm{serve: map[string]func(string, Conn){
			peerOf("w"): func(_ string, c Conn) {
				p2p.NewFrameReader(c, maxAsk).Next()
				p2p.NewFrameWriter(c, 1<<20).Write(p2p.Frame{Type: typ, Payload: payload})
			},
		}})
		record, err := m.statement(t.Context(), about(testRequest, nil), peerOf("entry"), settle.Work{Worker: node("w"), Lines: lines(2, 1)})
		if err == nil && record == nil {
			t.Error("neither a statement nor an error")
		}
	})
}
