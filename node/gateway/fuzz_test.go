package gateway

import (
	"bytes"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"kvasird/node/gateway/jinja"
)

var fuzzPaths = []string{chatPath, "/v1/completions", "/v1/embeddings", responsesPath, messagesPath, messagesPath + "/count_tokens"}

// FuzzBodies: every body is answered with 200 or with a 4xx in the shape of its
// API, streams with their last event.
func FuzzBodies(f *testing.F) {
	seeds := []string{
		body(`"stream":true,"stop":["a"],"logit_bias":{"1":2},"seed":1,"max_tokens":3`, weatherTool, `"tool_choice":"required"`),
		body(`"temperature":1e400`), "{\"model\":\"\xff\"}",
		body(`"response_format":{"type":"json_schema","json_schema":{"schema":{"type":"object","properties":{"a":{"enum":[1,"b"]}}}}}`, `"logprobs":true,"top_logprobs":2,"n":2`),
		turnsOf(`{"role":"user","content":[{"type":"text","text":"\ud800"}]},{"role":"assistant","tool_calls":[{"id":"1","function":{"name":"f","arguments":"{\"a\":"}}]}`),
		turnsOf(`{"role":"user","content":"x","name":{"a":[[[]]]}}`, `"chat_template_kwargs":{"messages":1,"tools":2,"bos_token":{}}`),
		turnsOf(`{"role":"assistant","content":[{"type":"thinking","thinking":"t"},{"type":"tool_use","id":"a","name":"f","input":{}}]},
			{"role":"user","content":[{"type":"tool_result","tool_use_id":"a","content":[{"type":"image"}]}]}`, `"max_tokens":3,"stream":true,"system":[{"type":"text","text":"s"}]`, claudeTool),
		input(`[{"type":"reasoning","summary":[],"encrypted_content":"kvasir1:AA=="},{"type":"function_call","call_id":"c","name":"f","arguments":"{}"},
			{"type":"function_call_output","call_id":"c","output":[{"type":"input_text","text":"x"}]}]`, patchTool, `"stream":true,"include":["message.output_text.logprobs"]`),
		input(`"x"`, `"previous_response_id":"resp_1"`, flatTool, `"tool_choice":{"type":"function","name":"get_weather"}`),
		`{"model":"qwen","prompt":["a",[1,2]],"logprobs":2,"stream":true,"n":2}`, `{"model":"qwen","input":[[1,2],"x"],"encoding_format":"base64"}`,
	}
	for i := range fuzzPaths {
		for _, s := range seeds {
			f.Add(byte(i), []byte(s))
		}
	}
	e := &scriptEngine{pieces: []string{"<think>\na\n</think>\n\nb ", weatherCall}, able: &Abilities{true, true, true}, vectors: lengths}
	g, err := New(Config{Models: []Model{{ID: "qwen", ChatTemplate: qwen, VocabSize: 100, Engine: e.engine()}}})
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, route byte, body []byte) {
		e.prompts, e.seeds = nil, nil
		path := fuzzPaths[int(route)%len(fuzzPaths)]
		r := httptest.NewRequest(http.MethodPost, "http://localhost"+path, bytes.NewReader(body))
		w := httptest.NewRecorder()
		g.Handler().ServeHTTP(w, r)
		text := w.Body.String()
		switch {
		case w.Code == 200 && w.Header().Get("Content-Type") == "text/event-stream":
			if splitEvents(t, text); !strings.Contains(text, "[DONE]") && !strings.Contains(text, "message_stop") && !strings.Contains(text, `"response.`) {
				t.Errorf("stream has no end: %q", text)
			}
		case w.Code == 200 && json.Valid([]byte(text)):
		case w.Code >= 400 && w.Code < 500 && strings.HasPrefix(path, "/anthropic"):
			if m := object(t, text); m["type"] != "error" || at(m, "error", "message") == nil {
				t.Errorf("not an error in Anthropic's shape: %q", text)
			}
		case w.Code >= 400 && w.Code < 500:
			decodeError(t, text)
		default:
			t.Errorf("status %d for %q: %s", w.Code, body, text)
		}
	})
}

// FuzzEncodings: a body in any encoding is one of at most maxBody bytes, or a 4xx.
func FuzzEncodings(f *testing.F) {
	f.Add("zstd", []byte{0x28, 0xb5, 0x2f, 0xfd, 0x04, 0x00, 0x11, 0x00, 0x00, 'a', 'b', 0, 0, 0, 0})
	f.Add("zstd", []byte{0x28, 0xb5, 0x2f, 0xfd, 0xa0, 0, 0, 0, 0x40, 1, 0, 0})
	f.Add("zstd", []byte{0x50, 0x2a, 0x4d, 0x18, 0xff, 0xff, 0xff, 0xff, 0})
	f.Add("gzip", []byte{0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 0xff, 1, 0, 0, 0xff, 0xff})
	f.Add("deflate", []byte{0x78, 0x9c, 3, 0, 0, 0, 0, 1})
	f.Add("br", []byte{1})
	g, err := New(Config{})
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, encoding string, body []byte) {
		r := httptest.NewRequest(http.MethodPost, "http://localhost/", nil)
		r.Header.Set("Content-Encoding", encoding)
		hold := &held{}
		data, e := g.decodeBody(r, bytes.NewReader(body), hold)
		hold.release()
		if e != nil && (e.status < 400 || e.status > 415) || len(data) > maxBody {
			t.Errorf("%q: %d bytes, %v", encoding, len(data), e)
		}
	})
}

// FuzzEncode: what is decoded and written back is the same value.
func FuzzEncode(f *testing.F) {
	for _, s := range []string{`{"z":1,"a":[true,null,-0.5,1e300,"<é>\u2028\n"],"":{}}`, `9223372036854775808`, `"\u0000"`, `-0`, `1e-7`} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		v, err := jinja.DecodeJSON(data)
		if err != nil {
			return
		}
		if n := countValues(data); n < 1 || n > len(data)+1 {
			t.Errorf("%d values in %q", n, data)
		}
		once := jsonOf(v)
		again, err := jinja.DecodeJSON(once)
		if err != nil || string(jsonOf(again)) != string(once) {
			t.Errorf("%q becomes %q, then %v", data, once, err)
		}
	})
}
