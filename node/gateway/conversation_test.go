package gateway

import (
	"strings"
	"testing"

	"kvasird/node/gateway/jinja"
	"kvasird/node/gateway/toolcall"
)

// Templates of some families want history in their own words.
func TestHistory(t *testing.T) {
	made := func() *conversation {
		return &conversation{turns: []turn{
			{role: roleUser, text: "go"},
			{role: roleAssistant, reasoning: "hm", calls: []call{{id: "toolu_1", name: "f", args: jinja.NewDict()}, {id: "toolu_2", name: "g", args: jinja.NewDict()}}},
			{role: roleTool, callID: "toolu_2", text: "r"},
			{role: roleTool, callID: "nobody", text: "s"},
		}}
	}
	for family, key := range map[toolcall.Family]string{toolcall.Hermes: "reasoning_content", toolcall.GPTOSS: "thinking", toolcall.KimiK2: "reasoning_content", toolcall.Mistral: "reasoning_content"} {
		c := made()
		if begun := c.settle(); begun != nil {
			t.Errorf("%s: %v is gone on from", family, begun)
		}
		list := c.messages(family)
		message := func(i int, key string) any {
			v, _ := list.Items[i].(*jinja.Dict).Get(key)
			return v
		}
		if message(1, key) != "hm" {
			t.Errorf("%s: no %s", family, key)
		}
		second, _ := message(1, "tool_calls").(*jinja.List).Items[1].(*jinja.Dict).Get("id")
		if want := toolcall.HistoryID(family, "toolu_2", "g", 1); second != want || message(2, "tool_call_id") != want || message(2, "name") != "g" {
			t.Errorf("%s: id %v, result's %v of %v, want %v", family, second, message(2, "tool_call_id"), message(2, "name"), want)
		}
		if message(3, "tool_call_id") != "nobody" {
			t.Errorf("%s: a result of no call has the id %v", family, message(3, "tool_call_id"))
		}
	}
}

// Control tokens come with their text where the engine can and calls are marked
// by them.
func TestSpecialTokens(t *testing.T) {
	e := &scriptEngine{pieces: []string{"a"}, able: &Abilities{Special: true}}
	url, _ := serveCases(t, e, nil)
	ask(t, url+chatPath, body())
	if !e.extra.Special || e.extra.Grammar != "" || e.extra.Logprobs {
		t.Errorf("extra %+v", e.extra)
	}
	if param, _ := refusal(t, url+chatPath, body(`"tool_choice":"required"`, weatherTool)); param != "tool_choice" {
		t.Errorf("an engine that has no grammar: param %q", param)
	}
}

// A form is held by a grammar in every API.
func TestForms(t *testing.T) {
	e := &scriptEngine{pieces: []string{`{"a":1}`}, able: &Abilities{Grammar: true}}
	url, _ := serveCases(t, e, nil)
	schema := `{"type":"json_schema","name":"s","strict":true,"schema":{"type":"object","properties":{"apples":{"type":"integer"}},"required":["apples"],"additionalProperties":false}}`
	for path, request := range map[string]string{
		responsesPath:  input(`"hi"`, `"text":{"format":`+schema+`}`),
		messagesPath:   body(`"max_tokens":9`, `"output_config":{"format":`+schema+`}`),
		"/v1/messages": body(`"max_tokens":9`, `"output_format":`+schema),
	} {
		e.extra = Extra{}
		if ask(t, url+path, request); !strings.Contains(e.extra.Grammar, "apples") || !strings.Contains(e.extra.Grammar, "root ::=") || e.extra.Triggers != nil {
			t.Errorf("%s: grammar %q", path, e.extra.Grammar)
		}
	}
}

// What an engine turns out to lack is refused as if it had said so, and left out where the
// answer can do without.
func TestEnginesThatTurnOutToLack(t *testing.T) {
	e := &scriptEngine{pieces: []string{"a"}, able: &Abilities{true, true, true}, lacks: Abilities{Grammar: true, Special: true, Logprobs: true}}
	url, _ := serveCases(t, e, nil)
	for field, param := range map[string]string{
		`"logprobs":true`:                                "logprobs",
		`"tool_choice":"required",` + weatherTool:        "tool_choice",
		`"response_format":{"type":"json_object"}`:       "response_format",
		`"n":2,"response_format":{"type":"json_object"}`: "response_format",
	} {
		got, status := refusal(t, url+chatPath, body(field))
		if got != param {
			t.Errorf("%s: param %q, %v", field, got, status)
		}
	}
	for _, stream := range []string{"false", "true"} {
		e.extra = Extra{Grammar: "none yet"}
		if status, _, text := send(t, url+chatPath, body(weatherTool, `"n":2,"stream":`+stream)); status != 200 || e.extra.Grammar+strings.Join(e.extra.Triggers, "") != "none yet" {
			t.Errorf("a call that the model is free to make: %d %s, extra %+v", status, text, e.extra)
		}
	}
	e.lacks = Abilities{Special: true}
	if ask(t, url+chatPath, body(weatherTool)); e.extra.Special || e.extra.Grammar == "" || e.extra.Triggers == nil {
		t.Errorf("without the text of control tokens: extra %+v", e.extra)
	}
	e.able, e.lacks = &Abilities{Logprobs: true}, Abilities{Grammar: true}
	if status, _, text := send(t, url+chatPath, body(`"logprobs":true`)); status != 200 {
		t.Errorf("what it lacks was not asked for: %d %s", status, text)
	}
}
