package node

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"kvasird/node/api"
	"kvasird/node/cashier"
	"kvasird/node/client"
	"kvasird/settle"
)

// till is a settlement that gives fixed answers and keeps what it was asked.
type till struct {
	cashier.Service
	asked any
	err   error
}

var tillRequest = settle.QuoteID{1, 2}

func (s *till) take(in any) error { s.asked = in; return s.err }

func (s *till) Terms(context.Context) (cashier.Terms, error) {
	return cashier.Terms{Mint: settle.Key{5}, Vault: settle.Key{6}, Owner: settle.Key{7}, Decimals: 6, Ref: 8, Params: map[string]uint64{"fee": 1},
		Prices: []cashier.ModelPrice{{Model: "m", Raw: 9}}}, s.err
}
func (s *till) Quote(_ context.Context, a cashier.Ask) (cashier.Offer, error) {
	return cashier.Offer{Quote: settle.Quote{ID: tillRequest, Model: a.Model, Amount: 1500, Expires: 77}, Secret: []byte{10, 11}}, s.take(a)
}
func (s *till) Ledger(_ context.Context, owner settle.Key) (cashier.Ledger, error) {
	return cashier.Ledger{Owner: owner, Wallet: settle.Key{2}, Balance: 1<<64 - 1, Bonded: 3, Held: 4, Earned: 5, Requests: 6, Target: 7,
		Vesting: []settle.Pending{{Amount: 8, Free: 9}}, Payouts: []cashier.Payout{{ID: settle.Hash{1}, Amount: 10, Outcome: 1}}}, s.take(owner)
}
func (s *till) Link(_ context.Context, l cashier.Link) (cashier.Linked, error) {
	return cashier.Linked{Wallet: l.Wallet, Spend: l.Spend, Since: l.Since}, s.take(l)
}
func (s *till) Deposit(_ context.Context, d cashier.Deposit) (cashier.Ledger, error) {
	return cashier.Ledger{Owner: d.Owner}, s.take(d)
}
func (s *till) Unstake(_ context.Context, m cashier.Move) (cashier.Ledger, error) {
	return cashier.Ledger{Unbonding: m.Amount}, s.take(m)
}
func (s *till) Claim(_ context.Context, m cashier.Move) (cashier.Payout, error) {
	return cashier.Payout{ID: m.ID, Amount: m.Amount}, s.take(m)
}
func (s *till) Complain(_ context.Context, c cashier.Complaint) (cashier.Complained, error) {
	return cashier.Complained{Asked: c.Amount, Due: 7, Over: true, Recovered: 3}, s.take(c)
}
func (s *till) Propose(_ context.Context, c cashier.Change) (cashier.Proposed, error) {
	return cashier.Proposed{Proposal: []byte{1}, Texts: map[string]string{"w": "t"}}, s.take(c)
}
func (s *till) Activate(_ context.Context, a cashier.Activation) (cashier.Activated, error) {
	return cashier.Activated{Sequence: 1, Epoch: 2}, s.take(a)
}

func openPurse(t *testing.T, s *till) *client.Client {
	return client.New(openControl(t, &daemonFunc{purse: &Purse{Service: s, Node: settle.Node{3}, Network: settle.Hash{4}, Now: func() time.Time { return time.Unix(55, 0) },
		Model: func(name string) (string, error) { return "id of " + name, nil }}}))
}

// What is asked about money arrives with its types, and so do the answers.
func TestControlMoney(t *testing.T) {
	s := &till{}
	c, ctx := openPurse(t, s), t.Context()
	wallet, sig, id := settle.Key{9}, settle.Signature{8}, strings.Repeat("0a", 32)
	hash := must(hashOfText(id))(t)
	check := func(what string, err error, asked any) {
		t.Helper()
		if err != nil || !reflect.DeepEqual(s.asked, asked) {
			t.Errorf("%s: %v, asked %+v, want %+v", what, err, s.asked, asked)
		}
	}
	m, err := c.Money(ctx)
	check("money", err, settle.Node{3})
	if m.Terms.Vault != (settle.Key{6}).String() || m.Terms.Prices[0].Raw != 9 || m.Ledger.Balance != "18446744073709551615" || m.Ledger.Vesting[0] != (api.Vesting{Amount: "8", Free: 9}) ||
		m.Ledger.Payouts[0].Outcome != 1 || m.Ledger.Payouts[0].Amount != "10" || m.Ledger.Target != "7" || m.Ledger.Requests != 6 ||
		m.StakeMemo != cashier.StakeMemo(settle.Node{3}) {
		t.Errorf("money %+v", m)
	}
	q, err := c.Quote(ctx, api.QuoteRequest{Model: "m", PromptTokens: 1, AnswerTokens: 2, RequestHash: id, Owner: wallet.String()})
	check("quote", err, cashier.Ask{Model: "id of m", PromptTokens: 1, AnswerTokens: 2, RequestHash: hash, Owner: wallet})
	if q.Memo != tillRequest.Memo() || q.Amount != "1500" || q.Secret != "0a0b" || q.Expires != 77 || q.VaultOwner != (settle.Key{7}).String() {
		t.Errorf("quote %+v", q)
	}
	text, err := c.LinkText(ctx, api.LinkTextRequest{Wallet: wallet.String(), Spend: true})
	if want := cashier.LinkText(settle.Hash{4}, settle.Node{3}, cashier.Link{Wallet: wallet, Spend: true, Since: 55}); err != nil || text.Text != want || text.Since != 55 {
		t.Errorf("text %+v, %v", text, err)
	}
	_, err = c.Link(ctx, api.Link{Wallet: wallet.String(), Spend: true, Since: 5, Format: "v1", Signature: sig.String()})
	check("link", err, cashier.Link{Wallet: wallet, Spend: true, Since: 5, Format: "v1", Signature: sig})
	_, err = c.Deposit(ctx, api.Deposit{Signature: sig.String(), Owner: wallet.String(), Amount: "7", Stake: true})
	check("deposit", err, cashier.Deposit{Signature: sig, Owner: wallet, Amount: 7, Stake: true})
	l, err := c.Unstake(ctx, api.Move{ID: id, Amount: "7"})
	check("unstake", err, cashier.Move{ID: hash, Amount: 7})
	p, claimErr := c.Claim(ctx, api.Move{ID: id, Amount: "7"})
	check("claim", claimErr, cashier.Move{ID: hash, Amount: 7})
	if l.Unbonding != "7" || p.ID != id {
		t.Errorf("moved %+v, %+v", l, p)
	}
	quoteID := settle.QuoteID{1, 2}
	ask := api.ComplaintTextRequest{Request: quoteID.String(), Amount: "7", Wallet: wallet.String()}
	claim := cashier.Complaint{ID: quoteID, Amount: 7}
	if got, err := c.ComplaintText(ctx, ask); err != nil || got.Text != cashier.ComplaintText(settle.Hash{4}, claim, wallet) || got.Domain != text.Domain {
		t.Errorf("to sign %+v, %v", got, err)
	}
	taken, err := c.Complain(ctx, api.Complaint{Request: quoteID.String(), Amount: "7"})
	check("complain", err, claim)
	if taken != (api.Complained{Asked: "7", Due: 7, Over: true, Recovered: "3"}) {
		t.Errorf("complained %+v", taken)
	}
	claim.Format, claim.Signature = "v1", sig
	_, err = c.Complain(ctx, api.Complaint{Request: quoteID.String(), Amount: "7", Format: "v1", Signature: sig.String()})
	check("complain, signed", err, claim)
	_, err = c.Ledger(ctx, wallet.String())
	check("ledger", err, wallet)
	change := api.Change{Values: map[string]uint64{"fee": 1<<64 - 1}, Epoch: 3, Valid: 4}
	made, err := c.Propose(ctx, change)
	check("propose", err, cashier.Change{Values: change.Values, Epoch: 3, Valid: 4})
	_, err = c.Propose(ctx, api.Change{Withdraw: "7", To: wallet.String(), Epoch: 3})
	check("propose a withdrawal", err, cashier.Change{Withdraw: 7, To: wallet, Epoch: 3})
	if string(made.Proposal) != "\x01" || made.Texts["w"] != "t" {
		t.Errorf("proposed %+v", made)
	}
	done, err := c.Activate(ctx, api.Activation{Proposal: []byte{1}, Signatures: []api.WalletSignature{{Wallet: wallet.String(), Format: "raw", Signature: sig.String()}}, Code: "1"})
	check("activate", err, cashier.Activation{Proposal: []byte{1}, Signatures: []cashier.Signature{{Wallet: wallet, Format: "raw", Signature: sig}}, Code: "1"})
	if done.Epoch != 2 {
		t.Errorf("activated %+v", done)
	}
}

func hashOfText(s string) (h settle.Hash, err error) { return h, h.UnmarshalText([]byte(s)) }

func TestControlMoneyRefuses(t *testing.T) {
	s := &till{}
	c, ctx := openPurse(t, s), t.Context()
	id := strings.Repeat("0a", 32)
	for _, tt := range []struct {
		err  error // of the settlement
		move api.Move
		code api.Code
		want string
	}{
		{nil, api.Move{ID: id, Amount: "1e3"}, api.CodeBadRequest, "1e3"},
		{nil, api.Move{ID: id, Amount: "01"}, api.CodeBadRequest, "01"},
		{nil, api.Move{ID: id, Amount: "18446744073709551616"}, api.CodeBadRequest, "amount"},
		{nil, api.Move{ID: "0a", Amount: "1"}, api.CodeBadRequest, "hash"},
		{&cashier.Refusal{Code: cashier.CodeFunds, Text: "too little"}, api.Move{ID: id, Amount: "1"}, api.CodeBadRequest, "too little"},
		{&cashier.Refusal{Code: cashier.CodeNotFound, Text: "none"}, api.Move{ID: id, Amount: "1"}, api.CodeNotFound, "none"},
		{&cashier.Refusal{Code: cashier.CodeBusy, Text: "often"}, api.Move{ID: id, Amount: "1"}, api.CodeBusy, "often"},
		{&cashier.Refusal{Code: cashier.CodeNotYet, Text: "soon"}, api.Move{ID: id, Amount: "1"}, api.CodeNotReady, "soon"},
		{cashier.ErrAway, api.Move{ID: id, Amount: "1"}, api.CodeNotReady, "cannot be reached"},
		{errors.New("broken"), api.Move{ID: id, Amount: "1"}, api.CodeInternal, "broken"},
	} {
		s.err = tt.err
		_, err := c.Claim(ctx, tt.move)
		var e *api.Error
		if !errors.As(err, &e) || e.Code != tt.code || !strings.Contains(e.Message, tt.want) {
			t.Errorf("%+v with %v: %v, want %s with %q", tt.move, tt.err, err, tt.code, tt.want)
		}
	}
	none := client.New(openControl(t, &daemonFunc{err: &api.Error{Code: api.CodeBadRequest, Message: errNoToken.Error()}}))
	if _, err := none.Money(ctx); err == nil || err.Error() != errNoToken.Error() {
		t.Errorf("without a token: %v", err)
	}
}

func TestServiceToken(t *testing.T) {
	path := filepath.Join(t.TempDir(), serviceTokenName)
	first := must(loadServiceToken(path))(t)
	again := must(loadServiceToken(path))(t)
	info := must(os.Stat(path))(t)
	if first != again || len(first) < 40 || info.Mode().Perm() != 0o600 {
		t.Errorf("%q, then %q, mode %v", first, again, info.Mode())
	}
	for text, mode := range map[string]os.FileMode{"short": 0o600, strings.Repeat("a", 50): 0o644} {
		if err := errors.Join(os.Remove(path), os.WriteFile(path, []byte(text), mode)); err != nil {
			t.Fatal(err)
		}
		if _, err := loadServiceToken(path); err == nil {
			t.Errorf("%q with mode %v is taken", text, mode)
		}
	}
}

// The service token and the keys of admins act for a node's account; other keys do not, and
// after a restart it is the same.
func TestWhoActsForAccount(t *testing.T) {
	path := filepath.Join(t.TempDir(), keysName)
	keys := must(openKeys(path, time.Now))(t)
	admin := must(keys.add(api.NewKey{Name: "admin", Admin: true}))(t)
	user := must(keys.add(api.NewKey{Name: "user"}))(t)
	if all := keys.all(); !all[0].Admin || all[1].Admin {
		t.Errorf("keys %+v", all)
	}
	n := &Node{keys: must(openKeys(path, time.Now))(t), settlement: &settlement{secret: hashSecret("kvs-token")}}
	for secret, want := range map[string]bool{"kvs-token": true, admin.Secret: true, user.Secret: false, "": false, "kvs-tokem": false, "kvs-token ": false} {
		if got := n.allows(secret); got != want {
			t.Errorf("%.12q: %v", secret, got)
		}
	}
	if _, err := n.keys.revoke("admin"); err != nil || n.allows(admin.Secret) {
		t.Errorf("a revoked key acts on, %v", err)
	}
	raw := must(json.Marshal(user.Key))(t)
	if strings.Contains(string(raw), "admin") {
		t.Errorf("a key of a user is written %s", raw)
	}
}

// A model that is learned of is known from then on; each node has one header fetched at a time, and a
// slow one keeps nobody else from learning of another.
func TestModelBook(t *testing.T) {
	var calls atomic.Int32
	begun, fetch := make(chan struct{}), make(chan struct{})
	b := &modelBook{known: map[string]cashier.Model{}, finding: map[settle.Node]string{}, find: func(id string) (cashier.Model, error) {
		calls.Add(1)
		if id == "none" {
			return cashier.Model{}, &cashier.Refusal{Code: cashier.CodeNotFound, Text: "none"}
		}
		if id == "slow" {
			begun <- struct{}{}
			<-fetch
		}
		return cashier.Model{Name: id}, nil
	}}
	mallory, alice := settle.Node{1}, settle.Node{2}
	var got cashier.Model
	done := make(chan struct{})
	go func() {
		defer close(done)
		got, _ = b.model("slow", mallory)
	}()
	<-begun
	var r *cashier.Refusal
	for name, ask := range map[string]struct {
		id string
		by settle.Node
	}{"another for the same node": {"other", mallory}, "the same for another node": {"slow", alice}} {
		if _, err := b.model(ask.id, ask.by); !errors.As(err, &r) || r.Code != cashier.CodeBusy {
			t.Errorf("%s: %v", name, err)
		}
	}
	if m, err := b.model("m", alice); err != nil || m.Name != "m" {
		t.Errorf("another for another node: %+v, %v", m, err)
	}
	close(fetch)
	<-done
	if again, err := b.model("slow", alice); err != nil || got.Name != "slow" || again.Name != "slow" || calls.Load() != 2 {
		t.Errorf("%+v, %+v, %v after %d calls", got, again, err, calls.Load())
	}
	for range 2 {
		if _, err := b.model("none", alice); !errors.As(err, &r) || r.Code != cashier.CodeNotFound {
			t.Errorf("no such model: %v", err)
		}
	}
	if calls.Load() != 4 {
		t.Errorf("%d calls: what is not there may come", calls.Load())
	}
	for i := range maxFinding {
		b.finding[settle.Node{3, byte(i)}] = fmt.Sprint(i)
	}
	if _, err := b.model("one more", alice); !errors.As(err, &r) || r.Code != cashier.CodeBusy {
		t.Errorf("beside %d: %v", maxFinding, err)
	}
}
