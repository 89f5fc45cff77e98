package gateway

import (
	"context"
	"errors"
	"io"
	"time"

	"kvasird/node/gateway/toolcall"
)

// pieceKind says what a piece of an answer is.
type pieceKind uint8

const (
	pieceText pieceKind = iota
	pieceReasoning
	pieceCall // a call begins: id, name
	pieceArgs // text: a part of its arguments
	pieceEnd  // the call is complete
)

// piece is one step of an answer, in the order in which the model wrote it.
// Every API shows the same pieces in its own way, streamed or joined.
type piece struct {
	kind     pieceKind
	text     string
	id, name string
	call     int  // index of the call
	cut      bool // of an end: the call is not complete
	probs    []tokenChoice
}

// tokenChoice is a token of the answer beside its alternatives.
type tokenChoice struct {
	chosen TokenProb
	top    []TokenProb
}

// finite keeps a probability of 0 writable.
func finite(p TokenProb) TokenProb {
	const least = -9999
	if !(p.Logprob >= least) { // NaN too
		p.Logprob = least
	}
	return p
}

// Reasons to finish.
const (
	finishStop   = "stop"
	finishLength = "length"
	finishCalls  = "tool_calls"
)

// generation is one running answer.
type generation struct {
	stream   Stream
	filter   TextFilter
	parser   *toolcall.Parser // nil: the text is taken as it is
	newID    func() string
	parallel bool
	waits    waits

	prompt    int // tokens
	tokens    int // of the answer, up to where it was cut
	reasoning int // of them
	calls     int
	open      bool // a call is being written
	argued    bool // and some of its arguments came
	thinking  bool // the last piece was reasoning
	probs     []tokenChoice
	finish    string // set with the last pieces
	failed    error  // why no more came
	ended     bool   // and that was the request's context, not the engine
}

func (g *Gateway) generation(q *ready, s Stream) *generation {
	a := &generation{stream: s, filter: TextFilter{Stops: q.stops}, waits: g.waits, prompt: len(q.sampling.Prompt), parallel: q.parallel,
		newID: func() string { return g.newID("call_") }}
	if q.prompt != nil {
		a.parser = toolcall.New(q.prompt.family, parserTools(q.talk.tools), q.prompt.options)
		a.thinking = q.prompt.options.InReasoning
	}
	return a
}

// next waits, at most for d unless that is 0, for pieces that can go out; there may be none. With
// the last ones finish is set.
func (a *generation) next(ctx context.Context, d time.Duration) ([]piece, error) {
	data, err := nextWithin(ctx, a.stream, d)
	if errors.Is(err, io.EOF) {
		return a.end(a.filter.End(), a.stream.Finish()), nil
	}
	if err != nil {
		if !errors.Is(err, errWaiting) {
			a.failed, a.ended = err, ctx.Err() != nil
		}
		return nil, err
	}
	a.tokens++
	if a.thinking {
		a.reasoning++
	}
	if s, ok := a.stream.(ProbStream); ok {
		if chosen, top := s.Prob(); len(chosen.Bytes) > 0 {
			a.probs = append(a.probs, tokenChoice{finite(chosen), top})
			for i := range top {
				top[i] = finite(top[i])
			}
		}
	}
	text := a.filter.Add(data)
	if a.filter.Stopped() {
		return a.end(text, finishStop), nil
	}
	return a.pieces(a.feed(text), nil), nil
}

func (a *generation) feed(text string) []toolcall.Event {
	if text == "" {
		return nil
	}
	if a.parser == nil {
		return []toolcall.Event{{Kind: toolcall.Text, Text: text}}
	}
	return a.parser.Feed(text)
}

// end takes the last text and settles why the answer is over.
func (a *generation) end(text, finish string) []piece {
	out := a.pieces(a.feed(text), nil)
	if a.parser != nil && a.finish == "" {
		out = a.pieces(a.parser.Close(), out)
	}
	if a.open {
		a.open = false
		out = append(out, piece{kind: pieceEnd, call: a.calls - 1, cut: true})
	}
	switch {
	case a.finish != "": // a second call was not wanted
	case a.parser != nil && a.parser.Truncated():
		a.finish = finishLength
	case a.calls > 0 && finish == finishStop:
		a.finish = finishCalls
	default:
		a.finish = finish
	}
	return out
}

// pieces turns what the parser saw into pieces of the answer.
func (a *generation) pieces(events []toolcall.Event, out []piece) []piece {
	for _, ev := range events {
		switch ev.Kind {
		case toolcall.Text:
			out = append(out, piece{kind: pieceText, text: ev.Text, probs: a.probs})
			a.probs, a.thinking = nil, false
			continue
		case toolcall.Reasoning:
			out = append(out, piece{kind: pieceReasoning, text: ev.Text})
		case toolcall.Begin:
			if a.calls > 0 && !a.parallel {
				a.finish = finishCalls
				return out
			}
			a.calls++
			a.open, a.argued = true, false
			out = append(out, piece{kind: pieceCall, id: a.newID(), name: ev.Name, call: a.calls - 1})
		case toolcall.Args:
			a.argued = a.argued || ev.Text != ""
			out = append(out, piece{kind: pieceArgs, text: ev.Text, call: a.calls - 1})
		case toolcall.End:
			if !a.argued {
				out = append(out, piece{kind: pieceArgs, text: "{}", call: a.calls - 1})
			}
			a.open = false
			out = append(out, piece{kind: pieceEnd, call: a.calls - 1})
		}
		a.probs = nil // only those of visible text are reported
		a.thinking = ev.Kind == toolcall.Reasoning
	}
	return out
}

// rest is the tokens that no piece of text was reported with, once the answer is
// over.
func (a *generation) rest() []tokenChoice {
	if a.filter.Stopped() {
		return nil
	}
	return a.probs
}

// cached is how many tokens of the prompt were not computed again.
func (a *generation) cached() int {
	if s, ok := a.stream.(CachedStream); ok && a.tokens > 0 {
		return s.Cached()
	}
	return 0
}

// block is a whole part of an answer.
type block struct {
	kind     pieceKind // text, reasoning or call
	text     string    // of a call: its arguments
	id, name string
	probs    []tokenChoice
}

// blocks are pieces joined.
type blocks []block

func (b *blocks) add(p piece) {
	n := len(*b)
	switch {
	case p.kind == pieceEnd:
	case p.kind == pieceCall:
		*b = append(*b, block{kind: pieceCall, id: p.id, name: p.name})
	case p.kind == pieceArgs:
		(*b)[n-1].text += p.text
	case n > 0 && (*b)[n-1].kind == p.kind:
		(*b)[n-1].text += p.text
		(*b)[n-1].probs = append((*b)[n-1].probs, p.probs...)
	default:
		*b = append(*b, block{kind: p.kind, text: p.text, probs: p.probs})
	}
}

// joined is the text of all blocks of a kind.
func (b blocks) joined(kind pieceKind) (text string, probs []tokenChoice) {
	for _, k := range b {
		if k.kind == kind {
			text += k.text
			probs = append(probs, k.probs...)
		}
	}
	return text, probs
}

// whole waits for the complete answer.
func (a *generation) whole(ctx context.Context) (blocks, *apiError) {
	var all blocks
	for a.finish == "" {
		pieces, err := a.next(ctx, 0)
		if err != nil {
			return nil, engineError(err)
		}
		for _, p := range pieces {
			all.add(p)
		}
	}
	return all, nil
}
