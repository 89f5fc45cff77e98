package plan

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"kvasird/ggml/gguf"
)

// Limits of a query.
const (
	MaxNodes     = 64
	MaxContext   = 1 << 24
	MaxSequences = 1024
)

// Query asks how a model could be spread over nodes.
type Query struct {
	Model     Model
	Nodes     []Node
	Cuts      []int  // layers where a window may begin, see gguf.Model.Cuts
	NoCuts    string // why there are none
	Context   int    // tokens of all sequences together
	Sequences int    // that run at once
	Filled    int    // tokens of a sequence when speeds are predicted; 0: half of its share of the context

	// FullWindows: layers with a sliding window keep the whole context all the same,
	// as llama.cpp does by default.
	FullWindows bool

	// RTT returns the round trip between two different nodes, by name, in either
	// order; false: not known, see UnknownRTT. Nil: nothing is known.
	RTT func(a, b string) (time.Duration, bool)

	cells map[cellKey]cell
}

// Kind is a way to run a model.
type Kind string

// The kinds.
const (
	WholeReplica  Kind = "whole replica"
	Ring          Kind = "ring"
	EvenRing      Kind = "ring for many streams" // when that is divided otherwise
	ExpertWorkers Kind = "backbone + expert workers"
	BackboneRing  Kind = "ring of backbones + expert workers"
)

// Candidate is one way to run the model, or why it is none.
type Candidate struct {
	Kind    Kind    `json:"kind"`
	Places  []Place `json:"places,omitempty"`  // stages in order, then workers
	One     Rate    `json:"one,omitzero"`      // one stream alone
	Many    Rate    `json:"many,omitzero"`     // all sequences at once, summed
	Refused string  `json:"refused,omitempty"` // why it should not be used; "": it may
	Missing int64   `json:"missing,omitempty"` // bytes, when it does not fit
}

// Plan is the answer: every way, the best first.
type Plan struct {
	Candidates []Candidate `json:"candidates"`
	Notes      []string    `json:"notes,omitempty"` // what was guessed
}

// Best is the candidate to use: the fastest for one stream of those that are not
// refused. False: the model does not run on these nodes.
func (p *Plan) Best() (Candidate, bool) {
	if len(p.Candidates) == 0 || p.Candidates[0].Refused != "" {
		return Candidate{}, false
	}
	return p.Candidates[0], true
}

func (q *Query) check() error {
	switch {
	case len(q.Model.Layers) == 0 || q.Model.Width <= 0:
		return errors.New("plan: the model is not described")
	case len(q.Nodes) > MaxNodes:
		return fmt.Errorf("plan: %d nodes: at most %d", len(q.Nodes), MaxNodes)
	case q.Sequences < 1 || q.Sequences > MaxSequences:
		return fmt.Errorf("plan: %d sequences: want 1 to %d", q.Sequences, MaxSequences)
	case q.Context < q.Sequences || q.Context > MaxContext:
		return fmt.Errorf("plan: a context of %d tokens for %d sequences: want one for each at the least, and at most %d", q.Context, q.Sequences, MaxContext)
	}
	if q.Filled <= 0 {
		q.Filled = q.Context / q.Sequences / 2
	}
	for i, c := range q.Cuts {
		if c <= 0 || c >= len(q.Model.Layers) || i > 0 && c <= q.Cuts[i-1] {
			return fmt.Errorf("plan: a window that begins at layer %d, of %d: want them ascending, beyond the first", c, len(q.Model.Layers))
		}
	}
	seen := map[string]bool{}
	for _, n := range q.Nodes {
		if err := n.check(); err != nil {
			return fmt.Errorf("plan: %w", err)
		}
		if seen[n.Name] {
			return fmt.Errorf("plan: two nodes are named %s", n.Name)
		}
		seen[n.Name] = true
	}
	return nil
}

// Make compares the ways to run a model. It loads nothing and asks nobody.
func Make(q Query) (*Plan, error) {
	if err := q.check(); err != nil {
		return nil, err
	}
	if len(q.Nodes) == 0 {
		return nil, errors.New("plan: no node to run it on")
	}
	q.cells = map[cellKey]cell{}
	p := &Plan{}
	nodes := make([]Node, len(q.Nodes))
	for i, n := range q.Nodes {
		nodes[i] = n.guess().index(&q.Model)
		if nodes[i].guessedCPU || nodes[i].guessedGPU {
			p.Notes = append(p.Notes, fmt.Sprintf("the speed of %s is not known: it is guessed", n.Name))
		}
	}
	// The fastest come first: prefixes of the list are the sets that are tried.
	slices.SortStableFunc(nodes, func(a, b Node) int { return cmp.Or(cmp.Compare(b.power(), a.power()), cmp.Compare(a.Name, b.Name)) })
	q.Nodes = nodes
	p.Candidates = append(p.Candidates, q.whole())
	p.Candidates = append(p.Candidates, q.rings()...)
	p.Candidates = append(p.Candidates, q.workers(), q.backbones())
	refuseLosing(p.Candidates)
	for i := range p.Candidates {
		q.show(&p.Candidates[i])
	}
	slices.SortStableFunc(p.Candidates, func(a, b Candidate) int {
		if (a.Refused == "") != (b.Refused == "") {
			return cmp.Compare(len(a.Refused), len(b.Refused))
		}
		return cmp.Compare(b.One.TokensPerSecond, a.One.TokensPerSecond)
	})
	return p, nil
}

// power orders nodes: the speed of what it would compute with.
func (n Node) power() float64 {
	if n.device() > 0 {
		return n.GPU.Bytes
	}
	return n.CPU.Bytes
}

// refuseLosing refuses the splits that are slower than not splitting, for one
// stream and for many.
func refuseLosing(list []Candidate) {
	whole := list[0]
	if whole.Refused != "" {
		return
	}
	for i := range list[1:] {
		c := &list[1+i]
		if c.Refused != "" {
			continue
		}
		one, many := c.One.TokensPerSecond/whole.One.TokensPerSecond, c.Many.TokensPerSecond/whole.Many.TokensPerSecond
		if one < 1 && many < worthwhile {
			c.Refused = fmt.Sprintf("slower than not splitting: %.0f %% of its speed for one stream, %.0f %% for many", math.Floor(100*one), math.Floor(100*many))
		}
	}
}

// worthwhile is the gain for many streams from which a split may be slower for one:
// less is within the error of a prediction.
const worthwhile = 1.1

// show numbers the layers as the model's file does, where those for multi-token
// prediction go with the last stage.
func (q *Query) show(c *Candidate) {
	for i := range c.Places {
		if r := &c.Places[i].Layers; r.End == len(q.Model.Layers) && c.Places[i].Role != Worker {
			r.End += q.Model.Extra
		}
	}
}

// whole is a replica on each node that holds all of the model: one stream runs on
// the best of them, many are spread over as many as pay.
func (q *Query) whole() Candidate {
	var fits []*fitted
	var short *NoRoomError
	for _, n := range q.Nodes {
		f, err := q.fit(n, load{Whole, q.all(), true})
		var no *NoRoomError
		if errors.As(err, &no) {
			short = less(short, no)
			continue
		}
		fits = append(fits, f)
	}
	if len(fits) == 0 {
		return refused(WholeReplica, short)
	}
	speed := func(f *fitted) float64 { return 1 / q.time(f, 1).total() }
	slices.SortStableFunc(fits, func(a, b *fitted) int {
		return cmp.Or(cmp.Compare(speed(b), speed(a)), cmp.Compare(a.Download, b.Download))
	})
	c := Candidate{Kind: WholeReplica, One: q.time(fits[0], 1).rate(1)}
	for k := 1; k <= min(len(fits), q.Sequences); k++ {
		step := q.time(fits[k-1], q.share(k)) // of the slowest
		if r := step.rate(float64(q.Sequences)); r.TokensPerSecond > c.Many.TokensPerSecond {
			c.Many = r
			c.Places = append(c.Places, fits[len(c.Places)].Place)
			for len(c.Places) < k {
				c.Places = append(c.Places, fits[len(c.Places)].Place)
			}
		}
	}
	return c
}

// all are the layers that compute.
func (q *Query) all() gguf.Range { return gguf.Range{End: len(q.Model.Layers)} }

// refused is a candidate that does not fit.
func refused(kind Kind, short *NoRoomError) Candidate {
	return Candidate{Kind: kind, Refused: "does not fit: " + short.Error(), Missing: short.Missing}
}
