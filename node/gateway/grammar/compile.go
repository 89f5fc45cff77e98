package grammar

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// compiler turns conjunctions of schemas into rules. A conjunction is what must
// hold of one value: a schema, with what its allOf, $ref and chosen anyOf add.
type compiler struct {
	g       *grammar
	t       *tree
	top     *node
	opt     Options
	err     error
	steps   int              // of work, beyond what rules and elements count
	rules   map[string]*rule // by the ids of a conjunction
	shared  sharedRules
	dropped map[string]bool
}

// composers are the keywords by which a schema is made of others.
var composers = []string{"$ref", "allOf", "anyOf", "oneOf"}

// unsupported keywords, with why.
var unsupported = map[string]string{
	"not":                   "a grammar cannot exclude",
	"if":                    "conditions cannot be enforced",
	"dependentRequired":     "conditions cannot be enforced",
	"dependentSchemas":      "conditions cannot be enforced",
	"dependencies":          "conditions cannot be enforced",
	"contains":              "which item matches cannot be counted",
	"patternProperties":     "names by pattern cannot be kept apart from the others",
	"unevaluatedProperties": "use additionalProperties",
	"unevaluatedItems":      "use items",
	"$dynamicRef":           "use $ref",
	"$recursiveRef":         "use $ref",
}

// FromSchema writes GBNF for the texts that a JSON schema allows; an empty
// schema allows any value. The error is an *UnsupportedError when the schema asks
// for what cannot be enforced or allows nothing, and of another kind when it is
// no JSON or passes the limits of one. With Lenient only the latter is an error.
func FromSchema(schema []byte, opt Options) (gbnf string, err error) {
	if opt.Root == "" {
		opt.Root = "root"
	}
	if strings.Trim(opt.Root, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789") != "" {
		return "", fmt.Errorf("rule name %q has more than letters and digits", opt.Root)
	}
	top, t, err := parseSchema(schema)
	if err != nil {
		return "", err
	}
	gbnf, err = compile(top, t, opt)
	var whole *UnsupportedError
	if opt.Lenient && errors.As(err, &whole) {
		if opt.Dropped != nil {
			opt.Dropped(whole)
		}
		top, t, _ = parseSchema(nil)
		return compile(top, t, opt)
	}
	return gbnf, err
}

func compile(top *node, t *tree, opt Options) (string, error) {
	c := &compiler{g: &grammar{root: opt.Root}, t: t, top: top, opt: opt, rules: map[string]*rule{}, dropped: map[string]bool{}}
	start := c.g.rule(nil)
	start.body = c.value([]*node{top})
	if c.err != nil {
		return "", c.err
	}
	if c.over() {
		return "", &UnsupportedError{Reason: fmt.Sprintf("it needs more than %d rules, %d elements or %d steps", maxRules, maxElements, maxSteps)}
	}
	if reason := c.g.check(); reason != "" {
		return "", &UnsupportedError{Reason: reason}
	}
	return c.g.text(), nil
}

func (c *compiler) over() bool { return c.g.full || c.g.elements > maxElements || c.steps > maxSteps }

// refuse reports what cannot be enforced; the caller goes on as if it were not
// there, which only Lenient lets reach the end.
func (c *compiler) refuse(n *node, keyword, reason string) {
	e := &UnsupportedError{Keyword: keyword, Path: n.path, Reason: reason}
	if !c.opt.Lenient {
		if c.err == nil {
			c.err = e
		}
		return
	}
	if key := n.path + "\x00" + keyword; c.opt.Dropped != nil && !c.dropped[key] {
		c.dropped[key] = true
		c.opt.Dropped(e)
	}
}

// value is a reference to the rule of a conjunction.
func (c *compiler) value(all []*node) *expr {
	if c.err != nil || c.over() {
		return never
	}
	plain, ok := c.expand(all)
	if !ok {
		return never
	}
	var key strings.Builder
	for _, n := range plain {
		key.WriteString(strconv.Itoa(n.id) + " ")
	}
	if r := c.rules[key.String()]; r != nil {
		return ref(r)
	}
	r := c.g.rule(never)
	c.rules[key.String()] = r
	r.body = c.build(plain)
	return ref(r)
}

// expand follows $ref and allOf until only schemas of their own constraints are
// left, in the order of the schema. It is false when one of them allows nothing.
func (c *compiler) expand(all []*node) (plain []*node, ok bool) {
	seen := map[*node]bool{}
	todo := slices.Clone(all)
	for len(todo) > 0 {
		c.steps++
		n := todo[len(todo)-1]
		todo = todo[:len(todo)-1]
		if seen[n] || n.kind == 't' {
			continue
		}
		seen[n] = true
		if n.kind == 'f' {
			return nil, false
		}
		if n.kind != 'o' {
			c.refuse(n, "", "a schema is an object or a boolean")
			continue
		}
		if r := n.get("$ref"); r != nil {
			if target := c.resolve(n, r); target != nil {
				todo = append(todo, target)
			}
		}
		if a := n.get("allOf"); a != nil {
			todo = append(todo, a.items...)
		}
		if bare := c.bare(n); constrains(bare) {
			plain = append(plain, bare)
		}
		plain = append(plain, c.groups(n)...)
	}
	slices.SortFunc(plain, func(a, b *node) int { return cmp.Or(a.rank-b.rank, a.id-b.id) })
	return slices.Compact(plain), true
}

func (c *compiler) resolve(n, r *node) *node {
	if r.kind != 's' || (r.text != "#" && !strings.HasPrefix(r.text, "#/")) {
		c.refuse(n, "$ref", "only references into the same schema, as in #/$defs/name")
		return nil
	}
	target := c.top.at(r.text[1:])
	if target == nil {
		c.refuse(n, "$ref", "nothing is at "+r.text)
	}
	return target
}

// bare is a schema without what composes it.
func (c *compiler) bare(n *node) *node {
	if !slices.ContainsFunc(composers, func(k string) bool { return n.fields[k] != nil }) {
		return n
	}
	if n.bare == nil {
		n.bare = c.t.fresh('o', n.path)
		n.bare.rank = n.rank
		n.bare.fields = map[string]*node{}
		for _, k := range n.keys {
			if !slices.Contains(composers, k) {
				n.bare.keys = append(n.bare.keys, k)
				n.bare.fields[k] = n.fields[k]
			}
		}
	}
	return n.bare
}

// groups are a schema's anyOf and oneOf, each as a schema that has nothing else.
func (c *compiler) groups(n *node) []*node {
	if n.groups != nil || (n.fields["anyOf"] == nil && n.fields["oneOf"] == nil) {
		return n.groups
	}
	for _, key := range []string{"anyOf", "oneOf"} {
		list := n.fields[key]
		switch {
		case list == nil:
		case len(list.items) == 0:
			c.refuse(n, key, "it needs a list of schemas")
		default:
			g := c.t.fresh('o', n.path)
			g.keys, g.fields = []string{key}, map[string]*node{key: list}
			g.groups = []*node{g}
			n.groups = append(n.groups, g)
		}
	}
	return n.groups
}

// notes are keywords that constrain nothing.
var notes = map[string]bool{"$schema": true, "$comment": true, "$defs": true, "definitions": true, "title": true,
	"description": true, "default": true, "examples": true, "deprecated": true, "readOnly": true, "writeOnly": true,
	"contentEncoding": true, "contentMediaType": true, "then": true, "else": true}

func constrains(n *node) bool {
	return slices.ContainsFunc(n.keys, func(k string) bool { return !notes[k] })
}

// build writes the body of a conjunction's rule.
func (c *compiler) build(plain []*node) *expr {
	for i, n := range plain {
		for _, key := range []string{"anyOf", "oneOf"} {
			list := n.get(key)
			if list == nil {
				continue
			}
			rest := slices.Delete(slices.Clone(plain), i, i+1)
			apart := key == "anyOf" || c.disjoint(list.items, rest)
			if c.over() {
				return never
			}
			if !apart {
				c.refuse(n, key, "more than one of it can match; use anyOf")
			}
			choice := alt()
			for _, item := range list.items {
				choice.kids = append(choice.kids, c.value(append(slices.Clone(rest), item)))
			}
			return choice
		}
	}
	for _, n := range plain {
		for _, k := range n.keys {
			c.refuseKeyword(n, k)
		}
	}
	return c.flat(plain)
}

func (c *compiler) refuseKeyword(n *node, k string) {
	v := n.fields[k]
	switch {
	case k == "$id" && n.path != "":
		c.refuse(n, k, "references below it would change their meaning")
	case unsupported[k] == "":
	case strings.HasPrefix(k, "unevaluated") && v.kind == 't', k == "patternProperties" && v.kind == 'o' && len(v.keys) == 0:
	default:
		c.refuse(n, k, unsupported[k])
	}
}

// flat writes a conjunction without alternatives of schemas.
func (c *compiler) flat(plain []*node) *expr {
	types := c.types(plain)
	if values, ok := c.enum(plain); ok {
		return c.literals(plain, values, types)
	}
	out := alt()
	add := func(bit typeSet, write func([]*node) *expr) {
		if types&bit != 0 {
			out.kids = append(out.kids, write(plain))
		}
	}
	add(isObject, c.object)
	add(isArray, c.array)
	add(isString, c.str)
	if types&(isInteger|isFraction) != 0 {
		out.kids = append(out.kids, c.number(plain, types&isFraction == 0))
	}
	add(isBool, func([]*node) *expr { return alt(lit("true"), lit("false")) })
	add(isNull, func([]*node) *expr { return lit("null") })
	return out
}

// typeSet is a set of JSON types; a number is an integer or a fraction.
type typeSet uint8

const (
	isNull typeSet = 1 << iota
	isBool
	isInteger
	isFraction
	isString
	isArray
	isObject
	anyType = isNull | isBool | isInteger | isFraction | isString | isArray | isObject
)

var typeNames = map[string]typeSet{"null": isNull, "boolean": isBool, "integer": isInteger, "number": isInteger | isFraction,
	"string": isString, "array": isArray, "object": isObject}

// hints are the types that a schema without "type" must have meant.
var hints = map[string]typeSet{
	"properties": isObject, "required": isObject, "additionalProperties": isObject, "minProperties": isObject,
	"maxProperties": isObject, "propertyNames": isObject, "items": isArray, "prefixItems": isArray, "minItems": isArray,
	"maxItems": isArray, "uniqueItems": isArray, "minLength": isString, "maxLength": isString, "pattern": isString,
	"format": isString, "minimum": isInteger | isFraction, "maximum": isInteger | isFraction,
	"exclusiveMinimum": isInteger | isFraction, "exclusiveMaximum": isInteger | isFraction, "multipleOf": isInteger | isFraction}

// types are what a conjunction allows. Without any "type" it is taken to mean
// the types that its keywords speak of, which allows less and never more.
func (c *compiler) types(plain []*node) typeSet {
	types, hinted := anyType, typeSet(0)
	for _, n := range plain {
		if t := n.get("type"); t != nil {
			types &= c.typesOf(n, t)
			continue
		}
		for _, k := range n.keys {
			hinted |= hints[k]
		}
	}
	if types == anyType && hinted != 0 {
		return hinted
	}
	return types
}

func (c *compiler) typesOf(n, t *node) typeSet {
	list := []*node{t}
	if t.kind == 'a' {
		list = t.items
	}
	var types typeSet
	for _, item := range list {
		bit := typeNames[item.text]
		if item.kind != 's' || bit == 0 {
			c.refuse(n, "type", "it names the JSON types")
			return anyType
		}
		types |= bit
	}
	return types
}

func (n *node) typeOf() typeSet {
	switch n.kind {
	case 'o':
		return isObject
	case 'a':
		return isArray
	case 's':
		return isString
	case 'n':
		if v, ok := scaled(n.text); ok && isWhole(v) {
			return isInteger
		}
		return isFraction
	case 'z':
		return isNull
	}
	return isBool
}
