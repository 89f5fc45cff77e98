package gateway

import (
	"encoding/base64"
	"net/http"

	"kvasird/node/gateway/jinja"
)

// responseStream makes a response of pieces, and its events where it is streamed.
// Items never overlap; each is done before the next is added.
type responseStream struct {
	g        *Gateway
	r        *http.Request
	t        *responseTask
	out      *eventWriter // nil: not streamed
	sequence int
	response *responseObject

	open bool // an item is
	kind pieceKind
	item map[string]any // the open one
	text string         // of it
	toks []tokenChoice  // of it
}

func (g *Gateway) responseStream(r *http.Request, q *ready, t *responseTask, out *eventWriter) *responseStream {
	return &responseStream{g: g, r: r, t: t, out: out, response: newResponseObject(q, t)}
}

// emit writes an event, which every client tells by its type.
func (s *responseStream) emit(kind string, event map[string]any) {
	if s.out == nil {
		return
	}
	event["type"] = kind
	event["sequence_number"] = s.sequence
	s.sequence++
	s.out.event(kind, event)
}

func (s *responseStream) lifecycle(kind string) { s.emit(kind, map[string]any{"response": s.response}) }

func (s *responseStream) begin([]*generation) {
	s.lifecycle("response.created")
	s.lifecycle("response.in_progress")
}

// ping is an event: Codex does not count comments as life.
func (s *responseStream) ping() { s.lifecycle("response.in_progress") }

// at is an event about the open item.
func (s *responseStream) at(more ...any) map[string]any {
	event := map[string]any{"item_id": s.item["id"], "output_index": len(s.response.Output)}
	for i := 0; i < len(more); i += 2 {
		event[more[i].(string)] = more[i+1]
	}
	return event
}

// to opens an item, unless one of the kind is open.
func (s *responseStream) to(kind pieceKind, item map[string]any) {
	if s.open && s.kind == kind && kind != pieceCall {
		return
	}
	s.close("completed")
	s.open, s.kind, s.item, s.text, s.toks = true, kind, item, "", nil
	s.emit("response.output_item.added", map[string]any{"output_index": len(s.response.Output), "item": item})
	if kind == pieceText {
		s.emit("response.content_part.added", s.at("content_index", 0, "part", outputText("", []any{})))
	}
}

func outputText(text string, probs any) map[string]any {
	return map[string]any{"type": "output_text", "text": text, "annotations": []any{}, "logprobs": probs}
}

func reasoningText(text string) map[string]any {
	return map[string]any{"type": "reasoning_text", "text": text}
}

func (s *responseStream) piece(_ int, p piece) {
	switch p.kind {
	case pieceText:
		s.to(pieceText, map[string]any{"id": s.g.newID("msg_"), "type": "message", "status": "in_progress", "role": roleAssistant, "content": []any{}})
		s.emit("response.output_text.delta", s.at("content_index", 0, "delta", p.text, "logprobs", s.probs(p.probs)))
		s.toks = append(s.toks, p.probs...)
	case pieceReasoning:
		s.to(pieceReasoning, map[string]any{"id": s.g.newID("rs_"), "type": "reasoning", "status": "in_progress", "summary": []any{}, "content": []any{}})
		s.emit("response.reasoning_text.delta", s.at("content_index", 0, "delta", p.text))
	case pieceCall:
		s.openCall(p)
	case pieceArgs:
		if s.item["type"] == "function_call" {
			s.emit("response.function_call_arguments.delta", s.at("delta", p.text))
		}
	case pieceEnd:
		status := "completed"
		if p.cut {
			status = "incomplete"
		}
		s.close(status)
		return
	}
	s.text += p.text
}

func (s *responseStream) openCall(p piece) {
	item := map[string]any{"status": "in_progress", "call_id": p.id, "name": p.name}
	if t := s.t.talk.named(p.name); t != nil && t.custom {
		item["id"], item["type"], item["input"] = s.g.newID("ctc_"), "custom_tool_call", ""
	} else {
		item["id"], item["type"], item["arguments"] = s.g.newID("fc_"), "function_call", ""
	}
	s.to(pieceCall, item)
}

// close ends the open item with its whole content.
func (s *responseStream) close(status string) {
	if !s.open {
		return
	}
	s.open = false
	s.item["status"] = status
	switch {
	case s.kind == pieceText:
		probs := s.probs(s.toks)
		part := outputText(s.text, probs)
		s.item["content"] = []any{part}
		s.emit("response.output_text.done", s.at("content_index", 0, "text", s.text, "logprobs", probs))
		s.emit("response.content_part.done", s.at("content_index", 0, "part", part))
	case s.kind == pieceReasoning:
		s.item["content"] = []any{reasoningText(s.text)}
		if s.t.sealed {
			s.item["encrypted_content"] = sealedPrefix + base64.StdEncoding.EncodeToString([]byte(s.text))
		}
		s.emit("response.reasoning_text.done", s.at("content_index", 0, "text", s.text))
	case s.item["type"] == "custom_tool_call":
		input := customInput(s.text)
		s.item["input"] = input
		s.emit("response.custom_tool_call_input.delta", s.at("delta", input))
		s.emit("response.custom_tool_call_input.done", s.at("input", input))
	default:
		s.item["arguments"] = s.text
		s.emit("response.function_call_arguments.done", s.at("arguments", s.text, "name", s.item["name"]))
	}
	s.emit("response.output_item.done", map[string]any{"output_index": len(s.response.Output), "item": s.item})
	s.response.Output = append(s.response.Output, s.item)
}

// customInput is the one text of a custom tool's arguments; what is no such
// arguments is passed on as it is.
func customInput(arguments string) string {
	if v, err := jinja.DecodeJSON([]byte(arguments)); err == nil {
		if d, ok := v.(*jinja.Dict); ok {
			if input, ok := d.Get("input"); ok {
				if text, ok := input.(string); ok {
					return text
				}
			}
		}
	}
	return arguments
}

func (s *responseStream) probs(list []tokenChoice) []any {
	out := []any{}
	if !s.t.extra.Logprobs {
		return out
	}
	for _, c := range chatProbsOf(list, s.t.extra.Top) {
		out = append(out, c)
	}
	return out
}

func (s *responseStream) end(_ int, a *generation) {
	o := s.response
	status := "completed"
	o.Status = status
	if a.finish == finishLength {
		status = "incomplete"
		o.Status, o.Incomplete = status, &incomplete{"max_output_tokens"}
	}
	s.toks = append(s.toks, a.rest()...)
	s.close(status)
	o.Usage = &responseUsage{Input: a.prompt, Output: a.tokens, Total: a.prompt + a.tokens,
		InputDetails: promptDetails{a.cached()}, OutputDetails: completionDetails{a.reasoning}}
}

func (s *responseStream) finish([]*generation) {
	s.g.keep(s.r, s.t, s.response)
	s.lifecycle("response." + s.response.Status)
}

func (s *responseStream) fail(e *apiError) {
	s.close("incomplete")
	s.response.Status, s.response.Error = "failed", &responseError{e.code, e.message}
	s.lifecycle("response.failed")
}
