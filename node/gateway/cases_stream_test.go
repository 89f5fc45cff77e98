package gateway

import (
	"context"
	"errors"
	"net/http"
	"reflect"
	"strings"
	"testing"
	"time"
)

func TestCase30Chunks(t *testing.T) {
	url, _ := serveCases(t, &scriptEngine{pieces: cut("<think>\nhm\n</think>\n\nSo: "+weatherCall, 3)}, nil)
	_, _, text := send(t, url+chatPath, body(weatherTool, `"stream":true`))
	events := splitEvents(t, text)
	for i, e := range events {
		if e.data["id"] != events[0].data["id"] || e.data["object"] != "chat.completion.chunk" {
			t.Errorf("chunk %d: %v", i, e.data)
		}
		want(t, "index", at(e.data, "choices", 0, "index"), `0`)
		role, hasRole := at(e.data, "choices", 0, "delta").(map[string]any)["role"]
		if hasRole != (i == 0) || hasRole && role != "assistant" {
			t.Errorf("chunk %d: role %v", i, role)
		}
		if finish := at(e.data, "choices", 0, "finish_reason"); (finish != nil) != (i == len(events)-1) {
			t.Errorf("chunk %d: finish_reason %v", i, finish)
		}
	}
	if strings.Contains(text, "event:") || strings.Contains(text, "None") {
		t.Error("only data lines belong there")
	}
}

func TestCase31Usage(t *testing.T) {
	url, _ := serveCases(t, &scriptEngine{pieces: []string{"a", "b"}, cached: 7}, nil)
	events := stream(t, url+chatPath, body(`"stream":true,"stream_options":{"include_usage":true}`))
	for i, e := range events {
		usage, there := e.data["usage"]
		if last := i == len(events)-1; !there || (usage != nil) != last {
			t.Errorf("chunk %d: usage %v", i, usage)
		}
	}
	last := events[len(events)-1].data
	want(t, "choices", last["choices"], `[]`)
	want(t, "cached", at(last, "usage", "prompt_tokens_details", "cached_tokens"), `7`)
	want(t, "completion", at(last, "usage", "completion_tokens"), `2`)
	for _, e := range stream(t, url+chatPath, body(`"stream":true,"stream_options":{"include_usage":false}`)) {
		if _, there := e.data["usage"]; there || len(e.data["choices"].([]any)) == 0 {
			t.Errorf("chunk %v", e.data)
		}
	}
}

func TestCase32ToolDeltas(t *testing.T) {
	url, _ := serveCases(t, &scriptEngine{pieces: cut(weatherCall, 4)}, nil)
	n := 0
	for _, e := range stream(t, url+chatPath, body(weatherTool, `"stream":true`)) {
		c, ok := at(e.data, "choices", 0, "delta", "tool_calls", 0).(map[string]any)
		if !ok {
			continue
		}
		if n++; n == 1 {
			if id, _ := c["id"].(string); !strings.HasPrefix(id, "call_") {
				t.Errorf("id %v", c["id"])
			}
			delete(c, "id")
			want(t, "first", any(c), `{"index":0,"type":"function","function":{"name":"get_weather","arguments":""}}`)
			continue
		}
		fn := c["function"].(map[string]any)
		if arguments, _ := fn["arguments"].(string); len(c) != 2 || len(fn) != 1 || arguments == "" {
			t.Errorf("delta %v", c)
		}
	}
	if n < 2 {
		t.Errorf("%d deltas of calls", n)
	}
}

func TestCase33ParallelCalls(t *testing.T) {
	e := &scriptEngine{pieces: cut(weatherCall+"\n"+strings.Replace(weatherCall, "Paris", "Ürümqi", 1), 3)}
	url, _ := serveCases(t, e, nil)
	m, finish := chatAll(t, stream(t, url+chatPath, body(weatherTool, `"stream":true`)))
	calls := m["tool_calls"].([]any)
	if len(calls) != 2 || at(calls, 0, "id") == at(calls, 1, "id") || finish != "tool_calls" {
		t.Fatalf("calls %v, %v", calls, finish)
	}
	sameJSON(t, "first", at(calls, 0, "function", "arguments"), weatherArgs)
	sameJSON(t, "second", at(calls, 1, "function", "arguments"), strings.Replace(weatherArgs, "Paris", "Ürümqi", 1))
	one := ask(t, url+chatPath, body(weatherTool, `"parallel_tool_calls":false`))
	if calls := at(one, "choices", 0, "message", "tool_calls").([]any); len(calls) != 1 || at(one, "choices", 0, "finish_reason") != "tool_calls" {
		t.Errorf("without parallel calls: %v", one)
	}
}

// rawAnswers are answers with all that a parser has to see.
var rawAnswers = []string{
	"plain 😀 text",
	"<think>\nlet me see\n</think>\n\nSo:\n" + weatherCall,
	weatherCall + "\n" + strings.Replace(weatherCall, "Paris", `Ürümqi \"x\" <tool_call>`, 1),
	"no call: <tool_call> is a word, a < b </think>",
	"<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": ",
	"<tool_call>\nnot json\n</tool_call> and on",
	"<tool_call>\n{\"name\": \"nobody\", \"arguments\": {}}\n</tool_call>",
}

func TestCase34AnyCut(t *testing.T) {
	for _, raw := range rawAnswers {
		e := &scriptEngine{pieces: []string{raw}}
		url, _ := serveCases(t, e, nil)
		m := ask(t, url+chatPath, body(weatherTool))
		message, reason := plainMessage(at(m, "choices", 0, "message").(map[string]any)), at(m, "choices", 0, "finish_reason")
		for _, n := range []int{1, 2, 5, 0, 0, 0} {
			e.pieces = cut(raw, n)
			again := ask(t, url+chatPath, body(weatherTool))
			if got := plainMessage(at(again, "choices", 0, "message").(map[string]any)); !reflect.DeepEqual(got, message) {
				t.Errorf("%q in pieces of %d: %v, want %v", raw, n, got, message)
			}
			got, finish := chatAll(t, stream(t, url+chatPath, body(weatherTool, `"stream":true`)))
			if got := plainMessage(got); !reflect.DeepEqual(got, message) || finish != reason {
				t.Errorf("%q streamed in pieces of %d: %v %v, want %v %v", raw, n, got, finish, message, reason)
			}
		}
	}
}

func TestCase35SplitEmoji(t *testing.T) {
	url, _ := serveCases(t, &scriptEngine{pieces: []string{"a\xf0\x9f", "\x98\x80", "b"}}, nil)
	_, _, text := send(t, url+chatPath, body(`"stream":true`))
	if m, _ := chatAll(t, splitEvents(t, text)); m["content"] != "a😀b" || strings.Contains(text, "\uFFFD") || strings.Contains(text, `\ufffd`) {
		t.Errorf("content %q in %q", m["content"], text)
	}
}

// A long wait, for the first token or while a call is held back, is filled.
func TestCase36KeepAlive(t *testing.T) {
	tests := []struct {
		name string
		e    *scriptEngine
	}{
		{"prefill", &scriptEngine{pieces: []string{"a"}, delay: 150 * time.Millisecond}},
		{"held call", &scriptEngine{pieces: cut(weatherCall, 2), delay: 5 * time.Millisecond}},
	}
	marks := map[string]string{chatPath: ": keep-alive\ndata: ", messagesPath: "event: ping\n", "/v1/responses": "event: response.in_progress\n"}
	for _, tt := range tests {
		for path, mark := range marks {
			url, g := serveCases(t, tt.e, nil)
			g.waits.header, g.waits.ping = time.Millisecond, 20*time.Millisecond
			tools := weatherTool
			if path != chatPath {
				tools = `"tools":[{"type":"function","name":"get_weather","input_schema":{"type":"object"}}]`
			}
			_, _, text := send(t, url+path, body(tools, `"stream":true,"max_tokens":99,"input":"hi"`))
			if n := strings.Count(text, mark); n < 2 {
				t.Errorf("%s, %s: %d signs of life in %q", tt.name, path, n, text)
			}
			if path == chatPath {
				splitEvents(t, text)
				if strings.Contains(text, ": keep-alive\n\n") {
					t.Error("a comment must not end an event")
				}
			}
		}
	}
}

func TestCase37EngineDies(t *testing.T) {
	url, _ := serveCases(t, &scriptEngine{pieces: []string{"a"}, nextErr: errors.New("layer 3 is gone")}, nil)
	_, _, text := send(t, url+chatPath, body(`"stream":true`))
	events := splitEvents(t, text)
	last := events[len(events)-1].data
	want(t, "error", last["error"], `{"message":"layer 3 is gone","type":"server_error","param":null,"code":"engine_failed"}`)
	if !strings.HasSuffix(text, "data: [DONE]\n\n") || strings.Contains(text, `"finish_reason":"stop"`) || strings.Contains(text, "\nerror:") {
		t.Errorf("stream %q", text)
	}
}

// A client that closes ends its work, whether it waits or decodes.
func TestCase38ClientCloses(t *testing.T) {
	for _, pieces := range [][]string{nil, {"a", "b"}} { // in queue or prefill; in decode
		for _, path := range []string{chatPath, messagesPath, "/v1/responses", "/v1/completions"} {
			e := &scriptEngine{pieces: pieces, block: true}
			url, g := serveCases(t, e, nil)
			g.waits.header = time.Millisecond
			request := body(`"stream":true,"max_tokens":99,"input":"hi"`)
			if path == "/v1/completions" {
				request = `{"model":"qwen","prompt":"hi","stream":true}`
			}
			ctx, cancel := context.WithCancel(t.Context())
			req, err := http.NewRequestWithContext(ctx, http.MethodPost, url+path,
				strings.NewReader(request))
			if err != nil {
				t.Fatal(err)
			}
			resp, err := http.DefaultClient.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			if e.running() != 1 {
				t.Errorf("%s: %d run", path, e.running())
			}
			cancel()
			resp.Body.Close()
			start := time.Now()
			waitFor(t, "the work ends", func() bool { return e.running() == 0 && len(g.requests) == 0 })
			if took := time.Since(start); took > time.Second {
				t.Errorf("%s: ended after %v", path, took)
			}
		}
	}
}

func TestCase39Reasoning(t *testing.T) {
	e := &scriptEngine{pieces: cut("<think>\nhm, so\n</think>\n\nyes", 3)}
	url, _ := serveCases(t, e, nil)
	m, _ := chatAll(t, stream(t, url+chatPath, body(`"stream":true`)))
	if strings.TrimSpace(m["reasoning_content"].(string)) != "hm, so" || m["content"] != "yes" {
		t.Errorf("streamed %v", m)
	}
	opened := &scriptEngine{pieces: cut("hm, so\n</think>\n\nyes", 3)}
	url2, _ := serveCases(t, opened, nil)
	whole := ask(t, url2+chatPath, strings.Replace(body(), "qwen", "opener", 1))
	if m := at(whole, "choices", 0, "message").(map[string]any); strings.TrimSpace(m["reasoning_content"].(string)) != "hm, so" || m["content"] != "yes" {
		t.Errorf("prompt that opens the block: %v", m)
	}
	if n := at(whole, "usage", "completion_tokens_details", "reasoning_tokens").(float64); n < 2 || n > 6 {
		t.Errorf("%v reasoning tokens", n)
	}
	for _, name := range []string{"reasoning_content", "reasoning"} {
		ask(t, url+chatPath, turnsOf(`{"role":"user","content":"a"},{"role":"assistant","content":"b","`+name+`":"because"},{"role":"user","content":"c"}`))
		if !strings.Contains(e.prompt(), "<think>\nbecause\n</think>\n\nb<|im_end|>") {
			t.Errorf("%s: prompt %q", name, e.prompt())
		}
	}
}

func TestCase40BrokenCalls(t *testing.T) {
	for _, raw := range []string{"<tool_call>\nnot json\n</tool_call>", "well, <tool_call> is a word"} {
		url, _ := serveCases(t, &scriptEngine{pieces: cut(raw, 3)}, nil)
		m, finish := chatAll(t, stream(t, url+chatPath, body(weatherTool, `"stream":true`)))
		if strings.TrimSpace(m["content"].(string)) != raw || finish != "stop" {
			t.Errorf("%q gives %v, %v", raw, m, finish)
		}
	}
	url, _ := serveCases(t, &scriptEngine{pieces: cut("<tool_call>\nnot json\n</tool_call>\n"+weatherCall, 3)}, nil)
	m, finish := chatAll(t, stream(t, url+chatPath, body(weatherTool, `"stream":true`)))
	if at(m, "tool_calls", 0, "function", "name") != "get_weather" || finish != "tool_calls" {
		t.Errorf("the good call is lost: %v, %v", m, finish)
	}
}
