//go:build sdk && cgo && linux

package node

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/option"
	"github.com/openai/openai-go/v3/responses"
	"github.com/openai/openai-go/v3/shared"
)

func TestOpenAIModels(t *testing.T) {
	s := runSDKDaemon(t)
	client := s.openAI()
	list, err := client.Models.List(s.ctx)
	if err != nil {
		t.Fatal(openAIError(err))
	}
	if len(list.Data) != 1 || list.Data[0].ID != shippedModel || list.Data[0].Created == 0 {
		t.Errorf("%s", list.RawJSON())
	}
	if m, err := client.Models.Get(s.ctx, shippedModel); err != nil || m.ID != shippedModel || m.OwnedBy == "" {
		t.Errorf("%+v: %s", m, openAIError(err))
	}
}

// TestOpenAICompletions: the older API, of raw texts and tokens.
func TestOpenAICompletions(t *testing.T) {
	s := runSDKDaemon(t)
	client := s.openAI()
	prompt := "The capital of France is"
	ids, err := reference().eng.Tokenize(prompt)
	if err != nil {
		t.Fatal(err)
	}
	tokens := make([]int64, len(ids))
	for i, id := range ids {
		tokens[i] = int64(id)
	}
	type prompts = openai.CompletionNewParamsPromptUnion
	for _, row := range []struct {
		name   string
		change func(*openai.CompletionNewParams)
		want   []string
	}{
		{name: "text", change: func(p *openai.CompletionNewParams) {}, want: []string{" Paris."}},
		{name: "tokens", change: func(p *openai.CompletionNewParams) { p.Prompt = prompts{OfArrayOfTokens: tokens} }, want: []string{" Paris."}},
		{name: "lists of tokens", change: func(p *openai.CompletionNewParams) {
			p.Prompt = prompts{OfArrayOfTokenArrays: [][]int64{tokens, tokens}}
		},
			want: []string{" Paris.", " Paris."}},
		{name: "texts", change: func(p *openai.CompletionNewParams) {
			p.Prompt = prompts{OfArrayOfStrings: []string{prompt, "The capital of Japan is"}}
		}, want: []string{" Paris.", " Tokyo."}},
		{name: "n", change: func(p *openai.CompletionNewParams) { p.N = openai.Int(2) }, want: []string{" Paris.", " Paris."}},
		{name: "stop", change: func(p *openai.CompletionNewParams) { p.Stop.OfString = openai.String("ris") }, want: []string{" Pa"}},
		{name: "logprobs", change: func(p *openai.CompletionNewParams) { p.Logprobs = openai.Int(1) }, want: []string{" Paris."}},
	} {
		t.Run(row.name, func(t *testing.T) {
			p := openai.CompletionNewParams{Model: shippedModel, Prompt: prompts{OfString: openai.String(prompt)}, Temperature: openai.Float(0)}
			p.Stop.OfStringArray = []string{"\n"}
			row.change(&p)
			if p.Stop.OfString.Valid() {
				p.Stop.OfStringArray = nil
			}
			whole, err := client.Completions.New(s.ctx, p)
			if err != nil {
				t.Fatal(openAIError(err))
			}
			p.StreamOptions.IncludeUsage = openai.Bool(true)
			streamed := make([]string, len(row.want))
			var usage openai.CompletionUsage
			stream := client.Completions.NewStreaming(s.ctx, p)
			for stream.Next() {
				usage = stream.Current().Usage
				for _, c := range stream.Current().Choices {
					streamed[c.Index] += c.Text
				}
			}
			if err := stream.Err(); err != nil {
				t.Fatal(openAIError(err))
			}
			for i, want := range row.want {
				if got := whole.Choices[i]; strings.TrimRight(got.Text, "\n") != want || streamed[i] != got.Text || got.Index != int64(i) || got.FinishReason == "" {
					t.Errorf("answer %d is %q, streamed %q, want %q", i, got.Text, streamed[i], want)
				}
				if l := whole.Choices[i].Logprobs; row.name == "logprobs" && (strings.Join(l.Tokens, "") != whole.Choices[i].Text || len(l.TokenLogprobs) != len(l.Tokens) || len(l.TopLogprobs) != len(l.Tokens)) {
					t.Errorf("logprobs %s", l.RawJSON())
				}
			}
			if usage.PromptTokens == 0 || usage.PromptTokens != whole.Usage.PromptTokens || usage.CompletionTokens != whole.Usage.CompletionTokens {
				t.Errorf("usage %+v, streamed %+v", whole.Usage, usage)
			}
		})
	}
}

// TestOpenAIErrors: the client sees each failure as its own type, with the field.
func TestOpenAIErrors(t *testing.T) {
	s := runSDKDaemon(t)
	client := s.openAI()
	chat := func(change func(*openai.ChatCompletionNewParams), opts ...option.RequestOption) error {
		p := openai.ChatCompletionNewParams{Model: shippedModel, Messages: user("Hi"), MaxTokens: openai.Int(4)}
		change(&p)
		_, err := client.Chat.Completions.New(s.ctx, p, opts...)
		stream := client.Chat.Completions.NewStreaming(s.ctx, p, opts...)
		if stream.Next() || openAIError(stream.Err()) != openAIError(err) {
			t.Errorf("streamed, it is %s; whole, %s", openAIError(stream.Err()), openAIError(err))
		}
		return err
	}
	none := func(*openai.ChatCompletionNewParams) {}
	complete := func(change func(*openai.CompletionNewParams)) error {
		p := openai.CompletionNewParams{Model: shippedModel, Prompt: openai.CompletionNewParamsPromptUnion{OfString: openai.String("a")}}
		change(&p)
		_, err := client.Completions.New(s.ctx, p)
		return err
	}
	for _, row := range []struct {
		name        string
		err         error
		status      int
		param, code string
		says        []string
	}{
		{"temperature", chat(func(p *openai.ChatCompletionNewParams) { p.Temperature = openai.Float(3) }), 400, "temperature", "invalid_value", []string{"3"}},
		{"n", chat(func(p *openai.ChatCompletionNewParams) { p.N = openai.Int(9) }), 400, "n", "invalid_value", nil},
		{"no messages", chat(func(p *openai.ChatCompletionNewParams) { p.Messages = []openai.ChatCompletionMessageParamUnion{} }), 400, "messages", "invalid_value", nil},
		{"image", chat(func(p *openai.ChatCompletionNewParams) {
			p.Messages = []openai.ChatCompletionMessageParamUnion{openai.UserMessage([]openai.ChatCompletionContentPartUnionParam{
				openai.ImageContentPart(openai.ChatCompletionContentPartImageImageURLParam{URL: "data:,"})})}
		}), 400, "messages[0].content[0].type", "invalid_value", []string{"image_url"}},
		{"audio", chat(func(p *openai.ChatCompletionNewParams) { p.Modalities = []string{"text", "audio"} }), 400, "modalities", "invalid_value", nil},
		{"functions", chat(none, option.WithJSONSet("functions", []any{map[string]any{"name": "f"}})), 400, "functions", "invalid_value", nil},
		{"top_logprobs alone", chat(func(p *openai.ChatCompletionNewParams) { p.TopLogprobs = openai.Int(2) }), 400, "top_logprobs", "invalid_value", nil},
		{"token", chat(func(p *openai.ChatCompletionNewParams) { p.LogitBias = map[string]int64{"99999999": 1} }), 400, "logit_bias", "invalid_value", nil},
		{"tool that is not there", chat(func(p *openai.ChatCompletionNewParams) {
			offer(p)
			p.ToolChoice = openai.ToolChoiceOptionFunctionToolChoice(openai.ChatCompletionNamedToolChoiceFunctionParam{Name: "other"})
		}), 400, "tool_choice", "invalid_value", []string{"other"}},
		{"form and tools", chat(func(p *openai.ChatCompletionNewParams) {
			offer(p)
			p.ResponseFormat.OfJSONObject = &shared.ResponseFormatJSONObjectParam{}
		}), 400, "response_format", "unsupported_value", []string{"tools"}},
		{"too long", chat(func(p *openai.ChatCompletionNewParams) { p.Messages = user(tooLong()) }), 400, "messages", "context_length_exceeded", []string{"2048", "tokens"}},
		{"too large", chat(func(p *openai.ChatCompletionNewParams) { p.Messages = user(tooLarge()) }), 413, "", "body_too_large", nil},
		{"model", chat(func(p *openai.ChatCompletionNewParams) { p.Model = "kvasir-tiny" }), 404, "model", "model_not_found", []string{"kvasir-tiny", shippedModel}},
		{"page", chat(none, option.WithHeader("Origin", "https://evil.example")), 403, "", "foreign_origin", []string{"evil.example"}},
		{"echo", complete(func(p *openai.CompletionNewParams) { p.Echo = openai.Bool(true) }), 400, "echo", "invalid_value", nil},
		{"suffix", complete(func(p *openai.CompletionNewParams) { p.Suffix = openai.String("s") }), 400, "suffix", "invalid_value", nil},
		{"best_of", complete(func(p *openai.CompletionNewParams) { p.BestOf = openai.Int(3) }), 400, "best_of", "invalid_value", nil},
		{"embeddings", second(client.Embeddings.New(s.ctx, openai.EmbeddingNewParams{Model: shippedModel, Input: openai.EmbeddingNewParamsInputUnion{OfString: openai.String("a")}})),
			400, "model", "unsupported_value", []string{"no embeddings"}},
		{"dimensions", second(client.Embeddings.New(s.ctx, openai.EmbeddingNewParams{Model: shippedModel, Dimensions: openai.Int(3),
			Input: openai.EmbeddingNewParamsInputUnion{OfString: openai.String("a")}})), 400, "dimensions", "invalid_value", nil},
		{"background", second(client.Responses.New(s.ctx, responses.ResponseNewParams{Model: shippedModel, Background: openai.Bool(true)})), 400, "background", "invalid_value", nil},
		{"unknown model", second(client.Models.Get(s.ctx, "gpt-9")), 404, "model", "model_not_found", []string{"gpt-9", shippedModel}},
		{"path", second(client.Files.List(s.ctx, openai.FileListParams{})), 404, "", "unknown_url", []string{"/v1/files"}},
	} {
		var failed *openai.Error
		if !errors.As(row.err, &failed) || failed.StatusCode != row.status || failed.Param != row.param || failed.Code != row.code ||
			failed.Type == "" || failed.Response.Header.Get("X-Request-Id") == "" {
			t.Errorf("%s: %s; want %d %s %s", row.name, openAIError(row.err), row.status, row.param, row.code)
			continue
		}
		if err := says(failed.Message, row.says...); err != nil {
			t.Errorf("%s: %v", row.name, err)
		}
	}
}

func second[T any](_ T, err error) error { return err }

// TestOpenAIOverload: a full queue is a 429 that says when to come back, and the
// client does, by itself.
func TestOpenAIOverload(t *testing.T) {
	s := runSDKDaemon(t, narrow...)
	client := s.openAI()
	free := s.fill()
	p := openai.ChatCompletionNewParams{Model: shippedModel, Messages: user(sumQuestion), Temperature: openai.Float(0)}
	var failed *openai.Error
	_, err := client.Chat.Completions.New(s.ctx, p)
	if !errors.As(err, &failed) || failed.StatusCode != http.StatusTooManyRequests || failed.Type != "rate_limit_error" || failed.Code != "queue_full" {
		t.Fatal(openAIError(err))
	}
	after, err := strconv.Atoi(failed.Response.Header.Get("Retry-After"))
	if err != nil || after < 1 || after > 60 {
		t.Fatalf("Retry-After: %q", failed.Response.Header.Get("Retry-After"))
	}
	var tries []int
	var once sync.Once
	began := time.Now()
	watch := func(r *http.Request, next option.MiddlewareNext) (*http.Response, error) {
		resp, err := next(r)
		if err == nil {
			tries = append(tries, resp.StatusCode)
			once.Do(free)
		}
		return resp, err
	}
	c, err := client.Chat.Completions.New(s.ctx, p, option.WithMaxRetries(2), option.WithMaxRetryDelay(time.Minute), option.WithMiddleware(watch))
	if err != nil {
		t.Fatal(openAIError(err))
	}
	if fmt.Sprint(tries) != "[429 200]" || c.Choices[0].Message.Content != sumAnswer || time.Since(began) < time.Second {
		t.Errorf("tries %v within %v, then %q", tries, time.Since(began), c.Choices[0].Message.Content)
	}
	s.idle(5 * time.Second)
}

// TestOpenAICancel: who goes away frees the place.
func TestOpenAICancel(t *testing.T) {
	s := runSDKDaemon(t, narrow...)
	client := s.openAI()
	ctx, cancel := context.WithCancel(s.ctx)
	defer cancel()
	p := openai.ChatCompletionNewParams{Model: shippedModel, Messages: user(sumQuestion)}
	withoutEnd(&p)
	p.MaxCompletionTokens = openai.Int(1 << 20)
	stream := client.Chat.Completions.NewStreaming(ctx, p)
	for n := 0; stream.Next(); n++ {
		if n == 5 {
			cancel()
		}
	}
	if err := stream.Err(); !errors.Is(err, context.Canceled) {
		t.Errorf("the stream ended with %v", err)
	}
	s.idle(2 * time.Second)
}
