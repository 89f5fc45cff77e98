package grammar

import (
	"cmp"
	"slices"
	"strings"
)

// runeRange is inclusive on both sides.
type runeRange struct{ low, high rune }

// runeSet is ranges in order that neither overlap nor touch.
type runeSet []runeRange

func setOf(ranges ...runeRange) runeSet {
	s := slices.Clone(ranges)
	slices.SortFunc(s, func(a, b runeRange) int { return cmp.Compare(a.low, b.low) })
	var out runeSet
	for _, r := range s {
		if n := len(out); n > 0 && r.low <= out[n-1].high+1 {
			out[n-1].high = max(out[n-1].high, r.high)
			continue
		}
		out = append(out, r)
	}
	return out
}

// chars makes a set of the characters of s.
func chars(s string) runeSet {
	var ranges []runeRange
	for _, r := range s {
		ranges = append(ranges, runeRange{r, r})
	}
	return setOf(ranges...)
}

// everything is all characters of Unicode; UTF-8 has no surrogates.
var everything = runeSet{{0, 0xD7FF}, {0xE000, 0x10FFFF}}

func (s runeSet) without(t runeSet) runeSet {
	var out runeSet
	for _, r := range s {
		low := r.low
		for _, cut := range t {
			if cut.high < low || cut.low > r.high {
				continue
			}
			if cut.low > low {
				out = append(out, runeRange{low, cut.low - 1})
			}
			low = cut.high + 1
		}
		if low <= r.high {
			out = append(out, runeRange{low, r.high})
		}
	}
	return out
}

func (s runeSet) has(r rune) bool {
	return slices.ContainsFunc(s, func(x runeRange) bool { return x.low <= r && r <= x.high })
}

func (s runeSet) write(b *strings.Builder) {
	b.WriteByte('[')
	for _, r := range s {
		writeRune(b, r.low)
		if r.high > r.low {
			b.WriteByte('-')
			writeRune(b, r.high)
		}
	}
	b.WriteByte(']')
}
