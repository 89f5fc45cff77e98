package toolcall

import (
	"encoding/json"
	"slices"
	"strings"
)

// schema is what of a tool's JSON schema tells the type of a value that comes
// without one.
type schema struct {
	root  map[string]any
	value map[string]any
}

// readSchema never fails: what cannot be read constrains nothing.
func readSchema(raw json.RawMessage) *schema {
	s := &schema{}
	if len(raw) > 0 && json.Unmarshal(raw, &s.root) == nil {
		s.value = s.root
	}
	return s
}

// resolve follows references within the schema, a few at most.
func (s *schema) resolve() map[string]any {
	v := s.value
	for range 8 {
		ref, ok := v["$ref"].(string)
		if !ok {
			break
		}
		var at any = s.root
		for tok := range strings.SplitSeq(strings.TrimPrefix(ref, "#/"), "/") {
			m, _ := at.(map[string]any)
			at = m[tok]
		}
		v, _ = at.(map[string]any)
	}
	return v
}

func (s *schema) sub(v any) *schema {
	m, _ := v.(map[string]any)
	return &schema{root: s.root, value: m}
}

// property is the schema of a property; one that says nothing when there is none.
func (s *schema) property(name string) *schema {
	v := s.resolve()
	if props, _ := v["properties"].(map[string]any); props[name] != nil {
		return s.sub(props[name])
	}
	for _, key := range []string{"anyOf", "oneOf", "allOf"} {
		list, _ := v[key].([]any)
		for _, item := range list {
			inner, _ := s.sub(item).resolve()["properties"].(map[string]any)
			if inner[name] != nil {
				return s.sub(inner[name])
			}
		}
	}
	return s.sub(v["additionalProperties"])
}

// has says whether a property is declared.
func (s *schema) has(name string) bool {
	props, _ := s.resolve()["properties"].(map[string]any)
	_, ok := props[name]
	return ok
}

func (s *schema) items() *schema { return s.sub(s.resolve()["items"]) }

// types lists the types that a value may have; none when anything may come.
func (s *schema) types() []string { return s.typesTo(4) }

func (s *schema) typesTo(depth int) []string {
	v := s.resolve()
	var out []string
	switch t := v["type"].(type) {
	case string:
		out = append(out, t)
	case []any:
		for _, item := range t {
			if name, ok := item.(string); ok {
				out = append(out, name)
			}
		}
	}
	if len(out) > 0 || depth == 0 {
		return out
	}
	if list, ok := v["enum"].([]any); ok {
		for _, item := range list {
			out = append(out, typeOf(item))
		}
	}
	if c, ok := v["const"]; ok {
		out = append(out, typeOf(c))
	}
	for _, key := range []string{"anyOf", "oneOf", "allOf"} {
		list, _ := v[key].([]any)
		for _, item := range list {
			out = append(out, s.sub(item).typesTo(depth-1)...)
		}
	}
	if _, ok := v["properties"]; ok && len(out) == 0 {
		out = append(out, "object")
	}
	return out
}

func typeOf(v any) string {
	switch v.(type) {
	case string:
		return "string"
	case bool:
		return "boolean"
	case float64:
		return "number"
	case []any:
		return "array"
	case map[string]any:
		return "object"
	}
	return "null"
}

// coerce writes a value that came as bare text as JSON of a type that the schema
// allows. What fits none of the types is a string: the client will say so.
func (s *schema) coerce(text string) string {
	types := s.types()
	trimmed := strings.Trim(text, space)
	if len(types) == 0 { // nothing is known: what reads as JSON is JSON
		if json.Valid([]byte(trimmed)) {
			return trimmed
		}
		if v, ok := pythonWord(trimmed); ok {
			return v
		}
		return quote(text)
	}
	want := func(t string) bool { return slices.Contains(types, t) }
	if v, ok := pythonWord(trimmed); ok && (v == "null" && want("null") || v != "null" && want("boolean")) {
		return v
	}
	if (want("integer") || want("number")) && isNumber(trimmed) {
		return trimmed
	}
	if v, ok := container(trimmed); ok && (v[0] == '{' && want("object") || v[0] == '[' && want("array")) {
		return v
	}
	return quote(text)
}

// pythonWord reads true, false and null as JSON and as Python write them.
func pythonWord(s string) (string, bool) {
	switch s {
	case "true", "True":
		return "true", true
	case "false", "False":
		return "false", true
	case "null", "None":
		return "null", true
	}
	return "", false
}

func isNumber(s string) bool {
	return s != "" && (s[0] == '-' || s[0] >= '0' && s[0] <= '9') && json.Valid([]byte(s))
}

// container reads an object or a list, in JSON or as Python writes them.
func container(s string) (string, bool) {
	if s == "" || s[0] != '{' && s[0] != '[' {
		return "", false
	}
	if json.Valid([]byte(s)) {
		return s, true
	}
	r := &literal{b: []byte(s), end: true}
	v, m := r.value(0)
	r.blank()
	return v, m == yes && r.i == len(r.b)
}

// quote writes a JSON string without needless escapes.
func quote(s string) string {
	var b strings.Builder
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	_ = enc.Encode(s) // a string always encodes
	return strings.TrimSuffix(b.String(), "\n")
}
