package gateway

import (
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"testing"
	"time"
)

const responsesPath = "/v1/responses"

const (
	flatTool  = `"tools":[{"type":"function","name":"get_weather","strict":false,"parameters":{"type":"object","properties":{"city":{"type":"string"}}}}]`
	patchTool = `"tools":[{"type":"custom","name":"apply_patch","description":"edits files","format":{"type":"grammar","syntax":"lark","definition":"start: LINE"}}]`
)

// input is a request to the Responses API.
func input(value string, more ...string) string {
	return `{` + strings.Join(append([]string{`"model":"qwen","input":` + value}, more...), ",") + `}`
}

// wholeOf is the field of an event that has all of its deltas.
var wholeOf = map[string]string{
	"response.output_text.done": "text", "response.reasoning_text.done": "text",
	"response.function_call_arguments.done": "arguments", "response.custom_tool_call_input.done": "input",
}

// responseAll puts a stream together as strict clients do, and returns the last
// event's response.
func responseAll(t testing.TB, events []sse) map[string]any {
	t.Helper()
	var output []any
	var item map[string]any // the open one
	text := ""              // its deltas
	for i, e := range events {
		if e.data["sequence_number"] != float64(i) {
			t.Fatalf("event %d has the number %v", i, e.data["sequence_number"])
		}
		if index, ok := e.data["output_index"].(float64); ok && int(index) != len(output) {
			t.Fatalf("%s of item %v, %d are done", e.name, index, len(output))
		}
		if id, ok := e.data["item_id"]; ok && (item == nil || id != item["id"]) {
			t.Fatalf("%s is about %v, open is %v", e.name, id, item)
		}
		switch e.name {
		case "response.created", "response.in_progress":
			if at(e.data, "response", "status") != "in_progress" {
				t.Fatalf("%s: %v", e.name, e.data)
			}
		case "response.output_item.added":
			if item != nil {
				t.Fatalf("an item is added while %v is open", item)
			}
			item, text = e.data["item"].(map[string]any), ""
		case "response.output_text.delta", "response.reasoning_text.delta":
			if e.data["content_index"] != 0.0 {
				t.Fatalf("%s without content_index", e.name)
			}
			text += e.data["delta"].(string)
		case "response.function_call_arguments.delta", "response.custom_tool_call_input.delta":
			text += e.data["delta"].(string)
		case "response.output_text.done", "response.reasoning_text.done", "response.function_call_arguments.done", "response.custom_tool_call_input.done":
			if whole := wholeOf[e.name]; e.data[whole] != text {
				t.Fatalf("%s: %v, deltas %q", e.name, e.data[whole], text)
			}
		case "response.content_part.added", "response.content_part.done":
		case "response.output_item.done":
			output, item = append(output, e.data["item"]), nil
		case "response.completed", "response.incomplete", "response.failed":
			response := e.data["response"].(map[string]any)
			if i != len(events)-1 || item != nil {
				t.Fatalf("%s is event %d of %d, open %v", e.name, i, len(events), item)
			}
			if got := response["output"].([]any); len(got)+len(output) > 0 && !reflect.DeepEqual(got, output) {
				t.Fatalf("output %v, items %v", got, output)
			}
			return response
		default:
			t.Fatalf("event %s", e.name)
		}
	}
	t.Fatal("no last event")
	return nil
}

// responseBoth asks whole and streamed, checks that both are equal, and returns
// the response.
func responseBoth(t testing.TB, url, request string) map[string]any {
	t.Helper()
	streamed := responseAll(t, stream(t, url+responsesPath, strings.TrimSuffix(request, "}")+`,"stream":true}`))
	whole := ask(t, url+responsesPath, request)
	plain := func(m map[string]any) any {
		data, err := json.Marshal(m)
		if err != nil {
			t.Fatal(err)
		}
		c := object(t, string(data))
		delete(c, "id")
		for _, o := range c["output"].([]any) {
			delete(o.(map[string]any), "id")
			delete(o.(map[string]any), "call_id")
		}
		return c
	}
	if a, b := plain(whole), plain(streamed); !reflect.DeepEqual(a, b) {
		t.Errorf("whole %v\nstreamed %v", a, b)
	}
	return whole
}

func TestCase59Sequence(t *testing.T) {
	url, _ := serveCases(t, &scriptEngine{pieces: []string{"a", "b"}}, nil)
	events := stream(t, url+responsesPath, input(`"hi"`, `"stream":true`))
	responseAll(t, events)
	order := "created in_progress output_item.added content_part.added output_text.delta output_text.delta output_text.done content_part.done output_item.done completed"
	if got := strings.ReplaceAll(strings.Join(names(events), " "), "response.", ""); got != order {
		t.Errorf("events %s\nwant %s", got, order)
	}
	for _, e := range events {
		if _, ok := e.data["logprobs"].([]any); strings.Contains(e.name, "output_text") && !ok {
			t.Errorf("%s has no logprobs: %v", e.name, e.data)
		}
	}
	want(t, "part", events[3].data["part"], `{"type":"output_text","text":"","annotations":[],"logprobs":[]}`)

	url, _ = serveCases(t, &scriptEngine{pieces: cut("<think>\nhm\n</think>\n\nSo:\n"+weatherCall, 4)}, nil)
	response := responseBoth(t, url, input(`"hi"`, flatTool))
	var kinds []string
	for _, o := range response["output"].([]any) {
		kinds = append(kinds, at(o, "type").(string))
	}
	if got := strings.Join(kinds, " "); got != "reasoning message function_call" {
		t.Errorf("items %s", got)
	}
	sameJSON(t, "arguments", at(response, "output", 2, "arguments"), weatherArgs)
}

func TestCase60Types(t *testing.T) {
	url, _ := serveCases(t, &scriptEngine{pieces: []string{"a"}}, nil)
	for _, e := range stream(t, url+responsesPath, input(`"hi"`, `"stream":true`)) { // which checks type == name
		_, wraps := e.data["response"]
		if lifecycle := strings.Count(e.name, ".") == 1; e.name == "" || wraps != lifecycle {
			t.Errorf("%s: %v", e.name, e.data)
		}
	}
}

func TestCase61Completed(t *testing.T) {
	url, _ := serveCases(t, &scriptEngine{pieces: []string{"a", "b"}, cached: 3}, nil)
	_, _, text := send(t, url+responsesPath, input(`"hi"`, `"stream":true`))
	if strings.Contains(text, "[DONE]") {
		t.Error("[DONE] is not part of this API")
	}
	response := responseAll(t, splitEvents(t, text))
	if id, _ := response["id"].(string); !strings.HasPrefix(id, "resp_") {
		t.Errorf("id %v", response["id"])
	}
	n := len("<|im_start|>user\nhi<|im_end|>\n" + asked)
	want(t, "usage", response["usage"], fmt.Sprintf(`{"input_tokens":%d,"input_tokens_details":{"cached_tokens":3},"output_tokens":2,
		"output_tokens_details":{"reasoning_tokens":0},"total_tokens":%d}`, n, n+2))
	item := at(response, "output", 0).(map[string]any)
	delete(item, "id")
	want(t, "output", any(item), `{"type":"message","status":"completed","role":"assistant","content":[{"type":"output_text","text":"ab","annotations":[],"logprobs":[]}]}`)
}

func TestCase62CallRoundTrip(t *testing.T) {
	e := &scriptEngine{pieces: cut(weatherCall, 4)}
	url, _ := serveCases(t, e, nil)
	response := ask(t, url+responsesPath, input(`"hi"`, flatTool))
	item := at(response, "output", 0).(map[string]any)
	id, _ := item["id"].(string)
	callID, _ := item["call_id"].(string)
	if !strings.HasPrefix(id, "fc_") || !strings.HasPrefix(callID, "call_") {
		t.Errorf("ids %q and %q", id, callID)
	}
	data, err := json.Marshal(item)
	if err != nil {
		t.Fatal(err)
	}
	ask(t, url+responsesPath, input(`[{"role":"user","content":"hi"},`+string(data)+`,{"type":"function_call_output","call_id":"`+callID+`","output":"rain"}]`, flatTool))
	if !strings.Contains(e.prompt(), `{"name": "get_weather", "arguments": `+weatherArgs+`}`) || !strings.Contains(e.prompt(), "<tool_response>\nrain\n") {
		t.Errorf("prompt %q", e.prompt())
	}
}

func TestCase63CustomTools(t *testing.T) {
	e := &scriptEngine{pieces: cut("<tool_call>\n{\"name\": \"apply_patch\", \"arguments\": {\"input\": \"*** Begin\\n+é\"}}\n</tool_call>", 4)}
	url, _ := serveCases(t, e, nil)
	response := responseBoth(t, url, input(`"hi"`, patchTool))
	item := at(response, "output", 0).(map[string]any)
	callID := item["call_id"].(string)
	delete(item, "id")
	delete(item, "call_id")
	want(t, "item", any(item), `{"type":"custom_tool_call","status":"completed","name":"apply_patch","input":"*** Begin\n+é"}`)
	if !strings.Contains(e.prompt(), `"input": {"type": "string"}`) || !strings.Contains(e.prompt(), "start: LINE") {
		t.Errorf("prompt %q", e.prompt())
	}
	ask(t, url+responsesPath, input(`[{"role":"user","content":"hi"},{"type":"custom_tool_call","call_id":"`+callID+`","name":"apply_patch","input":"x"},
		{"type":"custom_tool_call_output","call_id":"`+callID+`","output":"done"}]`, patchTool))
	if !strings.Contains(e.prompt(), `"arguments": {"input": "x"}`) || !strings.Contains(e.prompt(), "<tool_response>\ndone\n") {
		t.Errorf("prompt %q", e.prompt())
	}
	ask(t, url+responsesPath, input(`"hi"`, `"tools":[{"type":"web_search"},{"type":"image_generation"},{"type":"new"},
		{"type":"namespace","name":"n","tools":[{"type":"function","name":"inner","parameters":{"type":"object"}}]}]`))
	if !strings.Contains(e.prompt(), `"inner"`) || strings.Contains(e.prompt(), "web_search") {
		t.Errorf("prompt %q", e.prompt())
	}
}

func TestCase64Input(t *testing.T) {
	e := &scriptEngine{pieces: []string{"a"}}
	url, _ := serveCases(t, e, nil)
	user := "<|im_start|>user\nhi<|im_end|>\n" + asked
	for _, value := range []string{
		`"hi"`, `[{"role":"user","content":"hi"}]`, `[{"type":"message","role":"user","content":[{"type":"input_text","text":"hi"}]}]`,
	} {
		if ask(t, url+responsesPath, input(value)); e.prompt() != user {
			t.Errorf("%s: prompt %q", value, e.prompt())
		}
	}
	own := sealedPrefix + base64.StdEncoding.EncodeToString([]byte("because"))
	for item, want := range map[string]string{
		`"summary":[]`: "", `"summary":[],"content":null`: "", `"summary":[],"content":[],"encrypted_content":null`: "",
		`"summary":[],"encrypted_content":""`: "", `"summary":[],"encrypted_content":"gAAAforeign"`: "",
		`"summary":[{"type":"summary_text","text":"because"}]`:                               "because",
		`"summary":[],"content":[{"type":"reasoning_text","text":"because"}]`:                "because",
		`"summary":[],"content":null,"encrypted_content":"` + own + `"`:                      "because",
		`"id":"rs_1","summary":[],"encrypted_content":"` + sealedPrefix + `%%","content":[]`: "",
	} {
		ask(t, url+responsesPath, input(`[{"role":"user","content":"a"},{"type":"reasoning",`+item+`},
			{"type":"message","role":"assistant","content":[{"type":"output_text","text":"b","annotations":[]}]},{"role":"user","content":"c"}]`))
		block := ""
		if want != "" {
			block = "<think>\n" + want + "\n</think>\n\n"
		}
		if !strings.Contains(e.prompt(), "assistant\n"+block+"b<|im_end|>") {
			t.Errorf("%s: prompt %q", item, e.prompt())
		}
	}
	for _, output := range []string{`"rain"`, `[{"type":"input_text","text":"rain"}]`} {
		ask(t, url+responsesPath, input(`[{"role":"user","content":"a"},{"type":"function_call","call_id":"c","name":"f","arguments":"{}"},
			{"type":"function_call_output","call_id":"c","output":`+output+`}]`))
		if !strings.Contains(e.prompt(), "<tool_response>\nrain\n") {
			t.Errorf("%s: prompt %q", output, e.prompt())
		}
	}
	think := &scriptEngine{pieces: []string{"<think>\nbecause\n</think>\n\nyes"}}
	url, _ = serveCases(t, think, nil)
	response := responseBoth(t, url, input(`"hi"`, `"store":false,"include":["reasoning.encrypted_content"]`))
	sealed, _ := at(response, "output", 0, "encrypted_content").(string)
	ask(t, url+responsesPath, input(`[{"role":"user","content":"a"},{"type":"reasoning","summary":[],"encrypted_content":"`+sealed+`"},{"role":"assistant","content":"b"},{"role":"user","content":"c"}]`))
	if !strings.HasPrefix(sealed, sealedPrefix) || !strings.Contains(think.prompt(), "because") {
		t.Errorf("sealed %q, prompt %q", sealed, think.prompt())
	}
}

func TestCase65PreviousResponse(t *testing.T) {
	e := &scriptEngine{pieces: []string{"Bonn"}}
	now := time.Unix(1700000000, 0)
	url, _ := serveCases(t, e, func(c *Config) {
		c.Now = func() time.Time { return now }
		c.Keys = NewKeyRing([]Key{{Name: "a", Hash: HashKey("a")}, {Name: "b", Hash: HashKey("b")}}, c.Now)
	})
	me := []string{"x-api-key", "a"}
	first := ask(t, url+responsesPath, input(`"capital?"`), me...)["id"].(string)
	second := ask(t, url+responsesPath, input(`"sure?"`, `"previous_response_id":"`+first+`"`), me...)
	want := "<|im_start|>user\ncapital?<|im_end|>\n<|im_start|>assistant\nBonn<|im_end|>\n<|im_start|>user\nsure?<|im_end|>\n" + asked
	if e.prompt() != want || second["previous_response_id"] != first {
		t.Errorf("prompt %q, previous %v", e.prompt(), second["previous_response_id"])
	}
	third := input(`"and?"`, `"previous_response_id":"`+second["id"].(string)+`"`)
	if ask(t, url+responsesPath, third, me...); strings.Count(e.prompt(), "Bonn") != 2 {
		t.Errorf("prompt %q", e.prompt())
	}
	if got := ask(t, url+responsesPath+"/"+first, "", me...); got["id"] != first || at(got, "output", 0, "content", 0, "text") != "Bonn" {
		t.Errorf("stored %v", got)
	}
	gone := func(id string, headers ...string) {
		t.Helper()
		status, _, text := send(t, url+responsesPath, input(`"x"`, `"previous_response_id":"`+id+`"`), headers...)
		m := object(t, text)
		if status != 404 || at(m, "error", "param") != "previous_response_id" || !strings.Contains(text, id) {
			t.Errorf("%s: %d %s", id, status, text)
		}
	}
	gone("resp_none", me...)
	gone(first, "x-api-key", "b") // another's
	gone(ask(t, url+responsesPath, input(`"x"`, `"store":false`), me...)["id"].(string), me...)
	if status, _, _ := sendAs(t, "DELETE", url+responsesPath+"/"+first, nil, me...); status != 200 {
		t.Errorf("delete: %d", status)
	}
	gone(first, me...)
	now = now.Add(memoryAge + time.Second)
	gone(second["id"].(string), me...)
	for _, probe := range []string{`[]`, `""`, `null`} {
		ask(t, url+responsesPath, input(probe, `"max_output_tokens":1`), me...)
	}
}

func TestCase66Incomplete(t *testing.T) {
	url, _ := serveCases(t, &scriptEngine{pieces: []string{"a"}, finish: "length"}, nil)
	events := stream(t, url+responsesPath, input(`"hi"`, `"stream":true,"max_output_tokens":1`))
	if last := events[len(events)-1].name; last != "response.incomplete" {
		t.Errorf("last event %s", last)
	}
	response := responseBoth(t, url, input(`"hi"`))
	want(t, "details", response["incomplete_details"], `{"reason":"max_output_tokens"}`)
	want(t, "status", response["status"], `"incomplete"`)

	url, _ = serveCases(t, &scriptEngine{startErr: tooLong{}}, nil)
	events = stream(t, url+responsesPath, input(`"hi"`, `"stream":true`))
	if got := strings.Join(names(events), " "); got != "response.created response.in_progress response.failed" {
		t.Errorf("events %s", got)
	}
	want(t, "code", at(responseAll(t, events), "error", "code"), `"context_length_exceeded"`)
	status, _, text := send(t, url+responsesPath, input(`"hi"`))
	if status != 400 || at(object(t, text), "error", "code") != "context_length_exceeded" {
		t.Errorf("whole: %d %s", status, text)
	}
}

func TestCase67AllItemsDone(t *testing.T) {
	// No reason to finish comes: the call is cut, or the engine dies.
	url, _ := serveCases(t, &scriptEngine{pieces: cut("So:\n"+weatherCall[:len(weatherCall)-30], 3)}, nil)
	response := responseBoth(t, url, input(`"hi"`, flatTool)) // responseAll is strict about items
	want(t, "status", response["status"], `"incomplete"`)
	if n := len(response["output"].([]any)); n > 1 {
		want(t, "status of the call", at(response, "output", n-1, "status"), `"incomplete"`)
	}
	url, _ = serveCases(t, &scriptEngine{pieces: []string{"a"}, nextErr: errors.New("layer 3 is gone")}, nil)
	events := stream(t, url+responsesPath, input(`"hi"`, `"stream":true`))
	failed := responseAll(t, events)
	want(t, "error", failed["error"], `{"code":"engine_failed","message":"layer 3 is gone"}`)
	want(t, "item", at(failed, "output", 0, "status"), `"incomplete"`)
}
