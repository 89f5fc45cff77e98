package gateway

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http/httptest"
	"reflect"
	"strings"
	"testing"
	"time"
)

// claudeTool is a field of a request in Anthropic's API.
const claudeTool = `"tools":[{"name":"get_weather","description":"of a <city>","input_schema":{"type":"object","properties":{"city":{"type":"string"}},"required":["city"]}}]`

// claudeAll puts a stream together as Anthropic's SDKs do, and is as strict.
func claudeAll(t testing.TB, events []sse) map[string]any {
	t.Helper()
	var message map[string]any
	var content []any
	open, over := false, false
	partial := ""
	for _, e := range events {
		if over {
			t.Fatalf("%s after the end", e.name)
		}
		if index, ok := e.data["index"].(float64); ok && e.name != "content_block_start" && (int(index) != len(content)-1 || !open) {
			t.Fatalf("%s of block %v, %d blocks, open %v", e.name, index, len(content), open)
		}
		switch e.name {
		case "message_start":
			message = e.data["message"].(map[string]any)
		case "content_block_start":
			if int(e.data["index"].(float64)) != len(content) || open {
				t.Fatalf("block %v starts, %d blocks, open %v", e.data["index"], len(content), open)
			}
			open, partial = true, ""
			content = append(content, e.data["content_block"])
		case "content_block_delta":
			partial += applyDelta(content[len(content)-1].(map[string]any), e.data["delta"].(map[string]any))
		case "content_block_stop":
			open = false
			if block := content[len(content)-1].(map[string]any); block["type"] == "tool_use" {
				var input any = map[string]any{}
				if err := json.Unmarshal([]byte(partial), &input); err == nil {
					block["input"] = input
				}
			}
		case "message_delta":
			if open {
				t.Fatal("message_delta inside a block")
			}
			d := e.data["delta"].(map[string]any)
			message["stop_reason"], message["stop_sequence"], message["usage"] = d["stop_reason"], d["stop_sequence"], e.data["usage"]
		case "message_stop":
			over = true
		case "ping":
		default:
			t.Fatalf("event %s", e.name)
		}
	}
	if !over {
		t.Fatal("no message_stop")
	}
	message["content"] = content
	if content == nil {
		message["content"] = []any{}
	}
	return message
}

// applyDelta adds a delta to its block, or returns the JSON that it brings.
func applyDelta(block, d map[string]any) (partial string) {
	switch d["type"] {
	case "text_delta":
		block["text"] = block["text"].(string) + d["text"].(string)
	case "thinking_delta":
		block["thinking"] = block["thinking"].(string) + d["thinking"].(string)
	case "signature_delta":
		block["signature"] = d["signature"]
	case "input_json_delta":
		return d["partial_json"].(string)
	}
	return ""
}

// withoutIDs drops what is another in each answer.
func withoutIDs(m map[string]any) map[string]any {
	delete(m, "id")
	for _, b := range m["content"].([]any) {
		delete(b.(map[string]any), "id")
	}
	return m
}

// claudeBoth asks whole and streamed, checks that both are equal, and returns the
// message.
func claudeBoth(t testing.TB, url, request string) map[string]any {
	t.Helper()
	whole := withoutIDs(ask(t, url+messagesPath, request))
	streamed := withoutIDs(claudeAll(t, stream(t, url+messagesPath, strings.TrimSuffix(request, "}")+`,"stream":true}`)))
	if !reflect.DeepEqual(whole, streamed) {
		t.Errorf("whole %v\nstreamed %v", whole, streamed)
	}
	return whole
}

func names(events []sse) (list []string) {
	for _, e := range events {
		list = append(list, e.name)
	}
	return list
}

func TestCase41Text(t *testing.T) {
	url, _ := serveCases(t, &scriptEngine{pieces: []string{"a", "b"}}, nil)
	events := stream(t, url+messagesPath, body(`"max_tokens":9,"stream":true`))
	order := "message_start content_block_start content_block_delta content_block_delta content_block_stop message_delta message_stop"
	if got := strings.Join(names(events), " "); got != order {
		t.Errorf("events %s\nwant %s", got, order)
	}
	start := events[0].data["message"].(map[string]any)
	if id, _ := start["id"].(string); !strings.HasPrefix(id, "msg_") {
		t.Errorf("id %v", start["id"])
	}
	delete(start, "id")
	prompt := len("<|im_start|>user\nhi<|im_end|>\n" + asked)
	want(t, "message", any(start), fmt.Sprintf(`{"type":"message","role":"assistant","model":"qwen","content":[],"stop_reason":null,"stop_sequence":null,
		"usage":{"input_tokens":%d,"cache_creation_input_tokens":0,"cache_read_input_tokens":0,"output_tokens":1}}`, prompt))
	want(t, "start", events[1].data["content_block"], `{"type":"text","text":""}`)
	want(t, "delta", events[2].data, `{"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"a"}}`)
	want(t, "end", events[5].data["delta"], `{"stop_reason":"end_turn","stop_sequence":null}`)
	want(t, "tokens", at(events[5].data, "usage", "output_tokens"), `2`)
}

func TestCase42Thinking(t *testing.T) {
	url, _ := serveCases(t, &scriptEngine{pieces: cut("<think>\nhm\n</think>\n\nyes", 3)}, nil)
	events := stream(t, url+messagesPath, body(`"max_tokens":9,"stream":true`))
	want(t, "start", events[1].data["content_block"], `{"type":"thinking","thinking":"","signature":""}`)
	signed, stopped := -1, -1
	for i, e := range events {
		if at(e.data, "delta", "type") == "signature_delta" && at(e.data, "delta", "signature") != "" {
			signed = i
		}
		if e.name == "content_block_stop" && stopped < 0 {
			stopped = i
		}
	}
	if signed < 0 || stopped != signed+1 || at(events[stopped+1].data, "content_block", "type") != "text" {
		t.Errorf("signed at %d, stopped at %d: %v", signed, stopped, names(events))
	}
	m := claudeBoth(t, url, body(`"max_tokens":9`))
	if at(m, "content", 0, "signature") != signature || strings.TrimSpace(at(m, "content", 0, "thinking").(string)) != "hm" || at(m, "content", 1, "text") != "yes" {
		t.Errorf("message %v", m)
	}
}

func TestCase43ToolUse(t *testing.T) {
	url, _ := serveCases(t, &scriptEngine{pieces: []string{"<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {}}\n</tool_call>"}}, nil)
	events := stream(t, url+messagesPath, body(`"max_tokens":9,"stream":true`, claudeTool))
	start := at(events[1].data, "content_block").(map[string]any)
	if id, _ := start["id"].(string); !strings.HasPrefix(id, "toolu_") {
		t.Errorf("id %v", start["id"])
	}
	delete(start, "id")
	want(t, "start", any(start), `{"type":"tool_use","name":"get_weather","input":{}}`)
	want(t, "delta", events[2].data["delta"], `{"type":"input_json_delta","partial_json":"{}"}`)
	if order := strings.Join(names(events), " "); order != "message_start content_block_start content_block_delta content_block_stop message_delta message_stop" {
		t.Errorf("events %s", order)
	}
	m := claudeBoth(t, url, body(`"max_tokens":9`, claudeTool))
	want(t, "content", m["content"], `[{"type":"tool_use","name":"get_weather","input":{}}]`)
}

func TestCase44Blocks(t *testing.T) {
	url, _ := serveCases(t, &scriptEngine{pieces: cut("one\n"+weatherCall+"\ntwo "+strings.Replace(weatherCall, "Paris", "Rome", 1), 4)}, nil)
	m := claudeBoth(t, url, body(`"max_tokens":9`, claudeTool)) // claudeAll is strict about indices
	var kinds []any
	for _, b := range m["content"].([]any) {
		kinds = append(kinds, at(b, "type"))
	}
	if got := fmt.Sprint(kinds); got != "[text tool_use text tool_use]" && got != "[text tool_use tool_use]" {
		t.Errorf("blocks %s", got)
	}
	if order := lateThinking(t); order != "0:text 1:thinking 2:tool_use 3:text" {
		t.Errorf("late thinking: blocks %s", order)
	}
}

func TestCase45Usage(t *testing.T) {
	url, _ := serveCases(t, &scriptEngine{pieces: []string{"a", "b"}, cached: 5}, nil)
	events := stream(t, url+messagesPath, body(`"max_tokens":9,"stream":true`))
	whole := ask(t, url+messagesPath, body(`"max_tokens":9`))
	prompt := float64(len("<|im_start|>user\nhi<|im_end|>\n" + asked))
	for what, u := range map[string]any{"message_start": at(events[0].data, "message", "usage"), "message": whole["usage"], "message_delta": events[len(events)-2].data["usage"]} {
		if at(u, "input_tokens") != prompt-5 || at(u, "cache_read_input_tokens") != 5.0 {
			t.Errorf("%s: %v", what, u)
		}
		if _, ok := at(u, "output_tokens").(float64); !ok {
			t.Errorf("%s: %v", what, u)
		}
	}
	want(t, "output", at(whole, "usage", "output_tokens"), `2`)
}

func TestCase46StopReasons(t *testing.T) {
	tests := []struct {
		e                *scriptEngine
		reason, sequence string
	}{
		{&scriptEngine{pieces: []string{"a"}}, `"end_turn"`, `null`},
		{&scriptEngine{pieces: []string{weatherCall}}, `"tool_use"`, `null`},
		{&scriptEngine{pieces: []string{"a"}, finish: "length"}, `"max_tokens"`, `null`},
		{&scriptEngine{pieces: []string{"a E", "ND b"}}, `"stop_sequence"`, `"END"`},
	}
	for _, tt := range tests {
		url, _ := serveCases(t, tt.e, nil)
		m := claudeBoth(t, url, body(`"max_tokens":9,"stop_sequences":["ZZ","END"]`, claudeTool))
		want(t, "reason", m["stop_reason"], tt.reason)
		want(t, "sequence", m["stop_sequence"], tt.sequence)
	}
}

func TestCase47Ping(t *testing.T) {
	url, g := serveCases(t, &scriptEngine{pieces: []string{"a"}, delay: 100 * time.Millisecond}, nil)
	g.waits.header, g.waits.ping = time.Millisecond, 20*time.Millisecond
	events := stream(t, url+messagesPath, body(`"max_tokens":9,"stream":true`))
	if got := names(events); got[0] != "message_start" || got[1] != "ping" {
		t.Errorf("events %v", got)
	}
	want(t, "ping", events[1].data, `{"type":"ping"}`)
}

func TestCase48Errors(t *testing.T) {
	tests := []struct {
		err    error
		status int
		kind   string
		retry  string
	}{
		{queueFull{}, 529, "overloaded_error", "2"},
		{payFirst{}, 402, "billing_error", ""},
		{errors.New("layer 3: no worker holds experts 12-17"), 503, "api_error", ""},
	}
	for _, tt := range tests {
		url, _ := serveCases(t, &scriptEngine{startErr: tt.err}, nil)
		status, header, text := send(t, url+messagesPath, body(`"max_tokens":9`))
		m := object(t, text)
		if status != tt.status || m["type"] != "error" || at(m, "error", "type") != tt.kind || header.Get("Retry-After") != tt.retry ||
			m["request_id"] != header.Get("Request-Id") || header.Get("Request-Id") == "" || !strings.Contains(text, tt.err.Error()) {
			t.Errorf("%v: %d %v %s", tt.err, status, header, text)
		}
	}
	url, _ := serveCases(t, &scriptEngine{}, nil)
	for request, kind := range map[string]string{`{`: "invalid_request_error", `{"model":"no","max_tokens":1,"messages":[{"role":"user","content":"x"}]}`: "not_found_error"} {
		_, _, text := send(t, url+messagesPath, request)
		want(t, request, at(object(t, text), "error", "type"), `"`+kind+`"`)
	}
	if status, _, text := send(t, url+"/v1/models", "", "Origin", "https://evil.example", "anthropic-version", "x"); status != 403 || !strings.Contains(text, "permission_error") {
		t.Errorf("foreign: %d %s", status, text)
	}
	large := `{"x":"` + strings.Repeat("x", maxBody) + `"}`
	if status, _, text := send(t, url+messagesPath, large); status != 413 || !strings.Contains(text, "request_too_large") {
		t.Errorf("large: %d %s", status, text)
	}
	limited, _ := serveCases(t, &scriptEngine{}, func(c *Config) {
		c.Keys = NewKeyRing([]Key{{Hash: HashKey("k"), RequestsPerMinute: 1}}, c.Now)
	})
	send(t, limited+messagesPath, body(`"max_tokens":1`), "x-api-key", "k")
	status, header, text := send(t, limited+messagesPath, body(`"max_tokens":1`), "x-api-key", "k")
	if status != 429 || !strings.Contains(text, "rate_limit_error") || header.Get("Retry-After") != "60" {
		t.Errorf("limit of a key: %d %v %s", status, header, text)
	}
	broken, _ := serveCases(t, &scriptEngine{pieces: []string{"a"}, nextErr: errors.New("layer 3 is gone")}, nil)
	events := stream(t, broken+messagesPath, body(`"max_tokens":9,"stream":true`))
	last := events[len(events)-1]
	if last.name != "error" {
		t.Errorf("last event %v", last)
	}
	want(t, "error", last.data["error"], `{"type":"api_error","message":"layer 3 is gone"}`)
}

type payFirst struct{}

func (payFirst) Error() string         { return "the balance is 0" }
func (payFirst) PaymentRequired() bool { return true }

func TestCase49Overflow(t *testing.T) {
	url, _ := serveCases(t, &scriptEngine{startErr: tooLong{}}, nil)
	for _, s := range []string{"true", "false"} {
		status, _, text := send(t, url+messagesPath, body(`"max_tokens":9,"stream":`+s))
		want(t, "error", object(t, text)["error"], `{"type":"invalid_request_error","message":"prompt is too long: 900 tokens > 512 maximum"}`)
		if status != 400 || !strings.Contains(text, "900 tokens > 512 maximum") { // as it is: some clients search the body
			t.Errorf("status %d", status)
		}
	}
}

func TestCase50LargeMaxTokens(t *testing.T) {
	e := &scriptEngine{pieces: []string{"a"}}
	url, _ := serveCases(t, e, nil)
	ask(t, url+messagesPath, body(`"max_tokens":1000000`))
	if e.request().MaxTokens != 1000000 { // which the engine clips
		t.Errorf("max tokens %d", e.request().MaxTokens)
	}
}

func TestCase51CountTokens(t *testing.T) {
	e := &scriptEngine{pieces: []string{"a"}, cached: 9}
	url, _ := serveCases(t, e, nil)
	request := body(`"system":"be brief"`, claudeTool)
	for _, path := range []string{"/anthropic/v1/messages", "/v1/messages"} {
		n := ask(t, url+path+"/count_tokens", request)["input_tokens"]
		u := at(ask(t, url+path, strings.TrimSuffix(request, "}")+`,"max_tokens":1}`), "usage")
		if sum := at(u, "input_tokens").(float64) + at(u, "cache_read_input_tokens").(float64); n != sum || sum != float64(len(e.prompt())) {
			t.Errorf("%s: %v counted, %v asked", path, n, u)
		}
	}
	if !strings.Contains(e.prompt(), "get_weather") {
		t.Error("the tools are not counted")
	}
}

func TestCase52System(t *testing.T) {
	e := &scriptEngine{}
	url, _ := serveCases(t, e, nil)
	prompts := map[string]bool{}
	for _, system := range []string{
		`"be brief"`, `[{"type":"text","text":"be brief"}]`,
		`[{"type":"text","text":"x-anthropic-billing-header: cc_version=1; cch=00001;"},{"type":"text","text":"be brief","cache_control":{"type":"ephemeral"}}]`,
		`[{"type":"text","text":"x-anthropic-billing-header: cc_version=1; cch=a5f2c;"},{"type":"text","text":"be brief"}]`,
	} {
		ask(t, url+messagesPath, body(`"max_tokens":1,"system":`+system))
		prompts[e.prompt()] = true
	}
	if len(prompts) != 1 || !strings.HasPrefix(e.prompt(), "<|im_start|>system\nbe brief<|im_end|>\n") {
		t.Errorf("prompts %v", prompts)
	}
}

func TestCase53LateSystem(t *testing.T) {
	e := &scriptEngine{}
	url, _ := serveCases(t, e, nil)
	ask(t, url+messagesPath, turnsOf(`{"role":"user","content":"a"},{"role":"assistant","content":"b"},{"role":"system","content":"late"},{"role":"user","content":"c"}`, `"max_tokens":1`))
	if !strings.HasPrefix(e.prompt(), "<|im_start|>system\nlate<|im_end|>\n") {
		t.Errorf("prompt %q", e.prompt())
	}
}

func TestCase54ResultsFirst(t *testing.T) {
	e := &scriptEngine{}
	url, _ := serveCases(t, e, nil)
	ask(t, url+messagesPath, turnsOf(`{"role":"user","content":"go"},
		{"role":"assistant","content":[{"type":"text","text":"so"},{"type":"tool_use","id":"A","name":"f","input":{"z":1,"a":2}},{"type":"tool_use","id":"B","name":"g","input":{}}]},
		{"role":"user","content":[{"type":"text","text":"one "},{"type":"tool_result","tool_use_id":"A","content":"ra"},{"type":"text","text":"two"},{"type":"tool_result","tool_use_id":"B","content":"rb"}]}`,
		`"max_tokens":1`))
	end := `so<tool_call>
{"name": "f", "arguments": {"z": 1, "a": 2}}
</tool_call><tool_call>
{"name": "g", "arguments": {}}
</tool_call><|im_end|>
<|im_start|>user
<tool_response>
ra
</tool_response><|im_end|>
<|im_start|>user
<tool_response>
rb
</tool_response><|im_end|>
<|im_start|>user
one two<|im_end|>
` + asked
	if !strings.HasSuffix(e.prompt(), end) {
		t.Errorf("prompt %q\nwant %q at the end", e.prompt(), end)
	}
}

func TestCase55ResultForms(t *testing.T) {
	e := &scriptEngine{}
	url, _ := serveCases(t, e, nil)
	for result, want := range map[string]string{
		`"content":"plain"`: "plain",
		`"content":[{"type":"text","text":"pl"},{"type":"text","text":"ain"}]`: "plain",
		`"is_error":true`:                          "the tool failed",
		`"content":"no such file","is_error":true`: "no such file",
		`"content":null`:                           "",
		`"content":[{"type":"text","text":"see"},{"type":"image","source":{"type":"base64","media_type":"image/png","data":"AA=="}}]`: "see" + noImage,
	} {
		ask(t, url+messagesPath, turnsOf(`{"role":"user","content":"go"},{"role":"assistant","content":[{"type":"tool_use","id":"A","name":"f","input":{}}]},
			{"role":"user","content":[{"type":"tool_result","tool_use_id":"A",`+result+`}]}`, `"max_tokens":1`))
		if !strings.HasSuffix(e.prompt(), "<tool_response>\n"+want+"\n</tool_response><|im_end|>\n"+asked) {
			t.Errorf("%s: prompt %q", result, e.prompt())
		}
	}
}

func TestCase56OtherTools(t *testing.T) {
	e := &scriptEngine{}
	url, _ := serveCases(t, e, nil)
	ask(t, url+messagesPath, turnsOf(`{"role":"user","content":[{"type":"tool_reference","tool_name":"x"},{"type":"text","text":"hi"},{"type":"tool_addition","tools":[]}]}`,
		`"max_tokens":1,"tools":[{"type":"web_search_20250305","name":"web_search"},{"name":"f","input_schema":{"type":"object"}}]`))
	if strings.Contains(e.prompt(), "web_search") || !strings.Contains(e.prompt(), `"name": "f"`) || !strings.Contains(e.prompt(), "user\nhi<") {
		t.Errorf("prompt %q", e.prompt())
	}
}

func TestCase57ThinkingBack(t *testing.T) {
	e := &scriptEngine{}
	url, _ := serveCases(t, e, nil)
	history := `{"role":"user","content":"a"},{"role":"assistant","content":[{"type":"thinking","thinking":"because","signature":"SIG"},
		{"type":"redacted_thinking","data":"x"},{"type":"text","text":"b"}]},{"role":"user","content":"c"}`
	for thinking, empty := range map[string]bool{`{"type":"enabled","budget_tokens":1024}`: false, `{"type":"adaptive"}`: false, `{"type":"disabled"}`: true} {
		for _, signed := range []string{"SIG", signature, ""} {
			ask(t, url+messagesPath, turnsOf(strings.Replace(history, "SIG", signed, 1), `"max_tokens":2048,"thinking":`+thinking))
			if !strings.Contains(e.prompt(), "<think>\nbecause\n</think>\n\nb<|im_end|>") || strings.HasSuffix(e.prompt(), "</think>\n\n") != empty {
				t.Errorf("%s: prompt %q", thinking, e.prompt())
			}
		}
	}
}

func TestCase58ToolChoice(t *testing.T) {
	e := &scriptEngine{pieces: cut(weatherCall+weatherCall, 5), able: &Abilities{Grammar: true}}
	url, _ := serveCases(t, e, nil)
	two := strings.TrimSuffix(claudeTool, "]") + `,{"name":"other","input_schema":{"type":"object"}}]`
	tests := []struct {
		choice, in, out string // the grammar has in, and not out
		forced          bool
		calls           int
	}{
		{`{"type":"auto"}`, "", "", false, 2},
		{`{"type":"auto","disable_parallel_tool_use":true}`, "", "", false, 1},
		{`{"type":"any"}`, "other", "", true, 2},
		{`{"type":"tool","name":"get_weather"}`, "get_weather", "other", true, 2},
		{`{"type":"tool","name":"get_weather","disable_parallel_tool_use":true}`, "get_weather", "other", true, 1},
		{`{"type":"none"}`, "", "get_weather", false, 0},
	}
	for _, tt := range tests {
		e.extra = Extra{}
		m := ask(t, url+messagesPath, body(`"max_tokens":99,"tool_choice":`+tt.choice, two))
		calls := 0
		for _, b := range m["content"].([]any) {
			if at(b, "type") == "tool_use" {
				calls++
			}
		}
		g := e.extra.Grammar
		if forced := g != "" && e.extra.Triggers == nil; calls != tt.calls || forced != tt.forced || !strings.Contains(g, tt.in) || tt.out != "" && strings.Contains(g, tt.out) {
			t.Errorf("%s: %d calls, grammar %q, triggers %v", tt.choice, calls, g, e.extra.Triggers)
		}
	}
	_, _, text := send(t, url+messagesPath, body(`"max_tokens":99,"tool_choice":{"type":"tool","name":"nobody"}`, two))
	if !strings.Contains(text, `no tool \"nobody\"`) {
		t.Errorf("unknown tool: %s", text)
	}
}

// lateThinking sends pieces in an order that parsers seldom give.
func lateThinking(t testing.TB) string {
	t.Helper()
	w := httptest.NewRecorder()
	s := &messageStream{q: &ready{m: &servedModel{}}, out: startEvents(w, time.Second)}
	a := &generation{stream: &scriptStream{e: &scriptEngine{}}, finish: finishStop}
	s.begin([]*generation{a})
	for _, p := range []piece{
		{kind: pieceText, text: "a"}, {kind: pieceReasoning, text: "b"}, {kind: pieceCall, id: "toolu_1", name: "f"},
		{kind: pieceArgs, text: "{}"}, {kind: pieceEnd}, {kind: pieceText, text: "c"},
	} {
		s.piece(0, p)
	}
	s.end(0, a)
	s.finish(nil)
	var order []string
	for i, b := range claudeAll(t, splitEvents(t, w.Body.String()))["content"].([]any) {
		order = append(order, fmt.Sprintf("%d:%v", i, at(b, "type")))
	}
	return strings.Join(order, " ")
}
