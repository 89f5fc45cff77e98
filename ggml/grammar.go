//go:build cgo

package ggml

/*
#include <stdlib.h>
#include "llama.h"
*/
import "C"

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"unicode/utf8"
	"unsafe"
)

// grammar is where an answer is within a grammar, or before its trigger.
//
// The library ends the process when it is given a token that the grammar refuses, so
// that every token is tested before.
type grammar struct {
	model *Model
	c     *C.struct_llama_sampler // of the library, in no chain
	never []Token                 // sorted: tokens that do not come, whatever their text
	one   *candidates             // of one token
	holds bool

	triggers []string   // that it waits for
	longest  int        // bytes of one
	shown    bool       // control tokens have text in the answer
	tail     []tailPart // the end of the answer, in which a trigger may have begun

	answer []Token // that reach moved on by
}

// tailPart is what of a token lies in the tail.
type tailPart struct {
	token Token
	text  []byte
	whole bool
}

// unsoundTokens are those whose text in the grammar is not that in an answer.
type unsoundTokens struct {
	control map[Token]string // text only where control tokens have one
	null    []Token          // the grammar does not see what comes after a zero byte
}

func (m *Model) findUnsound() unsoundTokens {
	u := unsoundTokens{control: map[Token]string{}}
	for t := range Token(m.VocabSize()) {
		text := m.Piece(t, true)
		switch {
		case m.IsEOG(t): // its text is nowhere
		case bytes.IndexByte(text, 0) >= 0:
			u.null = append(u.null, t)
		case !bytes.Equal(text, m.Piece(t, false)):
			u.control[t] = string(text)
		}
	}
	return u
}

func (m *Model) newGrammar(cfg SamplerConfig) (*grammar, error) {
	g := &grammar{model: m, triggers: cfg.Triggers, holds: len(cfg.Triggers) == 0, shown: cfg.ControlText}
	for _, trigger := range g.triggers {
		if trigger == "" {
			return nil, errors.New("a trigger of the grammar is empty")
		}
		g.longest = max(g.longest, len(trigger))
	}
	switch {
	case strings.IndexByte(cfg.Grammar, 0) >= 0:
		return nil, errors.New("the grammar has a zero byte")
	case C.llama_vocab_type(m.vocab) == C.LLAMA_VOCAB_TYPE_NONE:
		return nil, errors.New("the model has no vocabulary, which a grammar needs")
	}
	text, root := C.CString(cfg.Grammar), C.CString("root")
	defer C.free(unsafe.Pointer(text))
	defer C.free(unsafe.Pointer(root))
	if g.c = C.llama_sampler_init_grammar(m.vocab, text, root); g.c == nil {
		return nil, errors.New("the grammar cannot be parsed")
	}
	unsound := m.unsound()
	g.never = slices.Clone(unsound.null)
	written := strings.ReplaceAll(cfg.Grammar, `\`, "")
	for t, text := range unsound.control {
		if !g.shown || !strings.Contains(written, text) {
			g.never = append(g.never, t)
		}
	}
	slices.Sort(g.never)
	g.one = newCandidates(1)
	return g, nil
}

// takes says whether t may come next.
func (g *grammar) takes(t Token) bool {
	if _, never := slices.BinarySearch(g.never, t); never {
		return false
	}
	*g.one.data = C.llama_token_data{id: C.llama_token(t)}
	g.one.size(1)
	C.llama_sampler_apply(g.c, g.one.array)
	return possible(*g.one.data)
}

// mask refuses those of all tokens that may not come next. They stay at their places,
// at which the bias of a chain finds them without a search.
func (g *grammar) mask(all *candidates) (left bool) {
	data := all.left()
	for _, t := range g.never {
		data[t].logit = C.float(math.Inf(-1))
	}
	C.llama_sampler_apply(g.c, all.array)
	return slices.ContainsFunc(data, possible)
}

// hold has a token chosen that the grammar takes. The choice among all tokens is
// tested first; only when it is refused, all of them are.
func (g *grammar) hold(choose func(masked bool) (Token, error)) (Token, error) {
	t, err := choose(false)
	if err != nil || g.takes(t) {
		return t, err
	}
	return choose(true)
}

// reach moves to the end of an answer, which may be one from elsewhere.
func (g *grammar) reach(answer []Token) error {
	n := len(g.answer)
	if n > len(answer) || !slices.Equal(g.answer, answer[:n]) {
		C.llama_sampler_reset(g.c)
		g.holds, g.tail, g.answer, n = len(g.triggers) == 0, nil, g.answer[:0], 0
	}
	for _, t := range answer[n:] {
		switch {
		case !g.model.valid(t):
			return fmt.Errorf("the answer so far has token %d of a vocabulary of %d", t, g.model.VocabSize())
		case !g.holds:
			g.watch(t)
		case !g.takes(t):
			return errors.New("the answer so far is not in the grammar")
		default:
			g.accept(t)
		}
		g.answer = append(g.answer, t)
	}
	return nil
}

// accept moves on by a token that it takes.
func (g *grammar) accept(t Token) { C.llama_sampler_accept(g.c, C.llama_token(t)) }

// watch looks for a trigger in the answer, which t continues. From its beginning on
// the grammar must take the answer, or this was none.
func (g *grammar) watch(t Token) {
	if g.model.IsEOG(t) {
		return
	}
	text := g.model.Piece(t, g.shown)
	if len(text) == 0 {
		return
	}
	g.tail = append(g.tail, tailPart{t, text, true})
	for {
		text := g.tailText()
		at := -1
		for _, trigger := range g.triggers {
			if i := bytes.Index(text, []byte(trigger)); i >= 0 && (at < 0 || i < at) {
				at = i
			}
		}
		if at < 0 {
			g.cut(max(len(text)-g.longest+1, 0))
			return
		}
		g.cut(at)
		if g.follows() {
			g.holds, g.tail = true, nil
			return
		}
		C.llama_sampler_reset(g.c)
		g.cut(1)
	}
}

func (g *grammar) tailText() (text []byte) {
	for _, p := range g.tail {
		text = append(text, p.text...)
	}
	return text
}

// cut drops n bytes of the beginning of the tail.
func (g *grammar) cut(n int) {
	for n > 0 && n >= len(g.tail[0].text) {
		n -= len(g.tail[0].text)
		g.tail = g.tail[1:]
	}
	if n > 0 {
		g.tail[0] = tailPart{text: g.tail[0].text[n:]}
	}
}

// follows moves the grammar on by the tail, as far as it takes it. A token that
// only ends in the tail is given as others of the same text.
func (g *grammar) follows() bool {
	for _, p := range g.tail {
		tokens := []Token{p.token}
		if !p.whole {
			var ok bool
			if tokens, ok = g.model.spell(p.text); !ok {
				return false
			}
		}
		for _, t := range tokens {
			if !g.takes(t) {
				return false
			}
			g.accept(t)
		}
	}
	return true
}

// spell gives tokens that have exactly this text.
func (m *Model) spell(text []byte) ([]Token, bool) {
	if !utf8.Valid(text) {
		return nil, false
	}
	tokens, err := m.Tokenize(string(text), false, false)
	if err != nil {
		return nil, false
	}
	var got []byte
	for _, t := range tokens {
		got = append(got, m.Piece(t, false)...)
	}
	return tokens, bytes.Equal(got, text)
}

func (g *grammar) free() {
	C.llama_sampler_free(g.c)
	g.one.free()
}
