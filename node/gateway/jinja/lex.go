package jinja

import (
	"fmt"
	"strconv"
	"strings"
	"unicode/utf8"
)

type kind int

const (
	tokEOF    kind = iota
	tokData        // text outside tags
	tokPrint       // {{
	tokBlock       // {%
	tokEnd         // }} or %}
	tokName        // also keywords
	tokString      // text is the decoded literal
	tokInt
	tokFloat
	tokOp
)

type token struct {
	kind kind
	text string
	line int
}

// lexer cuts a template into tokens. It applies trim_blocks (the first newline
// after a block or comment goes), lstrip_blocks (so does the indentation before
// one that begins its line) and the explicit marks {%- -%} {%+ +%}.
type lexer struct {
	src       string
	pos, line int
	tokens    []token
	lineStart bool // the last tag ate a newline
}

func lex(source string) []token {
	source = strings.NewReplacer("\r\n", "\n", "\r", "\n").Replace(source)
	l := &lexer{src: strings.TrimSuffix(source, "\n"), line: 1, lineStart: true}
	for l.pos < len(l.src) {
		l.data()
	}
	l.add(tokEOF, "end of template")
	return l.tokens
}

func (l *lexer) add(k kind, text string) {
	l.tokens = append(l.tokens, token{k, text, l.line})
}

func (l *lexer) fail(format string, args ...any) {
	panic(failure{fmt.Errorf("template line %d: "+format, append([]any{l.line}, args...)...)})
}

func (l *lexer) advance(n int) {
	l.line += strings.Count(l.src[l.pos:l.pos+n], "\n")
	l.pos += n
}

// nextTag returns the offset of the next tag's opening, or the end.
func (l *lexer) nextTag() int {
	for i := l.pos; i+1 < len(l.src); i++ {
		if l.src[i] == '{' && strings.IndexByte("{%#", l.src[i+1]) >= 0 {
			return i
		}
	}
	return len(l.src)
}

// data reads text up to a tag, then the tag.
func (l *lexer) data() {
	tag := l.nextTag()
	text := l.src[l.pos:tag]
	if tag == len(l.src) {
		l.emitData(text)
		l.advance(len(text))
		return
	}
	mark := byte(0)
	if tag+2 < len(l.src) {
		mark = l.src[tag+2]
	}
	switch {
	case mark == '-':
		text = strings.TrimRightFunc(text, isSpace)
	case mark != '+' && l.src[tag+1] != '{':
		text = l.lstrip(text)
	}
	l.emitData(text)
	l.advance(tag - l.pos)
	open := l.src[tag : tag+2]
	l.advance(2)
	if mark == '-' || mark == '+' && open != "{{" {
		l.advance(1)
	}
	if open == "{#" {
		l.comment()
		return
	}
	l.tag(open)
}

func (l *lexer) emitData(text string) {
	if text != "" {
		l.add(tokData, text)
	}
}

// lstrip drops the blanks between the last line start and the tag.
func (l *lexer) lstrip(text string) string {
	start := strings.LastIndexByte(text, '\n') + 1
	if (start > 0 || l.lineStart) && strings.TrimLeftFunc(text[start:], isSpace) == "" {
		return text[:start]
	}
	return text
}

func (l *lexer) comment() {
	end := strings.Index(l.src[l.pos:], "#}")
	if end < 0 {
		l.fail("comment is not closed")
	}
	minus := end > 0 && l.src[l.pos+end-1] == '-'
	plus := end > 0 && l.src[l.pos+end-1] == '+'
	l.advance(end + 2)
	l.closed(minus, !plus)
}

// closed applies the white space rules after a tag.
func (l *lexer) closed(minus, trimBlock bool) {
	rest, n := l.src[l.pos:], 0
	switch {
	case minus:
		n = len(rest) - len(strings.TrimLeftFunc(rest, isSpace))
	case trimBlock && strings.HasPrefix(rest, "\n"):
		n = 1
	}
	l.lineStart = n > 0 && rest[n-1] == '\n'
	l.advance(n)
}

// tag reads the tokens of {{ … }} or {% … %}.
func (l *lexer) tag(open string) {
	block := open == "{%"
	end := "}}"
	if block {
		end = "%}"
		l.add(tokBlock, open)
	} else {
		l.add(tokPrint, open)
	}
	brackets := 0
	for {
		l.advance(len(l.src[l.pos:]) - len(strings.TrimLeftFunc(l.src[l.pos:], isSpace)))
		rest := l.src[l.pos:]
		if rest == "" {
			l.fail("%s is not closed", open)
		}
		minus, plus := strings.HasPrefix(rest, "-"+end), block && strings.HasPrefix(rest, "+"+end)
		if brackets == 0 && (minus || plus || strings.HasPrefix(rest, end)) {
			l.add(tokEnd, end)
			n := 2
			if minus || plus {
				n = 3
			}
			l.advance(n)
			l.closed(minus, block && !plus)
			return
		}
		brackets += l.token(rest)
	}
}

// token reads one token and returns +1 for an opened bracket, -1 for a closed.
func (l *lexer) token(rest string) int {
	c := rest[0]
	switch {
	case c == '"' || c == '\'':
		l.str(rest)
	case c >= '0' && c <= '9':
		l.number(rest)
	case isNameByte(c):
		n := 1
		for n < len(rest) && isNameByte(rest[n]) {
			n++
		}
		l.add(tokName, rest[:n])
		l.advance(n)
	default:
		return l.operator(rest)
	}
	return 0
}

func isNameByte(c byte) bool {
	return c == '_' || c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c >= utf8.RuneSelf
}

func (l *lexer) operator(rest string) int {
	for _, op := range []string{"**", "//", "==", "!=", "<=", ">="} {
		if strings.HasPrefix(rest, op) {
			l.add(tokOp, op)
			l.advance(2)
			return 0
		}
	}
	if strings.IndexByte("+-*/%~<>=.,:|()[]{}", rest[0]) < 0 {
		l.fail("unexpected character %q", rest[0])
	}
	l.add(tokOp, rest[:1])
	l.advance(1)
	switch rest[0] {
	case '(', '[', '{':
		return 1
	case ')', ']', '}':
		return -1
	}
	return 0
}

func (l *lexer) number(rest string) {
	digits := func(n int) int {
		for n < len(rest) && (rest[n] >= '0' && rest[n] <= '9' || rest[n] == '_') {
			n++
		}
		return n
	}
	n, k := digits(0), tokInt
	if n+1 < len(rest) && rest[n] == '.' && rest[n+1] >= '0' && rest[n+1] <= '9' {
		n, k = digits(n+1), tokFloat
	}
	if n < len(rest) && (rest[n] == 'e' || rest[n] == 'E') {
		m := n + 1
		if m < len(rest) && (rest[m] == '+' || rest[m] == '-') {
			m++
		}
		if e := digits(m); e > m {
			n, k = e, tokFloat
		}
	}
	l.add(k, strings.ReplaceAll(rest[:n], "_", ""))
	l.advance(n)
}

var escapes = map[byte]string{
	'n': "\n", 't': "\t", 'r': "\r", 'b': "\b", 'f': "\f", 'v': "\v", 'a': "\a", '0': "\x00",
	'\\': "\\", '\'': "'", '"': "\"", '\n': "",
}

// str reads a string literal with Python's escapes; an unknown one is kept.
func (l *lexer) str(rest string) {
	var b strings.Builder
	i := 1
	for ; i < len(rest) && rest[i] != rest[0]; i++ {
		if rest[i] != '\\' || i+1 == len(rest) {
			b.WriteByte(rest[i])
			continue
		}
		i++
		if s, ok := escapes[rest[i]]; ok {
			b.WriteString(s)
			continue
		}
		width := map[byte]int{'x': 2, 'u': 4, 'U': 8}[rest[i]]
		if end := i + 1 + width; width > 0 && end <= len(rest) {
			if v, err := strconv.ParseUint(rest[i+1:end], 16, 32); err == nil {
				b.WriteRune(rune(v))
				i += width
				continue
			}
		}
		b.WriteByte('\\')
		b.WriteByte(rest[i])
	}
	if i >= len(rest) {
		l.fail("string is not closed")
	}
	l.add(tokString, b.String())
	l.advance(i + 1)
}
