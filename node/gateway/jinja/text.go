package jinja

import (
	"strings"
	"unicode"
)

var stringMethods = map[string]func(*run, string, arguments) any{
	"strip":  func(r *run, s string, a arguments) any { return strip(r, s, a, true, true) },
	"lstrip": func(r *run, s string, a arguments) any { return strip(r, s, a, true, false) },
	"rstrip": func(r *run, s string, a arguments) any { return strip(r, s, a, false, true) },
	"split":  func(r *run, s string, a arguments) any { return split(r, s, a) },
	"rsplit": func(r *run, s string, a arguments) any { return rsplit(r, s, a) },
	"splitlines": func(r *run, s string, _ arguments) any {
		s = strings.NewReplacer("\r\n", "\n", "\r", "\n").Replace(s)
		if s == "" {
			return &List{}
		}
		return texts(r, strings.Split(strings.TrimSuffix(s, "\n"), "\n"))
	},
	"startswith": func(r *run, s string, a arguments) any { return affix(r, s, a, strings.HasPrefix) },
	"endswith":   func(r *run, s string, a arguments) any { return affix(r, s, a, strings.HasSuffix) },
	"removeprefix": func(r *run, s string, a arguments) any {
		return strings.TrimPrefix(s, r.text(a, 0, "prefix"))
	},
	"removesuffix": func(r *run, s string, a arguments) any {
		return strings.TrimSuffix(s, r.text(a, 0, "suffix"))
	},
	"replace": func(r *run, s string, a arguments) any {
		return r.replace(s, r.text(a, 0, "old"), r.text(a, 1, "new"), r.whole(a, 2, "count", -1))
	},
	"upper":      func(r *run, s string, _ arguments) any { return r.mapped(s, strings.ToUpper) },
	"lower":      func(r *run, s string, _ arguments) any { return r.mapped(s, strings.ToLower) },
	"title":      func(r *run, s string, _ arguments) any { return r.mapped(s, title) },
	"capitalize": func(r *run, s string, _ arguments) any { return r.mapped(s, capitalize) },
	"isdigit": func(r *run, s string, _ arguments) any {
		r.spend(len(s))
		return s != "" && strings.IndexFunc(s, func(c rune) bool { return !unicode.IsDigit(c) }) < 0
	},
	"find": func(r *run, s string, a arguments) any {
		r.spend(len(s) >> 4)
		i := strings.Index(s, r.text(a, 0, "sub"))
		if i > 0 {
			i = r.size(s[:i])
		}
		return int64(i)
	},
	"count": func(r *run, s string, a arguments) any {
		r.spend(len(s) >> 4)
		return int64(strings.Count(s, r.text(a, 0, "sub")))
	},
	"join":   func(r *run, s string, a arguments) any { return r.join(r.iterate(a.arg(0, "items", nil)), s) },
	"format": func(r *run, s string, a arguments) any { return r.braces(s, a) },
}

var dictMethods = map[string]func(*run, *Dict, arguments) any{
	"items": func(r *run, d *Dict, _ arguments) any { return pairs(r, d) },
	"keys":  func(r *run, d *Dict, _ arguments) any { return &List{Items: r.iterate(d)} },
	"values": func(r *run, d *Dict, _ arguments) any {
		r.alloc(16 * len(d.keys))
		l := &List{}
		for _, k := range d.keys {
			l.Items = append(l.Items, d.vals[k])
		}
		return l
	},
	"get": func(_ *run, d *Dict, a arguments) any {
		if v, ok := d.get(a.arg(0, "key", nil)); ok {
			return v
		}
		return a.arg(1, "default", nil)
	},
}

// pairs are the (key, value) tuples of a mapping.
func pairs(r *run, d *Dict) *List {
	r.alloc(80 * len(d.keys))
	l := &List{Items: make([]any, len(d.keys))}
	for i, k := range d.keys {
		l.Items[i] = &List{Items: []any{k, d.vals[k]}, tuple: true}
	}
	return l
}

// text is a string argument.
func (r *run) text(a arguments, i int, name string) string {
	v := a.arg(i, name, undefined(name))
	s, ok := v.(string)
	if !ok {
		r.fail("argument %q must be text, found %s", name, describe(v))
	}
	return s
}

// whole is an integer argument.
func (r *run) whole(a arguments, i int, name string, def int) int {
	v := a.arg(i, name, int64(def))
	n, ok := number(v)
	w, isInt := n.(int64)
	if !ok || !isInt {
		r.fail("argument %q must be a whole number, found %s", name, describe(v))
	}
	return int(w)
}

// mapped applies a letter-case function; the result may grow threefold.
func (r *run) mapped(s string, f func(string) string) string {
	r.alloc(3 * len(s))
	return f(s)
}

func texts(r *run, parts []string) *List {
	r.alloc(32 * len(parts))
	l := &List{Items: make([]any, len(parts))}
	for i, s := range parts {
		l.Items[i] = s
	}
	return l
}

func strip(r *run, s string, a arguments, left, right bool) string {
	r.spend(len(s) >> 6)
	cut := isSpace
	if v := a.arg(0, "chars", nil); v != nil {
		set := r.text(a, 0, "chars")
		cut = func(c rune) bool { r.spend(1 + len(set)>>6); return strings.ContainsRune(set, c) }
	}
	if left {
		s = strings.TrimLeftFunc(s, cut)
	}
	if right {
		s = strings.TrimRightFunc(s, cut)
	}
	return s
}

// fields splits at white space; limit < 0 means no limit.
func fields(r *run, s string, limit int) *List {
	r.alloc(16 * len(s))
	var parts []string
	s = strings.TrimLeftFunc(s, isSpace)
	for s != "" {
		end := strings.IndexFunc(s, isSpace)
		if end < 0 || limit >= 0 && len(parts) == limit {
			parts = append(parts, s)
			break
		}
		parts = append(parts, s[:end])
		s = strings.TrimLeftFunc(s[end:], isSpace)
	}
	return texts(r, parts)
}

// separator returns split's arguments; an empty separator is an error.
func (r *run) separator(a arguments) (sep string, limit int, ok bool) {
	limit = r.whole(a, 1, "maxsplit", -1)
	if a.arg(0, "sep", nil) == nil {
		return "", limit, false
	}
	sep = r.text(a, 0, "sep")
	if sep == "" {
		r.fail("split needs a separator that is not empty")
	}
	return sep, limit, true
}

func split(r *run, s string, a arguments) *List {
	sep, limit, ok := r.separator(a)
	if !ok {
		return fields(r, s, limit)
	}
	r.alloc(16 * (strings.Count(s, sep) + 1))
	if limit < 0 {
		return texts(r, strings.Split(s, sep))
	}
	return texts(r, strings.SplitN(s, sep, min(limit, len(s))+1))
}

// rsplit splits from the right.
func rsplit(r *run, s string, a arguments) *List {
	sep, limit, ok := r.separator(a)
	if !ok || limit < 0 {
		return split(r, s, a)
	}
	parts := strings.Split(s, sep)
	r.alloc(32 * len(parts))
	if keep := len(parts) - 1 - limit; keep > 0 {
		parts = append([]string{strings.Join(parts[:keep+1], sep)}, parts[keep+1:]...)
	}
	return texts(r, parts)
}

// affix is startswith and endswith: one text, or a tuple of which one fits.
func affix(r *run, s string, a arguments, has func(string, string) bool) bool {
	l, ok := a.arg(0, "prefix", nil).(*List)
	if !ok {
		return has(s, r.text(a, 0, "prefix"))
	}
	for _, v := range r.iterate(l) {
		if t, ok := v.(string); ok && has(s, t) {
			return true
		}
	}
	return false
}

// replace charges the result's size before it is made.
func (r *run) replace(s, old, new string, count int) string {
	r.spend(len(s) >> 4)
	n := strings.Count(s, old)
	if count >= 0 {
		n = min(n, count)
	}
	r.alloc(len(s))
	r.alloc(product(len(new), int64(n)))
	return strings.Replace(s, old, new, n)
}

func (r *run) join(items []any, sep string) string {
	var b strings.Builder
	for i, v := range items {
		if i > 0 {
			r.put(&b, sep)
		}
		r.put(&b, r.str(v))
	}
	return b.String()
}

func title(s string) string {
	inWord := false
	return strings.Map(func(c rune) rune {
		was := inWord
		inWord = unicode.IsLetter(c)
		if was {
			return unicode.ToLower(c)
		}
		return unicode.ToTitle(c)
	}, s)
}

func capitalize(s string) string {
	first := true
	return strings.Map(func(c rune) rune {
		if first {
			first = false
			return unicode.ToTitle(c)
		}
		return unicode.ToLower(c)
	}, s)
}

// percent is text % values, with %s, %d and %% only.
func (r *run) percent(format string, v any) string {
	values := []any{v}
	if l, ok := v.(*List); ok && l.tuple {
		values = l.Items
	}
	var b strings.Builder
	for {
		before, rest, found := strings.Cut(format, "%")
		r.put(&b, before)
		if !found {
			break
		}
		if rest == "" || strings.IndexByte("sd%", rest[0]) < 0 {
			r.fail("text formatting knows %%s, %%d and %%%% only")
		}
		switch {
		case rest[0] == '%':
			r.put(&b, "%")
		case len(values) == 0:
			r.fail("text formatting has too few values")
		default:
			r.put(&b, r.str(values[0]))
			values = values[1:]
		}
		format = rest[1:]
	}
	if len(values) > 0 {
		r.fail("text formatting has too many values")
	}
	return b.String()
}

// braces is text.format(…) with {} and {n} only.
func (r *run) braces(format string, a arguments) string {
	var b strings.Builder
	auto := 0
	for {
		before, rest, found := strings.Cut(format, "{")
		r.put(&b, before)
		if !found {
			return b.String()
		}
		field, after, closed := strings.Cut(rest, "}")
		index := auto
		switch {
		case closed && field == "":
			auto++
		case closed && len(field) == 1 && field[0] >= '0' && field[0] <= '9':
			index = int(field[0] - '0')
		default:
			r.fail("format knows {} and {0} to {9} only")
		}
		if index >= len(a.pos) {
			r.fail("format has too few values")
		}
		r.put(&b, r.str(a.pos[index]))
		format = after
	}
}
