package grammar

import (
	"maps"
	"slices"
)

// member is a property that an object may have.
type member struct {
	name     string
	required bool
	value    *expr
}

// object writes an object whose properties come in the order of the schema.
// Properties that no schema names are allowed only where additionalProperties
// says so, or where nothing is named at all.
func (c *compiler) object(plain []*node) *expr {
	var names []string
	required := map[string]bool{}
	open, closed := false, false
	var more []*node
	for _, n := range plain {
		names = append(names, keysOf(n.get("properties"))...)
		for _, r := range listOf(n.get("required")) {
			names, required[r.text] = append(names, r.text), true
		}
		if extra := n.get("additionalProperties"); extra != nil {
			more = append(more, extra)
			closed = closed || extra.kind == 'f'
			open = open || extra.kind != 'f'
		}
	}
	names = unique(names)
	if len(names) == 0 && len(more) == 0 {
		open = true
	}
	members := make([]member, 0, len(names))
	for _, name := range names {
		c.g.elements += len(name)
		c.steps += len(plain)
		if c.over() {
			return never
		}
		members = append(members, member{name, required[name], c.value(propertySchemas(plain, name))})
	}
	var extra *expr
	if open && !closed {
		extra = c.value(more)
	}
	high := c.countProperties(plain, members, extra != nil)
	c.propertyNames(plain, members, extra != nil)
	if high == 0 {
		return seq(lit("{"), c.ws(), lit("}"))
	}
	least := 0
	if len(members) == 0 && c.atLeastOne(plain) {
		least = 1
	}
	return seq(lit("{"), c.ws(), c.members(members, extra, least, high), lit("}"))
}

// propertySchemas is what holds of a property: of each schema its own entry, or
// else what the schema says of all others.
func propertySchemas(plain []*node, name string) []*node {
	var all []*node
	for _, n := range plain {
		if p := n.get("properties").get(name); p != nil {
			all = append(all, p)
		} else if extra := n.get("additionalProperties"); extra != nil {
			all = append(all, extra)
		}
	}
	return all
}

// countProperties checks minProperties and maxProperties, which only a map can
// be held to by a grammar. It returns the most additional properties, or noMax.
func (c *compiler) countProperties(plain []*node, members []member, open bool) int {
	needed := 0
	for _, m := range members {
		if m.required {
			needed++
		}
	}
	high := noMax
	for _, n := range plain {
		if low, ok := c.count(n, "minProperties"); ok && low > needed && (low > 1 || len(members) > 0) {
			c.refuse(n, "minProperties", "only as many as are required, or one in an object without properties")
		}
		most, ok := c.count(n, "maxProperties")
		switch {
		case !ok, !open && most >= len(members):
		case len(members) == 0:
			high = least(high, most)
		default:
			c.refuse(n, "maxProperties", "beside properties")
		}
	}
	return high
}

func (c *compiler) atLeastOne(plain []*node) bool {
	return slices.ContainsFunc(plain, func(n *node) bool {
		low, ok := c.count(n, "minProperties")
		return ok && low == 1
	})
}

// propertyNames is refused unless it says nothing new, as {"type": "string"}.
func (c *compiler) propertyNames(plain []*node, members []member, open bool) {
	for _, n := range plain {
		names := n.get("propertyNames")
		if names == nil || names.kind == 't' || (len(members) == 0 && !open) {
			continue
		}
		typed := names.get("type")
		if names.kind == 'o' && !slices.ContainsFunc(names.keys, func(k string) bool { return k != "type" && !notes[k] }) &&
			(typed == nil || typed.text == "string") {
			continue
		}
		c.refuse(n, "propertyNames", "names of properties cannot be enforced")
	}
}

// members writes what is between the braces. Rule then(i) follows a member when
// members i… are to come; key(i) follows the quote that opens one of their names.
func (c *compiler) members(list []member, extra *expr, low, high int) *expr {
	n := len(list)
	then, key := make([]*expr, n+1), make([]*expr, n+1)
	then[n], key[n] = empty, never
	if extra != nil {
		next := c.g.rule(nil)
		one := seq(c.freeKey(list), lit(`"`), c.colon(), extra, c.ws())
		next.body = seq(lit(","), c.ws(), lit(`"`), one)
		repeated := c.g.repeat(ref(next), 0, least(high, max(high-1, noMax)))
		if n > 0 {
			repeated = c.g.repeat(ref(next), 0, noMax)
		}
		then[n], key[n] = repeated, seq(one, repeated)
	}
	needed := false // one of i… is required
	for i := n - 1; i >= 0; i-- {
		m := list[i]
		name := quote(m.name)
		one := seq(lit(name[1:]), c.colon(), m.value, c.ws(), then[i+1])
		needed = needed || m.required
		if m.required {
			key[i] = ref(c.g.rule(one))
		} else {
			key[i] = ref(c.g.rule(alt(one, key[i+1])))
		}
		follow := seq(lit(","), c.ws(), lit(`"`), key[i])
		if !needed {
			follow = opt(follow)
		}
		then[i] = ref(c.g.rule(follow))
	}
	first := seq(lit(`"`), key[0])
	if needed || low > 0 {
		return first
	}
	return opt(first)
}

// maxKey bounds names that the model makes up, else one could go on for ever.
const maxKey = 128

// freeKey writes the rest of a name that none of the members has. Escapes are
// left out, since they could spell one.
func (c *compiler) freeKey(list []member) *expr {
	rest := c.shared.rule(c.g, "key", func() *expr { return c.g.repeat(set(plainChars), 0, maxKey) })
	if len(list) == 0 {
		return rest
	}
	words := make([]string, 0, len(list))
	for _, m := range list {
		if q := quote(m.name); q == `"`+m.name+`"` { // others need an escape anyway
			words = append(words, m.name)
		}
	}
	slices.Sort(words)
	return c.otherThan(words, rest)
}

// otherThan matches every text but the sorted words; rest matches every text.
func (c *compiler) otherThan(words []string, rest *expr) *expr {
	if len(words) == 0 {
		return rest
	}
	if len(words) == 1 && words[0] == "" {
		return seq(set(plainChars), rest)
	}
	out := alt()
	if words[0] != "" {
		out.kids = append(out.kids, empty)
	}
	next := map[rune][]string{}
	for _, w := range words {
		for i, r := range w {
			next[r] = append(next[r], w[i+len(string(r)):])
			break
		}
	}
	var taken runeSet
	for _, r := range slices.Sorted(maps.Keys(next)) {
		taken = append(taken, runeRange{r, r})
		out.kids = append(out.kids, seq(lit(string(r)), ref(c.g.rule(c.otherThan(next[r], rest)))))
		if c.over() {
			return never
		}
	}
	out.kids = append(out.kids, seq(set(plainChars.without(taken)), rest))
	return out
}

// array writes an array: the items of prefixItems in their places, then items.
func (c *compiler) array(plain []*node) *expr {
	low, high, places := 0, noMax, 0
	for _, n := range plain {
		prefix, _ := itemSchemas(n)
		places = max(places, len(prefix))
		if v, ok := c.count(n, "minItems"); ok {
			low = max(low, v)
		}
		if v, ok := c.count(n, "maxItems"); ok {
			high = least(high, v)
		}
	}
	for _, n := range plain {
		if u := n.get("uniqueItems"); u != nil && u.kind == 't' && (high == noMax || high > 1) {
			c.refuse(n, "uniqueItems", "a grammar cannot compare items")
		}
	}
	if high != noMax && high < low {
		return never
	}
	if high != noMax {
		places = min(places, high)
	}
	comma := seq(lit(","), c.ws())
	rest := empty // after place i
	after := c.value(placeSchemas(plain, places))
	if high != places { // more items may come
		item := c.g.rule(seq(comma, after, c.ws()))
		most := noMax
		if high != noMax {
			most = high - places
		}
		if places == 0 { // the first has no comma
			most, low := least(most, max(most-1, noMax)), max(low, 1)
			rest = seq(after, c.ws(), c.g.repeat(ref(item), low-1, most))
		} else {
			rest = c.g.repeat(ref(item), max(low-places, 0), most)
		}
	}
	for i := places - 1; i >= 0; i-- {
		c.steps += len(plain)
		if c.over() {
			return never
		}
		one := seq(c.value(placeSchemas(plain, i)), c.ws(), rest)
		if i > 0 {
			one = seq(comma, one)
		}
		if i >= low && i > 0 {
			one = opt(one)
		}
		rest = ref(c.g.rule(one))
	}
	if low == 0 && (places > 0 || high != 0) {
		rest = opt(rest)
	}
	return seq(lit("["), c.ws(), rest, lit("]"))
}

// itemSchemas are a schema's items by place, and the schema of all others (nil:
// any). Older drafts have a list in items and the others in additionalItems.
func itemSchemas(n *node) (prefix []*node, others *node) {
	items := n.get("items")
	if items != nil && items.kind == 'a' {
		return items.items, n.get("additionalItems")
	}
	return listOf(n.get("prefixItems")), items
}

func placeSchemas(plain []*node, place int) []*node {
	var all []*node
	for _, n := range plain {
		prefix, others := itemSchemas(n)
		switch {
		case place < len(prefix):
			all = append(all, prefix[place])
		case others != nil:
			all = append(all, others)
		}
	}
	return all
}

// count reads a keyword whose value is a number of things.
func (c *compiler) count(n *node, key string) (int, bool) {
	v := n.get(key)
	if v == nil {
		return 0, false
	}
	s, ok := scaled(v.text)
	if v.kind != 'n' || !ok || !isWhole(s) || s.Sign() < 0 || whole(s).BitLen() > 31 {
		c.refuse(n, key, "it needs a count")
		return 0, false
	}
	return int(whole(s).Int64()), true
}

// least is the smaller of two upper bounds.
func least(a, b int) int {
	if a == noMax || (b != noMax && b < a) {
		return b
	}
	return a
}

func unique(names []string) []string {
	seen := map[string]bool{}
	return slices.DeleteFunc(names, func(s string) bool {
		dup := seen[s]
		seen[s] = true
		return dup
	})
}
