//go:build cgo && linux

package node

import (
	"math"
	"testing"

	"kvasird/node/api"
)

// newWishing is a network whose backbone runs a model that has tools, all of it.
func newWishing(t *testing.T, args ...string) (n *network, at string) {
	t.Helper()
	n = newNetwork(t, NewNetwork{Replicas: 1})
	n.whole = n.calling()
	at = n.begin(append([]string{"--experts", "here"}, args...)...)
	n.sees(n.backbone, serving)
	return n, at
}

// TestFormsCarried: an entry without weights holds to forms as the node does that answers
// for it, and its log-probabilities are that one's.
func TestFormsCarried(t *testing.T) {
	n, at := newWishing(t, "--sequences", "4")
	own := n.http
	n.isReady(n.entry("entry", at))
	n.forms(t)
	t.Run("logprobs", n.logprobs)
	n.sameLikely(t, own)
	if c := n.sees(n.backbone, serving).Carried; c.Answered == 0 || len(c.Refused) > 0 {
		t.Errorf("the node with the model counts %+v", c)
	}
}

// TestFormsRound: a ring holds to forms, drafts or not, and its log-probabilities are those
// of a node that has all of the model.
func TestFormsRound(t *testing.T) {
	n, at := newWishing(t)
	own := n.http
	stages := n.ring(at, []string{"s1", "s2"}, "--memory", "16MB", "--context", "1536", "--sequences", "2")
	n.http = n.sees(stages[0], func(st *api.Status) bool { return st.HTTP != "" }).HTTP
	n.goesRound(stages[0])
	n.forms(t)
	t.Run("logprobs", n.logprobs)
	n.sameLikely(t, own)
	for _, s := range stages {
		if w := n.sees(s, func(*api.Status) bool { return true }).Volunteer.Windows; len(w) != 1 || w[0].Layers.End-w[0].Layers.Begin == 4 {
			t.Errorf("%s holds %+v, want a part of the layers", s.name, w)
		}
	}
	n.answeredNothing()
}

// sameLikely compares the log-probabilities of an answer that the model is sure of with
// those of the node whose HTTP is at own.
func (n *network) sameLikely(t *testing.T, own string) {
	t.Helper()
	req := map[string]any{"temperature": 0, "max_tokens": 40, "logprobs": true, "top_logprobs": 3}
	got, err := n.say(req, true)
	there := *n.swarm
	there.http = own
	want, err2 := there.say(req, true)
	if err != nil || err2 != nil || len(got.probs) != len(want.probs) || len(got.probs) == 0 || got.Content != want.Content {
		t.Fatalf("here %+v, %v\nthere %+v, %v", got, err, want, err2)
	}
	// In another batch or window sums are rounded otherwise, see package engine.
	const off = 0.3
	for i, p := range got.probs {
		w := want.probs[i]
		if p.Token != w.Token || math.Abs(p.Logprob-w.Logprob) > off || p.Top[0].Token != w.Top[0].Token {
			t.Errorf("token %d: here %+v, there %+v", i, p, w)
		}
	}
}
