//go:build sdk && cgo && linux

package node

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/anthropics/anthropic-sdk-go/v2"
	"github.com/anthropics/anthropic-sdk-go/v2/option"
)

// anthropic is a client; under is where the API is: "" or "/anthropic".
func (s *swarm) anthropic(under string) anthropic.Client {
	return anthropic.NewClient(option.WithBaseURL("http://"+s.http+under), option.WithAPIKey("none is asked for"), option.WithMaxRetries(0))
}

func anthropicError(err error) string {
	var failed *anthropic.Error
	if !errors.As(err, &failed) {
		return fmt.Sprint(err)
	}
	return fmt.Sprintf("%d %s", failed.StatusCode, failed.RawJSON())
}

// messageRow is an option of /v1/messages and what it must do, streamed or not.
type messageRow struct {
	name   string
	change func(*anthropic.MessageNewParams)
	opts   []option.RequestOption
	check  func(*anthropic.Message) error
}

func messageText(m *anthropic.Message) (text string) {
	for _, b := range m.Content {
		text += b.Text
	}
	return text
}

func messageSays(want string, reason anthropic.StopReason, sequence string) func(*anthropic.Message) error {
	return func(m *anthropic.Message) error {
		if messageText(m) != want || m.StopReason != reason || m.StopSequence != sequence {
			return fmt.Errorf("%q, %s %q; want %q, %s %q", messageText(m), m.StopReason, m.StopSequence, want, reason, sequence)
		}
		return nil
	}
}

func messageAny(m *anthropic.Message) error {
	if messageText(m) == "" || m.StopReason != anthropic.StopReasonEndTurn && m.StopReason != anthropic.StopReasonMaxTokens {
		return fmt.Errorf("%s", m.RawJSON())
	}
	return nil
}

// offerSum offers a tool that gives the sum.
func offerSum(p *anthropic.MessageNewParams) {
	schema := anthropic.ToolInputSchemaParam{Properties: sumSchema["properties"], Required: sumSchema["required"].([]string),
		ExtraFields: map[string]any{"additionalProperties": false}}
	p.Tools = []anthropic.ToolUnionParam{anthropic.ToolUnionParamOfTool(schema, "tell_sum")}
}

func messageRows() []messageRow {
	answer := messageSays(sumAnswer, anthropic.StopReasonEndTurn, "")
	hot := option.WithJSONSet("temperature", 2)
	blocks := func(list ...anthropic.ContentBlockParamUnion) func(*anthropic.MessageNewParams) {
		return func(p *anthropic.MessageNewParams) {
			p.Messages = []anthropic.MessageParam{anthropic.NewUserMessage(list...)}
		}
	}
	return []messageRow{
		{name: "text", change: func(p *anthropic.MessageNewParams) {}, check: answer},
		{name: "top_k", change: func(p *anthropic.MessageNewParams) {}, opts: []option.RequestOption{hot, option.WithJSONSet("top_k", 1)}, check: answer},
		{name: "top_p", change: func(p *anthropic.MessageNewParams) {}, opts: []option.RequestOption{hot, option.WithJSONSet("top_p", 1e-9)}, check: answer},
		{name: "max_tokens", change: func(p *anthropic.MessageNewParams) { p.MaxTokens = 2 }, check: func(m *anthropic.Message) error {
			if m.StopReason != anthropic.StopReasonMaxTokens || m.Usage.OutputTokens != 2 || !strings.HasPrefix(sumAnswer, messageText(m)) {
				return fmt.Errorf("%s", m.RawJSON())
			}
			return nil
		}},
		{name: "max_tokens beyond the context", change: func(p *anthropic.MessageNewParams) { p.MaxTokens = 1 << 14 }, check: answer},
		{name: "stop_sequences", change: func(p *anthropic.MessageNewParams) { p.StopSequences = []string{"never said", "7 is"} },
			check: messageSays("6 plus ", anthropic.StopReasonStopSequence, "7 is")},
		{name: "system", change: func(p *anthropic.MessageNewParams) {
			p.System = []anthropic.TextBlockParam{{Text: "x-anthropic-billing-header: cch=1"}, {Text: "Be brief."}, {Text: "Be kind."}}
		}, check: messageAny},
		{name: "prefill", change: func(p *anthropic.MessageNewParams) {
			p.Messages = append(p.Messages, anthropic.NewAssistantMessage(anthropic.NewTextBlock("6 plus 7")))
		}, check: messageSays(" is 13.", anthropic.StopReasonEndTurn, "")},
		{name: "blocks", change: blocks(anthropic.NewTextBlock("What is 6 "), anthropic.NewTextBlock("plus 7?")), check: answer},
		{name: "document", change: blocks(anthropic.NewDocumentBlock(anthropic.PlainTextSourceParam{Data: "6 plus 7 is 13."}), anthropic.NewTextBlock(sumQuestion)), check: messageAny},
		{name: "thinking adaptive", change: func(p *anthropic.MessageNewParams) {
			p.Thinking.OfAdaptive = &anthropic.ThinkingConfigAdaptiveParam{}
			p.OutputConfig.Effort = "low"
		}, check: answer},
		{name: "thinking disabled", change: func(p *anthropic.MessageNewParams) {
			p.Thinking.OfDisabled = &anthropic.ThinkingConfigDisabledParam{}
		}, check: answer},
		{name: "ignored", change: func(p *anthropic.MessageNewParams) {
			p.Metadata.UserID, p.ServiceTier = anthropic.String("me"), "auto"
			p.CacheControl = anthropic.CacheControlEphemeralParam{}
		}, opts: []option.RequestOption{option.WithQuery("beta", "true"), option.WithHeader("anthropic-beta", "context-management-2025-06-27")}, check: answer},
		{name: "tools", change: func(p *anthropic.MessageNewParams) {
			offerSum(p)
			p.Tools = append(p.Tools, anthropic.ToolUnionParam{OfWebSearchTool20250305: &anthropic.WebSearchTool20250305Param{}})
			p.ToolChoice.OfAuto, p.MaxTokens = &anthropic.ToolChoiceAutoParam{DisableParallelToolUse: anthropic.Bool(true)}, 12
		}, check: messageAny},
		{name: "tool_choice none", change: func(p *anthropic.MessageNewParams) {
			offerSum(p)
			p.ToolChoice.OfNone = &anthropic.ToolChoiceNoneParam{}
		}, check: answer},
		{name: "results of tools", change: func(p *anthropic.MessageNewParams) {
			offerSum(p)
			p.MaxTokens = 12
			p.Messages = append(p.Messages, anthropic.NewAssistantMessage(anthropic.NewToolUseBlock("toolu_1", map[string]any{"sum": 13, "of": "6 plus 7"}, "tell_sum")),
				anthropic.NewUserMessage(anthropic.NewToolResultBlock("toolu_1", "13", false), anthropic.NewTextBlock("Thanks.")))
		}, check: messageAny},
		{name: "tool_choice any", change: func(p *anthropic.MessageNewParams) {
			offerSum(p)
			p.ToolChoice.OfAny, p.MaxTokens = &anthropic.ToolChoiceAnyParam{DisableParallelToolUse: anthropic.Bool(true)}, 128
		}, check: messageCall},
		{name: "tool_choice tool", change: func(p *anthropic.MessageNewParams) {
			offerSum(p)
			p.ToolChoice.OfTool, p.MaxTokens = &anthropic.ToolChoiceToolParam{Name: "tell_sum", DisableParallelToolUse: anthropic.Bool(true)}, 128
		}, check: messageCall},
		{name: "form", change: func(p *anthropic.MessageNewParams) {
			p.OutputConfig.Format = anthropic.JSONOutputFormatParam{Schema: sumSchema}
		}, check: func(m *anthropic.Message) error {
			if !sameJSON(messageText(m), sumArguments) || m.StopReason != anthropic.StopReasonEndTurn {
				return fmt.Errorf("%s", m.RawJSON())
			}
			return nil
		}},
	}
}

func messageCall(m *anthropic.Message) error {
	if len(m.Content) != 1 || m.Content[0].Type != "tool_use" || m.StopReason != anthropic.StopReasonToolUse || m.Content[0].Name != "tell_sum" ||
		m.Content[0].ID == "" || !sameJSON(string(m.Content[0].Input), sumArguments) {
		return fmt.Errorf("%s, %s", m.RawJSON(), m.StopReason)
	}
	return nil
}

func TestAnthropicMessages(t *testing.T) {
	s := runSDKDaemon(t)
	for i, row := range messageRows() {
		client := s.anthropic([]string{"", "/anthropic"}[i%2])
		t.Run(row.name, func(t *testing.T) {
			p := anthropic.MessageNewParams{Model: shippedModel, MaxTokens: 64, Messages: []anthropic.MessageParam{anthropic.NewUserMessage(anthropic.NewTextBlock(sumQuestion))}}
			row.change(&p)
			opts := append([]option.RequestOption{option.WithJSONSet("temperature", 0)}, row.opts...)
			whole, err := client.Messages.New(s.ctx, p, opts...)
			if err == nil { // as of the stream, its prompt may be in a cache
				whole, err = client.Messages.New(s.ctx, p, opts...)
			}
			if err != nil {
				t.Fatal(anthropicError(err))
			}
			streamed, err := messageStream(s.ctx, client, p, opts)
			if err != nil {
				t.Fatal(anthropicError(err))
			}
			for name, m := range map[string]*anthropic.Message{"whole": whole, "streamed": streamed} {
				if err := row.check(m); err != nil {
					t.Errorf("%s: %v", name, err)
				}
				if m.ID == "" || m.Model != shippedModel || m.Role != "assistant" || m.Type != "message" || m.Usage.OutputTokens == 0 {
					t.Errorf("%s: %s", name, m.RawJSON())
				}
			}
			if messageText(whole) != messageText(streamed) || len(whole.Content) != len(streamed.Content) || whole.StopReason != streamed.StopReason ||
				input(whole) != input(streamed) || whole.Usage.OutputTokens != streamed.Usage.OutputTokens {
				t.Errorf("%s\nstreamed %s", whole.RawJSON(), streamed.RawJSON())
			}
			s.counted(t, client, p, whole)
		})
	}
}

// input counts the tokens of a message's prompt.
func input(m *anthropic.Message) int64 { return m.Usage.InputTokens + m.Usage.CacheReadInputTokens }

// counted wants count_tokens to say beforehand what the message then took.
func (s *swarm) counted(t *testing.T, client anthropic.Client, p anthropic.MessageNewParams, m *anthropic.Message) {
	t.Helper()
	c := anthropic.MessageCountTokensParams{Model: p.Model, Messages: p.Messages, Thinking: p.Thinking, ToolChoice: p.ToolChoice, OutputConfig: p.OutputConfig}
	c.System.OfTextBlockArray = p.System
	for _, tool := range p.Tools {
		if tool.OfTool != nil {
			c.Tools = append(c.Tools, anthropic.MessageCountTokensToolUnionParam{OfTool: tool.OfTool})
		}
	}
	count, err := client.Messages.CountTokens(s.ctx, c)
	if err != nil || count.InputTokens != input(m) {
		t.Errorf("count_tokens: %+v, the message took %d: %s", count, input(m), anthropicError(err))
	}
}

// messageStream has the client put together what is streamed.
func messageStream(ctx context.Context, client anthropic.Client, p anthropic.MessageNewParams, opts []option.RequestOption) (*anthropic.Message, error) {
	stream := client.Messages.NewStreaming(ctx, p, opts...)
	var m anthropic.Message
	last := ""
	for stream.Next() {
		last = stream.Current().Type
		if err := m.Accumulate(stream.Current()); err != nil {
			return nil, fmt.Errorf("the client does not take %s: %w", stream.Current().RawJSON(), err)
		}
	}
	if stream.Err() == nil && last != "message_stop" {
		return nil, fmt.Errorf("the last event is %q", last)
	}
	return &m, stream.Err()
}

func TestAnthropicModels(t *testing.T) {
	s := runSDKDaemon(t)
	for _, under := range []string{"", "/anthropic"} {
		client := s.anthropic(under)
		var ids []string
		pages := client.Models.ListAutoPaging(s.ctx, anthropic.ModelListParams{})
		for pages.Next() {
			ids = append(ids, pages.Current().ID)
		}
		if err := pages.Err(); err != nil || fmt.Sprint(ids) != "["+shippedModel+"]" {
			t.Errorf("models %v: %s", ids, anthropicError(err))
		}
		m, err := client.Models.Get(s.ctx, shippedModel, anthropic.ModelGetParams{})
		if err != nil || m.ID != shippedModel || m.DisplayName == "" || m.CreatedAt.IsZero() {
			t.Errorf("%+v: %s", m, anthropicError(err))
		}
	}
}

// TestAnthropicErrors: the client sees each failure as its own type.
func TestAnthropicErrors(t *testing.T) {
	s := runSDKDaemon(t)
	client := s.anthropic("/anthropic")
	for _, row := range []struct {
		name   string
		change func(*anthropic.MessageNewParams)
		opts   []option.RequestOption
		status int
		kind   string
		says   []string
	}{
		{"temperature", nil, []option.RequestOption{option.WithJSONSet("temperature", 3)}, 400, "invalid_request_error", []string{"temperature", "3"}},
		{"no max_tokens", nil, []option.RequestOption{option.WithJSONDel("max_tokens")}, 400, "invalid_request_error", []string{"max_tokens"}},
		{"mcp_servers", nil, []option.RequestOption{option.WithJSONSet("mcp_servers", []any{map[string]any{"url": "x"}})}, 400, "invalid_request_error", []string{"mcp_servers"}},
		{"no messages", func(p *anthropic.MessageNewParams) { p.Messages = []anthropic.MessageParam{} }, nil, 400, "invalid_request_error", []string{"messages"}},
		{"image", func(p *anthropic.MessageNewParams) {
			p.Messages = []anthropic.MessageParam{anthropic.NewUserMessage(anthropic.NewImageBlock(anthropic.URLImageSourceParam{URL: "https://a.example"}))}
		}, nil, 400, "invalid_request_error", []string{"messages[0].content[0].type", "images"}},
		{"tool that is not there", func(p *anthropic.MessageNewParams) {
			offerSum(p)
			p.ToolChoice = anthropic.ToolChoiceParamOfTool("other")
		}, nil, 400, "invalid_request_error", []string{"tool_choice", "other"}},
		{"too long", func(p *anthropic.MessageNewParams) {
			p.Messages = []anthropic.MessageParam{anthropic.NewUserMessage(anthropic.NewTextBlock(tooLong()))}
		}, nil, 400, "invalid_request_error", []string{"prompt is too long: ", " tokens > 2048 maximum"}},
		{"too large", func(p *anthropic.MessageNewParams) {
			p.Messages = []anthropic.MessageParam{anthropic.NewUserMessage(anthropic.NewTextBlock(tooLarge()))}
		}, nil, 413, "request_too_large", nil},
		{"model", func(p *anthropic.MessageNewParams) { p.Model = "claude-none" }, nil, 404, "not_found_error", []string{"claude-none", shippedModel}},
		{"page", nil, []option.RequestOption{option.WithHeader("Origin", "https://evil.example")}, 403, "permission_error", []string{"evil.example"}},
	} {
		p := anthropic.MessageNewParams{Model: shippedModel, MaxTokens: 4, Messages: []anthropic.MessageParam{anthropic.NewUserMessage(anthropic.NewTextBlock("Hi"))}}
		if row.change != nil {
			row.change(&p)
		}
		_, err := client.Messages.New(s.ctx, p, row.opts...)
		_, streamErr := messageStream(s.ctx, client, p, row.opts)
		for _, err := range []error{err, streamErr} {
			var failed *anthropic.Error
			if !errors.As(err, &failed) || failed.StatusCode != row.status || string(failed.Type()) != row.kind || failed.RequestID == "" {
				t.Errorf("%s: %s; want %d %s", row.name, anthropicError(err), row.status, row.kind)
			} else if err := says(failed.Message, row.says...); err != nil {
				t.Errorf("%s: %v", row.name, err)
			}
		}
	}
}

// TestAnthropicOverload: a full queue is a 529, and the client comes back by itself.
func TestAnthropicOverload(t *testing.T) {
	s := runSDKDaemon(t, narrow...)
	client := s.anthropic("")
	free := s.fill()
	p := anthropic.MessageNewParams{Model: shippedModel, MaxTokens: 64, Messages: []anthropic.MessageParam{anthropic.NewUserMessage(anthropic.NewTextBlock(sumQuestion))}}
	cold := option.WithJSONSet("temperature", 0)
	var failed *anthropic.Error
	if _, err := client.Messages.New(s.ctx, p, cold); !errors.As(err, &failed) || failed.StatusCode != 529 || failed.Type() != "overloaded_error" ||
		failed.Response.Header.Get("Retry-After") == "" {
		t.Fatal(anthropicError(err))
	}
	var tries []int
	var once sync.Once
	watch := func(r *http.Request, next option.MiddlewareNext) (*http.Response, error) {
		resp, err := next(r)
		if err == nil {
			tries = append(tries, resp.StatusCode)
			once.Do(free)
		}
		return resp, err
	}
	m, err := client.Messages.New(s.ctx, p, cold, option.WithMaxRetries(2), option.WithMiddleware(watch))
	if err != nil {
		t.Fatal(anthropicError(err))
	}
	if fmt.Sprint(tries) != "[529 200]" || messageText(m) != sumAnswer {
		t.Errorf("tries %v, then %q", tries, messageText(m))
	}
	s.idle(5 * time.Second)
}
