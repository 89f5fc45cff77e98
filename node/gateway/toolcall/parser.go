package toolcall

import (
	"bytes"
	"strings"
)

// Limits on what a model writes.
const (
	maxHeld  = 1 << 20 // bytes of one call, or of one parameter
	maxCalls = 128
	maxDepth = 64  // levels of a call's arguments
	maxSpace = 256 // bytes of white space held back, since a call after it drops it
	maxName  = 128
)

// Parser turns the text of one answer into events. Its zero value is not usable.
type Parser struct {
	syn   *syntax
	tools map[string]*schema
	opt   Options
	reads bool // calls are looked for

	buf     []byte // fed and not yet decided
	state   state
	home    state  // where a refused call's text goes back to: inText or inReasoning
	pending string // text that a call drops and a refused call gives back
	fresh   bool   // nothing visible since the start, the reasoning or a call
	trim    bool   // drop white space until something visible comes
	wrapped bool   // inside the tag that holds several calls
	inThink bool   // what came before a call was reasoning

	calls     int
	open      bool // a call has begun
	args      bool // and has written some of its arguments
	truncated bool
	closed    bool
	out       []Event
}

// state decides over the beginning of buf. It returns false when it needs more
// text; at the end it never does while there is some.
type state func(p *Parser, end bool) bool

// New starts an answer. Without tools, and without NoCalls, what looks like a
// call is text. An unknown family is None.
func New(f Family, tools []Tool, opt Options) *Parser {
	p := &Parser{syn: syntaxOf(f), tools: map[string]*schema{}, opt: opt, reads: len(tools) > 0 || opt.NoCalls, fresh: true}
	for _, t := range tools {
		p.tools[t.Name] = readSchema(t.Parameters)
	}
	p.state = inText
	if p.syn.start != nil {
		p.state = p.syn.start
	}
	if opt.InReasoning && p.syn.think != "" {
		p.state, p.trim = inReasoning, true
	}
	return p
}

// Feed takes the next piece of the answer, cut anywhere.
func (p *Parser) Feed(text string) []Event {
	if p.closed {
		return nil
	}
	p.buf = append(p.buf, text...)
	return p.run(false)
}

// Close ends the answer and reports what was held back. A call that is not
// finished gets no End, and what there is of its arguments. It may be called
// again.
func (p *Parser) Close() []Event {
	if p.closed {
		return nil
	}
	p.closed = true
	return p.run(true)
}

// Truncated says, after Close, that the answer ended inside a call: the reason
// to finish is then "length", not "tool_calls".
func (p *Parser) Truncated() bool { return p.truncated }

func (p *Parser) run(end bool) []Event {
	p.out = nil
	for p.state(p, end) {
	}
	return p.out
}

func (p *Parser) take(n int) { p.buf = p.buf[n:] }

// say reports text or reasoning, joined to what came just before.
func (p *Parser) say(k Kind, text string) {
	if p.trim {
		text = strings.TrimLeft(text, space)
	}
	if text == "" {
		return
	}
	p.trim = false
	if k == Text {
		p.fresh = false
	}
	p.emit(Event{Kind: k, Text: text})
}

func (p *Parser) emit(e Event) {
	if n := len(p.out); n > 0 && p.out[n-1].Kind == e.Kind && (e.Kind == Text || e.Kind == Reasoning || e.Kind == Args) {
		p.out[n-1].Text += e.Text
		return
	}
	p.out = append(p.out, e)
}

// The events of a call. With NoCalls they are left out.

func (p *Parser) begin(name string) {
	p.pending, p.open, p.args = "", true, false
	if !p.opt.NoCalls {
		p.emit(Event{Kind: Begin, Index: p.calls, Name: name})
	}
}

func (p *Parser) arguments(text string) {
	if text == "" {
		return
	}
	p.args = true
	if !p.opt.NoCalls {
		p.emit(Event{Kind: Args, Index: p.calls, Text: text})
	}
}

func (p *Parser) end() {
	if !p.opt.NoCalls {
		p.emit(Event{Kind: End, Index: p.calls})
	}
	p.calls++
	p.open = false
	p.fresh, p.trim = true, true
}

// cut ends the answer inside a call of which name and args, when there is a
// name, are known.
func (p *Parser) cut(name, args string) bool {
	if name != "" && p.calls < maxCalls {
		p.begin(name)
		p.arguments(args)
	}
	p.truncated = true
	return p.drop()
}

// drop swallows what is left of the answer.
func (p *Parser) drop() bool {
	p.buf, p.pending = nil, ""
	p.state = func(p *Parser, _ bool) bool { p.buf = nil; return false }
	return false
}

// refuse gives the next n bytes back as what they were among: text or reasoning.
func (p *Parser) refuse(n int) bool {
	k := Text
	p.state, p.wrapped = inText, false
	if p.home != nil {
		p.state = p.home
	}
	if p.syn.callInThink && p.inThink {
		k = Reasoning
	}
	p.say(k, p.pending+string(p.buf[:n]))
	p.pending = ""
	p.take(n)
	return true
}

const space = " \t\r\n"

func spaceAt(b []byte) int { return len(b) - len(bytes.TrimLeft(b, space)) }

// spaceBefore counts the white space at the end, up to maxSpace.
func spaceBefore(b []byte) int { return min(len(b)-len(bytes.TrimRight(b, space)), maxSpace) }

// match is how a text begins: with a marker, with what may become one, or not.
type match uint8

const (
	no match = iota
	maybe
	yes
)

func begins(b []byte, marker string) match {
	switch {
	case len(b) >= len(marker) && string(b[:len(marker)]) == marker:
		return yes
	case len(b) < len(marker) && string(b) == marker[:len(b)]:
		return maybe
	}
	return no
}

// beginsAny is begins for several markers; which is the one that matched.
func beginsAny(b []byte, markers []string) (m match, which string) {
	for _, marker := range markers {
		switch begins(b, marker) {
		case yes:
			return yes, marker
		case maybe:
			m = maybe
		}
	}
	return m, ""
}

// first finds the earliest marker, -1 when there is none.
func first(b []byte, markers []string) (at int, which string) {
	at = -1
	for _, m := range markers {
		if i := bytes.Index(b, []byte(m)); i >= 0 && (at < 0 || i < at) {
			at, which = i, m
		}
	}
	return at, which
}

// unsure is the length of the end of b that may begin a marker.
func unsure(b []byte, markers []string) int {
	longest := 0
	for _, m := range markers {
		for n := min(len(m)-1, len(b)); n > longest; n-- {
			if string(b[len(b)-n:]) == m[:n] {
				longest = n
				break
			}
		}
	}
	return longest
}

// inText is the visible answer.
func inText(p *Parser, end bool) bool {
	p.inThink = false
	if p.trim {
		p.take(spaceAt(p.buf))
	}
	if p.fresh {
		switch begun := p.atStart(end); begun {
		case yes:
			return true
		case maybe:
			return false
		}
	}
	var markers []string
	if p.reads {
		markers = p.syn.markers
	}
	if i, m := first(p.buf, markers); i >= 0 {
		n := i - spaceBefore(p.buf[:i])
		p.say(Text, string(p.buf[:n]))
		p.pending = string(p.buf[n:i])
		p.take(i)
		p.home = inText
		p.opened(m)
		return true
	}
	n := len(p.buf)
	if !end {
		n -= unsure(p.buf, markers)
		n -= spaceBefore(p.buf[:n])
	}
	p.say(Text, string(p.buf[:n]))
	p.take(n)
	return false
}

// atStart looks for what only counts before anything visible: reasoning, its
// stray end, and the calls of families without markers.
func (p *Parser) atStart(end bool) match {
	skip := spaceAt(p.buf)
	rest := p.buf[skip:]
	switch {
	case skip > maxSpace, len(rest) == 0 && end:
		return no
	case len(rest) == 0:
		return maybe
	}
	if p.syn.think == "" {
		return p.syn.bare(p, rest, skip, end)
	}
	switch m, which := beginsAny(rest, []string{p.syn.think, p.syn.endThink}); {
	case m == maybe && !end:
		return maybe
	case m == yes:
		p.take(skip + len(which))
		p.trim = true
		if which == p.syn.think {
			p.state = inReasoning
		}
		return yes
	}
	return p.syn.bare(p, rest, skip, end)
}

// opened goes on from a marker at the beginning of buf.
func (p *Parser) opened(marker string) {
	for _, w := range p.syn.wraps {
		if w == marker {
			p.state = inWrapper(marker)
			return
		}
	}
	p.state = p.syn.unit()
}

// inReasoning is a block of reasoning.
func inReasoning(p *Parser, end bool) bool {
	p.inThink = true
	markers := []string{p.syn.endThink}
	if p.syn.callInThink && p.reads {
		markers = append(markers, p.syn.markers...)
	}
	if i, m := first(p.buf, markers); i >= 0 {
		n := i - spaceBefore(p.buf[:i])
		p.say(Reasoning, string(p.buf[:n]))
		if m == p.syn.endThink {
			p.take(i + len(m))
			p.state, p.fresh, p.trim = inText, true, true
			return true
		}
		p.pending = string(p.buf[n:i])
		p.take(i)
		p.home = inReasoning
		p.opened(m)
		return true
	}
	n := len(p.buf)
	if !end {
		n -= unsure(p.buf, markers)
	}
	n -= spaceBefore(p.buf[:n])
	p.say(Reasoning, string(p.buf[:n]))
	if end {
		n = len(p.buf)
	}
	p.take(n)
	return false
}

// inWrapper is at the tag around calls: one must follow it.
func inWrapper(wrapper string) state {
	return func(p *Parser, end bool) bool {
		after := p.buf[len(wrapper):]
		skip := spaceAt(after)
		rest := after[skip:]
		m, _ := beginsAny(rest, p.syn.inner)
		switch {
		case m == maybe && !end: // also when nothing is there yet
			return p.tooLong(len(wrapper))
		case m == maybe:
			return p.cut("", "")
		case m == no && !p.syn.jsonInside(rest):
			return p.refuse(len(wrapper))
		}
		n := len(wrapper) + skip
		p.pending += string(p.buf[:n])
		p.take(n)
		p.wrapped = true
		if m == yes {
			p.state = p.syn.unit()
		} else {
			p.state = jsonUnit()
		}
		return true
	}
}

// tooLong refuses what is held back for too long. It is false while more text
// may come.
func (p *Parser) tooLong(n int) bool {
	if len(p.buf) <= maxHeld {
		return false
	}
	return p.refuse(n)
}

// inTail follows a call: end tags, further calls of the same wrapper, text.
func inTail(p *Parser, end bool) bool {
	skip := spaceAt(p.buf)
	rest := p.buf[skip:]
	m, which := beginsAny(rest, p.syn.ends)
	if m == yes {
		p.take(skip + len(which))
		return true
	}
	next, _ := beginsAny(rest, p.syn.inner)
	if p.wrapped && next == yes {
		p.take(skip)
		p.state = p.syn.unit()
		return true
	}
	if (m == maybe || p.wrapped && next == maybe) && !end {
		if skip <= maxSpace {
			return false
		}
		p.take(skip)
		return true
	}
	p.take(skip)
	p.state, p.home, p.wrapped = inText, nil, false
	return true
}

// malformed gives a call that cannot be read back as text, up to its end tag or
// the next call, so that the calls after it are kept.
func (p *Parser) malformed(end bool) bool {
	at, which := first(p.buf, p.syn.ends)
	next, _ := first(p.buf[min(1, len(p.buf)):], p.syn.markers)
	switch {
	case len(p.syn.ends) == 0: // only the marker: what follows is text like any other
		_, which := beginsAny(p.buf, p.syn.markers)
		return p.refuse(max(1, len(which)))
	case next >= 0 && (at < 0 || next+1 < at):
		return p.refuse(next + 1)
	case at >= 0:
		return p.refuse(at + len(which))
	case end:
		return p.refuse(len(p.buf))
	}
	return p.tooLong(len(p.buf))
}
