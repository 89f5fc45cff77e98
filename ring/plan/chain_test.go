package plan

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"kvasird/ggml/gguf"
)

var rewrite = flag.Bool("rewrite", false, "rewrite the golden files in testdata")

// golden compares text with a file of testdata.
func golden(t *testing.T, name string, got []byte) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *rewrite {
		if err := os.WriteFile(path, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Errorf("%s differs (-rewrite accepts it); got\n%s", path, got)
	}
}

// window reads "peer begin:end token/batched slots/free", times in milliseconds;
// what is left out is 1/0.1 and 4/4.
func window(t *testing.T, text string) Window {
	t.Helper()
	w := Window{Slots: 4, Free: 4, Token: time.Millisecond, Batched: 100 * time.Microsecond}
	fields := strings.Fields(text)
	var err error
	if _, err = fmt.Sscanf(fields[1], "%d:%d", &w.Layers.Begin, &w.Layers.End); err != nil {
		t.Fatalf("%q: %v", text, err)
	}
	w.Peer = fields[0]
	if len(fields) > 2 {
		var token, batched float64
		_, err = fmt.Sscanf(fields[2]+"/0.1", "%f/%f", &token, &batched)
		w.Token, w.Batched = time.Duration(token*1e6), time.Duration(batched*1e6)
	}
	if err == nil && len(fields) > 3 {
		_, err = fmt.Sscanf(fields[3], "%d/%d", &w.Slots, &w.Free)
	}
	if err != nil {
		t.Fatalf("%q: %v", text, err)
	}
	return w
}

// links makes an RTT function of milliseconds by "a-b"; others are otherwise, or
// unknown when that is negative.
func links(list map[string]float64, otherwise float64) func(a, b string) (time.Duration, bool) {
	return func(a, b string) (time.Duration, bool) {
		ms := otherwise
		for _, key := range []string{a + "-" + b, b + "-" + a} {
			if d, ok := list[key]; ok {
				ms = d
			}
		}
		return time.Duration(ms * 1e6), ms >= 0
	}
}

func TestChainGolden(t *testing.T) {
	tests := []struct {
		name    string
		layers  int
		windows []string
		rtt     map[string]float64
		other   float64 // round trip of the other links in ms, negative: unknown
		avoid   []string
	}{
		{"three windows of different sizes", 12, []string{"a 0:2", "b 2:9", "c 9:12"}, nil, 1, nil},
		{"a whole replica needs no link", 12, []string{"a 0:6", "b 6:12", "w 0:12 2"}, nil, 1, nil},
		{"a slow whole replica against a fast chain", 12, []string{"a 0:6 5", "b 6:12 5", "w 0:12 40"}, nil, 2, nil},
		{"the same chain when its link is long", 12, []string{"a 0:6 5", "b 6:12 5", "w 0:12 40"}, map[string]float64{"a-b": 80}, 2, nil},
		{"overlapping windows: only what tiles", 12, []string{"a 0:7 1", "b 5:12 1", "c 0:5 1", "d 7:12 9"}, nil, 1, nil},
		{"overlapping windows that do not meet", 12, []string{"a 0:7", "b 5:12", "c 3:8"}, nil, 1, nil},
		{"the closing link counts", 12, []string{"a 0:6", "b 6:12", "c 6:12"},
			map[string]float64{"a-b": 10, "a-c": 6, "entry-a": 1}, 30, nil},
		{"the closing link decides among first stages", 12, []string{"a 0:4", "b 4:8", "c 8:12", "d 0:4"},
			map[string]float64{"a-b": 2, "b-c": 2, "a-c": 50, "d-b": 10, "d-c": 10}, 20, nil},
		{"the way from the entry counts", 12, []string{"far 0:12 10", "near 0:12 11"}, map[string]float64{"entry-near": 1}, 40, nil},
		{"the entry's own stage is nearest", 12, []string{"entry 0:6", "a 0:6", "b 6:12"}, nil, 10, nil},
		{"one peer in two places pays its link once", 12, []string{"a 0:4", "b 4:8", "a 8:12", "c 8:12"}, nil, 10, nil},
		{"a busy stage costs what runs there", 12, []string{"a 0:12 5/2 8/2", "b 0:12 10/2 8/8"}, nil, 1, nil},
		{"a stage without a free slot is left out", 12, []string{"a 0:12 1/1 4/0", "b 0:6 9", "c 6:12 9"}, nil, 1, nil},
		{"a peer to avoid is left out", 12, []string{"a 0:12", "b 0:6 9", "c 6:12 9"}, nil, 1, []string{"a"}},
		{"an unknown link is taken for a bad one", 12, []string{"a 0:6", "b 6:12", "c 6:12 60"},
			map[string]float64{"entry-a": 1, "a-c": 1}, -1, nil},
		{"unknown compute is taken for slow", 12, []string{"a 0:12 0/0", "b 0:12 119"}, nil, 1, nil},
		{"equal chains: fewer stages", 12, []string{"a 0:4", "b 4:12 2", "c 4:8", "d 8:12"}, nil, 0, nil},
		{"equal stages: by name", 12, []string{"b 0:12", "a 0:12", "c 0:12"}, nil, 5, nil},
		{"layers that nobody holds", 12, []string{"a 0:3", "b 5:8", "c 9:12"}, nil, 1, nil},
		{"layers that only lost peers hold, and busy ones", 12, []string{"a 0:4", "b 4:8", "c 8:12 1/1 4/0"}, nil, 1, []string{"b"}},
		{"no window at all", 12, nil, nil, 1, nil},
		{"windows beyond the model or upside down are ignored", 12, []string{"a 0:13", "b -1:12", "c 6:6", "d 12:0"}, nil, 1, nil},
	}
	var out bytes.Buffer
	for _, tt := range tests {
		q := ChainQuery{Layers: tt.layers, Entry: "entry", Avoid: tt.avoid, RTT: links(tt.rtt, tt.other)}
		for _, text := range tt.windows {
			q.Windows = append(q.Windows, window(t, text))
		}
		fmt.Fprintf(&out, "%s\n  windows: %s\n", tt.name, strings.Join(tt.windows, ", "))
		chain, err := Chain(q)
		if err != nil {
			fmt.Fprintf(&out, "  %v\n", err)
			continue
		}
		fmt.Fprintf(&out, "  %s\n", chainText(t, q, chain))
		slices.Reverse(q.Windows)
		if again, err := Chain(q); err != nil || !slices.Equal(chain, again) {
			t.Errorf("%s: in reverse order %v, %v; want %v", tt.name, again, err, chain)
		}
	}
	golden(t, "chain.golden", out.Bytes())
}

func chainText(t *testing.T, q ChainQuery, chain []Window) string {
	t.Helper()
	var texts []string
	for _, w := range chain {
		texts = append(texts, w.String())
	}
	round, err := Round(q, chain)
	if err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("%s: %v", strings.Join(texts, " -> "), round)
}

func TestMendGolden(t *testing.T) {
	windows := []string{"a 0:4", "b 4:8", "c 8:12", "a2 0:4", "b2 4:8 5", "b3 4:6", "b4 6:8", "c2 8:12", "w 0:12 90"}
	rtt := map[string]float64{"entry-a2": 1, "a-b2": 30, "a2-b": 1, "b-c2": 1, "c2-a": 1}
	q := ChainQuery{Layers: 12, Entry: "entry", RTT: links(rtt, 4)}
	for _, text := range windows {
		q.Windows = append(q.Windows, window(t, text))
	}
	var out bytes.Buffer
	try := func(name string, chain []Window, lost int, avoid ...string) {
		q := q
		q.Avoid = avoid
		mended, err := Mend(q, chain, lost)
		if err != nil {
			fmt.Fprintf(&out, "%s: %v\n", name, err)
			return
		}
		fmt.Fprintf(&out, "%s: %s\n", name, chainText(t, q, mended))
	}
	chain := []Window{q.Windows[0], q.Windows[1], q.Windows[2]}
	try("the first is lost", chain, 0, "a")
	try("the middle is lost: two small windows do", chain, 1, "b")
	try("the middle and its replacement are lost", chain, 1, "b", "b3")
	try("the last is lost", chain, 2, "c")
	try("the last is lost and nobody else holds it", chain, 2, "c", "c2")
	try("a whole replica is lost", []Window{q.Windows[8]}, 0, "w")
	try("a stage that is not there", chain, 3)
	golden(t, "mend.golden", out.Bytes())
}

// TestChainIsTheBest compares with every possible chain.
func TestChainIsTheBest(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	found := 0
	for range 300 {
		q := ChainQuery{Layers: 6, Entry: "p0"}
		for i := range 3 + rng.IntN(9) {
			begin := rng.IntN(6)
			q.Windows = append(q.Windows, Window{
				Peer: fmt.Sprint("p", i%7), Layers: gguf.Range{Begin: begin, End: begin + 1 + rng.IntN(6-begin)},
				Slots: 4, Free: rng.IntN(5), Token: time.Duration(1+rng.IntN(50)) * time.Millisecond, Batched: time.Millisecond,
			})
		}
		var table [49]time.Duration
		for i := range table {
			table[i] = time.Duration(rng.IntN(60)) * time.Millisecond
		}
		q.RTT = func(a, b string) (time.Duration, bool) {
			x, y := int(a[1]-'0'), int(b[1]-'0')
			return table[min(x, y)*7+max(x, y)], true
		}
		want := time.Duration(math.MaxInt64)
		var extend func(chain []Window, at int)
		extend = func(chain []Window, at int) {
			if at == q.Layers {
				round, err := Round(q, chain)
				if err != nil {
					t.Fatal(err)
				}
				want = min(want, round)
			}
			for _, w := range q.Windows {
				if w.Free > 0 && w.Layers.Begin == at {
					extend(append(chain[:len(chain):len(chain)], w), w.Layers.End)
				}
			}
		}
		extend(nil, 0)
		chain, err := Chain(q)
		if err != nil {
			if want != math.MaxInt64 {
				t.Fatalf("%v, but there is a chain of %v", err, want)
			}
			continue
		}
		found++
		if got, err := Round(q, chain); err != nil || got != want {
			t.Fatalf("chain %v takes %v, the best %v", chain, got, want)
		}
	}
	if found < 50 {
		t.Errorf("only %d of the queries have a chain: the test says little", found)
	}
}

// TestChainOfMany is about time: a network of hundreds, and one that lies.
func TestChainOfMany(t *testing.T) {
	for _, tt := range []struct {
		name       string
		n, layers  int
		begin, end func(i int) int
	}{
		{"200 windows of 1 to 20 layers", 200, 48, func(i int) int { return i * 7 % 48 }, func(i int) int { return i*7%48 + 1 + i%20 }},
		{"200 windows of one layer", 200, 48, func(i int) int { return i % 48 }, func(i int) int { return i%48 + 1 }},
		{"5000 windows, all ranges there are", 5000, 96, func(i int) int { return i % 96 }, func(i int) int { return i%96 + 1 + i/96 }},
		{"5000 holders of three windows", 5000, 48, func(i int) int { return i % 3 * 16 }, func(i int) int { return i%3*16 + 16 }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			q := ChainQuery{Layers: tt.layers, Entry: "entry", RTT: func(a, b string) (time.Duration, bool) {
				return time.Duration(len(a)*len(b)) * time.Millisecond, true
			}}
			for i := range tt.n {
				q.Windows = append(q.Windows, Window{Peer: fmt.Sprint("peer", i), Slots: 1, Free: 1,
					Token: time.Duration(1 + i%17), Layers: gguf.Range{Begin: tt.begin(i), End: min(tt.layers, tt.end(i))}})
			}
			began := time.Now()
			chain, err := Chain(q)
			if err != nil {
				t.Fatal(err)
			}
			at := 0
			for _, w := range chain {
				if w.Layers.Begin != at {
					t.Fatalf("chain %v does not tile", chain)
				}
				at = w.Layers.End
			}
			if at != tt.layers {
				t.Fatalf("chain %v ends at %d", chain, at)
			}
			if took := time.Since(began); took > 20*time.Second {
				t.Errorf("it took %v", took)
			}
		})
	}
}

func TestChainRefuses(t *testing.T) {
	if _, err := Chain(ChainQuery{}); err == nil {
		t.Error("a model without layers has a chain")
	}
	if _, err := Round(ChainQuery{}, nil); err == nil {
		t.Error("an empty chain has a round")
	}
	_, err := Chain(ChainQuery{Layers: 4, Windows: []Window{window(t, "a 0:2")}})
	var none *NoChainError
	if !errors.As(err, &none) || !slices.Equal(none.Missing, []gguf.Range{{Begin: 2, End: 4}}) {
		t.Errorf("error %v", err)
	}
	huge := func(a, b string) (time.Duration, bool) { return math.MaxInt64, true }
	q := ChainQuery{Layers: 2, RTT: huge, Windows: []Window{
		{Peer: "a", Layers: gguf.Range{End: 1}, Slots: math.MaxInt, Free: 1, Token: math.MaxInt64, Batched: math.MaxInt64},
		{Peer: "b", Layers: gguf.Range{Begin: 1, End: 2}, Slots: 1, Free: 1, Token: math.MaxInt64},
	}}
	chain, err := Chain(q)
	if err != nil {
		t.Fatal(err)
	}
	if round, err := Round(q, chain); err != nil || round <= 0 {
		t.Errorf("a round of %v, %v", round, err)
	}
}
