package gateway

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"net/http"
	"time"
)

// PaidAnswer is how many tokens a paid answer may have when its request names no limit:
// what is quoted has to be bounded.
const PaidAnswer = 1024

// maxQuoted is the most tokens that a client can ask a price for, of the prompt and of
// the answers each.
const maxQuoted = 1 << 24

// Payments takes the money for answers, before anything is queued for them. It is safe
// for concurrent use. Its errors are *PaymentError; any other is a 503.
type Payments interface {
	// Charge says that a request may be answered, or why not. What it sets in h goes
	// with the answer either way. It may wait for a payment, at most until r's context
	// ends.
	Charge(r *http.Request, h http.Header, c Cost) (Charge, error)
	// Quote prices a request that is not made yet. What it returns is answered as JSON.
	Quote(r *http.Request, c Cost) (any, error)
}

// Cost is what a request asks for.
type Cost struct {
	Model   string // Model.Digest
	Name    string // Model.ID
	Prompt  int    // tokens of all prompts
	Answers int    // tokens of all answers together, at most; 0 for embeddings
	// Body is the SHA-256 of the request's body, its Content-Encoding undone.
	Body  [sha256.Size]byte
	Owner string // of Quote only: the wallet that has to pay, as it was sent; empty: any
	Spend bool   // of Charge only: this node may pay for the client
}

// Charge is a request that is paid for. End is called once, when nothing of the answer
// will be sent any more, and does not make the client wait.
type Charge interface {
	// Context is ctx with what the engine has to know of the payment.
	Context(ctx context.Context) context.Context
	// End says what became of the request.
	End(Outcome)
}

// Outcome is how a request ended. Tokens are those of the prompts and of all answers.
type Outcome struct {
	Delivered int   // tokens to be paid; 0: nothing
	Computed  int   // tokens that were worked for; at least Delivered
	Failed    error // why not all was delivered, or nil
}

// PaymentError refuses a request because of its payment, in the shape of the API that
// was asked.
type PaymentError struct {
	Status     int // of HTTP: 402 when somebody has to pay
	Code       string
	Param      string // the field or the header at fault; empty: none
	Message    string
	RetryAfter time.Duration // 0: asking again is no use
	Payment    any           // what to pay and how, beside the error in the body; nil: nothing
}

func (e *PaymentError) Error() string { return e.Message }

// errGone is why the answer of a client that hung up is not whole.
var errGone = errors.New("the client went away")

// charge asks for the payment of prepared answers to one request. It is nil where
// nothing is paid. Nobody pays for a model that is not ready.
func (g *Gateway) charge(w http.ResponseWriter, r *http.Request, m *servedModel, c Cost) (Charge, *apiError) {
	if g.cfg.Payments == nil {
		return nil, nil
	}
	if err := m.Engine.Ready(); err != nil {
		return nil, engineError(err)
	}
	c.Model, c.Name, c.Spend = m.Digest, m.ID, maySpend(r)
	paid, err := g.cfg.Payments.Charge(r, w.Header(), c)
	if err != nil {
		return nil, engineError(err)
	}
	return paid, nil
}

// costOf is what texts cost. A request that names no limit gets PaidAnswer where
// something is paid.
func (g *Gateway) costOf(list ...*ready) Cost {
	c := Cost{Body: list[0].sum}
	for _, q := range list {
		if g.cfg.Payments != nil && q.sampling.MaxTokens == 0 {
			q.sampling.MaxTokens = PaidAnswer
		}
		c.Prompt += len(q.sampling.Prompt)
		c.Answers += q.n * q.sampling.MaxTokens
	}
	return c
}

// bill is what answers to one request cost. Its zero value costs nothing.
type bill struct {
	paid   Charge
	stream bool
	n      int // answers to each prompt
}

// bill asks for the payment of prepared answers to one request.
func (g *Gateway) bill(w http.ResponseWriter, r *http.Request, list ...*ready) (bill, *apiError) {
	q := list[0]
	paid, e := g.charge(w, r, q.m, g.costOf(list...))
	return bill{paid, q.stream, q.n}, e
}

// context is ctx with what the charge adds.
func (b bill) context(ctx context.Context) context.Context {
	if b.paid == nil {
		return ctx
	}
	return b.paid.Context(ctx)
}

// end ends the charge. What an engine failed to finish costs nothing. What was produced
// until the client went away is paid, and so is what was streamed until the request's
// time was over.
func (b bill) end(all []*generation, start *apiError) {
	if b.paid == nil {
		return
	}
	if start != nil {
		b.paid.End(Outcome{Failed: start})
		return
	}
	var out Outcome
	broken, produced := false, false
	for i, a := range all {
		if i%b.n == 0 {
			out.Computed += a.prompt
		}
		out.Computed += a.tokens
		produced = produced || a.tokens > 0 || a.finish != ""
		switch {
		case broken:
		case a.failed != nil && !a.ended:
			broken, out.Failed = true, a.failed
		case a.failed != nil && out.Failed == nil:
			out.Failed = a.failed
		case a.finish == "" && out.Failed == nil:
			out.Failed = errGone
		}
	}
	var late *apiError
	switch {
	case !produced:
		out.Computed = 0
	case broken, errors.As(out.Failed, &late) && !b.stream:
	default:
		out.Delivered = out.Computed
	}
	b.paid.End(out)
}

// quotes is POST /v1/quotes: the price of a request before it is made.
func (g *Gateway) quotes(w http.ResponseWriter, r *http.Request) {
	g.withPlace(w, r, func() {
		d, _, done, e := g.body(w, r)
		if e != nil {
			writeError(w, r, e)
			return
		}
		f := newFields(d)
		name, given := f.text("model")
		if !given {
			f.fail("model", "is required")
		}
		c := Cost{Prompt: f.tokens("prompt_tokens", 0), Answers: f.tokens("max_tokens", PaidAnswer)}
		c.Body = f.digest("request_hash")
		c.Owner, _ = f.text("owner")
		for _, key := range d.Keys() {
			switch key {
			case "model", "prompt_tokens", "max_tokens", "request_hash", "owner":
			default:
				f.fail(key, "is no field of a quote: there are model, prompt_tokens, max_tokens, request_hash, owner")
			}
		}
		done()
		if e = f.err(); e != nil {
			writeError(w, r, e)
			return
		}
		g.sendQuote(w, r, name, c)
	})
}

func (g *Gateway) sendQuote(w http.ResponseWriter, r *http.Request, name string, c Cost) {
	m, e := g.model(name)
	if e != nil {
		writeError(w, r, e)
		return
	}
	c.Model, c.Name = m.Digest, m.ID
	quote, err := g.cfg.Payments.Quote(r, c)
	if err != nil {
		writeError(w, r, engineError(err))
		return
	}
	g.writeAnswer(w, quote)
}

// tokens is a number of tokens, which no exponent or point writes.
func (f *fields) tokens(name string, def int) int {
	v, ok := f.get(name)
	if !ok {
		if def == 0 {
			f.fail(name, "is required")
		}
		return def
	}
	n, ok := v.(int64)
	if !ok {
		f.fail(name, "must be a whole number such as 1500, not %s", kindOf(v))
		return def
	}
	if n < 0 || n > maxQuoted {
		f.fail(name, "%d is not between 0 and %d", n, maxQuoted)
	}
	return int(n)
}

// digest is the SHA-256 of a body, in 64 hexadecimal digits.
func (f *fields) digest(name string) (sum [sha256.Size]byte) {
	text, ok := f.text(name)
	if !ok {
		f.fail(name, "is required: the SHA-256 of the body that will be sent, in hexadecimal digits")
		return sum
	}
	b, err := hex.DecodeString(text)
	if err != nil || len(b) != len(sum) || hex.EncodeToString(b) != text {
		f.fail(name, "%q is not 64 hexadecimal digits in lower case", clip(text))
		return sum
	}
	copy(sum[:], b)
	return sum
}

// paymentError is a *PaymentError before it has an API's shape.
func paymentError(err error) (*apiError, bool) {
	var e *PaymentError
	if !errors.As(err, &e) {
		return nil, false
	}
	status := e.Status
	if status < http.StatusBadRequest || status > 599 {
		return &apiError{status: http.StatusInternalServerError, message: fmt.Sprintf("a refusal with status %d: %s", status, e.Message)}, true
	}
	return &apiError{status: status, code: e.Code, param: e.Param, message: e.Message, retryAfter: e.RetryAfter, payment: e.Payment}, true
}
