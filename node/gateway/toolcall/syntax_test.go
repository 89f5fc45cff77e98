package toolcall

import (
	"errors"
	"fmt"
	"regexp"
	"strings"
	"testing"
)

// templates are short ones in the style of each family.
var templates = map[Family]string{
	None:       `{% for m in messages %}<|im_start|>{{ m.role }}` + "\n" + `{{ m.content }}<|im_end|>{% endfor %}`,
	Hermes:     `{% if tools %}<tools>{{ tools | tojson }}</tools> <tool_call>{"name": , "arguments": }</tool_call>{% endif %}`,
	Qwen3Coder: "{% for c in m.tool_calls %}<tool_call>\n<function={{ c.name }}>\n{% for k, v in c.arguments|items %}<parameter={{ k }}>\n{{ v }}\n</parameter>{% endfor %}</function>\n</tool_call>{% endfor %}",
	Llama3:     `<|start_header_id|>{{ m.role }}<|end_header_id|>{% if tools %}{"name": "{{ c.name }}", "parameters": {{ c.arguments | tojson }}}{% endif %}<|eot_id|>`,
	Llama4:     `<|header_start|>{{ m.role }}<|header_end|>{% if tools %}[f(a=1)] <|python_start|>{% endif %}<|eot|>`,
	Mistral:    `[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS][TOOL_CALLS][{{ c | tojson }}]`,
	MistralArg: `[TOOL_CALLS]{{ c.name }}[CALL_ID]{{ c.id }}[ARGS]{{ c.arguments | tojson }}`,
	DeepSeekV3: deepCalls + deepCall + "{{ c.type }}" + deepSep + "{{ c.name }}\n```json\n{{ c.arguments }}\n```" + deepCallEnd,
	DeepSeek31: deepCalls + deepCall + "{{ c.name }}" + deepSep + "{{ c.arguments }}" + deepCallEnd,
	DeepSeek32: `{% set d = '｜DSML｜' %}<{{ d }}function_calls>`,
	DeepSeekV4: `{% set d = '｜DSML｜' %}<{{ d }}tool_calls>`,
	GPTOSS:     `<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>`,
	Gemma4:     `<|turn>model<|tool_call>call:{{ c.name }}{ }<tool_call|>`,
	GLM4:       "<tool_call>{{ c.name }}\n<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v }}</arg_value>\n</tool_call>",
	KimiK2:     `<|tool_calls_section_begin|><|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>{{ c.arguments }}<|tool_call_end|>`,
	MiniMaxM2:  `<minimax:tool_call><invoke name="{{ c.name }}"></invoke></minimax:tool_call>`,
	MiniMaxM3:  `{% set ns = ']<]minimax[>[' %}{{ ns }}<tool_call>`,
}

func TestDetect(t *testing.T) {
	for want, template := range templates {
		if got := Detect(template); got != want {
			t.Errorf("Detect(%q) = %q, want %q", template, got, want)
		}
	}
	if got := Detect(""); got != None {
		t.Errorf("no template is %q", got)
	}
	// Functionary writes JSON within <function=, which is another family.
	if got := Detect(`<function={{ c.name }}>{{ c.arguments }}</function>`); got != None {
		t.Errorf("got %q", got)
	}
}

func TestInReasoning(t *testing.T) {
	for _, tt := range []struct {
		f      Family
		prompt string
		want   bool
	}{
		{Hermes, "<|im_start|>assistant\n<think>\n", true},
		{Hermes, "<|im_start|>assistant\n<think>\n\n</think>\n\n", false},
		{Hermes, "<|im_start|>user\nwhat is <think>?<|im_end|>\n<|im_start|>assistant\n", false},
		{DeepSeek31, "<｜Assistant｜><think>", true},
		{MiniMaxM3, "]~b]ai\n<mm:think>", true},
		{MiniMaxM3, "]~b]ai\n<think>", false},
		{MistralArg, "[INST]a[/INST][THINK]", true},
		{Gemma4, "<|turn>model\n<|channel>thought\n", true},
		{Gemma4, "<|turn>model\n<|channel>thought\n<channel|>", false},
		{GPTOSS, "<|start|>assistant", false},
	} {
		if got := InReasoning(tt.f, tt.prompt); got != tt.want {
			t.Errorf("InReasoning(%s, %q) = %v", tt.f, tt.prompt, got)
		}
	}
}

func TestHistoryID(t *testing.T) {
	nine := regexp.MustCompile(`^[0-9A-Za-z]{9}$`)
	seen := map[string]bool{}
	for i := range 100 {
		id := HistoryID(Mistral, fmt.Sprint("call_", i), "f", i)
		if !nine.MatchString(id) || seen[id] || id != HistoryID(MistralArg, fmt.Sprint("call_", i), "g", 7) {
			t.Fatalf("id %q", id)
		}
		seen[id] = true
	}
	if got := HistoryID(Mistral, "abc123DEF", "f", 0); got != "abc123DEF" {
		t.Errorf("an id that fits became %q", got)
	}
	if got := HistoryID(KimiK2, "call_x", "get", 3); got != "functions.get:3" {
		t.Errorf("got %q", got)
	}
	if got := HistoryID(Hermes, "call_x", "get", 3); got != "call_x" {
		t.Errorf("got %q", got)
	}
}

func TestTrigger(t *testing.T) {
	for f := range templates {
		triggers := Trigger(f)
		text, err := Grammar(f, testTools[1:2], false, Options{}, emptyObject)
		if (err != nil || f == Llama3 || f == Llama4) != (triggers == nil) {
			t.Errorf("%s: triggers %q, grammar error %v", f, triggers, err)
		}
		for _, trigger := range triggers { // the grammar goes on from the trigger
			if !strings.Contains(text, gbnfText(trigger)[1:len(gbnfText(trigger))-1]) && f != GPTOSS {
				t.Errorf("%s: the trigger %q is not in\n%s", f, trigger, text)
			}
		}
	}
}

func emptyObject(root string, _ []byte) (string, error) { return root + ` ::= "{}"` + "\n", nil }

func TestGrammarRefuses(t *testing.T) {
	for _, f := range []Family{None, Gemma4, MiniMaxM3, "other"} {
		if _, err := Grammar(f, testTools, false, Options{}, emptyObject); !errors.Is(err, ErrNoGrammar) {
			t.Errorf("%q: got %v", f, err)
		}
	}
	many := make([]Tool, maxForcedTools+1)
	params := "{"
	for i := range maxForcedParams + 1 {
		params += fmt.Sprintf(`"p%d":{},`, i)
	}
	for _, tt := range []struct {
		name  string
		f     Family
		tools []Tool
		want  string
	}{
		{"no tools", Hermes, nil, "0 tools"},
		{"too many tools", Hermes, many, "tools to force"},
		{"too many parameters", GLM4, []Tool{{Name: "a", Parameters: []byte(`{"properties":` + strings.TrimSuffix(params, ",") + `}}`)}}, "parameters"},
		{"no JSON", GLM4, []Tool{{Name: "a", Parameters: []byte(`{`)}}, "tool a"},
	} {
		if _, err := Grammar(tt.f, tt.tools, false, Options{}, emptyObject); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: got %v", tt.name, err)
		}
	}
	failing := errors.New("no rule")
	_, err := Grammar(Hermes, testTools, false, Options{}, func(string, []byte) (string, error) { return "", failing })
	if !errors.Is(err, failing) {
		t.Errorf("got %v", err)
	}
}

// TestUntil walks the rules of a text's end as the automaton that they are.
func TestUntil(t *testing.T) {
	for _, stop := range []string{"</think>", "aab", "abab", "x", "-]^\\"} {
		for _, text := range []string{stop, "a" + stop, stop[:1] + stop, "aa" + stop, stop + stop, stop[:len(stop)-1], "abaab", "ab\n" + stop, "日本" + stop, ""} {
			runes, k, end := []rune(stop), 0, -1
			for i, r := range text {
				if k = advance(runes, k, r); k == len(runes) {
					end = i + len(string(r))
					break
				}
			}
			want := strings.Index(text, stop)
			if want >= 0 {
				want += len(stop)
			}
			if end != want {
				t.Errorf("%q ends in %q at %d, want %d", stop, text, end, want)
			}
		}
		text, rules, _ := strings.Cut(until("x", stop), "\n")
		if lines := strings.Count(rules, "\n"); lines != len([]rune(stop)) || text != "# x0 ends with "+gbnfText(stop) {
			t.Errorf("%q and %d rules for %q", text, lines, stop)
		}
	}
}

// TestGrammarWithoutReasoning: a model that was not taught to reason is not invited to.
func TestGrammarWithoutReasoning(t *testing.T) {
	for _, f := range []Family{Hermes, Mistral, DeepSeekV3, GLM4} {
		with, without := AnswerGrammar(f, Options{}, "answer"), AnswerGrammar(f, Options{NoReasoning: true}, "answer")
		if !strings.Contains(with, "thought0") || without != "root ::= answer\n" {
			t.Errorf("%s:\n%s\nwithout reasoning:\n%s", f, with, without)
		}
		if inside := AnswerGrammar(f, Options{NoReasoning: true, InReasoning: true}, "answer"); !strings.Contains(inside, "thought0") {
			t.Errorf("%s, in reasoning:\n%s", f, inside)
		}
	}
}
