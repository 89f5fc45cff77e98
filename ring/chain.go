package ring

import (
	"errors"
	"fmt"
	"slices"
	"unicode/utf8"

	"kvasird/ggml/gguf"
	"kvasird/ring/draft"
)

// Limits of what is said on the wire.
const (
	// MaxHops bounds the stages of a chain.
	MaxHops = 64
	// MaxDraft bounds the tokens that are drafted at a time.
	MaxDraft = draft.Most

	maxPeerID  = 128
	maxLayers  = 1 << 16
	maxContext = 1 << 24 // tokens of a session
)

// Hop is a stage of a chain: a window of layers at a peer.
type Hop struct {
	Peer   string
	Layers gguf.Range
}

// String writes "peer P, layers 0:12".
func (h Hop) String() string { return fmt.Sprintf("peer %s, layers %v", h.Peer, h.Layers) }

// Chain is the stages of a session in the order of their layers. Their windows follow each
// other without gap or overlap and begin at layer 0; a peer has one of them.
type Chain []Hop

func (c Chain) validate() error {
	if len(c) == 0 || len(c) > MaxHops {
		return fmt.Errorf("chain of %d stages, want 1 to %d", len(c), MaxHops)
	}
	layer := 0
	for i, h := range c {
		if h.Peer == "" || len(h.Peer) > maxPeerID || !utf8.ValidString(h.Peer) {
			return fmt.Errorf("stage %d: peer id %.32q: want 1 to %d bytes of text", i, h.Peer, maxPeerID)
		}
		if slices.ContainsFunc(c[:i], func(o Hop) bool { return o.Peer == h.Peer }) {
			return fmt.Errorf("stage %d: peer %s is in the chain twice", i, h.Peer)
		}
		switch {
		case h.Layers.Begin > layer:
			return fmt.Errorf("stage %d has layers %v: nobody has layers %d:%d", i, h.Layers, layer, h.Layers.Begin)
		case h.Layers.Begin < layer:
			return fmt.Errorf("stage %d has layers %v, which overlap those before %d", i, h.Layers, layer)
		case h.Layers.End <= h.Layers.Begin || h.Layers.End > maxLayers:
			return fmt.Errorf("stage %d has layers %v", i, h.Layers)
		}
		layer = h.Layers.End
	}
	return nil
}

// layers is the number of layers that a valid chain covers.
func (c Chain) layers() int { return c[len(c)-1].Layers.End }

// sameWindows says whether two chains are cut at the same layers.
func (c Chain) sameWindows(o Chain) bool {
	return slices.EqualFunc(c, o, func(a, b Hop) bool { return a.Layers == b.Layers })
}

// Request is one generation.
type Request struct {
	Tokens    []int32 // the prompt, at least one
	MaxTokens int     // of the answer, the end token included; at least one
	Sampling  Sampling
	NoDraft   bool // no speculation
}

func (r *Request) validate() error {
	if len(r.Tokens) == 0 {
		return errors.New("the prompt is empty")
	}
	if r.MaxTokens < 1 {
		return fmt.Errorf("an answer of at most %d tokens was asked for", r.MaxTokens)
	}
	if n := len(r.Tokens) + r.MaxTokens; n > maxContext {
		return fmt.Errorf("prompt and answer have %d tokens, at most %d", n, maxContext)
	}
	for i, t := range r.Tokens {
		if t < 0 {
			return fmt.Errorf("prompt token %d is %d", i, t)
		}
	}
	return r.Sampling.validate()
}
