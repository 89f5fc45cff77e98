package gateway

import (
	"fmt"
	"math"
	"strings"

	"kvasird/node/gateway/jinja"
)

// fields reads a request's JSON object. The first error sticks and names the
// field; after it every getter returns its default. null counts as absent.
type fields struct {
	d     *jinja.Dict
	path  string     // of d, with a dot, for errors
	first *firstFail // shared by the fields of one request
}

type firstFail struct{ err *apiError }

func newFields(d *jinja.Dict) *fields { return &fields{d: d, first: &firstFail{}} }

// in is the fields of an object within.
func (f *fields) in(d *jinja.Dict, name string) *fields {
	return &fields{d: d, path: f.path + name + ".", first: f.first}
}

func (f *fields) err() *apiError { return f.first.err }

func (f *fields) fail(name, format string, args ...any) {
	if f.first.err == nil {
		param := f.path + name
		f.first.err = badParam(param, fmt.Sprintf("%s: %s", param, fmt.Sprintf(format, args...)))
	}
}

func (f *fields) get(name string) (any, bool) {
	v, ok := f.d.Get(name)
	return v, ok && v != nil
}

func (f *fields) text(name string) (string, bool) {
	v, ok := f.get(name)
	if !ok {
		return "", false
	}
	s, ok := v.(string)
	if !ok {
		f.fail(name, "must be a string, not %s", kindOf(v))
	}
	return s, ok
}

func (f *fields) flag(name string) bool {
	v, ok := f.get(name)
	if !ok {
		return false
	}
	b, ok := v.(bool)
	if !ok {
		f.fail(name, "must be true or false, not %s", kindOf(v))
	}
	return b
}

// number is a value in [lo, hi], or def when absent.
func (f *fields) number(name string, lo, hi, def float64) float32 {
	v, ok := f.get(name)
	if !ok {
		return float32(def)
	}
	x, ok := asFloat(v)
	if !ok {
		f.fail(name, "must be a number, not %s", kindOf(v))
		return float32(def)
	}
	if x < lo || x > hi {
		f.fail(name, "%v is not between %v and %v", x, lo, hi)
		return float32(def)
	}
	return float32(x)
}

// whole is an integer in [lo, hi]; false when absent or refused.
func (f *fields) whole(name string, lo, hi int64) (int64, bool) {
	v, ok := f.get(name)
	if !ok {
		return 0, false
	}
	n, ok := v.(int64)
	if x, isFloat := v.(float64); isFloat && x == math.Trunc(x) && math.Abs(x) < 1<<53 {
		n, ok = int64(x), true
	}
	if !ok {
		f.fail(name, "must be a whole number, not %s", kindOf(v))
		return 0, false
	}
	if n < lo || n > hi {
		f.fail(name, "%d is not between %d and %d", n, lo, hi)
		return 0, false
	}
	return n, true
}

// object is the fields of an object within; false when absent.
func (f *fields) object(name string) (*fields, bool) {
	v, ok := f.get(name)
	if !ok {
		return nil, false
	}
	d, ok := v.(*jinja.Dict)
	if !ok {
		f.fail(name, "must be an object, not %s", kindOf(v))
		return nil, false
	}
	return f.in(d, name), true
}

// each calls fn for the objects of a list, which may be absent.
func (f *fields) each(name string, limit int, fn func(item *fields)) {
	v, ok := f.get(name)
	if !ok {
		return
	}
	l, ok := v.(*jinja.List)
	if !ok {
		f.fail(name, "must be an array, not %s", kindOf(v))
		return
	}
	if len(l.Items) > limit {
		f.fail(name, "has %d items, at most %d are taken", len(l.Items), limit)
		return
	}
	for i, v := range l.Items {
		at := fmt.Sprintf("%s[%d]", name, i)
		d, ok := v.(*jinja.Dict)
		if !ok {
			f.fail(at, "must be an object, not %s", kindOf(v))
		}
		if f.err() != nil {
			return
		}
		fn(f.in(d, at))
	}
}

// arguments decodes a call's arguments as clients send them back: a text of JSON.
func (f *fields) arguments(name string) *jinja.Dict {
	v, _ := f.get(name)
	switch v := v.(type) {
	case nil:
	case *jinja.Dict:
		return v
	case string:
		if strings.TrimSpace(v) == "" {
			break
		}
		decoded, err := jinja.DecodeJSON([]byte(v))
		if err != nil {
			f.fail(name, "is not the JSON of a call's arguments: %v", err)
			break
		}
		if d, ok := decoded.(*jinja.Dict); ok {
			return d
		}
		if decoded != nil {
			f.fail(name, "must be the JSON of an object, not of %s", kindOf(decoded))
		}
	default:
		f.fail(name, "must be a string with JSON, not %s", kindOf(v))
	}
	return jinja.NewDict()
}

func asFloat(v any) (float64, bool) {
	switch v := v.(type) {
	case int64:
		return float64(v), true
	case float64:
		return v, true
	}
	return 0, false
}

// kindOf names a JSON value's kind.
func kindOf(v any) string {
	switch v.(type) {
	case nil:
		return "null"
	case bool:
		return "a boolean"
	case int64, float64:
		return "a number"
	case string:
		return "a string"
	case *jinja.List:
		return "an array"
	}
	return "an object"
}

// harmless says whether a value of an unsupported field asks for nothing.
func harmless(v any) bool {
	switch v := v.(type) {
	case nil:
		return true
	case bool:
		return !v
	case string:
		return v == ""
	case int64:
		return v == 0
	case float64:
		return v == 0
	case *jinja.List:
		return len(v.Items) == 0
	case *jinja.Dict:
		return len(v.Keys()) == 0
	}
	return false
}
