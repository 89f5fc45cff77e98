package gateway

import (
	"context"
	"encoding/json"
	"net/http"

	"kvasird/node/gateway/jinja"
)

// signature stands where Anthropic signs thinking: clients drop a turn without
// one. It says nothing and is not checked.
const signature = "a3Zhc2ly"

// messages is POST /v1/messages in Anthropic's API.
func (g *Gateway) messages(w http.ResponseWriter, r *http.Request) {
	g.answer(w, r, parseMessages, "msg_", func(ctx context.Context, q *ready, all []*generation) {
		gen := all[0]
		gen.newID = func() string { return g.newID("toolu_") }
		if q.stream {
			streamTo(ctx, w, r, all, g.waits, func(out *eventWriter) sink {
				return &messageStream{q: q, out: out, requestID: w.Header().Get("Request-Id")}
			})
			return
		}
		got, e := gen.whole(ctx)
		if e != nil {
			writeError(w, r, e)
			return
		}
		m := claudeMessage(q, gen)
		for _, b := range got {
			m.Content = append(m.Content, claudeContent(b))
		}
		m.setStop(gen)
		g.writeAnswer(w, m)
	})
}

// countTokens is POST /v1/messages/count_tokens: the input of the same request.
func (g *Gateway) countTokens(w http.ResponseWriter, r *http.Request) {
	g.withPlace(w, r, func() {
		d, _, done, e := g.body(w, r)
		if e != nil {
			writeError(w, r, e)
			return
		}
		defer done()
		n, e := g.countPrompt(r.Context(), d)
		if e != nil {
			writeError(w, r, e)
			return
		}
		g.writeAnswer(w, map[string]int{"input_tokens": n})
	})
}

func (g *Gateway) countPrompt(ctx context.Context, d *jinja.Dict) (int, *apiError) {
	t, e := parseCount(d)
	if e != nil {
		return 0, e
	}
	m, e := g.textModel(t.model)
	if e != nil {
		return 0, e
	}
	p, e := m.render(ctx, g.cfg.Now(), &t.talk, t.choice.mode)
	if e != nil {
		return 0, e
	}
	tokens, e := m.tokens(p.text, "messages")
	return len(tokens), e
}

// claudeUsage counts tokens. Input are those of the prompt that were computed.
type claudeUsage struct {
	Input         int `json:"input_tokens"`
	CacheCreation int `json:"cache_creation_input_tokens"`
	CacheRead     int `json:"cache_read_input_tokens"`
	Output        int `json:"output_tokens"`
}

func claudeUsageOf(a *generation) claudeUsage {
	cached := a.cached()
	return claudeUsage{Input: a.prompt - cached, CacheRead: cached, Output: a.tokens}
}

// claudeAnswer is a message.
type claudeAnswer struct {
	ID           string      `json:"id"`
	Type         string      `json:"type"`
	Role         string      `json:"role"`
	Model        string      `json:"model"`
	Content      []any       `json:"content"`
	StopReason   *string     `json:"stop_reason"`
	StopSequence *string     `json:"stop_sequence"`
	Usage        claudeUsage `json:"usage"`
}

// claudeMessage is a message that has no content yet.
func claudeMessage(q *ready, a *generation) *claudeAnswer {
	return &claudeAnswer{ID: q.id, Type: "message", Role: roleAssistant, Model: q.m.ID, Content: []any{}, Usage: claudeUsageOf(a)}
}

func (m *claudeAnswer) setStop(a *generation) {
	stop := claudeStopOf(a)
	m.StopReason, m.StopSequence, m.Usage = &stop.Reason, stop.Sequence, claudeUsageOf(a)
}

type claudeStop struct {
	Reason   string  `json:"stop_reason"`
	Sequence *string `json:"stop_sequence"`
}

func claudeStopOf(a *generation) claudeStop {
	stop := a.filter.Stop()
	switch {
	case a.finish == finishCalls:
		return claudeStop{Reason: "tool_use"}
	case a.finish == finishLength:
		return claudeStop{Reason: "max_tokens"}
	case stop != "":
		return claudeStop{"stop_sequence", &stop}
	}
	return claudeStop{Reason: "end_turn"}
}

// The blocks of a message.
type (
	claudeText struct {
		Type string `json:"type"`
		Text string `json:"text"`
	}
	claudeThinking struct {
		Type      string `json:"type"`
		Thinking  string `json:"thinking"`
		Signature string `json:"signature"`
	}
	claudeToolUse struct {
		Type  string          `json:"type"`
		ID    string          `json:"id"`
		Name  string          `json:"name"`
		Input json.RawMessage `json:"input"`
	}
)

func claudeContent(b block) any {
	switch b.kind {
	case pieceReasoning:
		return claudeThinking{"thinking", b.text, signature}
	case pieceCall:
		return claudeToolUse{"tool_use", b.id, b.name, objectOr(b.text)}
	}
	return claudeText{"text", b.text}
}

// objectOr is the JSON of a call's arguments; those of a call that was cut off
// are no JSON, and input has to be an object.
func objectOr(arguments string) json.RawMessage {
	if v, err := jinja.DecodeJSON([]byte(arguments)); err == nil {
		if d, ok := v.(*jinja.Dict); ok {
			return jsonOf(d)
		}
	}
	return json.RawMessage("{}")
}

// messageStream writes Anthropic's events. Blocks never overlap, and count from 0
// without a gap.
type messageStream struct {
	q         *ready
	out       *eventWriter
	requestID string
	index     int       // of the block that is open, or of the next
	open      bool      //
	kind      pieceKind // of the open block
}

// blockEvent is content_block_start, _delta or _stop.
type blockEvent struct {
	Type  string `json:"type"`
	Index int    `json:"index"`
	Block any    `json:"content_block,omitempty"`
	Delta any    `json:"delta,omitempty"`
}

func (s *messageStream) send(e blockEvent) { s.out.event(e.Type, e) }

func (s *messageStream) begin(all []*generation) {
	m := claudeMessage(s.q, all[0])
	s.out.event("message_start", struct {
		Type    string        `json:"type"`
		Message *claudeAnswer `json:"message"`
	}{"message_start", m})
}

// to opens a block, and closes the one before.
func (s *messageStream) to(kind pieceKind, empty any) {
	if s.open && s.kind == kind && kind != pieceCall {
		return
	}
	s.close()
	s.open, s.kind = true, kind
	s.send(blockEvent{Type: "content_block_start", Index: s.index, Block: empty})
}

func (s *messageStream) close() {
	if !s.open {
		return
	}
	if s.kind == pieceReasoning {
		s.delta(map[string]string{"type": "signature_delta", "signature": signature})
	}
	s.send(blockEvent{Type: "content_block_stop", Index: s.index})
	s.open = false
	s.index++
}

func (s *messageStream) delta(d any) {
	s.send(blockEvent{Type: "content_block_delta", Index: s.index, Delta: d})
}

func (s *messageStream) piece(_ int, p piece) {
	switch p.kind {
	case pieceText:
		s.to(pieceText, claudeText{Type: "text"})
		s.delta(map[string]string{"type": "text_delta", "text": p.text})
	case pieceReasoning:
		s.to(pieceReasoning, claudeThinking{Type: "thinking"})
		s.delta(map[string]string{"type": "thinking_delta", "thinking": p.text})
	case pieceCall:
		s.to(pieceCall, claudeToolUse{"tool_use", p.id, p.name, json.RawMessage("{}")})
	case pieceArgs:
		s.delta(map[string]string{"type": "input_json_delta", "partial_json": p.text})
	case pieceEnd:
		s.close()
	}
}

func (s *messageStream) ping() { s.out.event("ping", map[string]string{"type": "ping"}) }

func (s *messageStream) end(_ int, a *generation) {
	s.close()
	s.out.event("message_delta", struct {
		Type  string      `json:"type"`
		Delta claudeStop  `json:"delta"`
		Usage claudeUsage `json:"usage"`
	}{"message_delta", claudeStopOf(a), claudeUsageOf(a)})
}

func (s *messageStream) finish([]*generation) {
	s.out.event("message_stop", map[string]string{"type": "message_stop"})
}

func (s *messageStream) fail(e *apiError) { s.out.event("error", e.anthropic(s.requestID)) }
