package experts

import (
	"cmp"
	"slices"
)

// span is the experts [from, to) of one layer. Lists of spans are ascending and do not overlap.
type span struct{ from, to int32 }

// spansOf is what some slices have of a layer.
func spansOf(list []Slice, layer int) []span {
	var all []span
	for _, s := range list {
		if s.FirstLayer <= layer && layer < s.EndLayer {
			all = append(all, span{int32(s.FirstExpert), int32(s.EndExpert)})
		}
	}
	return union(all, nil)
}

// union is what is in a or b, which need not be in order.
func union(a, b []span) (out []span) {
	all := slices.Concat(a, b)
	slices.SortFunc(all, func(x, y span) int { return cmp.Compare(x.from, y.from) })
	for _, s := range all {
		if n := len(out); n > 0 && s.from <= out[n-1].to {
			out[n-1].to = max(out[n-1].to, s.to)
			continue
		}
		out = append(out, s)
	}
	return out
}

// intersect is what is in a and b.
func intersect(a, b []span) (out []span) {
	for _, x := range a {
		for _, y := range b {
			if s := (span{max(x.from, y.from), min(x.to, y.to)}); s.from < s.to {
				out = append(out, s)
			}
		}
	}
	return out
}

// subtract is what is in a but not in b.
func subtract(a, b []span) (out []span) {
	for _, x := range a {
		for _, y := range b {
			if y.from > x.from && y.from < x.to {
				out = append(out, span{x.from, y.from})
			}
			if y.from <= x.from && y.to > x.from || y.from > x.from && y.from < x.to {
				x.from = min(x.to, y.to)
			}
		}
		if x.from < x.to {
			out = append(out, x)
		}
	}
	return out
}

func contains(list []span, expert int32) bool {
	return slices.ContainsFunc(list, func(s span) bool { return s.from <= expert && expert < s.to })
}
