package gateway

import (
	"context"
	"errors"
	"io"
	"net/http"
	"time"
)

// eventWriter writes server-sent events, each within a time limit; they go out with
// the next flush at the latest. After an error the client is gone and nothing more is
// written.
type eventWriter struct {
	w     http.ResponseWriter
	rc    *http.ResponseController
	limit time.Duration
	last  time.Time // of a write
	err   error
}

func startEvents(w http.ResponseWriter, limit time.Duration) *eventWriter {
	h := w.Header()
	h.Set("Content-Type", "text/event-stream")
	h.Set("Cache-Control", "no-cache")
	h.Set("X-Accel-Buffering", "no") // proxies must pass events on at once
	h.Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(http.StatusOK)
	e := &eventWriter{w: w, rc: http.NewResponseController(w), limit: limit, last: time.Now()}
	e.flush() // the headers go out now, whenever the first event comes
	return e
}

func (e *eventWriter) raw(text string) {
	if e.err != nil {
		return
	}
	e.last = time.Now()
	_ = e.rc.SetWriteDeadline(e.last.Add(e.limit))
	_, e.err = io.WriteString(e.w, text)
}

func (e *eventWriter) flush() {
	if e.err == nil {
		_ = e.rc.SetWriteDeadline(time.Now().Add(e.limit))
		e.err = e.rc.Flush()
	}
}

// data is an event without a name.
func (e *eventWriter) data(v any) { e.raw("data: " + string(encode(v)) + "\n\n") }

// event is an event with its name, by which Anthropic's clients tell it.
func (e *eventWriter) event(name string, v any) {
	e.raw("event: " + name + "\ndata: " + string(encode(v)) + "\n\n")
}

func (e *eventWriter) done() { e.raw("data: [DONE]\n\n") }

// comment keeps a stream alive. It is without the blank line that would end an
// event: some clients take an empty event for a broken one.
func (e *eventWriter) comment() { e.raw(": keep-alive\n") }

// sink writes a streamed answer in one API's shape.
type sink interface {
	begin(all []*generation)
	piece(choice int, p piece)
	ping()
	// end is the end of one answer; after the last one finish is called.
	end(choice int, a *generation)
	finish(all []*generation)
	fail(e *apiError)
}

// streamTo streams the answers, one after the other. An engine that fails early
// still chooses the HTTP status; later failures are an error event.
func streamTo(ctx context.Context, w http.ResponseWriter, r *http.Request, all []*generation, limits waits, open func(*eventWriter) sink) {
	pieces, err := all[0].next(ctx, limits.header)
	if err != nil && !errors.Is(err, errWaiting) {
		writeError(w, r, engineError(err))
		return
	}
	out := startEvents(w, limits.write)
	defer out.flush()
	s := open(out)
	s.begin(all)
	for i, a := range all {
		for {
			if err != nil && !errors.Is(err, errWaiting) {
				s.fail(engineError(err))
				return
			}
			for _, p := range pieces {
				s.piece(i, p)
			}
			if out.err != nil {
				return
			}
			if a.finish != "" {
				break
			}
			if limits.ping-time.Since(out.last) <= 0 { // also while a call is held back
				s.ping()
			}
			if pieces, err = a.next(ctx, noWait); err == errWaiting { // what is there goes out together
				out.flush()
				pieces, err = a.next(ctx, max(limits.ping-time.Since(out.last), time.Millisecond))
			}
		}
		s.end(i, a)
		pieces, err = nil, nil
	}
	s.finish(all)
}
