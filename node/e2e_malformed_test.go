//go:build cgo && linux

package node

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
)

// noRequests are bodies that no endpoint can read.
var noRequests = []string{
	"", " ", "null", "true", "1", `"{}"`, "[]", "[{}]", "{", "}", "{}}", "{}{}", `{"a"}`, `{"a":}`, `{"a":1,}`, `{"a":1 "b":2}`, `{,"a":1}`,
	`{'a':1}`, `{a:1}`, `{"a":01}`, `{"a":+1}`, `{"a":.5}`, `{"a":1.}`, `{"a":NaN}`, `{"a":Infinity}`, `{"a":0x1}`, `{"a":tru}`, `{"a":"b}`, `{"a":"\x"}`,
	`{"a":"\u12"}`, "{\"a\":\"\n\"}", `{"a":1}//`, `/**/{}`, "\ufeff{}", "model=a&prompt=b", "<request/>", "--x\r\n\r\n{}\r\n--x--", "{\x00}",
	strings.Repeat(`{"a":`, 5000), strings.Repeat("[", 100_000), `{"a":` + strings.Repeat("[", 5000) + strings.Repeat("]", 5000) + "}",
	"{\"a\":[" + strings.Repeat("1,", 1<<20) + "1]}",
}

// malformed is a field with a value that it cannot have. The failure names it.
type malformed struct{ field, value string }

var wrongSampling = []malformed{
	{"temperature", `"hot"`}, {"temperature", "-1"}, {"temperature", "2.1"}, {"temperature", "1e300"}, {"top_p", "2"}, {"top_p", "[]"}, {"top_k", "1.5"}, {"top_k", "-2"}, {"stream", `"yes"`},
}

var wrongSums = append([]malformed{
	{"model", "7"}, {"model", `""`}, {"model", `"none"`}, {"model", "{}"}, {"min_p", "-1"}, {"seed", `"a"`}, {"seed", "1e30"}, {"n", "0"}, {"n", "1000000"}, {"n", "1.5"},
	{"stop", "7"}, {"stop", `[""]`}, {"stop", `[[]]`}, {"max_tokens", "0"}, {"max_tokens", `"all"`}, {"frequency_penalty", "3"}, {"presence_penalty", "true"}, {"repetition_penalty", "0"},
	{"logit_bias", "[]"}, {"logit_bias", `{"a":1}`}, {"logit_bias", `{"-1":1}`}, {"logit_bias", `{"1":101}`}, {"logit_bias", `{"99999999":1}`}, {"stream_options", "{}"}, {"stop_token_ids", "[1]"}, {"grammar", `"root ::= [0-9]"`},
}, wrongSampling...)

var wrongTools = []malformed{
	{"tools", "{}"}, {"tools", "[7]"}, {"tools", `[{"type":"function","name":" "}]`},
}

var wrongClaude = append(append([]malformed{
	{"model", "null"}, {"model", "7"}, {"model", `"none"`}, {"stop_sequences", `[""]`}, {"stop_sequences", "7"}, {"thinking", "true"}, {"thinking", `{"type":"deep"}`}, {"system", "7"}, {"system", `[{"type":"image"}]`}, {"system", `[7]`},
	{"messages", "[]"}, {"messages", "7"}, {"messages", "[7]"}, {"messages", `[{"role":"user"}]`}, {"messages", `[{"role":"robot","content":"a"}]`}, {"messages", `[{"content":"a"}]`},
	{"messages", `[{"role":"user","content":[{}]}]`}, {"messages", `[{"role":"user","content":[{"type":"text"}]}]`}, {"messages", `[{"role":"user","content":[{"type":"image"}]}]`}, {"messages", `[{"role":"user","content":[{"type":"document"}]}]`},
	{"messages", `[{"role":"assistant","content":[{"type":"tool_use"}]}]`}, {"messages", `[{"role":"assistant","content":[{"type":"tool_use","name":"f","input":"{"}]}]`},
	{"tools", "{}"}, {"tools", "[7]"}, {"tools", `[{"name":" ","input_schema":{}}]`}, {"mcp_servers", "[{}]"}, {"output_format", `{"type":"poem"}`},
}, wrongSampling[:8]...), malformed{"temperature", "{}"})

// endpoints are what takes bodies, each with a good one and fields that spoil it.
var endpoints = []struct {
	path  string
	good  string
	wrong []malformed
}{
	{"/v1/chat/completions", `{"model":"kvasir-tiny-q4_k_m","max_tokens":1,"messages":[{"role":"user","content":"a"}]}`, append([]malformed{
		{"messages", "null"}, {"messages", "[]"}, {"messages", "{}"}, {"messages", `["a"]`}, {"messages", `[{"role":"user"}]`}, {"messages", `[{"role":"robot","content":"a"}]`}, {"messages", `[{"role":"user","content":7}]`},
		{"messages", `[{"role":"user","content":[{"type":"input_audio"}]}]`}, {"messages", `[{"role":"assistant","tool_calls":[{}]}]`}, {"messages", `[{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":"{"}}]}]`},
		{"functions", `[{"name":"f"}]`}, {"top_logprobs", "2"}, {"logprobs", "1"}, {"response_format", `{"type":"poem"}`}, {"response_format", `{"type":"json_schema"}`}, {"response_format", `{"type":"json_schema","json_schema":{"schema":7}}`},
		{"modalities", `["audio"]`}, {"max_completion_tokens", "-1"},
	}, append(wrongTools, wrongSums...)...)},
	{"/v1/completions", `{"model":"kvasir-tiny-q4_k_m","max_tokens":1,"prompt":"a"}`, append([]malformed{
		{"prompt", "null"}, {"prompt", "7"}, {"prompt", "[]"}, {"prompt", "{}"}, {"prompt", "[{}]"}, {"prompt", "[-1]"}, {"prompt", "[99999999]"}, {"prompt", `[1,"a"]`}, {"prompt", "[[]]"}, {"prompt", `[` + strings.Repeat(`"a",`, 40) + `"a"]`},
		{"echo", "true"}, {"suffix", `"a"`}, {"best_of", "2"}, {"logprobs", "21"}, {"logprobs", "true"},
	}, wrongSums...)},
	{"/v1/embeddings", `{"model":"kvasir-tiny-q4_k_m","input":"a"}`, []malformed{
		{"model", "7"}, {"model", `""`}, {"model", `"none"`}, {"input", "null"}, {"input", "7"}, {"input", "[]"}, {"input", "{}"}, {"input", "[{}]"}, {"input", "[-1]"}, {"dimensions", "8"}, {"encoding_format", `"hex"`}, {"encoding_format", "7"},
	}},
	{"/v1/responses", `{"model":"kvasir-tiny-q4_k_m","max_output_tokens":1,"input":"a"}`, append(append([]malformed{
		{"model", "7"}, {"model", `"none"`}, {"input", "7"}, {"input", "{}"}, {"input", "[7]"}, {"input", "[{}]"}, {"input", `[{"role":"robot","content":"a"}]`}, {"input", `[{"role":"user"}]`}, {"input", `[{"type":"item_reference","id":"a"}]`},
		{"input", `[{"type":"function_call"}]`}, {"input", `[{"type":"function_call","name":"f","arguments":"{"}]`}, {"input", `[{"role":"user","content":[{"type":"input_image"}]}]`}, {"instructions", "7"}, {"max_output_tokens", "0"},
		{"include", "7"}, {"store", `"yes"`}, {"text", "7"}, {"text", `{"format":{"type":"poem"}}`}, {"text", `{"format":{"type":"json_schema"}}`}, {"background", "true"}, {"conversation", `"a"`}, {"prompt", `{"id":"a"}`}, {"previous_response_id", `"a"`}, {"previous_response_id", "7"},
	}, wrongSampling...), wrongTools...)},
	{"/v1/messages", `{"model":"kvasir-tiny-q4_k_m","max_tokens":1,"messages":[{"role":"user","content":"a"}]}`, append([]malformed{
		{"max_tokens", "null"}, {"max_tokens", "0"}, {"max_tokens", `"all"`}, {"stream", `"yes"`}}, wrongClaude...)},
	{"/anthropic/v1/messages/count_tokens", `{"model":"kvasir-tiny-q4_k_m","messages":[{"role":"user","content":"a"}]}`, wrongClaude},
}

// TestMalformedBodies: whatever comes, it is a 4xx in the shape of the API, and the
// daemon takes no more room after than before.
func TestMalformedBodies(t *testing.T) {
	s := newSwarm(t)
	s.runShipped()
	s.knowsSums()
	before := s.backbone.usage(t)
	for _, e := range endpoints {
		if status, body := s.post(e.path, e.good); status != http.StatusOK && e.path != "/v1/embeddings" {
			t.Fatalf("%s: the good body gives %d: %s", e.path, status, body)
		}
		bodies := map[string]string{e.good[:len(e.good)-1]: "", "{}": "model"}
		if e.path == "/v1/responses" { // where all has a default
			delete(bodies, "{}")
		}
		for _, body := range noRequests {
			bodies[body] = ""
		}
		for _, w := range e.wrong {
			bodies[fmt.Sprintf(`{%q:%s,%s`, w.field, w.value, leftOf(t, e.good, w.field))] = w.field
		}
		if len(bodies) < 50 {
			t.Errorf("%s: only %d bodies", e.path, len(bodies))
		}
		for body, field := range bodies {
			status, answer := s.post(e.path, body)
			if err := badRequest(status, answer, field, strings.Contains(e.path, "messages")); err != nil {
				t.Errorf("%s with %.200s: %v", e.path, body, err)
			}
		}
	}
	s.knowsSums()
	s.backbone.level(t, before)
}

// leftOf is a JSON object less its opening brace and one field.
func leftOf(t *testing.T, object, field string) string {
	t.Helper()
	var m map[string]json.RawMessage
	if err := json.Unmarshal([]byte(object), &m); err != nil {
		t.Fatal(err)
	}
	delete(m, field)
	if len(m) == 0 {
		t.Fatalf("nothing is left of %s", object)
	}
	out, err := json.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	return string(out[1:])
}

// badRequest wants a 4xx in the shape of OpenAI or Anthropic that names the field.
func badRequest(status int, body, field string, claude bool) error {
	var failed struct {
		Type      string
		RequestID string `json:"request_id"`
		Error     struct{ Type, Message, Param string }
	}
	if err := json.Unmarshal([]byte(body), &failed); err != nil {
		return fmt.Errorf("%d, no JSON: %.300s", status, body)
	}
	shaped := failed.Error.Message != "" && failed.Error.Type != ""
	named := strings.HasPrefix(failed.Error.Param, field)
	if claude {
		shaped = shaped && failed.Type == "error" && failed.RequestID != ""
		named = strings.Contains(failed.Error.Message, field)
	}
	if status < 400 || status > 499 || !shaped || !named {
		return fmt.Errorf("%d %.300s; want a 4xx that names %q", status, body, field)
	}
	return nil
}

// runShipped starts a daemon that computes all of the shipped model itself.
func (s *swarm) runShipped(args ...string) {
	s.t.Helper()
	s.backbone = s.start("alone", append([]string{"--model", s.whole, "--experts", ExpertsHere,
		"--listen", "/ip4/127.0.0.1/tcp/0", "--http", "127.0.0.1:0"}, args...)...)
	st, err := s.backbone.await(s.ctx, serving)
	if err != nil {
		s.t.Fatal(err)
	}
	s.http = st.HTTP
}

// knowsSums asks what the shipped model is sure of.
func (s *swarm) knowsSums() {
	s.t.Helper()
	req := map[string]any{"model": shippedModel, "temperature": 0, "messages": []map[string]string{{"role": "user", "content": sumQuestion}}}
	if status, got, body := s.chat(req, nil); status != http.StatusOK || got != sumAnswer {
		s.t.Errorf("status %d, %q, want %q: %s", status, got, sumAnswer, body)
	}
}

// shippedModel is the id of the shipped model where a node serves it, and a question
// that it knows the answer of by heart.
const (
	shippedModel = "kvasir-tiny-q4_k_m"
	sumQuestion  = "What is 6 plus 7?"
	sumAnswer    = "6 plus 7 is 13."
)

// post returns the status and body of a request with this body.
func (s *swarm) post(path, body string) (int, string) {
	s.t.Helper()
	req, err := http.NewRequestWithContext(s.ctx, http.MethodPost, "http://"+s.http+path, strings.NewReader(body))
	if err != nil {
		s.t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		s.t.Fatal(err)
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	if err != nil {
		s.t.Fatal(err)
	}
	return resp.StatusCode, string(data)
}
