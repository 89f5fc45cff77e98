package cashier

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"kvasird/settle"
)

// The HTTP door of a node's own accounts, for programs of its operator. All of it asks for
// the node's service token, or an admin's key: on a LAN where nobody is asked for a key
// too, since what is done here is done in the name of the node.
//
//	POST /api/stake              {"signature", "owner", "amount"}         → Ledger
//	POST /api/unstake            {"id", "amount"}                         → Ledger
//	POST /api/claim              {"id", "amount"}                         → Payout
//	POST /api/insurance/claim    {"request", "amount"}, or with "format",
//	                              "signature" of the payer                → Complained
//	GET  /api/ledger/{owner}                                              → Ledger
//	POST /api/node/register      {"wallet", "spend", "since", "format",
//	                              "signature"}, and what reports have     → Linked
//	POST /api/node/heartbeat     {"units", "role", "tier", "performance"} → Ledger of the node
//	POST /api/node/contribution  the same                                 → Ledger of the node
//
// Reports of a node about itself are read, and move nothing: pay follows from receipts
// alone. Amounts are decimal digits in a string. A body that is not as it should be is
// answered with 400 and the field.
const (
	maxBody  = 16 << 10
	bodyTime = 10 * time.Second
	// maxReported is the length of a reported text or number, which nobody keeps.
	maxReported = 128

	// TokenHeader is where the service token stands; Authorization: Bearer does too.
	TokenHeader = "X-Kvasir-Service-Token"
)

// RoutesConfig is what the HTTP door needs.
type RoutesConfig struct {
	Service Service
	Node    settle.Node              // this one
	Allowed func(secret string) bool // whether it is the service token or an admin's key, in constant time
}

// Routes are the requests that the door answers, by http.ServeMux pattern.
func Routes(cfg RoutesConfig) map[string]http.Handler {
	door := func(do func(r *http.Request, body *form) (any, error)) http.Handler { return cfg.answer(do) }
	return map[string]http.Handler{
		"POST /api/stake": door(func(r *http.Request, f *form) (any, error) {
			d := Deposit{Stake: true}
			f.must("signature", &d.Signature)
			f.must("owner", &d.Owner)
			f.must("amount", &d.Amount)
			return then(f, r.Context(), cfg.Service.Deposit, d)
		}),
		"POST /api/unstake": door(func(r *http.Request, f *form) (any, error) { return moved(f, r, cfg.Service.Unstake) }),
		"POST /api/claim":   door(func(r *http.Request, f *form) (any, error) { return moved(f, r, cfg.Service.Claim) }),
		"POST /api/insurance/claim": door(func(r *http.Request, f *form) (any, error) {
			var c Complaint
			f.must("request", &c.ID)
			f.must("amount", &c.Amount)
			f.may("format", &c.Format)
			f.may("signature", &c.Signature)
			return then(f, r.Context(), cfg.Service.Complain, c)
		}),
		"GET /api/ledger/{owner}": door(func(r *http.Request, f *form) (any, error) {
			owner, err := settle.ParseKey(r.PathValue("owner"))
			if err != nil {
				return nil, &Refusal{Code: CodeBad, Field: "owner", Text: err.Error()}
			}
			return then(f, r.Context(), cfg.Service.Ledger, owner)
		}),
		"POST /api/node/register": door(func(r *http.Request, f *form) (any, error) {
			var l Link
			f.must("wallet", &l.Wallet)
			f.may("spend", &l.Spend)
			f.must("since", &l.Since)
			f.must("format", &l.Format)
			f.must("signature", &l.Signature)
			f.report()
			return then(f, r.Context(), cfg.Service.Link, l)
		}),
		"POST /api/node/heartbeat":    door(cfg.reported),
		"POST /api/node/contribution": door(cfg.reported),
	}
}

// reported takes what a node says of itself, and says what is known of it.
func (cfg RoutesConfig) reported(r *http.Request, f *form) (any, error) {
	f.report()
	return then(f, r.Context(), cfg.Service.Ledger, cfg.Node)
}

// then makes a call when the form was in order.
func then[In, Out any](f *form, ctx context.Context, call func(context.Context, In) (Out, error), in In) (any, error) {
	if err := f.done(); err != nil {
		return nil, err
	}
	return call(ctx, in)
}

func moved[Out any](f *form, r *http.Request, call func(context.Context, Move) (Out, error)) (any, error) {
	var m Move
	f.must("id", &m.ID)
	f.must("amount", &m.Amount)
	return then(f, r.Context(), call, m)
}

func (cfg RoutesConfig) answer(do func(r *http.Request, f *form) (any, error)) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		reply, err := any(nil), error(nil)
		if cfg.Allowed(secretOf(r)) {
			http.NewResponseController(w).SetReadDeadline(time.Now().Add(bodyTime))
			var f *form
			if f, err = readForm(w, r); err == nil {
				reply, err = do(r, f)
			}
		} else {
			err = &Refusal{Code: CodeRights, Field: TokenHeader, Text: "this needs the service token of the node (" + TokenHeader + "), or an admin's key"}
		}
		status := http.StatusOK
		if err != nil {
			r := refusalOf(err)
			status = r.Status()
			if r.Retry > 0 {
				w.Header().Set("Retry-After", strconv.FormatUint(r.Retry, 10))
			}
			reply = map[string]any{"error": map[string]any{"code": r.Code, "field": r.Field, "message": r.Text}}
		}
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(status)
		json.NewEncoder(w).Encode(reply)
	})
}

// refusalOf puts any error of a Service into a refusal.
func refusalOf(err error) *Refusal {
	var r *Refusal
	switch {
	case errors.As(err, &r):
		return r
	case errors.Is(err, ErrAway), errors.Is(err, context.DeadlineExceeded):
		return &Refusal{Code: CodeNotYet, Text: "the settlement cannot be reached now: ask again", Retry: 5}
	}
	return &Refusal{Text: "the settlement failed: its operator finds the reason in its log"}
}

// Status is the HTTP status of a refusal.
func (r *Refusal) Status() int {
	switch r.Code {
	case CodeBad:
		return http.StatusBadRequest
	case CodeRights:
		return http.StatusForbidden
	case CodeNotFound:
		return http.StatusNotFound
	case CodeInvalid, CodeFunds:
		return http.StatusPaymentRequired
	case CodeState:
		return http.StatusConflict
	case CodeBusy:
		return http.StatusTooManyRequests
	case CodeNotYet:
		return http.StatusServiceUnavailable
	}
	return http.StatusInternalServerError
}

// secretOf is what a request shows.
func secretOf(r *http.Request) string {
	if s := r.Header.Get(TokenHeader); s != "" {
		return s
	}
	if scheme, s, _ := strings.Cut(r.Header.Get("Authorization"), " "); strings.EqualFold(scheme, "Bearer") {
		return strings.TrimSpace(s)
	}
	return r.Header.Get("X-Api-Key")
}

// form is the body of a request: an object, each of whose fields is read once.
type form struct {
	fields map[string]json.RawMessage
	err    error // the first
}

// readForm reads a body. One of a GET is empty.
func readForm(w http.ResponseWriter, r *http.Request) (*form, error) {
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
	var large *http.MaxBytesError
	if errors.As(err, &large) {
		return nil, &Refusal{Code: CodeBad, Field: "body", Text: fmt.Sprintf("the body has more than %d bytes", large.Limit)}
	}
	if err != nil {
		return nil, &Refusal{Code: CodeBad, Field: "body", Text: "the body did not come in time, or not whole"}
	}
	if r.Method == http.MethodGet {
		body = []byte("{}")
	}
	f, err := parseForm(body)
	if err != nil {
		return nil, &Refusal{Code: CodeBad, Field: "body", Text: err.Error()}
	}
	return f, nil
}

// parseForm takes an object apart. A field that is there twice is refused: two readers may
// differ on which one counts.
func parseForm(body []byte) (*form, error) {
	dec := json.NewDecoder(bytes.NewReader(body))
	if t, err := dec.Token(); err != nil || t != json.Delim('{') {
		return nil, errors.New("the body is not a JSON object")
	}
	f := &form{fields: map[string]json.RawMessage{}}
	for dec.More() {
		t, err := dec.Token()
		name, ok := t.(string)
		if err != nil || !ok {
			return nil, errors.New("the body is not a JSON object")
		}
		if _, twice := f.fields[name]; twice {
			return nil, fmt.Errorf("the field %.60q is there twice", name)
		}
		var raw json.RawMessage
		if err := dec.Decode(&raw); err != nil {
			return nil, fmt.Errorf("the field %.60q is not JSON", name)
		}
		f.fields[name] = raw
	}
	if _, err := dec.Token(); err != nil {
		return nil, errors.New("the body is not a whole JSON object")
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return nil, errors.New("there is something after the JSON object")
	}
	return f, nil
}

func (f *form) refuse(name, format string, args ...any) {
	if f.err == nil {
		f.err = &Refusal{Code: CodeBad, Field: name, Text: fmt.Sprintf("%.60s: ", name) + fmt.Sprintf(format, args...)}
	}
}

// must reads a field that has to be there, may one that can be left out.
func (f *form) must(name string, to any) {
	if _, ok := f.fields[name]; !ok {
		f.refuse(name, "it is missing")
		return
	}
	f.may(name, to)
}

func (f *form) may(name string, to any) {
	raw, ok := f.fields[name]
	if !ok {
		return
	}
	delete(f.fields, name)
	if string(raw) == "null" {
		f.refuse(name, "it is null")
	} else if err := json.Unmarshal(raw, to); err != nil {
		f.refuse(name, "%v", err)
	}
}

// report reads what a node says of itself, which counts for nothing.
func (f *form) report() {
	for _, name := range []string{"units", "role", "roles", "tier", "performance", "layers"} {
		if raw := f.fields[name]; len(raw) > maxReported {
			f.refuse(name, "it has %d bytes, at most %d", len(raw), maxReported)
		}
		delete(f.fields, name)
	}
}

// done refuses what is left, and says what was wrong first.
func (f *form) done() error {
	if f.err != nil {
		return f.err
	}
	for _, name := range slices.Sorted(maps.Keys(f.fields)) {
		return &Refusal{Code: CodeBad, Field: name, Text: fmt.Sprintf("there is no field %.60q here", name)}
	}
	return nil
}
