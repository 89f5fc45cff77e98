package grammar

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"unicode/utf8"
)

// Limits on a pattern.
const (
	maxPattern      = 4_096 // bytes
	maxPatternDepth = 24    // groups in groups
)

// piece is a part of a pattern with the fewest and most characters it matches.
type piece struct {
	e        *expr
	min, max int   // max may be noMax
	loop     *expr // of a single character repeated min to max times: the character
}

// regex reads the regular part of ECMA-262 patterns: literals, classes, groups,
// alternatives, counted repetition, and ^ and $ around a whole alternative. As
// JSON schema wants it, a pattern without ^ or $ may match within the string.
type regex struct {
	c     *compiler
	s     string
	depth int
}

func (c *compiler) regex(pattern string) (*piece, error) {
	if len(pattern) > maxPattern {
		return nil, fmt.Errorf("longer than %d bytes", maxPattern)
	}
	r := &regex{c: c, s: pattern}
	all, err := r.alternatives(r.anchored)
	if err != nil {
		return nil, err
	}
	if r.s != "" {
		return nil, fmt.Errorf("it cannot be read at %q", clip(r.s))
	}
	return all, nil
}

func clip(s string) string { return s[:min(len(s), 20)] }

func (r *regex) eat(s string) bool {
	rest, ok := strings.CutPrefix(r.s, s)
	r.s = rest
	return ok
}

// alternatives reads one or more, each by one.
func (r *regex) alternatives(one func() (*piece, error)) (*piece, error) {
	var all *piece
	for {
		p, err := one()
		if err != nil {
			return nil, err
		}
		all = or(all, p)
		if !r.eat("|") {
			return all, nil
		}
	}
}

// anchored is one alternative of the whole pattern.
func (r *regex) anchored() (*piece, error) {
	free := func() *piece { return &piece{e: r.c.g.repeat(r.c.char(), 0, noMax), max: noMax} }
	start := r.eat("^")
	p, err := r.sequence()
	if err != nil {
		return nil, err
	}
	if !start {
		p = then(free(), p)
	}
	if !r.eat("$") {
		p = then(p, free())
	}
	return p, nil
}

func or(a, b *piece) *piece {
	if a == nil {
		return b
	}
	high := noMax
	if a.max != noMax && b.max != noMax {
		high = max(a.max, b.max)
	}
	return &piece{e: alt(a.e, b.e), min: min(a.min, b.min), max: high}
}

func then(a, b *piece) *piece {
	if a == nil {
		return b
	}
	high := noMax
	if a.max != noMax && b.max != noMax {
		high = min(a.max+b.max, 1<<30)
	}
	return &piece{e: seq(a.e, b.e), min: min(a.min+b.min, 1<<30), max: high}
}

// sequence reads up to an alternative, an end of a group or a $.
func (r *regex) sequence() (*piece, error) {
	var all *piece
	for r.s != "" && !strings.ContainsRune("|)$", rune(r.s[0])) {
		p, err := r.atom()
		if err != nil {
			return nil, err
		}
		if p, err = r.quantified(p); err != nil {
			return nil, err
		}
		all = then(all, p)
	}
	if all == nil {
		all = &piece{e: empty}
	}
	return all, nil
}

func (r *regex) atom() (*piece, error) {
	switch c := r.s[0]; {
	case c == '(':
		return r.group()
	case c == '[':
		s, err := r.class()
		return r.one(s), err
	case c == '.':
		r.s = r.s[1:]
		return r.one(everything.without(chars("\n\r\u2028\u2029"))), nil
	case c == '\\':
		s, err := r.escape(false)
		return r.one(s), err
	case strings.IndexByte("*+?{}]^", c) >= 0:
		return nil, fmt.Errorf("%q stands where it has no meaning", c)
	}
	return r.one(r.letter()), nil
}

func (r *regex) letter() runeSet {
	c, n := utf8.DecodeRuneInString(r.s)
	r.s = r.s[n:]
	return setOf(runeRange{c, c})
}

func (r *regex) group() (*piece, error) {
	r.eat("(")
	switch {
	case r.eat("?:") || !strings.HasPrefix(r.s, "?"):
	case !r.eat("?<") || strings.HasPrefix(r.s, "=") || strings.HasPrefix(r.s, "!"):
		return nil, errors.New("it looks around")
	default:
		_, rest, ok := strings.Cut(r.s, ">")
		if !ok {
			return nil, errors.New("a group's name does not end")
		}
		r.s = rest
	}
	if r.depth++; r.depth > maxPatternDepth {
		return nil, fmt.Errorf("more than %d groups in groups", maxPatternDepth)
	}
	all, err := r.alternatives(r.sequence)
	if err != nil {
		return nil, err
	}
	r.depth--
	if !r.eat(")") {
		return nil, fmt.Errorf("a group does not end at %q", clip(r.s))
	}
	return all, nil
}

// quantified reads what may follow an atom.
func (r *regex) quantified(p *piece) (*piece, error) {
	low, high := 1, 1
	switch {
	case r.eat("*"):
		low, high = 0, noMax
	case r.eat("+"):
		low, high = 1, noMax
	case r.eat("?"):
		low, high = 0, 1
	case r.eat("{"):
		var err error
		if low, high, err = r.braces(); err != nil {
			return nil, err
		}
	default:
		return p, nil
	}
	r.eat("?") // lazy: the same texts
	if r.s != "" && strings.IndexByte("*+?{", r.s[0]) >= 0 {
		return nil, errors.New("a repetition of a repetition")
	}
	if p.min == 0 && high != 1 {
		return nil, errors.New("a repetition of what may be empty")
	}
	out := &piece{e: r.c.g.repeat(p.e, low, high), min: min(p.min*low, 1<<30), max: noMax}
	if p.max != noMax && high != noMax {
		out.max = min(p.max*high, 1<<30)
	}
	if p.min == 1 && p.max == 1 {
		out.loop = p.loop
	}
	return out, nil
}

func (r *regex) braces() (low, high int, err error) {
	inner, rest, ok := strings.Cut(r.s, "}")
	r.s = rest
	first, second, ranged := strings.Cut(inner, ",")
	low, err = strconv.Atoi(first)
	high = low
	if ranged && second == "" {
		high = noMax
	} else if ranged && err == nil {
		high, err = strconv.Atoi(second)
	}
	if !ok || err != nil || low < 0 || (high != noMax && high < low) || max(low, high) > maxElements/2 {
		return 0, 0, fmt.Errorf("a repetition {%s}", clip(inner))
	}
	return low, high, nil
}

// one is a single character of a set, as JSON writes it.
func (r *regex) one(s runeSet) *piece {
	raw := s.without(everything.without(plainChars))
	out := alt()
	if len(raw) > 0 {
		out.kids = append(out.kids, set(raw))
	}
	if s.has(0x7F) {
		out.kids = append(out.kids, lit("\x7f"))
	}
	for _, special := range "\"\\" {
		if s.has(special) {
			out.kids = append(out.kids, lit(`\`+string(special)))
		}
	}
	for control := rune(0); control < 0x20; control++ {
		if s.has(control) {
			out.kids = append(out.kids, lit(controlEscape(control)))
		}
	}
	e := out
	if len(out.kids) == 1 {
		e = out.kids[0]
	} else if len(out.kids) > 1 {
		e = ref(r.c.g.rule(out))
	}
	return &piece{e: e, min: 1, max: 1, loop: e}
}

func controlEscape(c rune) string {
	if i := strings.IndexRune("\b\f\n\r\t", c); i >= 0 {
		return `\` + string("bfnrt"[i])
	}
	return fmt.Sprintf(`\u%04x`, c)
}

// Classes of characters. White space is what ECMA-262 and RE2 agree on when it
// is asked for, and what either knows when it is excluded.
var (
	digitSet = setOf(runeRange{'0', '9'})
	wordSet  = setOf(runeRange{'0', '9'}, runeRange{'A', 'Z'}, runeRange{'a', 'z'}, runeRange{'_', '_'})
	spaceSet = chars(" \t\n\r\f")
	blankSet = chars(" \t\n\r\f\v\u00a0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u2028\u2029\u202f\u205f\u3000\ufeff")
)

// escape reads \ and what follows. In a class, \b is a backspace.
func (r *regex) escape(inClass bool) (runeSet, error) {
	r.s = r.s[1:]
	if r.s == "" {
		return nil, errors.New("it ends in \\")
	}
	c, n := utf8.DecodeRuneInString(r.s)
	r.s = r.s[n:]
	switch c {
	case 'd':
		return digitSet, nil
	case 'D':
		return everything.without(digitSet), nil
	case 'w':
		return wordSet, nil
	case 'W':
		return everything.without(wordSet), nil
	case 's':
		return spaceSet, nil
	case 'S':
		return everything.without(blankSet), nil
	case 'x':
		return r.code(2)
	case 'u':
		return r.code(4)
	}
	if i := strings.IndexRune("fnrtv", c); i >= 0 {
		return chars(string("\f\n\r\t\v"[i])), nil
	}
	if inClass && c == 'b' {
		return chars("\b"), nil
	}
	if wordSet.has(c) || c >= utf8.RuneSelf {
		return nil, fmt.Errorf("the escape \\%c", c)
	}
	return setOf(runeRange{c, c}), nil
}

func (r *regex) code(n int) (runeSet, error) {
	if len(r.s) < n {
		return nil, errors.New("an escape is cut off")
	}
	v, err := strconv.ParseUint(r.s[:n], 16, 32)
	if err != nil || (v >= 0xD800 && v < 0xE000) {
		return nil, fmt.Errorf("the code %q", clip(r.s[:n]))
	}
	r.s = r.s[n:]
	return setOf(runeRange{rune(v), rune(v)}), nil
}

// class reads [ to ].
func (r *regex) class() (runeSet, error) {
	r.eat("[")
	negated := r.eat("^")
	if strings.HasPrefix(r.s, "]") { // dialects differ on what it means
		return nil, errors.New("brackets begin with a bracket")
	}
	var ranges []runeRange
	for !r.eat("]") {
		low, err := r.classAtom()
		if err != nil {
			return nil, err
		}
		if strings.HasPrefix(r.s, "-") && !strings.HasPrefix(r.s, "-]") {
			r.eat("-")
			high, err := r.classAtom()
			if err != nil {
				return nil, err
			}
			if !single(low) || !single(high) || high[0].low < low[0].low {
				return nil, errors.New("a range in brackets")
			}
			low = runeSet{{low[0].low, high[0].low}}
		}
		ranges = append(ranges, low...)
	}
	s := setOf(ranges...)
	if negated {
		return everything.without(s), nil
	}
	return s.without(setOf(runeRange{0xD800, 0xDFFF})), nil
}

func single(s runeSet) bool { return len(s) == 1 && s[0].low == s[0].high }

func (r *regex) classAtom() (runeSet, error) {
	switch {
	case r.s == "":
		return nil, errors.New("brackets do not end")
	case r.s[0] == '\\':
		return r.escape(true)
	case r.s[0] == '[': // RE2 reads [:name:] here
		return nil, errors.New("a bracket in brackets")
	}
	return r.letter(), nil
}
