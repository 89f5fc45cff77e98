package toolcall

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
)

// RuleFunc writes the GBNF rule named root, and those under it, all of whose
// names begin with root, for JSON texts that a schema allows (nil: any value).
type RuleFunc func(root string, schema []byte) (string, error)

// ErrNoGrammar is returned for a family whose calls GBNF cannot hold to a schema
// here: None, Gemma4 and MiniMaxM3.
var ErrNoGrammar = errors.New("the calls of this family of models cannot be forced by a grammar")

// maxForced bounds what one grammar is made of.
const (
	maxForcedTools  = 512
	maxForcedParams = 256
)

// Grammar writes GBNF, start rule "root", for one call, or with parallel one or
// more, of the tools, after reasoning where the family reasons. For a named
// choice pass that tool alone. The rules of arguments come from rule, and so do
// its errors.
func Grammar(f Family, tools []Tool, parallel bool, opt Options, rule RuleFunc) (string, error) {
	form, ok := forms[f]
	if !ok {
		return "", ErrNoGrammar
	}
	if len(tools) == 0 || len(tools) > maxForcedTools {
		return "", fmt.Errorf("%d tools to force a call of", len(tools))
	}
	w := &writer{form: form, rule: rule}
	calls := make([]string, len(tools))
	for i, t := range tools {
		name := fmt.Sprintf("call%d", i)
		body, err := w.call(name, t)
		if err != nil {
			return "", err
		}
		calls[i] = name
		fmt.Fprintf(&w.b, "%s ::= %s\n", name, body)
	}
	one := "(" + strings.Join(calls, " | ") + ")"
	all := one
	if parallel && form.between != "" {
		all = one + " (" + literals(form.between) + " " + one + ")*"
	}
	fmt.Fprintf(&w.b, "calls ::= %s%s%s\n", literals(form.before), all, literals(form.after))
	return thinking(f, opt, form.channel, "calls") + w.b.String(), nil
}

// AnswerGrammar writes a rule "root": reasoning where the family reasons, then
// the rule named answer, which the caller adds.
func AnswerGrammar(f Family, opt Options, answer string) string {
	return thinking(f, opt, "<|channel|>final<|message|>", answer)
}

// thinking writes the root: what may, or inside a block must, come before then.
func thinking(f Family, opt Options, channel, then string) string {
	s := syntaxOf(f)
	if f == GPTOSS {
		return "root ::= (" + literals("<|channel|>analysis<|message|>") + " thought0 " + literals("<|start|>assistant") + ")? " +
			literals(channel) + " " + then + literals("<|call|>", "<|return|>") + "\n" + until("thought", "<|end|>")
	}
	gap := `[ \n]{0,4} `
	if opt.InReasoning {
		return "root ::= thought0 " + gap + then + "\n" + until("thought", s.endThink)
	}
	if opt.NoReasoning {
		return "root ::= " + then + "\n"
	}
	return "root ::= (" + literals(s.think) + " thought0 " + gap + ")? " + then + "\n" + until("thought", s.endThink)
}

// form is how a grammar writes the calls of a family. NAME stands for the name,
// ARGS for the arguments as JSON or as params, "\x00" between calls for nothing.
type form struct {
	before, after string // around all calls
	between       string // of two calls; "": one call alone
	call          string
	param         func(key string, text bool) (before, end string) // nil: JSON
	channel       string                                           // of gpt-oss
}

var forms = map[Family]*form{
	Hermes:     {between: "\n", call: `<tool_call>` + "\n" + `{"name": "NAME", "arguments": ARGS}` + "\n</tool_call>"},
	Qwen3Coder: {between: "\n", call: "<tool_call>\n<function=NAME>\nARGS</function>\n</tool_call>", param: qwenParam},
	Llama3:     {between: "; ", call: `{"name": "NAME", "parameters": ARGS}`},
	Llama4:     {between: "; ", call: `{"name": "NAME", "parameters": ARGS}`},
	Mistral:    {before: "[TOOL_CALLS][", between: ", ", call: `{"name": "NAME", "arguments": ARGS}`, after: "]"},
	MistralArg: {between: "\x00", call: "[TOOL_CALLS]NAME[ARGS]ARGS"},
	DeepSeekV3: {before: deepCalls, between: "\n", call: deepCall + "function" + deepSep + "NAME\n```json\nARGS\n```" + deepCallEnd, after: deepCallsEnd},
	DeepSeek31: {before: deepCalls, between: "\x00", call: deepCall + "NAME" + deepSep + "ARGS" + deepCallEnd, after: deepCallsEnd},
	DeepSeek32: {before: "<" + dsml + "function_calls>\n", between: "\x00", call: dsmlForm, param: dsmlParam, after: "</" + dsml + "function_calls>"},
	DeepSeekV4: {before: "<" + dsml + "tool_calls>\n", between: "\x00", call: dsmlForm, param: dsmlParam, after: "</" + dsml + "tool_calls>"},
	GPTOSS:     {channel: "<|channel|>commentary", call: " to=functions.NAME <|constrain|>json<|message|>ARGS"},
	GLM4:       {between: "\n", call: "<tool_call>NAME\nARGS</tool_call>", param: glmParam},
	KimiK2: {before: "<|tool_calls_section_begin|>", between: "\x00",
		call: kimiCall + "functions.NAME:" + anyIndex + kimiArgs + "ARGS" + kimiCallEnd, after: "<|tool_calls_section_end|>"},
	MiniMaxM2: {before: "<minimax:tool_call>\n", between: "\x00", call: `<invoke name="NAME">` + "\nARGS</invoke>\n", param: minimaxParam, after: "</minimax:tool_call>"},
}

// anyIndex stands for a number.
const anyIndex = "\x01"

const dsmlForm = "<" + dsml + `invoke name="NAME">` + "\nARGS</" + dsml + "invoke>\n"

func qwenParam(key string, _ bool) (string, string) {
	return "<parameter=" + key + ">\n", "\n</parameter>\n"
}

func glmParam(key string, _ bool) (string, string) {
	return "<arg_key>" + key + "</arg_key>\n<arg_value>", "</arg_value>\n"
}

func minimaxParam(key string, _ bool) (string, string) {
	return `<parameter name="` + key + `">`, "</parameter>\n"
}

func dsmlParam(key string, text bool) (string, string) {
	return "<" + dsml + fmt.Sprintf(`parameter name="%s" string="%t">`, key, text), "</" + dsml + "parameter>\n"
}

// literals writes texts of which each may come or, when there is one, must; an
// empty one and the separator that is none write nothing.
func literals(texts ...string) string {
	if len(texts) == 1 {
		if texts[0] == "" || texts[0] == "\x00" {
			return ""
		}
		return " " + strings.ReplaceAll(gbnfText(texts[0]), `\x01`, `" [0-9]{1,4} "`) + " "
	}
	var parts []string
	for _, t := range texts {
		parts = append(parts, gbnfText(t))
	}
	return " (" + strings.Join(parts, " | ") + ")?"
}

// writer collects the rules of calls.
type writer struct {
	*form
	rule  RuleFunc
	b     strings.Builder
	ended bool // the rules of a value's end are there
}

// call is the body of one tool's rule.
func (w *writer) call(name string, t Tool) (string, error) {
	before, after, _ := strings.Cut(w.form.call, "ARGS")
	if w.form.call != "[TOOL_CALLS]NAME[ARGS]ARGS" {
		before = strings.ReplaceAll(before, "NAME", t.Name)
	} else { // the marker is spelled as the place for the arguments
		before, after = "[TOOL_CALLS]"+t.Name+"[ARGS]", ""
	}
	args := name + "args"
	if w.param == nil {
		schema := []byte(t.Parameters)
		if len(bytes.TrimSpace(schema)) == 0 {
			schema = []byte(`{"type":"object"}`)
		}
		text, err := w.rule(args, schema)
		if err != nil {
			return "", fmt.Errorf("tool %s: %w", t.Name, err)
		}
		w.b.WriteString(text)
	} else if err := w.params(args, t); err != nil {
		return "", fmt.Errorf("tool %s: %w", t.Name, err)
	}
	return literals(before) + args + literals(after), nil
}

// params writes the parameters in the order of the schema.
func (w *writer) params(args string, t Tool) error {
	list, err := properties(t.Parameters)
	if err != nil {
		return err
	}
	body := ""
	for i, p := range list {
		name := fmt.Sprintf("%sp%d", args, i)
		one, err := w.value(name, p, readSchema(t.Parameters).property(p.name))
		if err != nil {
			return err
		}
		if p.required {
			body += " " + one
		} else {
			body += " (" + one + ")?"
		}
	}
	if body == "" {
		body = ` ""`
	}
	fmt.Fprintf(&w.b, "%s ::=%s\n", args, body)
	return nil
}

// value writes one parameter: free text where a string is wanted, else JSON.
func (w *writer) value(name string, p property, s *schema) (string, error) {
	types := s.types()
	text := len(types) == 0 || slices.Contains(types, "string")
	before, end := w.param(p.name, text)
	if words := s.words(); text && len(words) > 0 {
		for i := range words {
			words[i] = gbnfText(words[i])
		}
		return literals(before) + "(" + strings.Join(words, " | ") + ")" + literals(end), nil
	}
	if text {
		stop := strings.TrimSuffix(end, "\n")
		if !w.ended {
			w.ended = true
			w.b.WriteString(until("value", stop))
		}
		return literals(before) + "value0" + literals(strings.TrimPrefix(end, stop)), nil
	}
	rule, err := w.rule(name, p.schema)
	if err != nil {
		return "", err
	}
	w.b.WriteString(rule)
	return literals(before) + name + literals(end), nil
}

// words are the strings of an enum, when it has nothing else.
func (s *schema) words() []string {
	var words []string
	list, _ := s.resolve()["enum"].([]any)
	if c, ok := s.resolve()["const"]; ok {
		list = []any{c}
	}
	for _, v := range list {
		w, ok := v.(string)
		if !ok {
			return nil
		}
		words = append(words, w)
	}
	return words
}

type property struct {
	name     string
	required bool
	schema   []byte // with the definitions of the whole
}

// properties lists the properties of an object's schema in its order.
func properties(raw []byte) ([]property, error) {
	if len(bytes.TrimSpace(raw)) == 0 {
		return nil, nil
	}
	var top map[string]json.RawMessage
	if err := json.Unmarshal(raw, &top); err != nil {
		return nil, fmt.Errorf("parameters: %w", err)
	}
	var required []string
	_ = json.Unmarshal(top["required"], &required) // absent or wrong: none is
	var byName map[string]json.RawMessage
	if len(top["properties"]) == 0 || json.Unmarshal(top["properties"], &byName) != nil {
		return nil, nil
	}
	if len(byName) > maxForcedParams {
		return nil, fmt.Errorf("%d parameters, more than %d", len(byName), maxForcedParams)
	}
	var out []property
	dec := json.NewDecoder(bytes.NewReader(top["properties"]))
	_, _ = dec.Token() // the brace; it was read once already
	for dec.More() {
		tok, err := dec.Token()
		var skip json.RawMessage
		if err != nil || dec.Decode(&skip) != nil {
			return nil, errors.New("parameters: properties cannot be read")
		}
		name, _ := tok.(string)
		if slices.ContainsFunc(out, func(p property) bool { return p.name == name }) {
			continue
		}
		schema := `{"allOf":[` + string(byName[name]) + `]`
		for _, key := range []string{"$defs", "definitions"} {
			if top[key] != nil {
				schema += `,"` + key + `":` + string(top[key])
			}
		}
		out = append(out, property{name, slices.Contains(required, name), []byte(schema + "}")})
	}
	return out, nil
}

// until writes the rules name0… for any text up to and with stop, by its prefix
// automaton: rule k is where k characters of stop have come. A comment has stop in
// one piece: the engine lets control tokens through whose text the grammar has.
func until(name, stop string) string {
	runes := []rune(stop)
	var letters []rune
	for _, r := range runes {
		if !slices.Contains(letters, r) {
			letters = append(letters, r)
		}
	}
	var class strings.Builder
	for _, r := range letters {
		class.WriteString(escapeRune(r))
	}
	var b strings.Builder
	fmt.Fprintf(&b, "# %s0 ends with %s\n", name, gbnfText(stop))
	for k := range runes {
		fmt.Fprintf(&b, "%s%d ::= ", name, k)
		for _, r := range letters {
			next := advance(runes, k, r)
			switch {
			case next == len(runes):
				fmt.Fprintf(&b, "\"%s\" | ", escapeRune(r))
			case next > 0:
				fmt.Fprintf(&b, "\"%s\" %s%d | ", escapeRune(r), name, next)
			}
		}
		var back strings.Builder // letters of stop that lead back to the start
		for _, r := range letters {
			if advance(runes, k, r) == 0 {
				back.WriteString(escapeRune(r))
			}
		}
		if back.Len() > 0 {
			fmt.Fprintf(&b, "[%s] %s0 | ", back.String(), name)
		}
		fmt.Fprintf(&b, "[^%s] %s0\n", class.String(), name)
	}
	return b.String()
}

// advance is how much of stop has come when r follows its first k characters.
func advance(stop []rune, k int, r rune) int {
	come := append(slices.Clone(stop[:k]), r)
	for n := min(len(come), len(stop)); n > 0; n-- {
		if slices.Equal(come[len(come)-n:], stop[:n]) {
			return n
		}
	}
	return 0
}

// gbnfText writes a text as GBNF.
func gbnfText(s string) string {
	var b strings.Builder
	for _, r := range s {
		b.WriteString(escapeRune(r))
	}
	return `"` + b.String() + `"`
}

func escapeRune(r rune) string {
	switch {
	case strings.ContainsRune(`\[]-"`, r):
		return `\` + string(r)
	case r < 0x20 || r == '^':
		return fmt.Sprintf(`\x%02X`, r)
	}
	return string(r)
}
