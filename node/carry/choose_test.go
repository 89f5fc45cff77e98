package carry

import (
	"errors"
	"testing"
	"time"
)

func TestChoose(t *testing.T) {
	const ms = time.Millisecond
	target := func(peer string, free int, token, rtt time.Duration) Target {
		return Target{Peer: peer, Slots: 4, Free: free, Context: 1024, Token: token, RTT: rtt}
	}
	mine := func(t Target, n int) Target { t.Mine = n; return t }
	context := func(t Target, n int) Target { t.Context = n; return t }
	for _, tt := range []struct {
		name         string
		list         []Target
		prompt, most int
		want         string
	}{
		{"the only one", []Target{target("a", 0, 0, 0)}, 10, 64, "a"},
		{"near", []Target{target("a", 4, 10*ms, 80*ms), target("b", 4, 10*ms, 2*ms)}, 10, 64, "b"},
		{"fast", []Target{target("a", 4, 20*ms, 2*ms), target("b", 4, 10*ms, 2*ms)}, 10, 64, "b"},
		{"a short answer: near before fast", []Target{target("a", 4, 20*ms, 2*ms), target("b", 4, 10*ms, 80*ms)}, 10, 1, "a"},
		{"a long answer: fast before near", []Target{target("a", 4, 20*ms, 2*ms), target("b", 4, 10*ms, 80*ms)}, 10, 0, "b"},
		{"free", []Target{target("a", 0, 10*ms, 2*ms), target("b", 3, 10*ms, 2*ms)}, 10, 64, "b"},
		{"twice as fast and full is as good as slow and idle, and nearer", []Target{target("a", 0, 10*ms, 2*ms), target("b", 4, 20*ms, 3*ms)}, 10, 64, "a"},
		{"what it sent itself counts at once", []Target{mine(target("a", 4, 10*ms, 2*ms), 1), target("b", 4, 10*ms, 2*ms)}, 10, 64, "b"},
		{"nor does it count twice", []Target{mine(target("a", 2, 10*ms, 2*ms), 1), target("b", 1, 10*ms, 2*ms)}, 10, 64, "a"},
		{"a queue of its own", []Target{mine(target("a", 4, 10*ms, 2*ms), 40), target("b", 0, 20*ms, 2*ms)}, 10, 64, "b"},
		{"known before unknown", []Target{target("a", 4, 0, 2*ms), target("b", 4, 20*ms, 2*ms)}, 10, 64, "b"},
		{"that the prompt fits", []Target{context(target("a", 4, 10*ms, 2*ms), 100), target("b", 0, 90*ms, 90*ms)}, 100, 64, "b"},
		{"equal ones by name", []Target{target("b", 4, 10*ms, 2*ms), target("a", 4, 10*ms, 2*ms)}, 10, 64, "a"},
	} {
		got, err := Choose(tt.list, tt.prompt, 1, tt.most)
		if err != nil || got.Peer != tt.want {
			t.Errorf("%s: %q, %v, want %q", tt.name, got.Peer, err, tt.want)
		}
	}
	if _, err := Choose(nil, 1, 1, 1); !errors.Is(err, ErrNobody) {
		t.Errorf("of none: %v", err)
	}
	var long *LongError
	_, err := Choose([]Target{context(target("a", 4, 0, 0), 100), context(target("b", 4, 0, 0), 200)}, 200, 1, 1)
	if !errors.As(err, &long) || long.Prompt != 200 || long.Limit != 200 {
		t.Errorf("a prompt that fits nowhere: %v", err)
	}
}
