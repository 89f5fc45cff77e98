package jinja

import (
	"fmt"
	"strconv"
)

// parser turns tokens into closures. depth counts open expressions and blocks.
type parser struct {
	tokens []token
	pos    int
	depth  int
	loops  int // open for-loops: break and continue need one
}

func (p *parser) peek() token { return p.tokens[p.pos] }

func (p *parser) fail(format string, args ...any) {
	panic(failure{fmt.Errorf("template line %d: "+format, append([]any{p.peek().line}, args...)...)})
}

// open bounds recursion; close undoes it.
func (p *parser) open() {
	if p.depth++; p.depth > maxNest {
		p.fail("nested deeper than %d: %w", maxNest, ErrLimit)
	}
}

func (p *parser) close() { p.depth-- }

func (p *parser) next() token {
	t := p.peek()
	if t.kind != tokEOF {
		p.pos++
	}
	return t
}

func (p *parser) is(k kind, text string) bool {
	t := p.peek()
	return t.kind == k && t.text == text
}

func (p *parser) accept(k kind, text string) bool {
	if !p.is(k, text) {
		return false
	}
	p.pos++
	return true
}

func (p *parser) op(text string) bool   { return p.accept(tokOp, text) }
func (p *parser) word(text string) bool { return p.accept(tokName, text) }

func (p *parser) expect(k kind, text string) {
	if !p.accept(k, text) {
		p.fail("expected %q, found %q", text, p.peek().text)
	}
}

func (p *parser) name() string {
	t := p.next()
	if t.kind != tokName {
		p.pos--
		p.fail("expected a name, found %q", t.text)
	}
	return t.text
}

// at wraps f so that every evaluation is charged and errors know their line.
func (p *parser) at(f expr) expr {
	line := p.peek().line
	return func(r *run, s *scope) any {
		r.enter()
		old := r.line
		r.line = line
		v := f(r, s)
		r.line = old
		r.leave()
		return v
	}
}

// expression reads the lowest precedence: a if b else c.
func (p *parser) expression() expr {
	p.open()
	defer p.close()
	value := p.or()
	for p.word("if") {
		yes, cond := value, p.or()
		no := expr(func(*run, *scope) any { return undefined("the missing else") })
		if p.word("else") {
			no = p.expression()
		}
		value = p.at(func(r *run, s *scope) any {
			if truthy(cond(r, s)) {
				return yes(r, s)
			}
			return no(r, s)
		})
	}
	return value
}

func (p *parser) or() expr {
	left := p.and()
	for p.word("or") {
		l, right := left, p.and()
		left = p.at(func(r *run, s *scope) any {
			if v := l(r, s); truthy(v) {
				return v
			}
			return right(r, s)
		})
	}
	return left
}

func (p *parser) and() expr {
	left := p.not()
	for p.word("and") {
		l, right := left, p.not()
		left = p.at(func(r *run, s *scope) any {
			if v := l(r, s); !truthy(v) {
				return v
			}
			return right(r, s)
		})
	}
	return left
}

func (p *parser) not() expr {
	if !p.word("not") {
		return p.compare()
	}
	p.open()
	defer p.close()
	e := p.not()
	return p.at(func(r *run, s *scope) any { return !truthy(e(r, s)) })
}

// comparison returns the operator at the cursor, or "".
func (p *parser) comparison() string {
	t := p.peek()
	switch {
	case t.kind == tokOp && (t.text == "==" || t.text == "!=" || t.text == "<" || t.text == "<=" || t.text == ">" || t.text == ">="):
		p.pos++
		return t.text
	case p.word("in"):
		return "in"
	case t.kind == tokName && t.text == "not" && p.tokens[p.pos+1].text == "in":
		p.pos += 2
		return "not in"
	}
	return ""
}

// compare reads a chain such as 0 < a <= b: true when each pair holds.
func (p *parser) compare() expr {
	first := p.binary(0)
	var ops []string
	var rest []expr
	for op := p.comparison(); op != ""; op = p.comparison() {
		ops, rest = append(ops, op), append(rest, p.binary(0))
	}
	if ops == nil {
		return first
	}
	return p.at(func(r *run, s *scope) any {
		left := first(r, s)
		for i, op := range ops {
			right := rest[i](r, s)
			if !r.compareOp(op, left, right) {
				return false
			}
			left = right
		}
		return true
	})
}

// levels are the binary operators from loosest to tightest.
var levels = [][]string{{"+", "-"}, {"~"}, {"*", "/", "//", "%"}, {"**"}}

func (p *parser) binary(level int) expr {
	if level == len(levels) {
		return p.unary(true)
	}
	left := p.binary(level + 1)
	for {
		op := ""
		for _, o := range levels[level] {
			if p.op(o) {
				op = o
				break
			}
		}
		if op == "" {
			return left
		}
		l, right := left, p.binary(level+1)
		left = p.at(func(r *run, s *scope) any { return r.arith(op, l(r, s), right(r, s)) })
	}
}

func (p *parser) unary(filters bool) expr {
	p.open()
	defer p.close()
	var e expr
	if p.is(tokOp, "-") || p.is(tokOp, "+") {
		sign := p.next().text
		inner := p.unary(false)
		e = p.at(func(r *run, s *scope) any { return r.sign(sign, inner(r, s)) })
	} else {
		e = p.primary()
	}
	e = p.postfix(e)
	if filters {
		e = p.filters(e)
	}
	return e
}

func constant(v any) expr { return func(*run, *scope) any { return v } }

func (p *parser) primary() expr {
	t := p.next()
	switch t.kind {
	case tokName:
		return p.nameOrConstant(t.text)
	case tokString:
		text := t.text
		for p.peek().kind == tokString {
			text += p.next().text
		}
		return constant(text)
	case tokInt:
		n, err := strconv.ParseInt(t.text, 10, 64)
		if err != nil {
			p.fail("number %s does not fit 64 bits", t.text)
		}
		return constant(n)
	case tokFloat:
		f, err := strconv.ParseFloat(t.text, 64)
		if err != nil {
			p.fail("number %s does not fit a float", t.text)
		}
		return constant(f)
	}
	switch {
	case t.kind == tokOp && t.text == "(":
		e := p.tuple(")")
		p.expect(tokOp, ")")
		return e
	case t.kind == tokOp && t.text == "[":
		items, _ := p.items("]")
		p.expect(tokOp, "]")
		return p.list(items, false)
	case t.kind == tokOp && t.text == "{":
		return p.dict()
	}
	p.fail("expected a value, found %q", t.text)
	return nil
}

func (p *parser) nameOrConstant(name string) expr {
	switch name {
	case "true", "True":
		return constant(true)
	case "false", "False":
		return constant(false)
	case "none", "None":
		return constant(nil)
	}
	return p.at(func(_ *run, s *scope) any { return s.get(name) })
}

// items reads expressions up to (not including) the closing text.
func (p *parser) items(end string) (items []expr, comma bool) {
	for p.peek().kind != tokEnd && !p.is(tokOp, end) {
		items = append(items, p.expression())
		comma = p.op(",")
		if !comma {
			break
		}
	}
	return items, comma || len(items) > 1
}

// tuple reads one expression, or several as a tuple, up to the closing text.
func (p *parser) tuple(end string) expr {
	items, comma := p.items(end)
	if len(items) == 1 && !comma {
		return items[0]
	}
	if len(items) == 0 && end != ")" {
		p.fail("expected a value, found %q", p.peek().text)
	}
	return p.list(items, true)
}

func (p *parser) list(items []expr, tuple bool) expr {
	return p.at(func(r *run, s *scope) any {
		r.alloc(16 * len(items))
		l := &List{Items: make([]any, len(items)), tuple: tuple}
		for i, e := range items {
			l.Items[i] = e(r, s)
		}
		return l
	})
}

func (p *parser) dict() expr {
	var keys, values []expr
	for !p.is(tokOp, "}") {
		keys = append(keys, p.expression())
		p.expect(tokOp, ":")
		values = append(values, p.expression())
		if !p.op(",") {
			break
		}
	}
	p.expect(tokOp, "}")
	return p.at(func(r *run, s *scope) any {
		r.alloc(64 * len(keys))
		d := NewDict()
		for i := range keys {
			key := keys[i](r, s)
			switch key.(type) {
			case string, int64:
			default:
				r.fail("%s cannot be a dict key", describe(key))
			}
			d.set(key, values[i](r, s))
		}
		return d
	})
}
