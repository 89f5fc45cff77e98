package toolcall

import (
	"bytes"
	"strings"
)

// tags is a syntax in which every parameter has a tag of its own. It is not XML:
// values hold what they like, their own end tag too.
type tags struct {
	call, callEnd   string
	param, paramEnd string
	oneLine         bool // one line break on each side of a value is not part of it
	declared        bool // outside a wrapper, only a declared tool is a call
	name            func(b []byte) (name string, n int, m match)
	key             func(b []byte) (key string, form valueForm, n int, m match)
}

// valueForm is what the wire says of a value's type.
type valueForm uint8

const (
	bySchema valueForm = iota
	aString
	asJSON
)

var (
	qwenTags = &tags{call: "<function=", callEnd: "</function>", param: "<parameter=", paramEnd: "</parameter>",
		oneLine: true, declared: true, name: toBracket, key: attributes}
	minimaxTags = &tags{call: `<invoke name=`, callEnd: "</invoke>", param: `<parameter name=`, paramEnd: "</parameter>",
		name: toBracket, key: attributes}
	dsmlTags = &tags{call: "<" + dsml + `invoke name=`, callEnd: "</" + dsml + "invoke>", param: "<" + dsml + `parameter name=`, paramEnd: "</" + dsml + "parameter>",
		declared: true, name: toBracket, key: attributes}
	glmTags = &tags{call: "<tool_call>", callEnd: "</tool_call>", param: "<arg_key>", paramEnd: "</arg_value>", name: glmName, key: glmKey}
)

func glmUnit() state { return glmTags.unit() }

// toBracket reads a name, in quotes or not, and the bracket after it.
func toBracket(b []byte) (string, int, match) {
	i := bytes.IndexAny(b, "><\n")
	switch {
	case i < 0 && len(b) > 2*maxName, i > 2*maxName, i >= 0 && b[i] != '>':
		return "", 0, no
	case i < 0:
		return "", 0, maybe
	}
	return strings.Trim(string(b[:i]), space+`"'`), i + 1, yes
}

// attributes reads the name of a parameter and, of DSML, whether it is a string.
func attributes(b []byte) (string, valueForm, int, match) {
	head, n, m := toBracket(b)
	form := bySchema
	name, rest, _ := strings.Cut(head, `" string="`)
	switch rest {
	case "true":
		form = aString
	case "false":
		form = asJSON
	}
	return name, form, n, m
}

// glmName reads the name that stands alone before the first key or the end.
func glmName(b []byte) (string, int, match) {
	skip := spaceAt(b)
	i := bytes.IndexAny(b[skip:], "\n<")
	name := string(b[skip:])
	if i >= 0 {
		name = name[:i]
	}
	switch {
	case len(name) > maxName || strings.Contains(name, " "):
		return "", 0, no
	case i < 0:
		return "", 0, maybe
	}
	rest := b[skip+i:]
	m, _ := beginsAny(rest[spaceAt(rest):], []string{"<arg_key>", "</tool_call>"})
	return name, skip + i, m
}

// glmKey reads <arg_key>KEY</arg_key><arg_value>, behind the first tag. Models
// put stray tags into the key.
func glmKey(b []byte) (string, valueForm, int, match) {
	const end, value = "</arg_key>", "<arg_value>"
	i := bytes.Index(b, []byte(end))
	switch {
	case i > 2*maxName, i < 0 && len(b) > 2*maxName+len(end):
		return "", 0, 0, no
	case i < 0:
		return "", 0, 0, maybe
	}
	key := string(b[:i])
	key = strings.Trim(key[strings.LastIndexByte(key, '>')+1:], space)
	rest := b[i+len(end):]
	skip := spaceAt(rest)
	return key, bySchema, i + len(end) + skip + len(value), begins(rest[skip:], value)
}

// tagCall is a call in progress.
type tagCall struct {
	*tags
	tool *schema
	seen map[string]bool
	from int // how far the value at hand was searched for its end
}

// unit reads a call from its first tag on. Its arguments are reported one
// parameter at a time.
func (t *tags) unit() state {
	c := &tagCall{tags: t, seen: map[string]bool{}}
	return func(p *Parser, end bool) bool {
		raw, n, m := t.name(p.buf[len(t.call):])
		switch {
		case m == maybe && end:
			return p.cut("", "")
		case m == maybe:
			return p.tooLong(len(t.call))
		}
		name, ok := p.name(raw)
		c.tool = p.tools[name]
		if m == no || !ok || (t.declared && !p.wrapped && c.tool == nil) {
			return p.refuse(len(t.call))
		}
		if c.tool == nil {
			c.tool = &schema{}
		}
		p.begin(name)
		p.take(len(t.call) + n)
		p.state = c.between
		return true
	}
}

// between is after the call's first tag or a parameter.
func (c *tagCall) between(p *Parser, end bool) bool {
	p.take(spaceAt(p.buf))
	stops := append([]string{c.param, c.callEnd, c.paramEnd, c.call}, p.syn.ends...)
	at, which := first(p.buf, stops)
	if at < 0 {
		if end {
			return p.cut("", "")
		}
		p.take(len(p.buf) - unsure(p.buf, stops)) // nothing that belongs here
		return false
	}
	// An end tag without its parameter, or what belongs to nothing, is dropped.
	p.take(at)
	switch which {
	case c.param:
		c.from = 0
		p.state = c.parameter
	case c.paramEnd:
		p.take(len(which))
	case c.callEnd:
		p.take(len(which))
		c.finish(p)
	default: // the call's end tag is missing
		c.finish(p)
	}
	return true
}

func (c *tagCall) finish(p *Parser) {
	if p.args {
		p.arguments("}")
	} else {
		p.arguments("{}")
	}
	p.end()
	p.state = inTail
}

// parameter is at a parameter's first tag.
func (c *tagCall) parameter(p *Parser, end bool) bool {
	key, form, head, m := c.key(p.buf[len(c.param):])
	if m == maybe && !end {
		return false
	}
	if m == maybe {
		return p.cut("", "")
	}
	if m == no { // this parameter cannot be read: go on with the next
		p.take(len(c.param))
		p.state = c.between
		return true
	}
	head += len(c.param)
	n, after, m := c.valueEnd(p, key, p.buf[head:], end)
	switch {
	case m == maybe && (end || len(p.buf) > maxHeld):
		return p.cut("", "")
	case m == maybe:
		return false
	}
	if !c.seen[key] {
		c.seen[key] = true
		p.arguments(map[bool]string{false: "{", true: ","}[p.args] + quote(key) + ":" + c.json(key, form, string(p.buf[head:head+n])))
	}
	p.take(head + after)
	p.state = c.between
	return true
}

func (c *tagCall) json(key string, form valueForm, value string) string {
	if c.oneLine {
		value = strings.TrimPrefix(value, "\n")
		value = strings.TrimSuffix(value, "\n")
	}
	switch form {
	case aString:
		return quote(value)
	case asJSON:
		return (&schema{}).coerce(value)
	}
	return c.tool.property(key).coerce(value)
}

// valueEnd finds how long a value is and what follows it. An end tag counts when
// a tag that can follow does; where it is missing, the call's end or a declared
// parameter that was not there yet ends the value too.
func (c *tagCall) valueEnd(p *Parser, key string, b []byte, end bool) (n, after int, m match) {
	stops := []string{c.paramEnd, c.callEnd, c.param}
	for {
		i, which := first(b[c.from:], stops)
		if i < 0 {
			c.from = max(c.from, len(b)-unsure(b, stops))
			return 0, 0, maybe
		}
		at := c.from + i
		after := at + len(which)
		found := no
		switch which {
		case c.param:
			found, after = c.missingEnd(key, b, at), at
		case c.callEnd:
			found, after = follows(b[after:], append([]string{c.call}, p.syn.ends...), end), at
		default:
			found = follows(b[after:], append([]string{c.param, c.callEnd, c.paramEnd, c.call}, p.syn.ends...), end)
		}
		if found == maybe {
			return 0, 0, maybe
		}
		if found == yes {
			return at, after, yes
		}
		c.from = at + len(which)
	}
}

// follows says whether one of the tags comes next; at the end of the answer
// nothing need come.
func follows(b []byte, next []string, end bool) match {
	m, _ := beginsAny(b[spaceAt(b):], next)
	if m == maybe && end {
		return yes
	}
	return m
}

// missingEnd says whether a parameter's tag within a value is a new parameter.
func (c *tagCall) missingEnd(current string, b []byte, at int) match {
	if at == 0 || b[at-1] != '\n' {
		return no
	}
	key, _, _, m := c.key(b[at+len(c.param):])
	if m == yes && (key == current || c.seen[key] || !c.tool.has(key)) {
		return no
	}
	return m
}
