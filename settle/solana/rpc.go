package solana

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"time"
)

const (
	defaultTimeout = 10 * time.Second
	// answerLimit bounds an answer. The largest honest one is a transaction with 64
	// inner calls of 10 KiB each, in base58.
	answerLimit = 4 << 20
)

// Codes of nodes' errors that mean something here.
const (
	codePreflight = -32002 // a transaction fails when it is tried
	codeSignature = -32003
	codeBehind    = -32005 // the node has not caught up
	codeVersion   = -32015 // the transaction is of a newer version than was asked for
)

// provider is a node that answers JSON-RPC. Its URL may hold a key, so no error names
// it: an error says which one of the configured it is.
type provider struct {
	number  int // from 1
	url     string
	timeout time.Duration
	http    *http.Client
}

// newHTTP does not follow redirects: they would carry the key elsewhere.
func newHTTP() *http.Client {
	return &http.Client{CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
}

// rpcError is an error that a node answered. Its text is the node's, so it is left out.
type rpcError struct {
	Code int
	Data json.RawMessage
}

// failure is why a transaction failed when it was tried: a name, or JSON of the node's;
// "" where it does not say.
func (e *rpcError) failure() string {
	var data struct{ Err json.RawMessage }
	if json.Unmarshal(e.Data, &data) != nil {
		return ""
	}
	var name string
	if json.Unmarshal(data.Err, &name) != nil {
		return string(data.Err)
	}
	return name
}

func (e *rpcError) Error() string {
	switch e.Code {
	case codePreflight:
		return fmt.Sprintf("error %d: the transaction fails when it is tried: %.100s", e.Code, e.failure())
	case codeSignature:
		return fmt.Sprintf("error %d: a signature is wrong", e.Code)
	case codeBehind:
		return fmt.Sprintf("error %d: the node is behind", e.Code)
	}
	return fmt.Sprintf("error %d", e.Code)
}

// call calls a method and reads its result into out; a result of null leaves out as it
// is. An error is an ErrProvider, and an *rpcError when the node answered one.
func (p *provider) call(ctx context.Context, method string, params []any, out any) error {
	if err := p.exchange(ctx, method, params, out); err != nil {
		return fmt.Errorf("%w: provider %d, %s: %w", ErrProvider, p.number, method, err)
	}
	return nil
}

func (p *provider) exchange(ctx context.Context, method string, params []any, out any) error {
	ctx, cancel := context.WithTimeout(ctx, p.timeout)
	defer cancel()
	body, err := json.Marshal(map[string]any{"jsonrpc": "2.0", "id": 1, "method": method, "params": params})
	if err != nil {
		return err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, p.url, bytes.NewReader(body))
	if err != nil {
		return errors.New("its URL is not valid")
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := p.http.Do(req)
	if err != nil {
		return connectionError(ctx)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("HTTP status %d", resp.StatusCode)
	}
	text, err := io.ReadAll(io.LimitReader(resp.Body, answerLimit+1))
	if err != nil {
		return connectionError(ctx)
	}
	if len(text) > answerLimit {
		return fmt.Errorf("an answer of more than %d bytes", answerLimit)
	}
	return readAnswer(text, out)
}

// connectionError is what a broken exchange is called: the cause itself has the URL, or
// the host's name.
func connectionError(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	return errors.New("no connection, or it broke")
}

func readAnswer(text []byte, out any) error {
	var answer struct {
		JSONRPC string
		ID      int
		Result  json.RawMessage
		Error   *rpcError
	}
	if json.Unmarshal(text, &answer) != nil || answer.JSONRPC != "2.0" || answer.ID != 1 {
		return errors.New("an answer that is no JSON-RPC")
	}
	if answer.Error != nil {
		return answer.Error
	}
	if answer.Result == nil {
		return errors.New("an answer without a result")
	}
	if json.Unmarshal(answer.Result, out) != nil {
		return errors.New("a result of another shape")
	}
	return nil
}

// codeOf is the code of a node's error, or 0.
func codeOf(err error) int {
	var e *rpcError
	if errors.As(err, &e) {
		return e.Code
	}
	return 0
}
