// Package jinja renders the chat templates that models carry in their GGUF
// metadata: the part of Jinja2 that such templates use, with the settings that
// the model authors' own tooling has (trim_blocks and lstrip_blocks on, break
// and continue, {% generation %}, raise_exception, strftime_now, tojson written
// as Python's json.dumps writes it, immutable lists and dicts).
//
// It is not a general Jinja: include, import, extends, call, do, raw, with and
// recursive loops are refused by name when the template is parsed.
//
// A template is untrusted. Parsing is bounded by MaxSource and a nesting limit.
// A render has a budget of steps, of bytes ever allocated, of output and of
// depth, all charged before the work is done, and stops at its context's
// deadline; no template and no value can crash, hang or exhaust the process.
// Values are immutable while a template runs, so none can contain itself.
//
// A Template is safe for concurrent use.
package jinja

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"
)

// Limits of one template and one render.
const (
	MaxSource = 256 << 10 // bytes of template text
	MaxOutput = 32 << 20  // bytes of rendered text
	maxNest   = 200       // nested expressions and blocks in the source
	maxDepth  = 2000      // nested evaluations, macro calls included
	maxSteps  = 4 << 20   // evaluations and items visited
	maxAlloc  = 256 << 20 // bytes of values created, summed over the render
)

// ErrLimit says that a template or a render went over one of its limits.
var ErrLimit = errors.New("template limit exceeded")

// RaisedError is what a template reports by raise_exception: its author's
// refusal of the conversation, such as roles that do not alternate.
type RaisedError struct{ Message string }

func (e *RaisedError) Error() string { return e.Message }

// Template is a parsed template.
type Template struct{ body []stmt }

// Parse reads a template. Errors name the line.
func Parse(source string) (t *Template, err error) {
	if len(source) > MaxSource {
		return nil, fmt.Errorf("template has %d bytes, at most %d are read: %w", len(source), MaxSource, ErrLimit)
	}
	defer catch(&err)
	p := &parser{tokens: lex(source)}
	body := p.block()
	if t := p.peek(); t.kind != tokEOF {
		p.fail("unexpected %q", t.text)
	}
	return &Template{body: body}, nil
}

// Render runs the template over vars: nil, bool, int64, float64, string, *List
// and *Dict. now is what strftime_now formats. The context's end stops it.
func (t *Template) Render(ctx context.Context, now time.Time, vars map[string]any) (text string, err error) {
	defer catch(&err)
	r := &run{ctx: ctx, now: now, out: new(strings.Builder)}
	top := newScope(nil)
	for name, fn := range globals {
		top.vars[name] = &callable{name: name, fn: fn}
	}
	for name, v := range vars {
		top.vars[name] = v
	}
	r.block(newScope(top), t.body)
	return r.out.String(), nil
}

// failure carries an error up to Parse or Render, as in text/template.
type failure struct{ err error }

func catch(err *error) {
	switch f := recover().(type) {
	case nil:
	case failure:
		*err = f.err
	default:
		panic(f)
	}
}

// scope is one level of names; loops and macros open their own.
type scope struct {
	vars   map[string]any
	parent *scope
}

func newScope(parent *scope) *scope { return &scope{vars: map[string]any{}, parent: parent} }

func (s *scope) get(name string) any {
	for ; s != nil; s = s.parent {
		if v, ok := s.vars[name]; ok {
			return v
		}
	}
	return undefined(name)
}

// run is the state of one render.
type run struct {
	ctx    context.Context
	now    time.Time
	out    *strings.Builder
	line   int
	depth  int
	steps  int
	allocd int
}

func (r *run) fail(format string, args ...any) {
	panic(failure{fmt.Errorf("template line %d: "+format, append([]any{r.line}, args...)...)})
}

// spend charges n steps, before they are done.
func (r *run) spend(n int) {
	before := r.steps
	r.steps += n
	if r.steps > maxSteps {
		r.fail("more than %d steps: %w", maxSteps, ErrLimit)
	}
	if before>>12 != r.steps>>12 && r.ctx.Err() != nil {
		r.fail("%w", context.Cause(r.ctx))
	}
}

// alloc charges n bytes, before they are allocated, and the time to fill them.
func (r *run) alloc(n int) {
	if n < 0 || n > maxAlloc-r.allocd {
		r.fail("values of more than %d bytes: %w", maxAlloc, ErrLimit)
	}
	r.allocd += n
	r.spend(n >> 6)
}

// enter opens one level of evaluation; leave closes it.
func (r *run) enter() {
	r.spend(1)
	if r.depth++; r.depth > maxDepth {
		r.fail("nested deeper than %d: %w", maxDepth, ErrLimit)
	}
}

func (r *run) leave() { r.depth-- }

func (r *run) write(s string) {
	if len(s) > MaxOutput-r.out.Len() {
		r.fail("more than %d bytes of text: %w", MaxOutput, ErrLimit)
	}
	r.alloc(len(s))
	r.out.WriteString(s)
}

// capture runs a body and returns what it wrote.
func (r *run) capture(s *scope, body []stmt) string {
	old := r.out
	r.out = new(strings.Builder)
	r.block(s, body)
	text := r.out.String()
	r.out = old
	return text
}

// control is how a statement ended.
type control int

const (
	next control = iota
	breakLoop
	continueLoop
)

type (
	expr func(*run, *scope) any
	stmt func(*run, *scope) control
)

func (r *run) block(s *scope, body []stmt) control {
	for _, st := range body {
		if c := st(r, s); c != next {
			return c
		}
	}
	return next
}
