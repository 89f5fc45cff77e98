package audit

import (
	"bytes"
	"crypto/ed25519"
	"errors"
	"math"
	"slices"
	"strings"
	"testing"
	"time"
)

// TestJudge has answers of rows [1 x], so that the distance is about the difference of x.
func TestJudge(t *testing.T) {
	bands := func(a, b string) float64 {
		if a == "loose" || b == "loose" {
			return 0.2
		}
		return 0.01
	}
	answer := func(by string, x float32) Answer { return Answer{by, []float32{1, 1, 1, x}} }
	for _, tt := range []struct {
		name    string
		answers []Answer
		want    string // outcome and culprit of each finding
	}{
		{"alike", []Answer{answer("a", 1), answer("b", 1.001)}, ""},
		{"two differ", []Answer{answer("a", 1), answer("b", 1.5)}, "open "},
		{"the own copy is right", []Answer{answer("a", 1.5), answer("", 1)}, "wrong a"},
		{"also against two", []Answer{answer("a", 1.5), answer("b", 1.5), answer("", 1)}, "wrong a wrong b"},
		{"drift", []Answer{answer("a", 1.05), answer("", 1)}, "drift a"},
		{"a third", []Answer{answer("a", 1.5), answer("b", 1), answer("c", 1.002)}, "wrong a"},
		{"the second one is wrong", []Answer{answer("a", 1), answer("b", 1.5), answer("c", 1.002)}, "wrong b"},
		{"all differ", []Answer{answer("a", 1), answer("b", 1.5), answer("c", 2)}, "open "},
		{"a fourth", []Answer{answer("a", 1), answer("b", 1.5), answer("c", 2), answer("d", 1)}, "open "},
		{"three of four", []Answer{answer("a", 1), answer("b", 1.5), answer("c", 1), answer("d", 1)}, "wrong b"},
		{"two against two", []Answer{answer("a", 1), answer("b", 1.5), answer("c", 1), answer("d", 1.5)}, "open "},
		{"a backend of wide band", []Answer{answer("a", 1), answer("loose", 1.1), answer("c", 1)}, ""},
		{"no chain of small steps", []Answer{answer("a", 1), answer("b", 1.008), answer("c", 1.016)}, "open "},
		{"mildest of what two say", []Answer{answer("a", 1.08), answer("b", 1), answer("c", 0.995)}, "drift a"},
		{"not finite", []Answer{answer("a", float32(math.NaN())), answer("b", 1), answer("c", 1)}, "wrong a"},
	} {
		var got []string
		for _, f := range Judge(4, tt.answers, bands) {
			got = append(got, f.Outcome.String()+" "+f.Culprit)
			if f.Text() == "" {
				t.Errorf("%s: %+v says nothing", tt.name, f)
			}
		}
		if strings.Join(got, " ") != tt.want {
			t.Errorf("%s: %q, want %q", tt.name, got, tt.want)
		}
	}
	f := Judge(2, []Answer{{"a", []float32{1, 1, 1, 2}}, {"", []float32{1, 1, 1, 1}}}, bands)
	if len(f) != 1 || f[0].Pair != 1 {
		t.Errorf("%+v: want the second row", f)
	}
}

func TestStanding(t *testing.T) {
	now := time.Unix(1_000_000, 0)
	var s Standing
	if s.Text(now) != "" || !s.Until(now).IsZero() {
		t.Errorf("of nobody: %q", s.Text(now))
	}
	s.Take(Alike, "", now)
	s.Take(Open, "", now)
	if !s.Until(now).IsZero() || s.Text(now) != "1 of 2 answers that were checked are right" {
		t.Error(s.Text(now))
	}
	s.Take(Drift, "a little off", now)
	if !s.Until(now).IsZero() {
		t.Error("one drift puts out")
	}
	var w Standing
	w.Take(Wrong, "off", now)
	if until := w.Until(now); until.Sub(now).Round(time.Second) != HalfLife || w.Text(now) != "no calls for 1h0m0s: off" {
		t.Errorf("%v, %q", until, w.Text(now))
	}
	if later := now.Add(HalfLife + time.Second); !w.Until(later).IsZero() || !strings.HasPrefix(w.Text(later), "trusted again") {
		t.Errorf("after the half-life: %q", w.Text(later))
	}
	again := now.Add(HalfLife + time.Second)
	w.Take(Wrong, "off", again)
	if first := w.Until(again).Sub(again); first <= HalfLife {
		t.Errorf("found again it is out for %v", first)
	}
	for range 100 {
		w.Take(Wrong, "off", again)
	}
	if out := w.Until(again).Sub(again); out < 5*HalfLife-time.Minute || out > 5*HalfLife+time.Minute {
		t.Errorf("at most %v", out)
	}
	d := Standing{}
	for i := range 6 {
		if i < 5 && !d.Until(now).IsZero() {
			t.Errorf("drift puts out after %d times", i)
		}
		d.Take(Drift, "", now)
	}
	if d.Until(now.Add(time.Minute)).IsZero() {
		t.Error("drift six times within a minute does not put out")
	}
}

func testRecord() Record {
	return Record{
		Network: "home-00", Model: "aa", Layer: 3, Program: [32]byte{1}, Inputs: [32]byte{2}, Expert: 7, Culprit: "liar", Wrong: true,
		Answers: []RecordAnswer{{"liar", RowBytes([]float32{1, float32(math.NaN())})}, {"", RowBytes([]float32{1, 2})}},
		Reason:  "off by 3", Time: 1_000_000,
	}
}

func TestRecord(t *testing.T) {
	key := ed25519.NewKeyFromSeed(make([]byte, 32))
	b, err := testRecord().Sign(key)
	if err != nil {
		t.Fatal(err)
	}
	r, signer, err := ParseRecord(b)
	if err != nil || !bytes.Equal(signer, key.Public().(ed25519.PublicKey)) || r.Culprit != "liar" || len(r.Answers) != 2 {
		t.Fatalf("%+v, %v", r, err)
	}
	if again, err := r.Sign(key); err != nil || !bytes.Equal(again, b) {
		t.Error("another encoding of the same")
	}
	for i := range b {
		c := slices.Clone(b)
		c[i] ^= 1
		if _, _, err := ParseRecord(c); !errors.Is(err, ErrRecord) {
			t.Fatalf("byte %d changed: %v", i, err)
		}
	}
	for name, change := range map[string]func(*Record){
		"network": func(r *Record) { r.Network = "" }, "culprit": func(r *Record) { r.Culprit = "" }, "reason": func(r *Record) { r.Reason = "" },
		"time": func(r *Record) { r.Time = 0 }, "alone": func(r *Record) { r.Answers = r.Answers[:1] },
		"others": func(r *Record) { r.Culprit = "other" }, "twice": func(r *Record) { r.Answers[1].By = "liar" },
		"short row": func(r *Record) { r.Answers[1].Row = r.Answers[1].Row[:4] }, "no row": func(r *Record) { r.Answers[0].Row = nil },
		"many":    func(r *Record) { r.Answers = append(r.Answers, r.Answers[0], r.Answers[0], r.Answers[0]) },
		"no text": func(r *Record) { r.Model = "\xff" },
	} {
		r := testRecord()
		change(&r)
		if _, err := r.Sign(key); !errors.Is(err, ErrRecord) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, _, err := ParseRecord(make([]byte, MaxRecord+1)); !errors.Is(err, ErrRecord) {
		t.Error(err)
	}
}

func FuzzParseRecord(f *testing.F) {
	key := ed25519.NewKeyFromSeed(make([]byte, 32))
	b, err := testRecord().Sign(key)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Fuzz(func(t *testing.T, b []byte) {
		r, _, err := ParseRecord(b)
		if err == nil && r.check() != nil {
			t.Error("it is read and not well formed")
		}
	})
}
