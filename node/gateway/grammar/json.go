package grammar

// sharedRules are the rules that many schemas of one grammar need.
type sharedRules map[string]*rule

func (s *sharedRules) rule(g *grammar, name string, body func() *expr) *expr {
	if *s == nil {
		*s = sharedRules{}
	}
	r := (*s)[name]
	if r == nil {
		r = g.rule(nil)
		(*s)[name] = r
		r.body = body()
	}
	return ref(r)
}

// maxIndent bounds white space, else a model could write it for ever.
const maxIndent = 40

// ws is the white space that models write between tokens of JSON.
func (c *compiler) ws() *expr {
	return c.shared.rule(c.g, "ws", func() *expr {
		return alt(empty, lit(" "), seq(lit("\n"), c.g.repeat(set(chars(" \t")), 0, maxIndent)))
	})
}

func (c *compiler) colon() *expr { return seq(lit(":"), c.ws()) }

// AnyJSON is GBNF for any JSON object, start rule "root": what response_format
// "json_object" asks for.
func AnyJSON() string {
	text, err := FromSchema([]byte(`{"type": "object"}`), Options{})
	if err != nil {
		panic(err) // a constant; the tests run it
	}
	return text
}
