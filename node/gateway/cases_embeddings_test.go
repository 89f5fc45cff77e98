package gateway

import (
	"encoding/base64"
	"encoding/binary"
	"errors"
	"math"
	"strings"
	"testing"
	"time"
)

// lengths embeds a prompt as its number of tokens and a half.
func lengths(prompts [][]int32) ([][]float32, error) {
	var out [][]float32
	for _, p := range prompts {
		out = append(out, []float32{float32(len(p)), 0.5})
	}
	return out, nil
}

func TestCase68Base64(t *testing.T) {
	url, _ := serveCases(t, &scriptEngine{able: &Abilities{}, vectors: lengths}, nil)
	m := ask(t, url+"/v1/embeddings", `{"model":"qwen","input":"abc","encoding_format":"base64"}`)
	text, _ := at(m, "data", 0, "embedding").(string)
	data, err := base64.StdEncoding.DecodeString(text)
	if err != nil || len(data) != 8 || math.Float32frombits(binary.LittleEndian.Uint32(data)) != 3 || math.Float32frombits(binary.LittleEndian.Uint32(data[4:])) != 0.5 {
		t.Errorf("embedding %q (%v)", text, err)
	}
	for _, format := range []string{``, `,"encoding_format":"float"`, `,"encoding_format":null`} {
		m := ask(t, url+"/v1/embeddings", `{"model":"qwen","input":"abc"`+format+`}`)
		want(t, format, at(m, "data", 0, "embedding"), `[3,0.5]`)
	}
}

func TestCase69Inputs(t *testing.T) {
	e := &scriptEngine{able: &Abilities{}, vectors: lengths}
	url, _ := serveCases(t, e, nil)
	for request, expected := range map[string]string{
		`"ab"`:            `[{"object":"embedding","index":0,"embedding":[2,0.5]}]`,
		`["ab","c"]`:      `[{"object":"embedding","index":0,"embedding":[2,0.5]},{"object":"embedding","index":1,"embedding":[1,0.5]}]`,
		`[1,2,3]`:         `[{"object":"embedding","index":0,"embedding":[3,0.5]}]`,
		`[[1,2],[3,4,5]]`: `[{"object":"embedding","index":0,"embedding":[2,0.5]},{"object":"embedding","index":1,"embedding":[3,0.5]}]`,
	} {
		want(t, request, ask(t, url+"/v1/embeddings", `{"model":"qwen","input":`+request+`}`)["data"], expected)
	}
	m := ask(t, url+"/v1/embeddings", `{"model":"qwen","input":["ab","c"]}`)
	want(t, "usage", m["usage"], `{"prompt_tokens":3,"total_tokens":3}`)
	for request, param := range map[string]string{
		`"input":"a","dimensions":8`: "dimensions", `"input":[]`: "input", `"input":{}`: "input", `"input":[{}]`: "input[0]", `"input":""`: "input[0]",
		`"input":[[]]`: "input[0]", `"input":[1,-1]`: "input", `"input":[1,"a"]`: "input", `"input":[100]`: "input[0]", `"input":"a","encoding_format":"int8"`: "encoding_format",
	} {
		if got, message := refusal(t, url+"/v1/embeddings", `{"model":"qwen",`+request+`}`); got != param {
			t.Errorf("%s: param %q, %s", request, got, message)
		}
	}
	e.vectors = func([][]int32) ([][]float32, error) { return nil, errors.New("no worker") }
	if status, _, text := send(t, url+"/v1/embeddings", `{"model":"qwen","input":"a"}`); status != 503 || !strings.Contains(text, "no worker") {
		t.Errorf("failed: %d %s", status, text)
	}
	e.vectors = func([][]int32) ([][]float32, error) { return [][]float32{{float32(math.NaN())}}, nil }
	if status, _, text := send(t, url+"/v1/embeddings", `{"model":"qwen","input":"a"}`); status != 503 || !strings.Contains(text, "not finite") {
		t.Errorf("not finite: %d %s", status, text)
	}
	plain, _ := serveCases(t, &scriptEngine{}, nil)
	if param, message := refusal(t, plain+"/v1/embeddings", `{"model":"qwen","input":"a"}`); param != "model" || !strings.Contains(message, "no embeddings") {
		t.Errorf("model without: %s %s", param, message)
	}
}

// overlongInput is an engine's word for an input that does not fit.
type overlongInput struct{}

func (overlongInput) Error() string             { return "input 0 has 9 tokens; the model takes 8" }
func (overlongInput) ContextLength() (int, int) { return 9, 8 }

// TestEmbeddingsOwnerAndEnds: who asks, an input that is too long, and the deadline are
// told as those of answers.
func TestEmbeddingsOwnerAndEnds(t *testing.T) {
	e := &scriptEngine{able: &Abilities{}, vectors: func([][]int32) ([][]float32, error) { return nil, overlongInput{} }}
	url, g := serveCases(t, e, nil)
	if param, message := refusal(t, url+"/v1/embeddings", `{"model":"qwen","input":"a"}`); param != "input" || !strings.Contains(message, "9 tokens") || !strings.Contains(message, "takes 8") {
		t.Errorf("too long: %s %s", param, message)
	}
	if got := e.request().Owner; got != "127.0.0.1" {
		t.Errorf("the engine hears that %q asks", got)
	}
	g.cfg.Limit, e.block = 50*time.Millisecond, true
	if status, _, text := send(t, url+"/v1/embeddings", `{"model":"qwen","input":"a"}`); status != 504 || !strings.Contains(text, codeTooSlow) {
		t.Errorf("deadline: %d %s", status, text)
	}
}

// TestNoText: a model of embeddings is asked for no text, at no door.
func TestNoText(t *testing.T) {
	url, g := serveCases(t, &scriptEngine{able: &Abilities{}, vectors: lengths}, func(cfg *Config) { cfg.Models[0].NoText = true })
	const chat = `"messages":[{"role":"user","content":"x"}],"max_tokens":9`
	for path, body := range map[string]string{
		"/v1/chat/completions": chat, "/v1/completions": `"prompt":"x"`, "/v1/responses": `"input":"x"`,
		"/v1/messages": chat, "/v1/messages/count_tokens": chat,
	} {
		status, _, text := send(t, url+path, `{"model":"qwen",`+body+`}`)
		if status != 400 || !strings.Contains(text, "no text") || !strings.Contains(text, "/v1/embeddings") {
			t.Errorf("%s: %d %s", path, status, text)
		}
	}
	if _, err := g.Render(t.Context(), "qwen", []Message{{"user", "x"}}); err == nil || !strings.Contains(err.Error(), "no text") {
		t.Errorf("rendered: %v", err)
	}
	want(t, "embeddings", ask(t, url+"/v1/embeddings", `{"model":"qwen","input":"abc"}`)["usage"], `{"prompt_tokens":3,"total_tokens":3}`)
}
