package toolcall

import (
	"bytes"
	"encoding/json"
	"slices"
	"strings"
)

// Llama 3 answers with nothing but the JSON of a call, Llama 4 with a list of
// calls as Python writes them, or either with the other. A tag may stand before
// it. Since ordinary answers look like that too, the tool must be declared.
const (
	pythonTag   = "<|python_tag|>"
	pythonStart = "<|python_start|>"
	pythonEnd   = "<|python_end|>"
)

// bareCall looks for a call at the beginning of the answer.
func bareCall(p *Parser, rest []byte, skip int, _ bool) match {
	if m := firstByte(rest, "{["); m != yes {
		return m
	}
	p.pending = string(p.buf[:skip])
	p.take(skip)
	p.home, p.inThink = inText, false
	p.state = bareUnit(false)
	return yes
}

// taggedJSON is at a tag, behind which a call must stand.
func taggedJSON() state {
	return func(p *Parser, end bool) bool {
		_, tag := beginsAny(p.buf, p.syn.opens)
		skip := len(tag) + spaceAt(p.buf[len(tag):])
		if len(p.buf) == skip {
			if end {
				return p.cut("", "")
			}
			return p.tooLong(len(tag))
		}
		p.pending += string(p.buf[:skip])
		p.take(skip)
		p.state = bareUnit(true)
		return true
	}
}

// bareUnit reads JSON or a list of Python calls at the beginning of buf; behind
// a tag also one call as name.call(arguments).
func bareUnit(tagged bool) state {
	var s jsonScan
	return func(p *Parser, end bool) bool {
		calls, n, m := p.bareCalls(&s, tagged, end)
		switch {
		case m == maybe && !end:
			return p.tooLong(1)
		case m == maybe:
			name, args := p.partial(p.buf)
			if p.tools[name] != nil && args != "" {
				return p.cut(name, args)
			}
			if tagged {
				return p.cut("", "")
			}
			return p.refuse(len(p.buf))
		case m == no:
			return p.refuse(1)
		}
		for _, c := range calls {
			p.whole(c)
		}
		p.take(n)
		p.state = inTail
		return true
	}
}

func (p *Parser) bareCalls(s *jsonScan, tagged, end bool) ([]call, int, match) {
	b := p.buf
	if b[0] != '{' && !(b[0] == '[' && firstByte(b[1+spaceAt(b[1:]):], "{") == yes) {
		r := &pythonCalls{literal: literal{b: b, end: end}, p: p}
		calls, m := r.read(tagged)
		return calls, r.i, m
	}
	if b[0] == '{' && !callKey(b) {
		return nil, 0, no
	}
	n, m := s.scan(b)
	if m != yes {
		return nil, 0, m
	}
	calls, ok := p.readCalls(b[:n])
	if !ok || slices.ContainsFunc(calls, func(c call) bool { return p.tools[c.name] == nil }) || !hasArguments(b[:n]) {
		return nil, 0, no
	}
	return calls, n, yes
}

// callKey says whether the first key of an object, as far as it is there, is one
// that a call begins with: other JSON need not be held back.
func callKey(b []byte) bool {
	rest := b[1+spaceAt(b[1:]):]
	for _, key := range []string{`"name"`, `"type"`, `"function"`, `"parameters"`, `"arguments"`} {
		if begins(rest, key) != no {
			return true
		}
	}
	return false
}

// hasArguments says whether every call names its arguments.
func hasArguments(raw []byte) bool {
	var list []map[string]json.RawMessage
	if json.Unmarshal(raw, &list) != nil {
		list = make([]map[string]json.RawMessage, 1)
		if json.Unmarshal(raw, &list[0]) != nil {
			return false
		}
	}
	return !slices.ContainsFunc(list, func(m map[string]json.RawMessage) bool {
		return m["arguments"] == nil && m["parameters"] == nil && m["function"] == nil
	})
}

// pythonCalls reads [f(a=1), g()].
type pythonCalls struct {
	literal
	p *Parser
}

func (r *pythonCalls) read(tagged bool) ([]call, match) {
	list := r.b[0] == '['
	if !list && !tagged {
		return nil, no
	}
	if list {
		r.i++
	}
	var calls []call
	for {
		c, m := r.call()
		if m != yes {
			return nil, m
		}
		if calls = append(calls, c); r.p.calls+len(calls) > maxCalls {
			return nil, no
		}
		if !list {
			return calls, yes
		}
		if m := r.eat(']'); m != no {
			return calls, m
		}
		if m := r.eat(','); m != yes {
			return nil, m
		}
	}
}

func (r *pythonCalls) call() (call, match) {
	r.blank()
	rest := r.b[r.i:]
	n := bytes.IndexByte(rest, '(')
	if n < 0 {
		if len(rest) > maxName || bytes.ContainsAny(rest, "\n,]\"' ") {
			return call{}, no
		}
		return call{}, maybe
	}
	name := strings.TrimSuffix(string(rest[:n]), ".call")
	tool := r.p.tools[name]
	if tool == nil {
		return call{}, no
	}
	r.i += n + 1
	var parts []string
	for {
		if m := r.eat(')'); m != no {
			return call{name, "{" + strings.Join(parts, ",") + "}"}, m
		}
		if len(parts) > 0 {
			if m := r.eat(','); m != yes {
				return call{}, m
			}
		}
		r.blank()
		rest := r.b[r.i:]
		n := bytes.IndexByte(rest, '=')
		if n < 0 {
			if len(rest) > maxName {
				return call{}, no
			}
			return call{}, maybe
		}
		key := string(rest[:n])
		if n > maxName || !alphanumeric(strings.ReplaceAll(key, "_", "")) {
			return call{}, no
		}
		r.i += n + 1
		v, m := r.typed(tool.property(key), 0)
		if m != yes {
			return call{}, m
		}
		parts = append(parts, quote(key)+":"+v)
	}
}

// unquote reads a JSON string that this package wrote.
func unquote(s string) string {
	var out string
	_ = json.Unmarshal([]byte(s), &out)
	return out
}
