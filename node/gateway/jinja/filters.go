package jinja

import (
	"math"
	"slices"
	"strconv"
	"strings"
)

type filterFunc func(*run, any, arguments) any

// filters is filled in init because map, select and their like look filters
// and tests up themselves.
var filters map[string]filterFunc

func init() {
	filters = map[string]filterFunc{
		"tojson": tojson, "fromjson": fromjson, "from_json": fromjson,
		"trim":       func(r *run, v any, a arguments) any { return strip(r, r.str(v), a, true, true) },
		"upper":      func(r *run, v any, _ arguments) any { return r.mapped(r.str(v), strings.ToUpper) },
		"lower":      func(r *run, v any, _ arguments) any { return r.mapped(r.str(v), strings.ToLower) },
		"title":      func(r *run, v any, _ arguments) any { return r.mapped(r.str(v), title) },
		"capitalize": func(r *run, v any, _ arguments) any { return r.mapped(r.str(v), capitalize) },
		"string":     func(r *run, v any, _ arguments) any { return r.str(v) },
		"safe":       func(r *run, v any, _ arguments) any { return v },
		"length":     func(r *run, v any, _ arguments) any { return int64(r.size(v)) },
		"count":      func(r *run, v any, _ arguments) any { return int64(r.size(v)) },
		"list":       func(r *run, v any, _ arguments) any { return &List{Items: r.iterate(v)} },
		"default":    orDefault, "d": orDefault,
		"join": joinFilter, "replace": replaceFilter, "indent": indent, "items": items,
		"first": first, "last": last, "reverse": reverse,
		"int": toInt, "float": toFloatFilter, "abs": abs, "round": round,
		"map": mapFilter, "select": choose(true, false), "reject": choose(false, false),
		"selectattr": choose(true, true), "rejectattr": choose(false, true),
		"sort": sortFilter, "dictsort": dictsort, "unique": unique, "min": extreme(-1), "max": extreme(1),
		"sum": sum,
		"format": func(r *run, v any, a arguments) any {
			return r.percent(r.str(v), &List{Items: a.pos, tuple: true})
		},
	}
}

func orDefault(_ *run, v any, a arguments) any {
	_, missing := v.(undefined)
	if missing || truthy(a.arg(1, "boolean", false)) && !truthy(v) {
		return a.arg(0, "default_value", "")
	}
	return v
}

// lookup follows a dotted attribute path, as attribute= arguments do.
func (r *run) lookup(v any, path string) any {
	for part := range strings.SplitSeq(path, ".") {
		if i, err := strconv.ParseInt(part, 10, 64); err == nil {
			v = r.item(v, i)
		} else {
			v = r.item(v, part)
		}
	}
	return v
}

func joinFilter(r *run, v any, a arguments) any {
	list := r.iterate(v)
	if path, ok := a.arg(1, "attribute", nil).(string); ok {
		list = r.each(list, func(v any) any { return r.lookup(v, path) })
	}
	return r.join(list, r.str(a.arg(0, "d", "")))
}

func (r *run) each(list []any, f func(any) any) []any {
	r.alloc(16 * len(list))
	out := make([]any, len(list))
	for i, v := range list {
		out[i] = f(v)
	}
	return out
}

func replaceFilter(r *run, v any, a arguments) any {
	return r.replace(r.str(v), r.text(a, 0, "old"), r.text(a, 1, "new"), r.whole(a, 2, "count", -1))
}

func indent(r *run, v any, a arguments) any {
	width := a.arg(0, "width", int64(4))
	pad, isText := width.(string)
	if !isText {
		pad, _ = r.repeat(" ", width, width).(string)
	}
	var b strings.Builder
	for i, line := range strings.Split(r.str(v), "\n") {
		if i > 0 {
			r.put(&b, "\n")
		}
		indented := i > 0 || truthy(a.arg(1, "first", false))
		if indented && (line != "" || truthy(a.arg(2, "blank", false))) {
			r.put(&b, pad)
		}
		r.put(&b, line)
	}
	return b.String()
}

func items(r *run, v any, _ arguments) any {
	switch v := v.(type) {
	case undefined:
		return &List{}
	case *Dict:
		return pairs(r, v)
	}
	r.fail("can only get item pairs from a mapping, not from %s", describe(v))
	return nil
}

func first(r *run, v any, _ arguments) any {
	if list := r.iterate(v); len(list) > 0 {
		return list[0]
	}
	return undefined("first of nothing")
}

func last(r *run, v any, _ arguments) any {
	if list := r.iterate(v); len(list) > 0 {
		return list[len(list)-1]
	}
	return undefined("last of nothing")
}

func reverse(r *run, v any, _ arguments) any {
	list := r.each(r.iterate(v), func(v any) any { return v })
	slices.Reverse(list)
	if _, ok := v.(string); ok {
		return r.join(list, "")
	}
	return &List{Items: list}
}

func toInt(r *run, v any, a arguments) any {
	def := a.arg(0, "default", int64(0))
	if s, ok := v.(string); ok {
		s = strings.TrimFunc(s, isSpace)
		base := r.whole(a, 1, "base", 10)
		if base < 2 || base > 36 {
			r.fail("int: base %d is not in 2 to 36", base)
		}
		if i, err := strconv.ParseInt(s, base, 64); err == nil {
			return i
		}
		f, err := strconv.ParseFloat(s, 64)
		if err != nil {
			return def
		}
		v = f
	}
	switch n, _ := number(v); n := n.(type) {
	case int64:
		return n
	case float64:
		if math.Abs(n) < 1<<63 {
			return int64(n)
		}
	}
	return def
}

func toFloatFilter(_ *run, v any, a arguments) any {
	if s, ok := v.(string); ok {
		if f, err := strconv.ParseFloat(strings.TrimFunc(s, isSpace), 64); err == nil {
			return f
		}
	}
	if n, ok := number(v); ok {
		return toFloat(n)
	}
	return a.arg(0, "default", 0.0)
}

func abs(r *run, v any, _ arguments) any {
	n, ok := number(v)
	if !ok {
		r.fail("abs does not work on %s", describe(v))
	}
	if i, ok := n.(int64); ok {
		return max(i, -i)
	}
	return math.Abs(n.(float64))
}

func round(r *run, v any, a arguments) any {
	n, ok := number(v)
	if !ok {
		r.fail("round does not work on %s", describe(v))
	}
	scale := math.Pow(10, float64(r.whole(a, 0, "precision", 0)))
	f := toFloat(n) * scale
	switch method := a.arg(1, "method", "common"); method {
	case "common":
		return math.RoundToEven(f) / scale
	case "ceil":
		return math.Ceil(f) / scale
	case "floor":
		return math.Floor(f) / scale
	default:
		r.fail("round has no method %s", r.str(method))
		return nil
	}
}

// mapFilter is map(attribute=…, default=…) or map('filter', …).
func mapFilter(r *run, v any, a arguments) any {
	if !truthy(v) {
		return &List{}
	}
	if path, ok := a.kw.Get("attribute"); ok {
		def, hasDef := a.kw.Get("default")
		return &List{Items: r.each(r.iterate(v), func(v any) any {
			got := r.lookup(v, r.str(path))
			if _, missing := got.(undefined); missing && hasDef {
				return def
			}
			return got
		})}
	}
	name := r.text(a, 0, "filter")
	fn, ok := filters[name]
	if !ok {
		r.fail("unknown filter %q", name)
	}
	rest := arguments{pos: a.pos[1:], kw: a.kw}
	return &List{Items: r.each(r.iterate(v), func(v any) any {
		r.enter()
		defer r.leave()
		return fn(r, v, rest)
	})}
}

// choose makes select, reject and their …attr forms.
func choose(keep, byAttr bool) filterFunc {
	return func(r *run, v any, a arguments) any {
		pos, path := a.pos, ""
		if byAttr {
			path = r.text(a, 0, "attribute")
			pos = pos[min(1, len(pos)):]
		}
		test := func(_ *run, v any, _ []any) bool { return truthy(v) }
		if len(pos) > 0 {
			name := r.str(pos[0])
			fn, ok := tests[name]
			if !ok {
				r.fail("unknown test %q", name)
			}
			test, pos = fn, pos[1:]
		}
		out := &List{}
		if !truthy(v) {
			return out
		}
		for _, item := range r.iterate(v) {
			r.alloc(16)
			got := item
			if byAttr {
				got = r.lookup(item, path)
			}
			if test(r, got, pos) == keep {
				out.Items = append(out.Items, item)
			}
		}
		return out
	}
}

// fold makes a sort key: the attribute, if asked; letters of one case, unless
// case counts.
func (r *run) fold(v any, a arguments) any {
	if path, ok := a.kw.Get("attribute"); ok {
		v = r.lookup(v, r.str(path))
	}
	if s, ok := v.(string); ok && !truthy(a.arg(math.MaxInt, "case_sensitive", false)) {
		return r.mapped(s, strings.ToLower)
	}
	return v
}

// sorted sorts stably by fold, charging each comparison.
func (r *run) sorted(list []any, keys []any, descending bool) []any {
	index := make([]int, len(list))
	for i := range index {
		index[i] = i
	}
	slices.SortStableFunc(index, func(i, j int) int {
		r.spend(1)
		c := r.order(keys[i], keys[j])
		if descending {
			return -c
		}
		return c
	})
	out := make([]any, len(list))
	for i, j := range index {
		out[i] = list[j]
	}
	return out
}

func sortFilter(r *run, v any, a arguments) any {
	list := r.iterate(v)
	keys := r.each(list, func(v any) any { return r.fold(v, a) })
	r.alloc(32 * len(list))
	return &List{Items: r.sorted(list, keys, truthy(a.arg(0, "reverse", false)))}
}

func dictsort(r *run, v any, a arguments) any {
	d, ok := v.(*Dict)
	if !ok {
		r.fail("dictsort does not work on %s", describe(v))
	}
	part := int64(0)
	if r.str(a.arg(1, "by", "key")) == "value" {
		part = 1
	}
	list := pairs(r, d).Items
	kw := NewDict()
	kw.Set("case_sensitive", a.arg(0, "case_sensitive", false))
	keys := r.each(list, func(v any) any { return r.fold(r.item(v, part), arguments{kw: kw}) })
	r.alloc(32 * len(list))
	return &List{Items: r.sorted(list, keys, truthy(a.arg(2, "reverse", false)))}
}

func unique(r *run, v any, a arguments) any {
	var kept, keys []any
	for _, item := range r.iterate(v) {
		r.alloc(32)
		key := r.fold(item, a)
		if !slices.ContainsFunc(keys, func(k any) bool { return r.equal(k, key) }) {
			kept, keys = append(kept, item), append(keys, key)
		}
	}
	return &List{Items: kept}
}

// extreme makes min (want < 0) and max.
func extreme(want int) filterFunc {
	return func(r *run, v any, a arguments) any {
		list := r.iterate(v)
		if len(list) == 0 {
			return undefined("extreme of nothing")
		}
		best := list[0]
		for _, item := range list[1:] {
			if r.order(r.fold(item, a), r.fold(best, a))*want > 0 {
				best = item
			}
		}
		return best
	}
}

func sum(r *run, v any, a arguments) any {
	total := a.arg(1, "start", int64(0))
	for _, item := range r.iterate(v) {
		if path, ok := a.arg(0, "attribute", nil).(string); ok {
			item = r.lookup(item, path)
		}
		total = r.arith("+", total, item)
	}
	return total
}
