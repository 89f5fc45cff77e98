package grammar

// plainChars are the characters that stand for themselves in a JSON string.
var plainChars = everything.without(setOf(runeRange{0, 0x1F}, runeRange{'"', '"'}, runeRange{'\\', '\\'}, runeRange{0x7F, 0x7F}))

// char is one character of a JSON string, so that characters can be counted: an
// escaped pair of surrogates is one, and half a pair is none.
func (c *compiler) char() *expr {
	return c.shared.rule(c.g, "char", func() *expr {
		hex := set(chars("0123456789abcdefABCDEF"))
		two := seq(hex, hex)
		d, low, high := set(chars("dD")), set(chars("89abAB")), set(chars("cdefCDEF"))
		return alt(set(plainChars), seq(lit(`\`), alt(
			set(chars(`"\/bfnrt`)),
			seq(lit("u"), alt(
				seq(set(chars("0123456789abcefABCEF")), hex, two),
				seq(d, set(chars("01234567")), two),
				seq(d, low, two, lit(`\u`), d, high, two))))))
	})
}

// str writes a string. Of patterns and formats a grammar can hold to one.
func (c *compiler) str(plain []*node) *expr {
	low, high := 0, noMax
	var bound *node // that set a length
	var held *piece
	for _, n := range plain {
		if v, ok := c.count(n, "minLength"); ok {
			low, bound = max(low, v), n
		}
		if v, ok := c.count(n, "maxLength"); ok {
			high, bound = least(high, v), n
		}
		for _, key := range []string{"pattern", "format"} {
			if n.get(key) == nil {
				continue
			}
			p := c.textual(n, key)
			if p != nil && held != nil {
				c.refuse(n, key, "a string is held to one pattern or format")
			} else if p != nil {
				held = p
			}
		}
	}
	if high != noMax && high < low {
		return never
	}
	body := held
	switch {
	case held == nil && bound == nil:
		return c.shared.rule(c.g, "string", func() *expr {
			return seq(lit(`"`), c.g.repeat(c.char(), 0, noMax), lit(`"`))
		})
	case held == nil:
		body = &piece{e: c.repeatOr(bound, c.char(), low, high)}
	case bound != nil:
		body = c.within(bound, held, low, high)
	}
	return seq(lit(`"`), body.e, lit(`"`))
}

// repeatOr repeats a character between two bounds that may be too large.
func (c *compiler) repeatOr(n *node, e *expr, low, high int) *expr {
	if limit := maxElements / 2; low > limit || high > limit {
		keyword := "maxLength"
		if low > limit {
			keyword = "minLength"
		}
		c.refuse(n, keyword, "longer than 30,000")
		return c.g.repeat(e, min(low, limit), noMax)
	}
	return c.g.repeat(e, low, high)
}

// within holds a pattern to a length. That is possible when its own length is
// within, or when it is one character repeated.
func (c *compiler) within(n *node, p *piece, low, high int) *piece {
	if p.min >= low && (high == noMax || (p.max != noMax && p.max <= high)) {
		return p
	}
	if p.loop != nil {
		low, high := max(low, p.min), least(high, p.max)
		if high != noMax && high < low {
			return &piece{e: never}
		}
		return &piece{e: c.repeatOr(n, p.loop, low, high)}
	}
	keyword := "maxLength"
	if n.get(keyword) == nil {
		keyword = "minLength"
	}
	c.refuse(n, keyword, "beside a pattern or format of another length")
	return p
}

// formats as patterns. February has 28 days and an hour 60 minutes of 60
// seconds: what is left out is valid too.
var formats = map[string]string{
	"date":      `^` + dateText + `$`,
	"time":      `^` + timeText + `$`,
	"date-time": `^` + dateText + `T` + timeText + `$`,
	"uuid":      `^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$`,
	"ipv4":      `^` + octet + `\.` + octet + `\.` + octet + `\.` + octet + `$`,
	"email":     `^[a-z0-9]{1,16}([._+-][a-z0-9]{1,16}){0,2}@([a-z0-9]{1,24}(-[a-z0-9]{1,24})?\.){1,3}[a-z]{2,12}$`,
	"hostname":  `^[a-z0-9]{1,24}(-[a-z0-9]{1,24})?(\.[a-z0-9]{1,24}(-[a-z0-9]{1,24})?){0,3}$`,
	"duration":  `^P([1-9][0-9]{0,4}W|[1-9][0-9]{0,4}D|T[1-9][0-9]{0,4}[HMS])$`,
}

const (
	dateText = `[0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))`
	timeText = `([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])`
	octet    = `(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9][0-9]|[0-9])`
)

// textual writes a pattern or a format; nil when it is refused.
func (c *compiler) textual(n *node, key string) *piece {
	v := n.get(key)
	if v.kind != 's' {
		c.refuse(n, key, "it needs a string")
		return nil
	}
	pattern := v.text
	if key == "format" {
		if pattern = formats[v.text]; pattern == "" {
			c.refuse(n, key, "of "+quote(v.text))
			return nil
		}
	}
	p, err := c.regex(pattern)
	if err != nil {
		c.refuse(n, key, err.Error())
		return nil
	}
	return p
}
