package gateway

import (
	"context"
	"net/http"
)

// chat is POST /v1/chat/completions.
func (g *Gateway) chat(w http.ResponseWriter, r *http.Request) {
	g.answer(w, r, parseChat, "chatcmpl-", func(ctx context.Context, q *ready, all []*generation) {
		a := &chatAnswer{q: q}
		if q.stream {
			streamTo(ctx, w, r, all, g.waits, func(out *eventWriter) sink { return &chatStream{chatAnswer: a, out: out} })
			return
		}
		whole, e := a.whole(ctx, all)
		if e != nil {
			writeError(w, r, e)
			return
		}
		g.writeAnswer(w, whole)
	})
}

type usage struct {
	Prompt     int `json:"prompt_tokens"`
	Completion int `json:"completion_tokens"`
	Total      int `json:"total_tokens"`

	PromptDetails     promptDetails     `json:"prompt_tokens_details"`
	CompletionDetails completionDetails `json:"completion_tokens_details"`
}

type promptDetails struct {
	Cached int `json:"cached_tokens"`
}

type completionDetails struct {
	Reasoning int `json:"reasoning_tokens"`
}

// usageOf sums answers to one prompt.
func usageOf(all []*generation) *usage {
	u := &usage{Prompt: all[0].prompt}
	for _, a := range all {
		u.Completion += a.tokens
		u.CompletionDetails.Reasoning += a.reasoning
	}
	u.PromptDetails.Cached = all[0].cached()
	u.Total = u.Prompt + u.Completion
	return u
}

// chatMessage is a whole message.
type chatMessage struct {
	Role      string     `json:"role"`
	Content   *string    `json:"content"`
	Refusal   *string    `json:"refusal"`
	Reasoning string     `json:"reasoning_content,omitempty"`
	Calls     []chatCall `json:"tool_calls,omitempty"`
}

// chatDelta is a part of a message.
type chatDelta struct {
	Role      string     `json:"role,omitempty"`
	Content   *string    `json:"content,omitempty"`
	Reasoning string     `json:"reasoning_content,omitempty"`
	Calls     []chatCall `json:"tool_calls,omitempty"`
}

// chatCall is a call or a part of one: only the first has id, type and name.
type chatCall struct {
	Index    *int         `json:"index,omitempty"` // in streams
	ID       string       `json:"id,omitempty"`
	Type     string       `json:"type,omitempty"`
	Function chatFunction `json:"function"`
}

type chatFunction struct {
	Name      string `json:"name,omitempty"`
	Arguments string `json:"arguments"`
}

// chatProb is a token of logprobs or one of its alternatives.
type chatProb struct {
	Token   string  `json:"token"`
	Logprob float32 `json:"logprob"`
	Bytes   []int   `json:"bytes"`
}

type chatProbTop struct {
	chatProb
	Top []chatProb `json:"top_logprobs"`
}

type chatChoice struct {
	Index    int          `json:"index"`
	Message  *chatMessage `json:"message,omitempty"`
	Delta    *chatDelta   `json:"delta,omitempty"`
	Logprobs any          `json:"logprobs"`
	Finish   *string      `json:"finish_reason"`
}

// completion is chat.completion and chat.completion.chunk.
type completion struct {
	ID      string       `json:"id"`
	Object  string       `json:"object"`
	Created int64        `json:"created"`
	Model   string       `json:"model"`
	Choices []chatChoice `json:"choices"`
	Usage   *usage       `json:"usage,omitempty"`
}

// chunkWithUsage is a chunk whose usage is always written, null until the end.
type chunkWithUsage struct {
	completion
	Usage *usage `json:"usage"`
}

// chatAnswer is the shape of an answer.
type chatAnswer struct{ q *ready }

func (a *chatAnswer) completion(object string, choices ...chatChoice) completion {
	return completion{ID: a.q.id, Object: object, Created: a.q.created, Model: a.q.m.ID, Choices: choices}
}

func (a *chatAnswer) whole(ctx context.Context, all []*generation) (*completion, *apiError) {
	c := a.completion("chat.completion")
	for i, gen := range all {
		got, e := gen.whole(ctx)
		if e != nil {
			return nil, e
		}
		text, probs := got.joined(pieceText)
		m := &chatMessage{Role: roleAssistant, Content: &text}
		m.Reasoning, _ = got.joined(pieceReasoning)
		for _, b := range got {
			if b.kind == pieceCall {
				m.Calls = append(m.Calls, chatCall{ID: b.id, Type: "function", Function: chatFunction{b.name, b.text}})
			}
		}
		if text == "" && len(m.Calls) > 0 {
			m.Content = nil
		}
		c.Choices = append(c.Choices, chatChoice{Index: i, Message: m, Finish: &gen.finish, Logprobs: a.probs(append(probs, gen.rest()...), true)})
	}
	c.Usage = usageOf(all)
	return &c, nil
}

// probs is the logprobs of some tokens: null where none were asked for.
func (a *chatAnswer) probs(list []tokenChoice, always bool) any {
	if !a.q.extra.Logprobs || len(list) == 0 && !always {
		return nil
	}
	return map[string]any{"content": chatProbsOf(list, a.q.extra.Top), "refusal": nil}
}

func chatProbsOf(list []tokenChoice, n int) []chatProbTop {
	content := []chatProbTop{}
	for _, t := range list {
		c := chatProbTop{chatProb: shownProb(t.chosen), Top: []chatProb{}}
		for _, p := range t.top[:min(n, len(t.top))] {
			c.Top = append(c.Top, shownProb(p))
		}
		content = append(content, c)
	}
	return content
}

func shownProb(p TokenProb) chatProb {
	c := chatProb{Token: string([]rune(string(p.Bytes))), Logprob: p.Logprob, Bytes: make([]int, len(p.Bytes))}
	for i, b := range p.Bytes {
		c.Bytes[i] = int(b)
	}
	return c
}

// chatStream writes chunks.
type chatStream struct {
	*chatAnswer
	out *eventWriter
}

func (s *chatStream) send(u *usage, choices ...chatChoice) {
	c := s.completion("chat.completion.chunk", choices...)
	if s.q.includeUsage {
		s.out.data(chunkWithUsage{c, u})
	} else {
		s.out.data(c)
	}
}

func (s *chatStream) begin(all []*generation) {
	empty := ""
	for i := range all {
		s.send(nil, chatChoice{Index: i, Delta: &chatDelta{Role: roleAssistant, Content: &empty}})
	}
}

func (s *chatStream) piece(i int, p piece) {
	d := &chatDelta{}
	switch p.kind {
	case pieceText:
		d.Content = &p.text
	case pieceReasoning:
		d.Reasoning = p.text
	case pieceCall:
		d.Calls = []chatCall{{Index: &p.call, ID: p.id, Type: "function", Function: chatFunction{Name: p.name}}}
	case pieceArgs:
		d.Calls = []chatCall{{Index: &p.call, Function: chatFunction{Arguments: p.text}}}
	case pieceEnd:
		return
	}
	s.send(nil, chatChoice{Index: i, Delta: d, Logprobs: s.probs(p.probs, false)})
}

func (s *chatStream) ping() { s.out.comment() }

func (s *chatStream) end(i int, a *generation) {
	s.send(nil, chatChoice{Index: i, Delta: &chatDelta{}, Finish: &a.finish, Logprobs: s.probs(a.rest(), false)})
}

func (s *chatStream) finish(all []*generation) {
	if s.q.includeUsage {
		s.send(usageOf(all), []chatChoice{}...)
	}
	s.out.done()
}

func (s *chatStream) fail(e *apiError) {
	s.out.data(e.openAI())
	s.out.done()
}
