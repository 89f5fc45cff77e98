//go:build svm

package cashier

import (
	"crypto/ed25519"
	"strings"
	"testing"

	"github.com/pquerna/otp/totp"

	"kvasird/settle"
	"kvasird/settle/settletest"
)

// TestWithdrawalLapses: one to a wallet that has no account of the token is not tried for ever, and
// its amount is free again.
func TestWithdrawalLapses(t *testing.T) {
	s := newShop(t)
	_, out := s.served(2000)
	has := out.Fee * 4 / 10
	nobody := s.NewWallet("nobody")
	p := must[Proposed](t)(s.teller().Propose(t.Context(), Change{Withdraw: has, To: nobody.Key}))
	sig := settle.Signature(ed25519.Sign(genesisWallet.Private, []byte(p.Texts[genesisWallet.Key.String()])))
	code := must[string](t)(totp.GenerateCode(s.secret, s.now()))
	must[Activated](t)(s.teller().Activate(t.Context(), Activation{p.Proposal, []Signature{{genesisWallet.Key, "raw", sig}}, code}))
	s.at.Add(int64((1 + withdrawalWaits) * s.params.EpochSeconds))
	if err := s.Tick(t.Context()); err == nil {
		t.Error("it was sent to a wallet without an account")
	}
	_, err := s.teller().Propose(t.Context(), Change{Withdraw: has, To: genesisWallet.Key})
	refused(t, "before it lapsed", err, CodeFunds, "withdraw")
	s.at.Add(int64(s.params.EpochSeconds))
	must[int](t)(0, s.Tick(t.Context()))
	must[Proposed](t)(s.teller().Propose(t.Context(), Change{Withdraw: has, To: genesisWallet.Key}))
}

// TestGovernedWithdrawal: what the genesis wallets sign with a code leaves the treasury when
// its epoch has come, once, and no more than the treasury has.
func TestGovernedWithdrawal(t *testing.T) {
	s := newShop(t)
	r, out := s.served(2000)
	has := out.Fee * 4 / 10
	s.cfg.Books.mustHave(t, settle.Treasury, settle.Key{}, has)
	boss := s.NewWallet("boss")
	s.mint.Open(boss.Key)
	propose := func(c Change) (Proposed, error) { return s.teller().Propose(t.Context(), c) }
	for name, tt := range map[string]struct {
		c     Change
		code  Code
		field string
	}{
		"more than there is": {Change{Withdraw: has + 1, To: boss.Key}, CodeFunds, "withdraw"},
		"dust":               {Change{Withdraw: settle.MinQuote - 1, To: boss.Key}, CodeBad, "withdraw"},
		"nothing":            {Change{To: boss.Key}, CodeBad, "withdraw"},
		"to nobody":          {Change{Withdraw: 2000}, CodeBad, "to"},
		"to the vault":       {Change{Withdraw: 2000, To: s.operator.Key}, CodeBad, "to"},
		"beside a change":    {Change{Withdraw: 2000, To: boss.Key, Values: map[string]uint64{"fee": 200_000}}, CodeBad, "values"},
	} {
		_, err := propose(tt.c)
		refused(t, name, err, tt.code, tt.field)
	}
	activation := func(p Proposed, w settletest.Wallet) Activation {
		text := p.Texts[genesisWallet.Key.String()]
		if !strings.Contains(text, boss.Key.String()) {
			t.Errorf("to sign: %q", text)
		}
		return Activation{p.Proposal, []Signature{{w.Key, "raw", settle.Signature(ed25519.Sign(w.Private, []byte(text)))}},
			must[string](t)(totp.GenerateCode(s.secret, s.now()))}
	}
	p := must[Proposed](t)(propose(Change{Withdraw: 2000, To: boss.Key}))
	_, err := s.teller().Activate(t.Context(), activation(p, settletest.NewWallet("eve")))
	refused(t, "signed by eve", err, CodeRights, "signatures")
	done := must[Activated](t)(s.teller().Activate(t.Context(), activation(p, genesisWallet)))
	_, err = s.teller().Activate(t.Context(), activation(p, genesisWallet))
	refused(t, "again", err, CodeState, "proposal")
	_, err = propose(Change{Withdraw: has - 1999, To: boss.Key})
	refused(t, "what is promised already", err, CodeFunds, "withdraw")
	must[int](t)(0, s.Tick(t.Context()))
	if pending := must[[]Payout](t)(s.cfg.Books.pending()); len(pending) > 0 || done.Epoch != 1 {
		t.Errorf("before its epoch: %+v, which is %d", pending, done.Epoch)
	}
	s.at.Add(int64(s.params.EpochSeconds))
	for range 3 { // and once more after a restart, and when it was paid
		must[int](t)(0, s.Tick(t.Context()))
		s.restart()
		s.bank.resolve(t, s.cfg.Books, s.cfg.Vault)
	}
	s.cfg.Books.verified(t)
	s.cfg.Books.mustHave(t, settle.Treasury, settle.Key{}, has-2000)
	s.cfg.Books.mustHave(t, settle.PaidOut, settle.Key{}, 2000)
	if got, left := s.has(boss.Key), s.has(s.operator.Key); got != 2000 || left != r.Quote.Amount-2000 {
		t.Errorf("%d arrived, the vault has %d", got, left)
	}
	must[Proposed](t)(propose(Change{Withdraw: has - 2000, To: boss.Key}))
	if _, err := propose(Change{Withdraw: has - 1999, To: boss.Key}); err == nil {
		t.Error("more than is left is proposed")
	}
}
