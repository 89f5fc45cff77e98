//go:build cgo && linux

package node

import (
	"bytes"
	"context"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"kvasird/experts"
	"kvasird/ggml"
	"kvasird/ggml/gguf"
	"kvasird/ggml/tiny"
)

// echo answers every connection to an address with what it says, until the test ends.
func echo(t *testing.T) (addr string) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				io.Copy(c, c)
				c.Close()
			}()
		}
	}()
	return l.Addr().String()
}

// Through a proxy everything arrives, in order, a round trip later; what loses every
// packet stalls for each write; and the end of either side is the end of the other.
func TestLineProxy(t *testing.T) {
	for _, test := range []struct {
		name        string
		line        line
		least, most time.Duration // of a round trip
	}{
		{"nothing between", line{}, 0, 50 * time.Millisecond},
		{"long", line{rtt: 60 * time.Millisecond}, 60 * time.Millisecond, 150 * time.Millisecond},
		{"loses all", line{loss: 1}, 2 * lineStall, 2*lineStall + 150*time.Millisecond},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			p, err := openProxy(echo(t), test.line)
			if err != nil {
				t.Fatal(err)
			}
			defer p.Close()
			c, err := net.Dial("tcp", p.addr())
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			c.SetDeadline(time.Now().Add(time.Minute))
			said, heard := bytes.Repeat([]byte("abcdefg"), 100), make([]byte, 700)
			var fastest time.Duration = time.Hour // the machine may be busy once
			for range 3 {
				began := time.Now()
				if _, err := c.Write(said); err != nil {
					t.Fatal(err)
				}
				if _, err := io.ReadFull(c, heard); err != nil || !bytes.Equal(said, heard) {
					t.Fatalf("heard %q, %v", heard, err)
				}
				fastest = min(fastest, time.Since(began))
			}
			if fastest < test.least || fastest > test.most {
				t.Errorf("a round trip took %v, want %v to %v", fastest, test.least, test.most)
			}
			if err := p.Close(); err != nil {
				t.Error(err)
			}
			if _, err := c.Read(heard); err == nil {
				t.Error("the connection outlives the proxy")
			}
		})
	}
}

func TestPickExperts(t *testing.T) {
	const count, used, tokens = 32, 4, 4000
	for _, skewed := range []bool{false, true} {
		rng, ids, hits := rand.New(rand.NewPCG(1, 2)), make([]int32, used), make([]int, count)
		for range tokens {
			pickExperts(rng, ids, count, skewed)
			for i, id := range ids {
				if id < 0 || id >= count || slices.Contains(ids[:i], id) {
					t.Fatalf("picked %v of %d", ids, count)
				}
				hits[id]++
			}
		}
		share := float64(hits[0]) / tokens // of the tokens that go to the first
		if low, high := slices.Min(hits), slices.Max(hits); !skewed && (share < 0.1 || share > 0.15 || high > 2*low) ||
			skewed && (share < 0.5 || hits[0] < 8*hits[count-1]) {
			t.Errorf("skewed %v: %v", skewed, hits)
		}
	}
}

func TestMostUsed(t *testing.T) {
	one := func(layer, expert int) gguf.Slice {
		return gguf.Slice{Layers: gguf.Range{Begin: layer, End: layer + 1}, Experts: gguf.Range{Begin: expert, End: expert + 1}}
	}
	got := mostUsed([][]uint64{{1, 9, 3, 4}, {}, {5}}, 2)
	if want := []gguf.Slice{one(0, 1), one(0, 3), one(2, 0)}; !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}

func TestWanted(t *testing.T) {
	for _, test := range []struct {
		got  []string
		want string
	}{
		{atLeast(1.3, 1.3), "≥ 1.3 met"}, {atLeast(1.29, 1.3), "≥ 1.3 short"},
		{atMost(80, 80), "≤ 80 met"}, {atMost(81, 80), "≤ 80 short"},
	} {
		if got := strings.Join(test.got, " "); got != test.want {
			t.Errorf("%q, want %q", got, test.want)
		}
	}
}

// What a process computes counts for it, and for the machine.
func TestCPUTime(t *testing.T) {
	own, err := cpuOf(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	machine, err := cpuOfMachine()
	if err != nil {
		t.Fatal(err)
	}
	for began := time.Now(); time.Since(began) < time.Minute; {
		for i := range 1 << 20 {
			_ = i * i
		}
		now, err := cpuOf(os.Getpid())
		if err != nil {
			t.Fatal(err)
		}
		if now-own >= 5*cpuTick {
			break
		}
	}
	ownAfter, err := cpuOf(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	after, err := cpuOfMachine()
	if err != nil {
		t.Fatal(err)
	}
	used := (after.all - after.idle) - (machine.all - machine.idle)
	if ownAfter-own < 5*cpuTick || used < 4*cpuTick || after.idle < machine.idle {
		t.Errorf("own %v, machine %v of %v", ownAfter-own, used, after.all-machine.all)
	}
	if _, err := cpuOf(-1); err == nil {
		t.Error("no error for a process that there is not")
	}
}

// The answers that are timed are those of the model: what is a little off is refused.
func TestLoadChecksAnswers(t *testing.T) {
	rt, err := ggml.Open(ggml.Config{})
	if err != nil {
		t.Fatal(err)
	}
	path, err := tiny.Write(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	b := &bench{BenchOptions: BenchOptions{Threads: 1}, ctx: t.Context(), rt: rt}
	k, err := b.localKernel(path)
	if err != nil {
		t.Fatal(err)
	}
	defer k.Close()
	call, err := b.aCall(path, k.compute)
	if err != nil {
		t.Fatal(err)
	}
	own := ggml.ExpertCall(call)
	if err := k.compute(context.Background(), &own); err != nil {
		t.Fatal(err)
	}
	call = experts.Call(own)
	l := &load{check: k}
	if err := l.compare(t.Context(), &call); err != nil {
		t.Error(err)
	}
	call.Out[len(call.Out)-1] += 0.01 * slices.Max(call.Out)
	if err := l.compare(t.Context(), &call); err == nil {
		t.Error("a wrong answer was accepted")
	}
}
