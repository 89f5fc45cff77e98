package gateway

import (
	"encoding/base64"
	"encoding/binary"
	"errors"
	"math"
	"strings"
	"testing"
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
