package carry

import (
	"cmp"
	"slices"
	"time"
)

// Target is a server that can be asked.
type Target struct {
	Peer        string
	Slots, Free int           // sequences that it runs at once, and those that it had free of late
	Context     int           // tokens of one request, prompt and answer together
	Token       time.Duration // one token of one sequence; 0 unknown
	RTT         time.Duration // 0 unknown
	Mine        int           // requests of this node that run there
}

const (
	unknownToken = 100 * time.Millisecond
	unknownRTT   = 200 * time.Millisecond
	// usualAnswer is the tokens of an answer that has no bound.
	usualAnswer = 256
)

// expected predicts how long an answer of so many tokens takes: the way there, and its tokens, which
// take longer the more others are computed beside them or before.
func (t *Target) expected(tokens int) time.Duration {
	token, rtt := cmp.Or(t.Token, unknownToken), cmp.Or(t.RTT, unknownRTT)
	slots := max(t.Slots, 1)
	there := max(slots-t.Free, t.Mine) // what was announced is of a while ago
	return rtt + time.Duration(tokens)*token*time.Duration(slots+there)/time.Duration(slots)
}

// Choose returns the server by which an answer of at most so many tokens, 0 for no bound, is
// expected first. In its context a prompt leaves room for so many tokens, 0 for an input of
// embeddings. A *LongError says that the prompt fits none of them, ErrNobody that there is none.
func Choose(list []Target, prompt, room, most int) (Target, error) {
	if len(list) == 0 {
		return Target{}, ErrNobody
	}
	fits := slices.DeleteFunc(slices.Clone(list), func(t Target) bool { return prompt+room > t.Context })
	if len(fits) == 0 {
		widest := slices.MaxFunc(list, func(a, b Target) int { return cmp.Compare(a.Context, b.Context) })
		return Target{}, &LongError{prompt, widest.Context, room == 0}
	}
	tokens := min(cmp.Or(most, usualAnswer), usualAnswer)
	return slices.MinFunc(fits, func(a, b Target) int {
		return cmp.Or(cmp.Compare(a.expected(tokens), b.expected(tokens)), cmp.Compare(a.Peer, b.Peer))
	}), nil
}
