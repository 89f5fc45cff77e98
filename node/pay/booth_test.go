package pay

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"kvasird/node/cashier"
	"kvasird/settle"
)

// booth is a Settlement over real books whose chain is a table: the tests of package
// cashier have the real one.
type booth struct {
	t     *testing.T
	books *cashier.Books
	node  settle.Node
	terms cashier.Terms

	mu     sync.Mutex // guards what follows
	now    time.Time
	linked settle.Wallet // may be spent by the node
	final  map[settle.Signature]settle.Payment
	fail   map[string][]error // by method, taken one by one
	calls  map[string]int
	ends   []cashier.Ended
	hold   chan struct{} // an x402 payment is final when it is closed
}

func keyOf(name string) settle.Key { return sha256.Sum256([]byte(name)) }

func newBooth(t *testing.T, node settle.Node) *booth {
	t.Helper()
	b := &booth{t: t, node: node, now: time.Unix(1_800_000_000, 0), final: map[settle.Signature]settle.Payment{}, fail: map[string][]error{}, calls: map[string]int{},
		terms: cashier.Terms{Network: settle.Hash(keyOf("network")), Cluster: keyOf("cluster"), Mint: keyOf("mint"), Program: keyOf("program"), Decimals: 6,
			Owner: keyOf("vault owner"), Vault: keyOf("vault"), FeePayer: keyOf("fee payer")}}
	var err error
	if b.books, err = cashier.Open(filepath.Join(t.TempDir(), "books"), slog.New(slog.DiscardHandler), b.clock); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if _, err := b.books.Verify(); err != nil {
			t.Error(err)
		}
		if err := b.books.Close(); err != nil {
			t.Error(err)
		}
	})
	return b
}

func (b *booth) clock() time.Time {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.now
}

func (b *booth) advance(d time.Duration) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.now = b.now.Add(d)
}

func (b *booth) seconds() uint64 { return uint64(b.clock().Unix()) }

// call counts a call, and fails it where that is wanted.
func (b *booth) call(method string) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.calls[method]++
	list := b.fail[method]
	if len(list) == 0 {
		return nil
	}
	b.fail[method] = list[1:]
	return list[0]
}

func (b *booth) failing(method string, errs ...error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.fail[method] = errs
}

func (b *booth) called(method string) int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.calls[method]
}

func (b *booth) Terms(context.Context) (cashier.Terms, error) { return b.terms, b.call("Terms") }

func (b *booth) Quote(_ context.Context, ask cashier.Ask) (cashier.Offer, error) {
	if err := b.call("Quote"); err != nil {
		return cashier.Offer{}, err
	}
	var id settle.QuoteID
	secret := make([]byte, 32)
	rand.Read(id[:])
	rand.Read(secret)
	q, err := settle.NewQuote(settle.Quote{ID: id, Model: ask.Model, PromptTokens: ask.PromptTokens, AnswerTokens: ask.AnswerTokens,
		RequestHash: ask.RequestHash, PriceRecord: settle.Hash(keyOf("price")), PriceRaw: 1e12, Ref: 1e9, Entry: b.node, Owner: ask.Owner,
		Created: b.seconds(), Expires: b.seconds() + 120, ClaimHash: settle.HashSecret(secret)}, 0)
	if err == nil {
		err = b.books.Quote(q)
	}
	return cashier.Offer{Quote: q, Secret: secret}, err
}

func (b *booth) Request(_ context.Context, id settle.QuoteID) (settle.Request, error) {
	if err := b.call("Request"); err != nil {
		return settle.Request{}, err
	}
	r, err := b.books.Request(id)
	if errors.Is(err, cashier.ErrNoQuote) {
		err = &cashier.Refusal{Code: cashier.CodeNotFound, Text: err.Error()}
	}
	return r, err
}

// state is a refusal of the books as a desk tells it.
func state(err error) error {
	switch {
	case errors.Is(err, settle.ErrRunning), errors.Is(err, settle.ErrLease):
		return &cashier.Refusal{Code: cashier.CodeState, Text: err.Error(), Retry: 3}
	case errors.Is(err, settle.ErrFunds):
		return &cashier.Refusal{Code: cashier.CodeFunds, Text: err.Error()}
	case err != nil:
		return &cashier.Refusal{Code: cashier.CodeState, Text: err.Error()}
	}
	return nil
}

func (b *booth) Pay(_ context.Context, p cashier.Proof) (settle.Request, error) {
	if err := b.call("Pay"); err != nil {
		return settle.Request{}, err
	}
	if r, err := b.books.Reserve(p.ID, p.Signature, b.seconds()); err != nil {
		return r, state(err)
	}
	b.mu.Lock()
	proof, ok := b.final[p.Signature]
	b.mu.Unlock()
	switch {
	case !ok:
		return settle.Request{}, &cashier.Refusal{Code: cashier.CodeNotYet, Text: "the transaction is not final", Retry: 7}
	case proof.Payer != p.Payer:
		_, err := b.books.Refuse(p.ID, "another wallet paid")
		return settle.Request{}, errors.Join(&cashier.Refusal{Code: cashier.CodeInvalid, Text: "another wallet paid"}, err)
	}
	r, err := b.books.Pay(p.ID, proof)
	return r, state(err)
}

// PayX402 takes any transaction but "bad" for one that pays.
func (b *booth) PayX402(ctx context.Context, p cashier.Partial) (settle.Request, error) {
	if err := b.call("PayX402"); err != nil {
		return settle.Request{}, err
	}
	if string(p.Transaction) == "bad" {
		return settle.Request{}, &cashier.Refusal{Code: cashier.CodeInvalid, Field: "transaction", Text: "it pays somebody else"}
	}
	sig := settle.Signature(sha256.New().Sum(make([]byte, 32)))
	copy(sig[:], p.Transaction)
	if r, err := b.books.Request(p.ID); err != nil || r.State == settle.Paid && r.Signature == sig {
		return r, err
	}
	r, err := b.books.Reserve(p.ID, sig, b.seconds())
	if err != nil {
		return r, state(err)
	}
	if b.hold != nil {
		select {
		case <-b.hold:
		case <-ctx.Done():
			return r, &cashier.Refusal{Code: cashier.CodeNotYet, Text: "not final", Retry: 1}
		}
	}
	r, err = b.books.Pay(p.ID, b.payment(p.ID, sig, keyOf("x402 payer"), r.Quote.Amount))
	return r, state(err)
}

func (b *booth) payment(id settle.QuoteID, sig settle.Signature, payer settle.Wallet, amount settle.Amount) settle.Payment {
	return settle.Payment{Signature: sig, Message: sha256.Sum256(sig[:]), Memo: id.Memo(), Payer: payer, Amount: amount, Time: b.seconds()}
}

// transfer makes a final transfer that pays a quote.
func (b *booth) transfer(id settle.QuoteID, payer settle.Wallet, amount settle.Amount) (sig settle.Signature) {
	rand.Read(sig[:])
	p := b.payment(id, sig, payer, amount)
	b.mu.Lock()
	defer b.mu.Unlock()
	b.final[sig] = p
	return sig
}

func (b *booth) Debit(_ context.Context, id settle.QuoteID) (settle.Request, error) {
	if err := b.call("Debit"); err != nil {
		return settle.Request{}, err
	}
	b.mu.Lock()
	owner := b.linked
	b.mu.Unlock()
	if owner == (settle.Wallet{}) {
		return settle.Request{}, &cashier.Refusal{Code: cashier.CodeRights, Text: "no wallet lets this node spend"}
	}
	r, err := b.books.Debit(id, owner)
	return r, state(err)
}

func (b *booth) Run(_ context.Context, id settle.QuoteID) (cashier.Started, error) {
	if err := b.call("Run"); err != nil {
		return cashier.Started{}, err
	}
	r, err := b.books.Run(id, b.seconds()+600, 9)
	if lost := b.call("Ran"); err == nil && lost != nil {
		return cashier.Started{}, lost
	}
	return cashier.Started{Request: r, Seed: sha256.Sum256(id[:])}, state(err)
}

func (b *booth) End(_ context.Context, e cashier.Ended) (cashier.Settled, error) {
	if err := b.call("End"); err != nil {
		return cashier.Settled{}, err
	}
	work, err := b.receipt(e)
	if err != nil {
		return cashier.Settled{}, &cashier.Refusal{Code: cashier.CodeBad, Field: "receipt", Text: err.Error()}
	}
	if _, err := b.books.End(e.ID, e.Tokens, e.Failed); err != nil {
		return cashier.Settled{}, state(err)
	}
	_, err = b.books.Settle(settle.DefaultParams(), settle.Settling{Timing: settle.OnTime, Epoch: 9, Work: work,
		Job: settle.Job{Request: settle.Request{Quote: settle.Quote{ID: e.ID}}, Parts: []settle.Part{{Weight: 1, PerToken: 1}}}})
	if err != nil {
		return cashier.Settled{}, err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.ends = append(b.ends, e)
	return cashier.Settled{}, nil
}

// receipt is the work that was both received and stated.
func (b *booth) receipt(e cashier.Ended) ([]settle.Work, error) {
	if e.Tokens == 0 {
		return nil, nil
	}
	r, err := settle.ParseReport(e.Receipt)
	if err != nil {
		return nil, err
	}
	if r.Role != settle.Receipt || r.Signer != b.node || r.Request != e.ID || r.Network != b.terms.Network || r.Tokens != e.Tokens {
		return nil, fmt.Errorf("another receipt: %+v", r)
	}
	for _, s := range e.Statements {
		if r, err := settle.ParseReport(s); err != nil || r.Role != settle.Statement || r.Request != e.ID {
			return nil, fmt.Errorf("another statement: %+v, %v", r, err)
		}
	}
	if len(e.Statements) == 0 {
		return nil, nil
	}
	return r.Work, nil
}

func (b *booth) reported() []cashier.Ended {
	b.mu.Lock()
	defer b.mu.Unlock()
	return append([]cashier.Ended(nil), b.ends...)
}

func (b *booth) balance(owner settle.Wallet) settle.Amount { return b.account(settle.Balance, owner) }

func (b *booth) account(kind settle.Kind, id settle.Key) settle.Amount {
	b.t.Helper()
	a, err := b.books.Balance(settle.Account{Kind: kind, ID: id})
	if err != nil {
		b.t.Fatal(err)
	}
	return a
}

// deposit brings money in, and links the node to it.
func (b *booth) deposit(owner settle.Wallet, amount settle.Amount) {
	b.t.Helper()
	e, err := settle.DepositEntry(settle.Payment{Message: settle.Hash(keyOf(fmt.Sprint(owner, amount))), Payer: owner, Amount: amount}, b.seconds())
	if err == nil {
		_, err = b.books.Post(e)
	}
	if err != nil {
		b.t.Fatal(err)
	}
	b.link(owner)
}

func (b *booth) link(owner settle.Wallet) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.linked = owner
}

// oneWorker is a Meter with one worker that did everything.
type oneWorker struct {
	key   ed25519.PrivateKey
	drawn *atomic.Uint64 // tokens
}

func (w oneWorker) node() settle.Node { return settle.Node(w.key.Public().(ed25519.PublicKey)) }

func (w oneWorker) Drop(_ string, tokens uint64) { w.drawn.Add(tokens) }

func (w oneWorker) Report(_ context.Context, _ string, request settle.QuoteID, tokens uint64) ([]settle.Work, [][]byte) {
	w.drawn.Add(tokens)
	work := []settle.Work{{Worker: w.node(), Lines: []settle.Line{{Part: 0, Units: tokens}}}}
	s, err := settle.Report{Role: settle.Statement, Network: settle.Hash(keyOf("network")), Request: request, Signer: w.node(), Seq: 1, Work: work}.Sign(w.key)
	if err != nil {
		panic(err)
	}
	return work, [][]byte{s}
}
