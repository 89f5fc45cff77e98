// Package toolcall reads tool calls and reasoning out of the text that models
// write, for each family of models its own syntax.
//
// A Parser is one state machine for streams and whole answers: what it reports
// depends on the bytes fed, never on where they were cut. It holds back every
// suffix that may begin a marker, and a call until it is known to be one; what
// turns out to be no call comes back as text. The text must hold the special
// tokens' own text, since most markers are such tokens; the tokens that end a
// turn need not be there.
//
// Detect finds the family by what a chat template contains. Grammar writes the
// GBNF that forces a call; it knows no JSON schema, so the caller brings the
// rules of arguments (node/gateway/grammar).
//
// Limits: maxHeld bytes held back, maxCalls calls, maxDepth levels of nesting.
// A Parser belongs to one goroutine.
package toolcall

import "encoding/json"

// Tool is a function that the model may call.
type Tool struct {
	Name       string
	Parameters json.RawMessage // JSON schema of an object; nil: any
}

// Family names a syntax of tool calls and reasoning.
type Family string

// The families. None knows no tool calls, but <think> blocks.
const (
	None       Family = ""
	Hermes     Family = "hermes"        // also Qwen 2.5 and 3
	Qwen3Coder Family = "qwen3-coder"   // also Qwen 3.5 and 3.6
	Llama3     Family = "llama3"        // 3.1, 3.2, 3.3
	Llama4     Family = "llama4"        // pythonic
	Mistral    Family = "mistral"       // Nemo: a JSON array
	MistralArg Family = "mistral-args"  // Small 3.2, Devstral, Ministral 3: [ARGS]
	DeepSeekV3 Family = "deepseek-v3"   // also R1
	DeepSeek31 Family = "deepseek-v3.1" // no fence
	DeepSeek32 Family = "deepseek-v3.2" // DSML in function_calls
	DeepSeekV4 Family = "deepseek-v4"   // DSML in tool_calls
	GPTOSS     Family = "gpt-oss"       // Harmony channels
	Gemma4     Family = "gemma4"
	GLM4       Family = "glm4" // 4.5 to 5
	KimiK2     Family = "kimi-k2"
	MiniMaxM2  Family = "minimax-m2"
	MiniMaxM3  Family = "minimax-m3"
)

// Kind says what an Event carries.
type Kind uint8

// The kinds of events.
const (
	Text      Kind = iota // Text: a piece of the visible answer
	Reasoning             // Text: a piece of the reasoning
	Begin                 // Index, Name: a call begins
	Args                  // Index, Text: a piece of its arguments, which joined are one JSON object
	End                   // Index: the call is complete
)

// Event is one piece of a message. Indices count calls from 0; one call ends
// before the next begins.
type Event struct {
	Kind  Kind
	Index int
	Name  string
	Text  string
}

// Options are what the parser cannot see in the text.
type Options struct {
	InReasoning bool // the prompt ended inside a reasoning block: see InReasoning
	NoCalls     bool // tool_choice "none": calls are recognised and left out
	NoReasoning bool // the model was not taught to reason: no grammar has room for it
}
