package jinja

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"strings"
	"testing"
	"time"
)

var testTime = time.Date(2026, 3, 4, 5, 6, 7, 0, time.UTC)

func render(t testing.TB, source string, vars map[string]any) (string, error) {
	t.Helper()
	tmpl, err := Parse(source)
	if err != nil {
		return "", err
	}
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	return tmpl.Render(ctx, testTime, vars)
}

// decodeVars reads a JSON object of variables, order kept.
func decodeVars(t testing.TB, raw []byte) map[string]any {
	t.Helper()
	v, err := DecodeJSON(raw)
	if err != nil {
		t.Fatal(err)
	}
	vars := map[string]any{}
	for _, k := range v.(*Dict).Keys() {
		vars[k], _ = v.(*Dict).Get(k)
	}
	return vars
}

// TestGolden compares with what Jinja2 itself renders, byte for byte; see
// testdata/golden.py.
func TestGolden(t *testing.T) {
	data, err := os.ReadFile("testdata/golden.json")
	if err != nil {
		t.Fatal(err)
	}
	var cases []struct {
		Template     string
		Vars         json.RawMessage
		Want, Raised string
		Refused      bool
	}
	if err := json.Unmarshal(data, &cases); err != nil {
		t.Fatal(err)
	}
	if len(cases) < 60 {
		t.Fatalf("%d golden cases, want at least 60", len(cases))
	}
	for _, c := range cases {
		source := c.Template
		if strings.HasSuffix(source, ".jinja") {
			text, err := os.ReadFile("testdata/" + c.Template)
			if err != nil {
				t.Fatal(err)
			}
			source = string(text)
		}
		got, err := render(t, source, decodeVars(t, c.Vars))
		var raised *RaisedError
		switch {
		case c.Raised != "":
			if !errors.As(err, &raised) || raised.Message != c.Raised {
				t.Errorf("%s\nraised %v, want %q", c.Template, err, c.Raised)
			}
		case c.Refused:
			if err == nil || errors.As(err, &raised) {
				t.Errorf("%s\ngot %q, %v; Jinja2 refuses it", c.Template, got, err)
			}
		case err != nil || got != c.Want:
			t.Errorf("%s\n got %q, %v\nwant %q", c.Template, got, err, c.Want)
		}
	}
}

// TestHostile runs templates that a careless engine would not survive.
func TestHostile(t *testing.T) {
	doubling := strings.Repeat("{% set x = x ~ x %}", 64)
	tests := []struct{ name, source string }{
		{"endless recursion", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"},
		{"mutual recursion", "{% macro f(g) %}{{ g(f) }}{% endmacro %}{% macro g(f) %}{{ f(g) }}{% endmacro %}{{ f(g) }}"},
		{"nested loops", strings.Repeat("{% for i in range(100000) %}", 4) + strings.Repeat("{% endfor %}", 4)},
		{"huge range", "{{ range(9000000000000000) | length }}"},
		{"huge repeat", "{{ 'ab' * 4611686018427387904 }}"},
		{"huge list repeat", "{{ [1, 2] * 4611686018427387904 }}"},
		{"huge repeat of nothing in a huge list", "{{ ([1] * 30000000) | join('aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa') }}"},
		{"doubling text", "{% set x = 'xxxxxxxx' %}" + doubling},
		{"doubling lists", "{% set x = [1] %}" + strings.ReplaceAll(doubling, "~", "+")},
		{"squaring replace", "{% set x = 'a' * 100000 %}{{ x.replace('a', x) }}"},
		{"shared nesting printed", "{% set x = [1] %}" + strings.Repeat("{% set x = [x, x] %}", 64) + "{{ x }}"},
		{"shared nesting as JSON", "{% set x = [1] %}" + strings.Repeat("{% set x = [x, x] %}", 64) + "{{ x | tojson }}"},
		{"shared nesting compared", "{% set x = [1] %}{% set y = [1] %}" + strings.Repeat("{% set x = [x, x] %}{% set y = [y, y] %}", 64) + "{{ x == y }}"},
		{"deep value", "{% set ns = namespace(x=[]) %}{% for i in range(100000) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x }}"},
		{"wide indent", "{{ 'a\nb' | indent(900000000000) }}"},
		{"wide JSON indent", "{{ [1] | tojson(indent=900000000000) }}"},
		{"output", "{% set x = 'a' * 1000000 %}{% for i in range(1000) %}{{ x }}{% endfor %}"},
		{"deep brackets", "{{ " + strings.Repeat("(", 10000) + "1" + strings.Repeat(")", 10000) + " }}"},
		{"deep not", "{{ " + strings.Repeat("not ", 50000) + "1 }}"},
		{"deep minus", "{{ " + strings.Repeat("- ", 50000) + "1 }}"},
		{"deep if", strings.Repeat("{% if true %}", 10000) + strings.Repeat("{% endif %}", 10000)},
		{"long sum", "{{ 1" + strings.Repeat("+1", 50000) + " }}"},
		{"long source", strings.Repeat("a", MaxSource+1)},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, err := render(t, tt.source, nil)
			if !errors.Is(err, ErrLimit) {
				t.Errorf("got %d bytes, %v; want ErrLimit", len(got), err)
			}
		})
	}
}

func TestNamespaceHoldsItself(t *testing.T) {
	got, err := render(t, "{% set ns = namespace() %}{% set ns.me = [ns] %}{{ ns.me == ns.me }} {{ ns.me }}", nil)
	if want := "True [<a namespace>]"; err != nil || got != want {
		t.Errorf("got %q, %v; want %q", got, err, want)
	}
}

func TestDeadline(t *testing.T) {
	tmpl, err := Parse("{% for i in range(100000) %}{{ i }}{% endfor %}")
	if err != nil {
		t.Fatal(err)
	}
	cause := errors.New("render took too long")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(cause)
	if _, err := tmpl.Render(ctx, testTime, nil); !errors.Is(err, cause) {
		t.Errorf("error %v, want the context's cause", err)
	}
}

func TestParseRefuses(t *testing.T) {
	tests := []struct{ source, want string }{
		{"a\n{{ 1", `line 2: {{ is not closed`},
		{"{% if 1 %}", `expected ["elif" "else" "endif"]`},
		{"{# open", "comment is not closed"},
		{"{{ 'open }}", "string is not closed"},
		{"{{ 1 | nosuch }}", `unknown filter "nosuch"`},
		{"{{ 1 is nosuch }}", `unknown test "nosuch"`},
		{"{% include 'x' %}", `statement "include" is not supported`},
		{"{% import 'x' as y %}", `statement "import" is not supported`},
		{"{% extends 'x' %}", `statement "extends" is not supported`},
		{"{% endif %}", `statement "endif" is not supported`},
		{"{% break %}", "break outside a loop"},
		{"{{ a ? b }}", `unexpected character '?'`},
		{"{{ 99999999999999999999 }}", "does not fit 64 bits"},
		{"{{ }}", "expected a value"},
		{"{{ a[] }}", "empty subscript"},
		{"{{ (1 }}", `is not closed`},
	}
	for _, tt := range tests {
		if _, err := Parse(tt.source); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("Parse(%q) = %v, want %q", tt.source, err, tt.want)
		}
	}
}

func TestDecodeJSONRefuses(t *testing.T) {
	tests := []struct{ data, want string }{
		{"", "unexpected EOF"},
		{`{"a":1`, "EOF"},
		{`{"a":1} x`, "after"},
		{`1 2`, "text after its end"},
		{`{"a":1,"a":2}`, `key "a" twice`},
		{"\"\xff\"", "not valid UTF-8"},
		{strings.Repeat("[", 65) + strings.Repeat("]", 65), "deeper than 64"},
		{"1e999", "out of range"},
		{`{1:2}`, "invalid character"},
		{`[1,]`, "invalid character"},
	}
	for _, tt := range tests {
		if v, err := DecodeJSON([]byte(tt.data)); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("DecodeJSON(%.20q) = %v, %v; want %q", tt.data, v, err, tt.want)
		}
	}
}

// FuzzRender looks for templates and values that crash or hang the engine.
func FuzzRender(f *testing.F) {
	lines, err := os.ReadFile("testdata/expressions.txt")
	if err != nil {
		f.Fatal(err)
	}
	for line := range strings.Lines(string(lines)) {
		f.Add(line, `{"d":{"k":1},"messages":[{"role":"user","content":"x"}]}`)
	}
	f.Fuzz(func(t *testing.T, source, vars string) {
		v, err := DecodeJSON([]byte(vars))
		if err != nil {
			return
		}
		d, ok := v.(*Dict)
		if !ok {
			return
		}
		values := map[string]any{}
		for _, k := range d.Keys() {
			values[k], _ = d.Get(k)
		}
		tmpl, err := Parse(source)
		if err != nil {
			return
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if text, err := tmpl.Render(ctx, testTime, values); err == nil && len(text) > MaxOutput {
			t.Errorf("%d bytes of output", len(text))
		}
	})
}
