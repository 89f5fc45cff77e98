package experts

import (
	"fmt"
	"slices"
	"time"
)

// Where a worker has several of a token's experts it can answer with the sum of their rows,
// weighted by the router, in place of the rows. With all of them, in f32, that is what the backbone
// would make of the rows, bit for bit; with some of them the sum is regrouped, and only asked for
// where rows need not be exact either (Config.Precision). A sum is taken whole or not at all.

// Sums says whether workers are asked for sums.
type Sums uint8

const (
	SumsAuto Sums = iota // where the rows would take long to come, see latency.narrow
	SumsOn               // wherever a worker has several experts of a token
	SumsOff
)

var sumsNames = []string{"auto", "on", "off"}

func (s Sums) String() string { return sumsNames[s] }

// ParseSums reads "auto", "on" or "off".
func ParseSums(name string) (Sums, error) {
	if i := slices.Index(sumsNames, name); i >= 0 {
		return Sums(i), nil
	}
	return 0, fmt.Errorf("sums %q: want auto, on or off", name)
}

// extent is of which tokens a worker is asked for sums.
type extent uint8

const (
	sumsOfNone  extent = iota
	sumsOfWhole        // of which it computes all pairs
	sumsOfAll
)

// What Call.Out has at a pair.
const (
	isRow  uint8 = iota
	isSum        // of it and of the pairs after it that are in it
	inASum       // nothing
)

// infinite is the bits of the lowest number that is not finite.
const infinite = 0x7f800000

// addWeighted adds the product of a row and a weight to a sum of the same width, or begins it. The
// conversions keep products and sums apart: fused, they would be rounded once.
func addWeighted(sum, row []float32, weight float32, begins bool) {
	sum = sum[:len(row)]
	if begins {
		for i, x := range row {
			sum[i] = x * weight
		}
		return
	}
	for i, x := range row {
		sum[i] += float32(x * weight)
	}
}

// sumRows makes of the rows of pairs, in place, the sums that a call asks for.
func (c *callFrame) sumRows(out []float32, width int) []float32 {
	for i, r := range c.row {
		addWeighted(out[int(r)*width:][:width], out[i*width:][:width], c.weight[i], i == 0 || c.row[i-1] != r)
	}
	return out[:c.rows*width]
}

// answers is the rows of the answer to a call.
func (c *callFrame) answers() int {
	if c.sums {
		return c.rows
	}
	return len(c.row)
}

// addUp makes Call.Sum of what is in Call.Out.
func (r *run) addUp() {
	c, w := r.call, r.call.OutWidth
	for p, weight := range c.Weights {
		if r.has[p] == inASum {
			continue
		}
		if r.has[p] == isSum {
			weight = 1
		}
		addWeighted(c.Sum[p/c.Used*w:][:w], c.Out[p*w:][:w], weight, p%c.Used == 0)
	}
	c.Summed = true
}

// sumsFrom says of which tokens a peer is to be asked for sums.
func (r *run) sumsFrom(s *session, peer int32) extent {
	c, cfg := r.call, &r.d.cfg
	if !r.weighted || cfg.Sums == SumsOff || c.Used > min(s.offer.MaxPairs, MaxFrame/(4*c.OutWidth)) {
		return sumsOfNone
	}
	most := sumsOfWhole
	if cfg.Precision != F32 {
		most = sumsOfAll
	}
	saved := 0 // rows
	for i := range r.pending {
		if n := r.together(i, peer); r.beginsToken(i) && (n == c.Used || n > 1 && most == sumsOfAll) {
			saved += n - 1
		}
	}
	// Sums are not audited, and how fast an answer comes is the worker's choice.
	if saved == 0 || cfg.Sums == SumsAuto && (cfg.AuditInterval > 0 || !s.lat.narrow(s.precision.size(saved, c.OutWidth))) {
		return sumsOfNone
	}
	return most
}

// beginsToken says whether a pending pair is the first of its token.
func (r *run) beginsToken(i int) bool {
	return i == 0 || r.call.source(r.pending[i-1]) != r.call.source(r.pending[i])
}

// together counts the pending pairs of one token, from the i-th on, that a peer is to compute.
func (r *run) together(i int, peer int32) (n int) {
	from := r.call.source(r.pending[i])
	for ; i < len(r.pending) && r.call.source(r.pending[i]) == from; i++ {
		if r.choice[i] == peer {
			n++
		}
	}
	return n
}

// pace learns how fast frames come: from what comes of a frame after its first piece.
type pace struct {
	first, last time.Time // when a piece came
	early       int       // bytes of the first one
	bytes       int       // of all
}

// came takes in a piece; begins says that nothing of its frame came before.
func (p *pace) came(n int, begins bool) {
	p.last = time.Now()
	if begins {
		*p = pace{first: p.last, last: p.last, early: n}
	}
	p.bytes += n
}

// leastPaced bounds the bytes that say something about the rate.
const leastPaced = 4 << 10

// perByte is what a byte took; 0: unknown.
func (p *pace) perByte() float64 {
	if n := p.bytes - p.early; n >= leastPaced {
		return float64(p.last.Sub(p.first)) / float64(n)
	}
	return 0
}
