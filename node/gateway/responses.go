package gateway

import (
	"context"
	"encoding/json"
	"net/http"

	"kvasird/node/gateway/jinja"
)

// responses is POST /v1/responses.
func (g *Gateway) responses(w http.ResponseWriter, r *http.Request) {
	var t *responseTask
	parse := func(d *jinja.Dict) (*task, *apiError) {
		var e *apiError
		if t, e = g.parseResponses(r, d); e != nil {
			return nil, e
		}
		// Codex understands a prompt that does not fit only in an event.
		t.overflow = func(q *ready, e *apiError) bool {
			if !t.stream {
				return false
			}
			s := g.responseStream(r, q, t, startEvents(w, g.waits.write))
			s.begin(nil)
			s.fail(e)
			return true
		}
		return t.task, nil
	}
	g.answer(w, r, parse, "resp_", func(ctx context.Context, q *ready, all []*generation) {
		if q.stream {
			streamTo(ctx, w, r, all, g.waits, func(out *eventWriter) sink { return g.responseStream(r, q, t, out) })
			return
		}
		s := g.responseStream(r, q, t, nil)
		for gen := all[0]; gen.finish == ""; {
			pieces, err := gen.next(ctx, 0)
			if err != nil {
				writeError(w, r, engineError(err))
				return
			}
			for _, p := range pieces {
				s.piece(0, p)
			}
		}
		s.end(0, all[0])
		s.finish(all)
		g.writeAnswer(w, s.response)
	})
}

// storedResponse is GET and DELETE of /v1/responses/{id}.
func (g *Gateway) storedResponse(w http.ResponseWriter, r *http.Request) {
	id := r.PathValue("id")
	switch r.Method {
	case http.MethodGet:
		kept, e := g.stored(r.Context(), owner(r), id)
		if e != nil {
			e.code = "response_not_found"
			writeError(w, r, e)
			return
		}
		g.writeAnswer(w, kept.Response)
	case http.MethodDelete:
		_, e := g.stored(r.Context(), owner(r), id)
		if e == nil {
			if _, err := g.cfg.Store.Delete(r.Context(), storeKey(owner(r), id)); err != nil {
				e = engineError(err)
			}
		}
		if e != nil {
			writeError(w, r, e)
			return
		}
		g.writeAnswer(w, map[string]any{"id": id, "object": "response", "deleted": true})
	default:
		wrongMethod(w, r, "GET, DELETE")
	}
}

// responseUsage counts tokens.
type responseUsage struct {
	Input         int               `json:"input_tokens"`
	InputDetails  promptDetails     `json:"input_tokens_details"`
	Output        int               `json:"output_tokens"`
	OutputDetails completionDetails `json:"output_tokens_details"`
	Total         int               `json:"total_tokens"`
}

type responseError struct {
	Code    string `json:"code"`
	Message string `json:"message"`
}

type incomplete struct {
	Reason string `json:"reason"`
}

// responseObject is a response. What the client asked for is repeated in it as it
// was.
type responseObject struct {
	ID              string          `json:"id"`
	Object          string          `json:"object"`
	Created         int64           `json:"created_at"`
	Status          string          `json:"status"`
	Background      bool            `json:"background"`
	Error           *responseError  `json:"error"`
	Incomplete      *incomplete     `json:"incomplete_details"`
	Instructions    json.RawMessage `json:"instructions"`
	MaxOutputTokens json.RawMessage `json:"max_output_tokens"`
	Model           string          `json:"model"`
	Output          []any           `json:"output"`
	Parallel        bool            `json:"parallel_tool_calls"`
	Previous        *string         `json:"previous_response_id"`
	Reasoning       json.RawMessage `json:"reasoning"`
	Store           bool            `json:"store"`
	Temperature     float32         `json:"temperature"`
	Text            json.RawMessage `json:"text"`
	ToolChoice      json.RawMessage `json:"tool_choice"`
	Tools           json.RawMessage `json:"tools"`
	TopP            float32         `json:"top_p"`
	Truncation      string          `json:"truncation"`
	Usage           *responseUsage  `json:"usage"`
	User            json.RawMessage `json:"user"`
	Metadata        json.RawMessage `json:"metadata"`
}

// repeated is a field of the body, or def where it is absent.
func (t *responseTask) shown(name, def string) json.RawMessage {
	if v, ok := t.asked[name]; ok {
		return v
	}
	return json.RawMessage(def)
}

func newResponseObject(q *ready, t *responseTask) *responseObject {
	o := &responseObject{
		ID: q.id, Object: "response", Created: q.created, Status: "in_progress", Model: q.m.ID, Output: []any{},
		Instructions: t.shown("instructions", "null"), MaxOutputTokens: t.shown("max_output_tokens", "null"),
		Parallel: t.parallel, Reasoning: t.shown("reasoning", `{"effort":null,"summary":null}`), Store: t.store,
		Temperature: t.sampling.Temperature, TopP: t.sampling.TopP, Text: t.shown("text", `{"format":{"type":"text"}}`),
		ToolChoice: t.shown("tool_choice", `"auto"`), Tools: t.shown("tools", "[]"), Truncation: "disabled",
		User: t.shown("user", "null"), Metadata: t.shown("metadata", "{}"),
	}
	if t.previous != "" {
		o.Previous = &t.previous
	}
	return o
}

// keep stores the response with its conversation. A response that could not be
// kept says that it is not.
func (g *Gateway) keep(r *http.Request, t *responseTask, o *responseObject) {
	if !t.store {
		return
	}
	items := append([]json.RawMessage{}, t.items...)
	for _, item := range o.Output {
		items = append(items, json.RawMessage(encode(item)))
	}
	kept := map[string]any{"items": items, "response": o}
	if err := g.cfg.Store.Put(r.Context(), storeKey(owner(r), o.ID), encode(kept)); err != nil {
		g.cfg.Logger.Warn("response was not stored", "error", err)
		o.Store = false
	}
}
