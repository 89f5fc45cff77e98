package node

import (
	"errors"
	"io"
	"math"
	"net"
	"testing"
	"time"
)

// TestLineRate: a line carries no more than its rate, in both directions at once, and what a
// write brings is there when the line has carried all before it.
func TestLineRate(t *testing.T) {
	const rate, size = 1e6, 50_000
	near, far, err := linePair(2*time.Millisecond, rate)
	if err != nil {
		t.Fatal(err)
	}
	defer near.Close()
	defer far.Close()
	began := time.Now()
	for _, c := range []io.Writer{near, far} {
		for range 2 {
			if _, err := c.Write(make([]byte, size)); err != nil {
				t.Fatal(err)
			}
		}
	}
	for _, c := range []io.Reader{far, near} {
		if _, err := io.ReadFull(c, make([]byte, 2*size)); err != nil {
			t.Fatal(err)
		}
	}
	if took, least := time.Since(began), 101*time.Millisecond; took < least {
		t.Errorf("100 kB took %v at 1 MB/s and 1 ms, want at least %v", took, least)
	} else if took > 2*time.Second {
		t.Errorf("100 kB took %v at 1 MB/s", took)
	}
}

// TestCompareLogits has distributions whose divergence is known.
func TestCompareLogits(t *testing.T) {
	ln := func(x float64) float32 { return float32(math.Log(x)) }
	d := compareLogits(
		[][]float32{{ln(0.5), ln(0.5)}, {ln(0.8), ln(0.2)}},
		[][]float32{{ln(0.25), ln(0.75)}, {ln(0.8), ln(0.2)}},
	)
	kl := 0.5*math.Log(2) + 0.5*math.Log(0.5/0.75)
	for _, v := range []struct {
		name      string
		got, want float64
	}{
		{"largest", d.largest, math.Log(2)}, {"largest KL", d.mostKL, kl}, {"mean KL", d.meanKL, kl / 2}, {"same best", d.sameBest, 0.5},
		{"rms", d.rms, math.Sqrt((math.Pow(math.Log(2), 2) + math.Pow(math.Log(1.5), 2)) / 4)},
	} {
		if math.Abs(v.got-v.want) > 1e-6 {
			t.Errorf("%s: got %g, want %g", v.name, v.got, v.want)
		}
	}
}

// A line with a rate holds back who writes faster, and lets go when it is closed.
func TestLineHoldsBack(t *testing.T) {
	near, far, err := linePair(2*time.Millisecond, 1)
	if err != nil {
		t.Fatal(err)
	}
	defer far.Close()
	failed := make(chan error, 1)
	go func() {
		if n, err := near.Write(make([]byte, lineBuffer)); n != lineBuffer || err != nil {
			t.Errorf("wrote %d bytes, %v", n, err)
		}
		_, err := near.Write(make([]byte, 1))
		failed <- err
	}()
	select {
	case err := <-failed:
		t.Errorf("a line that is full took more: %v", err)
	case <-time.After(50 * time.Millisecond):
	}
	if err := near.Close(); err != nil {
		t.Error(err)
	}
	if err := <-failed; !errors.Is(err, net.ErrClosed) {
		t.Errorf("%v, want %v", err, net.ErrClosed)
	}
}
