//go:build sdk && cgo && linux

package node

import (
	"errors"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/openai/openai-go/v3"
)

// TestOpenAIEmbeddings: every form of input and of vector, and what is refused.
func TestOpenAIEmbeddings(t *testing.T) {
	s := newSwarm(t)
	e := newEmbedder(t, s.dir, "bert")
	s.serveEmbedder(e)
	client := s.openAI()
	var tokens [][]int64
	used := int64(0)
	for _, text := range embedTexts {
		var list []int64
		for _, tok := range e.tokens(t, text) {
			list = append(list, int64(tok))
		}
		tokens = append(tokens, list)
		used += int64(len(list))
	}
	type input = openai.EmbeddingNewParamsInputUnion
	for _, row := range []struct {
		name  string
		input input
		n     int // of embedTexts
	}{
		{"text", input{OfString: openai.String(embedTexts[0])}, 1},
		{"texts", input{OfArrayOfStrings: embedTexts}, len(embedTexts)},
		{"tokens", input{OfArrayOfTokens: tokens[0]}, 1},
		{"lists of tokens", input{OfArrayOfTokenArrays: tokens}, len(embedTexts)},
	} {
		got, err := client.Embeddings.New(s.ctx, openai.EmbeddingNewParams{
			Model: e.name, Input: row.input, EncodingFormat: openai.EmbeddingNewParamsEncodingFormatFloat, User: openai.String("me"),
		})
		if err != nil {
			t.Errorf("%s: %s", row.name, openAIError(err))
			continue
		}
		if len(got.Data) != row.n || got.Model != e.name || got.Usage.PromptTokens != got.Usage.TotalTokens ||
			row.n == 1 && got.Usage.PromptTokens != int64(len(tokens[0])) || row.n > 1 && got.Usage.PromptTokens != used {
			t.Errorf("%s: %d vectors of %s, usage %+v", row.name, len(got.Data), got.Model, got.Usage)
		}
		for i, d := range got.Data {
			if err := sameVector(d.Embedding, e.vector(t, e.tokens(t, embedTexts[i])), roundingBeside); err != nil || d.Index != int64(i) {
				t.Errorf("%s %d: %v", row.name, d.Index, err)
			}
		}
	}
	ask := func(change func(*openai.EmbeddingNewParams)) error {
		p := openai.EmbeddingNewParams{Model: e.name, Input: input{OfString: openai.String("a")}}
		change(&p)
		_, err := client.Embeddings.New(s.ctx, p)
		return err
	}
	for param, err := range map[string]error{
		"dimensions":      ask(func(p *openai.EmbeddingNewParams) { p.Dimensions = openai.Int(8) }),
		"encoding_format": ask(func(p *openai.EmbeddingNewParams) { p.EncodingFormat = "int8" }),
		"input[0]":        ask(func(p *openai.EmbeddingNewParams) { p.Input = input{OfString: openai.String("")} }),
		"input":           ask(func(p *openai.EmbeddingNewParams) { p.Input.OfString = openai.String(strings.Repeat("word ", 600)) }),
		"model":           second(client.Chat.Completions.New(s.ctx, openai.ChatCompletionNewParams{Model: e.name, Messages: user("Hi")})),
	} {
		var failed *openai.Error
		if !errors.As(err, &failed) || failed.StatusCode != 400 || failed.Type != "invalid_request_error" || !strings.HasPrefix(failed.Param, param) {
			t.Errorf("want a 400 that names %q, got %s", param, openAIError(err))
		}
	}
}

// TestJavaScriptEmbeddings runs the test of embeddings in testdata/sdk.
func TestJavaScriptEmbeddings(t *testing.T) {
	s := newSwarm(t)
	e := newEmbedder(t, s.dir, "bert")
	s.serveEmbedder(e)
	cmd := exec.CommandContext(s.ctx, "node", "--test", "--test-reporter=spec", "embeddings.js")
	cmd.Dir = "testdata/sdk"
	cmd.Env = append(os.Environ(), "KVASIR_URL=http://"+s.http, "KVASIR_MODEL="+e.name)
	out, err := cmd.CombinedOutput()
	if err != nil || !strings.Contains(string(out), "ℹ pass 4\n") {
		t.Fatalf("%v\n%s", err, out)
	}
}
