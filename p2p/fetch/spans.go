package fetch

import "slices"

// Lists of spans here are sorted, do not touch each other, and hold no empty span.

// align widens spans to whole groups within a file of size bytes, and sorts and merges them.
// What lies outside the file is left out.
func align(spans []Span, size int64) []Span {
	var out []Span
	for _, s := range spans {
		if s.Len <= 0 {
			continue
		}
		off, end := max(s.Off, 0), size
		if s.Off <= size-s.Len { // else it ends behind the file, or beyond int64
			end = s.End()
		}
		if off >= end {
			continue
		}
		off -= off % Group
		end = min(size, (end+Group-1)/Group*Group)
		out = append(out, Span{off, end - off})
	}
	return merge(out)
}

// merge sorts spans and joins those that touch or overlap, in place.
func merge(spans []Span) []Span {
	slices.SortFunc(spans, func(a, b Span) int { return int(min(max(a.Off-b.Off, -1), 1)) })
	out := spans[:0]
	for _, s := range spans {
		if n := len(out); n > 0 && s.Off <= out[n-1].End() {
			out[n-1].Len = max(out[n-1].End(), s.End()) - out[n-1].Off
		} else {
			out = append(out, s)
		}
	}
	return out
}

// subtract returns what of a is not in b.
func subtract(a, b []Span) []Span {
	var out []Span
	for _, s := range a {
		for len(b) > 0 && b[0].End() <= s.Off {
			b = b[1:]
		}
		for _, t := range b {
			if t.Off >= s.End() {
				break
			}
			if t.Off > s.Off {
				out = append(out, Span{s.Off, t.Off - s.Off})
			}
			end := s.End()
			s.Off = min(t.End(), end)
			s.Len = end - s.Off
		}
		if s.Len > 0 {
			out = append(out, s)
		}
	}
	return out
}

// first returns the beginning, of at most limit bytes, of what a and b share.
func first(a, b []Span, limit int64) (Span, bool) {
	for len(a) > 0 && len(b) > 0 {
		off, end := max(a[0].Off, b[0].Off), min(a[0].End(), b[0].End())
		if off < end {
			return Span{off, min(limit, end-off)}, true
		}
		if a[0].End() < b[0].End() {
			a = a[1:]
		} else {
			b = b[1:]
		}
	}
	return Span{}, false
}

// covers reports whether s lies within one of spans.
func covers(spans []Span, s Span) bool {
	i, found := slices.BinarySearchFunc(spans, s.Off, func(t Span, off int64) int {
		return int(min(max(t.Off-off, -1), 1))
	})
	if !found {
		i--
	}
	return i >= 0 && s.End() <= spans[i].End()
}

func sum(spans []Span) (n int64) {
	for _, s := range spans {
		n += s.Len
	}
	return n
}
