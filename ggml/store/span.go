package store

import (
	"cmp"
	"iter"
	"math/bits"
	"slices"
)

// Span is a range of bytes of a file: 0 <= Off, 0 < Len.
type Span struct{ Off, Len int64 }

// end returns the offset after the last byte.
func (s Span) end() int64 { return s.Off + s.Len }

// align widens spans of a file to whole groups, clips them to the file, sorts and
// merges them. What is not a range of bytes is left out.
func align(size int64, spans []Span) []Span {
	out := make([]Span, 0, len(spans))
	for _, s := range spans {
		if s.Len <= 0 || s.Off < 0 || s.Off >= size {
			continue
		}
		s.Len = min(s.Len, size-s.Off)
		begin := s.Off / Group * Group
		end := min((s.end()+Group-1)/Group*Group, size)
		out = append(out, Span{begin, end - begin})
	}
	slices.SortFunc(out, func(a, b Span) int { return cmp.Compare(a.Off, b.Off) })
	merged := out[:0]
	for _, s := range out {
		if n := len(merged); n > 0 && s.Off <= merged[n-1].end() {
			merged[n-1].Len = max(merged[n-1].end(), s.end()) - merged[n-1].Off
			continue
		}
		merged = append(merged, s)
	}
	return merged
}

// length returns how many bytes there are in spans that do not overlap.
func length(spans []Span) (n int64) {
	for _, s := range spans {
		n += s.Len
	}
	return n
}

// groupSet is a set of the groups of one file.
type groupSet struct {
	size  int64 // of the file
	words []uint64
	bytes int64 // in the groups of the set
}

func newGroupSet(size int64) *groupSet {
	return &groupSet{size: size, words: make([]uint64, (groupCount(size)+63)/64)}
}

// len returns the bytes of group i.
func (g *groupSet) len(i int) int64 { return min(Group, g.size-int64(i)*Group) }

func (g *groupSet) has(i int) bool { return g.words[i/64]>>(i%64)&1 != 0 }

func (g *groupSet) add(i int) {
	if !g.has(i) {
		g.words[i/64] |= 1 << (i % 64)
		g.bytes += g.len(i)
	}
}

func (g *groupSet) remove(i int) {
	if g.has(i) {
		g.words[i/64] &^= 1 << (i % 64)
		g.bytes -= g.len(i)
	}
}

// union adds the groups of a set of the same file.
func (g *groupSet) union(o *groupSet) {
	for i := range o.each() {
		g.add(i)
	}
}

// intersects reports whether a group is in both of two sets of the same file.
func (g *groupSet) intersects(o *groupSet) bool {
	for i, w := range g.words {
		if w&o.words[i] != 0 {
			return true
		}
	}
	return false
}

func (g *groupSet) fill() {
	for i := range groupCount(g.size) {
		g.add(i)
	}
}

func (g *groupSet) clone() *groupSet {
	return &groupSet{g.size, slices.Clone(g.words), g.bytes}
}

// next returns the first group in [i, end) that is in the set, or is not, as said; end
// if there is none.
func (g *groupSet) next(i, end int, in bool) int {
	for i < end {
		w := g.words[i/64]
		if !in {
			w = ^w
		}
		if w >>= i % 64; w != 0 {
			return min(i+bits.TrailingZeros64(w), end)
		}
		i = (i/64 + 1) * 64
	}
	return end
}

// spans returns what the set holds, or does not hold, within aligned spans.
func (g *groupSet) spans(within []Span, in bool) []Span {
	var out []Span
	for _, s := range within {
		from, to := groupsOf(s)
		for begin := g.next(from, to, in); begin < to; begin = g.next(from, to, in) {
			from = g.next(begin, to, !in)
			off := int64(begin) * Group
			out = append(out, Span{off, min(int64(from)*Group, g.size) - off})
		}
	}
	return out
}

// covers reports whether n bytes at off are in the set.
func (g *groupSet) covers(off, n int64) bool {
	if off < 0 || n < 0 || n > g.size-off {
		return false
	}
	begin, end := groupsOf(Span{off, n})
	return n == 0 || g.next(begin, end, false) == end
}

// each yields the groups of the set.
func (g *groupSet) each() iter.Seq[int] {
	return groupsIn(g.spans([]Span{{0, g.size}}, true))
}

// groupsIn yields the groups that spans touch.
func groupsIn(spans []Span) iter.Seq[int] {
	return func(yield func(int) bool) {
		for _, s := range spans {
			begin, end := groupsOf(s)
			for i := begin; i < end; i++ {
				if !yield(i) {
					return
				}
			}
		}
	}
}

// groupsOf returns the groups [begin, end) that a span touches.
func groupsOf(s Span) (begin, end int) {
	return int(s.Off / Group), int((s.end() + Group - 1) / Group)
}
