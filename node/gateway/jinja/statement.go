package jinja

import "slices"

// block reads text and tags up to a block tag that begins with one of ends;
// the cursor is then behind that word. Without ends it reads to the end.
func (p *parser) block(ends ...string) []stmt {
	p.open()
	defer p.close()
	var body []stmt
	for {
		t := p.peek()
		switch t.kind {
		case tokEOF:
			if ends != nil {
				p.fail("expected %q before the end", ends)
			}
			return body
		case tokData:
			p.pos++
			body = append(body, func(r *run, _ *scope) control { r.write(t.text); return next })
		case tokPrint:
			p.pos++
			e := p.tuple("")
			p.expect(tokEnd, "}}")
			body = append(body, func(r *run, s *scope) control { r.write(r.str(e(r, s))); return next })
		case tokBlock:
			if w := p.tokens[p.pos+1]; w.kind == tokName && slices.Contains(ends, w.text) {
				p.pos++
				return body
			}
			p.pos++
			body = append(body, p.statement())
		default:
			p.fail("unexpected %q", t.text)
		}
	}
}

func (p *parser) endTag() { p.expect(tokEnd, "%}") }

// endBlock closes a block: the word, then the end of the tag.
func (p *parser) endBlock(word string) {
	p.expect(tokName, word)
	p.endTag()
}

func (p *parser) statement() stmt {
	switch word := p.name(); word {
	case "if":
		return p.ifElse()
	case "for":
		return p.forLoop()
	case "set":
		return p.set()
	case "macro":
		return p.macro()
	case "filter":
		return p.filterBlock()
	case "generation":
		p.endTag()
		body := p.block("endgeneration")
		p.endBlock("endgeneration")
		return func(r *run, s *scope) control { return r.block(s, body) }
	case "break", "continue":
		if p.loops == 0 {
			p.fail("%s outside a loop", word)
		}
		p.endTag()
		end := breakLoop
		if word == "continue" {
			end = continueLoop
		}
		return func(r *run, _ *scope) control { r.spend(1); return end }
	default:
		p.fail("statement %q is not supported in a chat template", word)
		return nil
	}
}

func (p *parser) ifElse() stmt {
	type branch struct {
		cond expr
		body []stmt
	}
	var branches []branch
	for {
		cond := p.tuple("")
		p.endTag()
		branches = append(branches, branch{cond, p.block("elif", "else", "endif")})
		if !p.word("elif") {
			break
		}
	}
	if p.word("else") {
		p.endTag()
		branches = append(branches, branch{constant(true), p.block("endif")})
	}
	p.endBlock("endif")
	return func(r *run, s *scope) control {
		for _, b := range branches {
			if truthy(b.cond(r, s)) {
				return r.block(s, b.body)
			}
		}
		return next
	}
}

// targets reads the names that a for or set assigns.
func (p *parser) targets() []string {
	bracket := p.op("(")
	names := []string{p.name()}
	for p.op(",") {
		names = append(names, p.name())
	}
	if bracket {
		p.expect(tokOp, ")")
	}
	return names
}

// assign binds one value to one name, or unpacks it over several.
func (r *run) assign(s *scope, names []string, v any) {
	if len(names) == 1 {
		s.vars[names[0]] = v
		return
	}
	items := r.iterate(v)
	if len(items) != len(names) {
		r.fail("cannot unpack %d values into %d names", len(items), len(names))
	}
	for i, name := range names {
		s.vars[name] = items[i]
	}
}

func (p *parser) forLoop() stmt {
	names := p.targets()
	p.expect(tokName, "in")
	iter := p.or()
	if p.is(tokOp, ",") {
		p.fail("a loop over a bare tuple needs brackets")
	}
	var cond expr
	if p.word("if") {
		cond = p.expression()
	}
	p.endTag()
	p.loops++
	body := p.block("else", "endfor")
	p.loops--
	var otherwise []stmt
	if p.word("else") {
		p.endTag()
		otherwise = p.block("endfor")
	}
	p.endBlock("endfor")
	return func(r *run, s *scope) control {
		items := r.iterate(iter(r, s))
		if cond != nil {
			items = r.where(s, names, items, cond)
		}
		if len(items) == 0 {
			return r.block(s, otherwise)
		}
		return r.loop(s, names, items, body)
	}
}

// where keeps the items for which a loop's condition holds.
func (r *run) where(s *scope, names []string, items []any, cond expr) []any {
	var kept []any
	for _, item := range items {
		r.alloc(64)
		inner := newScope(s)
		r.assign(inner, names, item)
		if truthy(cond(r, inner)) {
			kept = append(kept, item)
		}
	}
	return kept
}

func (r *run) loop(s *scope, names []string, items []any, body []stmt) control {
	for i, item := range items {
		r.alloc(256)
		inner := newScope(s)
		inner.vars["loop"] = &loopState{items: items, index: i}
		r.assign(inner, names, item)
		if r.block(inner, body) == breakLoop {
			break
		}
	}
	return next
}

// set reads an assignment to names, to a namespace's attribute, or of a block.
func (p *parser) set() stmt {
	names := p.targets()
	attr := ""
	if len(names) == 1 && p.op(".") {
		attr = p.name()
	}
	store := func(r *run, s *scope, v any) {
		if attr == "" {
			r.assign(s, names, v)
			return
		}
		ns, ok := s.get(names[0]).(*namespace)
		if !ok {
			r.fail("%s is not a namespace: its attribute cannot be set", names[0])
		}
		r.alloc(64)
		ns.vars[attr] = v
	}
	if p.op("=") {
		e := p.tuple("")
		p.endTag()
		return func(r *run, s *scope) control { store(r, s, e(r, s)); return next }
	}
	var text expr
	filtered := p.captured(&text)
	p.endTag()
	body := p.block("endset")
	p.endBlock("endset")
	text = func(r *run, s *scope) any { return r.capture(newScope(s), body) }
	return func(r *run, s *scope) control { store(r, s, filtered(r, s)); return next }
}

// captured reads the filters that apply to a block whose text comes later.
func (p *parser) captured(text *expr) expr {
	e := expr(func(r *run, s *scope) any { return (*text)(r, s) })
	for p.op("|") {
		e = p.filter(e)
	}
	return e
}

func (p *parser) filterBlock() stmt {
	var text expr
	filtered := p.filter(func(r *run, s *scope) any { return text(r, s) })
	for p.op("|") {
		filtered = p.filter(filtered)
	}
	p.endTag()
	body := p.block("endfilter")
	p.endBlock("endfilter")
	text = func(r *run, s *scope) any { return r.capture(newScope(s), body) }
	return func(r *run, s *scope) control { r.write(r.str(filtered(r, s))); return next }
}

type param struct {
	name string
	def  expr // nil: undefined when not given
}

// notGiven marks a macro argument that the caller left out.
var notGiven any = &callable{name: "argument not given"}

func (p *parser) params() []param {
	var params []param
	p.expect(tokOp, "(")
	for !p.is(tokOp, ")") {
		q := param{name: p.name()}
		if p.op("=") {
			q.def = p.expression()
		}
		params = append(params, q)
		if !p.op(",") {
			break
		}
	}
	p.expect(tokOp, ")")
	return params
}

// macro defines a function that returns the text of its body. It sees the
// scope that it was defined in.
func (p *parser) macro() stmt {
	name := p.name()
	params := p.params()
	p.endTag()
	loops := p.loops
	p.loops = 0
	body := p.block("endmacro")
	p.loops = loops
	p.endBlock("endmacro")
	return func(r *run, s *scope) control {
		s.vars[name] = &callable{name: name, fn: func(r *run, a arguments) any {
			if len(a.pos) > len(params) {
				r.fail("macro %s takes at most %d arguments, got %d", name, len(params), len(a.pos))
			}
			r.enter()
			r.alloc(256)
			inner := newScope(s)
			for i, q := range params {
				v := a.arg(i, q.name, notGiven)
				switch {
				case v == notGiven && q.def != nil:
					v = q.def(r, inner)
				case v == notGiven:
					v = undefined(q.name)
				}
				inner.vars[q.name] = v
			}
			text := r.capture(inner, body)
			r.leave()
			return text
		}}
		return next
	}
}
