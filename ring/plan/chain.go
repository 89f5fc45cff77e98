package plan

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"kvasird/ggml/gguf"
)

// What is taken for something that was not measured: worse than most of what
// is, so that a known link or stage is preferred, and not so bad that a ring
// avoids a newcomer at any price.
const (
	UnknownRTT   = 200 * time.Millisecond
	UnknownLayer = 10 * time.Millisecond // compute of one token in one layer
)

// longest is what a longer time counts as, so that sums do not overflow.
const longest = time.Hour

// Limits of a search: what is left out are the slowest holders of a window, then
// the shortest windows. They bound Chain to some 10 million steps.
const (
	maxHolders = 16 // of one and the same range of layers
	maxWindows = 512
)

// Window says that a peer holds consecutive layers of a model, loaded and ready.
type Window struct {
	Peer        string
	Layers      gguf.Range
	Slots, Free int // sequences that it can hold, and that it can still take

	// Token is the compute of a step with one token, Batched is what every
	// further token of the step adds. Zero means not measured: UnknownLayer for
	// each layer, and as much as Token.
	Token, Batched time.Duration
}

// step is the compute that one more sequence waits for in every round.
func (w Window) step() time.Duration {
	token := w.Token
	if token <= 0 {
		token = time.Duration(w.Layers.Len()) * UnknownLayer
	}
	batched := w.Batched
	if batched <= 0 {
		batched = token
	}
	busy := min(max(0, w.Slots-w.Free), 1<<10)
	return min(token, longest) + time.Duration(busy)*min(batched, longest)
}

func (w Window) String() string { return w.Peer + " " + w.Layers.String() }

// ChainQuery asks for a chain.
type ChainQuery struct {
	Layers  int      // of the model: a chain tiles [0, Layers)
	Windows []Window // that are known; what cannot be part of a chain is ignored
	Entry   string   // the peer that asks
	Avoid   []string // peers that failed, or are suspected

	// RTT returns the round trip between two different peers, in either order;
	// false: not known, see UnknownRTT. Nil: nothing is known.
	RTT func(a, b string) (time.Duration, bool)
}

// NoChainError says why no chain covers a model. Each range of layers is in one
// of the lists at most: whoever waits for a slot need not wait for a holder.
type NoChainError struct {
	Missing []gguf.Range // nobody holds
	Avoided []gguf.Range // only avoided peers hold
	Busy    []gguf.Range // every holder's slots are taken
	// Reached is set when every layer can be had, but windows do not meet: chains
	// from layer 0 end here at best, where no usable window begins.
	Reached int
}

// Error names the layers.
func (e *NoChainError) Error() string {
	var parts []string
	for _, p := range []struct {
		list []gguf.Range
		what string
	}{{e.Missing, "nobody holds"}, {e.Avoided, "only peers that failed hold"}, {e.Busy, "no free slot is left for"}} {
		if len(p.list) > 0 {
			parts = append(parts, p.what+" layers "+rangesText(p.list))
		}
	}
	if len(parts) == 0 {
		parts = append(parts, fmt.Sprintf("the windows overlap but do not meet: none that could follow begins at layer %d", e.Reached))
	}
	return "no chain of windows: " + strings.Join(parts, "; ")
}

func rangesText(list []gguf.Range) string {
	texts := make([]string, len(list))
	for i, r := range list {
		texts[i] = r.String()
	}
	return strings.Join(texts, ", ")
}

// Chain returns the windows, in order, whose round is expected to be the
// fastest: for one token the compute of every stage, half the round trip of
// every link, the closing one from the last stage to the first included, and of
// the way from the entry. Of equals it takes the one with fewer stages. The
// error is a *NoChainError when there is none.
func Chain(q ChainQuery) ([]Window, error) {
	if q.Layers <= 0 {
		return nil, fmt.Errorf("a chain for a model of %d layers", q.Layers)
	}
	s := newSearch(q, gguf.Range{End: q.Layers})
	best := path{}
	for i, first := range s.windows {
		if first.Layers.Begin > 0 {
			break // they are ordered
		}
		p := s.shortest(s.goal,
			func(w int) (time.Duration, bool) { return s.link(s.entry, s.peer[w]), w == i },
			func(w int) time.Duration { return s.link(s.peer[w], s.peer[i]) })
		if p.less(best) {
			best = p
		}
	}
	if best.windows == nil {
		return nil, s.explain()
	}
	return s.pick(best), nil
}

// Mend replaces one stage of a chain, by one window or several, at the least
// expected time of the round; the others stay where they are. It returns the
// whole new chain. The caller puts the lost peer in Avoid.
func Mend(q ChainQuery, chain []Window, lost int) ([]Window, error) {
	if lost < 0 || lost >= len(chain) {
		return nil, fmt.Errorf("stage %d of a chain of %d", lost, len(chain))
	}
	if len(chain) == 1 {
		return Chain(q)
	}
	s := newSearch(q, chain[lost].Layers, chain...)
	before := s.number(chain[(lost+len(chain)-1)%len(chain)].Peer)
	after := s.number(chain[(lost+1)%len(chain)].Peer)
	best := s.shortest(s.goal,
		func(w int) (time.Duration, bool) {
			d := s.link(before, s.peer[w])
			if lost == 0 {
				d += s.link(s.entry, s.peer[w])
			}
			return d, true
		},
		func(w int) time.Duration { return s.link(s.peer[w], after) })
	if best.windows == nil {
		return nil, s.explain()
	}
	return slices.Concat(chain[:lost], s.pick(best), chain[lost+1:]), nil
}

// Round is the expected time of one token's round through a chain, as Chain
// counts it.
func Round(q ChainQuery, chain []Window) (time.Duration, error) {
	if len(chain) == 0 {
		return 0, errors.New("an empty chain")
	}
	s := newSearch(ChainQuery{Entry: q.Entry, RTT: q.RTT}, gguf.Range{}, chain...)
	sum := s.link(s.number(q.Entry), s.number(chain[0].Peer))
	for i, w := range chain {
		sum += w.step() + s.link(s.number(w.Peer), s.number(chain[(i+1)%len(chain)].Peer))
	}
	return sum, nil
}

// search is a shortest path problem over windows.
type search struct {
	query   ChainQuery
	goal    gguf.Range
	windows []Window // usable, by first layer
	peer    []int    // of each window: its number
	entry   int
	names   []string        // of peers, by number
	ending  map[int][]int   // windows by the layer that they end before
	oneWay  []time.Duration // between peers a and b at a*len(names)+b; -1: not asked for yet
}

// newSearch prepares a search for windows within goal, among peers that those of
// neighbours are added to.
func newSearch(q ChainQuery, goal gguf.Range, neighbours ...Window) *search {
	s := &search{query: q, goal: goal}
	for _, w := range q.Windows {
		if s.fits(w) && w.Free > 0 && !slices.Contains(q.Avoid, w.Peer) {
			s.windows = append(s.windows, w)
		}
	}
	s.limit()
	s.ending = map[int][]int{}
	for i, w := range s.windows {
		s.peer = append(s.peer, s.number(w.Peer))
		s.ending[w.Layers.End] = append(s.ending[w.Layers.End], i)
	}
	for _, w := range neighbours {
		s.number(w.Peer)
	}
	s.entry = s.number(q.Entry)
	s.oneWay = slices.Repeat([]time.Duration{-1}, len(s.names)*len(s.names))
	return s
}

func (s *search) fits(w Window) bool { return w.Layers.Len() > 0 && s.goal.Covers(w.Layers) }

// limit orders the windows and leaves out the least promising of too many: first
// the slower holders of the same layers, then the shortest windows.
func (s *search) limit() {
	slices.SortFunc(s.windows, func(a, b Window) int {
		return cmp.Or(cmp.Compare(a.Layers.Begin, b.Layers.Begin), cmp.Compare(a.Layers.End, b.Layers.End),
			cmp.Compare(a.step(), b.step()), cmp.Compare(a.Peer, b.Peer))
	})
	for holders := maxHolders; ; holders /= 2 {
		same := 0
		var kept []Window
		for i, w := range s.windows {
			if same++; i == 0 || s.windows[i-1].Layers != w.Layers {
				same = 1
			}
			if same <= holders {
				kept = append(kept, w)
			}
		}
		if len(kept) <= maxWindows || holders == 1 {
			s.windows = kept
			break
		}
	}
	if len(s.windows) > maxWindows {
		inOrder := func(a, b Window) int {
			return cmp.Or(cmp.Compare(a.Layers.Begin, b.Layers.Begin), cmp.Compare(a.Layers.End, b.Layers.End))
		}
		slices.SortStableFunc(s.windows, func(a, b Window) int { return cmp.Compare(b.Layers.Len(), a.Layers.Len()) })
		s.windows = s.windows[:maxWindows]
		slices.SortFunc(s.windows, inOrder) // ranges differ by now
	}
}

// number gives each peer a small number.
func (s *search) number(peer string) int {
	if i := slices.Index(s.names, peer); i >= 0 {
		return i
	}
	s.names = append(s.names, peer)
	return len(s.names) - 1
}

// link is the expected one-way time between two peers, by number.
func (s *search) link(a, b int) time.Duration {
	if a == b {
		return 0
	}
	at := min(a, b)*len(s.names) + max(a, b)
	if s.oneWay[at] < 0 {
		rtt := UnknownRTT
		if s.query.RTT != nil {
			if d, ok := s.query.RTT(s.names[a], s.names[b]); ok && d >= 0 {
				rtt = d
			}
		}
		s.oneWay[at] = min(rtt, longest) / 2
	}
	return s.oneWay[at]
}

// path is a way through the windows, by index.
type path struct {
	windows []int
	cost    time.Duration
}

// less prefers any path to none, then the faster, then the shorter.
func (p path) less(o path) bool {
	if (p.windows == nil) != (o.windows == nil) {
		return p.windows != nil
	}
	if p.cost != o.cost {
		return p.cost < o.cost
	}
	return len(p.windows) < len(o.windows)
}

// shortest returns the cheapest path that tiles a range of layers. enter is the
// cost of beginning with a window, or false where that is not allowed, leave that
// of ending with it.
func (s *search) shortest(goal gguf.Range, enter func(int) (time.Duration, bool), leave func(int) time.Duration) path {
	cost := make([]time.Duration, len(s.windows)) // up to and with the window
	hops := make([]int, len(s.windows))           // 0: not reached
	from := make([]int, len(s.windows))
	var best path
	last := -1
	for i, w := range s.windows { // a predecessor begins earlier, so it comes earlier
		if w.Layers.Begin == goal.Begin {
			if d, ok := enter(i); ok {
				cost[i], hops[i], from[i] = d+w.step(), 1, -1
			}
		}
		for _, j := range s.ending[w.Layers.Begin] {
			if hops[j] == 0 {
				continue
			}
			d := cost[j] + s.link(s.peer[j], s.peer[i]) + w.step()
			if hops[i] == 0 || d < cost[i] || d == cost[i] && hops[j]+1 < hops[i] {
				cost[i], hops[i], from[i] = d, hops[j]+1, j
			}
		}
		if hops[i] == 0 || w.Layers.End != goal.End {
			continue
		}
		p := path{windows: make([]int, hops[i]), cost: cost[i] + leave(i)}
		if p.less(best) {
			best, last = p, i
		}
	}
	for n := len(best.windows) - 1; n >= 0; n-- {
		best.windows[n], last = last, from[last]
	}
	return best
}

func (s *search) pick(p path) []Window {
	chain := make([]Window, len(p.windows))
	for i, w := range p.windows {
		chain[i] = s.windows[w]
	}
	return chain
}

// explain says why there is no path.
func (s *search) explain() error {
	const (
		missing = iota
		avoided
		busy
		usable
	)
	state := make([]int, s.goal.Len())
	for _, w := range s.query.Windows {
		if !s.fits(w) {
			continue
		}
		is := usable
		switch {
		case slices.Contains(s.query.Avoid, w.Peer):
			is = avoided
		case w.Free <= 0:
			is = busy
		}
		for l := w.Layers.Begin; l < w.Layers.End; l++ {
			state[l-s.goal.Begin] = max(state[l-s.goal.Begin], is)
		}
	}
	lists := make([][]gguf.Range, usable+1)
	for i := 0; i < len(state); {
		end := i + 1
		for end < len(state) && state[end] == state[i] {
			end++
		}
		lists[state[i]] = append(lists[state[i]], gguf.Range{Begin: s.goal.Begin + i, End: s.goal.Begin + end})
		i = end
	}
	return &NoChainError{Missing: lists[missing], Avoided: lists[avoided], Busy: lists[busy], Reached: s.reached()}
}

// reached is the highest layer at which a chain from the first one can end.
func (s *search) reached() int {
	at := map[int]bool{s.goal.Begin: true}
	far := s.goal.Begin
	for _, w := range s.windows {
		if at[w.Layers.Begin] {
			at[w.Layers.End] = true
			far = max(far, w.Layers.End)
		}
	}
	return far
}
