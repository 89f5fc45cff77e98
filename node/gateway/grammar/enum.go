package grammar

import (
	"cmp"
	"slices"
	"strings"
)

// enum is the values that enum and const leave, and whether there is either.
func (c *compiler) enum(plain []*node) (values []*node, ok bool) {
	for _, n := range plain {
		for _, key := range []string{"const", "enum"} {
			v := n.get(key)
			if v == nil {
				continue
			}
			list := []*node{v}
			if key == "enum" {
				if list = v.items; v.kind != 'a' {
					c.refuse(n, key, "it needs a list of values")
					continue
				}
			}
			c.steps += len(list)
			if ok {
				both := textsOf(values)
				list = slices.DeleteFunc(slices.Clone(list), func(v *node) bool { return !both[text(v)] })
			}
			values, ok = list, true
		}
	}
	return values, ok
}

func text(n *node) string {
	var b strings.Builder
	n.encode(&b)
	return b.String()
}

func textsOf(values []*node) map[string]bool {
	texts := make(map[string]bool, len(values))
	for _, v := range values {
		texts[text(v)] = true
	}
	return texts
}

// literals writes the listed values that have an allowed type. Keywords that a
// value of its type would have to be checked against are refused.
func (c *compiler) literals(plain, values []*node, types typeSet) *expr {
	var listed typeSet
	for _, v := range values {
		listed |= v.typeOf()
	}
	for _, n := range plain {
		for _, k := range n.keys {
			if listed&hints[k] != 0 {
				c.refuse(n, k, "beside enum or const")
			}
		}
	}
	// Without "type", keywords for other types say nothing about the values.
	if !slices.ContainsFunc(plain, func(n *node) bool { return n.get("type") != nil }) {
		types = anyType
	}
	var words []string
	for _, v := range values {
		if v.typeOf()&types != 0 {
			words = append(words, text(v))
			c.g.elements += len(words[len(words)-1])
		}
	}
	if c.over() {
		return never
	}
	slices.Sort(words)
	return trie(slices.Compact(words))
}

// trie writes sorted, distinct words so that each beginning is written once:
// the sampler then follows one alternative, not one per word.
func trie(words []string) *expr {
	switch len(words) {
	case 0:
		return never
	case 1:
		return lit(words[0])
	}
	out := alt()
	if words[0] == "" {
		out.kids = append(out.kids, empty)
		words = words[1:]
	}
	for len(words) > 0 {
		first := []rune(words[0])[0]
		n, _ := slices.BinarySearchFunc(words, first+1, func(w string, r rune) int { return cmp.Compare([]rune(w)[0], r) })
		same := words[:n]
		prefix := commonPrefix(same)
		rest := make([]string, n)
		for i, w := range same {
			rest[i] = w[len(prefix):]
		}
		out.kids = append(out.kids, seq(lit(prefix), trie(rest)))
		words = words[n:]
	}
	return out
}

// commonPrefix of sorted words, in whole characters.
func commonPrefix(words []string) string {
	a, b := words[0], words[len(words)-1]
	n := 0
	for i, r := range a {
		if !strings.HasPrefix(b[i:], string(r)) {
			break
		}
		n = i + len(string(r))
	}
	return a[:n]
}

// disjoint says whether no value can match two of the schemas, each together
// with rest. It finds what it must of types, enums, required constants and
// closed objects; what it cannot see is taken to overlap.
func (c *compiler) disjoint(items, rest []*node) bool {
	shapes := make([]*shape, len(items))
	for i, item := range items {
		if c.over() {
			return false
		}
		shapes[i] = c.shapeOf(append(slices.Clone(rest), item))
	}
	for i, a := range shapes {
		if c.steps += 1 + i/8; c.over() { // a pair is little work
			return false
		}
		for _, b := range shapes[:i] {
			if a != nil && b != nil && !a.apart(b) {
				return false
			}
		}
	}
	return true
}

// shape is what tells alternatives apart.
type shape struct {
	types    typeSet
	values   map[string]bool            // of enum; nil: any
	required map[string]map[string]bool // by name of a property that must be there, its values; nil: any
	names    map[string]bool            // the only properties; nil: others too
}

// shapeOf is nil for what matches nothing.
func (c *compiler) shapeOf(all []*node) *shape {
	plain, ok := c.expand(all)
	if !ok {
		return nil
	}
	s := &shape{types: c.types(plain), required: map[string]map[string]bool{}}
	if list, ok := c.enum(plain); ok {
		s.values = textsOf(list)
	}
	for _, n := range plain {
		for _, r := range listOf(n.get("required")) {
			s.required[r.text] = c.valuesOf(plain, r.text)
		}
		if more := n.get("additionalProperties"); more != nil && more.kind == 'f' {
			s.names = map[string]bool{}
			for _, k := range keysOf(n.get("properties")) {
				s.names[k] = true
			}
		}
	}
	return s
}

// valuesOf lists the constants of a property, nil when it is free.
func (c *compiler) valuesOf(plain []*node, name string) map[string]bool {
	c.steps += len(plain)
	var schemas []*node
	for _, n := range plain {
		if p := n.get("properties").get(name); p != nil {
			schemas = append(schemas, p)
		}
	}
	expanded, ok := c.expand(schemas)
	if !ok {
		return map[string]bool{}
	}
	list, ok := c.enum(expanded)
	if !ok {
		return nil
	}
	return textsOf(list)
}

func (a *shape) apart(b *shape) bool {
	both := a.types & b.types
	if both == 0 || separate(a.values, b.values) {
		return true
	}
	if both != isObject {
		return false
	}
	for name, values := range a.required {
		if other, ok := b.required[name]; ok && separate(values, other) {
			return true
		}
		if b.names != nil && !b.names[name] {
			return true
		}
	}
	for name := range b.required {
		if a.names != nil && !a.names[name] {
			return true
		}
	}
	return false
}

// separate says whether both are lists without a common value.
func separate(a, b map[string]bool) bool {
	if len(a) > len(b) {
		a, b = b, a
	}
	if a == nil || b == nil {
		return false
	}
	for v := range a {
		if b[v] {
			return false
		}
	}
	return true
}

func listOf(n *node) []*node {
	if n == nil {
		return nil
	}
	return n.items
}

func keysOf(n *node) []string {
	if n == nil {
		return nil
	}
	return n.keys
}
