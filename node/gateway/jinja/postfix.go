package jinja

// postfix reads attributes, subscripts and calls after a value.
func (p *parser) postfix(e expr) expr {
	for {
		switch obj := e; {
		case p.op("."):
			e = p.attribute(obj)
		case p.op("["):
			e = p.subscript(obj)
		case p.is(tokOp, "("):
			e = p.call(obj)
		default:
			return e
		}
	}
}

func (p *parser) attribute(obj expr) expr {
	if t := p.peek(); t.kind == tokInt {
		index := p.primary()
		return p.at(func(r *run, s *scope) any { return r.item(obj(r, s), index(r, s)) })
	}
	name := p.name()
	return p.at(func(r *run, s *scope) any { return r.attr(obj(r, s), name) })
}

// subscript reads [key] or [start:stop:step].
func (p *parser) subscript(obj expr) expr {
	var parts [3]expr
	n := 0
	for !p.is(tokOp, "]") && n < 3 {
		if !p.is(tokOp, ":") {
			parts[n] = p.expression()
		}
		if !p.op(":") {
			break
		}
		n++
	}
	p.expect(tokOp, "]")
	if n == 0 {
		key := parts[0]
		if key == nil {
			p.fail("empty subscript")
		}
		return p.at(func(r *run, s *scope) any { return r.item(obj(r, s), key(r, s)) })
	}
	return p.at(func(r *run, s *scope) any {
		var bounds [3]any
		v := obj(r, s)
		for i, e := range parts {
			if e != nil {
				bounds[i] = e(r, s)
			}
		}
		return r.slice(v, bounds)
	})
}

// arguments are evaluated call arguments. kw is never nil.
type arguments struct {
	pos []any
	kw  *Dict
}

// arg returns argument i, also given by name, or def.
func (a arguments) arg(i int, name string, def any) any {
	if i < len(a.pos) {
		return a.pos[i]
	}
	if v, ok := a.kw.Get(name); ok {
		return v
	}
	return def
}

// args reads (a, b, name=c, **d), or nothing when there is no bracket.
func (p *parser) args() func(*run, *scope) arguments {
	var pos, kwValues, spread []expr
	var kwNames []string
	if p.op("(") {
		for !p.is(tokOp, ")") {
			if p.op("**") {
				spread = append(spread, p.expression())
			} else if t := p.peek(); t.kind == tokName && p.tokens[p.pos+1].kind == tokOp && p.tokens[p.pos+1].text == "=" {
				p.pos += 2
				kwNames, kwValues = append(kwNames, t.text), append(kwValues, p.expression())
			} else {
				pos = append(pos, p.expression())
			}
			if !p.op(",") {
				break
			}
		}
		p.expect(tokOp, ")")
	}
	return func(r *run, s *scope) arguments {
		r.alloc(16*len(pos) + 64*len(kwNames))
		a := arguments{pos: make([]any, 0, len(pos)+1), kw: NewDict()}
		for _, e := range pos {
			a.pos = append(a.pos, e(r, s))
		}
		for i, name := range kwNames {
			a.kw.Set(name, kwValues[i](r, s))
		}
		for _, e := range spread {
			v := e(r, s)
			d, ok := v.(*Dict)
			if !ok {
				r.fail("** does not work on %s", describe(v))
			}
			r.extend(a.kw, d)
		}
		return a
	}
}

func (p *parser) call(fn expr) expr {
	args := p.args()
	return p.at(func(r *run, s *scope) any {
		v := fn(r, s)
		c, ok := v.(*callable)
		if !ok {
			r.fail("%s cannot be called", describe(v))
		}
		return c.fn(r, args(r, s))
	})
}

// filters reads |name(args) and is [not] test args.
func (p *parser) filters(e expr) expr {
	for {
		switch value := e; {
		case p.op("|"):
			e = p.filter(value)
		case p.word("is"):
			e = p.test(value)
		case p.is(tokOp, "("):
			e = p.call(value)
		default:
			return e
		}
	}
}

func (p *parser) filter(value expr) expr {
	name := p.name()
	fn, ok := filters[name]
	if !ok {
		p.fail("unknown filter %q", name)
	}
	args := p.args()
	return p.at(func(r *run, s *scope) any { return fn(r, value(r, s), args(r, s)) })
}

// notArgument are the words that end a test instead of being its argument.
var notArgument = map[string]bool{"else": true, "or": true, "and": true, "if": true, "not": true, "in": true, "is": true}

func (p *parser) test(value expr) expr {
	negate := p.word("not")
	t := p.next()
	name := t.text
	fn, ok := tests[name]
	if !ok || t.kind != tokName {
		p.fail("unknown test %q", name)
	}
	args := p.args
	switch t := p.peek(); {
	case t.kind == tokString, t.kind == tokInt, t.kind == tokFloat,
		t.kind == tokName && !notArgument[t.text], t.kind == tokOp && (t.text == "[" || t.text == "{"):
		one := p.postfix(p.primary())
		args = func() func(*run, *scope) arguments {
			return func(r *run, s *scope) arguments {
				return arguments{pos: []any{one(r, s)}, kw: NewDict()}
			}
		}
	}
	evaluate := args()
	return p.at(func(r *run, s *scope) any { return fn(r, value(r, s), evaluate(r, s).pos) != negate })
}
