package gateway

import (
	"fmt"
	"math"

	"kvasird/node/gateway/jinja"
)

// fields reads a request's JSON object. The first error sticks and names the
// field; after it every getter returns its default. null counts as absent.
type fields struct {
	d   *jinja.Dict
	err *apiError
}

func (f *fields) fail(param, format string, args ...any) {
	if f.err == nil {
		f.err = badParam(param, fmt.Sprintf("%s: %s", param, fmt.Sprintf(format, args...)))
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

// object is a nested object's fields; false when absent.
func (f *fields) object(name string) (*jinja.Dict, bool) {
	v, ok := f.get(name)
	if !ok {
		return nil, false
	}
	d, ok := v.(*jinja.Dict)
	if !ok {
		f.fail(name, "must be an object, not %s", kindOf(v))
	}
	return d, ok
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
