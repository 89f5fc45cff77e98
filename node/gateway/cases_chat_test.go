package gateway

import (
	"fmt"
	"reflect"
	"strings"
	"testing"
)

const (
	weatherCall = `<tool_call>
{"name": "get_weather", "arguments": {"city": "Paris", "days": 2, "now": true}}
</tool_call>`
	weatherArgs = `{"city": "Paris", "days": 2, "now": true}`
)

// sameJSON compares texts of JSON by value.
func sameJSON(t testing.TB, what string, got any, expected string) {
	t.Helper()
	text, _ := got.(string)
	if text == "" {
		t.Errorf("%s is %v, want %s", what, got, expected)
		return
	}
	want(t, what, object(t, text), expected)
}

// refusal posts a body that must be refused with 400, and gives param and
// message.
func refusal(t testing.TB, url, request string) (param, message string) {
	t.Helper()
	status, _, text := send(t, url, request)
	e := at(object(t, text), "error")
	if status != 400 || e == nil {
		t.Fatalf("status %d, want 400 for %s: %s", status, request, text)
	}
	param, _ = at(e, "param").(string)
	return param, at(e, "message").(string)
}

func TestCase13Parts(t *testing.T) {
	e := &scriptEngine{}
	url, _ := serveCases(t, e, nil)
	for _, path := range []string{chatPath, messagesPath} {
		ask(t, url+path, turnsOf(`{"role":"user","content":"x"}`, `"max_tokens":1`))
		one := e.prompt()
		ask(t, url+path, turnsOf(`{"role":"user","content":[{"type":"text","text":"x"}]}`, `"max_tokens":1`))
		if one != e.prompt() || !strings.Contains(one, "user\nx<") {
			t.Errorf("%s: %q and %q", path, one, e.prompt())
		}
	}
}

func TestCase14NullContent(t *testing.T) {
	e := &scriptEngine{}
	url, _ := serveCases(t, e, nil)
	ask(t, url+chatPath, turnsOf(`{"role":"user","content":"x"},{"role":"assistant","content":null,"tool_calls":[{"id":"c1","type":"function",
		"function":{"name":"f","arguments":"{}"}}]},{"role":"tool","tool_call_id":"c1","content":"r"}`))
	if got := e.prompt(); strings.Contains(got, "None") || !strings.Contains(got, "assistant\n<tool_call>") {
		t.Errorf("prompt %q", got)
	}
}

func TestCase15Arguments(t *testing.T) {
	e := &scriptEngine{}
	url, _ := serveCases(t, e, nil)
	history := func(arguments string) string {
		return turnsOf(`{"role":"user","content":"x"},{"role":"assistant","tool_calls":[{"id":"c1","type":"function","function":{"name":"f","arguments":` +
			arguments + `}}]},{"role":"tool","tool_call_id":"c1","content":"r"}`)
	}
	for arguments, want := range map[string]string{
		`"{\"z\":1,\"a\":[true,null,\"<é>\"]}"`: `"arguments": {"z": 1, "a": [true, null, "<é>"]}}`, // the client's order
		`null`:                                  `"arguments": {}}`, `""`: `"arguments": {}}`, `"null"`: `"arguments": {}}`,
	} {
		ask(t, url+chatPath, history(arguments))
		if !strings.Contains(e.prompt(), want) {
			t.Errorf("%s: prompt %q has no %s", arguments, e.prompt(), want)
		}
	}
	for _, arguments := range []string{`"{\"a\":"`, `"[1]"`, `7`} {
		if param, message := refusal(t, url+chatPath, history(arguments)); param != "messages[1].tool_calls[0].function.arguments" ||
			!strings.Contains(message, "messages[1]") {
			t.Errorf("%s: %s %s", arguments, param, message)
		}
	}
}

func TestCase16System(t *testing.T) {
	e := &scriptEngine{}
	url, _ := serveCases(t, e, nil)
	merged := "<|im_start|>system\none\n\ntwo\n\nthree<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n" + asked
	chat := turnsOf(`{"role":"system","content":"one"},{"role":"developer","content":"two"},{"role":"user","content":"hi"},{"role":"system","content":"three"}`)
	ask(t, url+chatPath, chat)
	if e.prompt() != merged {
		t.Errorf("chat: %q", e.prompt())
	}
	ask(t, url+messagesPath, turnsOf(`{"role":"user","content":"hi"},{"role":"system","content":"two"},{"role":"system","content":[{"type":"text","text":"three"}]}`,
		`"system":"one","max_tokens":1`))
	if e.prompt() != merged {
		t.Errorf("messages: %q", e.prompt())
	}
	ask(t, url+"/v1/responses", `{"model":"qwen","instructions":"one","input":[{"role":"developer","content":"two"},{"role":"user","content":"hi"},{"role":"system","content":"three"}]}`)
	if e.prompt() != merged {
		t.Errorf("responses: %q", e.prompt())
	}
}

func TestCase17MaxTokens(t *testing.T) {
	e := &scriptEngine{}
	url, _ := serveCases(t, e, nil)
	for fields, want := range map[string]int{
		`"max_tokens":5`: 5, `"max_completion_tokens":5`: 5, `"max_tokens":5,"max_completion_tokens":7`: 7, `"n":1`: 0,
	} {
		if ask(t, url+chatPath, body(fields)); e.request().MaxTokens != want {
			t.Errorf("%s: %d", fields, e.request().MaxTokens)
		}
	}
}

func TestCase18ToolChoice(t *testing.T) {
	e := &scriptEngine{pieces: cut("So:"+weatherCall, 5), able: &Abilities{Grammar: true}}
	url, _ := serveCases(t, e, nil)
	calls := func(fields ...string) any {
		return at(ask(t, url+chatPath, body(fields...)), "choices", 0, "message", "tool_calls", 0, "function", "name")
	}
	m := ask(t, url+chatPath, body(`"tool_choice":"none"`, weatherTool))
	want(t, "none", at(m, "choices", 0, "message", "content"), `"So:"`)
	want(t, "none", at(m, "choices", 0, "finish_reason"), `"stop"`)
	if strings.Contains(e.prompt(), "get_weather") || e.extra.Grammar != "" {
		t.Errorf("none: the prompt has the tools: %q", e.prompt())
	}
	want(t, "auto", calls(`"tool_choice":"auto"`, weatherTool), `"get_weather"`)
	if e.extra.Grammar != "" && len(e.extra.Triggers) == 0 {
		t.Error("auto: a call is forced")
	}
	two := strings.TrimSuffix(weatherTool, "]") + `,{"type":"function","function":{"name":"other"}}]`
	want(t, "required", calls(`"tool_choice":"required"`, two), `"get_weather"`)
	if g := e.extra.Grammar; !strings.Contains(g, "get_weather") || !strings.Contains(g, "other") || len(e.extra.Triggers) > 0 {
		t.Errorf("required: grammar %q, triggers %q", g, e.extra.Triggers)
	}
	want(t, "named", calls(`"tool_choice":{"type":"function","function":{"name":"get_weather"}}`, two), `"get_weather"`)
	if g := e.extra.Grammar; !strings.Contains(g, "get_weather") || strings.Contains(g, "other") {
		t.Errorf("named: grammar %q", g)
	}
	if param, _ := refusal(t, url+chatPath, body(`"tool_choice":{"type":"function","function":{"name":"nobody"}}`, two)); param != "tool_choice" {
		t.Errorf("unknown name: param %s", param)
	}
	ask(t, url+chatPath, body(`"tool_choice":"required"`, `"tools":[]`))
	ask(t, url+chatPath, body(`"tool_choice":{"type":"function","function":{"name":"nobody"}}`))
}

func TestCase19FinishReason(t *testing.T) {
	e := &scriptEngine{pieces: cut(weatherCall, 5), able: &Abilities{Grammar: true}}
	url, _ := serveCases(t, e, nil)
	for _, choice := range []string{`"auto"`, `"required"`, `{"type":"function","function":{"name":"get_weather"}}`} {
		m := ask(t, url+chatPath, body(`"tool_choice":`+choice, weatherTool))
		want(t, choice, at(m, "choices", 0, "finish_reason"), `"tool_calls"`)
		want(t, "content", at(m, "choices", 0, "message", "content"), `null`)
	}
}

func TestCase20CutCall(t *testing.T) {
	for _, end := range []string{"length", "stop"} {
		e := &scriptEngine{pieces: cut(weatherCall[:len(weatherCall)-30], 3), finish: end}
		url, _ := serveCases(t, e, nil)
		whole := ask(t, url+chatPath, body(weatherTool))
		want(t, "finish reason", at(whole, "choices", 0, "finish_reason"), `"length"`)
		streamed, finish := chatAll(t, stream(t, url+chatPath, body(weatherTool, `"stream":true`)))
		want(t, "finish reason of the stream", finish, `"length"`)
		message := at(whole, "choices", 0, "message").(map[string]any)
		if a, b := plainMessage(message), plainMessage(streamed); !reflect.DeepEqual(a, b) {
			t.Errorf("whole %v, streamed %v", a, b)
		}
	}
}

func TestCase21NoArguments(t *testing.T) {
	for _, raw := range []string{`{"name": "get_weather", "arguments": {}}`, `{"name": "get_weather"}`} {
		e := &scriptEngine{pieces: cut("<tool_call>\n"+raw+"\n</tool_call>", 4)}
		url, _ := serveCases(t, e, nil)
		m := ask(t, url+chatPath, body(weatherTool))
		want(t, raw, at(m, "choices", 0, "message", "tool_calls", 0, "function", "arguments"), `"{}"`)
		streamed, _ := chatAll(t, stream(t, url+chatPath, body(weatherTool, `"stream":true`)))
		want(t, raw, at(streamed, "tool_calls", 0, "function", "arguments"), `"{}"`)
	}
}

func TestCase22Logprobs(t *testing.T) {
	e := &scriptEngine{pieces: []string{"x\xf0", "\x9f\x98\x80", "y"}, able: &Abilities{Logprobs: true},
		probs: []TokenProb{{Bytes: []byte("x"), Logprob: -0.5}, {Bytes: []byte("\xff"), Logprob: -0.75}, {Logprob: -1}}}
	url, _ := serveCases(t, e, nil)
	expected := func(top string) string {
		return fmt.Sprintf(`[{"token":"x�","logprob":-1,"bytes":[120,240],"top_logprobs":%[1]s},
			{"token":"���","logprob":-2,"bytes":[159,152,128],"top_logprobs":%[1]s},
			{"token":"y","logprob":-3,"bytes":[121],"top_logprobs":%[1]s}]`, top)
	}
	m := ask(t, url+chatPath, body(`"logprobs":true`))
	want(t, "logprobs", at(m, "choices", 0, "logprobs", "content"), expected("[]"))
	two := `[{"token":"x","logprob":-0.5,"bytes":[120]},{"token":"�","logprob":-0.75,"bytes":[255]}]`
	m = ask(t, url+chatPath, body(`"logprobs":true,"top_logprobs":2`))
	want(t, "top_logprobs", at(m, "choices", 0, "logprobs", "content"), expected(two))
	var streamed []any
	for _, ev := range stream(t, url+chatPath, body(`"logprobs":true,"top_logprobs":2,"stream":true`)) {
		if l, ok := at(ev.data, "choices", 0, "logprobs", "content").([]any); ok {
			streamed = append(streamed, l...)
		}
	}
	want(t, "streamed", any(streamed), expected(two))
	want(t, "not asked for", at(ask(t, url+chatPath, body()), "choices", 0, "logprobs"), `null`)
	if param, message := refusal(t, url+chatPath, body(`"top_logprobs":2`)); param != "top_logprobs" || !strings.Contains(message, "logprobs: true") {
		t.Errorf("top_logprobs alone: %s %s", param, message)
	}
}

func TestCase23LegacyLogprobs(t *testing.T) {
	e := &scriptEngine{pieces: []string{"é", "b", "c"}, able: &Abilities{Logprobs: true}, probs: []TokenProb{{Bytes: []byte("z"), Logprob: -0.5}}}
	url, _ := serveCases(t, e, nil)
	request := `{"model":"qwen","prompt":"say","logprobs":1%s}`
	m := ask(t, url+"/v1/completions", fmt.Sprintf(request, ""))
	want(t, "choice", at(m, "choices", 0), `{"text":"ébc","index":0,"finish_reason":"stop","logprobs":{"tokens":["é","b","c"],
		"token_logprobs":[-1,-2,-3],"top_logprobs":[{"z":-0.5},{"z":-0.5},{"z":-0.5}],"text_offset":[0,1,2]}}`)
	if e.prompt() != "say" || e.request().MaxTokens != legacyMaxTokens {
		t.Errorf("prompt %q, %+v", e.prompt(), e.request())
	}
	text, offsets := "", []any{}
	for _, ev := range stream(t, url+"/v1/completions", fmt.Sprintf(request, `,"stream":true`)) {
		text += at(ev.data, "choices", 0, "text").(string)
		if l, ok := at(ev.data, "choices", 0, "logprobs", "text_offset").([]any); ok {
			offsets = append(offsets, l...)
		}
	}
	want(t, "streamed", []any{text, offsets}, `["ébc",[0,1,2]]`)
}

func TestCase24Choices(t *testing.T) {
	e := &scriptEngine{pieces: []string{"a", "b"}}
	url, _ := serveCases(t, e, nil)
	m := ask(t, url+chatPath, body(`"n":2,"seed":5`))
	want(t, "indices", []any{at(m, "choices", 0, "index"), at(m, "choices", 1, "index"), at(m, "choices", 2)}, `[0,1,null]`)
	prompt := at(m, "usage", "prompt_tokens").(float64)
	want(t, "usage", []any{at(m, "usage", "completion_tokens"), at(m, "usage", "total_tokens").(float64) - prompt}, `[4,4]`)
	if prompt != float64(len(e.prompt())) || !reflect.DeepEqual(e.seeds, []uint32{5, 6}) {
		t.Errorf("%v prompt tokens, seeds %v", prompt, e.seeds)
	}
	texts := map[any]string{}
	for _, ev := range stream(t, url+chatPath, body(`"n":2,"stream":true`)) {
		if text, ok := at(ev.data, "choices", 0, "delta", "content").(string); ok {
			texts[at(ev.data, "choices", 0, "index")] += text
		}
	}
	if texts[0.0] != "ab" || texts[1.0] != "ab" {
		t.Errorf("streamed %v", texts)
	}
	if param, _ := refusal(t, url+chatPath, body(`"n":9`)); param != "n" {
		t.Errorf("n = 9: %s", param)
	}
}

func TestCase25Schemas(t *testing.T) {
	e := &scriptEngine{pieces: []string{"{}"}, able: &Abilities{Grammar: true}}
	url, _ := serveCases(t, e, nil)
	form := func(schema string) string {
		return body(`"response_format":{"type":"json_schema","json_schema":{"name":"s","strict":true,"schema":` + schema + `}}`)
	}
	for _, schema := range []string{
		`{"type":"object","properties":{"a":{"$ref":"#/$defs/n"}},"$defs":{"n":{"type":"object","properties":{"n":{"$ref":"#/$defs/n"}},"additionalProperties":false}}}`,
		`{"type":"object","properties":{"a":{"type":"string","maxLength":2000}},"required":["a"]}`,
		`{"type":"object","properties":{"a":{"type":"string","pattern":"^a+$"}}}`,
		`{"type":"object","properties":{"a":{"type":"string","pattern":"(?=x)y"}}}`,
		`{"type":"object","not":{"required":["a"]}}`,
		`{"type":"object","patternProperties":{"^a":{"type":"string"}}}`,
		`{"type":"object","properties":{"a":{"$ref":"#/nowhere"}}}`,
	} {
		e.extra = Extra{}
		status, _, text := send(t, url+chatPath, form(schema))
		param, _ := at(object(t, text), "error", "param").(string)
		switch {
		case status == 200 && e.extra.Grammar != "" && len(e.extra.Triggers) == 0:
		case status == 400 && strings.HasPrefix(param, "response_format"):
		default:
			t.Errorf("%s: %d %s, grammar %q: neither enforced nor refused", schema, status, text, e.extra.Grammar)
		}
	}
	if status, _, _ := send(t, url+chatPath, form(`{"type":"object","not":{}}`)); status != 400 {
		t.Errorf("not: status %d; it cannot be enforced", status)
	}
	ask(t, url+chatPath, body(`"response_format":{"type":"json_object"}`))
	if !strings.Contains(e.extra.Grammar, "root") {
		t.Errorf("json_object: grammar %q", e.extra.Grammar)
	}
	tools := make([]string, 60)
	for i := range tools {
		tools[i] = fmt.Sprintf(`{"type":"function","function":{"name":"f%d","parameters":{"type":"object","properties":{"a":{"type":"string"}}}}}`, i)
	}
	ask(t, url+chatPath, body(`"tool_choice":"required","tools":[`+strings.Join(tools, ",")+`]`))
	if !strings.Contains(e.extra.Grammar, "f59") {
		t.Errorf("60 tools: grammar %.200q", e.extra.Grammar)
	}
}

func TestCase26HardToolSchemas(t *testing.T) {
	e := &scriptEngine{pieces: cut(weatherCall, 5), able: &Abilities{Grammar: true}}
	url, _ := serveCases(t, e, nil)
	schema := `{"type":"object","properties":{"city":{"type":"string","pattern":"(?=x)y","maxLength":100000},"o":{"not":{}},"r":{"$ref":"#/$defs/r"}},` +
		`"patternProperties":{"^x":{}},"$defs":{"r":{"type":"object","properties":{"r":{"$ref":"#/$defs/r"}}}}}`
	m := ask(t, url+messagesPath, body(`"max_tokens":99`, `"tools":[{"name":"get_weather","input_schema":`+schema+`}]`))
	want(t, "name", at(m, "content", 0, "name"), `"get_weather"`)
	m = ask(t, url+messagesPath, body(`"max_tokens":99`, `"tool_choice":{"type":"any"}`, `"tools":[{"name":"get_weather","input_schema":`+schema+`}]`))
	want(t, "name", at(m, "content", 0, "name"), `"get_weather"`)
	if e.extra.Grammar == "" {
		t.Error("a forced call has no grammar")
	}
}

func TestCase27SplitStops(t *testing.T) {
	for _, n := range []int{1, 2, 3, 0} {
		e := &scriptEngine{pieces: cut("one </s two </stop> three", n)}
		url, _ := serveCases(t, e, nil)
		for _, path := range []string{chatPath} {
			events := stream(t, url+path, body(`"stop":["</stop>","zzz"],"stream":true`))
			m, finish := chatAll(t, events)
			want(t, "text", m["content"], `"one </s two "`)
			want(t, "finish reason", finish, `"stop"`)
		}
	}
}

func TestCase28Prefill(t *testing.T) {
	e := &scriptEngine{pieces: []string{"</think>", "fin", "ed"}}
	url, _ := serveCases(t, e, nil)
	last := `{"role":"user","content":"hi"},{"role":"assistant","content":"I re"}`
	ask(t, url+chatPath, turnsOf(last))
	if !strings.HasSuffix(e.prompt(), asked+"I re") {
		t.Errorf("prompt %q", e.prompt())
	}
	e.pieces = []string{"fin", "ed"}
	for _, model := range []string{"qwen", "opener"} {
		m := ask(t, url+chatPath, strings.Replace(turnsOf(last), "qwen", model, 1))
		want(t, model, at(m, "choices", 0, "message", "content"), `"fined"`)
	}
	if !strings.HasSuffix(e.prompt(), "<think>\n\n</think>\n\nI re") {
		t.Errorf("prompt with thinking %q", e.prompt())
	}
}

func TestCase29Overflow(t *testing.T) {
	e := &scriptEngine{startErr: tooLong{}}
	url, _ := serveCases(t, e, nil)
	for _, s := range []string{"true", "false"} {
		status, header, text := send(t, url+chatPath, body(`"stream":`+s))
		m := object(t, text)
		if status != 400 || at(m, "error", "code") != "context_length_exceeded" || header.Get("Content-Type") != "application/json" ||
			!strings.Contains(text, "900") || !strings.Contains(text, "512") {
			t.Errorf("stream %s: %d %s", s, status, text)
		}
	}
}
