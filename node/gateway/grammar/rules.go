package grammar

import (
	"fmt"
	"strings"
)

// Limits on a grammar. llama.cpp expands a repetition into as many rules, and
// walks leftmost rules without remembering where it was.
const (
	maxRules    = 4_000
	maxElements = 60_000  // after repetitions are expanded
	maxSteps    = 1 << 20 // of a compiler; a conjunction is as wide as its schema, and there are as many as rules
	maxRepeat   = 1_000   // of one repetition as written; llama.cpp drops a bound over 2,000
	maxLeftmost = 2_000   // leftmost paths from one rule
)

const noMax = -1

type op uint8

const (
	opLit op = iota
	opSet
	opRef
	opSeq // none: the empty text
	opAlt // none: nothing matches
	opRepeat
)

// expr is a piece of a rule.
type expr struct {
	op       op
	lit      string
	set      runeSet
	ref      *rule
	kids     []*expr
	min, max int // of opRepeat; max may be noMax
}

type rule struct {
	name       string
	body       *expr
	productive bool // some finite text matches
	nullable   bool // the empty text matches
	leftmost   int  // paths to a first terminal; 0 = not counted yet
	inProgress bool
	reached    bool
}

var (
	empty = &expr{op: opSeq}
	never = &expr{op: opAlt}
)

func lit(s string) *expr      { return &expr{op: opLit, lit: s} }
func set(s runeSet) *expr     { return &expr{op: opSet, set: s} }
func ref(r *rule) *expr       { return &expr{op: opRef, ref: r} }
func seq(kids ...*expr) *expr { return &expr{op: opSeq, kids: kids} }
func alt(kids ...*expr) *expr { return &expr{op: opAlt, kids: kids} }
func opt(e *expr) *expr       { return alt(e, empty) }

// grammar collects rules under one root name.
type grammar struct {
	root     string
	rules    []*rule
	elements int
	full     bool // a limit was passed
}

func (g *grammar) rule(body *expr) *rule {
	r := &rule{name: g.root, body: body}
	if len(g.rules) > 0 {
		r.name = fmt.Sprintf("%s-%d", g.root, len(g.rules))
	}
	g.rules = append(g.rules, r)
	if len(g.rules) > maxRules {
		g.full = true
	}
	return r
}

// repeat writes e between low and high times. Long ranges become blocks, since
// one repetition of llama.cpp may not be long.
func (g *grammar) repeat(e *expr, low, high int) *expr {
	switch {
	case high == 0:
		return empty
	case low == 1 && high == 1:
		return e
	}
	if e.op != opRef && e.op != opSet {
		e = ref(g.rule(e))
	}
	if low <= maxRepeat && high <= maxRepeat {
		g.elements += 2 * max(low, high, 1)
		return &expr{op: opRepeat, kids: []*expr{e}, min: low, max: high}
	}
	if max(low, high) > maxElements {
		g.full = true
		return never
	}
	// A block is maxRepeat long, so a text has at most three readings.
	block := ref(g.rule(g.repeat(e, maxRepeat, maxRepeat)))
	head := seq(g.repeat(block, low/maxRepeat, low/maxRepeat), g.repeat(e, low%maxRepeat, low%maxRepeat))
	if high == noMax {
		return seq(head, g.repeat(e, 0, noMax))
	}
	rest := high - low
	if rest <= maxRepeat {
		return seq(head, g.repeat(e, 0, rest))
	}
	tail := rest%maxRepeat + maxRepeat
	half := tail / 2
	return seq(head, g.repeat(block, 0, rest/maxRepeat-1), g.repeat(e, 0, half), g.repeat(e, 0, tail-half))
}

// check finds what matches nothing and what llama.cpp could not walk. It
// returns a reason to refuse, or "".
func (g *grammar) check() string {
	for changed := true; changed; {
		changed = false
		for _, r := range g.rules {
			if p, n := r.body.productive(), r.body.nullable(); p != r.productive || n != r.nullable {
				r.productive, r.nullable, changed = p, n, true
			}
		}
	}
	if !g.rules[0].productive {
		return "no finite value can match it"
	}
	g.reach(g.rules[0].body)
	g.rules[0].reached = true
	for _, r := range g.rules {
		if !r.reached {
			continue
		}
		if r.body.loopsOnEmpty() {
			return "a repetition of what may be empty"
		}
		switch n := r.paths(); {
		case n < 0:
			return "it refers to itself without anything in between"
		case n > maxLeftmost:
			return fmt.Sprintf("more than %d alternatives at one place", maxLeftmost)
		}
	}
	return ""
}

func (g *grammar) reach(e *expr) {
	if e.op == opRef && !e.ref.reached && e.ref.productive {
		e.ref.reached = true
		g.reach(e.ref.body)
	}
	for _, k := range e.kids {
		if k.productive() {
			g.reach(k)
		}
	}
}

func (e *expr) productive() bool {
	switch e.op {
	case opRef:
		return e.ref.productive
	case opSet:
		return len(e.set) > 0
	case opSeq:
		for _, k := range e.kids {
			if !k.productive() {
				return false
			}
		}
		return true
	case opAlt:
		for _, k := range e.kids {
			if k.productive() {
				return true
			}
		}
		return false
	case opRepeat:
		return e.min == 0 || e.kids[0].productive()
	}
	return true
}

func (e *expr) nullable() bool {
	switch e.op {
	case opLit:
		return e.lit == ""
	case opRef:
		return e.ref.nullable
	case opSeq:
		for _, k := range e.kids {
			if !k.nullable() {
				return false
			}
		}
		return true
	case opAlt:
		for _, k := range e.kids {
			if k.nullable() {
				return true
			}
		}
		return false
	case opRepeat:
		return e.min == 0 || e.kids[0].nullable()
	}
	return false
}

func (e *expr) loopsOnEmpty() bool {
	if e.op == opRepeat && e.kids[0].nullable() {
		return true
	}
	for _, k := range e.kids {
		if k.loopsOnEmpty() {
			return true
		}
	}
	return false
}

// paths counts the ways from a rule to its first terminals; -1: it comes to
// itself first.
func (r *rule) paths() int {
	if r.inProgress {
		return -1
	}
	if r.leftmost == 0 {
		r.inProgress = true
		r.leftmost = r.body.paths()
		r.inProgress = false
	}
	return r.leftmost
}

func (e *expr) paths() int {
	sum := 1
	add := func(n int) bool {
		if n < 0 {
			sum = -1
			return false
		}
		sum = min(sum+n, maxLeftmost+1)
		return true
	}
	switch e.op {
	case opRef:
		if e.ref.productive {
			add(e.ref.paths())
		}
	case opRepeat:
		if e.kids[0].productive() {
			add(e.kids[0].paths())
		}
	case opAlt:
		for _, k := range e.kids {
			if k.productive() && !add(k.paths()) {
				break
			}
		}
	case opSeq:
		for _, k := range e.kids {
			if !add(k.paths()) || !k.nullable() {
				break
			}
		}
	}
	return sum
}

// text writes what is reachable and productive.
func (g *grammar) text() string {
	var b strings.Builder
	for _, r := range g.rules {
		if r.reached {
			fmt.Fprintf(&b, "%s ::= ", r.name)
			r.body.write(&b, false)
			b.WriteByte('\n')
		}
	}
	return b.String()
}

func (e *expr) write(b *strings.Builder, group bool) {
	switch e.op {
	case opLit:
		writeLiteral(b, e.lit)
	case opSet:
		e.set.write(b)
	case opRef:
		b.WriteString(e.ref.name)
	case opRepeat:
		e.writeRepeat(b)
	case opSeq:
		e.writeSeq(b)
	case opAlt:
		e.writeAlt(b, group)
	}
}

func (e *expr) writeRepeat(b *strings.Builder) {
	if !e.kids[0].productive() {
		b.WriteString(`""`)
		return
	}
	e.kids[0].write(b, true)
	switch {
	case e.min == 0 && e.max == noMax:
		b.WriteByte('*')
	case e.max == noMax:
		fmt.Fprintf(b, "{%d,}", e.min)
	case e.min == e.max:
		fmt.Fprintf(b, "{%d}", e.min)
	default:
		fmt.Fprintf(b, "{%d,%d}", e.min, e.max)
	}
}

func (e *expr) writeSeq(b *strings.Builder) {
	if len(e.kids) == 0 {
		b.WriteString(`""`)
	}
	for i, k := range e.kids {
		if i > 0 {
			b.WriteByte(' ')
		}
		k.write(b, true)
	}
}

func (e *expr) writeAlt(b *strings.Builder, group bool) {
	var live []*expr
	for _, k := range e.kids {
		if k.productive() {
			live = append(live, k)
		}
	}
	group = group && len(live) > 1
	if group {
		b.WriteByte('(')
	}
	for i, k := range live {
		if i > 0 {
			b.WriteString(" | ")
		}
		k.write(b, len(live) == 1)
	}
	if group {
		b.WriteByte(')')
	}
}

func writeLiteral(b *strings.Builder, s string) {
	b.WriteByte('"')
	for _, r := range s {
		if r == '"' {
			b.WriteString(`\"`)
		} else {
			writeRune(b, r)
		}
	}
	b.WriteByte('"')
}

// writeRune writes a character so that it is plain both in quotes and in
// brackets.
func writeRune(b *strings.Builder, r rune) {
	switch {
	case r == '\\' || r == '[' || r == ']' || r == '-':
		b.WriteByte('\\')
		b.WriteRune(r)
	case r >= 0x20 && r < 0x7f && r != '^' && r != '"':
		b.WriteRune(r)
	case r < 0x100:
		fmt.Fprintf(b, `\x%02X`, r)
	case r < 0x10000:
		fmt.Fprintf(b, `\u%04X`, r)
	default:
		fmt.Fprintf(b, `\U%08X`, r)
	}
}
