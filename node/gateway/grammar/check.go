package grammar

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"
)

// Limits on a grammar as a whole, which may be of many schemas.
const (
	// MaxText bounds the text of a grammar, in bytes.
	MaxText = 1 << 20

	maxAllRules    = 4 * maxRules
	maxAllElements = 4 * maxElements
	maxGroups      = 96      // in each other
	maxBound       = 2_000   // of a repetition: llama.cpp forgets one above
	maxVisits      = 1 << 24 // of elements, to find what matches nothing
)

// Check says why a grammar from elsewhere, with the start rule "root", must not be given
// to llama.cpp, see the package. Of GBNF it reads what this package and toolcall write:
// comments have lines of their own, rules have one, and there are no tokens. "" is no
// grammar, and taken.
func Check(gbnf string) error {
	if gbnf == "" {
		return nil
	}
	if len(gbnf) > MaxText || !utf8.ValidString(gbnf) || strings.IndexByte(gbnf, 0) >= 0 {
		return fmt.Errorf("grammar of %d bytes, want at most %d of text", len(gbnf), MaxText)
	}
	r := &reader{s: gbnf, rules: map[string]*rule{}}
	if err := r.read(); err != nil {
		return fmt.Errorf("grammar: at byte %d: %w", len(gbnf)-len(r.s), err)
	}
	if err := r.sound(); err != nil {
		return fmt.Errorf("grammar: %w", err)
	}
	return nil
}

// reader reads the text of a grammar.
type reader struct {
	s        string // the rest
	rules    map[string]*rule
	list     []*rule
	elements int
	groups   int // that are open
}

// rule is the rule of a name, whether it was read or not.
func (r *reader) rule(name string) *rule {
	if r.rules[name] == nil {
		r.rules[name] = &rule{name: name}
		r.list = append(r.list, r.rules[name])
	}
	return r.rules[name]
}

func (r *reader) read() error {
	for r.gap(); r.s != ""; r.gap() {
		name, err := r.name()
		if err != nil {
			return err
		}
		if r.spaces(); !r.take("::=") {
			return errors.New("no ::= behind the name of a rule")
		}
		to := r.rule(name)
		if to.body != nil {
			return fmt.Errorf("a second rule %s", name)
		}
		if to.body, err = r.alternatives(); err != nil {
			return err
		}
		if r.s != "" && !r.take("\n") {
			return errors.New("a rule that does not end with its line")
		}
	}
	return nil
}

// gap skips what may lie between rules.
func (r *reader) gap() {
	for r.s = strings.TrimLeft(r.s, "\n "); r.take("#"); r.s = strings.TrimLeft(r.s, "\n ") {
		_, r.s, _ = strings.Cut(r.s, "\n")
	}
}

func (r *reader) spaces() { r.s = strings.TrimLeft(r.s, " ") }

func (r *reader) take(prefix string) bool {
	rest, ok := strings.CutPrefix(r.s, prefix)
	r.s = rest
	return ok
}

// add counts elements, as llama.cpp lays them out.
func (r *reader) add(n int) error {
	if r.elements += n; r.elements > maxAllElements || len(r.list) > maxAllRules {
		return fmt.Errorf("more than %d elements or %d rules", maxAllElements, maxAllRules)
	}
	return nil
}

func (r *reader) name() (string, error) {
	n := strings.IndexFunc(r.s, func(c rune) bool {
		return !(c == '-' || c >= '0' && c <= '9' || c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z')
	})
	if n < 0 {
		n = len(r.s)
	}
	if n == 0 {
		return "", fmt.Errorf("unexpected %.8q", r.s)
	}
	name := r.s[:n]
	r.s = r.s[n:]
	return name, nil
}

func (r *reader) alternatives() (*expr, error) {
	out := alt()
	for {
		e, err := r.sequence()
		if err != nil {
			return nil, err
		}
		out.kids = append(out.kids, e)
		if err := r.add(1); err != nil {
			return nil, err
		}
		if !r.take("|") {
			return out, nil
		}
	}
}

func (r *reader) sequence() (*expr, error) {
	out := seq()
	for {
		r.spaces()
		if r.s == "" || strings.IndexByte("|)\n", r.s[0]) >= 0 {
			return out, nil
		}
		before := r.elements
		e, err := r.item()
		if err == nil {
			e, err = r.repeated(e, r.elements-before)
		}
		if err != nil {
			return nil, err
		}
		out.kids = append(out.kids, e)
	}
}

func (r *reader) item() (*expr, error) {
	switch r.s[0] {
	case '"':
		return r.literal()
	case '[':
		return r.class()
	case '(':
		if r.groups++; r.groups > maxGroups {
			return nil, fmt.Errorf("more than %d groups in each other", maxGroups)
		}
		r.s = r.s[1:]
		e, err := r.alternatives()
		if err == nil && !r.take(")") {
			err = errors.New("no ) behind a group")
		}
		r.groups--
		if err != nil {
			return nil, err
		}
		group := r.rule(fmt.Sprintf("(%d", len(r.list))) // a rule of its own, which no name can be
		group.body = e
		return ref(group), r.add(1)
	}
	name, err := r.name()
	if err != nil {
		return nil, err
	}
	return ref(r.rule(name)), r.add(1)
}

func (r *reader) literal() (*expr, error) {
	r.s = r.s[1:]
	var b strings.Builder
	for !r.take(`"`) {
		c, err := r.char()
		if err != nil {
			return nil, err
		}
		b.WriteRune(c)
		if err := r.add(1); err != nil {
			return nil, err
		}
	}
	return lit(b.String()), nil
}

// class reads a set of characters, of which only that it is one is kept.
func (r *reader) class() (*expr, error) {
	r.s = r.s[1:]
	r.take("^")
	n := 0
	for ; !r.take("]"); n++ {
		low, err := r.char()
		if err != nil {
			return nil, err
		}
		if strings.HasPrefix(r.s, "-]") {
			return nil, errors.New("a set with - at its end")
		}
		if !r.take("-") {
			continue
		}
		high, err := r.char()
		if err != nil {
			return nil, err
		}
		if low > high {
			return nil, fmt.Errorf("characters from %q to %q", low, high)
		}
	}
	if n == 0 {
		return nil, errors.New("a set of no characters")
	}
	return set(runeSet{{'a', 'a'}}), r.add(2 * n)
}

// escapes are the characters that stand for others behind a backslash.
var escapes = map[byte]rune{'t': '\t', 'r': '\r', 'n': '\n', '\\': '\\', '"': '"', '[': '[', ']': ']', '-': '-'}

func (r *reader) char() (rune, error) {
	c, n := utf8.DecodeRuneInString(r.s)
	if n == 0 || c == '\n' {
		return 0, errors.New("a text or set that does not end")
	}
	r.s = r.s[n:]
	if c != '\\' {
		return c, nil
	}
	if r.s == "" {
		return 0, errors.New("nothing behind a backslash")
	}
	kind := r.s[0]
	r.s = r.s[1:]
	if c, ok := escapes[kind]; ok {
		return c, nil
	}
	digits := map[byte]int{'x': 2, 'u': 4, 'U': 8}[kind]
	if digits == 0 || len(r.s) < digits {
		return 0, fmt.Errorf("an unknown character behind a backslash: %q", kind)
	}
	v, err := strconv.ParseUint(r.s[:digits], 16, 32)
	if err != nil || v > utf8.MaxRune {
		return 0, fmt.Errorf("no character has the number %.8q", r.s[:digits])
	}
	r.s = r.s[digits:]
	return rune(v), nil
}

// repeated reads how often an item of so many elements comes.
func (r *reader) repeated(e *expr, size int) (*expr, error) {
	r.spaces()
	low, high := 1, noMax
	switch {
	case r.take("*"):
		low = 0
	case r.take("+"):
	case r.take("?"):
		low, high = 0, 1
	case r.take("{"):
		bounds, rest, ok := strings.Cut(r.s, "}")
		if !ok || len(bounds) > 12 {
			return nil, errors.New("no } behind the bounds of a repetition")
		}
		r.s = rest
		from, to, several := strings.Cut(bounds, ",")
		var err error
		if low, err = bound(from); err == nil && !several {
			high = low
		} else if err == nil && to != "" {
			high, err = bound(to)
		}
		if err != nil {
			return nil, err
		}
	default:
		return e, nil
	}
	if high != noMax && low > high {
		return nil, fmt.Errorf("%d to %d times", low, high)
	}
	if r.spaces(); r.s != "" && strings.IndexByte("*+?{", r.s[0]) >= 0 {
		return nil, errors.New("a repetition of a repetition")
	}
	return &expr{op: opRepeat, kids: []*expr{e}, min: low, max: high}, r.add(2 * (size + 1) * max(low, high, 1))
}

func bound(s string) (int, error) {
	n, err := strconv.ParseUint(s, 10, 31)
	if err != nil || n > maxBound {
		return 0, fmt.Errorf("%q times, at most %d", s, maxBound)
	}
	return int(n), nil
}

// sound says what of the rules llama.cpp could not walk.
func (r *reader) sound() error {
	if r.rules["root"] == nil {
		return errors.New("no rule root")
	}
	for _, u := range r.list {
		if u.body == nil {
			return fmt.Errorf("no rule %s", u.name)
		}
	}
	slices.Reverse(r.list) // later rules are mostly parts of earlier ones
	visits := 0
	for changed := true; changed; visits += r.elements + len(r.list) {
		if changed = false; visits > maxVisits {
			return errors.New("rules that hang together in too many ways")
		}
		for _, u := range r.list {
			if p, n := u.body.productive(), u.body.nullable(); p != u.productive || n != u.nullable {
				u.productive, u.nullable, changed = p, n, true
			}
		}
	}
	for _, u := range r.list {
		if !u.productive {
			return fmt.Errorf("nothing matches the rule %s", u.name)
		}
		if u.body.loopsOnEmpty() {
			return fmt.Errorf("rule %s has a repetition of what may be empty", u.name)
		}
		if n := u.paths(); n < 0 || n > maxLeftmost {
			return fmt.Errorf("rule %s refers to itself without anything in between, or has more than %d alternatives at one place", u.name, maxLeftmost)
		}
	}
	return nil
}
