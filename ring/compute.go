package ring

import (
	"context"
	"fmt"
	"math"
	"unicode/utf8"
)

// Compute is one stage's part of a model, with memory for a number of sequences. Only the
// stage's loop calls it, one call at a time. What it is given is the stage's and only valid
// during the call.
type Compute interface {
	// Decode computes the rows of b, which may be of several sequences; those of one follow each
	// other and continue what the sequence has. Unless the stage is the last one it fills
	// b.Out. After an error the cells of the batch are unspecified: the stage truncates them.
	// When ctx ends nobody wants the result any more.
	Decode(ctx context.Context, b *Batch) error
	// Truncate drops what a sequence has at positions >= pos. False: this memory cannot drop a
	// part. With pos 0 it always can.
	Truncate(seq, pos int) bool
	// NewSampler is called on the last stage only. The error says what is wrong with s.
	NewSampler(s Sampling) (Sampler, error)
}

// Batch is what one Decode computes: n rows, at least one.
type Batch struct {
	Seq, Pos, Token []int32 // of each row; the token is for the first stage, others may ignore it

	Rows []float32 // n × width: the hidden rows that came in. nil on the first stage
	Want []bool    // logits of this row are sampled. nil unless the stage is the last
	Out  []float32 // n × width, to be filled: the hidden rows after the last layer. nil on the last stage
}

// Len returns the number of rows.
func (b *Batch) Len() int { return len(b.Pos) }

// Sampler draws the tokens of one session. The same arguments and logits give the same token.
type Sampler interface {
	// Sample draws the token of position pos from the logits of a row of the latest batch, which
	// wanted them and is at position pos-1. Penalties and the grammar look at answer, the tokens
	// drawn so far up to position pos-1, without the prompt, which may come from elsewhere. The
	// random draw is a function of seed and pos. After an error the answer has failed.
	Sample(row, pos int, answer []int32) (Drawn, error)
	Close()
}

// Drawn is a token that was drawn.
type Drawn struct {
	Token int32
	End   bool // it ends the answer
	Prob
}

// Prob says how likely a token was, in natural logarithms of the probabilities that the model gives,
// before all of Sampling.
type Prob struct {
	Logprob float32
	Top     []TokenProb // the likeliest tokens at its place, those first
}

// TokenProb is a token with the natural logarithm of its probability.
type TokenProb struct {
	Token   int32
	Logprob float32
}

// Sampling says how tokens are drawn. The zero value is greedy, without penalties.
type Sampling struct {
	Temperature      float32           `cbor:"1,keyasint,omitempty"` // 0: greedy
	TopK             int               `cbor:"2,keyasint,omitempty"` // 0: off
	TopP             float32           `cbor:"3,keyasint,omitempty"` // 0 and 1: off
	MinP             float32           `cbor:"4,keyasint,omitempty"` // 0: off
	Seed             uint32            `cbor:"5,keyasint,omitempty"`
	RepeatPenalty    float32           `cbor:"6,keyasint,omitempty"` // 0 and 1: off
	FrequencyPenalty float32           `cbor:"7,keyasint,omitempty"`
	PresencePenalty  float32           `cbor:"8,keyasint,omitempty"`
	LogitBias        map[int32]float32 `cbor:"9,keyasint,omitempty"` // by token

	// Grammar is the GBNF, start rule "root", that the answer must match; "": it is free. With
	// Triggers it is free until it has one of these texts, and matches from there on.
	Grammar  string   `cbor:"10,keyasint,omitempty"`
	Triggers []string `cbor:"11,keyasint,omitempty"`
	Special  bool     `cbor:"12,keyasint,omitempty"` // the answer has the text of control tokens, which a grammar may write out
	Logprobs bool     `cbor:"13,keyasint,omitempty"` // tokens come with a Prob
	Top      int      `cbor:"14,keyasint,omitempty"` // with Logprobs: tokens of Prob.Top
}

const (
	// MaxGrammar bounds a grammar, in bytes.
	MaxGrammar = 1 << 20
	// MaxTop bounds Sampling.Top.
	MaxTop = 20

	maxBias     = 1024 // entries of Sampling.LogitBias
	maxTriggers = 16
	maxTrigger  = 256 // bytes
)

func (s *Sampling) validate() error {
	for _, f := range []struct {
		name  string
		value float32
	}{
		{"temperature", s.Temperature}, {"top_p", s.TopP}, {"min_p", s.MinP}, {"repeat penalty", s.RepeatPenalty},
		{"frequency penalty", s.FrequencyPenalty}, {"presence penalty", s.PresencePenalty},
	} {
		if !finite(f.value) {
			return fmt.Errorf("%s is %v", f.name, f.value)
		}
	}
	if s.Temperature < 0 || s.TopK < 0 || s.TopP < 0 || s.MinP < 0 || s.RepeatPenalty < 0 {
		return fmt.Errorf("temperature %v, top_k %d, top_p %v, min_p %v, repeat penalty %v: none may be negative",
			s.Temperature, s.TopK, s.TopP, s.MinP, s.RepeatPenalty)
	}
	if len(s.LogitBias) > maxBias {
		return fmt.Errorf("%d logit biases, at most %d", len(s.LogitBias), maxBias)
	}
	for t, b := range s.LogitBias {
		if t < 0 || math.IsNaN(float64(b)) {
			return fmt.Errorf("logit bias %v of token %d", b, t)
		}
	}
	if s.Top < 0 || s.Top > MaxTop || s.Top > 0 && !s.Logprobs {
		return fmt.Errorf("the %d likeliest tokens at each place, at most %d can be asked for, and with log-probabilities only", s.Top, MaxTop)
	}
	return s.validateGrammar()
}

func (s *Sampling) validateGrammar() error {
	if len(s.Grammar) > MaxGrammar || !utf8.ValidString(s.Grammar) {
		return fmt.Errorf("a grammar of %d bytes, want at most %d of text", len(s.Grammar), MaxGrammar)
	}
	if len(s.Triggers) > maxTriggers || len(s.Triggers) > 0 && s.Grammar == "" {
		return fmt.Errorf("%d triggers of a grammar of %d bytes, at most %d and none without a grammar", len(s.Triggers), len(s.Grammar), maxTriggers)
	}
	for _, t := range s.Triggers {
		if t == "" || len(t) > maxTrigger || !utf8.ValidString(t) {
			return fmt.Errorf("trigger %.32q: want 1 to %d bytes of text", t, maxTrigger)
		}
	}
	return nil
}

// finite says whether f is a number and not infinite.
func finite(f float32) bool { return math.Float32bits(f)&0x7f800000 != 0x7f800000 }
