package grammar

import (
	"errors"
	"math/rand/v2"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/santhosh-tekuri/jsonschema/v6"
)

// validator compiles a schema with an implementation of others.
func validator(t *testing.T, schema string) *jsonschema.Schema {
	t.Helper()
	doc, err := jsonschema.UnmarshalJSON(strings.NewReader(schema))
	if err != nil {
		t.Fatal(err)
	}
	c := jsonschema.NewCompiler()
	c.AssertFormat()
	if err := c.AddResource("schema.json", doc); err != nil {
		t.Fatal(err)
	}
	s, err := c.Compile("schema.json")
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func valid(t *testing.T, s *jsonschema.Schema, text string) error {
	t.Helper()
	v, err := jsonschema.UnmarshalJSON(strings.NewReader(text))
	if err != nil {
		return err
	}
	return s.Validate(v)
}

// sound draws texts of a grammar, each of which must validate.
func sound(t *testing.T, schema, text string, draws int) {
	t.Helper()
	s, g, rnd, drawn := validator(t, schema), readGBNF(t, text), rand.New(rand.NewPCG(1, 2)), 0
	for range draws {
		answer, ok := g.draw(rnd)
		if !ok {
			continue
		}
		drawn++
		if err := valid(t, s, answer); err != nil {
			t.Fatalf("schema %s allows %s: %v\n%s", schema, answer, err, text)
		}
	}
	if drawn == 0 {
		t.Errorf("schema %s: no text of bounded length drawn", schema)
	}
}

var supported = []struct {
	name   string
	schema string
	yes    []string // are matched, and valid
	no     []string // are not
}{
	{"any", `{}`, []string{`1`, `{"a": [true, null]}`, `"x"`, `[]`, `-0.5e+10`}, []string{``, `{"a"}`, `01`, `nul`}},
	{"true", `true`, []string{`[[[]]]`}, []string{`[`}},
	{"object in order", `{"type":"object","properties":{"a":{"type":"string"},"b":{"type":"integer"},"c":{"type":"boolean"}},"required":["a","c"],"additionalProperties":false}`,
		[]string{`{"a":"x","c":true}`, `{ "a": "", "b": -12, "c": false }`, "{\n  \"a\": \"x\",\n  \"c\": true\n}"},
		[]string{`{}`, `{"a":"x"}`, `{"c":true,"a":"x"}`, `{"a":"x","c":true,}`, `{"a":1,"c":true}`, `{"a":"x","c":true,"d":1}`}},
	{"all optional", `{"type":"object","properties":{"a":{"type":"null"},"b":{"type":"null"}},"additionalProperties":false}`,
		[]string{`{}`, `{"a":null}`, `{"b":null}`, `{"a":null,"b":null}`}, []string{`{,"b":null}`, `{"a":null,}`, `{"a":null "b":null}`}},
	{"named properties close an object", `{"type":"object","properties":{"a":{}}}`, []string{`{"a":1}`}, []string{`{"z":1}`}},
	{"additional properties", `{"type":"object","properties":{"ab":{"type":"integer"},"a":{"type":"integer"}},"required":["a"],"additionalProperties":{"type":"string"}}`,
		[]string{`{"a":1,"abc":"x"}`, `{"ab":1,"a":2,"":"x","b":"y"}`, `{"a":1,"é":"x"}`},
		[]string{`{"a":1,"ab":"x"}`, `{"a":1,"x":1}`, `{"x":"x","a":1}`, `{"a":1,"\u0061b":"x"}`}},
	{"map", `{"type":"object","additionalProperties":{"type":"boolean"},"propertyNames":{"type":"string"},"minProperties":1,"maxProperties":2}`,
		[]string{`{"x":true}`, `{"x":true,"y":false}`}, []string{`{}`, `{"x":1}`, `{"x":true,"y":true,"z":true}`}},
	{"empty map", `{"type":"object","maxProperties":0}`, []string{`{}`, `{ }`}, []string{`{"x":1}`}},
	{"required but unnamed", `{"type":"object","properties":{"a":{"type":"null"}},"required":["b"]}`, []string{`{"b":3}`, `{"a":null,"b":[]}`}, []string{`{}`, `{"a":null}`}},
	{"a property that cannot be", `{"type":"object","properties":{"a":false,"b":true}}`, []string{`{}`, `{"b":1}`}, []string{`{"a":1}`}},
	{"names that need escapes", `{"type":"object","properties":{"a\"b\\\n<é>":{"type":"null"}},"required":["a\"b\\\n<é>"],"additionalProperties":false}`,
		[]string{`{"a\"b\\\n<é>":null}`}, []string{`{"a":null}`}},
	{"nullable", `{"type":["string","null"]}`, []string{`null`, `"a"`}, []string{`1`}},
	{"enum", `{"enum":["red","reddish","green",3,null,true,{"a":[1]}]}`, []string{`"red"`, `"reddish"`, `3`, `null`, `true`, `{"a":[1]}`}, []string{`"re"`, `"redd"`, `4`}},
	{"enum of a type", `{"type":"string","enum":["a",1]}`, []string{`"a"`}, []string{`1`}},
	{"const", `{"const":"x\ny"}`, []string{`"x\ny"`}, []string{`"x"`}},
	{"const and enum", `{"enum":["a","b"],"allOf":[{"enum":["b","c"]}]}`, []string{`"b"`}, []string{`"a"`, `"c"`}},
	{"array", `{"type":"array","items":{"type":"integer"},"minItems":2,"maxItems":3}`, []string{`[1,2]`, `[ 1, 2,3 ]`}, []string{`[]`, `[1]`, `[1,2,3,4]`, `[1,2,]`, `["a","b"]`}},
	{"array of one at most", `{"type":"array","items":{"type":"null"},"maxItems":1,"uniqueItems":true}`, []string{`[]`, `[null]`}, []string{`[null,null]`}},
	{"array of none", `{"type":"array","maxItems":0}`, []string{`[]`}, []string{`[1]`}},
	{"open array", `{"type":"array","items":{"const":1}}`, []string{`[]`, `[1]`, `[1,1,1]`}, []string{`[2]`, `[,]`}},
	{"tuple", `{"type":"array","prefixItems":[{"type":"string"},{"type":"integer"}],"items":false,"minItems":1}`, []string{`["a"]`, `["a",1]`}, []string{`[]`, `[1]`, `["a",1,2]`}},
	{"tuple and more", `{"type":"array","prefixItems":[{"const":"a"}],"items":{"const":"b"},"minItems":2,"maxItems":3}`, []string{`["a","b"]`, `["a","b","b"]`}, []string{`["a"]`, `["b","b"]`, `["a","b","b","b"]`}},
	{"tuple cut by maxItems", `{"type":"array","prefixItems":[true,true,{"const":3}],"maxItems":2}`, []string{`[]`, `[1]`, `[1,2]`}, []string{`[1,2,3]`}},
	{"string", `{"type":"string"}`, []string{`""`, `"a\"\\\/\u00e9\ud83d\ude00😀"`}, []string{`"`, "\"\n\"", `"\x"`, `"\ud83d"`, `"\ude00\ud83d"`}},
	{"string length", `{"type":"string","minLength":2,"maxLength":3}`, []string{`"ab"`, `"abc"`, `"\n\u0041"`, `"😀\ud83d\ude00x"`}, []string{`""`, `"a"`, `"abcd"`, `"\ud83d\ude00"`}},
	{"pattern", `{"type":"string","pattern":"^[a-c]+(-\\d{2,3})?$"}`, []string{`"a"`, `"abc-12"`, `"c-123"`}, []string{`""`, `"d"`, `"a-1"`, `"a-1234"`, `"xa"`}},
	{"pattern unanchored", `{"type":"string","pattern":"a|^b|c$"}`, []string{`"xxaxx"`, `"bx"`, `"xc"`}, []string{`"xbx"`, `"cx"`, `""`}},
	{"pattern of specials", `{"type":"string","pattern":"^(\"|\\\\|\\t|[\\x01\\]^-])$"}`, []string{`"\""`, `"\\"`, `"\t"`, `"\u0001"`, `"]"`, `"-"`, `"^"`}, []string{`"a"`, `"""`}},
	{"pattern with lengths", `{"type":"string","pattern":"^[a-z]+$","minLength":2,"maxLength":4}`, []string{`"ab"`, `"abcd"`}, []string{`"a"`, `"abcde"`}},
	{"pattern within lengths", `{"type":"string","pattern":"^(ab|abc)$","maxLength":3}`, []string{`"ab"`}, []string{`"a"`}},
	{"pattern negated", `{"type":"string","pattern":"^[^a-z\"]$"}`, []string{`"A"`, `"é"`, `"\\"`, `"\n"`}, []string{`"a"`, `"\""`}},
	{"date", `{"type":"string","format":"date"}`, []string{`"2026-02-28"`, `"1999-12-31"`}, []string{`"2026-02-30"`, `"2026-13-01"`, `"2026-1-1"`, `"2026-04-31"`}},
	{"date-time", `{"type":"string","format":"date-time"}`, []string{`"2026-11-30T23:59:59Z"`, `"2026-11-30T00:00:00.5+01:00"`}, []string{`"2026-11-30 23:59:59Z"`, `"2026-11-30T24:00:00Z"`, `"2026-11-30T23:59:59"`}},
	{"uuid", `{"type":"string","format":"uuid"}`, []string{`"123e4567-e89b-12d3-a456-426614174000"`}, []string{`"123e4567e89b12d3a456426614174000"`}},
	{"ipv4", `{"type":"string","format":"ipv4"}`, []string{`"127.0.0.1"`, `"255.255.255.255"`}, []string{`"256.1.1.1"`, `"01.1.1.1"`}},
	{"email", `{"type":"string","format":"email"}`, []string{`"a.b@example.org"`}, []string{`"a"`, `"@b.c"`}},
	{"hostname", `{"type":"string","format":"hostname"}`, []string{`"a-b.example.org"`}, []string{`"-a"`, `"a..b"`}},
	{"time", `{"type":"string","format":"time"}`, []string{`"12:00:00Z"`}, []string{`"12:00"`}},
	{"duration", `{"type":"string","format":"duration"}`, []string{`"P3D"`, `"PT5H"`}, []string{`"P"`, `"3D"`}},
	{"integer", `{"type":"integer"}`, []string{`0`, `-1`, `123456789012345`}, []string{`01`, `1.5`, `1e3`, `+1`, `1234567890123456`}},
	{"integer range", `{"type":"integer","minimum":-12,"maximum":1034}`, []string{`-12`, `-9`, `0`, `7`, `99`, `1034`, `999`, `1000`}, []string{`-13`, `1035`, `2000`, `-99`, `10000`, `007`}},
	{"integer exclusive", `{"type":"integer","exclusiveMinimum":0,"exclusiveMaximum":3}`, []string{`1`, `2`}, []string{`0`, `3`, `-0`}},
	{"integer from fractions", `{"type":"integer","minimum":0.5,"maximum":2.5}`, []string{`1`, `2`}, []string{`0`, `3`}},
	{"integer from below", `{"type":"integer","maximum":-5,"multipleOf":1}`, []string{`-5`, `-10`, `-123456`}, []string{`-4`, `0`, `5`, `-0`}},
	{"number", `{"type":"number"}`, []string{`0.5`, `-1e5`, `12E-3`}, []string{`.5`, `1.`, `1e999`, `00`}},
	{"number range", `{"type":"number","minimum":0,"maximum":1}`, []string{`0`, `0.0`, `0.5`, `1`, `1.0`, `0.999999999`}, []string{`1.1`, `-0.1`, `2`, `1e0`, `1.000000001`}},
	{"number between", `{"type":"number","minimum":0.25,"maximum":0.75}`, []string{`0.25`, `0.3`, `0.7499`, `0.75`, `0.750`}, []string{`0.2`, `0.76`, `0`, `0.7501`, `1`}},
	{"number exclusive", `{"type":"number","exclusiveMinimum":0}`, []string{`0.000000001`, `1`, `12.5`}, []string{`0`, `0.0`, `-1`, `0.0000000001`}},
	{"number below zero", `{"type":"number","minimum":-2.5,"maximum":-1}`, []string{`-1`, `-1.0`, `-2.5`, `-2.49`, `-2`}, []string{`-0.9`, `-2.51`, `0`, `1`, `-3`}},
	{"anyOf", `{"anyOf":[{"type":"string"},{"type":"array","items":{"type":"null"}}]}`, []string{`"a"`, `[null]`}, []string{`1`, `[1]`}},
	{"anyOf beside", `{"type":"object","properties":{"a":{"type":"integer"}},"anyOf":[{"required":["a"]},{"properties":{"b":{"const":1}},"required":["b"]}]}`,
		[]string{`{"a":1}`, `{"b":1}`, `{"a":2,"b":1}`}, []string{`{}`, `{"b":2}`}},
	{"anyOf twice", `{"type":"object","allOf":[{"anyOf":[{"required":["a"]},{"required":["b"]}]},{"anyOf":[{"required":["c"]},{"required":["d"]}]}]}`,
		[]string{`{"a":1,"c":1}`, `{"b":1,"d":1}`}, []string{`{"a":1}`, `{"a":1,"b":1}`}},
	{"oneOf by type", `{"oneOf":[{"type":"string"},{"type":"integer"},{"type":"null"}]}`, []string{`"a"`, `1`, `null`}, []string{`true`}},
	{"oneOf by a constant", `{"type":"object","oneOf":[{"properties":{"k":{"const":"a"},"x":{"type":"integer"}},"required":["k","x"]},{"properties":{"k":{"enum":["b","c"]}},"required":["k"]}]}`,
		[]string{`{"k":"a","x":1}`, `{"k":"c"}`}, []string{`{"k":"a"}`, `{"k":"d"}`}},
	{"oneOf by a closed object", `{"oneOf":[{"type":"object","properties":{"a":true},"required":["a"],"additionalProperties":false},{"type":"object","properties":{"b":true},"required":["b"]}]}`,
		[]string{`{"a":1}`, `{"b":1}`}, []string{`{}`}},
	{"oneOf by enum", `{"oneOf":[{"enum":[1,2]},{"enum":["x"]}]}`, []string{`1`, `"x"`}, []string{`3`}},
	{"allOf", `{"allOf":[{"type":"object","properties":{"a":{"type":"integer","minimum":3}},"required":["a"]},{"properties":{"a":{"maximum":5},"b":{"type":"null"}}}]}`,
		[]string{`{"a":3}`, `{"a":5,"b":null}`}, []string{`{"a":2}`, `{"a":6}`, `{}`}},
	{"allOf closed by one", `{"allOf":[{"type":"object","properties":{"a":true},"additionalProperties":false},{"properties":{"b":true}}]}`, []string{`{}`, `{"a":1}`}, []string{`{"b":1}`}},
	{"$ref", `{"type":"object","properties":{"a":{"$ref":"#/$defs/x~1y"}},"required":["a"],"$defs":{"x/y":{"type":"integer","maximum":9,"minimum":0}}}`, []string{`{"a":7}`}, []string{`{"a":10}`}},
	{"$ref with more", `{"$ref":"#/$defs/n","maximum":5,"$defs":{"n":{"type":"integer","minimum":3}}}`, []string{`3`, `5`}, []string{`2`, `6`}},
	{"recursion", `{"$ref":"#/$defs/node","$defs":{"node":{"type":"object","properties":{"v":{"type":"integer"},"next":{"anyOf":[{"$ref":"#/$defs/node"},{"type":"null"}]}},"required":["v","next"],"additionalProperties":false}}}`,
		[]string{`{"v":1,"next":null}`, `{"v":1,"next":{"v":2,"next":null}}`}, []string{`{"v":1}`, `{"v":1,"next":{}}`}},
	{"recursion to the root", `{"type":"array","items":{"$ref":"#"},"maxItems":2}`, []string{`[]`, `[[],[[]]]`}, []string{`[1]`, `[[],[],[]]`}},
	{"an alternative without end is left out", `{"$ref":"#/$defs/a","$defs":{"a":{"anyOf":[{"type":"null"},{"type":"object","properties":{"x":{"$ref":"#/$defs/b"}},"required":["x"]}]},"b":{"type":"object","properties":{"x":{"$ref":"#/$defs/b"}},"required":["x"]}}}`,
		[]string{`null`}, []string{`{"x":{}}`}},
	{"types are guessed from keywords", `{"properties":{"a":{"minLength":1}},"required":["a"]}`, []string{`{"a":"x"}`}, []string{`1`, `{"a":1}`, `{"a":""}`}},
	{"notes do not matter", `{"title":"t","description":"d","default":3,"examples":[1],"type":"null","x-order":1}`, []string{`null`}, []string{`3`}},
	{"long strings are counted", `{"type":"string","minLength":2500,"maxLength":4700,"pattern":"^a*$"}`,
		[]string{`"` + strings.Repeat("a", 2500) + `"`, `"` + strings.Repeat("a", 3501) + `"`, `"` + strings.Repeat("a", 4700) + `"`},
		[]string{`"` + strings.Repeat("a", 2499) + `"`, `"` + strings.Repeat("a", 4701) + `"`}},
}

func TestFromSchema(t *testing.T) {
	for _, tt := range supported {
		t.Run(tt.name, func(t *testing.T) {
			text, err := FromSchema([]byte(tt.schema), Options{})
			if err != nil {
				t.Fatal(err)
			}
			g, s := readGBNF(t, text), validator(t, tt.schema)
			for _, yes := range tt.yes {
				if err := valid(t, s, yes); err != nil {
					t.Errorf("%s is no valid example: %v", yes, err)
				}
				if !g.accepts(yes) {
					t.Errorf("%s is not accepted by\n%s", yes, text)
				}
			}
			for _, no := range tt.no {
				if g.accepts(no) {
					t.Errorf("%s is accepted by\n%s", no, text)
				}
			}
			sound(t, tt.schema, text, 200)
		})
	}
}

var refused = []struct {
	name, schema, keyword, path string
}{
	{"not", `{"not":{"type":"string"}}`, "not", ""},
	{"if", `{"if":{},"then":{}}`, "if", ""},
	{"dependentRequired", `{"dependentRequired":{"a":["b"]}}`, "dependentRequired", ""},
	{"dependentSchemas", `{"dependentSchemas":{}}`, "dependentSchemas", ""},
	{"dependencies", `{"dependencies":{}}`, "dependencies", ""},
	{"contains", `{"type":"array","contains":{}}`, "contains", ""},
	{"patternProperties", `{"properties":{"p":{"patternProperties":{"^a":{}}}}}`, "patternProperties", "/properties/p"},
	{"unevaluatedProperties", `{"unevaluatedProperties":false}`, "unevaluatedProperties", ""},
	{"unevaluatedItems", `{"unevaluatedItems":false}`, "unevaluatedItems", ""},
	{"dynamicRef", `{"$dynamicRef":"#x"}`, "$dynamicRef", ""},
	{"recursiveRef", `{"$recursiveRef":"#"}`, "$recursiveRef", ""},
	{"propertyNames", `{"type":"object","propertyNames":{"pattern":"^a"}}`, "propertyNames", ""},
	{"minProperties", `{"type":"object","minProperties":2}`, "minProperties", ""},
	{"maxProperties", `{"type":"object","properties":{"a":{},"b":{}},"maxProperties":1}`, "maxProperties", ""},
	{"a count that is none", `{"type":"array","minItems":-1}`, "minItems", ""},
	{"uniqueItems", `{"items":{"uniqueItems":true}}`, "uniqueItems", "/items"},
	{"multipleOf", `{"type":"integer","multipleOf":3}`, "multipleOf", ""},
	{"multipleOf of a number", `{"type":"number","multipleOf":1}`, "multipleOf", ""},
	{"a bound too fine", `{"type":"number","minimum":1e-12}`, "minimum", ""},
	{"a bound too large", `{"type":"number","maximum":1e999999999}`, "maximum", ""},
	{"a bound that is none", `{"type":"number","maximum":"x"}`, "maximum", ""},
	{"maxLength", `{"type":"string","maxLength":1000000}`, "maxLength", ""},
	{"minLength", `{"type":"string","minLength":1000000}`, "minLength", ""},
	{"pattern and length", `{"type":"string","pattern":"^(ab)+$","maxLength":3}`, "maxLength", ""},
	{"pattern and short length", `{"type":"string","pattern":"^(ab)+$","minLength":3}`, "minLength", ""},
	{"two patterns", `{"type":"string","pattern":"^a$","format":"date"}`, "format", ""},
	{"pattern that is none", `{"type":"string","pattern":1}`, "pattern", ""},
	{"unknown format", `{"type":"string","format":"uri"}`, "format", ""},
	{"lookahead", `{"pattern":"^(?=a)"}`, "pattern", ""},
	{"lookbehind", `{"pattern":"(?<!a)b"}`, "pattern", ""},
	{"back-reference", `{"pattern":"(a)\\1"}`, "pattern", ""},
	{"word boundary", `{"pattern":"\\ba"}`, "pattern", ""},
	{"property of characters", `{"pattern":"\\p{L}"}`, "pattern", ""},
	{"anchor inside", `{"pattern":"(^a)"}`, "pattern", ""},
	{"end inside", `{"pattern":"(a$)"}`, "pattern", ""},
	{"stray quantifier", `{"pattern":"*a"}`, "pattern", ""},
	{"repeated quantifier", `{"pattern":"a**"}`, "pattern", ""},
	{"repeated nothing", `{"pattern":"(a*)*"}`, "pattern", ""},
	{"open group", `{"pattern":"(a"}`, "pattern", ""},
	{"open brackets", `{"pattern":"[a"}`, "pattern", ""},
	{"brackets of a bracket", `{"pattern":"[]a]"}`, "pattern", ""},
	{"brackets in brackets", `{"pattern":"[[:alpha:]]"}`, "pattern", ""},
	{"backward range", `{"pattern":"[b-a]"}`, "pattern", ""},
	{"braces of nonsense", `{"pattern":"a{2,1}"}`, "pattern", ""},
	{"too many repetitions", `{"pattern":"a{99999999}"}`, "pattern", ""},
	{"surrogate", `{"pattern":"\\ud800"}`, "pattern", ""},
	{"cut escape", `{"pattern":"\\u00"}`, "pattern", ""},
	{"end in a backslash", `{"pattern":"a\\"}`, "pattern", ""},
	{"open name", `{"pattern":"(?<a"}`, "pattern", ""},
	{"long pattern", `{"pattern":"` + strings.Repeat("a", maxPattern+1) + `"}`, "pattern", ""},
	{"deep pattern", `{"pattern":"` + strings.Repeat("(", 40) + strings.Repeat(")", 40) + `"}`, "pattern", ""},
	{"oneOf that overlaps", `{"oneOf":[{"type":"string"},{"minLength":2}]}`, "oneOf", ""},
	{"oneOf of integer and number", `{"oneOf":[{"type":"integer"},{"type":"number"}]}`, "oneOf", ""},
	{"empty anyOf", `{"anyOf":[]}`, "anyOf", ""},
	{"remote $ref", `{"$ref":"https://example.org/s"}`, "$ref", ""},
	{"anchor $ref", `{"$ref":"#a"}`, "$ref", ""},
	{"dangling $ref", `{"$ref":"#/$defs/none"}`, "$ref", ""},
	{"nested $id", `{"properties":{"a":{"$id":"x"}}}`, "$id", "/properties/a"},
	{"enum beside bounds", `{"enum":[1,2],"minimum":2}`, "minimum", ""},
	{"enum that is no list", `{"enum":1}`, "enum", ""},
	{"type that is none", `{"type":"text"}`, "type", ""},
	{"schema that is none", `{"items":3}`, "", "/items"},
	{"false", `false`, "", ""},
	{"nothing is both", `{"type":"string","allOf":[{"type":"integer"}]}`, "", ""},
	{"bounds that cross", `{"type":"integer","minimum":2,"maximum":1}`, "", ""},
	{"lengths that cross", `{"type":"string","minLength":2,"maxLength":1}`, "", ""},
	{"items that cross", `{"type":"array","minItems":2,"maxItems":1}`, "", ""},
	{"required and impossible", `{"properties":{"a":false},"required":["a"]}`, "", ""},
	{"empty enum", `{"enum":[]}`, "", ""},
	{"no end", `{"properties":{"a":{"$ref":"#"}},"required":["a"]}`, "", ""},
	{"itself", `{"$ref":"#/$defs/a","$defs":{"a":{"anyOf":[{"$ref":"#/$defs/a"},{"type":"null"}]}}}`, "", ""},
	{"many alternatives", manyAlternatives(), "", ""},
	{"many rules", `{"type":"array","prefixItems":[` + strings.Repeat(`{"type":"null"},`, 9000) + `true]}`, "", ""},
	{"many repetitions", `{"properties":{` + strings.TrimSuffix(manyStrings(40), ",") + `}}`, "", ""},
}

// manyAlternatives doubles its alternatives at every step.
func manyAlternatives() string {
	var b strings.Builder
	b.WriteString(`{"$ref":"#/$defs/a0","$defs":{`)
	for i := range 30 {
		next := `{"$ref":"#/$defs/a` + string(rune('0'+(i+1)/10)) + string(rune('0'+(i+1)%10)) + `"}`
		name := "a0"
		if i > 0 {
			name = "a" + string(rune('0'+i/10)) + string(rune('0'+i%10))
		}
		b.WriteString(`"` + name + `":{"anyOf":[` + next + `,{"type":"null"},{"allOf":[` + next + `,{"minimum":` + string(rune('0'+i%10)) + `}]}]},`)
	}
	b.WriteString(`"a30":{"type":["integer","null"]}}}`)
	return b.String()
}

func manyStrings(n int) string {
	var b strings.Builder
	for i := range n {
		b.WriteString(`"` + strings.Repeat("p", i+1) + `":{"type":"string","maxLength":` + "29" + string(rune('0'+i/10)) + string(rune('0'+i%10)) + `},`)
	}
	return b.String()
}

func TestRefused(t *testing.T) {
	for _, tt := range refused {
		t.Run(tt.name, func(t *testing.T) {
			text, err := FromSchema([]byte(tt.schema), Options{})
			var unsupported *UnsupportedError
			if !errors.As(err, &unsupported) {
				t.Fatalf("got error %v and\n%s", err, text)
			}
			if unsupported.Keyword != tt.keyword || unsupported.Path != tt.path || unsupported.Reason == "" {
				t.Errorf("got %+v", unsupported)
			}
			var dropped []*UnsupportedError
			text, err = FromSchema([]byte(tt.schema), Options{Lenient: true, Dropped: func(e *UnsupportedError) { dropped = append(dropped, e) }})
			if err != nil || len(dropped) == 0 {
				t.Fatalf("lenient: got error %v, dropped %v", err, dropped)
			}
			if *dropped[0] != *unsupported {
				t.Errorf("dropped %v, refused %v", dropped[0], unsupported)
			}
			readGBNF(t, text)
		})
	}
}

func TestNoSchema(t *testing.T) {
	for _, tt := range []struct{ name, schema, want string }{
		{"no JSON", `{`, "EOF"},
		{"two values", `{} {}`, "more than one"},
		{"too deep", strings.Repeat(`{"items":`, 200) + `{}` + strings.Repeat(`}`, 200), "levels"},
		{"too many", `{"enum":[` + strings.Repeat("1,", maxNodes) + `1]}`, "values"},
		{"too large", `"` + strings.Repeat("a", maxSchema) + `"`, "bytes"},
	} {
		for _, lenient := range []bool{false, true} {
			_, err := FromSchema([]byte(tt.schema), Options{Lenient: lenient})
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("%s: got %v", tt.name, err)
			}
		}
	}
	if _, err := FromSchema(nil, Options{Root: "a b"}); err == nil {
		t.Error("a rule name with a space is taken")
	}
}

func TestRoot(t *testing.T) {
	text, err := FromSchema([]byte(`{"type":"array","items":{"type":"string"}}`), Options{Root: "tool1"})
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(text) {
		if !strings.HasPrefix(line, "tool1 ") && !strings.HasPrefix(line, "tool1-") {
			t.Errorf("rule %q", line)
		}
	}
}

// TestLenientKeepsTheRest drops what cannot be enforced and nothing else.
func TestLenientKeepsTheRest(t *testing.T) {
	text, err := FromSchema([]byte(`{"type":"object","properties":{"path":{"type":"string","format":"uri"},"n":{"type":"integer","multipleOf":5,"minimum":5,"maximum":9}},
		"required":["path","n"],"additionalProperties":false,"not":{}}`), Options{Lenient: true})
	if err != nil {
		t.Fatal(err)
	}
	g := readGBNF(t, text)
	if !g.accepts(`{"path":"x","n":7}`) || g.accepts(`{"path":"x","n":10}`) || g.accepts(`{"path":"x"}`) {
		t.Errorf("the rest of the schema is not enforced:\n%s", text)
	}
}

func TestAnyJSON(t *testing.T) {
	g := readGBNF(t, AnyJSON())
	for text, want := range map[string]bool{`{}`: true, `{"a":{"b":[1,"x",null]}}`: true, `[]`: false, `1`: false, `{"a"}`: false} {
		if g.accepts(text) != want {
			t.Errorf("accepts(%s) = %v", text, !want)
		}
	}
}

// A schema that is wide and has many alternatives multiplies the work of both.
func TestWorkIsBounded(t *testing.T) {
	list := func(n int, item string) string {
		var all []string
		for i := range n {
			all = append(all, strings.ReplaceAll(item, "N", strconv.Itoa(i)))
		}
		return "[" + strings.Join(all, ",") + "]"
	}
	wide := `"allOf":` + list(9_000, `{"minLength":1}`)
	for name, schema := range map[string]string{
		"lists met":         `{"allOf":[{"enum":` + list(20_000, "N") + `},{"enum":` + list(20_000, "N") + `}]}`,
		"beside a list":     `{"enum":` + list(9_000, "N") + `,` + wide + `}`,
		"alternatives":      `{"anyOf":` + list(3_900, `{"const":N}`) + `,` + wide + `}`,
		"told apart":        `{"oneOf":` + list(12_000, `{"const":N}`) + `}`,
		"many properties":   `{"properties":{` + strings.Trim(list(3_900, `"aN":{"type":"null"}`), "[]") + `},` + wide + `}`,
		"required and wide": `{"oneOf":` + list(3_900, `{"type":"object","required":["aN"]}`) + `,` + wide + `}`,
	} {
		start := time.Now()
		_, err := FromSchema([]byte(schema), Options{})
		var whole *UnsupportedError
		if err != nil && !errors.As(err, &whole) {
			t.Errorf("%s: %v", name, err)
		}
		if took := time.Since(start); took > 30*time.Second {
			t.Errorf("%s: took %v", name, took)
		} else {
			t.Logf("%s: %v, %.90v", name, took, err)
		}
	}
}
