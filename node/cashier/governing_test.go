package cashier

import (
	"bytes"
	"crypto/ed25519"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/pquerna/otp/totp"

	"kvasird/node/kv"
	"kvasird/settle"
	"kvasird/settle/govern"
	"kvasird/settle/settletest"
)

// TestGoverned changes a parameter through the desk, with the records in the books.
func TestGoverned(t *testing.T) {
	o := newOffice(t, nil, nil)
	node := o.As(keyOf("any"))
	propose := func(values map[string]uint64, epoch uint64) (Proposed, error) {
		return node.Propose(t.Context(), Change{Values: values, Epoch: epoch})
	}
	for _, tt := range []struct {
		values map[string]uint64
		epoch  uint64
		field  string
	}{
		{map[string]uint64{"fees": 1}, 0, "values"}, {nil, 0, "values"}, {map[string]uint64{"fee": 150_000}, 0, "values"}, {map[string]uint64{"fee": 1}, 0, "values"},
		{map[string]uint64{"emission": 260_000}, 0, "values"}, {map[string]uint64{"fee": 200_000}, 5000, "epoch"}, {map[string]uint64{"floor": 90_000_000_000}, 3, "epoch"},
	} {
		_, err := propose(tt.values, tt.epoch)
		refused(t, fmt.Sprint(tt.values, tt.epoch), err, CodeBad, tt.field)
	}
	p := must[Proposed](t)(propose(map[string]uint64{"fee": 200_000}, 0))
	text := p.Texts[genesisWallet.Key.String()]
	if len(p.Texts) != 1 || !strings.Contains(text, "fee: 150000 -> 200000\nfrom epoch: 1\n") {
		t.Fatalf("to sign: %q", p.Texts)
	}
	signed := func(w settletest.Wallet) []Signature {
		return []Signature{{w.Key, "raw", settle.Signature(ed25519.Sign(w.Private, []byte(text)))}}
	}
	code := must[string](t)(totp.GenerateCode(o.secret, o.now()))
	eve := settletest.NewWallet("eve")
	forged := signed(genesisWallet)
	forged[0].Signature[5]++
	for _, tt := range []struct {
		name  string
		a     Activation
		code  Code
		field string
	}{
		{"no proposal", Activation{nil, signed(genesisWallet), code}, CodeBad, "proposal"},
		{"a format", Activation{p.Proposal, []Signature{{Wallet: genesisWallet.Key, Format: "v7"}}, code}, CodeBad, "signatures"},
		{"too many", Activation{p.Proposal, make([]Signature, govern.MaxWallets+1), code}, CodeBad, "signatures"},
		{"nobody", Activation{p.Proposal, nil, code}, CodeRights, "signatures"},
		{"somebody else", Activation{p.Proposal, signed(eve), code}, CodeRights, "signatures"},
		{"a forged one", Activation{p.Proposal, forged, code}, CodeRights, "signatures"},
		{"a wrong code", Activation{p.Proposal, signed(genesisWallet), "000000"}, CodeRights, "code"},
	} {
		_, err := node.Activate(t.Context(), tt.a)
		refused(t, tt.name, err, tt.code, tt.field)
	}
	if got := must[Activated](t)(node.Activate(t.Context(), Activation{p.Proposal, signed(genesisWallet), code})); got != (Activated{1, 1}) {
		t.Errorf("activated %+v", got)
	}
	_, err := node.Activate(t.Context(), Activation{p.Proposal, signed(genesisWallet), code})
	refused(t, "again", err, CodeState, "proposal")
	for range 2 {
		for epoch, want := range map[uint64]uint64{0: 150_000, 1: 200_000} {
			if p, _, _ := o.cfg.Governor.Params(epoch); p.FeePPM != want {
				t.Errorf("epoch %d: a fee of %d, want %d", epoch, p.FeePPM, want)
			}
		}
		o.reopen()
	}
}

// TestLockedOut: wrong codes with good signatures close the door for a while.
func TestLockedOut(t *testing.T) {
	o := newOffice(t, nil, nil)
	p := must[Proposed](t)(o.As(keyOf("any")).Propose(t.Context(), Change{Values: map[string]uint64{"fee": 200_000}}))
	s := Signature{genesisWallet.Key, "raw", settle.Signature(ed25519.Sign(genesisWallet.Private, []byte(p.Texts[genesisWallet.Key.String()])))}
	for i := range 6 {
		_, err := o.As(keyOf("any")).Activate(t.Context(), Activation{p.Proposal, []Signature{s}, "x"})
		refused(t, fmt.Sprint("try ", i), err, []Code{CodeRights, CodeBusy}[i/5], "code")
	}
	o.reopen()
	code := must[string](t)(totp.GenerateCode(o.secret, o.now()))
	_, err := o.As(keyOf("any")).Activate(t.Context(), Activation{p.Proposal, []Signature{s}, code})
	refused(t, "after a restart", err, CodeBusy, "code")
}

// TestGovernStore keeps records in order, and sees a gap.
func TestGovernStore(t *testing.T) {
	b := newBooks(t)
	s := b.GovernStore()
	for _, tt := range []struct {
		n  uint64
		ok bool
	}{{1, false}, {0, true}, {0, false}, {2, false}, {1, true}} {
		if err := s.Append(tt.n, []byte{byte(tt.n + 1)}); (err == nil) != tt.ok || err != nil && !errors.Is(err, ErrBooks) {
			t.Errorf("record %d: %v", tt.n, err)
		}
	}
	var got []byte
	must[int](t)(0, s.Replay(func(r []byte) error { got = append(got, r...); return nil }))
	if !bytes.Equal(got, []byte{1, 2}) {
		t.Errorf("replayed %v", got)
	}
	must[int](t)(0, b.store.Update(func(tx *kv.Tx) error { return tx.Delete(governKey(0)) }))
	if err := s.Replay(func([]byte) error { return nil }); !errors.Is(err, ErrBooks) {
		t.Errorf("with a gap: %v", err)
	}
}
