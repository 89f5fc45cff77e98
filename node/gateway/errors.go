package gateway

import (
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"
)

const (
	// statusClientClosed is logged, never sent: the client went away.
	statusClientClosed = 499
	// statusOverloaded is Anthropic's word for a full queue.
	statusOverloaded = 529
)

// apiError is a failure, before it has an API's shape.
type apiError struct {
	status     int
	code       string
	param      string // the request field at fault, "" if none
	message    string
	retryAfter time.Duration
	busy       bool // the node has too much to do, whoever asks
	final      bool // asking again would end the same way

	promptTokens, limitTokens int // of a prompt that does not fit

	payment any // what to pay, see PaymentError
}

func (e *apiError) Error() string { return e.message }

// badParam refuses a request field.
func badParam(param, message string) *apiError {
	return &apiError{status: http.StatusBadRequest, code: "invalid_value", param: param, message: message}
}

// lacks refuses a field because the model or its engine cannot do it.
func lacks(param, what string) *apiError {
	return &apiError{status: http.StatusBadRequest, code: "unsupported_value", param: param, message: param + ": " + what}
}

// openAIKind is error.type of OpenAI's shape.
func (e *apiError) openAIKind() string {
	switch {
	case e.status == http.StatusTooManyRequests:
		return "rate_limit_error"
	case e.status >= 500:
		return "server_error"
	case e.status == http.StatusForbidden:
		return "permission_error"
	case e.status == http.StatusPaymentRequired:
		return "insufficient_quota"
	}
	return "invalid_request_error"
}

// anthropicKind is error.type of Anthropic's shape.
func (e *apiError) anthropicKind() string {
	switch e.status {
	case http.StatusUnauthorized:
		return "authentication_error"
	case http.StatusPaymentRequired:
		return "billing_error"
	case http.StatusForbidden:
		return "permission_error"
	case http.StatusNotFound:
		return "not_found_error"
	case http.StatusRequestEntityTooLarge:
		return "request_too_large"
	case http.StatusTooManyRequests:
		if e.busy {
			return "overloaded_error"
		}
		return "rate_limit_error"
	}
	if e.status >= 500 {
		return "api_error"
	}
	return "invalid_request_error"
}

// openAI is {"error":{"message":…,"type":…,"param":…,"code":…}}; param and
// code are null when empty. What to pay stands beside it.
func (e *apiError) openAI() any {
	text := func(s string) any {
		if s == "" {
			return nil
		}
		return s
	}
	body := map[string]any{"error": map[string]any{
		"message": e.message, "type": e.openAIKind(), "param": text(e.param), "code": text(e.code),
	}}
	if e.payment != nil {
		body["payment"] = e.payment
	}
	return body
}

// anthropic is {"type":"error","error":{"type":…,"message":…},"request_id":…}.
func (e *apiError) anthropic(requestID string) any {
	message := e.message
	if e.code == codeTooLong && e.promptTokens > 0 {
		// Only this wording makes clients compact a conversation.
		message = fmt.Sprintf("prompt is too long: %d tokens > %d maximum", e.promptTokens, e.limitTokens)
	}
	return struct {
		Type  string `json:"type"`
		Error struct {
			Type    string `json:"type"`
			Message string `json:"message"`
		} `json:"error"`
		RequestID string `json:"request_id"`
		Payment   any    `json:"payment,omitempty"`
	}{"error", struct {
		Type    string `json:"type"`
		Message string `json:"message"`
	}{e.anthropicKind(), message}, requestID, e.payment}
}

// isAnthropic says in whose API a request speaks.
func isAnthropic(r *http.Request) bool {
	path := r.URL.Path
	return strings.HasPrefix(path, "/anthropic/") ||
		r.Header.Get("Anthropic-Version") != "" && strings.HasPrefix(path, "/v1/") ||
		path == "/v1/messages" || strings.HasPrefix(path, "/v1/messages/")
}

// writeError answers in the shape of the request's API.
func writeError(w http.ResponseWriter, r *http.Request, e *apiError) {
	if e.retryAfter > 0 {
		w.Header().Set("Retry-After", strconv.Itoa(int((e.retryAfter+time.Second-1)/time.Second)))
	}
	if e.final {
		w.Header().Set("X-Should-Retry", "false") // clients ask again after most errors of a server
	}
	if !isAnthropic(r) {
		writeJSON(w, e.status, e.openAI())
		return
	}
	status := e.status
	if e.busy && status == http.StatusTooManyRequests {
		status = statusOverloaded
	}
	writeJSON(w, status, e.anthropic(w.Header().Get("Request-Id")))
}

func writeJSON(w http.ResponseWriter, status int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(status)
	// A failed write means that the client is gone; its context says so.
	_, _ = w.Write(append(encode(v), '\n'))
}

const (
	codeTooLong = "context_length_exceeded"
	codeTooSlow = "deadline_exceeded"
)

// engineError translates what an Engine or Keys returned.
func engineError(err error) *apiError {
	var failed *apiError
	if errors.As(err, &failed) {
		return failed
	}
	if e, ok := paymentError(err); ok {
		return e
	}
	var pay interface{ PaymentRequired() bool }
	if errors.As(err, &pay) && pay.PaymentRequired() {
		return &apiError{status: http.StatusPaymentRequired, code: "payment_required", message: err.Error()}
	}
	var full interface{ RetryAfter() time.Duration }
	if errors.As(err, &full) {
		return &apiError{status: http.StatusTooManyRequests, code: "queue_full", message: err.Error(),
			retryAfter: max(full.RetryAfter(), time.Second), busy: true}
	}
	var long interface{ ContextLength() (prompt, limit int) }
	if errors.As(err, &long) {
		e := &apiError{status: http.StatusBadRequest, code: codeTooLong, param: "messages", message: err.Error()}
		e.promptTokens, e.limitTokens = long.ContextLength()
		return e
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
