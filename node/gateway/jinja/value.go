package jinja

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// List is a list value. A render does not change it.
type List struct {
	Items []any
	tuple bool // prints as (a, b)
}

// Dict is a map value that keeps the order of insertion, as the JSON that it
// came from had it. A render does not change it.
type Dict struct {
	keys []any // string, or int64 from a dict literal
	vals map[any]any
}

// NewDict returns an empty Dict.
func NewDict() *Dict { return &Dict{vals: map[any]any{}} }

// Set adds or replaces one value; a replaced one keeps its place.
func (d *Dict) Set(key string, v any) { d.set(key, v) }

func (d *Dict) set(key, v any) {
	if _, ok := d.vals[key]; !ok {
		d.keys = append(d.keys, key)
	}
	d.vals[key] = v
}

// Get returns the value under key.
func (d *Dict) Get(key string) (any, bool) {
	v, ok := d.vals[key]
	return v, ok
}

// get looks any value up; only text and whole numbers can be keys.
func (d *Dict) get(key any) (any, bool) {
	switch key.(type) {
	case string, int64:
		v, ok := d.vals[key]
		return v, ok
	}
	return nil, false
}

// Keys returns the text keys in order.
func (d *Dict) Keys() []string {
	var keys []string
	for _, k := range d.keys {
		if s, ok := k.(string); ok {
			keys = append(keys, s)
		}
	}
	return keys
}

// undefined is the value of a name or key that is not there. It prints as
// nothing and iterates over nothing; anything else is an error naming it.
type undefined string

type callable struct {
	name string
	fn   func(*run, arguments) any
}

// namespace is the only mutable value; it prints opaquely and iterates not at
// all, so it may hold itself.
type namespace struct{ vars map[any]any }

// loopState is the variable loop.
type loopState struct {
	items []any
	index int
}

func isSpace(c rune) bool { return unicode.IsSpace(c) || c >= 0x1c && c <= 0x1f }

func truthy(v any) bool {
	switch v := v.(type) {
	case nil, undefined:
		return false
	case bool:
		return v
	case int64:
		return v != 0
	case float64:
		return v != 0
	case string:
		return v != ""
	case *List:
		return len(v.Items) > 0
	case *Dict:
		return len(v.keys) > 0
	}
	return true
}

// describe names a value's kind in an error.
func describe(v any) string {
	switch v := v.(type) {
	case nil:
		return "none"
	case undefined:
		return fmt.Sprintf("%q (not defined)", string(v))
	case *List:
		return "a list"
	case *Dict:
		return "a mapping"
	case *callable:
		return "function " + v.name
	case *namespace:
		return "a namespace"
	case *loopState:
		return "loop"
	}
	return fmt.Sprintf("a %T", v)
}

// str is Python's str: what {{ }} prints.
func (r *run) str(v any) string {
	if s, ok := v.(string); ok {
		return s
	}
	var b strings.Builder
	r.repr(&b, v)
	return b.String()
}

// put writes s to b within the budget.
func (r *run) put(b *strings.Builder, s string) {
	r.alloc(len(s))
	b.WriteString(s)
}

// repr writes Python's repr of v.
func (r *run) repr(b *strings.Builder, v any) {
	r.enter()
	defer r.leave()
	switch v := v.(type) {
	case undefined:
	case nil:
		r.put(b, "None")
	case bool:
		r.put(b, map[bool]string{true: "True", false: "False"}[v])
	case int64:
		r.put(b, strconv.FormatInt(v, 10))
	case float64:
		r.put(b, floatText(v))
	case string:
		r.put(b, quote(v))
	case *List:
		open, end := "[", "]"
		if v.tuple {
			open, end = "(", ")"
			if len(v.Items) == 1 {
				end = ",)"
			}
		}
		r.put(b, open)
		for i, item := range v.Items {
			if i > 0 {
				r.put(b, ", ")
			}
			r.repr(b, item)
		}
		r.put(b, end)
	case *Dict:
		r.put(b, "{")
		for i, key := range v.keys {
			if i > 0 {
				r.put(b, ", ")
			}
			r.repr(b, key)
			r.put(b, ": ")
			r.repr(b, v.vals[key])
		}
		r.put(b, "}")
	default:
		r.put(b, "<"+describe(v)+">")
	}
}

// floatText is Python's repr of a float.
func floatText(f float64) string {
	switch {
	case math.IsInf(f, 1):
		return "inf"
	case math.IsInf(f, -1):
		return "-inf"
	case math.IsNaN(f):
		return "nan"
	}
	if a := math.Abs(f); a != 0 && (a < 1e-4 || a >= 1e16) {
		return strconv.FormatFloat(f, 'e', -1, 64)
	}
	s := strconv.FormatFloat(f, 'f', -1, 64)
	if !strings.Contains(s, ".") {
		s += ".0"
	}
	return s
}

// quote is Python's repr of a string.
func quote(s string) string {
	q := byte('\'')
	if strings.Contains(s, "'") && !strings.Contains(s, `"`) {
		q = '"'
	}
	b := []byte{q}
	for _, c := range s {
		switch {
		case c == rune(q) || c == '\\':
			b = append(b, '\\', byte(c))
		case c == '\n':
			b = append(b, `\n`...)
		case c == '\r':
			b = append(b, `\r`...)
		case c == '\t':
			b = append(b, `\t`...)
		case c < 0x20 || c >= 0x7f && c < 0xa0:
			b = fmt.Appendf(b, `\x%02x`, c)
		default:
			b = utf8.AppendRune(b, c)
		}
	}
	return string(append(b, q))
}

// iterate returns the items of a list, the keys of a mapping or the characters
// of a string.
func (r *run) iterate(v any) []any {
	switch v := v.(type) {
	case undefined:
		return nil
	case *List:
		r.spend(len(v.Items))
		return v.Items
	case *Dict:
		r.spend(len(v.keys))
		return v.keys
	case string:
		r.alloc(32 * len(v))
		items := make([]any, 0, len(v))
		for _, c := range v {
			items = append(items, string(c))
		}
		return items
	}
	r.fail("cannot iterate over %s", describe(v))
	return nil
}

func (r *run) size(v any) int {
	switch v := v.(type) {
	case undefined:
		return 0
	case string:
		r.spend(len(v) >> 6)
		return utf8.RuneCountInString(v)
	case *List:
		return len(v.Items)
	case *Dict:
		return len(v.keys)
	}
	r.fail("%s has no length", describe(v))
	return 0
}

// number returns v as int64 or float64; bools count as 0 and 1.
func number(v any) (any, bool) {
	switch v := v.(type) {
	case int64, float64:
		return v, true
	case bool:
		if v {
			return int64(1), true
		}
		return int64(0), true
	}
	return nil, false
}

func toFloat(v any) float64 {
	if n, ok := v.(int64); ok {
		return float64(n)
	}
	return v.(float64)
}

// equal is Python's ==.
func (r *run) equal(a, b any) bool {
	r.enter()
	defer r.leave()
	x, xok := number(a)
	y, yok := number(b)
	if xok && yok {
		if i, ok := x.(int64); ok {
			if j, ok := y.(int64); ok {
				return i == j
			}
		}
		return toFloat(x) == toFloat(y)
	}
	switch a := a.(type) {
	case string:
		b, ok := b.(string)
		r.spend(min(len(a), len(b)) >> 6)
		return ok && a == b
	case undefined:
		_, ok := b.(undefined)
		return ok
	case *List:
		b, ok := b.(*List)
		return ok && a.tuple == b.tuple && slices.EqualFunc(a.Items, b.Items, r.equal)
	case *Dict:
		b, ok := b.(*Dict)
		return ok && r.equalDicts(a, b)
	}
	return a == b
}

func (r *run) equalDicts(a, b *Dict) bool {
	if len(a.keys) != len(b.keys) {
		return false
	}
	for _, k := range a.keys {
		v, ok := b.get(k)
		if !ok || !r.equal(a.vals[k], v) {
			return false
		}
	}
	return true
}

// order is Python's < as a three-way result, for numbers and for strings.
func (r *run) order(a, b any) int {
	x, xok := number(a)
	y, yok := number(b)
	if xok && yok {
		f, g := toFloat(x), toFloat(y)
		switch {
		case f < g:
			return -1
		case f > g:
			return 1
		}
		return 0
	}
	s, sok := a.(string)
	t, tok := b.(string)
	if !sok || !tok {
		r.fail("%s and %s have no order", describe(a), describe(b))
	}
	r.spend(min(len(s), len(t)) >> 6)
	return strings.Compare(s, t)
}

func (r *run) compareOp(op string, a, b any) bool {
	switch op {
	case "==":
		return r.equal(a, b)
	case "!=":
		return !r.equal(a, b)
	case "in":
		return r.contains(b, a)
	case "not in":
		return !r.contains(b, a)
	case "<":
		return r.order(a, b) < 0
	case "<=":
		return r.order(a, b) <= 0
	case ">":
		return r.order(a, b) > 0
	}
	return r.order(a, b) >= 0
}

func (r *run) contains(container, item any) bool {
	switch c := container.(type) {
	case undefined:
		return false
	case string:
		s, ok := item.(string)
		if !ok {
			r.fail("%s is not text: it cannot be in a string", describe(item))
		}
		r.spend(len(c) >> 6)
		return strings.Contains(c, s)
	case *Dict:
		_, has := c.get(item)
		return has
	case *List:
		return slices.ContainsFunc(c.Items, func(v any) bool { return r.equal(v, item) })
	}
	r.fail("%s contains nothing", describe(container))
	return false
}
