package pay

import (
	"context"
	"crypto/ed25519"
	"encoding/base64"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"kvasird/node/cashier"
	"kvasird/node/gateway"
	"kvasird/settle"
)

// words is an engine: a token for each byte of the prompt, and an answer of four.
type words struct {
	gate chan struct{} // nil, or the answer waits for it
	err  error         // after two tokens
}

func (words) Ready() error { return nil }

func (words) Tokenize(s string) ([]int32, error) { return make([]int32, len(s)), nil }

func (w words) Start(ctx context.Context, _ gateway.Request) (gateway.Stream, error) {
	if _, ok := From(ctx); !ok {
		return nil, errors.New("an engine that was asked for nothing paid")
	}
	return &wordStream{w: w}, nil
}

type wordStream struct {
	w words
	n int
}

func (s *wordStream) Next(ctx context.Context) ([]byte, error) {
	if s.w.gate != nil {
		select {
		case <-s.w.gate:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	if s.n++; s.n > 2 && s.w.err != nil {
		return nil, s.w.err
	}
	if s.n > 4 {
		return nil, io.EOF
	}
	return []byte("x"), nil
}

func (*wordStream) Finish() string { return "stop" }

// shop is a gateway with a paying door before real books.
type shop struct {
	t      *testing.T
	url    string
	booth  *booth
	door   *Door
	worker settle.Node
	drawn  *atomic.Uint64 // tokens, of the meter
	close  func()         // of the door
}

func newShop(t *testing.T, engine gateway.Engine) *shop {
	t.Helper()
	_, key, err := ed25519.GenerateKey(nil)
	if err != nil {
		t.Fatal(err)
	}
	_, workerKey, err := ed25519.GenerateKey(nil)
	if err != nil {
		t.Fatal(err)
	}
	meter := oneWorker{workerKey, new(atomic.Uint64)}
	s := &shop{t: t, drawn: meter.drawn, booth: newBooth(t, settle.Node(key.Public().(ed25519.PublicKey))), worker: meter.node()}
	s.serve(Config{Settlement: s.booth, Key: key, Meter: meter, Wait: time.Second, Now: s.booth.clock}, engine, "d1")
	return s
}

// serve starts the door and a gateway with one model, named m.
func (s *shop) serve(cfg Config, engine gateway.Engine, digest string) {
	s.t.Helper()
	var err error
	if s.door, err = New(cfg); err != nil {
		s.t.Fatal(err)
	}
	g, err := gateway.New(gateway.Config{Payments: s.door, Models: []gateway.Model{{ID: "m", Digest: digest, VocabSize: 300, Engine: engine}}})
	if err != nil {
		s.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.door.Run(ctx) }()
	srv := httptest.NewServer(g.Handler())
	s.url = srv.URL
	var once sync.Once
	s.close = func() {
		once.Do(func() {
			cancel()
			if err := <-done; err != nil {
				s.t.Error(err)
			}
		})
	}
	s.t.Cleanup(func() {
		http.DefaultClient.CloseIdleConnections()
		srv.Close()
		s.close()
		if n := s.door.opened(); n > 0 {
			s.t.Errorf("%d requests are open still", n)
		}
	})
}

// body is a request: 5 tokens of prompt, an answer of up to 10.
const body = `{"model":"m","prompt":"hello","max_tokens":10}`

// used is what the 9 tokens cost that the engine gives, and quoted what 15 would.
const (
	used   = settle.Amount(9 * 1000)
	quoted = settle.Amount(15 * 1000)
)

func (s *shop) post(text string, header ...string) *answer {
	s.t.Helper()
	return s.postTo("/v1/completions", text, header...)
}

type answer struct {
	status int
	header http.Header
	body   string
}

func (s *shop) postTo(path, text string, header ...string) *answer {
	s.t.Helper()
	req, err := http.NewRequest("POST", s.url+path, strings.NewReader(text))
	if err != nil {
		s.t.Fatal(err)
	}
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		s.t.Fatal(err)
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	if err != nil {
		s.t.Fatal(err)
	}
	return &answer{resp.StatusCode, resp.Header, string(data)}
}

// is checks an answer's status and code.
func (a *answer) is(t *testing.T, what string, status int, code string) {
	t.Helper()
	var e struct {
		Error struct{ Code, Message string }
	}
	_ = json.Unmarshal([]byte(a.body), &e)
	if a.status != status || e.Error.Code != code {
		t.Errorf("%s: %d %s, want %d %s", what, a.status, a.body, status, code)
	}
}

// offer is the quote of a 402.
func (a *answer) offer(t *testing.T) Offer {
	t.Helper()
	var e struct{ Payment Offer }
	if err := json.Unmarshal([]byte(a.body), &e); err != nil || a.status != 402 || e.Payment.ClaimSecret == "" {
		t.Fatalf("no offer: %d %s %v", a.status, a.body, err)
	}
	return e.Payment
}

// of reads a header of x402.
func of[T any](t *testing.T, a *answer, name string) (v T) {
	t.Helper()
	data, err := base64.StdEncoding.DecodeString(a.header.Get(name))
	if err == nil {
		err = json.Unmarshal(data, &v)
	}
	if err != nil {
		t.Fatalf("%s of %d %s: %q, %v", name, a.status, a.body, a.header.Get(name), err)
	}
	return v
}

// reported waits for the end of n requests, and gives the last.
func (s *shop) reported(n int) cashier.Ended {
	s.t.Helper()
	for range 1000 {
		if ends := s.booth.reported(); len(ends) == n {
			return ends[n-1]
		}
		time.Sleep(5 * time.Millisecond)
	}
	s.t.Fatalf("%d ends were reported, want %d", len(s.booth.reported()), n)
	return cashier.Ended{}
}

func (s *shop) state(id settle.QuoteID) settle.State {
	s.t.Helper()
	r, err := s.booth.books.Request(id)
	if err != nil {
		s.t.Fatal(err)
	}
	return r.State
}

// byTransfer are the headers of a transfer that pays an offer.
func byTransfer(o Offer, sig settle.Signature, payer settle.Wallet) []string {
	return []string{headerQuote, o.Quote.String(), headerPayment, sig.String(), headerSecret, o.ClaimSecret, headerPayer, payer.String()}
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}
