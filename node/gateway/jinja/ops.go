package jinja

import (
	"math"
	"strings"
)

func (r *run) arith(op string, a, b any) any {
	if op == "~" {
		return r.concat(r.str(a), r.str(b))
	}
	if s, ok := a.(string); ok && op == "%" {
		return r.percent(s, b)
	}
	x, xok := number(a)
	y, yok := number(b)
	switch {
	case xok && yok:
		return r.arithNumbers(op, x, y)
	case op == "+":
		return r.add(a, b)
	case op == "*" && xok:
		return r.repeat(b, a, x)
	case op == "*" && yok:
		return r.repeat(a, b, y)
	}
	r.fail("%s does not work on %s and %s", op, describe(a), describe(b))
	return nil
}

func (r *run) concat(a, b string) string {
	r.alloc(len(a) + len(b))
	return a + b
}

func (r *run) add(a, b any) any {
	if s, ok := a.(string); ok {
		if t, ok := b.(string); ok {
			return r.concat(s, t)
		}
	}
	l, lok := a.(*List)
	m, mok := b.(*List)
	if !lok || !mok || l.tuple != m.tuple {
		r.fail("+ does not work on %s and %s", describe(a), describe(b))
	}
	r.alloc(16 * (len(l.Items) + len(m.Items)))
	return &List{Items: append(append([]any(nil), l.Items...), m.Items...), tuple: l.tuple}
}

// repeat is text * n or list * n.
func (r *run) repeat(v, by, count any) any {
	n, ok := count.(int64)
	if !ok {
		r.fail("* does not work on %s and %s", describe(v), describe(by))
	}
	n = max(n, 0)
	switch v := v.(type) {
	case string:
		r.alloc(product(len(v), n))
		return strings.Repeat(v, int(n))
	case *List:
		r.alloc(product(16*len(v.Items), n))
		out := &List{tuple: v.tuple}
		for range int(n) * min(len(v.Items), 1) {
			out.Items = append(out.Items, v.Items...)
		}
		return out
	}
	r.fail("* does not work on %s and %s", describe(v), describe(by))
	return nil
}

// product multiplies sizes; one too large for any budget is maxAlloc + 1.
func product(size int, n int64) int {
	if size > 0 && n > int64(maxAlloc/size) {
		return maxAlloc + 1
	}
	return size * int(n)
}

func (r *run) sign(op string, v any) any {
	n, ok := number(v)
	if !ok {
		r.fail("unary %s does not work on %s", op, describe(v))
	}
	if op == "+" {
		return n
	}
	if i, ok := n.(int64); ok {
		return -i
	}
	return -n.(float64)
}

func (r *run) arithNumbers(op string, x, y any) any {
	i, iok := x.(int64)
	j, jok := y.(int64)
	f, g := toFloat(x), toFloat(y)
	ints := iok && jok
	if g == 0 && (op == "/" || op == "//" || op == "%") {
		r.fail("division by zero")
	}
	switch op {
	case "+":
		if ints {
			return i + j
		}
		return f + g
	case "-":
		if ints {
			return i - j
		}
		return f - g
	case "*":
		if ints {
			return i * j
		}
		return f * g
	case "/":
		return f / g
	case "//":
		if ints {
			return floorDiv(i, j)
		}
		return math.Floor(f / g)
	case "%":
		if ints {
			return i - j*floorDiv(i, j)
		}
		return f - g*math.Floor(f/g)
	}
	p := math.Pow(f, g)
	if ints && j >= 0 && math.Abs(p) < 1<<53 {
		return int64(p)
	}
	return p
}

// floorDiv rounds towards minus infinity, as Python does.
func floorDiv(i, j int64) int64 {
	q := i / j
	if i%j != 0 && (i < 0) != (j < 0) {
		q--
	}
	return q
}

// item is obj[key]; what is not there is undefined.
func (r *run) item(obj, key any) any {
	switch o := obj.(type) {
	case undefined:
		r.fail("%q is not defined", string(o))
	case *Dict:
		if v, ok := o.get(key); ok {
			return v
		}
	case *List:
		if i, ok := position(key, len(o.Items)); ok {
			return o.Items[i]
		}
	case string:
		if _, ok := key.(int64); ok {
			chars := r.iterate(o)
			if i, ok := position(key, len(chars)); ok {
				return chars[i]
			}
		}
	}
	if name, ok := key.(string); ok {
		if _, isDict := obj.(*Dict); !isDict {
			return r.attr(obj, name)
		}
		return undefined(name)
	}
	return undefined(r.str(key))
}

// position resolves an index that may count from the end.
func position(key any, n int) (int, bool) {
	i, ok := key.(int64)
	if ok && i < 0 {
		i += int64(n)
	}
	return int(i), ok && i >= 0 && i < int64(n)
}

// attr is obj.name: a method, else a key.
func (r *run) attr(obj any, name string) any {
	switch o := obj.(type) {
	case undefined:
		r.fail("%q is not defined: it has no %q", string(o), name)
	case *Dict:
		if m, ok := dictMethods[name]; ok {
			return &callable{name, func(r *run, a arguments) any { return m(r, o, a) }}
		}
		if v, ok := o.Get(name); ok {
			return v
		}
	case string:
		if m, ok := stringMethods[name]; ok {
			return &callable{name, func(r *run, a arguments) any { return m(r, o, a) }}
		}
	case *List:
		if name == "index" || name == "count" {
			return &callable{name, func(r *run, a arguments) any { return r.find(o, name, a) }}
		}
	case *namespace:
		if v, ok := o.vars[name]; ok {
			return v
		}
	case *loopState:
		return r.loopAttr(o, name)
	}
	return undefined(name)
}

// find is list.index and list.count.
func (r *run) find(l *List, method string, a arguments) any {
	n := int64(0)
	for i, v := range l.Items {
		if !r.equal(v, a.arg(0, "value", nil)) {
			continue
		}
		if method == "index" {
			return int64(i)
		}
		n++
	}
	if method == "index" {
		r.fail("value is not in the list")
	}
	return n
}

func (r *run) loopAttr(l *loopState, name string) any {
	i, n := l.index, len(l.items)
	switch name {
	case "index":
		return int64(i + 1)
	case "index0":
		return int64(i)
	case "revindex":
		return int64(n - i)
	case "revindex0":
		return int64(n - i - 1)
	case "first":
		return i == 0
	case "last":
		return i == n-1
	case "length":
		return int64(n)
	case "previtem":
		if i > 0 {
			return l.items[i-1]
		}
	case "nextitem":
		if i < n-1 {
			return l.items[i+1]
		}
	case "cycle":
		return &callable{name, func(r *run, a arguments) any {
			if len(a.pos) == 0 {
				r.fail("loop.cycle needs a value")
			}
			return a.pos[i%len(a.pos)]
		}}
	}
	return undefined("loop." + name)
}

// slice is obj[start:stop:step] with Python's rules.
func (r *run) slice(obj any, bounds [3]any) any {
	switch o := obj.(type) {
	case string:
		r.alloc(8 * len(o))
		return string(pick(r, []rune(o), bounds))
	case *List:
		r.alloc(16 * len(o.Items))
		return &List{Items: pick(r, o.Items, bounds), tuple: o.tuple}
	}
	r.fail("%s cannot be sliced", describe(obj))
	return nil
}

// pick returns the items that a slice selects.
func pick[T any](r *run, items []T, bounds [3]any) []T {
	start, stop, step := r.sliceBounds(bounds, len(items))
	var picked []T
	for i := start; step > 0 && i < stop || step < 0 && i > stop; i += step {
		picked = append(picked, items[i])
		if step > len(items) || step < -len(items) {
			break
		}
	}
	return picked
}

func (r *run) sliceBounds(bounds [3]any, n int) (start, stop, step int) {
	get := func(v any, def int) int {
		if v == nil {
			return def
		}
		i, ok := v.(int64)
		if !ok {
			r.fail("a slice needs whole numbers, found %s", describe(v))
		}
		return int(i)
	}
	step = get(bounds[2], 1)
	if step == 0 {
		r.fail("slice step is zero")
	}
	low, high := 0, n // where start and stop may lie
	first, last := 0, n
	if step < 0 {
		low, high = -1, n-1
		first, last = n-1, -1
	}
	clip := func(v any, def int) int {
		if v == nil {
			return def
		}
		i := get(v, 0)
		if i < 0 {
			i += n
		}
		return min(max(i, low), high)
	}
	return clip(bounds[0], first), clip(bounds[1], last), step
}
