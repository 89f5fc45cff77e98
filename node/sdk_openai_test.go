//go:build sdk && cgo && linux

package node

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/option"
	"github.com/openai/openai-go/v3/shared"
)

func (s *swarm) openAI(opts ...option.RequestOption) openai.Client {
	return openai.NewClient(append([]option.RequestOption{
		option.WithBaseURL("http://" + s.http + "/v1"), option.WithAPIKey("none is asked for"), option.WithMaxRetries(0),
	}, opts...)...)
}

func openAIError(err error) string {
	var failed *openai.Error
	if !errors.As(err, &failed) {
		return fmt.Sprint(err)
	}
	return fmt.Sprintf("%d %s", failed.StatusCode, failed.RawJSON())
}

// chatRow is an option of /v1/chat/completions and what it must do, streamed or not.
type chatRow struct {
	name   string
	change func(*openai.ChatCompletionNewParams)
	opts   []option.RequestOption
	check  func(*openai.ChatCompletion) error
}

// says wants this text and reason of every answer.
func chatSays(want, finish string) func(*openai.ChatCompletion) error {
	return func(c *openai.ChatCompletion) error {
		for i, choice := range c.Choices {
			if choice.Message.Content != want || choice.FinishReason != finish || choice.Index != int64(i) {
				return fmt.Errorf("answer %d is %q, %s; want %q, %s", choice.Index, choice.Message.Content, choice.FinishReason, want, finish)
			}
		}
		return nil
	}
}

func chatAny(*openai.ChatCompletion) error { return nil }

// withoutEnd keeps the model from ending its answer before the limit of tokens.
func withoutEnd(p *openai.ChatCompletionNewParams) {
	p.LogitBias = map[string]int64{}
	for token := range endBias() {
		p.LogitBias[token] = -100
	}
	p.MaxCompletionTokens = openai.Int(32)
}

func chatDiffers(from string) func(*openai.ChatCompletion) error {
	return func(c *openai.ChatCompletion) error {
		if got := c.Choices[0].Message.Content; got == "" || strings.HasPrefix(from, got) || c.Choices[0].FinishReason != "length" {
			return fmt.Errorf("%q, %s: it changed nothing", got, c.Choices[0].FinishReason)
		}
		return nil
	}
}

func user(content string) []openai.ChatCompletionMessageParamUnion {
	return []openai.ChatCompletionMessageParamUnion{openai.UserMessage(content)}
}

func samplingRows(t *testing.T) []chatRow {
	plain := reference().answer(t, sumQuestion, true) // with no end
	token := func(s string) string {
		ids, err := reference().eng.Tokenize(s)
		if err != nil || len(ids) != 1 {
			t.Fatalf("%q is %v tokens: %v", s, ids, err)
		}
		return fmt.Sprint(ids[0])
	}
	hot := openai.Float(2)
	return []chatRow{
		{name: "greedy", change: func(p *openai.ChatCompletionNewParams) {}, check: chatSays(sumAnswer, "stop")},
		{name: "top_p", change: func(p *openai.ChatCompletionNewParams) { p.Temperature, p.TopP = hot, openai.Float(1e-9) }, check: chatSays(sumAnswer, "stop")},
		{name: "top_k", change: func(p *openai.ChatCompletionNewParams) { p.Temperature = hot },
			opts: []option.RequestOption{option.WithJSONSet("top_k", 1)}, check: chatSays(sumAnswer, "stop")},
		{name: "min_p", change: func(p *openai.ChatCompletionNewParams) { p.Temperature = hot },
			opts: []option.RequestOption{option.WithJSONSet("min_p", 1)}, check: chatSays(sumAnswer, "stop")},
		{name: "seed", change: func(p *openai.ChatCompletionNewParams) { withoutEnd(p); p.Temperature, p.Seed = hot, openai.Int(7) }, check: chatDiffers(plain)},
		{name: "frequency_penalty", change: func(p *openai.ChatCompletionNewParams) { withoutEnd(p); p.FrequencyPenalty = openai.Float(2) }, check: chatDiffers(plain)},
		{name: "presence_penalty", change: func(p *openai.ChatCompletionNewParams) { withoutEnd(p); p.PresencePenalty = openai.Float(2) }, check: chatDiffers(plain)},
		{name: "repetition_penalty", change: withoutEnd, opts: []option.RequestOption{option.WithJSONSet("repetition_penalty", 10)}, check: chatDiffers(plain)},
		{name: "logit_bias", change: func(p *openai.ChatCompletionNewParams) {
			p.LogitBias, p.MaxCompletionTokens = map[string]int64{token("a"): 100}, openai.Int(3)
		}, check: chatSays("aaa", "length")},
		{name: "max_completion_tokens before max_tokens", change: func(p *openai.ChatCompletionNewParams) {
			withoutEnd(p)
			p.MaxCompletionTokens, p.MaxTokens = openai.Int(3), openai.Int(9)
		}, check: func(c *openai.ChatCompletion) error {
			if c.Usage.CompletionTokens != 3 || c.Choices[0].FinishReason != "length" {
				return fmt.Errorf("%d tokens, %s", c.Usage.CompletionTokens, c.Choices[0].FinishReason)
			}
			return nil
		}},
		{name: "max_tokens", change: func(p *openai.ChatCompletionNewParams) { withoutEnd(p); p.MaxTokens = openai.Int(40) }, check: chatDiffers("")},
		{name: "stop", change: func(p *openai.ChatCompletionNewParams) {
			p.Stop = openai.ChatCompletionNewParamsStopUnion{OfString: openai.String("7 is")}
		}, check: chatSays("6 plus ", "stop")},
		{name: "stops", change: func(p *openai.ChatCompletionNewParams) {
			p.Stop = openai.ChatCompletionNewParamsStopUnion{OfStringArray: []string{"never said", " 13"}}
		}, check: chatSays("6 plus 7 is", "stop")},
		{name: "n", change: func(p *openai.ChatCompletionNewParams) { p.N = openai.Int(2) }, check: func(c *openai.ChatCompletion) error {
			if len(c.Choices) != 2 {
				return fmt.Errorf("%d answers", len(c.Choices))
			}
			return chatSays(sumAnswer, "stop")(c)
		}},
	}
}

func conversationRows() []chatRow {
	return []chatRow{
		{name: "parts", change: func(p *openai.ChatCompletionNewParams) {
			p.Messages = []openai.ChatCompletionMessageParamUnion{openai.UserMessage([]openai.ChatCompletionContentPartUnionParam{
				openai.TextContentPart("What is 6 "), openai.TextContentPart("plus 7?")})}
		}, check: chatSays(sumAnswer, "stop")},
		{name: "system and developer", change: func(p *openai.ChatCompletionNewParams) {
			p.Messages = []openai.ChatCompletionMessageParamUnion{openai.SystemMessage("Be brief."), openai.UserMessage("Hi"),
				openai.AssistantMessage("Hello!"), openai.DeveloperMessage("Be kind."), openai.UserMessage(sumQuestion)}
		}, check: chatAny},
		{name: "prefill", change: func(p *openai.ChatCompletionNewParams) {
			p.Messages = append(p.Messages, openai.AssistantMessage("6 plus 7"))
		}, check: chatSays(" is 13.", "stop")},
		{name: "ignored", change: func(p *openai.ChatCompletionNewParams) {
			p.User, p.Store, p.PromptCacheKey = openai.String("me"), openai.Bool(true), openai.String("k")
			p.SafetyIdentifier, p.Metadata = openai.String("s"), shared.Metadata{"a": "b"}
			p.ServiceTier, p.Verbosity = "auto", "low"
		}, check: chatSays(sumAnswer, "stop")},
		{name: "reasoning_effort", change: func(p *openai.ChatCompletionNewParams) { p.ReasoningEffort = "none" }, check: chatSays(sumAnswer, "stop")},
		{name: "form of text", change: func(p *openai.ChatCompletionNewParams) {
			p.ResponseFormat.OfText = &shared.ResponseFormatTextParam{}
			p.Modalities = []string{"text"}
		}, check: chatSays(sumAnswer, "stop")},
		{name: "logprobs", change: func(p *openai.ChatCompletionNewParams) {
			p.Logprobs, p.TopLogprobs = openai.Bool(true), openai.Int(2)
		}, check: chatLogprobs},
		{name: "json_object", change: func(p *openai.ChatCompletionNewParams) {
			p.ResponseFormat.OfJSONObject = &shared.ResponseFormatJSONObjectParam{}
			p.MaxCompletionTokens = openai.Int(48)
		}, check: func(c *openai.ChatCompletion) error {
			got := c.Choices[0].Message.Content
			if !strings.HasPrefix(strings.TrimSpace(got), "{") || c.Choices[0].FinishReason == "stop" && !sameJSON(got, got) {
				return fmt.Errorf("%q, %s", got, c.Choices[0].FinishReason)
			}
			return nil
		}},
		{name: "json_schema", change: func(p *openai.ChatCompletionNewParams) {
			p.ResponseFormat.OfJSONSchema = &shared.ResponseFormatJSONSchemaParam{JSONSchema: shared.ResponseFormatJSONSchemaJSONSchemaParam{
				Name: "sum", Strict: openai.Bool(true), Schema: sumSchema}}
		}, check: func(c *openai.ChatCompletion) error {
			if got := c.Choices[0].Message.Content; !sameJSON(got, sumArguments) || c.Choices[0].FinishReason != "stop" {
				return fmt.Errorf("%q, %s", got, c.Choices[0].FinishReason)
			}
			return nil
		}},
	}
}

// chatLogprobs wants a probability of each token of the text, beside two others.
func chatLogprobs(c *openai.ChatCompletion) error {
	var joined []byte
	for _, token := range c.Choices[0].Logprobs.Content {
		for _, b := range token.Bytes {
			joined = append(joined, byte(b))
		}
		if len(token.TopLogprobs) != 2 || token.Logprob > 0 || token.TopLogprobs[0].Logprob < token.TopLogprobs[1].Logprob {
			return fmt.Errorf("token %q has %v and %v", token.Token, token.Logprob, token.TopLogprobs)
		}
	}
	if string(joined) != c.Choices[0].Message.Content || len(joined) == 0 {
		return fmt.Errorf("the tokens are %q, the text is %q", joined, c.Choices[0].Message.Content)
	}
	return nil
}

func TestOpenAIChat(t *testing.T) {
	s := runSDKDaemon(t)
	client := s.openAI()
	rows := append(samplingRows(t), conversationRows()...)
	for _, row := range append(rows, toolRows()...) {
		t.Run(row.name, func(t *testing.T) {
			p := openai.ChatCompletionNewParams{Model: shippedModel, Messages: user(sumQuestion), Temperature: openai.Float(0), MaxCompletionTokens: openai.Int(64)}
			row.change(&p)
			whole, err := client.Chat.Completions.New(s.ctx, p, row.opts...)
			// The second time the prompt may be in a cache, as it is for the stream:
			// sums then round alike.
			if err == nil {
				whole, err = client.Chat.Completions.New(s.ctx, p, row.opts...)
			}
			if err != nil {
				t.Fatal(openAIError(err))
			}
			streamed, err := chatStream(s.ctx, client, p, row.opts)
			if err != nil {
				t.Fatal(openAIError(err))
			}
			for name, c := range map[string]*openai.ChatCompletion{"whole": whole, "streamed": streamed} {
				if err := row.check(c); err != nil {
					t.Errorf("%s: %v", name, err)
				}
				if u := c.Usage; u.PromptTokens == 0 || u.CompletionTokens == 0 || u.TotalTokens != u.PromptTokens+u.CompletionTokens ||
					c.Model != shippedModel || c.Object != "chat.completion" && c.Object != "chat.completion.chunk" || c.ID == "" || c.Created == 0 {
					t.Errorf("%s: %s", name, c.RawJSON())
				}
			}
			if err := sameChat(whole, streamed); err != nil {
				t.Error(err)
			}
		})
	}
	t.Run("stream without usage", func(t *testing.T) {
		stream := client.Chat.Completions.NewStreaming(s.ctx, openai.ChatCompletionNewParams{Model: shippedModel, Messages: user(sumQuestion)})
		for stream.Next() {
			if c := stream.Current(); c.JSON.Usage.Valid() || len(c.Choices) != 1 {
				t.Errorf("chunk %s", c.RawJSON())
			}
		}
		if err := stream.Err(); err != nil {
			t.Error(openAIError(err))
		}
	})
}

// chatStream has the client put together what is streamed.
func chatStream(ctx context.Context, client openai.Client, p openai.ChatCompletionNewParams, opts []option.RequestOption) (*openai.ChatCompletion, error) {
	p.StreamOptions.IncludeUsage = openai.Bool(true)
	stream := client.Chat.Completions.NewStreaming(ctx, p, opts...)
	var acc openai.ChatCompletionAccumulator
	for stream.Next() {
		if c := stream.Current(); !acc.AddChunk(c) {
			return nil, fmt.Errorf("the client does not take %s", c.RawJSON())
		}
	}
	return &acc.ChatCompletion, stream.Err()
}

func sameChat(a, b *openai.ChatCompletion) error {
	if len(a.Choices) != len(b.Choices) || a.Usage.PromptTokens != b.Usage.PromptTokens || a.Usage.CompletionTokens != b.Usage.CompletionTokens {
		return fmt.Errorf("%d answers with %+v, streamed %d with %+v", len(a.Choices), a.Usage, len(b.Choices), b.Usage)
	}
	for i := range a.Choices {
		x, y := a.Choices[i], b.Choices[i]
		if x.Message.Content != y.Message.Content || x.FinishReason != y.FinishReason || len(x.Message.ToolCalls) != len(y.Message.ToolCalls) ||
			len(x.Logprobs.Content) != len(y.Logprobs.Content) {
			return fmt.Errorf("%q, %s, streamed %q, %s", x.Message.Content, x.FinishReason, y.Message.Content, y.FinishReason)
		}
		for k := range x.Message.ToolCalls {
			if p, q := x.Message.ToolCalls[k].Function, y.Message.ToolCalls[k].Function; p.Name != q.Name || p.Arguments != q.Arguments {
				return fmt.Errorf("call %s%s, streamed %s%s", p.Name, p.Arguments, q.Name, q.Arguments)
			}
		}
	}
	return nil
}
