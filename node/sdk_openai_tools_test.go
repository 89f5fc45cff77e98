//go:build sdk && cgo && linux

package node

import (
	"fmt"
	"strings"

	"github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/shared"
)

// tools offers two functions, of which one gives the sum.
func offer(p *openai.ChatCompletionNewParams) {
	p.Tools = []openai.ChatCompletionToolUnionParam{
		openai.ChatCompletionFunctionTool(shared.FunctionDefinitionParam{Name: "now", Description: openai.String("The time.")}),
		openai.ChatCompletionFunctionTool(shared.FunctionDefinitionParam{Name: "tell_sum", Strict: openai.Bool(true), Parameters: sumSchema}),
	}
}

func toolRows() []chatRow {
	force := func(choice openai.ChatCompletionToolChoiceOptionUnionParam) func(*openai.ChatCompletionNewParams) {
		return func(p *openai.ChatCompletionNewParams) {
			offer(p)
			p.Tools, p.ToolChoice, p.ParallelToolCalls = p.Tools[1:], choice, openai.Bool(false)
			p.MaxCompletionTokens = openai.Int(128)
		}
	}
	return []chatRow{
		{name: "tools", change: func(p *openai.ChatCompletionNewParams) { offer(p); p.ParallelToolCalls = openai.Bool(true) }, check: noCall},
		{name: "tool_choice auto", change: func(p *openai.ChatCompletionNewParams) { offer(p); p.ToolChoice.OfAuto = openai.String("auto") }, check: noCall},
		{name: "tool_choice none", change: func(p *openai.ChatCompletionNewParams) { offer(p); p.ToolChoice.OfAuto = openai.String("none") },
			check: chatSays(sumAnswer, "stop")},
		{name: "results of tools", change: func(p *openai.ChatCompletionNewParams) {
			offer(p)
			asked := openai.ChatCompletionAssistantMessageParam{ToolCalls: []openai.ChatCompletionMessageToolCallUnionParam{
				called("call_1", "now", "{}"), called("call_2", "tell_sum", sumArguments)}}
			p.Messages = append(p.Messages, openai.ChatCompletionMessageParamUnion{OfAssistant: &asked},
				openai.ToolMessage("noon", "call_1"), openai.ToolMessage("13", "call_2"))
		}, check: noCall},
		{name: "tool_choice required",
			change: force(openai.ChatCompletionToolChoiceOptionUnionParam{OfAuto: openai.String("required")}), check: sumCall},
		{name: "tool_choice named",
			change: force(openai.ToolChoiceOptionFunctionToolChoice(openai.ChatCompletionNamedToolChoiceFunctionParam{Name: "tell_sum"})), check: sumCall},
	}
}

func called(id, name, arguments string) openai.ChatCompletionMessageToolCallUnionParam {
	return openai.ChatCompletionMessageToolCallUnionParam{OfFunction: &openai.ChatCompletionMessageFunctionToolCallParam{
		ID: id, Function: openai.ChatCompletionMessageFunctionToolCallFunctionParam{Name: name, Arguments: arguments}}}
}

// noCall: the shipped model was never taught to call anything.
func noCall(c *openai.ChatCompletion) error {
	choice := c.Choices[0]
	if len(choice.Message.ToolCalls) > 0 || choice.FinishReason != "stop" && choice.FinishReason != "length" || strings.Contains(choice.Message.Content, "<tool_call>") {
		return fmt.Errorf("%q, %d calls, %s", choice.Message.Content, len(choice.Message.ToolCalls), choice.FinishReason)
	}
	return nil
}

func sumCall(c *openai.ChatCompletion) error {
	choice := c.Choices[0]
	if len(choice.Message.ToolCalls) != 1 || choice.FinishReason != "tool_calls" || choice.Message.Content != "" {
		return fmt.Errorf("%q, %d calls, %s", choice.Message.Content, len(choice.Message.ToolCalls), choice.FinishReason)
	}
	call := choice.Message.ToolCalls[0]
	if call.ID == "" || call.Type != "function" || call.Function.Name != "tell_sum" || !sameJSON(call.Function.Arguments, sumArguments) {
		return fmt.Errorf("the call is %s %s %s%s", call.ID, call.Type, call.Function.Name, call.Function.Arguments)
	}
	return nil
}
