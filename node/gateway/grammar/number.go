package grammar

import (
	"math/big"
	"strconv"
	"strings"
)

// Numbers are compared as integers of 10^-decimals. Written numbers have at most
// maxDigits digits before the point, and decimals after it where a bound holds.
const (
	decimals  = 9
	maxDigits = 15
)

var scale = new(big.Int).Exp(big.NewInt(10), big.NewInt(decimals), nil)

// scaled reads a JSON number exactly; false when it is too long or too fine.
func scaled(text string) (*big.Int, bool) {
	if mantissa, exponent, ok := strings.Cut(strings.ToLower(text), "e"); ok {
		if e, err := strconv.Atoi(exponent); err != nil || e < -40 || e > 40 || len(mantissa) > 80 {
			return nil, false
		}
	}
	if len(text) > 80 {
		return nil, false
	}
	r, ok := new(big.Rat).SetString(text)
	if !ok {
		return nil, false
	}
	r.Mul(r, new(big.Rat).SetInt(scale))
	if !r.IsInt() {
		return nil, false
	}
	return r.Num(), true
}

func isWhole(v *big.Int) bool   { return new(big.Int).Rem(v, scale).Sign() == 0 }
func whole(v *big.Int) *big.Int { return new(big.Int).Quo(v, scale) }
func tens(n int) *big.Int       { return new(big.Int).Exp(big.NewInt(10), big.NewInt(int64(n)), nil) }
func digits(v *big.Int, n int) string {
	s := v.String()
	return strings.Repeat("0", max(0, n-len(s))) + s
}

// bounds are the tightest limits of a conjunction; nil: none.
type bounds struct{ low, high *big.Int }

func (c *compiler) bounds(plain []*node, integer bool) bounds {
	var b bounds
	step := big.NewInt(1)
	if integer {
		step = scale
	}
	for _, n := range plain {
		if m := n.get("multipleOf"); m != nil {
			if v, ok := scaled(m.text); !integer || !ok || v.Cmp(scale) != 0 {
				c.refuse(n, "multipleOf", "only 1 of an integer")
			}
		}
		for _, key := range []string{"minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"} {
			v := n.get(key)
			if v == nil {
				continue
			}
			x, ok := scaled(v.text)
			if v.kind != 'n' || !ok {
				c.refuse(n, key, "it needs a number of at most 9 decimals")
				continue
			}
			lower, exclusive := strings.HasSuffix(key, "inimum"), strings.HasPrefix(key, "ex")
			b.tighten(x, step, lower, exclusive)
		}
	}
	return b
}

// tighten takes one bound in; a step is the distance of two values.
func (b *bounds) tighten(x, step *big.Int, lower, exclusive bool) {
	rounded := new(big.Int).Div(x, step) // towards minus infinity
	rounded.Mul(rounded, step)
	exact := rounded.Cmp(x) == 0
	switch {
	case lower && (!exact || exclusive):
		rounded.Add(rounded, step)
	case !lower && exact && exclusive:
		rounded.Sub(rounded, step)
	}
	switch {
	case lower && (b.low == nil || rounded.Cmp(b.low) > 0):
		b.low = rounded
	case !lower && (b.high == nil || rounded.Cmp(b.high) < 0):
		b.high = rounded
	}
}

// number writes an integer or any number within its bounds.
func (c *compiler) number(plain []*node, integer bool) *expr {
	b := c.bounds(plain, integer)
	if b.low == nil && b.high == nil {
		return c.freeNumber(integer)
	}
	reach := new(big.Int).Mul(tens(maxDigits), scale)
	if b.low == nil {
		b.low = new(big.Int).Sub(minInt(b.high, new(big.Int)), reach)
	}
	if b.high == nil {
		b.high = new(big.Int).Add(maxInt(b.low, new(big.Int)), reach)
	}
	if b.low.Cmp(b.high) > 0 {
		return never
	}
	c.g.elements += 2_000
	out := alt()
	if b.low.Sign() < 0 {
		// "-0" is written only where 0 is allowed.
		least := maxInt(new(big.Int).Neg(b.high), new(big.Int))
		out.kids = append(out.kids, seq(lit("-"), c.magnitude(least, new(big.Int).Neg(b.low), integer)))
	}
	if b.high.Sign() >= 0 {
		out.kids = append(out.kids, c.magnitude(maxInt(b.low, new(big.Int)), b.high, integer))
	}
	return out
}

func minInt(a, b *big.Int) *big.Int {
	if a.Cmp(b) < 0 {
		return a
	}
	return b
}

func maxInt(a, b *big.Int) *big.Int {
	if a.Cmp(b) > 0 {
		return a
	}
	return b
}

func (c *compiler) freeNumber(integer bool) *expr {
	digit := set(chars("0123456789"))
	nat := c.shared.rule(c.g, "natural", func() *expr {
		return seq(opt(lit("-")), alt(lit("0"), seq(set(chars("123456789")), c.g.repeat(digit, 0, maxDigits-1))))
	})
	if integer {
		return nat
	}
	return c.shared.rule(c.g, "number", func() *expr {
		return seq(nat, opt(seq(lit("."), c.g.repeat(digit, 1, maxDigits))),
			opt(seq(set(chars("eE")), opt(set(chars("+-"))), c.g.repeat(digit, 1, 2))))
	})
}

// magnitude writes the numbers from low to high, 0 <= low <= high.
func (c *compiler) magnitude(low, high *big.Int, integer bool) *expr {
	a, b := whole(low), whole(high)
	if integer {
		return c.naturals(a, b)
	}
	lowFraction := digits(new(big.Int).Rem(low, scale), decimals)
	highFraction := digits(new(big.Int).Rem(high, scale), decimals)
	zeros, nines := strings.Repeat("0", decimals), strings.Repeat("9", decimals)
	if a.Cmp(b) == 0 {
		return seq(lit(a.String()), c.fraction(lowFraction, highFraction))
	}
	out := alt(seq(lit(a.String()), c.fraction(lowFraction, nines)))
	one := big.NewInt(1)
	if next, last := new(big.Int).Add(a, one), new(big.Int).Sub(b, one); next.Cmp(last) <= 0 {
		out.kids = append(out.kids, seq(c.naturals(next, last), c.fraction(zeros, nines)))
	}
	out.kids = append(out.kids, seq(lit(b.String()), c.fraction(zeros, highFraction)))
	return out
}

// naturals writes the whole numbers from a to b, by their count of digits.
func (c *compiler) naturals(a, b *big.Int) *expr {
	out := alt()
	for n := len(a.String()); n <= len(b.String()); n++ {
		low, high := tens(n-1), new(big.Int).Sub(tens(n), big.NewInt(1))
		if n == 1 {
			low = new(big.Int)
		}
		out.kids = append(out.kids, c.sameLength(digits(maxInt(a, low), n), digits(minInt(b, high), n)))
	}
	return out
}

// sameLength writes the digit texts from a to b, all of one length.
func (c *compiler) sameLength(a, b string) *expr {
	n := len(a)
	zeros, nines := strings.Repeat("0", n), strings.Repeat("9", n)
	switch {
	case n == 0:
		return empty
	case a == zeros && b == nines:
		return c.g.repeat(set(chars("0123456789")), n, n)
	case a[0] == b[0]:
		return seq(lit(a[:1]), c.sameLength(a[1:], b[1:]))
	}
	return c.split(a, b, c.sameLength, func(first *expr) *expr {
		return seq(first, c.g.repeat(set(chars("0123456789")), n-1, n-1))
	})
}

// split writes the texts from a to b by their first digit, which differ: those
// of a and of b go on with tail, those between with anything.
func (c *compiler) split(a, b string, tail func(a, b string) *expr, free func(first *expr) *expr) *expr {
	rest := len(a) - 1
	zeros, nines := strings.Repeat("0", rest), strings.Repeat("9", rest)
	low, high := a[0], b[0]
	out := alt()
	if a[1:] != zeros {
		out.kids = append(out.kids, seq(lit(a[:1]), tail(a[1:], nines)))
		low++
	}
	if b[1:] != nines {
		high--
	}
	if low <= high {
		out.kids = append(out.kids, free(set(setOf(runeRange{rune(low), rune(high)}))))
	}
	if b[1:] != nines {
		out.kids = append(out.kids, seq(lit(b[:1]), tail(zeros, b[1:])))
	}
	return out
}

// fraction writes what may follow the digits before the point, so that the
// fraction, filled with zeros, is from a to b.
func (c *compiler) fraction(a, b string) *expr {
	point := seq(lit("."), c.places(a, b, true))
	if strings.Trim(a, "0") == "" {
		return opt(point)
	}
	return point
}

// places writes digits that, filled with zeros, are from a to b.
func (c *compiler) places(a, b string, first bool) *expr {
	n := len(a)
	if n == 0 {
		return empty
	}
	digit := set(chars("0123456789"))
	tail := func(a, b string) *expr { return c.places(a, b, false) }
	fromZero := strings.Trim(a, "0") == ""
	var out *expr
	switch {
	case fromZero && strings.Trim(b, "9") == "":
		low := 0
		if first {
			low = 1
		}
		return c.g.repeat(digit, low, n)
	case a[0] == b[0]:
		out = seq(lit(a[:1]), tail(a[1:], b[1:]))
	default:
		out = c.split(a, b, tail, func(d *expr) *expr { return seq(d, c.g.repeat(digit, 0, n-1)) })
	}
	if fromZero && !first {
		return opt(out)
	}
	return out
}
