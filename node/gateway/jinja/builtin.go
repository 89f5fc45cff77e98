package jinja

import (
	"strings"
)

// globals are the functions that every template sees.
var globals = map[string]func(*run, arguments) any{
	"raise_exception": func(r *run, a arguments) any {
		panic(failure{&RaisedError{Message: r.str(a.arg(0, "message", "the template refuses this conversation"))}})
	},
	"namespace": func(r *run, a arguments) any {
		return &namespace{vars: r.merged(a).vals}
	},
	"dict":         func(r *run, a arguments) any { return r.merged(a) },
	"range":        rangeList,
	"strftime_now": func(r *run, a arguments) any { return strftime(r, r.text(a, 0, "format")) },
}

// merged is what dict(d, name=value…) makes: d's entries, then the named ones.
func (r *run) merged(a arguments) *Dict {
	out := NewDict()
	if len(a.pos) > 0 {
		d, ok := a.pos[0].(*Dict)
		if !ok {
			r.fail("cannot make a mapping of %s", describe(a.pos[0]))
		}
		r.extend(out, d)
	}
	r.extend(out, a.kw)
	return out
}

func (r *run) extend(out, d *Dict) {
	r.alloc(64 * len(d.keys))
	for _, k := range d.keys {
		out.set(k, d.vals[k])
	}
}

// rangeList is range(stop), range(start, stop) or range(start, stop, step).
func rangeList(r *run, a arguments) any {
	start, stop, step := 0, r.whole(a, 0, "stop", 0), 1
	if len(a.pos) > 1 {
		start, stop, step = stop, r.whole(a, 1, "stop", 0), r.whole(a, 2, "step", 1)
	}
	if step == 0 {
		r.fail("range: step is zero")
	}
	l := &List{}
	for i := start; step > 0 && i < stop || step < 0 && i > stop; i += step {
		r.alloc(512) // a range is for counting messages, not to fill memory
		l.Items = append(l.Items, int64(i))
	}
	return l
}

// layouts maps strftime's letters to Go's time layouts.
var layouts = map[byte]string{
	'Y': "2006", 'y': "06", 'm': "01", 'd': "02", 'e': "_2", 'H': "15", 'I': "03", 'M': "04", 'S': "05",
	'B': "January", 'b': "Jan", 'A': "Monday", 'a': "Mon", 'p': "PM", 'Z': "MST", 'z': "-0700", 'j': "002",
	'F': "2006-01-02", 'T': "15:04:05",
}

func strftime(r *run, format string) string {
	var b strings.Builder
	for {
		before, rest, found := strings.Cut(format, "%")
		r.put(&b, before)
		if !found {
			return b.String()
		}
		if rest == "" {
			r.put(&b, "%")
			return b.String()
		}
		if layout, ok := layouts[rest[0]]; ok {
			r.put(&b, r.now.Format(layout))
		} else if rest[0] == '%' {
			r.put(&b, "%")
		} else {
			r.fail("strftime_now does not know %%%c", rest[0])
		}
		format = rest[1:]
	}
}

type testFunc func(*run, any, []any) bool

var tests = map[string]testFunc{
	"defined":   func(_ *run, v any, _ []any) bool { _, ok := v.(undefined); return !ok },
	"undefined": func(_ *run, v any, _ []any) bool { _, ok := v.(undefined); return ok },
	"none":      func(_ *run, v any, _ []any) bool { return v == nil },
	"boolean":   func(_ *run, v any, _ []any) bool { _, ok := v.(bool); return ok },
	"true":      func(_ *run, v any, _ []any) bool { return v == true },
	"false":     func(_ *run, v any, _ []any) bool { return v == false },
	"integer":   func(_ *run, v any, _ []any) bool { _, ok := v.(int64); return ok },
	"float":     func(_ *run, v any, _ []any) bool { _, ok := v.(float64); return ok },
	"number":    func(_ *run, v any, _ []any) bool { _, ok := number(v); return ok },
	"string":    func(_ *run, v any, _ []any) bool { _, ok := v.(string); return ok },
	"mapping":   func(_ *run, v any, _ []any) bool { _, ok := v.(*Dict); return ok },
	"callable":  func(_ *run, v any, _ []any) bool { _, ok := v.(*callable); return ok },
	"iterable":  iterable,
	"sequence":  iterable,
	"upper":     func(r *run, v any, _ []any) bool { s := r.str(v); return s == r.mapped(s, strings.ToUpper) },
	"lower":     func(r *run, v any, _ []any) bool { s := r.str(v); return s == r.mapped(s, strings.ToLower) },
	"odd":       func(r *run, v any, _ []any) bool { return r.arith("%", v, int64(2)) == int64(1) },
	"even":      func(r *run, v any, _ []any) bool { return r.arith("%", v, int64(2)) == int64(0) },
	"divisibleby": func(r *run, v any, a []any) bool {
		return r.equal(r.arith("%", v, one(r, a)), int64(0))
	},
	"sameas": func(r *run, v any, a []any) bool { return r.equal(v, one(r, a)) },
	"in":     func(r *run, v any, a []any) bool { return r.contains(one(r, a), v) },
	"eq":     comparing("=="), "equalto": comparing("=="), "ne": comparing("!="),
	"lt": comparing("<"), "lessthan": comparing("<"), "le": comparing("<="),
	"gt": comparing(">"), "greaterthan": comparing(">"), "ge": comparing(">="),
	"==": comparing("=="), "!=": comparing("!="),
	"<": comparing("<"), "<=": comparing("<="), ">": comparing(">"), ">=": comparing(">="),
}

func iterable(_ *run, v any, _ []any) bool {
	switch v.(type) {
	case undefined, string, *List, *Dict:
		return true
	}
	return false
}

// one is a test's argument.
func one(r *run, a []any) any {
	if len(a) != 1 {
		r.fail("the test needs one argument, got %d", len(a))
	}
	return a[0]
}

func comparing(op string) testFunc {
	return func(r *run, v any, a []any) bool { return r.compareOp(op, v, one(r, a)) }
}
