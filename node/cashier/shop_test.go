//go:build svm

package cashier

import (
	"context"
	"crypto/ed25519"
	"encoding/binary"
	"errors"
	"fmt"
	"testing"
	"time"

	"kvasird/settle"
	"kvasird/settle/govern"
	"kvasird/settle/settletest"
	"kvasird/settle/solana"
)

// shop is a desk with a chain, an entry node, a worker, and a payer with tokens.
type shop struct {
	*office
	*bank
	client             *solana.Client
	entry, worker, fee settletest.Wallet
	alice              settletest.Wallet
	model              string
}

// shopParts is one dense part and one of experts, two of which each token uses.
var shopParts = []settle.Part{{Weight: 30, PerToken: 1}, {Weight: 70, PerToken: 2}}

const aliceHas = 100_000_000

const shopModel = "00000000000000000000000000000000000000000000000000000000000000aa"

func newShop(t *testing.T, change ...func(*DeskConfig)) *shop {
	t.Helper()
	w := newBank(t, 0)
	alice := w.NewWallet("alice")
	w.NewWallet("fee")
	w.mint.Fund(alice.Key, aliceHas)
	w.Advance(60)
	s := shopAt(t, w, w.blockTime(t), w.URL("a"), w.URL("b"))
	for _, c := range change {
		c(&s.cfg)
	}
	s.start()
	return s
}

// shopAt is a shop of a network that began at a time, over a chain; its desk is not open.
func shopAt(t *testing.T, w *bank, began int64, providers ...string) *shop {
	t.Helper()
	s := &shop{bank: w, entry: settletest.NewWallet("entry"), worker: settletest.NewWallet("worker"), fee: settletest.NewWallet("fee"),
		alice: settletest.NewWallet("alice"), model: shopModel}
	s.client = must[*solana.Client](t)(solana.New(solana.Config{Providers: providers, Genesis: w.genesis, Decimals: 6,
		Vault: solana.Vault{Owner: w.operator.Key, Mint: w.mint.Key, Program: settletest.Token}, Timeout: 20 * time.Second}))
	s.office = newOffice(t, s.client, keyed{s.client, w.operator.Private, w.operator.Private})
	s.at.Store(began)
	s.cfg.Began = time.Unix(began, 0)
	s.cfg.Key, s.cfg.Fee, s.cfg.FirstRaw = settletest.NewWallet("settlement").Private, s.fee.Private, 200_000_000_000
	s.cfg.Models = func(id string, _ settle.Node) (Model, error) {
		if id != s.model {
			return Model{}, errors.New("nobody has it")
		}
		return Model{Name: "m", Parts: shopParts}, nil
	}
	s.cfg.Operators = []settle.Wallet{settletest.NewWallet("operator 2").Key}
	return s
}

// blockTime is the time of the newest block.
func (w *bank) blockTime(t *testing.T) int64 {
	t.Helper()
	sig := w.Run([]settletest.Wallet{w.operator}, settletest.Memo(fmt.Sprint("what time is it at ", w.Slot()), w.operator.Key))
	w.Advance(1)
	return int64(w.Answer(sig)["blockTime"].(float64))
}

// start opens a desk on the books as they are. Its network is as old as the chain.
func (s *shop) start() {
	s.T.Helper()
	s.cfg.Governor = must[*govern.Governor](s.T)(govern.Open(govern.Config{
		Authority: govern.Authority{Network: s.cfg.Network, Cluster: s.cfg.Cluster, Wallets: []settle.Wallet{genesisWallet.Key}, Threshold: 1, Params: s.params},
		Since:     uint64(s.cfg.Began.Unix()), Store: s.cfg.Books.GovernStore(), Secret: s.sealed, Key: [32]byte{9}}))
	s.Desk = must[*Desk](s.T)(OpenDesk(s.cfg))
}

// restart closes the books and opens all again.
func (s *shop) restart() {
	s.T.Helper()
	must[int](s.T)(0, s.cfg.Books.Close())
	s.open()
	s.start()
}

func (s *shop) teller() *Teller { return s.As(s.entry.Key) }

func (s *shop) ask() Ask {
	return Ask{Model: s.model, PromptTokens: 1000, AnswerTokens: 1000, RequestHash: hashOf("body")}
}

func (s *shop) quote() settle.Quote {
	s.T.Helper()
	return must[Offer](s.T)(s.teller().Quote(s.Context(), s.ask())).Quote
}

// pay pays from Alice's wallet, and gives the signature; it is not final.
func (s *shop) pay(amount settle.Amount, memo string) settle.Signature {
	s.T.Helper()
	return s.bank.Run([]settletest.Wallet{s.alice}, s.mint.TransferChecked(s.mint.ATA(s.alice.Key), s.mint.ATA(s.operator.Key), s.alice.Key, amount),
		settletest.Memo(memo, s.alice.Key))
}

// paid is a request that Alice paid for.
func (s *shop) paid() settle.Request {
	s.T.Helper()
	q := s.quote()
	sig := s.pay(q.Amount, q.ID.Memo())
	s.Advance(40)
	return must[settle.Request](s.T)(s.teller().Pay(s.Context(), Proof{q.ID, sig, s.alice.Key}))
}

// work is all that so many tokens need, by the worker but for the dense part of a half.
func (s *shop) work(tokens uint64) []settle.Work {
	all := []settle.Work{{Worker: s.entry.Key, Lines: []settle.Line{{Part: 0, Units: tokens / 2}}},
		{Worker: s.worker.Key, Lines: []settle.Line{{Part: 0, Units: tokens - tokens/2}, {Part: 1, Units: 2 * tokens}}}}
	if string(all[0].Worker[:]) > string(all[1].Worker[:]) {
		all[0], all[1] = all[1], all[0]
	}
	return all
}

// ended is how a request ended, with reports that all sign.
func (s *shop) ended(id settle.QuoteID, tokens uint64, failed string, work []settle.Work) Ended {
	s.T.Helper()
	e := Ended{ID: id, Tokens: tokens, Failed: failed}
	receipt := settle.Report{Role: settle.Receipt, Network: s.cfg.Network, Request: id, Signer: s.entry.Key, Seq: 1, Tokens: tokens, Work: work}
	e.Receipt = must[[]byte](s.T)(receipt.Sign(s.entry.Private))
	for _, w := range work {
		signer := s.entry
		if w.Worker == s.worker.Key {
			signer = s.worker
		}
		statement := settle.Report{Role: settle.Statement, Network: s.cfg.Network, Request: id, Signer: w.Worker, Seq: 1, Work: []settle.Work{w}}
		e.Statements = append(e.Statements, must[[]byte](s.T)(statement.Sign(signer.Private)))
	}
	return e
}

// served is a request that was paid, run and ended.
func (s *shop) served(tokens uint64) (settle.Request, Settled) {
	s.T.Helper()
	r := s.paid()
	must[Started](s.T)(s.teller().Run(s.Context(), r.Quote.ID))
	return r, must[Settled](s.T)(s.teller().End(s.Context(), s.ended(r.Quote.ID, tokens, "", s.work(tokens))))
}

// in says that money came in, and that the chain and the books agree on it.
func (s *shop) holds(in settle.Amount) {
	s.T.Helper()
	s.cfg.Books.verified(s.T)
	s.cfg.Books.mustHave(s.T, settle.Inflow, settle.Key{}, in)
	if got := s.has(s.operator.Key); got != in {
		s.T.Errorf("the vault has %d, the books say %d", got, in)
	}
}

// x402 is what an x402 client sends: signed by Alice, and not by the fee payer.
func (s *shop) x402(q settle.Quote, amount settle.Amount) []byte {
	s.T.Helper()
	budget := settletest.Instruction{Program: must[settle.Key](s.T)(settle.ParseKey("ComputeBudget111111111111111111111111111111")),
		Data: append([]byte{2}, binary.LittleEndian.AppendUint32(nil, 20_000)...)}
	raw := s.Sign(settletest.Tx{Version: settletest.V0, Signers: []settletest.Wallet{s.fee, s.alice}, Instructions: []settletest.Instruction{budget,
		s.mint.TransferChecked(s.mint.ATA(s.alice.Key), s.mint.ATA(s.operator.Key), s.alice.Key, amount), settletest.Memo(q.ID.Memo())}})
	clear(raw[1 : 1+ed25519.SignatureSize])
	return raw
}

// ticking lets the chain go on until the test's end, so that what is sent becomes final.
func (s *shop) ticking() {
	s.T.Helper()
	ctx, stop := context.WithCancel(context.Background())
	over := make(chan struct{})
	go func() {
		defer close(over)
		for {
			select {
			case <-ctx.Done():
				return
			case <-time.After(200 * time.Millisecond):
				s.Advance(5)
			}
		}
	}()
	s.T.Cleanup(func() { stop(); <-over })
}
