package toolcall

import (
	"crypto/sha256"
	"fmt"
	"math/big"
	"strings"
)

// syntax is how a family writes.
type syntax struct {
	wraps   []string // around calls; one of inner, or JSON, must follow
	opens   []string // of a call, anywhere in the text
	inner   []string // of a call, inside a wrapper
	ends    []string // of calls and wrappers, dropped after a call
	markers []string // wraps and opens
	unit    func() state
	json    bool  // a wrapper may hold JSON calls
	start   state // instead of inText
	atFirst func(p *Parser, rest []byte, skip int, end bool) match

	think, endThink string
	callInThink     bool // a call may begin before the reasoning ended
}

// bare looks for a call at the very beginning of the answer.
func (s *syntax) bare(p *Parser, rest []byte, skip int, end bool) match {
	if s.atFirst == nil || !p.reads {
		return no
	}
	return s.atFirst(p, rest, skip, end)
}

func (s *syntax) jsonInside(rest []byte) bool {
	return s.json && len(rest) > 0 && (rest[0] == '{' || rest[0] == '[')
}

// The DeepSeek markers use a full-width bar and a lower block.
const (
	deepCalls    = "<｜tool▁calls▁begin｜>"
	deepCallsEnd = "<｜tool▁calls▁end｜>"
	deepCall     = "<｜tool▁call▁begin｜>"
	deepSep      = "<｜tool▁sep｜>"
	deepCallEnd  = "<｜tool▁call▁end｜>"
	dsml         = "｜DSML｜"
	minimax      = "]<]minimax[>["
)

var syntaxes = map[Family]*syntax{
	None:       {},
	Hermes:     {wraps: []string{"<tool_call>"}, inner: []string{"<function="}, ends: []string{"</tool_call>"}, json: true, unit: qwenTags.unit},
	Qwen3Coder: {wraps: []string{"<tool_call>"}, opens: []string{"<function="}, inner: []string{"<function="}, ends: []string{"</tool_call>"}, json: true, unit: qwenTags.unit},
	Llama3:     {opens: []string{pythonTag}, ends: []string{";"}, unit: taggedJSON, atFirst: bareCall},
	Llama4:     {opens: []string{pythonStart, pythonTag}, ends: []string{pythonEnd, ";"}, unit: taggedJSON, atFirst: bareCall},
	Mistral:    {opens: []string{"[TOOL_CALLS]"}, unit: mistralUnit, think: "[THINK]", endThink: "[/THINK]"},
	DeepSeekV3: {wraps: []string{deepCalls}, opens: []string{deepCall}, inner: []string{deepCall}, ends: []string{"```", deepCallEnd, deepCallsEnd}, unit: deepSeekUnit},
	DeepSeek32: {
		wraps: []string{"<" + dsml + "function_calls>", "<" + dsml + "tool_calls>"}, opens: []string{dsmlTags.call}, inner: []string{dsmlTags.call},
		ends: []string{"</" + dsml + "function_calls>", "</" + dsml + "tool_calls>"}, unit: dsmlTags.unit,
	},
	GPTOSS: {start: harmonyHeader},
	Gemma4: {opens: []string{"<|tool_call>"}, ends: []string{"<tool_call|>", "<|tool_response>"}, unit: gemmaUnit, think: "<|channel>thought", endThink: "<channel|>"},
	GLM4:   {opens: []string{"<tool_call>"}, ends: []string{"</tool_call>"}, unit: glmUnit},
	KimiK2: {
		wraps: []string{"<|tool_calls_section_begin|>", "<|tool_call_section_begin|>"}, opens: []string{kimiCall}, inner: []string{kimiCall},
		ends: []string{kimiCallEnd, "<|tool_calls_section_end|>", "<|tool_call_section_end|>"}, unit: kimiUnit,
	},
	MiniMaxM2: {wraps: []string{"<minimax:tool_call>"}, inner: []string{minimaxTags.call}, ends: []string{"</minimax:tool_call>"}, unit: minimaxTags.unit, callInThink: true},
	MiniMaxM3: {
		wraps: []string{minimax + "<tool_call>"}, inner: []string{minimaxCall}, ends: []string{minimax + "</tool_call>"}, unit: minimaxUnit,
		think: "<mm:think>", endThink: "</mm:think>", callInThink: true,
	},
}

func init() {
	syntaxes[MistralArg], syntaxes[DeepSeek31], syntaxes[DeepSeekV4] = syntaxes[Mistral], syntaxes[DeepSeekV3], syntaxes[DeepSeek32]
	for _, s := range syntaxes {
		s.markers = append(append([]string{}, s.wraps...), s.opens...)
		if s.think == "" && s.start == nil {
			s.think, s.endThink = "<think>", "</think>"
		}
	}
}

func syntaxOf(f Family) *syntax {
	if s := syntaxes[f]; s != nil {
		return s
	}
	return syntaxes[None]
}

// Trigger lists the texts of which any begins a call that Grammar knows: a
// grammar may start at one instead of at the answer's first token. Nil: there is no
// such text.
func Trigger(f Family) []string {
	form := forms[f]
	switch {
	case form == nil:
		return nil
	case f == GPTOSS:
		return []string{form.channel + " to=functions."}
	}
	for _, m := range syntaxOf(f).markers {
		if strings.HasPrefix(form.before+form.call, m) {
			return []string{m}
		}
	}
	return nil
}

// Detect finds the family of a model by its chat template.
func Detect(chatTemplate string) Family {
	has := func(marks ...string) bool {
		for _, m := range marks {
			if !strings.Contains(chatTemplate, m) {
				return false
			}
		}
		return true
	}
	switch {
	case has("<|channel|>", "<|message|>"):
		return GPTOSS
	case has("<|tool_call>", "call:"):
		return Gemma4
	case has("]<]minimax[>["):
		return MiniMaxM3
	case has("<minimax:tool_call>"):
		return MiniMaxM2
	case has("DSML", "function_calls"):
		return DeepSeek32
	case has("DSML"):
		return DeepSeekV4
	case has("<|tool_call_begin|>"):
		return KimiK2
	case has("tool▁call▁begin", "```json"):
		return DeepSeekV3
	case has("tool▁call▁begin"):
		return DeepSeek31
	case has("[TOOL_CALLS]", "[ARGS]"):
		return MistralArg
	case has("[TOOL_CALLS]"):
		return Mistral
	case has("<arg_key>"):
		return GLM4
	case has("<function=", "<parameter="):
		return Qwen3Coder
	case has("<tool_call>"):
		return Hermes
	case has("<|python_start|>"), has("<|header_start|>", "tools"), has("<|start_header_id|>", "params_name1"):
		return Llama4
	case has("<|python_tag|>"), has("<|start_header_id|>", "tools", `"parameters"`):
		return Llama3
	}
	return None
}

// InReasoning says whether a rendered prompt ends by opening a block of reasoning.
func InReasoning(f Family, prompt string) bool {
	s := syntaxOf(f)
	return s.think != "" && strings.HasSuffix(strings.TrimRight(prompt, space), s.think)
}

// HistoryID rewrites the id of a call for the template of a family. index is
// the call's place in the whole conversation, from 0. The same id always becomes
// the same, so a result still finds its call.
func HistoryID(f Family, id, name string, index int) string {
	switch f {
	case Mistral, MistralArg: // templates raise unless it is 9 letters and digits
		if len(id) == 9 && alphanumeric(id) {
			return id
		}
		sum := sha256.Sum256([]byte(id))
		text := new(big.Int).SetBytes(sum[:]).Text(62)
		return ("000000000" + text)[len(text):]
	case KimiK2: // the ids are part of the prompt that the model was trained on
		return fmt.Sprintf("functions.%s:%d", name, index)
	}
	return id
}

func alphanumeric(s string) bool {
	return strings.Trim(s, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789") == ""
}

// name cleans the name of a call; false when it can be none.
func (p *Parser) name(raw string) (string, bool) {
	n := strings.Trim(raw, space)
	if p.tools[n] == nil {
		n = strings.TrimPrefix(n, "functions.")
	}
	if n == "" || len(n) > maxName || p.calls >= maxCalls {
		return "", false
	}
	for _, c := range n {
		if c != '_' && c != '-' && c != '.' && c != ':' && c != '/' && !alphanumeric(string(c)) {
			return "", p.tools[n] != nil
		}
	}
	return n, true
}
