package grammar

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"strings"
	"testing"
)

var rewrite = flag.Bool("rewrite", false, "rewrite testdata")

const schemasFile = "testdata/schemas.jsonl"

// drawer makes random schemas of every construct, and a few that are refused.
type drawer struct {
	rnd  *rand.Rand
	defs int
}

func (d *drawer) pick(list ...string) string { return list[d.rnd.IntN(len(list))] }

func (d *drawer) schema() string {
	d.defs = d.rnd.IntN(3)
	body := d.object(2)
	if d.defs == 0 {
		return body
	}
	var defs []string
	for i := range d.defs {
		// Recursion: a definition may hold itself and others, where it may end.
		inner := fmt.Sprintf(`{"$ref":"#/$defs/d%d"}`, d.rnd.IntN(d.defs))
		def := d.pick(
			`{"type":"object","properties":{"v":`+d.scalar()+`,"next":{"anyOf":[{"type":"null"},`+inner+`]}},"required":["v","next"],"additionalProperties":false}`,
			`{"type":"array","items":`+inner+`,"maxItems":2}`,
			`{"anyOf":[`+d.scalar()+`,{"type":"array","items":`+inner+`,"maxItems":2}]}`)
		defs = append(defs, fmt.Sprintf(`"d%d":%s`, i, def))
	}
	return strings.TrimSuffix(body, "}") + `,"$defs":{` + strings.Join(defs, ",") + `}}`
}

func (d *drawer) any(depth int) string {
	switch n := d.rnd.IntN(10); {
	case depth == 0 || n < 4:
		return d.scalar()
	case n < 6:
		return d.object(depth - 1)
	case n < 8:
		return d.array(depth - 1)
	case n < 9 && d.defs > 0:
		return fmt.Sprintf(`{"$ref":"#/$defs/d%d"}`, d.rnd.IntN(d.defs))
	}
	return d.choice(depth - 1)
}

func (d *drawer) choice(depth int) string {
	return d.pick(
		`{"anyOf":[`+d.any(depth)+`,`+d.any(depth)+`]}`,
		`{"oneOf":[{"type":"null"},`+d.object(depth)+`]}`,
		`{"oneOf":[{"type":"object","properties":{"kind":{"const":"a"}},"required":["kind"],"additionalProperties":false},`+
			`{"type":"object","properties":{"kind":{"const":"b"},"x":`+d.any(depth)+`},"required":["kind","x"],"additionalProperties":false}]}`,
		`{"allOf":[{"type":"object","properties":{"p":`+d.scalar()+`},"required":["p"]},{"properties":{"q":`+d.any(depth)+`}}]}`)
}

func (d *drawer) object(depth int) string {
	var props, required []string
	for _, name := range []string{"id", "name", "tags", "größe", "a b"}[:1+d.rnd.IntN(4)] {
		props = append(props, fmt.Sprintf("%q:%s", name, d.any(depth)))
		if d.rnd.IntN(3) > 0 {
			required = append(required, fmt.Sprintf("%q", name))
		}
	}
	more := d.pick(`,"additionalProperties":false`, `,"additionalProperties":false`, ``, `,"additionalProperties":`+d.scalar())
	return `{"type":"object","properties":{` + strings.Join(props, ",") + `},"required":[` + strings.Join(required, ",") + `]` + more + `}`
}

func (d *drawer) array(depth int) string {
	low := d.rnd.IntN(3)
	return d.pick(
		fmt.Sprintf(`{"type":"array","items":%s,"minItems":%d,"maxItems":%d}`, d.any(depth), low, low+d.rnd.IntN(3)),
		fmt.Sprintf(`{"type":"array","prefixItems":[%s,%s],"items":false,"minItems":2}`, d.any(depth), d.scalar()),
		fmt.Sprintf(`{"type":"array","items":%s,"maxItems":3}`, d.any(depth)))
}

func (d *drawer) scalar() string {
	if d.rnd.IntN(150) == 0 {
		return d.pick(`{"type":"array","uniqueItems":true}`, `{"type":"integer","multipleOf":7}`, `{"type":"string","pattern":"^(?!a)"}`, `{"not":{}}`)
	}
	low := d.rnd.IntN(2000) - 1000
	return d.pick(
		`{"type":"boolean"}`, `{"type":"null"}`, `{"type":"integer"}`, `{"type":"number"}`,
		`{"enum":["red","green","reddish",3,null]}`, `{"const":"k\n\"é"}`, `{"type":["string","null"],"maxLength":5}`,
		fmt.Sprintf(`{"type":"integer","minimum":%d,"maximum":%d}`, low, low+d.rnd.IntN(3000)),
		fmt.Sprintf(`{"type":"number","minimum":%d.%d,"exclusiveMaximum":%d.5}`, low, d.rnd.IntN(100), low+1+d.rnd.IntN(300)),
		fmt.Sprintf(`{"type":"string","minLength":%d,"maxLength":%d}`, d.rnd.IntN(4), 4+d.rnd.IntN(8)),
		`{"type":"string","pattern":"^[A-Z]{2,4}-\\d+(\\.[a-f]{1,3})?$"}`, `{"type":"string","pattern":"^(yes|no|maybe so)$"}`,
		`{"type":"string","format":"date"}`, `{"type":"string","format":"date-time"}`, `{"type":"string","format":"uuid"}`)
}

// drawSchemas makes the schemas that this test and the end-to-end test of
// package node run.
func drawSchemas() []byte {
	d := &drawer{rnd: rand.New(rand.NewPCG(5, 25))}
	var b bytes.Buffer
	for range 200 {
		b.WriteString(d.schema() + "\n")
	}
	return b.Bytes()
}

func TestRandomSchemas(t *testing.T) {
	want := drawSchemas()
	if *rewrite {
		if err := os.WriteFile(schemasFile, want, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got, err := os.ReadFile(schemasFile)
	if err != nil || !bytes.Equal(got, want) {
		t.Fatalf("%s is not what the test draws (error %v): run it with -rewrite", schemasFile, err)
	}
	refused := 0
	for line := range strings.Lines(string(got)) {
		text, err := FromSchema([]byte(line), Options{})
		var unsupported *UnsupportedError
		if errors.As(err, &unsupported) && unsupported.Keyword != "" {
			refused++
			continue
		}
		if err != nil {
			t.Fatalf("%s: %v", line, err)
		}
		sound(t, line, text, 30)
	}
	if refused == 0 || refused > 60 {
		t.Errorf("%d of 200 schemas refused", refused)
	}
	t.Logf("%d of 200 schemas refused", refused)
}

func FuzzFromSchema(f *testing.F) {
	for _, tt := range supported {
		f.Add(tt.schema)
	}
	for _, tt := range refused {
		if len(tt.schema) < 1000 {
			f.Add(tt.schema)
		}
	}
	f.Fuzz(func(t *testing.T, schema string) {
		strict, err := FromSchema([]byte(schema), Options{})
		if err == nil {
			readGBNF(t, strict)
		}
		text, err := FromSchema([]byte(schema), Options{Lenient: true})
		if err != nil {
			if json.Valid([]byte(schema)) && len(schema) < 100 {
				t.Fatalf("lenient refuses %s: %v", schema, err)
			}
			return
		}
		readGBNF(t, text)
		if strict != "" && strict != text {
			t.Fatalf("lenient differs for %s", schema)
		}
	})
}
