package gateway

import (
	"fmt"
	"strings"
	"testing"
)

func TestCompletions(t *testing.T) {
	e := &scriptEngine{pieces: []string{"a", "b"}}
	url, _ := serveCases(t, e, nil)
	path := url + "/v1/completions"
	m := ask(t, path, `{"model":"q","prompt":["one","two"],"n":2,"max_tokens":5}`)
	want(t, "model", []any{m["object"], m["model"]}, `["text_completion","qwen"]`)
	for i := range 4 {
		want(t, "choice", at(m, "choices", i), fmt.Sprintf(`{"text":"ab","index":%d,"logprobs":null,"finish_reason":"stop"}`, i))
	}
	want(t, "usage", at(m, "usage", "total_tokens"), `14`) // two prompts of 3, four answers of 2
	if e.request().MaxTokens != 5 {
		t.Errorf("max tokens %d", e.request().MaxTokens)
	}
	texts, events := map[any]string{}, stream(t, path, `{"model":"q","prompt":[[1,2],[3]],"stream":true,"stream_options":{"include_usage":true}}`)
	for _, ev := range events {
		if text, ok := at(ev.data, "choices", 0, "text").(string); ok {
			texts[at(ev.data, "choices", 0, "index")] += text
		}
	}
	if texts[0.0] != "ab" || texts[1.0] != "ab" {
		t.Errorf("streamed %v", texts)
	}
	last := events[len(events)-1].data
	want(t, "last chunk", []any{last["choices"], at(last, "usage", "prompt_tokens")}, `[[],3]`)
	for request, param := range map[string]string{
		`"prompt":"x","echo":true`: "echo", `"prompt":"x","suffix":"y"`: "suffix", `"prompt":"x","best_of":2`: "best_of", `"prompt":"x","logprobs":2`: "logprobs",
		`"prompt":[100]`: "prompt", `"prompt":[]`: "prompt", `"prompt":[1.5]`: "prompt[0]", `"prompt":["a",{}]`: "prompt[1]", `"n":1`: "prompt",
		`"prompt":["a","b","c","d","e"],"n":8`: "prompt", `"prompt":"x","stop":[1]`: "stop", `"prompt":""`: "prompt", `"prompt":"untokenizable"`: "prompt",
	} {
		if got, message := refusal(t, path, `{"model":"qwen",`+request+`}`); got != param {
			t.Errorf("%s: param %q, want %q: %s", request, got, param, message)
		}
	}
	e.startErr = queueFull{}
	if status, header, _ := send(t, path, `{"model":"q","prompt":"x"}`); status != 429 || header.Get("Retry-After") != "2" {
		t.Errorf("queue full: %d", status)
	}
}

// A template that knows no tools gets them as text, so that any model can be
// asked to call.
func TestToolsWithoutTemplate(t *testing.T) {
	e := &scriptEngine{pieces: cut(weatherCall, 3)}
	url, _ := serve(t, e, nil)
	history := `{"role":"system","content":"be brief"},{"role":"user","content":"hi"},{"role":"assistant","content":"so","tool_calls":[
		{"id":"1","function":{"name":"get_weather","arguments":"{\"z\":1,\"a\":2}"}},{"id":"2","function":{"name":"get_weather","arguments":""}}]},
		{"role":"tool","tool_call_id":"1","content":"rain"},{"role":"tool","tool_call_id":"2","content":"sun"}`
	m := ask(t, url+chatPath, strings.Replace(turnsOf(history, weatherTool), "qwen", "kvasir-tiny", 1))
	want(t, "finish reason", at(m, "choices", 0, "finish_reason"), `"tool_calls"`)
	sameJSON(t, "arguments", at(m, "choices", 0, "message", "tool_calls", 0, "function", "arguments"), weatherArgs)
	prompt := e.prompt()
	if !strings.HasPrefix(prompt, "<|im_start|>system\nbe brief\n\nYou may call") || !strings.Contains(prompt, `{"type":"function","function":{"name":"get_weather","description":"of a <city>"`) {
		t.Errorf("prompt %q", prompt)
	}
	end := "<|im_start|>assistant\nso\n<tool_call>\n{\"name\":\"get_weather\",\"arguments\":{\"z\":1,\"a\":2}}\n</tool_call>\n<tool_call>\n{\"name\":\"get_weather\",\"arguments\":{}}\n</tool_call><|im_end|>\n" +
		"<|im_start|>user\n<tool_response>\nrain\n</tool_response>\n<tool_response>\nsun\n</tool_response><|im_end|>\n" + asked
	if !strings.HasSuffix(prompt, end) {
		t.Errorf("prompt %q\nwant %q at the end", prompt, end)
	}
}

// Bodies that would take much memory are refused before they are decoded.
func TestBodyLimits(t *testing.T) {
	url, g := serveCases(t, &scriptEngine{pieces: []string{"a"}}, nil)
	many := `{"model":"qwen","x":[` + strings.Repeat("1,", maxValues) + `1]}`
	if _, message := refusal(t, url+chatPath, many); !strings.Contains(message, "more than 1048576 JSON values") {
		t.Errorf("many values: %s", message)
	}
	if _, message := refusal(t, url+chatPath, body(`"x":`+strings.Repeat("[", 70)+strings.Repeat("]", 70))); !strings.Contains(message, "nested deeper") {
		t.Errorf("deep: %s", message)
	}
	large := body(`"x":"` + strings.Repeat(",", smallBody) + `"`) // commas in a text are no values
	ask(t, url+chatPath, large)
	if len(g.large) != 0 || len(g.preparing) != 0 {
		t.Errorf("%d large bodies, %d in preparation are still held", len(g.large), len(g.preparing))
	}
}
