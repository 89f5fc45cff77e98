//go:build sdk && cgo && linux

package node

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/responses"
	"github.com/openai/openai-go/v3/shared"
)

// responseRow is an option of /v1/responses and what it must do, streamed or not.
type responseRow struct {
	name   string
	change func(*responses.ResponseNewParams)
	check  func(*responses.Response) error
}

func responseSays(want string, status responses.ResponseStatus) func(*responses.Response) error {
	return func(r *responses.Response) error {
		if r.OutputText() != want || r.Status != status {
			return fmt.Errorf("%q, %s; want %q, %s", r.OutputText(), r.Status, want, status)
		}
		return nil
	}
}

func responseAny(r *responses.Response) error {
	if r.OutputText() == "" {
		return errors.New("no text")
	}
	return nil
}

func items(list ...responses.ResponseInputItemUnionParam) responses.ResponseNewParamsInputUnion {
	return responses.ResponseNewParamsInputUnion{OfInputItemList: list}
}

func messageItem(role responses.EasyInputMessageRole, text string) responses.ResponseInputItemUnionParam {
	return responses.ResponseInputItemParamOfMessage(text, role)
}

// sumTools are the tools that answers are given by.
func sumTools() []responses.ToolUnionParam {
	return []responses.ToolUnionParam{responses.ToolParamOfFunction("tell_sum", sumSchema, true)}
}

func responseRows() []responseRow {
	return []responseRow{
		{name: "text", change: func(p *responses.ResponseNewParams) {}, check: responseSays(sumAnswer, "completed")},
		{name: "no model", change: func(p *responses.ResponseNewParams) { p.Model = "" }, check: responseSays(sumAnswer, "completed")},
		{name: "items", change: func(p *responses.ResponseNewParams) { p.Input = items(messageItem("user", sumQuestion)) }, check: responseSays(sumAnswer, "completed")},
		{name: "instructions", change: func(p *responses.ResponseNewParams) {
			p.Instructions = openai.String("Be brief.")
			p.Input = items(messageItem("developer", "Be kind."), messageItem("user", "Hi"), messageItem("assistant", "Hello!"), messageItem("user", sumQuestion))
		}, check: responseAny},
		{name: "max_output_tokens", change: func(p *responses.ResponseNewParams) { p.MaxOutputTokens = openai.Int(2) }, check: func(r *responses.Response) error {
			if r.Status != "incomplete" || r.IncompleteDetails.Reason != "max_output_tokens" || r.Usage.OutputTokens != 2 {
				return fmt.Errorf("%s, %s, %d tokens", r.Status, r.IncompleteDetails.Reason, r.Usage.OutputTokens)
			}
			return nil
		}},
		{name: "top_p", change: func(p *responses.ResponseNewParams) { p.Temperature, p.TopP = openai.Float(2), openai.Float(1e-9) },
			check: responseSays(sumAnswer, "completed")},
		{name: "ignored", change: func(p *responses.ResponseNewParams) {
			p.User, p.Metadata, p.ServiceTier, p.Truncation = openai.String("me"), shared.Metadata{"a": "b"}, "auto", "disabled"
			p.PromptCacheKey, p.Reasoning.Effort = openai.String("k"), "low"
			p.Include = []responses.ResponseIncludable{"reasoning.encrypted_content"}
			p.Text.Format.OfText = &shared.ResponseFormatTextParam{}
		}, check: responseSays(sumAnswer, "completed")},
		{name: "tools", change: func(p *responses.ResponseNewParams) {
			p.Tools = append(sumTools(), responses.ToolParamOfCustom("apply_patch"), responses.ToolParamOfWebSearch("web_search"))
			p.ParallelToolCalls, p.MaxOutputTokens = openai.Bool(false), openai.Int(12)
		}, check: responseAny},
		{name: "tool_choice none", change: func(p *responses.ResponseNewParams) {
			p.Tools, p.ToolChoice.OfToolChoiceMode = sumTools(), openai.Opt(responses.ToolChoiceOptionsNone)
		}, check: responseSays(sumAnswer, "completed")},
		{name: "results of tools", change: func(p *responses.ResponseNewParams) {
			p.Tools, p.MaxOutputTokens = sumTools(), openai.Int(12)
			result := responses.ResponseInputItemParamOfFunctionCallOutput("13")
			result.OfFunctionCallOutput.CallID = openai.String("call_1")
			p.Input = items(messageItem("user", sumQuestion), responses.ResponseInputItemParamOfFunctionCall(sumArguments, "call_1", "tell_sum"), result)
		}, check: responseAny},
		{name: "tool_choice required", change: func(p *responses.ResponseNewParams) {
			p.Tools, p.ToolChoice.OfToolChoiceMode, p.MaxOutputTokens = sumTools(), openai.Opt(responses.ToolChoiceOptionsRequired), openai.Int(128)
			p.ParallelToolCalls = openai.Bool(false)
		}, check: responseCall},
		{name: "tool_choice named", change: func(p *responses.ResponseNewParams) {
			p.Tools, p.ToolChoice.OfFunctionTool, p.MaxOutputTokens = sumTools(), &responses.ToolChoiceFunctionParam{Name: "tell_sum"}, openai.Int(128)
			p.ParallelToolCalls = openai.Bool(false)
		}, check: responseCall},
		{name: "json_schema", change: func(p *responses.ResponseNewParams) {
			p.Text.Format = responses.ResponseFormatTextConfigParamOfJSONSchema("sum", sumSchema)
		}, check: func(r *responses.Response) error {
			if !sameJSON(r.OutputText(), sumArguments) || r.Status != "completed" {
				return fmt.Errorf("%q, %s", r.OutputText(), r.Status)
			}
			return nil
		}},
		{name: "logprobs", change: func(p *responses.ResponseNewParams) {
			p.Include, p.TopLogprobs = []responses.ResponseIncludable{"message.output_text.logprobs"}, openai.Int(2)
		}, check: func(r *responses.Response) error {
			var joined string
			for _, token := range r.Output[0].Content[0].Logprobs {
				joined += token.Token
				if len(token.TopLogprobs) != 2 || token.Logprob > 0 {
					return fmt.Errorf("token %q has %v and %v", token.Token, token.Logprob, token.TopLogprobs)
				}
			}
			if joined != sumAnswer {
				return fmt.Errorf("the tokens are %q", joined)
			}
			return nil
		}},
	}
}

func responseCall(r *responses.Response) error {
	if len(r.Output) != 1 || r.Output[0].Type != "function_call" || r.Status != "completed" {
		return fmt.Errorf("%s", r.RawJSON())
	}
	if call := r.Output[0].AsFunctionCall(); call.Name != "tell_sum" || call.CallID == "" || call.Status != "completed" || !sameJSON(call.Arguments, sumArguments) {
		return fmt.Errorf("the call is %s", call.RawJSON())
	}
	return nil
}

func TestOpenAIResponses(t *testing.T) {
	s := runSDKDaemon(t)
	client := s.openAI()
	for _, row := range responseRows() {
		t.Run(row.name, func(t *testing.T) {
			p := responses.ResponseNewParams{Model: shippedModel, Temperature: openai.Float(0), MaxOutputTokens: openai.Int(64),
				Input: responses.ResponseNewParamsInputUnion{OfString: openai.String(sumQuestion)}}
			row.change(&p)
			whole, err := client.Responses.New(s.ctx, p)
			if err == nil { // as of the stream, its prompt may be in a cache
				whole, err = client.Responses.New(s.ctx, p)
			}
			if err != nil {
				t.Fatal(openAIError(err))
			}
			streamed, err := s.responseStream(client, p)
			if err != nil {
				t.Fatal(openAIError(err))
			}
			for name, r := range map[string]*responses.Response{"whole": whole, "streamed": streamed} {
				if err := row.check(r); err != nil {
					t.Errorf("%s: %v", name, err)
				}
				if u := r.Usage; u.InputTokens == 0 || u.OutputTokens == 0 || u.TotalTokens != u.InputTokens+u.OutputTokens || r.Model != shippedModel {
					t.Errorf("%s: %s", name, r.RawJSON())
				}
			}
			if whole.OutputText() != streamed.OutputText() || len(whole.Output) != len(streamed.Output) || whole.Usage.OutputTokens != streamed.Usage.OutputTokens {
				t.Errorf("%s\nstreamed %s", whole.RawJSON(), streamed.RawJSON())
			}
		})
	}
}

// responseStream returns the response of the last event. What was streamed must
// join to it, and the events must be numbered.
func (s *swarm) responseStream(client openai.Client, p responses.ResponseNewParams) (*responses.Response, error) {
	stream := client.Responses.NewStreaming(s.ctx, p)
	var last responses.ResponseStreamEventUnion
	var texts, arguments strings.Builder
	var kinds []string
	for stream.Next() {
		last = stream.Current()
		if last.SequenceNumber != int64(len(kinds)) {
			return nil, fmt.Errorf("event %d is number %d: %s", len(kinds), last.SequenceNumber, last.RawJSON())
		}
		kinds = append(kinds, last.Type)
		switch last.Type {
		case "response.output_text.delta":
			texts.WriteString(last.Delta)
		case "response.function_call_arguments.delta":
			arguments.WriteString(last.Delta)
		}
	}
	if err := stream.Err(); err != nil {
		return nil, err
	}
	r := last.Response
	if len(kinds) < 3 || kinds[0] != "response.created" || kinds[1] != "response.in_progress" || last.Type != "response."+string(r.Status) {
		return nil, fmt.Errorf("the events are %v", kinds)
	}
	if texts.String() != r.OutputText() {
		return nil, fmt.Errorf("deltas %q, text %q", texts.String(), r.OutputText())
	}
	for _, item := range r.Output {
		if item.Type == "function_call" && item.AsFunctionCall().Arguments != arguments.String() {
			return nil, fmt.Errorf("deltas %q, arguments %q", arguments.String(), item.AsFunctionCall().Arguments)
		}
	}
	return &r, nil
}

func TestOpenAIStoredResponses(t *testing.T) {
	s := runSDKDaemon(t)
	client := s.openAI()
	ask := func(question, previous string, store bool) (*responses.Response, error) {
		p := responses.ResponseNewParams{Model: shippedModel, Temperature: openai.Float(0), Store: openai.Bool(store),
			Input: responses.ResponseNewParamsInputUnion{OfString: openai.String(question)}, MaxOutputTokens: openai.Int(16)}
		if previous != "" {
			p.PreviousResponseID = openai.String(previous)
		}
		return client.Responses.New(s.ctx, p)
	}
	first, err := ask(sumQuestion, "", true)
	if err != nil {
		t.Fatal(openAIError(err))
	}
	second, err := ask("What is the capital of Japan?", first.ID, true)
	if err != nil {
		t.Fatal(openAIError(err))
	}
	if second.PreviousResponseID != first.ID || second.Usage.InputTokens <= first.Usage.InputTokens+first.Usage.OutputTokens {
		t.Errorf("the conversation is not gone on from: %s", second.RawJSON())
	}
	kept, err := client.Responses.Get(s.ctx, first.ID, responses.ResponseGetParams{})
	if err != nil || kept.ID != first.ID || kept.OutputText() != sumAnswer || kept.Status != "completed" {
		t.Errorf("got %s", openAIError(err))
	}
	if err := client.Responses.Delete(s.ctx, first.ID); err != nil {
		t.Error(openAIError(err))
	}
	unstored, err := ask(sumQuestion, "", false)
	if err != nil {
		t.Fatal(openAIError(err))
	}
	for _, id := range []string{first.ID, unstored.ID, "resp_never"} {
		var failed *openai.Error
		if _, err := client.Responses.Get(s.ctx, id, responses.ResponseGetParams{}); !errors.As(err, &failed) || failed.StatusCode != 404 || !strings.Contains(failed.Message, id) {
			t.Errorf("get %s: %s", id, openAIError(err))
		}
		if _, err := ask(sumQuestion, id, true); !errors.As(err, &failed) || failed.StatusCode != 404 || failed.Param != "previous_response_id" {
			t.Errorf("go on from %s: %s", id, openAIError(err))
		}
	}
}
