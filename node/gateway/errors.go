package gateway

import (
	"encoding/json"
	"errors"
	"net/http"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"
)

// statusClientClosed is logged, never sent: the client went away.
const statusClientClosed = 499

// apiError is a failure in OpenAI's shape:
// {"error":{"message":…,"type":…,"param":…,"code":…}}.
type apiError struct {
	status     int
	code       string
	param      string // the request field at fault, "" if none
	message    string
	retryAfter time.Duration
}

func (e *apiError) Error() string { return e.message }

// badParam refuses a request field.
func badParam(param, message string) *apiError {
	return &apiError{status: http.StatusBadRequest, code: "invalid_value", param: param, message: message}
}

func (e *apiError) kind() string {
	switch {
	case e.status == http.StatusTooManyRequests:
		return "rate_limit_error"
	case e.status >= 500:
		return "server_error"
	case e.status == http.StatusForbidden:
		return "permission_error"
	}
	return "invalid_request_error"
}

// MarshalJSON writes the error object; param and code are null when empty.
func (e *apiError) MarshalJSON() ([]byte, error) {
	text := func(s string) any {
		if s == "" {
			return nil
		}
		return s
	}
	return json.Marshal(map[string]any{"error": map[string]any{
		"message": e.message, "type": e.kind(), "param": text(e.param), "code": text(e.code),
	}})
}

func writeError(w http.ResponseWriter, e *apiError) {
	if e.retryAfter > 0 {
		w.Header().Set("Retry-After", strconv.Itoa(int((e.retryAfter+time.Second-1)/time.Second)))
	}
	writeJSON(w, e.status, e)
}

func writeJSON(w http.ResponseWriter, status int, v any) {
	body, err := json.Marshal(v)
	if err != nil { // only our own shapes come here
		panic(err)
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(status)
	// A failed write means that the client is gone; its context says so.
	_, _ = w.Write(append(body, '\n'))
}

// engineError translates what an Engine returned.
func engineError(err error) *apiError {
	var full interface{ RetryAfter() time.Duration }
	if errors.As(err, &full) {
		return &apiError{status: http.StatusTooManyRequests, code: "queue_full", message: err.Error(), retryAfter: max(full.RetryAfter(), time.Second)}
	}
	var long interface{ ContextLength() (prompt, limit int) }
	if errors.As(err, &long) {
		return &apiError{status: http.StatusBadRequest, code: "context_length_exceeded", param: "messages", message: err.Error()}
	}
	return &apiError{status: http.StatusServiceUnavailable, code: "engine_failed", message: err.Error()}
}

// clip shortens what a client sent before it is repeated in a message.
func clip(s string) string {
	const limit = 80
	if len(s) <= limit {
		return s
	}
	n := limit
	for n > 0 && !utf8.RuneStart(s[n]) {
		n--
	}
	return s[:n] + "…"
}

func lower(s string) string { return strings.ToLower(strings.TrimSpace(s)) }
