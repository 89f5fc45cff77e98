package gateway

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"
)

// streamChunk is the data of one server-sent event.
type streamChunk struct {
	ID      string
	Object  string
	Model   string
	Choices []struct {
		Index        int
		Delta        struct{ Role, Content *string }
		FinishReason *string `json:"finish_reason"`
	}
	Usage json.RawMessage
	Error *struct{ Message, Type string }
}

// events splits a stream and checks its frame: data lines only, [DONE] last.
func events(t testing.TB, body string) []streamChunk {
	t.Helper()
	var chunks []streamChunk
	done := false
	for line := range strings.Lines(body) {
		line = strings.TrimSuffix(line, "\n")
		if line == "" || line == ": keep-alive" {
			continue
		}
		data, ok := strings.CutPrefix(line, "data: ")
		if !ok || done {
			t.Fatalf("line %q in stream (done %v)", line, done)
		}
		if data == "[DONE]" {
			done = true
			continue
		}
		var c streamChunk
		if err := json.Unmarshal([]byte(data), &c); err != nil {
			t.Fatalf("event %q: %v", data, err)
		}
		chunks = append(chunks, c)
	}
	if !done {
		t.Fatalf("stream ends without [DONE]: %q", body)
	}
	return chunks
}

// joined is the text of the deltas and the finish reason.
func joined(chunks []streamChunk) (text, finish string) {
	for _, c := range chunks {
		for _, ch := range c.Choices {
			if ch.Delta.Content != nil {
				text += *ch.Delta.Content
			}
			if ch.FinishReason != nil {
				finish = *ch.FinishReason
			}
		}
	}
	return text, finish
}

// TestAnswer: text, finish reason and usage, the same streamed and whole.
func TestAnswer(t *testing.T) {
	tests := []struct {
		name, more       string
		pieces           []string
		engineFinish     string
		want, wantFinish string
		wantTokens       int
	}{
		{name: "plain", pieces: []string{" Par", "is", "."}, want: " Paris.", wantFinish: "stop", wantTokens: 3},
		{name: "length", pieces: []string{"a"}, engineFinish: "length", want: "a", wantFinish: "length", wantTokens: 1},
		{name: "empty", want: "", wantFinish: "stop"},
		{name: "rune over tokens", pieces: []string{"x\xf0", "\x9f", "\x98\x80", "y"}, want: "x😀y", wantFinish: "stop", wantTokens: 4},
		{name: "rune never whole", pieces: []string{"x", "\xf0\x9f"}, want: "x\uFFFD\uFFFD", wantFinish: "stop", wantTokens: 2},
		{name: "bytes that are no rune", pieces: []string{"\xff", "\xfea"}, want: "\uFFFD\uFFFDa", wantFinish: "stop", wantTokens: 2},
		{name: "stop in one token", more: `"stop":"\n"`, pieces: []string{"one\ntwo", "three"}, want: "one", wantFinish: "stop", wantTokens: 1},
		{name: "stop over tokens", more: `"stop":["END!","zzz"]`, pieces: []string{"aE", "N", "D", "!b", "c"}, want: "a", wantFinish: "stop", wantTokens: 4},
		{name: "false start", more: `"stop":["END!"]`, pieces: []string{"aE", "N", "D", "?"}, want: "aEND?", wantFinish: "stop", wantTokens: 4},
		{name: "false start at the end", more: `"stop":["END!"]`, pieces: []string{"aEN"}, want: "aEN", wantFinish: "stop", wantTokens: 1},
		{name: "false start within a start", more: `"stop":["aab"]`, pieces: []string{"a", "a", "a", "b", "c"}, want: "a", wantFinish: "stop", wantTokens: 4},
		{name: "stop with a split rune", more: `"stop":["é"]`, pieces: []string{"x\xc3", "\xa9y"}, want: "x", wantFinish: "stop", wantTokens: 2},
		{name: "stop ends the last token", more: `"stop":"."`, pieces: []string{"a", "."}, want: "a", wantFinish: "stop", wantTokens: 2},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			url, _ := serve(t, &scriptEngine{pieces: tt.pieces, finish: tt.engineFinish}, nil)
			status, _, body := post(t, url, chatBody(tt.more))
			var whole struct {
				Object  string
				Choices []struct {
					Message struct{ Role, Content string }
					Finish  string `json:"finish_reason"`
				}
				Usage usage
			}
			if err := json.Unmarshal([]byte(body), &whole); err != nil || status != 200 || len(whole.Choices) != 1 {
				t.Fatalf("status %d, %v, %s", status, err, body)
			}
			c := whole.Choices[0]
			if c.Message.Content != tt.want || c.Finish != tt.wantFinish || c.Message.Role != "assistant" || whole.Object != "chat.completion" {
				t.Errorf("whole: %+v, want %q %q", whole, tt.want, tt.wantFinish)
			}
			prompt := len("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
			wantUsage := usage{Prompt: prompt, Completion: tt.wantTokens, Total: prompt + tt.wantTokens}
			if whole.Usage != wantUsage {
				t.Errorf("usage %+v, want %+v", whole.Usage, wantUsage)
			}

			more := strings.TrimPrefix(tt.more+`,"stream":true,"stream_options":{"include_usage":true}`, ",")
			_, header, body := post(t, url, chatBody(more))
			if got := header.Get("Content-Type"); got != "text/event-stream" {
				t.Errorf("content type %q", got)
			}
			chunks := events(t, body)
			if text, finish := joined(chunks); text != tt.want || finish != tt.wantFinish {
				t.Errorf("streamed %q %q, want %q %q", text, finish, tt.want, tt.wantFinish)
			}
			last := chunks[len(chunks)-1]
			var u usage
			if err := json.Unmarshal(last.Usage, &u); err != nil || u != wantUsage || last.Choices == nil || len(last.Choices) != 0 {
				t.Errorf("last chunk %+v, want choices [] and usage %+v", last, wantUsage)
			}
		})
	}
}

func TestStreamShape(t *testing.T) {
	url, _ := serve(t, &scriptEngine{pieces: []string{"a", "b"}}, nil)
	for _, withUsage := range []bool{true, false} {
		_, _, body := post(t, url, chatBody(fmt.Sprintf(`"stream":true,"stream_options":{"include_usage":%v}`, withUsage)))
		chunks := events(t, body)
		want := 4 // role, a, b, finish
		if withUsage {
			want++
		}
		if len(chunks) != want {
			t.Fatalf("%d chunks, want %d: %s", len(chunks), want, body)
		}
		for i, c := range chunks[:4] {
			if c.ID != chunks[0].ID || !strings.HasPrefix(c.ID, "chatcmpl-") || c.Object != "chat.completion.chunk" || c.Model != "kvasir-tiny" {
				t.Errorf("chunk %d: %+v", i, c)
			}
			if (c.Choices[0].Delta.Role != nil) != (i == 0) || (c.Choices[0].FinishReason != nil) != (i == 3) {
				t.Errorf("chunk %d has role or finish_reason in the wrong place: %s", i, body)
			}
			if got, want := string(c.Usage), map[bool]string{true: "null", false: ""}[withUsage]; got != want {
				t.Errorf("chunk %d: usage %q, want %q", i, got, want)
			}
		}
	}
}

func TestRequestReachesEngine(t *testing.T) {
	e := &scriptEngine{}
	url, _ := serve(t, e, nil)
	post(t, url, chatBody(`"max_tokens":5,"max_completion_tokens":9,"temperature":0.5,"top_p":0.9,"top_k":40,"min_p":0.1,
		"seed":12,"frequency_penalty":-1,"presence_penalty":1.5,"repetition_penalty":1.1,"logit_bias":{"7":-100,"9":2.5},
		"unknown_field":{"x":1},"user":"me","n":1,"tools":[],"response_format":{"type":"text"},"logprobs":false,"tool_choice":"none"`))
	got := e.request()
	if got.MaxTokens != 9 || got.Temperature != 0.5 || got.TopP != 0.9 || got.TopK != 40 || got.MinP != 0.1 || got.Seed != 12 ||
		got.FrequencyPenalty != -1 || got.PresencePenalty != 1.5 || got.RepeatPenalty != 1.1 ||
		len(got.LogitBias) != 2 || got.LogitBias[7] != -100 || got.LogitBias[9] != 2.5 {
		t.Errorf("request %+v", got)
	}
	post(t, url, chatBody(""))
	if got := e.request(); got.MaxTokens != 0 || got.Temperature != 1 || got.TopP != 1 || got.Seed != 7 || got.RepeatPenalty != 1 {
		t.Errorf("defaults %+v", got)
	}
	post(t, url, chatBody(`"top_p":0,"max_tokens":3,"seed":-1`))
	if got := e.request(); got.Temperature != 0 || got.TopP != 1 || got.MaxTokens != 3 {
		t.Errorf("top_p 0: %+v", got)
	}
}

func TestPrompt(t *testing.T) {
	tests := []struct{ name, messages, want string }{
		{"text", `[{"role":"user","content":"a\nb"}]`, "<|im_start|>user\na\nb<|im_end|>\n"},
		{"parts", `[{"role":"user","content":[{"type":"text","text":"a"},{"type":"text","text":"\nb"}]}]`, "<|im_start|>user\na\nb<|im_end|>\n"},
		{"developer", `[{"content":"s","role":"developer"}]`, "<|im_start|>system\ns<|im_end|>\n"},
		{"assistant without content", `[{"role":"assistant","content":null},{"role":"user","content":"a"}]`, "<|im_start|>assistant\n<|im_end|>\n<|im_start|>user\na<|im_end|>\n"},
		{"assistant with no content key", `[{"role":"assistant","tool_calls":[]},{"role":"user","content":"a"}]`, "<|im_start|>assistant\n<|im_end|>\n<|im_start|>user\na<|im_end|>\n"},
		{"not escaped", `[{"role":"user","content":"<b> & '\"é😀"}]`, "<|im_start|>user\n<b> & '\"é😀<|im_end|>\n"},
	}
	for _, tt := range tests {
		e := &scriptEngine{}
		url, _ := serve(t, e, nil)
		status, _, body := post(t, url, `{"model":"kvasir-tiny","messages":`+tt.messages+`}`)
		if want := tt.want + "<|im_start|>assistant\n"; status != 200 || e.prompt() != want {
			t.Errorf("%s: status %d %s\n got %q\nwant %q", tt.name, status, body, e.prompt(), want)
		}
	}
}

func TestEngineErrors(t *testing.T) {
	missing := errors.New("layer 3: no worker holds experts 12-17")
	tests := []struct {
		name                string
		engine              *scriptEngine
		status              int
		code, retry, reason string
	}{
		{"queue full", &scriptEngine{startErr: queueFull{}}, 429, "queue_full", "2", "8 requests wait"},
		{"too long", &scriptEngine{startErr: fmt.Errorf("start: %w", tooLong{})}, 400, "context_length_exceeded", "", "900 tokens, the context holds 512"},
		{"fails at once", &scriptEngine{nextErr: missing}, 503, "engine_failed", "", "layer 3: no worker holds experts 12-17"},
	}
	for _, tt := range tests {
		for _, stream := range []bool{false, true} {
			url, _ := serve(t, tt.engine, nil)
			status, header, body := post(t, url, chatBody(fmt.Sprintf(`"stream":%v`, stream)))
			e := decodeError(t, body)
			if status != tt.status || e.Error.Code == nil || *e.Error.Code != tt.code || header.Get("Retry-After") != tt.retry ||
				!strings.Contains(e.Error.Message, tt.reason) {
				t.Errorf("%s, stream %v: %d, retry %q, %s", tt.name, stream, status, header.Get("Retry-After"), body)
			}
		}
	}
}

func TestFailureInMidStream(t *testing.T) {
	e := &scriptEngine{pieces: []string{"a"}, nextErr: errors.New("layer 3 is gone")}
	url, _ := serve(t, e, nil)
	status, _, body := post(t, url, chatBody(`"stream":true`))
	chunks := events(t, body)
	last := chunks[len(chunks)-1]
	if status != 200 || last.Error == nil || last.Error.Message != "layer 3 is gone" || last.Error.Type != "server_error" {
		t.Errorf("status %d, last event %+v", status, last)
	}
	if text, finish := joined(chunks); text != "a" || finish != "" {
		t.Errorf("text %q, finish %q; a failed answer has no finish_reason", text, finish)
	}
	if status, _, body := post(t, url, chatBody("")); status != 503 {
		t.Errorf("unstreamed: status %d %s", status, body)
	}
}

// TestDisconnect: the client goes; the generation ends and 499 is logged.
func TestDisconnect(t *testing.T) {
	for _, stream := range []bool{true, false} {
		e := &scriptEngine{pieces: []string{"a"}, block: true}
		url, logged := serve(t, e, nil)
		ctx, cancel := context.WithCancel(t.Context())
		req, err := http.NewRequestWithContext(ctx, http.MethodPost, url+"/v1/chat/completions",
			strings.NewReader(chatBody(fmt.Sprintf(`"stream":%v`, stream))))
		if err != nil {
			t.Fatal(err)
		}
		gone := make(chan error, 1)
		go func() {
			resp, err := http.DefaultClient.Do(req)
			if err == nil {
				_, err = io.Copy(io.Discard, resp.Body)
				resp.Body.Close()
			}
			gone <- err
		}()
		waitFor(t, "the generation runs", func() bool { return e.running() == 1 })
		cancel()
		<-gone
		waitFor(t, "the generation ends", func() bool { return e.running() == 0 })
		waitFor(t, "499 is logged", func() bool { return strings.Contains(logged.String(), "status=499") })
	}
}

// TestKeepAlive: a slow first token; the stream begins, and is kept alive by
// comments that are no events.
func TestKeepAlive(t *testing.T) {
	e := &scriptEngine{pieces: []string{"a"}, delay: 300 * time.Millisecond}
	url, _ := serve(t, e, func(g *Gateway) { g.waits.header, g.waits.ping = time.Millisecond, 100*time.Millisecond })
	resp, err := http.Post(url+"/v1/chat/completions", "application/json", strings.NewReader(chatBody(`"stream":true`)))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(bufio.NewReader(resp.Body))
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(body), "\n: keep-alive\ndata: ") {
		t.Errorf("no comment before the next event in %q", body)
	}
	if text, finish := joined(events(t, string(body))); text != "a" || finish != "stop" {
		t.Errorf("text %q, finish %q", text, finish)
	}
}

func TestRender(t *testing.T) {
	g, err := New(Config{Models: []Model{{ID: "m", ChatTemplate: chatML, Engine: &scriptEngine{}}}})
	if err != nil {
		t.Fatal(err)
	}
	got, err := g.Render(t.Context(), "m", []Message{{"user", "hi"}})
	if want := "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"; err != nil || got != want {
		t.Errorf("got %q, %v; want %q", got, err, want)
	}
	if _, err := g.Render(t.Context(), "n", nil); err == nil || !strings.Contains(err.Error(), `"n" is not served`) {
		t.Errorf("unknown model: %v", err)
	}
}
