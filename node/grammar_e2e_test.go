//go:build cgo && linux

package node

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/santhosh-tekuri/jsonschema/v6"

	"kvasird/ggml"
	"kvasird/ggml/tiny"
	"kvasird/node/gateway/grammar"
	"kvasird/node/gateway/toolcall"
)

// speaker generates with the shipped model, which knows nothing of JSON and
// would seldom close what it opened: endings are made likelier, not sure.
type speaker struct {
	model *ggml.Model
	c     *ggml.Context
	bias  map[ggml.Token]float32
}

func newSpeaker(t testing.TB) *speaker {
	t.Helper()
	path, err := tiny.Write(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	rt, err := ggml.Open(ggml.Config{})
	if err != nil {
		t.Fatal(err)
	}
	m, err := rt.LoadModel(ggml.ModelConfig{Path: path})
	if err != nil {
		t.Fatal(err)
	}
	c, err := m.NewContext(ggml.ContextConfig{Tokens: 512, Batch: 64, Threads: 1})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close(); m.Close() })
	bias := map[ggml.Token]float32{}
	for token := range ggml.Token(m.VocabSize()) {
		if piece := m.Piece(token, true); len(piece) > 0 && strings.IndexByte(`"]}`, piece[0]) >= 0 {
			bias[token] = 9
		}
	}
	return &speaker{m, c, bias}
}

// say gives the answer under a grammar, and whether it came to its end within
// limit tokens.
func (s *speaker) say(t *testing.T, prompt, gbnf string, seed uint32, limit int) (string, bool) {
	t.Helper()
	sampler, err := s.model.NewSampler(ggml.SamplerConfig{Temperature: 1, Seed: seed, Grammar: gbnf, LogitBias: s.bias})
	if err != nil {
		t.Fatalf("%v:\n%s", err, gbnf)
	}
	defer sampler.Close()
	tokens, err := s.model.Tokenize(prompt, true, true)
	if err != nil {
		t.Fatal(err)
	}
	s.c.SeqRemove(0, 0, -1)
	b := ggml.NewBatch(64)
	for i, token := range tokens {
		b.Add(token, i, 0, i == len(tokens)-1)
	}
	var answer bytes.Buffer
	for n := range limit {
		if err := s.c.Decode(context.Background(), b); err != nil {
			t.Fatal(err)
		}
		token, err := sampler.Sample(s.c, b.Len()-1)
		if err != nil {
			t.Fatal(err)
		}
		if s.model.IsEOG(token) {
			return answer.String(), true
		}
		answer.Write(s.model.Piece(token, true))
		b.Reset()
		b.Add(token, len(tokens)+n, 0, true)
	}
	return answer.String(), false
}

// TestSchemasHold: of 200 schemas each is refused, naming the keyword, or the
// model's answers at temperature 1 validate. Answers that are cut by the limit of
// tokens are not counted; most must be whole.
func TestSchemasHold(t *testing.T) {
	file, err := os.ReadFile("gateway/grammar/testdata/schemas.jsonl")
	if err != nil {
		t.Fatal(err)
	}
	s := newSpeaker(t)
	var whole, cut, refused int
	for line := range strings.Lines(string(file)) {
		gbnf, err := grammar.FromSchema([]byte(line), grammar.Options{})
		var unsupported *grammar.UnsupportedError
		if errors.As(err, &unsupported) && unsupported.Keyword != "" {
			refused++
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		answer, ended := s.say(t, "What is 6 plus 7?", gbnf, uint32(whole+cut), 120)
		if !ended {
			cut++
			continue
		}
		whole++
		if err := validates(t, line, answer); err != nil {
			t.Errorf("schema %s got %s: %v", line, answer, err)
		}
	}
	t.Logf("%d answers whole, %d cut, %d schemas refused", whole, cut, refused)
	if whole+cut+refused != 200 || whole < 120 {
		t.Errorf("of 200 schemas %d gave a whole answer, %d a cut one, %d were refused", whole, cut, refused)
	}
}

func validates(t *testing.T, schema, answer string) error {
	t.Helper()
	if !utf8.ValidString(answer) {
		return errors.New("not UTF-8")
	}
	doc, err := jsonschema.UnmarshalJSON(strings.NewReader(schema))
	if err != nil {
		t.Fatal(err)
	}
	c := jsonschema.NewCompiler()
	c.AssertFormat()
	if err := c.AddResource("schema.json", doc); err != nil {
		t.Fatal(err)
	}
	compiled, err := c.Compile("schema.json")
	if err != nil {
		t.Fatal(err)
	}
	value, err := jsonschema.UnmarshalJSON(strings.NewReader(answer))
	if err != nil {
		return fmt.Errorf("not JSON: %w", err)
	}
	return compiled.Validate(value)
}

// TestAnyJSONHolds: json_object.
func TestAnyJSONHolds(t *testing.T) {
	s := newSpeaker(t)
	ended := 0
	for seed := range uint32(10) {
		answer, end := s.say(t, "What is 6 plus 7?", grammar.AnyJSON(), seed, 120)
		if !end {
			continue
		}
		ended++
		if err := validates(t, `{"type":"object"}`, answer); err != nil {
			t.Errorf("got %s: %v", answer, err)
		}
	}
	if ended == 0 {
		t.Error("no answer came to its end")
	}
}

// follow says whether a grammar, from the first of the triggers on if there are some,
// lets the model write exactly this text: at each step the wanted token is made the
// likeliest, so that another one comes only where the grammar forbids it.
func (s *speaker) follow(t *testing.T, gbnf, text string, triggers ...string) bool {
	t.Helper()
	if err := grammar.Check(gbnf); err != nil {
		t.Fatalf("%v:\n%s", err, gbnf)
	}
	sampler, err := s.model.NewSampler(ggml.SamplerConfig{Grammar: gbnf, Triggers: triggers})
	if err != nil {
		t.Fatalf("%v:\n%s", err, gbnf)
	}
	defer sampler.Close()
	tokens, err := s.model.Tokenize(text, false, false)
	if err != nil {
		t.Fatal(err)
	}
	s.c.SeqRemove(0, 0, -1)
	b := ggml.NewBatch(1)
	b.Add(s.model.EOS(), 0, 0, true)
	for i, token := range append(tokens, s.model.EOS()) {
		if err := s.c.Decode(context.Background(), b); err != nil {
			t.Fatal(err)
		}
		s.c.Logits(0)[token] = 1e6
		drawn, err := sampler.Sample(s.c, 0)
		if err != nil {
			t.Fatal(err)
		}
		if drawn != token {
			return false
		}
		b.Reset()
		b.Add(token, i+1, 0, true)
	}
	return true
}

// forced are calls as each family writes them.
var forced = map[toolcall.Family]string{
	toolcall.Hermes:     "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Oslo\", \"days\": 3}}\n</tool_call>",
	toolcall.Qwen3Coder: "<tool_call>\n<function=weather>\n<parameter=city>\nOslo </param\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
	toolcall.Llama3:     `{"name": "weather", "parameters": {"city": "Oslo", "days": 3}}`,
	toolcall.Llama4:     `{"name": "weather", "parameters": {"city": "Oslo", "days": 3}}`,
	toolcall.Mistral:    `[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Oslo", "days": 3}}]`,
	toolcall.MistralArg: `[TOOL_CALLS]weather[ARGS]{"city": "Oslo", "days": 3}`,
	toolcall.DeepSeekV3: "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{\"city\": \"Oslo\", \"days\": 3}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
	toolcall.DeepSeek31: `<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Oslo", "days": 3}<｜tool▁call▁end｜><｜tool▁calls▁end｜>`,
	toolcall.DeepSeek32: "<｜DSML｜function_calls>\n" + dsmlWeather + "</｜DSML｜function_calls>",
	toolcall.DeepSeekV4: "<｜DSML｜tool_calls>\n" + dsmlWeather + "</｜DSML｜tool_calls>",
	toolcall.GPTOSS:     `<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Oslo", "days": 3}`,
	toolcall.GLM4:       "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
	toolcall.KimiK2:     `<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:12<|tool_call_argument_begin|>{"city": "Oslo", "days": 3}<|tool_call_end|><|tool_calls_section_end|>`,
	toolcall.MiniMaxM2:  "<minimax:tool_call>\n<invoke name=\"weather\">\n<parameter name=\"city\">Oslo</parameter>\n<parameter name=\"days\">3</parameter>\n</invoke>\n</minimax:tool_call>",
}

const dsmlWeather = "<｜DSML｜invoke name=\"weather\">\n<｜DSML｜parameter name=\"city\" string=\"true\">Oslo</｜DSML｜parameter>\n<｜DSML｜parameter name=\"days\" string=\"false\">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n"

// TestForcedCalls: the grammar of each family's calls takes a call as the family
// writes it, with reasoning before it or not, and none of another tool or with
// other arguments, and no text; what it takes is read as that call.
func TestForcedCalls(t *testing.T) {
	const weather = `{"type":"object","properties":{"city":{"type":"string"},"days":{"$ref":"#/$defs/days"}},"required":["city","days"],
		"additionalProperties":false,"$defs":{"days":{"type":"integer","minimum":1,"maximum":9}}}`
	tools := []toolcall.Tool{{Name: "now"}, {Name: "weather", Parameters: []byte(weather)}}
	rule := func(root string, schema []byte) (string, error) {
		return grammar.FromSchema(schema, grammar.Options{Root: root})
	}
	s := newSpeaker(t)
	for f, call := range forced {
		t.Run(string(f), func(t *testing.T) {
			gbnf, err := toolcall.Grammar(f, tools, true, toolcall.Options{}, rule)
			if err != nil {
				t.Fatal(err)
			}
			thought, open, end := "<think>a < b</think>\n\n", "a </thin\n", "</think>"
			switch f {
			case toolcall.Mistral, toolcall.MistralArg:
				thought, end = "[THINK]a [ b[/THINK]", "[/THINK]"
			case toolcall.GPTOSS:
				thought, open, end = "<|channel|>analysis<|message|>a <| b<|end|><|start|>assistant", "", ""
			}
			for text, want := range map[string]bool{
				call: true, thought + call: true, "Hello": false, call + "x": false, "": false,
				strings.Replace(call, "weather", "whether", 1): false, strings.Replace(call, "3", "0", 1): false,
				strings.Replace(call, "3", `"3"`, 1): false, strings.Replace(call, "days", "hours", 1): false,
			} {
				if got := s.follow(t, gbnf, text); got != want {
					t.Errorf("follow(%q) = %v with\n%s", text, got, gbnf)
				}
			}
			s.checkTriggers(t, f, gbnf, thought, call)
			checkCall(t, f, tools, weather, call)
			checkCall(t, f, tools, weather, thought+call)
			if gbnf, err = toolcall.Grammar(f, tools, false, toolcall.Options{InReasoning: true}, rule); err != nil {
				t.Fatal(err)
			}
			if f != toolcall.GPTOSS && (s.follow(t, gbnf, call) || !s.follow(t, gbnf, open+end+call)) {
				t.Errorf("within reasoning the grammar does not wait for its end:\n%s", gbnf)
			}
		})
	}
}

// checkTriggers: behind what the model says freely, a call that it begins is held.
func (s *speaker) checkTriggers(t *testing.T, f toolcall.Family, gbnf, thought, call string) {
	t.Helper()
	triggers := toolcall.Trigger(f)
	if triggers == nil {
		return
	}
	for text, want := range map[string]bool{
		"Hello": true, call: true, "Well. " + call: true, thought + call: true, "Well. " + call + "x": false,
		"Well. " + strings.Replace(call, "weather", "whether", 1): false, "Well. " + strings.Replace(call, "3", "0", 1): false,
	} {
		if got := s.follow(t, gbnf, text, triggers...); got != want {
			t.Errorf("from %q on: follow(%q) = %v with\n%s", triggers, text, got, gbnf)
		}
	}
}

func checkCall(t *testing.T, f toolcall.Family, tools []toolcall.Tool, schema, answer string) {
	t.Helper()
	p := toolcall.New(f, tools, toolcall.Options{})
	var names, args string
	for _, e := range append(p.Feed(answer), p.Close()...) {
		switch e.Kind {
		case toolcall.Text:
			t.Errorf("text %q of %q", e.Text, answer)
		case toolcall.Begin:
			names += e.Name
		case toolcall.Args:
			args += e.Text
		}
	}
	if names != "weather" || p.Truncated() || validates(t, schema, args) != nil {
		t.Errorf("%s%s, truncated %v, of %q", names, args, p.Truncated(), answer)
	}
}

// TestAnswersAfterReasoning: a schema holds behind a block of reasoning.
func TestAnswersAfterReasoning(t *testing.T) {
	rule, err := grammar.FromSchema([]byte(`{"type":"integer"}`), grammar.Options{Root: "answer"})
	if err != nil {
		t.Fatal(err)
	}
	s := newSpeaker(t)
	for _, tt := range []struct {
		f      toolcall.Family
		inside bool
		text   string
		want   bool
	}{
		{toolcall.Hermes, false, "7", true},
		{toolcall.Hermes, false, "<think>x</think>\n\n7", true},
		{toolcall.Hermes, false, "<think>x</think>\n\nx", false},
		{toolcall.Hermes, false, "x", false},
		{toolcall.Hermes, true, "x</think>7", true},
		{toolcall.Hermes, true, "7", false},
		{toolcall.GPTOSS, false, "<|channel|>analysis<|message|>x<|end|><|start|>assistant<|channel|>final<|message|>7", true},
		{toolcall.GPTOSS, false, "<|channel|>final<|message|>7", true},
		{toolcall.GPTOSS, false, "7", false},
	} {
		gbnf := toolcall.AnswerGrammar(tt.f, toolcall.Options{InReasoning: tt.inside}, "answer") + rule
		if got := s.follow(t, gbnf, tt.text); got != tt.want {
			t.Errorf("%s, inside %v: follow(%q) = %v with\n%s", tt.f, tt.inside, tt.text, got, gbnf)
		}
	}
}

// FuzzGrammar: what Check takes, llama.cpp walks without harm.
func FuzzGrammar(f *testing.F) {
	s := newSpeaker(f)
	for _, gbnf := range []string{
		grammar.AnyJSON(), "root ::= \"a\" (b | [^a-z]{2,3})*\nb ::= \"\\x41\"", "root ::= e \"a\" | [b] root\ne ::= f\nf ::= \"\"",
	} {
		f.Add(gbnf)
	}
	f.Fuzz(func(t *testing.T, gbnf string) {
		if len(gbnf) < 200 && gbnf != "" && grammar.Check(gbnf) == nil {
			s.some(t, gbnf)
		}
	})
}

// some lets the model write some tokens under a grammar, or none where llama.cpp cannot
// parse it.
func (s *speaker) some(t *testing.T, gbnf string) {
	sampler, err := s.model.NewPositionSampler(ggml.SamplerConfig{Temperature: 1, Grammar: gbnf})
	if err != nil {
		return
	}
	defer sampler.Close()
	s.c.SeqRemove(0, 0, -1)
	b := ggml.NewBatch(1)
	token := s.model.EOS()
	var answer []ggml.Token
	for pos := range 8 {
		b.Reset()
		b.Add(token, pos, 0, true)
		if err := s.c.Decode(context.Background(), b); err != nil {
			t.Fatal(err)
		}
		if token, err = sampler.Sample(s.c, 0, pos+1, answer); err != nil || s.model.IsEOG(token) {
			return
		}
		answer = append(answer, token)
	}
}
