package toolcall

import (
	"bytes"
	"encoding/json"
	"strings"
)

// jsonScan finds the end of a JSON object or array that comes in pieces.
type jsonScan struct {
	pos   int
	stack []byte // the brackets to come
	str   bool
	esc   bool
	bad   bool
}

// scan goes on where it stopped. It gives the length of the value and yes, or
// maybe when more must come, or no when it cannot be JSON.
func (s *jsonScan) scan(b []byte) (int, match) {
	for ; s.pos < len(b) && !s.bad; s.pos++ {
		c := b[s.pos]
		switch {
		case s.esc:
			s.esc = false
		case s.str:
			s.esc, s.str = c == '\\', c != '"'
		case c == '"':
			s.str = true
		case c == '{' || c == '[':
			s.stack = append(s.stack, c+2) // the closing bracket in ASCII
			s.bad = len(s.stack) > maxDepth
		case len(s.stack) == 0:
			s.bad = true
		case c == s.stack[len(s.stack)-1]:
			if s.stack = s.stack[:len(s.stack)-1]; len(s.stack) == 0 {
				s.pos++
				return s.pos, yes
			}
		case c == '}' || c == ']' || strings.IndexByte("<>()|`;#=$&!?@^~\\", c) >= 0:
			s.bad = true
		}
		if s.bad {
			break
		}
	}
	if s.bad {
		return 0, no
	}
	return 0, maybe
}

// call is a call that was read whole.
type call struct{ name, args string }

func (p *Parser) whole(c call) {
	p.begin(c.name)
	p.arguments(c.args)
	p.end()
}

// object checks arguments that are a JSON object, or its text as a JSON string.
// Line breaks within strings, which models forget to escape, are escaped.
func object(raw []byte) (string, bool) {
	raw = bytes.TrimSpace(raw)
	if len(raw) == 0 || string(raw) == "null" {
		return "{}", true
	}
	var inner string
	if raw[0] == '"' && json.Unmarshal(raw, &inner) == nil {
		raw = bytes.TrimSpace([]byte(inner))
		if len(raw) == 0 {
			return "{}", true
		}
	}
	if raw[0] == '{' && !json.Valid(raw) {
		raw = escapeControls(raw)
	}
	return string(raw), raw[0] == '{' && json.Valid(raw)
}

func escapeControls(raw []byte) []byte {
	var out []byte
	str, esc := false, false
	for _, c := range raw {
		switch {
		case esc:
			esc = false
		case str && c == '\\':
			esc = true
		case c == '"':
			str = !str
		case str && c < 0x20:
			quoted, _ := json.Marshal(string(rune(c)))
			out = append(out, quoted[1:len(quoted)-1]...)
			continue
		}
		out = append(out, c)
	}
	return out
}

// calls reads a JSON call, or an array of them. Every one must have a name.
func (p *Parser) readCalls(raw []byte) ([]call, bool) {
	if !json.Valid(raw) {
		raw = escapeControls(raw)
	}
	var list []json.RawMessage
	if json.Unmarshal(raw, &list) != nil {
		list = []json.RawMessage{raw}
	}
	var calls []call
	for _, item := range list {
		c, ok := p.readCall(item, 0)
		if !ok || p.calls+len(calls) >= maxCalls {
			return nil, false
		}
		calls = append(calls, c)
	}
	return calls, len(calls) > 0
}

func (p *Parser) readCall(raw []byte, depth int) (call, bool) {
	var fields map[string]json.RawMessage
	if json.Unmarshal(raw, &fields) != nil {
		return call{}, false
	}
	if inner := fields["function"]; len(inner) > 0 && inner[0] == '{' && depth == 0 {
		return p.readCall(inner, 1)
	}
	var name string
	for _, key := range []string{"name", "function"} {
		if name == "" && fields[key] != nil && json.Unmarshal(fields[key], &name) != nil {
			return call{}, false
		}
	}
	name, ok := p.name(name)
	if !ok {
		return call{}, false
	}
	args := fields["arguments"]
	if args == nil {
		args = fields["parameters"]
	}
	text, ok := object(args)
	return call{name, text}, ok
}

// partial reads what is known of a call whose JSON was cut off.
func (p *Parser) partial(raw []byte) (name, args string) {
	dec := json.NewDecoder(bytes.NewReader(raw))
	depth := 0
	for key := ""; ; {
		tok, err := dec.Token()
		if err != nil {
			return name, args
		}
		switch v := tok.(type) {
		case json.Delim:
			if v == '{' || v == '[' {
				depth++
			} else {
				depth--
			}
			key = ""
		case string:
			if key == "name" {
				if n, ok := p.name(v); ok {
					name = n
				}
				key = ""
				continue
			}
			if key = v; name != "" && (key == "arguments" || key == "parameters") && depth <= 2 {
				rest := bytes.TrimLeft(raw[dec.InputOffset():], space)
				return name, string(bytes.TrimLeft(bytes.TrimPrefix(rest, []byte(":")), space))
			}
		default:
			key = ""
		}
	}
}

// jsonUnit reads calls in JSON that begins at the beginning of buf.
func jsonUnit() state {
	var s jsonScan
	return func(p *Parser, end bool) bool {
		n, m := s.scan(p.buf)
		switch {
		case m == maybe && !end:
			return p.tooLong(len(p.buf))
		case m == maybe:
			if at, _ := first(p.buf, p.syn.ends); at >= 0 {
				return p.malformed(end)
			}
			return p.cut(p.partial(p.buf))
		case m == no:
			return p.malformed(end)
		}
		calls, ok := p.readCalls(p.buf[:n])
		if !ok {
			return p.malformed(end)
		}
		for _, c := range calls {
			p.whole(c)
		}
		p.take(n)
		p.state = inTail
		return true
	}
}

// heading reads what comes before a call's arguments: their place, and the name.
// It looks from the beginning of the call's marker.
type heading func(p *Parser, b []byte) (name string, at int, m match)

// namedUnit reads a call whose name stands before its JSON arguments.
func namedUnit(head heading) func() state {
	return func() state {
		var s jsonScan
		name, at := "", 0
		return func(p *Parser, end bool) bool {
			if at == 0 {
				n, i, m := head(p, p.buf)
				if m == maybe && !end {
					return p.tooLong(len(p.buf))
				}
				if m == maybe {
					return p.cut(n, "")
				}
				if m == no {
					return p.malformed(end)
				}
				name, at = n, i
			}
			return p.namedArguments(&s, name, at, end)
		}
	}
}

func (p *Parser) namedArguments(s *jsonScan, name string, at int, end bool) bool {
	at += spaceAt(p.buf[at:])
	rest := p.buf[at:]
	if ended, _ := beginsAny(rest, p.syn.ends); ended == yes { // no arguments
		p.whole(call{name, "{}"})
		p.take(at)
		p.state = inTail
		return true
	} else if ended == maybe && len(rest) == 0 || ended == maybe && !end {
		if end {
			return p.cut(name, "")
		}
		return p.tooLong(len(p.buf))
	}
	n, m := s.scan(rest)
	switch {
	case m == maybe && !end:
		return p.tooLong(len(p.buf))
	case m == maybe:
		if i, _ := first(rest, p.syn.ends); i >= 0 {
			return p.malformed(end)
		}
		return p.cut(name, string(rest))
	case m == no:
		return p.malformed(end)
	}
	args, ok := object(rest[:n])
	if inner, found := p.insideJSON(name, rest[:n]); found {
		name, args, ok = inner.name, inner.args, true
	}
	if !ok {
		return p.malformed(end)
	}
	p.whole(call{name, args})
	p.take(at + n)
	p.state = inTail
	return true
}

// insideJSON finds the call in the arguments of one that is not declared: some
// models write an id for the name, and the name into the JSON.
func (p *Parser) insideJSON(name string, raw []byte) (call, bool) {
	if p.tools[name] != nil {
		return call{}, false
	}
	c, ok := p.readCall(raw, 0)
	return c, ok && p.tools[c.name] != nil
}

// upTo cuts b at the first of the markers; maybe when none is there yet. A line
// break ends what is no name.
func upTo(b []byte, markers ...string) (string, string, match) {
	i, which := first(b, markers)
	head := b[:len(b)-unsure(b, markers)]
	if i >= 0 {
		head = b[:i]
	}
	switch {
	case len(head) > maxName+64, bytes.IndexByte(bytes.Trim(head, space), '\n') >= 0:
		return "", "", no
	case i < 0:
		return "", "", maybe
	}
	return string(head), which, yes
}

// mistralUnit reads [TOOL_CALLS] and an array of calls, or a name and its
// arguments, with an id between them or not.
func mistralUnit() state {
	const marker = "[TOOL_CALLS]"
	named := namedUnit(func(p *Parser, b []byte) (string, int, match) {
		raw, which, m := upTo(b[len(marker):], "[CALL_ID]", "[ARGS]", "{")
		if m != yes {
			return "", 0, m
		}
		name, ok := p.name(raw)
		if !ok {
			return "", 0, no
		}
		at := len(marker) + len(raw)
		switch which {
		case "{":
			return name, at, yes
		case "[CALL_ID]":
			id, _, m := upTo(b[at+len(which):], "[ARGS]")
			return name, at + len(which) + len(id) + len("[ARGS]"), m
		}
		return name, at + len(which), yes
	})()
	return func(p *Parser, end bool) bool {
		rest := p.buf[len(marker):]
		skip := spaceAt(rest)
		switch m := firstByte(rest[skip:], "[{"); {
		case m == maybe && end:
			return p.cut("", "")
		case m == maybe:
			return p.tooLong(len(marker))
		case m == no:
			p.state = named
			return true
		}
		p.pending += string(p.buf[:len(marker)+skip])
		p.take(len(marker) + skip)
		p.state = jsonUnit()
		return true
	}
}

func firstByte(b []byte, chars string) match {
	switch {
	case len(b) == 0:
		return maybe
	case strings.IndexByte(chars, b[0]) >= 0:
		return yes
	}
	return no
}

// deepSeekUnit reads a name, in the style of V3 behind the word "function" and
// before a fence, in the style of V3.1 before the separator, and its arguments.
var deepSeekUnit = namedUnit(func(p *Parser, b []byte) (string, int, match) {
	head, _, m := upTo(b[len(deepCall):], deepSep)
	if m != yes {
		return "", 0, m
	}
	at := len(deepCall) + len(head) + len(deepSep)
	after := b[at:]
	skip := spaceAt(after)
	head = strings.Trim(head, space)
	if p.tools[head] != nil || head != "function" {
		name, ok := p.name(head)
		switch ended := begins(after[skip:], deepCallEnd); {
		case !ok:
			return "", 0, no
		case ended == maybe: // also when nothing is there yet
			return name, 0, maybe
		case ended == yes, after[skip] == '{':
			return name, at, yes
		}
	}
	raw, which, m := upTo(bytes.ReplaceAll(after, []byte("\n"), []byte(" ")), "```json", "{", deepCallEnd)
	if m != yes {
		return "", 0, m
	}
	line := strings.Trim(raw, space)
	if line == "" { // the name of V3.1 and the fence of V3
		line = head
	}
	name, ok := p.name(line)
	if !ok {
		return "", 0, no
	}
	at += len(raw)
	if which == "```json" {
		at += len(which)
	}
	return name, at, yes
})

const (
	kimiCall    = "<|tool_call_begin|>"
	kimiArgs    = "<|tool_call_argument_begin|>"
	kimiCallEnd = "<|tool_call_end|>"
)

var kimiUnit = namedUnit(func(p *Parser, b []byte) (string, int, match) {
	raw, which, m := upTo(b[len(kimiCall):], kimiArgs, "{", kimiCallEnd)
	if m != yes {
		return "", 0, m
	}
	name, ok := p.name(p.kimiName(raw))
	if !ok {
		return "", 0, no
	}
	at := len(kimiCall) + len(raw)
	if which == kimiArgs {
		at += len(which)
	}
	return name, at, yes
})

// kimiName takes the name out of an id: functions.NAME:IDX, or what models make
// of it when a client changed the ids.
func (p *Parser) kimiName(id string) string {
	id = strings.Trim(id, space)
	body, _ := strings.CutPrefix(id, "functions")
	body = strings.TrimLeft(body, "._:")
	short := strings.TrimRight(body, "0123456789")
	for _, name := range []string{body, short, strings.TrimRight(short, ":_.-"), id} {
		if p.tools[name] != nil {
			return name
		}
	}
	if i := strings.LastIndexByte(body, ':'); i >= 0 {
		return body[:i]
	}
	return body
}
