package toolcall

import (
	"bytes"
	"strings"
	"unicode/utf8"
)

// literal reads values as Python or Gemma write them and gives them as JSON.
// When the text ends within a value the answer is maybe.
type literal struct {
	b     []byte
	i     int
	end   bool // nothing more comes
	gemma bool // bare words and keys, strings in a token of their own
}

const gemmaQuote = `<|"|>`

func (r *literal) blank() { r.i += spaceAt(r.b[r.i:]) }

// eat takes one byte that must come next.
func (r *literal) eat(c byte) match {
	r.blank()
	m := firstByte(r.b[r.i:], string(c))
	if m == yes {
		r.i++
	}
	return m
}

func (r *literal) value(depth int) (string, match) { return r.typed(&schema{}, depth) }

func (r *literal) typed(s *schema, depth int) (string, match) {
	r.blank()
	rest := r.b[r.i:]
	if len(rest) == 0 {
		return "", maybe
	}
	if depth > maxDepth {
		return "", no
	}
	if r.gemma {
		if m := begins(rest, gemmaQuote); m != no {
			return r.str(gemmaQuote, m)
		}
	}
	switch c := rest[0]; c {
	case '"', '\'':
		return r.str(string(c), yes)
	case '[':
		return r.list(s, ']', depth)
	case '(':
		if r.gemma {
			return "", no
		}
		return r.list(s, ')', depth)
	case '{':
		return r.dict(s, depth)
	}
	return r.word(s)
}

// str reads a string, with the escapes of Python but for Gemma's own quotes.
func (r *literal) str(mark string, opening match) (string, match) {
	if opening == maybe {
		return "", maybe
	}
	b := r.b[r.i+len(mark):]
	if mark == gemmaQuote {
		n := bytes.Index(b, []byte(mark))
		if n < 0 {
			return "", maybe
		}
		r.i += 2*len(mark) + n
		return quote(string(b[:n])), yes
	}
	var out strings.Builder
	for i := 0; i < len(b); i++ {
		switch c := b[i]; {
		case c == mark[0]:
			r.i += i + 2
			return quote(out.String()), yes
		case c != '\\':
			out.WriteByte(c)
		case i+1 == len(b):
			return "", maybe
		default:
			i++
			n, m := unescape(&out, b[i:])
			if m != yes {
				return "", m
			}
			i += n
		}
	}
	return "", maybe
}

// unescape writes what the escape behind a backslash means, and says how many
// bytes it has beyond its letter.
func unescape(out *strings.Builder, b []byte) (int, match) {
	if i := strings.IndexByte("nrtbf0", b[0]); i >= 0 {
		out.WriteByte("\n\r\t\b\f\x00"[i])
		return 0, yes
	}
	size := map[byte]int{'x': 2, 'u': 4, 'U': 8}[b[0]]
	switch {
	case size == 0 && strings.IndexByte("\\\"'/", b[0]) >= 0:
		out.WriteByte(b[0])
		return 0, yes
	case size == 0: // Python keeps the backslash
		out.WriteByte('\\')
		out.WriteByte(b[0])
		return 0, yes
	case len(b) <= size:
		return 0, maybe
	}
	var v rune
	for _, c := range b[1 : 1+size] {
		d := strings.IndexByte("0123456789abcdef", c|0x20)
		if d < 0 || v > utf8.MaxRune {
			return 0, no
		}
		v = v<<4 | rune(d)
	}
	out.WriteRune(v) // a surrogate becomes U+FFFD
	return size, yes
}

func (r *literal) list(s *schema, closing byte, depth int) (string, match) {
	r.i++
	var parts []string
	for {
		if m := r.eat(closing); m != no {
			return "[" + strings.Join(parts, ",") + "]", m
		}
		if len(parts) > 0 {
			if m := r.eat(','); m != yes {
				return "", m
			}
			if m := r.eat(closing); m != no {
				return "[" + strings.Join(parts, ",") + "]", m
			}
		}
		v, m := r.typed(s.items(), depth+1)
		if m != yes {
			return "", m
		}
		parts = append(parts, v)
	}
}

func (r *literal) dict(s *schema, depth int) (string, match) {
	r.i++
	var parts []string
	for {
		if m := r.eat('}'); m != no {
			return "{" + strings.Join(parts, ",") + "}", m
		}
		if len(parts) > 0 {
			if m := r.eat(','); m != yes {
				return "", m
			}
			if m := r.eat('}'); m != no {
				return "{" + strings.Join(parts, ",") + "}", m
			}
		}
		key, m := r.key(depth)
		if m != yes {
			return "", m
		}
		if m := r.eat(':'); m != yes {
			return "", m
		}
		v, m := r.typed(s.property(key), depth+1)
		if m != yes {
			return "", m
		}
		parts = append(parts, quote(key)+":"+v)
	}
}

// key reads a string, or of Gemma a bare word.
func (r *literal) key(depth int) (string, match) {
	r.blank()
	rest := r.b[r.i:]
	quoted := firstByte(rest, `"'`)
	if r.gemma && begins(rest, gemmaQuote) != no {
		quoted = begins(rest, gemmaQuote)
	}
	switch {
	case quoted == maybe:
		return "", maybe
	case quoted == yes:
		v, m := r.typed(&schema{}, depth+1)
		if m != yes {
			return "", m
		}
		return unquote(v), yes
	case !r.gemma:
		return "", no
	}
	n := bytes.IndexAny(rest, ":,{}[]\n")
	switch {
	case n < 0 && len(rest) < 2*maxName:
		return "", maybe
	case n <= 0 || n >= 2*maxName || rest[n] != ':':
		return "", no
	}
	r.i += n
	return strings.Trim(string(rest[:n]), space), yes
}

// word reads a number or a constant, or of Gemma any bare text.
func (r *literal) word(s *schema) (string, match) {
	rest := r.b[r.i:]
	n := bytes.IndexAny(rest, ",]})\n")
	if r.gemma {
		n = bytes.IndexAny(rest, ",]}\n")
	}
	switch {
	case !r.gemma && (n > maxName || n < 0 && len(rest) > maxName):
		return "", no
	case n < 0 && !r.end:
		return "", maybe
	case n < 0:
		n = len(rest)
	}
	text := strings.Trim(string(rest[:n]), space)
	r.i += n
	v, ok := pythonWord(text)
	switch {
	case text == "":
		return "", no
	case r.gemma:
		return s.coerce(text), yes
	case ok:
		return v, yes
	case isNumber(text):
		return text, yes
	}
	return "", no
}
