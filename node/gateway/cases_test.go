package gateway

import (
	"bytes"
	"encoding/json"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"reflect"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

// The tests named TestCaseNN… are the cases that clients were seen to fail on,
// each with what it must give.

// qwen is a template in the style of Qwen 3: tools, calls, results, thinking. Like
// its models, it refuses a system message that is not the first.
const qwen = `{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}<tools>
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
</tools>
Answer with <tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call><|im_end|>
{% endif %}
{%- for m in messages %}
{%- if m.role == 'system' %}
{%- if not loop.first %}{{ raise_exception('System message must be at the beginning.') }}{% endif %}
{%- if not tools %}<|im_start|>system
{{ m.content }}<|im_end|>
{% endif %}
{%- elif m.role == 'assistant' %}<|im_start|>assistant
{% if m.reasoning_content %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content }}
{%- for c in m.tool_calls %}
<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% elif m.role == 'tool' %}<|im_start|>user
<tool_response>
{{ m.content }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% endif %}{% endif %}`

// asked is the end of qwen's prompts.
const asked = "<|im_start|>assistant\n"

// serveCases serves the model "qwen" and its twin "opener", whose prompt ends
// inside a block of thinking.
func serveCases(t testing.TB, e *scriptEngine, change func(*Config)) (url string, g *Gateway) {
	t.Helper()
	var n atomic.Uint64
	cfg := Config{
		Models: []Model{
			{ID: "qwen", Created: time.Unix(1, 0), ChatTemplate: qwen, VocabSize: 100, Engine: e.engine(), Aliases: []string{"claude-haiku-*", "q"}},
			{ID: "opener", ChatTemplate: strings.TrimSuffix(qwen, "{% endif %}") + "{% if add_generation_prompt %}<think>\n{% endif %}{% endif %}", VocabSize: 100, Engine: e.engine()},
		},
		Now:    func() time.Time { return time.Unix(1700000000, 0) },
		Random: func() uint64 { return n.Add(1) },
	}
	if change != nil {
		change(&cfg)
	}
	g, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	srv := httptest.NewServer(g.Handler())
	t.Cleanup(func() {
		http.DefaultClient.CloseIdleConnections() // else Close waits for those that were never used
		srv.Close()
		waitFor(t, "every generation ends", func() bool { return e.running() == 0 })
	})
	return srv.URL, g
}

// call sends a request; headers are pairs. A body makes it a POST.
func send(t testing.TB, url, body string, headers ...string) (int, http.Header, string) {
	t.Helper()
	method := http.MethodGet
	if body != "" {
		method = http.MethodPost
	}
	return sendAs(t, method, url, strings.NewReader(body), headers...)
}

func sendAs(t testing.TB, method, url string, body io.Reader, headers ...string) (int, http.Header, string) {
	t.Helper()
	req, err := http.NewRequest(method, url, body)
	if err != nil {
		t.Fatal(err)
	}
	for i := 0; i < len(headers); i += 2 {
		req.Header.Set(headers[i], headers[i+1])
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, resp.Header, string(data)
}

// object decodes JSON that must be an object.
func object(t testing.TB, body string) map[string]any {
	t.Helper()
	var m map[string]any
	if err := json.Unmarshal([]byte(body), &m); err != nil {
		t.Fatalf("%v in %q", err, body)
	}
	return m
}

// at walks into decoded JSON by keys and indices; what is not there is nil.
func at(v any, path ...any) any {
	for _, p := range path {
		switch p := p.(type) {
		case string:
			m, _ := v.(map[string]any)
			v = m[p]
		case int:
			l, _ := v.([]any)
			if p >= len(l) {
				return nil
			}
			v = l[p]
		}
	}
	return v
}

// want compares decoded JSON with JSON.
func want(t testing.TB, what string, got any, expected string) {
	t.Helper()
	var v any
	if err := json.Unmarshal([]byte(expected), &v); err != nil {
		t.Fatalf("%s: %v in %s", what, err, expected)
	}
	if !reflect.DeepEqual(got, v) {
		data, err := json.Marshal(got)
		t.Errorf("%s is %s (%v), want %s", what, data, err, expected)
	}
}

// ask posts a body that must be answered with 200.
func ask(t testing.TB, url, body string, headers ...string) map[string]any {
	t.Helper()
	status, _, text := send(t, url, body, headers...)
	if status != 200 {
		t.Fatalf("status %d for %s: %s", status, body, text)
	}
	return object(t, text)
}

// sse is a server-sent event.
type sse struct {
	name string
	data map[string]any
}

// stream posts a body that must be answered with a stream, and splits it. Of
// unnamed events the last must be [DONE]; named ones have the name in their data.
func stream(t testing.TB, url, body string, headers ...string) []sse {
	t.Helper()
	status, header, text := send(t, url, body, headers...)
	if status != 200 || header.Get("Content-Type") != "text/event-stream" {
		t.Fatalf("status %d, %s: %s", status, header.Get("Content-Type"), text)
	}
	return splitEvents(t, text)
}

func splitEvents(t testing.TB, text string) (out []sse) {
	t.Helper()
	done := false
	for part := range strings.SplitSeq(strings.TrimSuffix(text, "\n\n"), "\n\n") {
		var e sse
		for line := range strings.SplitSeq(part, "\n") {
			if line == ": keep-alive" {
				continue
			}
			if name, ok := strings.CutPrefix(line, "event: "); ok {
				e.name = name
				continue
			}
			data, ok := strings.CutPrefix(line, "data: ")
			if !ok || done {
				t.Fatalf("line %q (done %v) in %q", line, done, text)
			}
			if data == "[DONE]" {
				done = true
				continue
			}
			e.data = object(t, data)
			if e.name != "" && e.data["type"] != e.name {
				t.Fatalf("event %q has the type %v", e.name, e.data["type"])
			}
			out = append(out, e)
		}
	}
	if len(out) == 0 || (out[0].name == "") != done {
		t.Fatalf("stream has no end: %q", text)
	}
	return out
}

// cut splits a text into pieces of n bytes, or of 1 to 7 for n = 0.
func cut(text string, n int) (pieces []string) {
	for len(text) > 0 {
		k := n
		if n == 0 {
			k = 1 + rand.IntN(7)
		}
		k = min(k, len(text))
		pieces, text = append(pieces, text[:k]), text[k:]
	}
	return pieces
}

// body is a request to the model qwen with more fields, given as JSON without
// braces.
func body(more ...string) string {
	return `{` + strings.Join(append([]string{`"model":"qwen","messages":[{"role":"user","content":"hi"}]`}, more...), ",") + `}`
}

// turns is a request of this conversation.
func turnsOf(messages string, more ...string) string {
	return `{` + strings.Join(append([]string{`"model":"qwen","messages":[` + messages + `]`}, more...), ",") + `}`
}

const (
	chatPath     = "/v1/chat/completions"
	messagesPath = "/anthropic/v1/messages"
)

// chatAll is the message of a streamed chat, put together as clients do.
func chatAll(t testing.TB, events []sse) (message map[string]any, finish any) {
	t.Helper()
	message = map[string]any{"role": nil, "content": "", "reasoning_content": "", "tool_calls": []any{}}
	var calls []any
	for _, e := range events {
		delta, _ := at(e.data, "choices", 0, "delta").(map[string]any)
		for key, v := range delta {
			switch key {
			case "role":
				message[key] = v
			case "content", "reasoning_content":
				message[key] = message[key].(string) + v.(string)
			case "tool_calls":
				c := at(v, 0).(map[string]any)
				i := int(c["index"].(float64))
				if i == len(calls) {
					delete(c, "index")
					calls = append(calls, c)
					continue
				}
				fn := at(calls, i, "function").(map[string]any)
				fn["arguments"] = fn["arguments"].(string) + at(c, "function", "arguments").(string)
			}
		}
		if f := at(e.data, "choices", 0, "finish_reason"); f != nil {
			finish = f
		}
	}
	if calls != nil {
		message["tool_calls"] = calls
	}
	return message, finish
}

// plainMessage is a whole message in the shape of chatAll, without ids of calls.
func plainMessage(m map[string]any) map[string]any {
	out := map[string]any{"role": m["role"], "content": m["content"], "reasoning_content": m["reasoning_content"], "tool_calls": []any{}}
	for _, k := range []string{"content", "reasoning_content"} {
		if out[k] == nil {
			out[k] = ""
		}
	}
	if calls, ok := m["tool_calls"].([]any); ok {
		for _, c := range calls {
			delete(c.(map[string]any), "id")
		}
		out["tool_calls"] = calls
	}
	return out
}

func reader(b []byte) io.Reader { return bytes.NewReader(b) }
