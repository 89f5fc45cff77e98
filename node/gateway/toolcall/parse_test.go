package toolcall

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"reflect"
	"strings"
	"testing"
	"unicode/utf8"
)

// message is what the events of an answer come to.
type message struct {
	Text, Reasoning string
	Calls           []string // name and arguments; "…" after a call without End
	Truncated       bool
}

// collect joins events and checks their order.
func collect(t *testing.T, events []Event, truncated bool) message {
	t.Helper()
	m := message{Truncated: truncated}
	open := false
	args, name := "", ""
	for _, e := range events {
		switch e.Kind {
		case Text:
			m.Text += e.Text
		case Reasoning:
			m.Reasoning += e.Text
		case Begin:
			if open || e.Index != len(m.Calls) || e.Name == "" {
				t.Fatalf("event %+v while a call is open: %v", e, open)
			}
			open, name, args = true, e.Name, ""
		case Args:
			if !open || e.Index != len(m.Calls) || e.Text == "" {
				t.Fatalf("event %+v outside its call", e)
			}
			args += e.Text
		case End:
			var object map[string]any
			if !open || e.Index != len(m.Calls) {
				t.Fatalf("event %+v outside its call", e)
			}
			if err := json.Unmarshal([]byte(args), &object); err != nil {
				t.Fatalf("arguments %q: %v", args, err)
			}
			m.Calls = append(m.Calls, name+args)
			open = false
		}
		if open && (e.Kind == Text || e.Kind == Reasoning) {
			t.Fatalf("event %+v inside a call", e)
		}
	}
	if open {
		m.Calls = append(m.Calls, name+args+"…")
		if !truncated {
			t.Fatal("an open call and not truncated")
		}
	}
	return m
}

// parse feeds an answer in pieces.
func parse(t *testing.T, f Family, tools []Tool, opt Options, pieces []string) message {
	t.Helper()
	p := New(f, tools, opt)
	var events []Event
	for _, piece := range pieces {
		events = append(events, p.Feed(piece)...)
	}
	events = append(events, p.Close()...)
	if more := append(p.Feed("more"), p.Close()...); len(more) > 0 {
		t.Fatalf("events after Close: %v", more)
	}
	return collect(t, events, p.Truncated())
}

// runes cuts text into pieces of n characters.
func runes(text string, n int) []string {
	var out []string
	for text != "" {
		i := 0
		for k := 0; k < n && i < len(text); k++ {
			_, size := utf8.DecodeRuneInString(text[i:])
			i += size
		}
		out = append(out, text[:i])
		text = text[i:]
	}
	return out
}

func randomCuts(text string, rnd *rand.Rand) []string {
	var out []string
	for text != "" {
		n := 1 + rnd.IntN(min(len(text), 9))
		out = append(out, text[:n])
		text = text[n:]
	}
	return out
}

// everyWay parses whole, in small pieces and in random ones, which must agree.
func everyWay(t *testing.T, f Family, tools []Tool, opt Options, text string) message {
	t.Helper()
	whole := parse(t, f, tools, opt, []string{text})
	ways := [][]string{runes(text, 1), runes(text, 2), runes(text, 5)}
	for seed := range uint64(3) {
		ways = append(ways, randomCuts(text, rand.New(rand.NewPCG(seed, 34))))
	}
	for i, pieces := range ways {
		if got := parse(t, f, tools, opt, pieces); !reflect.DeepEqual(got, whole) {
			t.Fatalf("%s: way %d of cutting gives\n%+v, whole\n%+v\ntext %q", f, i, got, whole, text)
		}
	}
	return whole
}

var testTools = []Tool{
	{Name: "get_weather", Parameters: json.RawMessage(`{"type":"object","properties":{"city":{"type":"string"},"days":{"type":"integer"},
		"metric":{"type":"boolean"},"unit":{"enum":["C","F"]},"where":{"$ref":"#/$defs/place"},"tags":{"type":"array","items":{"type":"string"}},
		"note":{"type":["string","null"]},"size":{"anyOf":[{"type":"number"},{"type":"string"}]}},
		"$defs":{"place":{"type":"object","properties":{"lat":{"type":"number"},"name":{"type":"string"}}}}}`)},
	{Name: "now"},
	{Name: "write", Parameters: json.RawMessage(`{"type":"object","properties":{"path":{"type":"string"},"content":{"type":"string"}}}`)},
}

type parseCase struct {
	name string
	f    Family
	text string
	opt  Options
	want message
}

func calls(list ...string) []string { return list }

const (
	weather  = `get_weather{"city":"Oslo","days":3}`
	weatherJ = `{"city":"Oslo","days":3}`
	spaced   = `get_weather{"city": "Oslo", "days": 3}`
	spacedJ  = `{"city": "Oslo", "days": 3}`
)

var parseCases = []parseCase{
	// Hermes, Qwen 2.5 and 3.
	{"text alone", Hermes, "Hello <world> & <tool, 1 < 2 🙂 \n", Options{}, message{Text: "Hello <world> & <tool, 1 < 2 🙂 \n"}},
	{"one call", Hermes, "<tool_call>\n{\"name\": \"get_weather\", \"arguments\": " + spacedJ + "}\n</tool_call>", Options{}, message{Calls: calls(spaced)}},
	{"text and two calls", Hermes, "I look.\n\n<tool_call>\n{\"name\":\"get_weather\",\"arguments\":" + weatherJ + "}\n</tool_call>\n<tool_call>{\"name\":\"now\",\"arguments\":{}}</tool_call>\n",
		Options{}, message{Text: "I look.", Calls: calls(weather, "now{}")}},
	{"text after a call", Hermes, "<tool_call>{\"name\":\"now\"}</tool_call>\nDone. ", Options{}, message{Text: "Done. ", Calls: calls("now{}")}},
	{"no arguments", Hermes, `<tool_call>{"name":"now","arguments":null}</tool_call><tool_call>{"name":"now","arguments":""}</tool_call>`, Options{}, message{Calls: calls("now{}", "now{}")}},
	{"arguments as a string", Hermes, `<tool_call>{"name":"get_weather","arguments":"{\"city\":\"Oslo\",\"days\":3}"}</tool_call>`, Options{}, message{Calls: calls(weather)}},
	{"end tag within a string", Hermes, `<tool_call>{"name":"write","arguments":{"content":"a </tool_call> \" } b"}}</tool_call>!`, Options{}, message{Text: "!", Calls: calls(`write{"content":"a </tool_call> \" } b"}`)}},
	{"end tag missing", Hermes, `<tool_call>{"name":"now","arguments":{}}`, Options{}, message{Calls: calls("now{}")}},
	{"end tag missing between", Hermes, `<tool_call>{"name":"now"}<tool_call>{"name":"now"}</tool_call>`, Options{}, message{Calls: calls("now{}", "now{}")}},
	{"line break in a string", Hermes, "<tool_call>{\"name\":\"write\",\"arguments\":{\"content\":\"a\nb\"}}</tool_call>", Options{}, message{Calls: calls(`write{"content":"a\nb"}`)}},
	{"list of calls", Hermes, `<tool_call>[{"name":"now"},{"name":"now"}]</tool_call>`, Options{}, message{Calls: calls("now{}", "now{}")}},
	{"undeclared tool", Hermes, `<tool_call>{"name":"other","arguments":{}}</tool_call>`, Options{}, message{Calls: calls("other{}")}},
	{"malformed, the next is kept", Hermes, "a <tool_call>{\"name\": get}</tool_call>\n<tool_call>{\"name\":\"now\"}</tool_call>", Options{},
		message{Text: "a <tool_call>{\"name\": get}</tool_call>", Calls: calls("now{}")}},
	{"brace missing, the next is kept", Hermes, `<tool_call>{"name":"now","arguments":{}</tool_call><tool_call>{"name":"now"}</tool_call>`, Options{},
		message{Text: `<tool_call>{"name":"now","arguments":{}</tool_call>`, Calls: calls("now{}")}},
	{"quote missing, the next is kept", Hermes, `<tool_call>{"name":"now}</tool_call><tool_call>{"name":"now"}</tool_call>`, Options{},
		message{Text: `<tool_call>{"name":"now}</tool_call>`, Calls: calls("now{}")}},
	{"no name", Hermes, `<tool_call>{"arguments":{}}</tool_call>`, Options{}, message{Text: `<tool_call>{"arguments":{}}</tool_call>`}},
	{"arguments that are no object", Hermes, `<tool_call>{"name":"now","arguments":[1]}</tool_call>`, Options{}, message{Text: `<tool_call>{"name":"now","arguments":[1]}</tool_call>`}},
	{"marker in prose", Hermes, "Use <tool_call> for it.", Options{}, message{Text: "Use <tool_call> for it."}},
	{"marker cut off", Hermes, "Use <tool_c", Options{}, message{Text: "Use <tool_c"}},
	{"cut before the name", Hermes, `x <tool_call>{"na`, Options{}, message{Text: "x", Truncated: true}},
	{"cut after the marker", Hermes, "<tool_call>\n", Options{}, message{Truncated: true}},
	{"cut in the arguments", Hermes, `<tool_call>{"name":"write","arguments":{"content":"abc`, Options{}, message{Calls: calls(`write{"content":"abc…`), Truncated: true}},
	{"none", Hermes, `a<tool_call>{"name":"now"}</tool_call>b`, Options{NoCalls: true}, message{Text: "ab"}},
	{"function style in a Hermes wrapper", Hermes, "<tool_call>\n<function=now>\n</function>\n</tool_call>", Options{}, message{Calls: calls("now{}")}},
	{"too deep", Hermes, `<tool_call>{"name":"now","arguments":{"a":` + strings.Repeat("[", 80) + strings.Repeat("]", 80) + `}}</tool_call>`, Options{},
		message{Text: `<tool_call>{"name":"now","arguments":{"a":` + strings.Repeat("[", 80) + strings.Repeat("]", 80) + `}}</tool_call>`}},

	// Reasoning.
	{"reasoning", Hermes, "<think>\nI think.\n\nMore.\n</think>\n\nHi <think>", Options{}, message{Reasoning: "I think.\n\nMore.", Text: "Hi <think>"}},
	{"empty reasoning", Hermes, "<think>\n\n</think>\n\nHi", Options{}, message{Text: "Hi"}},
	{"prompt opened the reasoning", Hermes, "\nhm\n</think>\n<tool_call>{\"name\":\"now\"}</tool_call>", Options{InReasoning: true}, message{Reasoning: "hm", Calls: calls("now{}")}},
	{"call within reasoning is reasoning", Hermes, "<think>a <tool_call>{\"name\":\"now\"}</tool_call></think>b", Options{}, message{Reasoning: "a <tool_call>{\"name\":\"now\"}</tool_call>", Text: "b"}},
	{"stray end of reasoning", Hermes, "\n</think>\n\n{\"a\":1}", Options{}, message{Text: `{"a":1}`}},
	{"end of reasoning in prose", Hermes, "a </think> b", Options{}, message{Text: "a </think> b"}},
	{"reasoning cut off", Hermes, "<think>so ", Options{}, message{Reasoning: "so"}},
	{"reasoning again after a call", Hermes, "<tool_call>{\"name\":\"now\"}</tool_call>\n<think>x</think>y", Options{}, message{Reasoning: "x", Text: "y", Calls: calls("now{}")}},
	{"no family", None, "<think>x</think><tool_call>{\"name\":\"now\"}</tool_call>", Options{}, message{Reasoning: "x", Text: "<tool_call>{\"name\":\"now\"}</tool_call>"}},

	// Qwen3-Coder, 3.5, 3.6.
	{"parameters", Qwen3Coder, "Ok.\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>", Options{}, message{Text: "Ok.", Calls: calls(weather)}},
	{"outer tag missing", Qwen3Coder, "Ok. <function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>", Options{}, message{Text: "Ok.", Calls: calls(weather)}},
	{"function in prose", Qwen3Coder, "a <function=foo> b", Options{}, message{Text: "a <function=foo> b"}},
	{"no parameters", Qwen3Coder, "<tool_call>\n<function=now>\n</function>\n</tool_call>", Options{}, message{Calls: calls("now{}")}},
	{"two functions", Qwen3Coder, "<tool_call>\n<function=now>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>", Options{}, message{Calls: calls("now{}", "now{}")}},
	{"doubled end of a parameter", Qwen3Coder, "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>", Options{}, message{Calls: calls(weather)}},
	{"end of a parameter missing", Qwen3Coder, "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n<parameter=days>\n3\n</function>\n</tool_call>", Options{}, message{Calls: calls(weather)}},
	{"end of the function missing", Qwen3Coder, "<tool_call>\n<function=now>\n</tool_call>x", Options{}, message{Text: "x", Calls: calls("now{}")}},
	{"value with its own end tag", Qwen3Coder, "<tool_call>\n<function=write>\n<parameter=content>\na</parameter> b\n<parameter=zzz>\nc</function> d\n</parameter>\n</function>\n</tool_call>", Options{},
		message{Calls: calls(`write{"content":"a</parameter> b\n<parameter=zzz>\nc</function> d"}`)}},
	{"one line break on each side", Qwen3Coder, "<tool_call>\n<function=write>\n<parameter=content>\n\n  a\n\n</parameter>\n</function>\n</tool_call>", Options{}, message{Calls: calls(`write{"content":"\n  a\n"}`)}},
	{"types of the schema", Qwen3Coder, "<tool_call><function=get_weather><parameter=city>12</parameter><parameter=days>12</parameter><parameter=metric>True</parameter><parameter=unit>C</parameter>" +
		"<parameter=where>{'lat': 1.5, 'name': None}</parameter><parameter=tags>[\"a\", \"b\"]</parameter><parameter=note>None</parameter><parameter=size>7</parameter></function></tool_call>", Options{},
		message{Calls: calls(`get_weather{"city":"12","days":12,"metric":true,"unit":"C","where":{"lat":1.5,"name":null},"tags":["a", "b"],"note":null,"size":7}`)}},
	{"values of other types are strings", Qwen3Coder, "<tool_call><function=get_weather><parameter=days>many</parameter><parameter=metric>maybe</parameter><parameter=note>true</parameter></function></tool_call>", Options{},
		message{Calls: calls(`get_weather{"days":"many","metric":"maybe","note":"true"}`)}},
	{"types without a schema", Qwen3Coder, "<tool_call><function=now><parameter=a>1</parameter><parameter=b>x < y & z</parameter><parameter=c>False</parameter></function></tool_call>", Options{},
		message{Calls: calls(`now{"a":1,"b":"x < y & z","c":false}`)}},
	{"malformed parameter, the rest is kept", Qwen3Coder, "<tool_call><function=get_weather><parameter=city\nOslo</parameter><parameter=days>3</parameter></function></tool_call><tool_call><function=now></function></tool_call>", Options{},
		message{Calls: calls(`get_weather{"days":3}`, "now{}")}},
	{"a parameter twice", Qwen3Coder, "<tool_call><function=write><parameter=path>a</parameter><parameter=path>b</parameter></function></tool_call>", Options{}, message{Calls: calls(`write{"path":"a"}`)}},
	{"cut in a parameter", Qwen3Coder, "<tool_call><function=write><parameter=path>a</parameter><parameter=content>abc", Options{}, message{Calls: calls(`write{"path":"a"…`), Truncated: true}},
	{"cut between parameters", Qwen3Coder, "<tool_call><function=write><parameter=path>a</parameter>", Options{}, message{Calls: calls(`write{"path":"a"…`), Truncated: true}},
	{"JSON in the wrapper", Qwen3Coder, `<tool_call>{"name":"now"}</tool_call>`, Options{}, message{Calls: calls("now{}")}},

	// Llama 3.
	{"JSON alone", Llama3, ` {"name": "get_weather", "parameters": ` + spacedJ + `}`, Options{}, message{Calls: calls(spaced)}},
	{"behind the tag", Llama3, `<|python_tag|>{"type":"function","name":"get_weather","parameters":` + weatherJ + `}`, Options{}, message{Calls: calls(weather)}},
	{"several", Llama3, `{"name":"now","parameters":{}}; {"name":"get_weather","parameters":` + weatherJ + `}`, Options{}, message{Calls: calls("now{}", weather)}},
	{"JSON with a name stays text", Llama3, `{"name": "Ann", "age": 3}`, Options{}, message{Text: `{"name": "Ann", "age": 3}`}},
	{"JSON of an undeclared tool stays text", Llama3, `{"name": "other", "parameters": {}}`, Options{}, message{Text: `{"name": "other", "parameters": {}}`}},
	{"JSON of a tool's name without arguments stays text", Llama3, `{"name": "now"}`, Options{}, message{Text: `{"name": "now"}`}},
	{"other JSON is text at once", Llama3, `{"title": "x"`, Options{}, message{Text: `{"title": "x"`}},
	{"JSON after text stays text", Llama3, `See {"name":"now","parameters":{}}`, Options{}, message{Text: `See {"name":"now","parameters":{}}`}},
	{"nested function", Llama3, `{"function":{"name":"now","parameters":{}}}`, Options{}, message{Calls: calls("now{}")}},
	{"built-in style", Llama3, `<|python_tag|>get_weather.call(city="Oslo", days=3)`, Options{}, message{Calls: calls(weather)}},
	{"tag before code", Llama3, `<|python_tag|>print(1)`, Options{}, message{Text: `<|python_tag|>print(1)`}},
	{"JSON cut off", Llama3, `{"name":"write","parameters":{"path":"a`, Options{}, message{Calls: calls(`write{"path":"a…`), Truncated: true}},
	{"JSON text cut off", Llama3, `{"name":"Ann`, Options{}, message{Text: `{"name":"Ann`}},
	{"tag cut off", Llama3, `<|python_tag|>`, Options{}, message{Truncated: true}},

	// Llama 4.
	{"pythonic", Llama4, `[get_weather(city="Oslo", days=3), now()]`, Options{}, message{Calls: calls(weather, "now{}")}},
	{"pythonic in tags", Llama4, `<|python_start|>[get_weather(city='Oslo', days=3)]<|python_end|>`, Options{}, message{Calls: calls(weather)}},
	{"pythonic values", Llama4, `[get_weather(where={'lat': -1.5, 'name': "a\"b\n\u00e9"}, tags=["x", ('y')], metric=True, note=None)]`, Options{},
		message{Calls: calls(`get_weather{"where":{"lat":-1.5,"name":"a\"b\né"},"tags":["x",["y"]],"metric":true,"note":null}`)}},
	{"JSON instead", Llama4, `{"name":"now","parameters":{}}`, Options{}, message{Calls: calls("now{}")}},
	{"JSON list instead", Llama4, `[{"name":"now","arguments":{}}]`, Options{}, message{Calls: calls("now{}")}},
	{"a list stays text", Llama4, `[1, 2, 3]`, Options{}, message{Text: `[1, 2, 3]`}},
	{"an undeclared function stays text", Llama4, `[other(a=1)]`, Options{}, message{Text: `[other(a=1)]`}},
	{"a link stays text", Llama4, `[docs](http://x/(y))`, Options{}, message{Text: `[docs](http://x/(y))`}},
	{"a variable stays text", Llama4, `[now(a=b)]`, Options{}, message{Text: `[now(a=b)]`}},

	// Mistral.
	{"Nemo", Mistral, `[TOOL_CALLS][{"name": "get_weather", "arguments": ` + spacedJ + `, "id": "abcdefghi"}, {"name":"now","arguments":{}}]`, Options{}, message{Calls: calls(spaced, "now{}")}},
	{"with id", MistralArg, `Ok.[TOOL_CALLS]get_weather[CALL_ID]abc123def[ARGS]` + weatherJ + `[TOOL_CALLS]now[ARGS]{}`, Options{}, message{Text: "Ok.", Calls: calls(weather, "now{}")}},
	{"without id", MistralArg, `[TOOL_CALLS]get_weather[ARGS]` + weatherJ, Options{}, message{Calls: calls(weather)}},
	{"without ARGS", MistralArg, `[TOOL_CALLS]get_weather` + weatherJ, Options{}, message{Calls: calls(weather)}},
	{"array to a newer parser", MistralArg, `[TOOL_CALLS] [{"name":"now","arguments":{}}]`, Options{}, message{Calls: calls("now{}")}},
	{"[THINK]", MistralArg, `[THINK]hm[/THINK]Hi [THINK]`, Options{}, message{Reasoning: "hm", Text: "Hi [THINK]"}},
	{"malformed Nemo", Mistral, `[TOOL_CALLS][{"name": x}] and [TOOL_CALLS][{"name":"now"}]`, Options{}, message{Text: `[TOOL_CALLS][{"name": x}] and`, Calls: calls("now{}")}},
	{"malformed arguments", MistralArg, `[TOOL_CALLS]now[ARGS]{a} [TOOL_CALLS]now[ARGS]{}`, Options{}, message{Text: `[TOOL_CALLS]now[ARGS]{a}`, Calls: calls("now{}")}},
	{"cut in the name", MistralArg, `[TOOL_CALLS]get_w`, Options{}, message{Truncated: true}},
	{"cut in arguments", MistralArg, `[TOOL_CALLS]write[ARGS]{"path":"a`, Options{}, message{Calls: calls(`write{"path":"a…`), Truncated: true}},

	// DeepSeek.
	{"V3", DeepSeekV3, "Ok.\n" + deepCalls + deepCall + "function" + deepSep + "get_weather\n```json\n" + weatherJ + "\n```" + deepCallEnd + "\n" + deepCall + "function" + deepSep + "now\n```json\n{}\n```" + deepCallEnd + deepCallsEnd, Options{},
		message{Text: "Ok.", Calls: calls(weather, "now{}")}},
	{"V3.1", DeepSeek31, deepCalls + deepCall + "get_weather" + deepSep + weatherJ + deepCallEnd + deepCall + "now" + deepSep + "{}" + deepCallEnd + deepCallsEnd, Options{}, message{Calls: calls(weather, "now{}")}},
	{"V3.1 to the parser of V3", DeepSeekV3, deepCalls + deepCall + "now" + deepSep + "{}" + deepCallEnd + deepCallsEnd, Options{}, message{Calls: calls("now{}")}},
	{"V3.1 with a fence", DeepSeek31, deepCall + "now" + deepSep + "```json\n{}\n```" + deepCallEnd, Options{}, message{Calls: calls("now{}")}},
	{"V3 without arguments", DeepSeek31, deepCall + "now" + deepSep + deepCallEnd + deepCallsEnd, Options{}, message{Calls: calls("now{}")}},
	{"V3 malformed, the next is kept", DeepSeek31, deepCall + "now" + deepSep + "{a}" + deepCallEnd + deepCall + "now" + deepSep + "{}" + deepCallEnd, Options{}, message{Text: deepCall + "now" + deepSep + "{a}" + deepCallEnd, Calls: calls("now{}")}},
	{"V3 wrapper in prose", DeepSeek31, deepCalls + " is a token", Options{}, message{Text: deepCalls + " is a token"}},
	{"V3 cut", DeepSeekV3, deepCalls + deepCall + "function" + deepSep + "write\n```json\n{\"path\":", Options{}, message{Calls: calls(`write{"path":…`), Truncated: true}},
	{"V3.1 reasoning", DeepSeek31, "a</think>" + deepCalls + deepCall + "now" + deepSep + "{}" + deepCallEnd + deepCallsEnd, Options{InReasoning: true}, message{Reasoning: "a", Calls: calls("now{}")}},
	{"V3.2", DeepSeek32, dsmlText(`Ok.

<DSMLfunction_calls>
<DSMLinvoke name="get_weather">
<DSMLparameter name="city" string="true">Oslo</DSMLparameter>
<DSMLparameter name="days" string="false">3</DSMLparameter>
</DSMLinvoke>
<DSMLinvoke name="now">
</DSMLinvoke>
</DSMLfunction_calls>`), Options{}, message{Text: "Ok.", Calls: calls(weather, "now{}")}},
	{"V4 block", DeepSeek32, dsmlText(`<DSMLtool_calls><DSMLinvoke name="now"></DSMLinvoke></DSMLtool_calls>`), Options{}, message{Calls: calls("now{}")}},
	{"V3.2 wrapper missing", DeepSeek32, dsmlText(`<DSMLinvoke name="now"></DSMLinvoke>`), Options{}, message{Calls: calls("now{}")}},
	{"V3.2 string that looks like a number", DeepSeek32, dsmlText(`<DSMLinvoke name="now"><DSMLparameter name="a" string="true">12</DSMLparameter></DSMLinvoke>`), Options{}, message{Calls: calls(`now{"a":"12"}`)}},
	{"V3.2 without string attribute", DeepSeek32, dsmlText(`<DSMLinvoke name="get_weather"><DSMLparameter name="days">3</DSMLparameter></DSMLinvoke>`), Options{}, message{Calls: calls(`get_weather{"days":3}`)}},
	{"V3.2 unterminated", DeepSeek32, dsmlText(`<DSMLfunction_calls><DSMLinvoke name="write"><DSMLparameter name="path" string="true">a</DSMLparameter>`), Options{}, message{Calls: calls(`write{"path":"a"…`), Truncated: true}},
	{"V3.2 invoke end missing", DeepSeek32, dsmlText(`<DSMLfunction_calls><DSMLinvoke name="now"><DSMLinvoke name="now"></DSMLfunction_calls>`), Options{}, message{Calls: calls("now{}", "now{}")}},
	{"V3.2 malformed name", DeepSeek32, dsmlText("<DSMLfunction_calls><DSMLinvoke name=\"a\nb\"></DSMLinvoke>"), Options{}, message{Text: dsmlText("<DSMLfunction_calls><DSMLinvoke name=\"a\nb\"></DSMLinvoke>")}},

	// gpt-oss.
	{"channels", GPTOSS, "<|channel|>analysis<|message|>I think <b>.<|end|><|start|>assistant<|channel|>final<|message|>Hi.<|return|>", Options{}, message{Reasoning: "I think <b>.", Text: "Hi."}},
	{"call in commentary", GPTOSS, "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>" + weatherJ + "<|call|>", Options{}, message{Reasoning: "hm", Calls: calls(weather)}},
	{"recipient in the role", GPTOSS, " to=functions.get_weather<|channel|>commentary json<|message|>" + weatherJ + "<|call|>", Options{}, message{Calls: calls(weather)}},
	{"recipient in the role of a second message", GPTOSS, "<|channel|>analysis<|message|>a<|end|><|start|>assistant to=functions.now<|channel|>commentary<|message|>{}", Options{}, message{Reasoning: "a", Calls: calls("now{}")}},
	{"recipient on the analysis channel", GPTOSS, "<|channel|>analysis to=functions.now<|message|>{}<|call|>", Options{}, message{Calls: calls("now{}")}},
	{"no arguments", GPTOSS, "<|channel|>commentary to=functions.now<|message|><|call|>", Options{}, message{Calls: calls("now{}")}},
	{"preamble", GPTOSS, "<|channel|>commentary<|message|>I will look.<|end|><|start|>assistant<|channel|>commentary to=functions.now<|message|>{}<|call|>", Options{}, message{Text: "I will look.", Calls: calls("now{}")}},
	{"two calls", GPTOSS, "<|channel|>commentary to=functions.now<|message|>{}<|call|><|start|>assistant<|channel|>commentary to=functions.now<|message|>{}<|call|>", Options{}, message{Calls: calls("now{}", "now{}")}},
	{"built-in tool", GPTOSS, "<|channel|>analysis to=python code<|message|>print(1)<|call|>", Options{}, message{Reasoning: "print(1)"}},
	{"no header", GPTOSS, "Hello <|x", Options{}, message{Text: "Hello <|x"}},
	{"malformed, the next is kept", GPTOSS, "<|channel|>commentary to=functions.now<|message|>{a}<|call|><|start|>assistant<|channel|>commentary to=functions.now<|message|>{}<|call|>", Options{},
		message{Text: "<|channel|>commentary to=functions.now<|message|>{a}", Calls: calls("now{}")}},
	{"cut in a header", GPTOSS, "<|channel|>commentary to=functions.no", Options{}, message{Truncated: true}},
	{"cut in a call", GPTOSS, `<|channel|>commentary to=functions.write<|message|>{"path":"a`, Options{}, message{Calls: calls(`write{"path":"a…`), Truncated: true}},
	{"cut in reasoning", GPTOSS, "<|channel|>analysis<|message|>abc<|e", Options{}, message{Reasoning: "abc<|e"}},

	// Gemma 4.
	{"bare keys", Gemma4, `Ok <|tool_call>call:get_weather{city:<|"|>Oslo<|"|>,days:3}<tool_call|><|tool_call>call:now{}<tool_call|><|tool_response>`, Options{}, message{Text: "Ok", Calls: calls(weather, "now{}")}},
	{"nested and quoted", Gemma4, `<|tool_call>call:get_weather{where:{lat:1.5,"name":"a, b"},tags:['x',<|"|>y}<|"|>],metric:true,note:null}<tool_call|>`, Options{},
		message{Calls: calls(`get_weather{"where":{"lat":1.5,"name":"a, b"},"tags":["x","y}"],"metric":true,"note":null}`)}},
	{"bare word and schema", Gemma4, `<|tool_call>call:get_weather{city:Oslo,days:3,unit:C}<tool_call|>`, Options{}, message{Calls: calls(`get_weather{"city":"Oslo","days":3,"unit":"C"}`)}},
	{"marker in prose", Gemma4, `The token <|tool_call> begins it.`, Options{}, message{Text: `The token <|tool_call> begins it.`}},
	{"thought", Gemma4, "<|channel>thought\nhm\n<channel|>Hi", Options{}, message{Reasoning: "hm", Text: "Hi"}},
	{"malformed, the next is kept", Gemma4, `<|tool_call>call:now{,}<tool_call|><|tool_call>call:now{}<tool_call|>`, Options{}, message{Text: `<|tool_call>call:now{,}<tool_call|>`, Calls: calls("now{}")}},
	{"cut", Gemma4, `<|tool_call>call:write{path:<|"|>a`, Options{}, message{Calls: calls("write…"), Truncated: true}},
	{"cut in the word", Gemma4, `<|tool_call>ca`, Options{}, message{Truncated: true}},

	// GLM.
	{"GLM", GLM4, "Ok.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>", Options{}, message{Text: "Ok.", Calls: calls(weather)}},
	{"GLM on one line", GLM4, "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Oslo</arg_value><arg_key>days</arg_key><arg_value>3</arg_value></tool_call><tool_call>now</tool_call>", Options{}, message{Calls: calls(weather, "now{}")}},
	{"GLM name only", GLM4, "<tool_call>now\n</tool_call>", Options{}, message{Calls: calls("now{}")}},
	{"GLM types", GLM4, "<tool_call>get_weather<arg_key>city</arg_key><arg_value>7</arg_value><arg_key>metric</arg_key><arg_value>true</arg_value></tool_call>", Options{}, message{Calls: calls(`get_weather{"city":"7","metric":true}`)}},
	{"GLM stray tag in a key", GLM4, "<tool_call>get_weather<arg_key><arg_key>days\n</arg_key><arg_value>3</arg_value></tool_call>", Options{}, message{Calls: calls(`get_weather{"days":3}`)}},
	{"GLM value with its own end tag", GLM4, "<tool_call>write<arg_key>content</arg_key><arg_value>a</arg_value>b</arg_value></tool_call>", Options{}, message{Calls: calls(`write{"content":"a</arg_value>b"}`)}},
	{"GLM value's end missing", GLM4, "<tool_call>write<arg_key>content</arg_key><arg_value>a</tool_call>\n<tool_call>now</tool_call>", Options{}, message{Calls: calls(`write{"content":"a"}`, "now{}")}},
	{"GLM in prose", GLM4, "A <tool_call> is a tag.", Options{}, message{Text: "A <tool_call> is a tag."}},
	{"GLM cut", GLM4, "<tool_call>write<arg_key>path</arg_key><arg_va", Options{}, message{Calls: calls("write…"), Truncated: true}},

	// Kimi K2.
	{"Kimi", KimiK2, "Ok.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>" + weatherJ + "<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>", Options{},
		message{Text: "Ok.", Calls: calls(weather, "now{}")}},
	{"Kimi singular section", KimiK2, "<|tool_call_section_begin|><|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_call_section_end|>", Options{}, message{Calls: calls("now{}")}},
	{"Kimi ids run together", KimiK2, "<|tool_call_begin|>functionsnow12<|tool_call_argument_begin|>{}<|tool_call_end|>", Options{}, message{Calls: calls("now{}")}},
	{"Kimi ids with underscores", KimiK2, "<|tool_call_begin|>functions_get_weather_3<|tool_call_argument_begin|>{}<|tool_call_end|>", Options{}, message{Calls: calls("get_weather{}")}},
	{"Kimi name inside the JSON", KimiK2, `<|tool_call_begin|>call_ab12<|tool_call_argument_begin|>{"name":"get_weather","arguments":` + weatherJ + `}<|tool_call_end|>`, Options{}, message{Calls: calls(weather)}},
	{"Kimi without arguments", KimiK2, "<|tool_call_begin|>functions.now:0<|tool_call_end|>", Options{}, message{Calls: calls("now{}")}},
	{"Kimi section in prose", KimiK2, "<|tool_calls_section_begin|>x", Options{}, message{Text: "<|tool_calls_section_begin|>x"}},
	{"Kimi cut", KimiK2, `<|tool_calls_section_begin|><|tool_call_begin|>functions.write:0<|tool_call_argument_begin|>{"path":"`, Options{}, message{Calls: calls(`write{"path":"…`), Truncated: true}},

	// MiniMax.
	{"MiniMax M2", MiniMaxM2, "Ok.\n<minimax:tool_call>\n<invoke name=\"get_weather\">\n<parameter name=\"city\">Oslo</parameter>\n<parameter name=\"days\">3</parameter>\n</invoke>\n<invoke name=\"now\">\n</invoke>\n</minimax:tool_call>", Options{},
		message{Text: "Ok.", Calls: calls(weather, "now{}")}},
	{"M2 call before the reasoning ended", MiniMaxM2, "hm\n<minimax:tool_call><invoke name=\"now\"></invoke></minimax:tool_call>", Options{InReasoning: true}, message{Reasoning: "hm", Calls: calls("now{}")}},
	{"M2 marker in reasoning", MiniMaxM2, "a <minimax:tool_call> b</think>c", Options{InReasoning: true}, message{Reasoning: "a <minimax:tool_call> b", Text: "c"}},
	{"M2 invoke without wrapper", MiniMaxM2, `<invoke name="now"></invoke>`, Options{}, message{Text: `<invoke name="now"></invoke>`}},
	{"MiniMax M3", MiniMaxM3, m3("Ok.\n#<tool_call>\n#<invoke name=\"get_weather\">#<city>Oslo#</city>#<days>3#</days>#</invoke>\n#<invoke name=\"now\">#</invoke>\n#</tool_call>"), Options{}, message{Text: "Ok.", Calls: calls(weather, "now{}")}},
	{"M3 nested", MiniMaxM3, m3(`#<tool_call>#<invoke name="get_weather">#<where>#<lat>1.5#</lat>#<name>7#</name>#</where>#<tags>#<item>1#</item>#<item><b>#</item>#</tags>#<metric>true#</metric>#</invoke>#</tool_call>`), Options{},
		message{Calls: calls(`get_weather{"where":{"lat":1.5,"name":"7"},"tags":["1","<b>"],"metric":true}`)}},
	{"M3 empty list and object", MiniMaxM3, m3(`#<tool_call>#<invoke name="get_weather">#<tags>#</tags>#<where>#</where>#<city>#</city>#</invoke>#</tool_call>`), Options{}, message{Calls: calls(`get_weather{"tags":[],"where":{},"city":""}`)}},
	{"M3 thinking", MiniMaxM3, "<mm:think>a</mm:think>b", Options{}, message{Reasoning: "a", Text: "b"}},
	{"M3 prefix when it does not think", MiniMaxM3, "</mm:think>b", Options{}, message{Text: "b"}},
	{"M3 malformed, the next is kept", MiniMaxM3, m3(`#<tool_call>#<invoke name="now">#<a>1#</b>#</invoke>#<tool_call>#<invoke name="now">#</invoke>#</tool_call>`), Options{},
		message{Text: m3(`#<tool_call>#<invoke name="now">#<a>1#</b>#</invoke>`), Calls: calls("now{}")}},
	{"M3 cut", MiniMaxM3, m3(`#<tool_call>#<invoke name="write">#<path>a`), Options{}, message{Calls: calls("write…"), Truncated: true}},
}

func dsmlText(s string) string { return strings.ReplaceAll(s, "DSML", dsml) }

func m3(s string) string { return strings.ReplaceAll(s, "#", minimax) }

func TestParse(t *testing.T) {
	for _, tt := range parseCases {
		t.Run(string(tt.f)+"/"+tt.name, func(t *testing.T) {
			if got := everyWay(t, tt.f, testTools, tt.opt, tt.text); !reflect.DeepEqual(got, tt.want) {
				t.Errorf("text %q\ngot  %+v\nwant %+v", tt.text, got, tt.want)
			}
		})
	}
}

// TestEveryCut parses every case cut off at every byte: no cut leaks a marker's
// whole text, and every one is reported alike in all ways of feeding.
func TestEveryCut(t *testing.T) {
	for _, tt := range parseCases {
		if tt.want.Text != "" && len(tt.want.Calls) == 0 {
			continue
		}
		for i := range tt.text {
			got := everyWay(t, tt.f, testTools, tt.opt, tt.text[:i])
			if len(got.Calls) > len(tt.want.Calls) {
				t.Errorf("%s/%s cut at %d: calls %q", tt.f, tt.name, i, got.Calls)
			}
		}
	}
}

// TestNoTools: without tools a call is text, and channels are still read.
func TestNoTools(t *testing.T) {
	text := `a <tool_call>{"name":"now"}</tool_call>`
	if got := everyWay(t, Hermes, nil, Options{}, text); got.Text != text {
		t.Errorf("got %+v", got)
	}
	got := everyWay(t, GPTOSS, nil, Options{}, "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b")
	if want := (message{Text: "b", Reasoning: "a"}); !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v", got)
	}
}

// TestStreams: parameters are reported before the call has ended.
func TestStreams(t *testing.T) {
	p := New(DeepSeek32, testTools, Options{})
	events := p.Feed(dsmlText(`<DSMLinvoke name="write"><DSMLparameter name="path" string="true">a</DSMLparameter>` + "\n" + `<DSMLparameter name="content" string="true">b`))
	want := []Event{{Kind: Begin, Name: "write"}, {Kind: Args, Text: `{"path":"a"`}}
	if !reflect.DeepEqual(events, want) {
		t.Errorf("got %+v", events)
	}
	if events := p.Feed("plain "); len(events) != 0 {
		t.Errorf("got %+v", events)
	}
	p = New(Hermes, testTools, Options{})
	if got := p.Feed("Hello <b>you"); !reflect.DeepEqual(got, []Event{{Kind: Text, Text: "Hello <b>you"}}) {
		t.Errorf("text is held back: %+v", got)
	}
}

func TestLimits(t *testing.T) {
	long := strings.Repeat("a", maxHeld)
	for _, tt := range []struct {
		name, text string
		f          Family
		want       func(m message) bool
	}{
		{"a call too long is text", `<tool_call>{"name":"write","arguments":{"content":"` + long + long, Hermes, func(m message) bool { return len(m.Text) > maxHeld && len(m.Calls) == 0 }},
		{"a parameter too long is cut", `<tool_call><function=write><parameter=content>` + long + long, Qwen3Coder, func(m message) bool { return m.Truncated && m.Text == "" }},
		{"too many calls are text", strings.Repeat(`<tool_call>{"name":"now"}</tool_call>`, maxCalls+3), Hermes, func(m message) bool { return len(m.Calls) == maxCalls && strings.Count(m.Text, "tool_call>") == 6 }},
		{"white space is not held for ever", strings.Repeat(" ", 5000), Hermes, func(m message) bool { return len(m.Text) == 5000 }},
		{"a header too long is text", "<|channel|>" + strings.Repeat("a", 1000), GPTOSS, func(m message) bool { return strings.HasSuffix(m.Text, "aaaa") }},
		{"deep elements are text", m3(`#<tool_call>#<invoke name="now">` + strings.Repeat("#<a>", 100) + strings.Repeat("#</a>", 100) + `#</invoke>`), MiniMaxM3, func(m message) bool { return len(m.Calls) == 0 && m.Text != "" }},
		{"deep lists are text", `<|tool_call>call:now{a:` + strings.Repeat("[", 100) + strings.Repeat("]", 100) + `}<tool_call|>`, Gemma4, func(m message) bool { return len(m.Calls) == 0 && m.Text != "" }},
	} {
		pieces := []string{tt.text}
		for _, pieces := range [][]string{pieces, runes(tt.text, 4096)} {
			if m := parse(t, tt.f, testTools, Options{}, pieces); !tt.want(m) {
				t.Errorf("%s: got %d bytes of text, %d calls, truncated %v", tt.name, len(m.Text), len(m.Calls), m.Truncated)
			}
		}
	}
}

// fuzz feeds an answer in two ways of cutting, which must agree.
func fuzz(f *testing.F, families ...Family) {
	for _, tt := range parseCases {
		if tt.f == families[0] {
			f.Add(tt.text, uint64(1), tt.opt.InReasoning)
		}
	}
	f.Fuzz(func(t *testing.T, text string, seed uint64, inside bool) {
		for _, family := range families {
			opt := Options{InReasoning: inside, NoCalls: seed%8 == 0}
			whole := parse(t, family, testTools, opt, []string{text})
			if got := parse(t, family, testTools, opt, randomCuts(text, rand.New(rand.NewPCG(seed, 1)))); !reflect.DeepEqual(got, whole) {
				t.Fatalf("%s: %q cut gives\n%+v, whole\n%+v", family, text, got, whole)
			}
			if n := len(fmt.Sprint(whole)); n > 8*len(text)+200 {
				t.Fatalf("%s: %d bytes of %d", family, n, len(text))
			}
		}
	})
}

func FuzzHermes(f *testing.F)     { fuzz(f, Hermes) }
func FuzzQwen3Coder(f *testing.F) { fuzz(f, Qwen3Coder) }
func FuzzLlama3(f *testing.F)     { fuzz(f, Llama3) }
func FuzzLlama4(f *testing.F)     { fuzz(f, Llama4) }
func FuzzMistral(f *testing.F)    { fuzz(f, Mistral) }
func FuzzMistralArg(f *testing.F) { fuzz(f, MistralArg) }
func FuzzDeepSeekV3(f *testing.F) { fuzz(f, DeepSeekV3, DeepSeek31) }
func FuzzDeepSeek32(f *testing.F) { fuzz(f, DeepSeek32, DeepSeekV4) }
func FuzzGPTOSS(f *testing.F)     { fuzz(f, GPTOSS) }
func FuzzGemma4(f *testing.F)     { fuzz(f, Gemma4) }
func FuzzGLM4(f *testing.F)       { fuzz(f, GLM4) }
func FuzzKimiK2(f *testing.F)     { fuzz(f, KimiK2) }
func FuzzMiniMaxM2(f *testing.F)  { fuzz(f, MiniMaxM2) }
func FuzzMiniMaxM3(f *testing.F)  { fuzz(f, MiniMaxM3) }
func FuzzNone(f *testing.F)       { fuzz(f, None) }
