package plan

import (
	"fmt"
	"math"
	"time"
)

// Rate is a predicted speed and what takes most of the time.
type Rate struct {
	TokensPerSecond float64 `json:"tokens_per_second"`
	Limit           string  `json:"limit"`
}

// cause is what takes time.
type cause string

const (
	ofMemory   cause = "memory bandwidth"
	ofDevice   cause = "GPU memory bandwidth"
	ofLayers   cause = "the fixed cost of layers"
	ofContext  cause = "reading the context"
	ofLinks    cause = "round trips of the ring"
	ofAsking   cause = "asking for experts in each layer"
	ofExperts  cause = "computing experts"
	ofTransfer cause = "sending rows"
)

// cost is a time taken apart by what takes it, and where.
type cost []part

type part struct {
	cause   cause
	where   string // a node
	to      string // the other end of a link, or ""
	seconds float64
}

func (c *cost) add(p part) {
	for i, o := range *c {
		if o.cause == p.cause && o.where == p.where && o.to == p.to {
			(*c)[i].seconds += p.seconds
			return
		}
	}
	*c = append(*c, p)
}

func (c *cost) join(o cost) {
	for _, p := range o {
		c.add(p)
	}
}

func (c cost) total() (sum float64) {
	for _, p := range c {
		sum += p.seconds
	}
	return sum
}

// rate is the speed at which tokens come when so many take this long together.
func (c cost) rate(tokens float64) Rate {
	total := c.total()
	if total <= 0 {
		return Rate{}
	}
	sums := map[cause]float64{}
	most := cause("")
	for _, p := range c {
		sums[p.cause] += p.seconds
		if sums[p.cause] > sums[most] {
			most = p.cause
		}
	}
	worst := part{}
	places := 0
	for _, p := range c {
		if p.cause == most {
			places++
			if p.seconds > worst.seconds {
				worst = p
			}
		}
	}
	text := fmt.Sprintf("%s: %s", most, worst.place())
	if places > 1 {
		text += " most"
	}
	return Rate{TokensPerSecond: tokens / total, Limit: fmt.Sprintf("%s (%.0f %% of the time)", text, 100*sums[most]/total)}
}

func (p part) place() string {
	if p.to == "" {
		return p.where
	}
	return p.where + " - " + p.to
}

// weights is the time for the weights of a layer or the head: some rows by all of
// them.
func (s Speed) weights(bytes int64, rows float64) float64 {
	return float64(bytes) * (1/s.Bytes + max(0, rows-1)/s.Batch)
}

// experts is the time for pairs of rows and experts that meet some experts.
func (s Speed) experts(expert int64, distinct, pairs float64) float64 {
	return float64(expert) * (distinct/s.Bytes + max(0, pairs-distinct)/s.Batch)
}

// distinct is how many experts some rows meet when each picks so many at random.
func distinct(used, experts int, rows float64) float64 {
	if experts == 0 {
		return 0
	}
	return float64(experts) * (1 - math.Pow(1-float64(used)/float64(experts), rows))
}

// time is what a step of some rows costs on a node, without what it asks of others.
func (q *Query) time(f *fitted, rows float64) cost {
	var c cost
	on := func(isGPU bool) (Speed, cause) {
		if isGPU {
			return f.node.GPU, ofDevice
		}
		return f.node.CPU, ofMemory
	}
	for i := f.load.window.Begin; i < f.load.window.End; i++ {
		l := q.Model.Layers[i]
		s, what := on(i >= f.gpu)
		c.add(part{what, f.Node, "", s.weights(l.Dense, rows)})
		c.add(part{ofLayers, f.Node, "", s.Layer.Seconds()})
		c.add(part{ofContext, f.Node, "", rows * float64(q.seen(l)) / s.Bytes})
		if f.load.experts && l.Expert > 0 {
			s, what := on(i >= f.gpu && i < f.spread)
			c.add(part{what, f.Node, "", s.experts(l.Expert, distinct(l.Used, q.Model.Experts, rows), rows*float64(l.Used))})
		}
	}
	if q.last(f.load) {
		s, what := on(f.headOnGPU() && f.gpu < f.load.window.End)
		c.add(part{what, f.Node, "", s.weights(q.Model.Head, rows)})
	}
	return c
}

// seen are the bytes of context that a row of a layer reads, at the filling that
// speeds are predicted for.
func (q *Query) seen(l Layer) int64 {
	cells := q.Filled
	if l.Slide > 0 {
		cells = min(cells, l.Slide)
	}
	return int64(cells)*l.KV + 2*l.State // read and written
}

// link is the time of a message one way between two nodes, with what it carries.
func (q *Query) link(a, b Node, bytes float64, c *cost) {
	if a.Name == b.Name {
		return
	}
	seconds := q.rtt(a, b).Seconds()/2 + max(a.Call, b.Call).Seconds()/2
	c.add(part{ofLinks, min(a.Name, b.Name), max(a.Name, b.Name), seconds})
	c.add(part{ofTransfer, min(a.Name, b.Name), max(a.Name, b.Name), bytes / min(a.Up, b.Down)})
}

func (q *Query) rtt(a, b Node) time.Duration {
	if q.RTT != nil {
		if d, ok := q.RTT(a.Name, b.Name); ok && d >= 0 {
			return min(d, longest)
		}
	}
	return UnknownRTT
}

// rowBytes are a row of activations on the wire.
func (q *Query) rowBytes() float64 { return 4 * float64(q.Model.Width) }
