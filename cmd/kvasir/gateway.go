package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"kvasird/node/api"
)

// Limits of what a gateway says.
const (
	maxModels     = 4 << 20  // bytes of the list of models
	maxFailure    = 64 << 10 // bytes of an error
	maxAnswer     = 16 << 20 // bytes of one answer, its reasoning too
	dialWait      = 10 * time.Second
	listWait      = 30 * time.Second
	closeWait     = time.Second
	maxNamed      = 10              // models in an error
	gatewaySilent = 2 * time.Minute // ours says something every 10 s
)

// gateway calls the HTTP API of a node, this one's or another's.
type gateway struct {
	base    string // scheme and host, and a path if there is one, without /v1
	key     string // "": none
	http    *http.Client
	silence time.Duration // the longest of a stream
}

// newGateway takes an address as people write it: host:port, a URL, or one that
// ends in /v1.
func newGateway(address, key string) (*gateway, error) {
	if !strings.Contains(address, "://") {
		address = "http://" + address
	}
	u, err := url.Parse(address)
	if err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" || u.RawQuery != "" || u.User != nil {
		return nil, usagef("%q is no address of a gateway: want http://HOST:PORT or https://HOST", address)
	}
	if strings.ContainsFunc(key, func(r rune) bool { return r <= ' ' || r >= 0x7f }) {
		return nil, usagef("the API key has a space or another character that keys do not have")
	}
	u.Path = strings.TrimSuffix(strings.TrimSuffix(u.Path, "/"), "/v1")
	transport := http.DefaultTransport.(*http.Transport).Clone()
	transport.DialContext = (&net.Dialer{Timeout: dialWait}).DialContext
	client := &http.Client{Transport: transport, CheckRedirect: func(r *http.Request, _ []*http.Request) error {
		// The key and the conversation go where they were meant to go.
		return fmt.Errorf("it sends on to %s: give that address if you trust it", r.URL.Redacted())
	}}
	return &gateway{base: u.String(), key: key, http: client, silence: gatewaySilent}, nil
}

// refusal is an error that the gateway told.
type refusal struct {
	status     int // 0: in the middle of a stream
	code       string
	message    string
	retryAfter time.Duration // 0: not told
}

func (r *refusal) Error() string {
	if r.status == http.StatusUnauthorized {
		return r.message + ". Give a key with --key or KVASIR_API_KEY; `kvasir keys add` on the node makes one"
	}
	return r.message
}

// models lists the names of the models.
func (g *gateway) models(ctx context.Context) ([]string, error) {
	ctx, cancel := context.WithTimeout(ctx, listWait)
	defer cancel()
	var list struct{ Data []struct{ ID string } }
	if err := g.get(ctx, "/v1/models", &list); err != nil {
		return nil, err
	}
	var names []string
	for _, m := range list.Data {
		names = append(names, m.ID)
	}
	return names, nil
}

// model finds the model that goes by a name, which may be an alias.
func (g *gateway) model(ctx context.Context, name string) (string, error) {
	known, err := g.models(ctx)
	if err != nil || slices.Contains(known, name) {
		return name, err
	}
	ctx, cancel := context.WithTimeout(ctx, listWait)
	defer cancel()
	var found struct{ ID string }
	err = g.get(ctx, "/v1/models/"+url.PathEscape(name), &found)
	var no *refusal
	switch {
	case err == nil && found.ID != "":
		return found.ID, nil
	case err != nil && !(errors.As(err, &no) && no.status == http.StatusNotFound):
		return "", err
	}
	if near := api.Nearest(name, known); near != "" {
		return "", fmt.Errorf("no model %q: did you mean %q?", name, near)
	}
	if len(known) == 0 {
		return "", fmt.Errorf("no model %q: %s serves none now", name, g.base)
	}
	more, shown := "", known[:min(len(known), maxNamed)]
	if n := len(known) - len(shown); n > 0 {
		more = fmt.Sprintf(" and %d more", n)
	}
	return "", fmt.Errorf("no model %q: there are %s%s", name, strings.Join(shown, ", "), more)
}

func (g *gateway) get(ctx context.Context, path string, v any) error {
	resp, err := g.send(ctx, http.MethodGet, path, nil)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(io.LimitReader(resp.Body, maxModels+1))
	if err != nil {
		return fmt.Errorf("read from %s: %w", g.base, err)
	}
	if len(data) > maxModels || json.Unmarshal(data, v) != nil {
		return fmt.Errorf("%s%s does not answer as a gateway does: is that its address?", g.base, path)
	}
	return nil
}

// send returns an answer with status 200, or says why there is none.
func (g *gateway) send(ctx context.Context, method, path string, body []byte) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, method, g.base+path, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	req.Header.Set("Content-Type", "application/json")
	if g.key != "" {
		req.Header.Set("Authorization", "Bearer "+g.key)
	}
	resp, err := g.http.Do(req)
	var failed *url.Error
	switch {
	case err != nil && ctx.Err() != nil:
		return nil, context.Cause(ctx)
	case errors.As(err, &failed):
		return nil, fmt.Errorf("%w at %s: %w", errNoGateway, g.base, failed.Err)
	case err != nil:
		return nil, err
	}
	if resp.StatusCode == http.StatusOK {
		return resp, nil
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(io.LimitReader(resp.Body, maxFailure))
	if err != nil {
		return nil, fmt.Errorf("read from %s: %w", g.base, err)
	}
	r := refusalOf(text)
	if r.status = resp.StatusCode; r.message == "" {
		r.message = fmt.Sprintf("%s%s answers %s: is that the address of a gateway?", g.base, path, resp.Status)
	}
	r.retryAfter = retryAfter(resp.Header.Get("Retry-After"))
	return nil, r
}

// refusalOf reads {"error":{"message":…,"code":…}}, an empty refusal if it is not that.
func refusalOf(data []byte) *refusal {
	var body struct {
		Error *struct {
			Message string
			Code    any // of some servers a number
		}
	}
	if json.Unmarshal(data, &body) != nil || body.Error == nil {
		return &refusal{}
	}
	code, _ := body.Error.Code.(string)
	return &refusal{code: code, message: body.Error.Message}
}

// retryAfter reads seconds or a date; 0 is neither.
func retryAfter(header string) time.Duration {
	if s, err := strconv.Atoi(header); err == nil {
		return time.Duration(min(max(s, 1), 1<<30)) * time.Second
	}
	if at, err := http.ParseTime(header); err == nil {
		return max(time.Until(at), time.Second)
	}
	return 0
}

// chatRequest is the body of /v1/chat/completions. Nil leaves it to the gateway.
type chatRequest struct {
	Model       string        `json:"model"`
	Messages    []chatMessage `json:"messages"`
	MaxTokens   *int          `json:"max_completion_tokens,omitempty"`
	Temperature *float64      `json:"temperature,omitempty"`
	TopP        *float64      `json:"top_p,omitempty"`
	Seed        *uint         `json:"seed,omitempty"`
	Stream      bool          `json:"stream"`
	Options     struct {
		Usage bool `json:"include_usage"`
	} `json:"stream_options"`
}

type chatMessage struct {
	Role    string `json:"role"`
	Content string `json:"content"`
}

// chatChunk is what of a stream's events is of use here.
type chatChunk struct {
	Choices []struct {
		Delta struct {
			Content   string
			Reasoning string `json:"reasoning_content"`
		}
		Finish string `json:"finish_reason"`
	}
	Usage *chatUsage
}

// chatUsage is what an answer cost.
type chatUsage struct {
	Prompt     int `json:"prompt_tokens"`
	Completion int `json:"completion_tokens"`
	Details    *struct {
		Cached int `json:"cached_tokens"`
	} `json:"prompt_tokens_details"`
}

// chatEnd is how an answer ended.
type chatEnd struct {
	finish string     // "stop", "length", …
	usage  *chatUsage // nil: not told
}

// stream asks and calls on with each piece, one of the two never empty. A
// refusal in the stream, and a stream without its end, are errors.
func (g *gateway) stream(ctx context.Context, req chatRequest, on func(text, reasoning string) error) (end chatEnd, err error) {
	req.Stream, req.Options.Usage = true, true
	body, err := json.Marshal(req)
	if err != nil {
		return end, err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	quiet := time.AfterFunc(g.silence, func() {
		cancel(fmt.Errorf("%s has said nothing for %v: it may hang, or the line to it is down", g.base, g.silence))
	})
	defer quiet.Stop()
	resp, err := g.send(ctx, http.MethodPost, "/v1/chat/completions", body)
	if err != nil {
		return end, err
	}
	defer resp.Body.Close()
	end, err = readAnswer(&spoken{resp.Body, func() { quiet.Reset(g.silence) }}, on)
	if err == nil { // what is closed before its end was broken off, as the gateway sees it
		quiet.Reset(closeWait)
		io.CopyN(io.Discard, resp.Body, maxFailure)
	}
	if err != nil && ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	return end, err
}

// spoken tells of everything that is read, keep-alives too.
type spoken struct {
	io.Reader
	on func()
}

func (s *spoken) Read(p []byte) (int, error) {
	n, err := s.Reader.Read(p)
	if n > 0 {
		s.on()
	}
	return n, err
}

var (
	errNoGateway = errors.New("cannot reach the gateway")
	errNoEnd     = errors.New("the answer broke off: the node or the line to it is gone")
)

// readAnswer reads the events of an answer to [DONE].
func readAnswer(r io.Reader, on func(text, reasoning string) error) (end chatEnd, err error) {
	size := 0
	for events := newEventReader(r); ; {
		data, err := events.next()
		switch {
		case errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF):
			return end, errNoEnd
		case err != nil:
			return end, fmt.Errorf("read the answer: %w", err)
		case string(data) == "[DONE]":
			return end, nil
		}
		if no := refusalOf(data); no.message != "" {
			return end, no
		}
		var c chatChunk
		if err := json.Unmarshal(data, &c); err != nil {
			return end, fmt.Errorf("the answer has an event that is not understood: %w", err)
		}
		if c.Usage != nil {
			end.usage = c.Usage
		}
		if len(c.Choices) == 0 {
			continue
		}
		if c.Choices[0].Finish != "" {
			end.finish = c.Choices[0].Finish
		}
		d := c.Choices[0].Delta
		if size += len(d.Content) + len(d.Reasoning); size > maxAnswer {
			return end, fmt.Errorf("the answer is longer than %d bytes", maxAnswer)
		}
		if d.Content == "" && d.Reasoning == "" {
			continue
		}
		if err := on(d.Content, d.Reasoning); err != nil {
			return end, err
		}
	}
}
