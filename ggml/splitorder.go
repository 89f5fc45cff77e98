package ggml

import "slices"

// splitter knows in which order llama.cpp v0.5.0 computes the entries of a batch. It
// takes them as they come, or, where memory is by sequence, in ubatches of equally many
// entries of several sequences, one sequence after the other.
type splitter struct {
	ubatch      int     // entries at a time
	equal       bool    // equally many of each sequence
	consecutive bool    // only sequences whose numbers follow each other
	waiting     []queue // by sequence
	chosen      []int   // sequences
}

// queue is the entries of a sequence, of which the first next are done.
type queue struct {
	entries []int32
	next    int
}

func (q *queue) left() int { return len(q.entries) - q.next }

// order appends the entries 0 to n-1 in the order in which they are computed.
func (s *splitter) order(out []int32, n int, seq func(i int) int) []int32 {
	if !s.equal {
		for i := range n {
			out = append(out, int32(i))
		}
		return out
	}
	s.fill(n, seq)
	for len(out) < n {
		s.choose(n, seq)
		take := max(s.ubatch/len(s.chosen), 1)
		for _, q := range s.chosen {
			take = min(take, s.waiting[q].left())
		}
		for _, i := range s.chosen {
			q := &s.waiting[i]
			out = append(out, q.entries[q.next:q.next+take]...)
			q.next += take
		}
	}
	return out
}

// fill puts every entry into the queue of its sequence.
func (s *splitter) fill(n int, seq func(i int) int) {
	for i := range s.waiting {
		s.waiting[i] = queue{entries: s.waiting[i].entries[:0]}
	}
	for i := range n {
		for len(s.waiting) <= seq(i) {
			s.waiting = append(s.waiting, queue{})
		}
		q := &s.waiting[seq(i)]
		q.entries = append(q.entries, int32(i))
	}
}

// choose picks the sequences of the next ubatch, in the order of their entries.
func (s *splitter) choose(n int, seq func(i int) int) {
	s.chosen = s.chosen[:0]
	for i := range n {
		q := seq(i)
		left := s.waiting[q].left() > 0 && int32(i) >= s.waiting[q].entries[s.waiting[q].next]
		follows := !s.consecutive || len(s.chosen) == 0 || q == s.chosen[len(s.chosen)-1]+1
		if !left || !follows || slices.Contains(s.chosen, q) {
			continue
		}
		if s.chosen = append(s.chosen, q); len(s.chosen) > s.ubatch {
			return
		}
	}
}
