package grammar

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"testing"
	"unicode/utf8"
)

// gbnf is an independent reading of the text of a grammar: it recognises texts
// and draws random ones. It knows what this package writes of the language.
type gbnf struct {
	rules map[string]*term
	memo  map[string][]int
	text  string
}

// term is one of: literal, class, name, sequence, alternatives, repetition.
type term struct {
	lit      string
	class    runeSet
	name     string
	seq, alt []*term
	rep      *term
	min, max int
}

type gbnfReader struct {
	t *testing.T
	s string
}

func readGBNF(t *testing.T, text string) *gbnf {
	t.Helper()
	g := &gbnf{rules: map[string]*term{}}
	for line := range strings.Lines(text) {
		name, body, ok := strings.Cut(strings.TrimSuffix(line, "\n"), " ::= ")
		if !ok {
			t.Fatalf("no rule: %q", line)
		}
		r := &gbnfReader{t, body}
		g.rules[name] = r.alternatives()
		if r.s != "" {
			t.Fatalf("rule %s: left over %q", name, r.s)
		}
	}
	return g
}

func (r *gbnfReader) alternatives() *term {
	out := &term{alt: []*term{r.sequence()}}
	for strings.HasPrefix(r.s, "| ") {
		r.s = r.s[2:]
		out.alt = append(out.alt, r.sequence())
	}
	return out
}

func (r *gbnfReader) sequence() *term {
	out := &term{seq: []*term{}}
	for {
		r.s = strings.TrimLeft(r.s, " ")
		if r.s == "" || r.s[0] == '|' || r.s[0] == ')' {
			return out
		}
		out.seq = append(out.seq, r.repeated(r.item()))
	}
}

func (r *gbnfReader) item() *term {
	switch r.s[0] {
	case '"':
		r.s = r.s[1:]
		var b strings.Builder
		for r.s[0] != '"' {
			b.WriteRune(r.char())
		}
		r.s = r.s[1:]
		return &term{lit: b.String(), seq: []*term{}}
	case '[':
		r.s = r.s[1:]
		var s runeSet
		for r.s[0] != ']' {
			low := r.char()
			high := low
			if r.s[0] == '-' {
				r.s = r.s[1:]
				high = r.char()
			}
			s = append(s, runeRange{low, high})
		}
		r.s = r.s[1:]
		return &term{class: s}
	case '(':
		r.s = r.s[1:]
		out := r.alternatives()
		if !strings.HasPrefix(r.s, ")") {
			r.t.Fatalf("no ) at %q", r.s)
		}
		r.s = r.s[1:]
		return out
	}
	n := strings.IndexFunc(r.s, func(c rune) bool { return !strings.ContainsRune("-", c) && !wordSet.has(c) })
	if n < 0 {
		n = len(r.s)
	}
	if n == 0 {
		r.t.Fatalf("no item at %q", r.s)
	}
	name := r.s[:n]
	r.s = r.s[n:]
	return &term{name: name}
}

func (r *gbnfReader) char() rune {
	c, n := utf8.DecodeRuneInString(r.s)
	r.s = r.s[n:]
	if c != '\\' {
		return c
	}
	kind := r.s[0]
	r.s = r.s[1:]
	size := map[byte]int{'x': 2, 'u': 4, 'U': 8}[kind]
	if size == 0 {
		if !strings.ContainsRune(`\[]-"`, rune(kind)) {
			r.t.Fatalf("escape \\%c", kind)
		}
		return rune(kind)
	}
	v, err := strconv.ParseUint(r.s[:size], 16, 32)
	if err != nil {
		r.t.Fatal(err)
	}
	r.s = r.s[size:]
	return rune(v)
}

func (r *gbnfReader) repeated(e *term) *term {
	switch {
	case strings.HasPrefix(r.s, "*"):
		r.s = r.s[1:]
		return &term{rep: e, max: noMax}
	case !strings.HasPrefix(r.s, "{"):
		return e
	}
	inner, rest, _ := strings.Cut(r.s[1:], "}")
	r.s = rest
	low, high, ranged := strings.Cut(inner, ",")
	out := &term{rep: e, max: noMax}
	out.min, _ = strconv.Atoi(low)
	if !ranged {
		out.max = out.min
	} else if high != "" {
		out.max, _ = strconv.Atoi(high)
	}
	if out.min > 2000 || out.max > 2000 || (out.max != noMax && out.max < out.min) || out.max == 0 {
		r.t.Fatalf("repetition {%s}", inner)
	}
	return out
}

// accepts says whether the grammar matches all of the text.
func (g *gbnf) accepts(text string) bool {
	g.text, g.memo = text, map[string][]int{}
	return slices.Contains(g.match(&term{name: "root"}, 0), len(text))
}

// match lists where e can end when it begins at i.
func (g *gbnf) match(e *term, i int) []int {
	switch {
	case e.name != "":
		key := fmt.Sprint(e.name, " ", i)
		if ends, ok := g.memo[key]; ok {
			return ends
		}
		ends := g.match(g.rules[e.name], i)
		g.memo[key] = ends
		return ends
	case e.class != nil:
		c, n := utf8.DecodeRuneInString(g.text[i:])
		if n > 0 && e.class.has(c) {
			return []int{i + n}
		}
		return nil
	case e.rep != nil:
		return g.matchRepeat(e, i)
	case e.alt != nil:
		var ends []int
		for _, a := range e.alt {
			ends = append(ends, g.match(a, i)...)
		}
		slices.Sort(ends)
		return slices.Compact(ends)
	case e.lit != "":
		if strings.HasPrefix(g.text[i:], e.lit) {
			return []int{i + len(e.lit)}
		}
		return nil
	}
	ends := []int{i}
	for _, part := range e.seq {
		ends = g.from(part, ends)
	}
	return ends
}

func (g *gbnf) from(e *term, starts []int) []int {
	var ends []int
	for _, s := range starts {
		ends = append(ends, g.match(e, s)...)
	}
	slices.Sort(ends)
	return slices.Compact(ends)
}

func (g *gbnf) matchRepeat(e *term, i int) []int {
	at, all := []int{i}, []int{}
	for n := 0; len(at) > 0 && (e.max == noMax || n <= e.max); n++ {
		if n >= e.min {
			all = append(all, at...)
		}
		at = g.from(e.rep, at)
	}
	slices.Sort(all)
	return slices.Compact(all)
}

// draw writes a random text; false when it grows too long.
func (g *gbnf) draw(rnd *rand.Rand) (string, bool) {
	var b strings.Builder
	ok := g.drawTerm(&b, &term{name: "root"}, rnd, 0)
	return b.String(), ok
}

func (g *gbnf) drawTerm(b *strings.Builder, e *term, rnd *rand.Rand, depth int) bool {
	switch {
	case depth > 400 || b.Len() > 4000:
		return false
	case e.name != "":
		return g.drawTerm(b, g.rules[e.name], rnd, depth+1)
	case e.class != nil:
		r := e.class[rnd.IntN(len(e.class))]
		b.WriteRune(r.low + rnd.Int32N(r.high-r.low+1))
		return true
	case e.rep != nil:
		n := e.min
		for (e.max == noMax || n < e.max) && rnd.IntN(3) > 0 {
			n++
		}
		if e.max != noMax && rnd.IntN(5) == 0 {
			n = e.max
		}
		for range n {
			if !g.drawTerm(b, e.rep, rnd, depth+1) {
				return false
			}
		}
		return true
	case e.alt != nil:
		return g.drawTerm(b, e.alt[rnd.IntN(len(e.alt))], rnd, depth+1)
	}
	b.WriteString(e.lit)
	for _, part := range e.seq {
		if !g.drawTerm(b, part, rnd, depth+1) {
			return false
		}
	}
	return true
}
