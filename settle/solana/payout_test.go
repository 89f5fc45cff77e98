//go:build svm

package solana

import (
	"context"
	"crypto/ed25519"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"kvasird/settle"
	"kvasird/settle/settletest"
)

func (w *world) sign(cl *Client, to settle.Wallet, amount settle.Amount) Signed {
	w.t.Helper()
	s, err := cl.Sign(context.Background(), w.operator.Private, w.bob.Private, Payout{To: to, Amount: amount, Memo: w.memo()})
	if err != nil {
		w.t.Fatal(err)
	}
	return s
}

func (w *world) resolved(cl *Client, s Signed, want Outcome, wantErr error, when string) {
	w.t.Helper()
	if got, err := cl.Resolve(context.Background(), s); got != want || !errors.Is(err, wantErr) {
		w.t.Errorf("%s: %v, %v, want %v, %v", when, got, err, want, wantErr)
	}
}

func TestPayout(t *testing.T) {
	w := newWorld(t)
	ctx := context.Background()
	cl := w.client(w.mint, "a", "b")
	carol := settletest.NewWallet("carol, who has no SOL")
	w.mint.Open(carol.Key)
	w.Advance(40)
	s := w.sign(cl, carol.Key, 5)
	w.resolved(cl, s, Pending, nil, "signed")
	for range 3 { // as often as one likes
		if err := cl.Send(ctx, s); err != nil {
			t.Error(err)
		}
	}
	w.resolved(cl, s, Pending, nil, "sent")
	w.Advance(40)
	w.resolved(cl, s, Landed, nil, "final")
	w.Advance(1000)
	w.resolved(cl, s, Landed, nil, "long after")
	if got := w.Balance(w.mint.ATA(carol.Key)); got != 5 {
		t.Errorf("%d arrived", got)
	}
}

// TestBurn destroys tokens of the vault, once: its balance and the supply fall by them.
func TestBurn(t *testing.T) {
	w := newWorld(t)
	cl := w.client(w.mint, "a", "b")
	had, supply := w.Balance(w.mint.ATA(w.operator.Key)), w.supply()
	s, err := cl.Sign(t.Context(), w.operator.Private, w.bob.Private, Payout{Burn: true, Amount: 7, Memo: w.memo()})
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := cl.Send(t.Context(), s); err != nil {
			t.Error(err)
		}
	}
	w.Advance(40)
	w.resolved(cl, s, Landed, nil, "burnt")
	if got, left := w.Balance(w.mint.ATA(w.operator.Key)), w.supply(); got != had-7 || left != supply-7 {
		t.Errorf("the vault had %d and has %d, the supply was %d and is %d", had, got, supply, left)
	}
}

// supply is how many tokens of the mint there are.
func (w *world) supply() settle.Amount {
	w.t.Helper()
	return settle.Amount(binary.LittleEndian.Uint64(w.AccountData(w.mint.Key)[36:44]))
}

func TestPayoutForkedAway(t *testing.T) {
	w := newWorld(t)
	ctx := context.Background()
	cl := w.client(w.mint, "a", "b")
	w.Advance(1)
	s := w.sign(cl, w.alice.Key, 5)
	fork := w.Advance(1)
	if err := cl.Send(ctx, s); err != nil {
		t.Fatal(err)
	}
	w.Advance(2)
	w.Rollback(fork - 1)
	w.resolved(cl, s, Pending, nil, "forked away")
	if err := cl.Send(ctx, s); err != nil {
		t.Fatal(err)
	}
	w.Advance(40)
	w.resolved(cl, s, Landed, nil, "sent again")
	if got := w.Balance(w.mint.ATA(w.alice.Key)); got != 100*price+5 {
		t.Errorf("Alice has %d", got)
	}
}

func TestPayoutThatFails(t *testing.T) {
	w := newWorld(t)
	cl := w.client(w.mint, "a", "b")
	s := w.sign(cl, w.alice.Key, 1000*price)
	if err := cl.Send(context.Background(), s); !errors.Is(err, ErrProvider) || codeOf(err) != codePreflight {
		t.Errorf("more than the vault has: %v", err)
	}
	w.resolved(cl, s, Pending, nil, "refused, which proves nothing")
	if _, err := w.SendRaw(s.Raw, false); err != nil {
		t.Fatal(err)
	}
	w.resolved(cl, s, Pending, nil, "failed, and not final")
	w.Advance(40)
	w.resolved(cl, s, Failed, nil, "failed")
}

func TestPayoutExpires(t *testing.T) {
	w := newWorld(t)
	cl := w.client(w.mint, "a", "b")
	s := w.sign(cl, w.alice.Key, 5)
	w.Advance(int(s.LastValid - w.Slot() + 1))
	w.resolved(cl, s, Pending, nil, "it cannot land any more, but that is not final")
	w.Advance(expiryMargin + 31)
	w.resolved(cl, s, Pending, nil, "one block before the margin's end")
	w.Advance(1)
	w.resolved(cl, s, Expired, nil, "expired")

	hear := func(f settletest.Fault) { w.ClearFaults(); w.Fault(f) }
	hear(settletest.Fault{Path: "/b", Method: "getFirstAvailableBlock", Result: []byte("5000")})
	w.resolved(cl, s, Pending, ErrProvider, "a provider with a short memory")
	hear(settletest.Fault{Path: "/b", Method: "getSignatureStatuses", Result: []byte(`{"value":[{"slot":7}]}`)})
	w.resolved(cl, s, Pending, nil, "a provider that has seen it")
	hear(settletest.Fault{Path: "/b", Method: "getSignatureStatuses", Result: []byte(`{"value":[]}`)})
	w.resolved(cl, s, Pending, ErrMalformed, "no status")
	hear(settletest.Fault{Path: "/b", Method: "getBlockHeight", Result: []byte("7")})
	w.resolved(cl, s, Pending, nil, "a provider that is behind")
	hear(settletest.Fault{Path: "/b", Drop: true})
	w.resolved(cl, s, Pending, ErrProvider, "a provider that is down")
}

func TestPayoutProvidersDisagree(t *testing.T) {
	w := newWorld(t)
	cl := w.client(w.mint, "a", "b")
	s := w.sign(cl, w.alice.Key, 5)
	if err := cl.Send(context.Background(), s); err != nil {
		t.Fatal(err)
	}
	other := w.paid()
	w.Advance(1000)
	w.Fault(settletest.Fault{Path: "/b", Method: "getTransaction", Result: []byte("null")})
	w.Fault(settletest.Fault{Path: "/b", Method: "getSignatureStatuses", Result: []byte(`{"value":[null]}`)})
	w.resolved(cl, s, Pending, ErrDisagree, "one says that it expired")
	if len(w.alarms) == 0 {
		t.Error("no alarm")
	}
	w.ClearFaults()
	f := w.patched(other.Signature, func(map[string]any) {})
	f.First, f.Path = s.Signature.String(), "/b"
	w.Fault(f)
	w.resolved(cl, s, Pending, ErrSwapped, "one shows another transaction")
	w.ClearFaults()
	w.resolved(cl, s, Landed, nil, "both are honest")
}

// TestPayoutMakesNoAccount: a wallet could close it, keep what it cost, and claim again.
func TestPayoutMakesNoAccount(t *testing.T) {
	w := newWorld(t)
	w.Advance(40)
	cl := w.client(w.mint, "a", "b")
	account := func(data []byte) []byte {
		return fmt.Appendf(nil, `{"value":[{"owner":%q,"data":[%q,"base64"]}]}`, w.mint.Program, base64.StdEncoding.EncodeToString(data))
	}
	good := slices.Concat(w.mint.Key[:], w.alice.Key[:], make([]byte, 101))
	good[108] = 1
	with := func(at int, b ...byte) []byte {
		data := slices.Clone(good)
		copy(data[at:], b)
		return data
	}
	for _, tt := range []struct {
		name string
		data []byte // of the account; nil: as the chain has it
		to   settle.Wallet
		says string
	}{
		{"none", nil, settletest.NewWallet("carol").Key, "is not there"},
		{"there", nil, w.alice.Key, ""},
		{"as it should be", good, w.alice.Key, ""},
		{"short", good[:164], w.alice.Key, "no token account"},
		{"another mint", with(0, w.other.Key[:]...), w.alice.Key, "no token account"},
		{"another owner", with(32, w.eve.Key[:]...), w.alice.Key, "given away to " + w.eve.Key.String()},
		{"frozen", with(108, 2), w.alice.Key, "frozen"},
	} {
		w.ClearFaults()
		if tt.data != nil {
			w.Fault(settletest.Fault{Path: "/a", Method: "getMultipleAccounts", Result: account(tt.data)})
		}
		s, err := cl.Sign(context.Background(), w.operator.Private, w.bob.Private, Payout{To: tt.to, Amount: 5, Memo: w.memo()})
		switch {
		case tt.says == "" && err != nil:
			t.Errorf("%s: %v", tt.name, err)
		case tt.says == "":
			if tx, _, err := readTransaction([]string{base64.StdEncoding.EncodeToString(s.Raw), "base64"}); err != nil || len(tx.Message.Instructions) != 2 {
				t.Errorf("%s: more than a transfer and a memo: %v", tt.name, err)
			}
		case !errors.Is(err, ErrPayout) || !strings.Contains(err.Error(), tt.says) || !strings.Contains(err.Error(), "create the wallet's token account first"):
			t.Errorf("%s: %v", tt.name, err)
		}
	}
}

func TestPayoutsThatCannotBe(t *testing.T) {
	w := newWorld(t)
	cl := w.client(w.mint, "a")
	good := Payout{To: w.alice.Key, Amount: 1, Memo: "id"}
	for _, tt := range []struct {
		name   string
		vault  ed25519.PrivateKey
		change func(*Payout)
		says   string
	}{
		{"another's key", w.eve.Private, func(*Payout) {}, "not that of"},
		{"no key", nil, func(*Payout) {}, "bytes"},
		{"nothing", w.operator.Private, func(p *Payout) { p.Amount = 0 }, "amount of 0"},
		{"no memo", w.operator.Private, func(p *Payout) { p.Memo = "" }, "memo"},
		{"a long memo", w.operator.Private, func(p *Payout) { p.Memo = strings.Repeat("m", 257) }, "257"},
		{"to the vault", w.operator.Private, func(p *Payout) { p.To = w.operator.Key }, "is the vault"},
		{"to no wallet", w.operator.Private, func(p *Payout) { p.To = w.mint.ATA(w.alice.Key) }, "no wallet"},
		{"burnt for somebody", w.operator.Private, func(p *Payout) { p.Burn = true }, "goes to nobody"},
		{"to a key of small order", w.operator.Private, func(p *Payout) { p.To = settle.Key{1} }, "no wallet"},
	} {
		p := good
		tt.change(&p)
		_, err := cl.Sign(context.Background(), tt.vault, w.bob.Private, p)
		if !errors.Is(err, ErrPayout) || !strings.Contains(err.Error(), tt.says) {
			t.Errorf("%s: %v, want %q", tt.name, err, tt.says)
		}
	}
	w.Fault(settletest.Fault{Method: "getLatestBlockhash", Result: []byte(`{"value":{}}`)})
	if _, err := cl.Sign(context.Background(), w.operator.Private, w.bob.Private, good); !errors.Is(err, ErrMalformed) {
		t.Errorf("no blockhash: %v", err)
	}
}
