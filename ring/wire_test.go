package ring

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"
	"reflect"
	"strings"
	"testing"

	"kvasird/ggml/gguf"
)

func testOpening() opening {
	o := opening{
		Epoch: 3, Key: bytes.Repeat([]byte{7}, keySize), Hop: 1, Prompt: 5, Most: 10, Known: 6, Drafts: true,
		Sampling: Sampling{Temperature: 0.5, TopK: 40, Seed: 9, LogitBias: map[int32]float32{3: -1, 700: 2},
			Grammar: `root ::= "a"`, Triggers: []string{"x", "y"}, Special: true, Logprobs: true, Top: MaxTop},
		Entry: "e",
	}
	o.setChain(Chain{{"a", gguf.Range{Begin: 0, End: 4}}, {"b", gguf.Range{Begin: 4, End: 6}}})
	return o
}

func TestOpeningRoundTrip(t *testing.T) {
	want := testOpening()
	got, err := decodeOpening(encodeControl(want))
	if err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
}

func TestLiteralBytes(t *testing.T) {
	for _, tt := range []struct {
		name      string
		got, want []byte
	}{
		{"hello", encodeControl(hello{wireVersion, "p", "m", 12, 4, 8, 64, F16}),
			[]byte{0xa8, 1, 4, 2, 0x61, 'p', 3, 0x61, 'm', 4, 12, 5, 4, 6, 8, 7, 0x18, 64, 8, 2}},
		{"welcome", encodeControl(welcome{wireVersion, 64}), []byte{0xa2, 1, 4, 2, 0x18, 64}},
		{"resume", putResume(nil, resume{2, 3, 256, []int32{9}}), []byte{2, 0, 0, 0, 3, 0, 0, 0, 0, 1, 0, 0, 1, 0, 0, 0, 9, 0, 0, 0}},
		{"tokens", putTokens(nil, tokens{2, 3, finishLength, []int32{9}, nil}), []byte{2, 0, 0, 0, 3, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 9, 0, 0, 0}},
		{"tokens with log-probabilities", putTokens(nil, likelyTokens()), []byte{2, 0, 0, 0, 3, 0, 0, 0, 2, 0, 0, 0, 1, 1, 0, 0, 9, 0, 0, 0, 8, 0, 0, 0,
			0, 0, 0, 0xbf, 1, 0, 0, 0, 7, 0, 0, 0, 0, 0, 0x80, 0xbf, 0, 0, 0, 0xc0, 0, 0, 0, 0}},
		{"credit", putCredit(nil, 2, 3), []byte{2, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0}},
		{"ready", putReady(nil, 2), []byte{2, 0, 0, 0}},
		{"error", putReport(nil, report{2, CodeLost, 1, "x"}), []byte{2, 0, 0, 0, byte(CodeLost), 0, 1, 0, 'x'}},
		{"close", putClose(nil, closing{2, true, bytes.Repeat([]byte{5}, keySize)}), append([]byte{2, 0, 0, 0, 1, 0, 0, 0}, bytes.Repeat([]byte{5}, keySize)...)},
		{"rows", rowsBytes(), []byte{1, 0, 1, 0, 2, 0, 0, 0, 8, 7, 6, 5, 4, 3, 2, 1, 2, 0, 0, 0, 3, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 9, 0, 0, 0, 1, 0, 0, 0, 0, 0, 128, 63, 0, 0, 0, 192}},
	} {
		if !bytes.Equal(tt.got, tt.want) {
			t.Errorf("%s:\n got %x\nwant %x", tt.name, tt.got, tt.want)
		}
	}
}

// likelyTokens are tokens with log-probabilities.
func likelyTokens() tokens {
	return tokens{2, 3, finishStop, []int32{9, 8}, []Prob{{-0.5, []TokenProb{{7, -1}}}, {Logprob: -2}}}
}

// rowsBytes is a ROWS frame of one row.
func rowsBytes() []byte {
	b := make([]byte, rowsSize(1, 1, 2, F32))
	f := layRows(b, 1, 1, 2, F32)
	f.setSegment(0, segment{0x0102030405060708, 2, 3, 1})
	f.tokens[0], f.flags[0] = 9, rowWant
	packRow(f.row(0), []float32{1, -2}, F32)
	return b
}

func TestRowsRoundTrip(t *testing.T) {
	for _, p := range []Precision{F32, F16} {
		const width, rows = 3, 5
		b := bytes.Repeat([]byte{0xee}, rowsSize(2, rows, width, p))
		f := layRows(b, 2, rows, width, p)
		f.setSegment(0, segment{1, 1, 0, 2})
		f.setSegment(1, segment{2, 1, 7, 3})
		for i := range rows {
			f.tokens[i], f.flags[i] = int32(i), uint8(i%4)
			packRow(f.row(i), []float32{float32(i), -0.5, 1000}, p)
		}
		g, err := decodeRows(b, width)
		if err != nil {
			t.Fatal(err)
		}
		if g.count() != 2 || g.segment(1) != (segment{2, 1, 7, 3}) || g.tokens[4] != 4 || g.flags[3] != 3 {
			t.Errorf("precision %d: %+v", p, g)
		}
		row := make([]float32, width)
		if !unpackRow(row, g.row(4), p) || row[0] != 4 || row[1] != -0.5 || row[2] != 1000 {
			t.Errorf("precision %d: row %v", p, row)
		}
	}
}

// edit returns a copy of b with bytes replaced.
func edit(b []byte, at int, with ...byte) []byte {
	b = bytes.Clone(b)
	copy(b[at:], with)
	return b
}

func TestRowsRefused(t *testing.T) {
	good := rowsBytes()
	for _, tt := range []struct {
		name, want string
		payload    []byte
	}{
		{"empty", "at least 8", nil},
		{"no segment", "without a segment", edit(good, 0, 0)},
		{"precision", "precision word", edit(good, 2, 3)},
		{"reserved", "precision word", edit(good, 3, 1)},
		{"width", "want 2", edit(good, 4, 3)},
		{"huge width", "want 2", edit(good, 4, 0xff, 0xff, 0xff, 0xff)},
		{"segments cut", "with 255 segments", edit(good, 0, 255)},
		{"no rows", "has 0 rows", edit(good, 24, 0)},
		{"4 GB of rows", "has 4294967295 rows", edit(good, 24, 0xff, 0xff, 0xff, 0xff)},
		{"position", "at position 4294967295", edit(good, 20, 0xff, 0xff, 0xff, 0xff)},
		{"segment reserved", "has 1 rows", edit(good, 28, 1)},
		{"more rows than bytes", "its counts say", edit(good, 24, 2)},
		{"trailing", "its counts say", append(bytes.Clone(good), 0)},
		{"flags", "has flags 0x4", edit(good, 36, 4)},
		{"padding", "has flags 0x1", edit(good, 37, 1)},
		{"token", "token 0 is -", edit(good, 35, 0x80)},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if _, err := decodeRows(tt.payload, 2); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("got %v, want %q", err, tt.want)
			}
		})
	}
}

func TestControlRefused(t *testing.T) {
	hi := hello{wireVersion, "p", "m", 12, 4, 8, 64, F32}
	change := func(f func(h *hello)) []byte { h := hi; f(&h); return encodeControl(h) }
	reopen := func(f func(o *opening)) []byte { o := testOpening(); f(&o); return encodeControl(o) }
	open := func(b []byte) error { _, err := decodeOpening(b); return err }
	greet := func(b []byte) error { _, err := decodeHello(b); return err }
	back := func(b []byte) error { _, err := decodeWelcome(b); return err }
	for _, tt := range []struct {
		name, want string
		decode     func([]byte) error
		payload    []byte
	}{
		{"hello: version", "wire version 1", greet, change(func(h *hello) { h.Version = 1 })},
		{"hello: window", "layers 8:4", greet, change(func(h *hello) { h.Begin, h.End = 8, 4 })},
		{"hello: beyond the model", "layers 4:13", greet, change(func(h *hello) { h.End = 13 })},
		{"hello: width", "rows of", greet, change(func(h *hello) { h.Width = MaxWidth + 1 })},
		{"hello: precision", "precision 3", greet, change(func(h *hello) { h.Precision = 3 })},
		{"hello: no model", "model id", greet, change(func(h *hello) { h.Model = "" })},
		{"hello: long pack", "runtime pack", greet, change(func(h *hello) { h.Pack = strings.Repeat("x", maxPack+1) })},
		{"hello: trailing", "hello", greet, append(encodeControl(hi), 0)},
		{"hello: not shortest", "deterministic", greet, edit(append([]byte{0xa8, 1, 0x18, 3}, encodeControl(hi)[3:]...), 0)},
		{"hello: large", "at most", greet, make([]byte, maxControl+1)},
		{"welcome: version", "wire version 9", back, encodeControl(welcome{9, 1})},
		{"welcome: width", "rows of 0", back, encodeControl(welcome{wireVersion, 0})},
		{"open: epoch", "epoch 0", open, reopen(func(o *opening) { o.Epoch = 0 })},
		{"open: key", "key of 3", open, reopen(func(o *opening) { o.Key = o.Key[:3] })},
		{"open: no chain", "chain of 0", open, reopen(func(o *opening) { o.Hops = nil })},
		{"open: missing window", "nobody has layers 4:5", open, reopen(func(o *opening) { o.Hops[1].Begin = 5 })},
		{"open: overlap", "overlap", open, reopen(func(o *opening) { o.Hops[1].Begin = 3 })},
		{"open: empty window", "has layers 4:4", open, reopen(func(o *opening) { o.Hops[1].End = 4 })},
		{"open: not from layer 0", "nobody has layers 0:1", open, reopen(func(o *opening) { o.Hops[0].Begin = 1 })},
		{"open: loop", "twice", open, reopen(func(o *opening) { o.Hops[1].Peer = "a" })},
		{"open: peer", "peer id", open, reopen(func(o *opening) { o.Hops[1].Peer = "" })},
		{"open: hop", "hop 3", open, reopen(func(o *opening) { o.Hop = 3 })},
		{"open: no entry", "hop 1 with entry", open, reopen(func(o *opening) { o.Entry = "" })},
		{"open: entry of the first stage", "hop 0 with entry", open, reopen(func(o *opening) { o.Hop = 0 })},
		{"open: long entry", "hop 1 with entry", open, reopen(func(o *opening) { o.Entry = strings.Repeat("x", maxPeerID+1) })},
		{"open: entry that is no text", "UTF-8", open, reopen(func(o *opening) { o.Entry = "\xff" })},
		{"open: prompt", "prompt of 0", open, reopen(func(o *opening) { o.Prompt = 0 })},
		{"open: answer", "answer of -1", open, reopen(func(o *opening) { o.Most = -1 })},
		{"open: knows less than the prompt", "4 known", open, reopen(func(o *opening) { o.Known = 4 })},
		{"open: knows more than there is", "16 known", open, reopen(func(o *opening) { o.Known = 16 })},
		{"open: endless", "want 1 to", open, reopen(func(o *opening) { o.Most = maxContext + 1 })},
		{"open: temperature", "temperature", open, reopen(func(o *opening) { o.Sampling.Temperature = float32(math.Inf(1)) })},
		{"open: negative", "none may be negative", open, reopen(func(o *opening) { o.Sampling.TopK = -1 })},
		{"open: large", "at most", open, make([]byte, maxOpening+1)},
		{"open: grammar", "want at most", open, reopen(func(o *opening) { o.Sampling.Grammar = strings.Repeat("x", MaxGrammar+1) })},
		{"open: grammar that is no text", "UTF-8", open, reopen(func(o *opening) { o.Sampling.Grammar = "\xff" })},
		{"open: triggers of nothing", "none without a grammar", open, reopen(func(o *opening) { o.Sampling.Grammar = "" })},
		{"open: triggers", "17 triggers", open, reopen(func(o *opening) { o.Sampling.Triggers = make([]string, maxTriggers+1) })},
		{"open: empty trigger", "trigger \"\"", open, reopen(func(o *opening) { o.Sampling.Triggers[1] = "" })},
		{"open: long trigger", "want 1 to 256", open, reopen(func(o *opening) { o.Sampling.Triggers[0] = strings.Repeat("x", maxTrigger+1) })},
		{"open: likeliest", "21 likeliest", open, reopen(func(o *opening) { o.Sampling.Top = MaxTop + 1 })},
		{"open: fewer than none", "-1 likeliest", open, reopen(func(o *opening) { o.Sampling.Top = -1 })},
		{"open: likeliest unasked", "with log-probabilities only", open, reopen(func(o *opening) { o.Sampling.Logprobs = false })},
		{"open: bias", "logit bias", open, reopen(func(o *opening) { o.Sampling.LogitBias = map[int32]float32{-1: 0} })},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if err := tt.decode(tt.payload); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("got %v, want %q", err, tt.want)
			}
		})
	}
}

func TestSmallFramesRefused(t *testing.T) {
	le := binary.LittleEndian
	goodResume := putResume(nil, resume{1, 5, 9, []int32{1, 2}})
	goodTokens := putTokens(nil, tokens{1, 5, running, []int32{1, 2}, nil})
	likely := putTokens(nil, likelyTokens())
	nan := []byte{0, 0, 0xc0, 0x7f}
	goodReport := putReport(nil, report{1, CodeLost, 2, "x"})
	goodClose := putClose(nil, closing{1, false, make([]byte, keySize)})
	for _, tt := range []struct {
		name    string
		decode  func([]byte) error
		payload []byte
	}{
		{"resume: short", decodesResume, goodResume[:15]},
		{"resume: trailing", decodesResume, append(bytes.Clone(goodResume), 0)},
		{"resume: more tokens than positions", decodesResume, edit(goodResume, 4, 1)},
		{"resume: tokens missing", decodesResume, edit(goodResume, 12, 3)},
		{"resume: 4 GB", decodesResume, edit(goodResume, 12, 0xff, 0xff, 0xff, 0xff)},
		{"resume: position", decodesResume, edit(goodResume, 4, 0xff, 0xff, 0xff, 0xff)},
		{"resume: credit", decodesResume, edit(goodResume, 8, 0xff, 0xff, 0xff, 0xff)},
		{"tokens: short", decodesTokens, goodTokens[:15]},
		{"tokens: none", decodesTokens, putTokens(nil, tokens{1, 5, running, nil, nil})},
		{"tokens: 4 GB", decodesTokens, edit(goodTokens, 8, 0xff, 0xff, 0xff, 0xff)},
		{"tokens: position", decodesTokens, edit(goodTokens, 4, 0xff, 0xff, 0xff, 0xff)},
		{"tokens: finish", decodesTokens, edit(goodTokens, 12, 3)},
		{"tokens: trailing", decodesTokens, append(bytes.Clone(goodTokens), 0)},
		{"tokens: negative", decodesTokens, putTokens(nil, tokens{1, 5, running, []int32{-1}, nil})},
		{"tokens: probs", decodesTokens, edit(goodTokens, 13, 2)},
		{"tokens: reserved", decodesTokens, edit(likely, 14, 1)},
		{"tokens: probs missing", decodesTokens, edit(goodTokens, 13, 1)},
		{"tokens: probs unsaid", decodesTokens, edit(likely, 13, 0)},
		{"tokens: half a prob", decodesTokens, likely[:len(likely)-4]},
		{"tokens: top cut", decodesTokens, likely[:len(likely)-8]},
		{"tokens: probs trailing", decodesTokens, append(bytes.Clone(likely), 0)},
		{"tokens: too many with probs", decodesTokens, putTokens(nil, tokens{1, 5, running, make([]int32, maxProbs+1), make([]Prob, maxProbs+1)})},
		{"tokens: 4 GB of others", decodesTokens, edit(likely, 28, 0xff, 0xff, 0xff, 0xff)},
		{"tokens: too many others", decodesTokens, putTokens(nil, tokens{1, 5, running, []int32{1}, []Prob{{Top: make([]TokenProb, MaxTop+1)}}})},
		{"tokens: more likely than sure", decodesTokens, edit(likely, 27, 0x3f)},
		{"tokens: likely as nothing", decodesTokens, edit(likely, 24, nan...)},
		{"tokens: another of no vocabulary", decodesTokens, edit(likely, 35, 0x80)},
		{"tokens: another likely as nothing", decodesTokens, edit(likely, 36, nan...)},
		{"credit: short", decodesCredit, make([]byte, 15)},
		{"credit: reserved", decodesCredit, le.AppendUint64(le.AppendUint64(nil, 1<<32), 1)},
		{"ready: long", decodesReady, make([]byte, 5)},
		{"error: short", decodesReport, goodReport[:7]},
		{"error: no code", decodesReport, edit(goodReport, 4, 0)},
		{"error: code", decodesReport, edit(goodReport, 4, byte(lastCode)+1)},
		{"error: hop", decodesReport, edit(goodReport, 6, MaxHops+1)},
		{"error: text", decodesReport, edit(goodReport, 8, 0xff)},
		{"error: long", decodesReport, append(bytes.Clone(goodReport), make([]byte, maxText)...)},
		{"close: short", decodesClose, goodClose[:8]},
		{"close: flags", decodesClose, edit(goodClose, 4, 2)},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if tt.decode(tt.payload) == nil {
				t.Errorf("%x was taken", tt.payload)
			}
		})
	}
}

func decodesResume(b []byte) error { _, err := decodeResume(b); return err }
func decodesTokens(b []byte) error { _, err := decodeTokens(b); return err }
func decodesCredit(b []byte) error { _, _, err := decodeCredit(b); return err }
func decodesReady(b []byte) error  { _, err := decodeReady(b); return err }
func decodesReport(b []byte) error { _, err := decodeReport(b); return err }
func decodesClose(b []byte) error  { _, err := decodeClose(b); return err }

func TestReportTextIsCut(t *testing.T) {
	r, err := decodeReport(putReport(nil, report{1, CodeLost, 0, strings.Repeat("ä", maxText)}))
	if err != nil || len(r.text) > maxText || !strings.HasPrefix(r.text, "ää") {
		t.Errorf("%d bytes of text, %v", len(r.text), err)
	}
}

// Every f16 is the nearest one of its value, and of what lies up to half a step beside it.
func TestHalf(t *testing.T) {
	for h := range 1 << 16 {
		f := fromHalf(uint16(h))
		if !finite(f) {
			continue
		}
		if got := toHalf(f); got != uint16(h) {
			t.Fatalf("%#04x is %v is %#04x", h, f, got)
		}
	}
	for _, tt := range []struct {
		f    float32
		want uint16
	}{
		{65504, 0x7bff}, {65519, 0x7bff}, {1e9, 0x7bff}, {-1e9, 0xfbff}, {1, 0x3c00}, {1 + 1./2048, 0x3c00}, {1 + 3./2048, 0x3c02},
		{1 + 1./2047, 0x3c01}, {float32(math.Inf(1)), 0x7c00}, {1e-9, 0}, {-1e-9, 0x8000}, {1. / (1 << 24), 1}, {1.5 / (1 << 24), 2},
		{0.5 / (1 << 24), 0}, {0.51 / (1 << 24), 1}, {2047.5 / 2048 / (1 << 14), 0x0400},
	} {
		if got := toHalf(tt.f); got != tt.want {
			t.Errorf("%v is %#04x, want %#04x", tt.f, got, tt.want)
		}
	}
	if h := toHalf(float32(math.NaN())); finite(fromHalf(h)) {
		t.Errorf("NaN is %#04x", h)
	}
}

func FuzzRows(f *testing.F) {
	f.Add(rowsBytes(), 2)
	f.Fuzz(func(t *testing.T, payload []byte, width int) {
		if width < 1 || width > MaxWidth {
			return
		}
		r, err := decodeRows(payload, width)
		if err != nil {
			return
		}
		row := make([]float32, width)
		rows := 0
		for i := range r.count() {
			rows += r.segment(i).n
		}
		if rows != len(r.tokens) || rows != len(r.flags) {
			t.Fatalf("%d rows, %d tokens, %d flags", rows, len(r.tokens), len(r.flags))
		}
		for i := range rows {
			unpackRow(row, r.row(i), r.precision)
		}
	})
}

func FuzzControl(f *testing.F) {
	f.Add(encodeControl(hello{wireVersion, "p", "m", 12, 4, 8, 64, F32}))
	f.Add(encodeControl(welcome{wireVersion, 64}))
	f.Add(encodeControl(testOpening()))
	f.Fuzz(func(t *testing.T, payload []byte) {
		if h, err := decodeHello(payload); err == nil && !bytes.Equal(encodeControl(h), payload) {
			t.Errorf("hello %+v has another encoding", h)
		}
		if w, err := decodeWelcome(payload); err == nil && !bytes.Equal(encodeControl(w), payload) {
			t.Errorf("welcome %+v has another encoding", w)
		}
		if o, err := decodeOpening(payload); err == nil {
			if !bytes.Equal(encodeControl(o), payload) || o.chain.validate() != nil {
				t.Errorf("opening %+v has another encoding", o)
			}
		}
	})
}

func FuzzSmallFrames(f *testing.F) {
	f.Add(putResume(nil, resume{1, 5, 9, []int32{1, 2}}))
	f.Add(putTokens(nil, tokens{1, 5, running, []int32{1, 2}, nil}))
	f.Add(putTokens(nil, likelyTokens()))
	f.Add(putReport(nil, report{1, CodeLost, 2, "x"}))
	f.Add(putClose(nil, closing{1, false, make([]byte, keySize)}))
	f.Add(putCredit(nil, 1, 2))
	f.Add(putReady(nil, 1))
	f.Fuzz(func(t *testing.T, payload []byte) {
		check := func(what string, again []byte, err error) {
			if err == nil && !bytes.Equal(again, payload) {
				t.Errorf("%s %x is written as %x", what, payload, again)
			}
		}
		r, err := decodeResume(payload)
		check("resume", putResume(nil, r), err)
		k, err := decodeTokens(payload)
		check("tokens", putTokens(nil, k), err)
		p, err := decodeReport(payload)
		check("error", putReport(nil, p), err)
		c, err := decodeClose(payload)
		check("close", putClose(nil, c), err)
		epoch, taken, err := decodeCredit(payload)
		check("credit", putCredit(nil, epoch, taken), err)
		epoch, err = decodeReady(payload)
		check("ready", putReady(nil, epoch), err)
	})
}

func ExampleHop() {
	fmt.Println(Hop{"p", gguf.Range{Begin: 0, End: 4}})
	// Output: peer p, layers 0:4
}
