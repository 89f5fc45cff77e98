package toolcall

import (
	"bytes"
	"slices"
	"strings"
)

// MiniMax M3 writes arguments as nested elements, each tag behind a token of its
// own, so that no value can hold one.
const (
	minimaxCall    = minimax + `<invoke name=`
	minimaxCallEnd = minimax + "</invoke>"
)

// minimaxUnit reads a call that is there as a whole: types come from the schema.
func minimaxUnit() state {
	return func(p *Parser, end bool) bool {
		raw, head, m := toBracket(p.buf[len(minimaxCall):])
		name, ok := p.name(raw)
		if m == no || m == yes && !ok {
			return p.refuse(len(minimaxCall))
		}
		n := bytes.Index(p.buf, []byte(minimaxCallEnd))
		switch {
		case n < 0 && !end:
			return p.tooLong(len(minimaxCall))
		case n < 0 && m == maybe:
			return p.cut("", "")
		case n < 0:
			return p.cut(name, "")
		}
		tool := p.tools[name]
		if tool == nil {
			tool = &schema{}
		}
		r := &elements{s: string(p.buf[len(minimaxCall)+head : n])}
		kids, ok := r.children("", 0)
		if !ok {
			return p.refuse(n + len(minimaxCallEnd))
		}
		p.whole(call{name, object3(kids, tool)})
		p.take(n + len(minimaxCallEnd))
		p.state = inTail
		return true
	}
}

// element has children or text.
type element struct {
	name string
	text string
	kids []element
}

type elements struct{ s string }

// children reads elements up to the end tag of parent, or to the end of the text.
func (r *elements) children(parent string, depth int) ([]element, bool) {
	var kids []element
	for depth <= maxDepth {
		r.s = strings.TrimLeft(r.s, space)
		if r.s == "" && parent == "" {
			return kids, true
		}
		if rest, ok := strings.CutPrefix(r.s, minimax+"</"+parent+">"); ok && parent != "" {
			r.s = rest
			return kids, true
		}
		rest, ok := strings.CutPrefix(r.s, minimax+"<")
		name, rest, closed := strings.Cut(rest, ">")
		if !ok || !closed || name == "" || len(name) > maxName || strings.ContainsAny(name, "</\n") {
			return nil, false
		}
		r.s = rest
		e := element{name: name}
		if trimmed := strings.TrimLeft(rest, space); strings.HasPrefix(trimmed, minimax+"<") && !strings.HasPrefix(trimmed, minimax+"</") {
			if e.kids, ok = r.children(name, depth+1); !ok {
				return nil, false
			}
		} else if e.text, r.s, ok = strings.Cut(rest, minimax+"</"+name+">"); !ok || strings.Contains(e.text, minimax) {
			return nil, false
		}
		kids = append(kids, e)
	}
	return nil, false
}

func object3(kids []element, s *schema) string {
	var b strings.Builder
	b.WriteByte('{')
	seen := map[string]bool{}
	for _, k := range kids {
		if seen[k.name] {
			continue
		}
		if len(seen) > 0 {
			b.WriteByte(',')
		}
		seen[k.name] = true
		b.WriteString(quote(k.name) + ":" + k.json(s.property(k.name)))
	}
	b.WriteByte('}')
	return b.String()
}

func (e element) json(s *schema) string {
	types := s.types()
	list := slices.Contains(types, "array")
	switch {
	case len(e.kids) == 0 && list && strings.Trim(e.text, space) == "":
		return "[]"
	case len(e.kids) == 0 && slices.Contains(types, "object") && strings.Trim(e.text, space) == "":
		return "{}"
	case len(e.kids) == 0:
		return s.coerce(e.text)
	}
	items := !slices.ContainsFunc(e.kids, func(k element) bool { return k.name != "item" })
	if !list && !(len(types) == 0 && items) {
		return object3(e.kids, s)
	}
	parts := make([]string, len(e.kids))
	for i, k := range e.kids {
		parts[i] = k.json(s.items())
	}
	return "[" + strings.Join(parts, ",") + "]"
}
