package gateway

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"time"
)

// eventWriter writes server-sent events, each within a time limit. After an
// error the client is gone and nothing more is written.
type eventWriter struct {
	w     http.ResponseWriter
	rc    *http.ResponseController
	limit time.Duration
	err   error
}

func startEvents(w http.ResponseWriter, limit time.Duration) *eventWriter {
	h := w.Header()
	h.Set("Content-Type", "text/event-stream")
	h.Set("Cache-Control", "no-cache")
	h.Set("X-Accel-Buffering", "no") // proxies must pass events on at once
	h.Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(http.StatusOK)
	return &eventWriter{w: w, rc: http.NewResponseController(w), limit: limit}
}

func (e *eventWriter) raw(text string) {
	if e.err != nil {
		return
	}
	_ = e.rc.SetWriteDeadline(time.Now().Add(e.limit))
	if _, e.err = e.w.Write([]byte(text)); e.err == nil {
		e.err = e.rc.Flush()
	}
}

func (e *eventWriter) event(v any) {
	data, err := json.Marshal(v)
	if err != nil { // only our own shapes come here
		panic(err)
	}
	e.raw("data: " + string(data) + "\n\n")
}

func (e *eventWriter) done() { e.raw("data: [DONE]\n\n") }

// ping is a comment without the blank line that would end an event: some
// clients take an empty event for a broken one.
func (e *eventWriter) ping() { e.raw(": keep-alive\n") }

// chunk is a completion whose usage is always written, null until the end.
type chunk struct {
	completion
	Usage *usage `json:"usage"`
}

// sendStream streams the answer. An engine that fails early still
// chooses the HTTP status; later failures are an error event.
func (a *answer) sendStream(ctx context.Context, w http.ResponseWriter, withUsage bool) {
	text, finish, err := a.within(ctx, a.waits.header)
	if err != nil && !errors.Is(err, errWaiting) {
		writeError(w, engineError(err))
		return
	}
	out := startEvents(w, a.waits.write)
	send := func(choices []choice, u *usage) {
		c := a.completion("chat.completion.chunk", choices...)
		if withUsage {
			out.event(chunk{c, u})
		} else {
			out.event(c)
		}
	}
	empty := ""
	send([]choice{{Delta: &message{Role: "assistant", Content: &empty}}}, nil)
	for out.err == nil {
		switch {
		case errors.Is(err, errWaiting):
			out.ping()
		case err != nil:
			out.event(engineError(err))
			out.done()
			return
		case text != "":
			part := text
			send([]choice{{Delta: &message{Content: &part}}}, nil)
		}
		if finish != "" {
			break
		}
		text, finish, err = a.within(ctx, a.waits.ping)
	}
	send([]choice{{Delta: &message{}, Finish: &finish}}, nil)
	if withUsage {
		send([]choice{}, a.usage())
	}
	out.done()
}

// errWaiting says that nothing came in time; the answer goes on.
var errWaiting = errors.New("no token yet")

// within is next with a limit on the wait.
func (a *answer) within(ctx context.Context, d time.Duration) (text, finish string, err error) {
	ctx, cancel := context.WithTimeoutCause(ctx, d, errWaiting)
	defer cancel()
	text, finish, err = a.next(ctx)
	if errors.Is(err, context.DeadlineExceeded) && context.Cause(ctx) == errWaiting {
		err = errWaiting
	}
	return text, finish, err
}
