package cashier

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"kvasird/node/kv"
	"kvasird/settle"
	"kvasird/settle/govern"
	"kvasird/settle/settletest"
	"kvasird/settle/solana"
)

// keyed is a client with the keys of the vault.
type keyed struct {
	*solana.Client
	vault, fee ed25519.PrivateKey
}

func (k keyed) Sign(ctx context.Context, p solana.Payout) (solana.Signed, error) {
	return k.Client.Sign(ctx, k.vault, k.fee, p)
}

// office is a desk with books and a clock that tests set.
type office struct {
	*testing.T
	*Desk
	dir, secret string
	sealed      []byte
	at          atomic.Int64 // Unix seconds
	cfg         DeskConfig
	params      settle.Params
	devnet      bool
}

var genesisWallet = settletest.NewWallet("genesis")

// newOffice is a desk whose chain nobody can ask, unless a client of one is given.
func newOffice(t *testing.T, chain *solana.Client, vault Vault) *office {
	t.Helper()
	o := &office{T: t, dir: filepath.Join(t.TempDir(), "books")}
	o.at.Store(testNow)
	if chain == nil {
		chain = must[*solana.Client](t)(solana.New(solana.Config{Providers: []string{"http://127.0.0.1:1"},
			Vault: solana.Vault{Owner: settletest.NewWallet("operator").Key, Mint: keyOf("mint"), Program: settletest.Token}}))
	}
	o.cfg = DeskConfig{Network: hashOf("network"), Cluster: keyOf("cluster"), Chain: chain, Vault: vault, Decimals: 6,
		Key: settletest.NewWallet("settlement").Private, FirstRaw: 500_000_000_000, Began: time.Unix(testNow, 0),
		Models: func(string, settle.Node) (Model, error) { return Model{Name: "m", Parts: testParts}, nil }, Now: o.now}
	if vault == nil {
		o.cfg.Vault = keyed{}
	}
	o.params = settle.DefaultParams()
	o.params.EmissionTotal = 5000
	var err error
	if o.secret, o.sealed, err = govern.NewSecret(bytes.NewReader(bytes.Repeat([]byte{7}, 64)), [32]byte{9}, o.cfg.Network); err != nil {
		t.Fatal(err)
	}
	o.open()
	t.Cleanup(func() { must[int](t)(0, o.cfg.Books.Close()) })
	return o
}

func (o *office) now() time.Time { return time.Unix(o.at.Load(), 0) }

// open opens the books, as a start does.
func (o *office) open() {
	o.Helper()
	o.cfg.Books = must[*Books](o.T)(Open(o.dir, slog.New(slog.DiscardHandler), o.now))
	o.cfg.Governor = must[*govern.Governor](o.T)(govern.Open(govern.Config{
		Authority: govern.Authority{Network: o.cfg.Network, Cluster: o.cfg.Cluster, Wallets: []settle.Wallet{genesisWallet.Key}, Threshold: 1, Params: o.params, Devnet: o.devnet},
		Since:     uint64(o.cfg.Began.Unix()), Store: o.cfg.Books.GovernStore(), Secret: o.sealed, Key: [32]byte{9}}))
	o.Desk = must[*Desk](o.T)(OpenDesk(o.cfg))
}

func (o *office) reopen() {
	o.Helper()
	must[int](o.T)(0, o.cfg.Books.Close())
	o.open()
}

// linkOf is a link that a wallet signed.
func (o *office) linkOf(n settle.Node, l Link, signer settletest.Wallet) Link {
	o.Helper()
	f := must[govern.Format](o.T)(govern.ParseFormat(l.Format))
	m := must[[]byte](o.T)(govern.Wrap(o.cfg.Network, signer.Key, f, LinkText(o.cfg.Network, n, l)))
	l.Signature = settle.Signature(ed25519.Sign(signer.Private, m))
	return l
}

func (o *office) link(n settle.Node, w settletest.Wallet) {
	o.Helper()
	must[Linked](o.T)(o.As(n).Link(o.Context(), o.linkOf(n, Link{Wallet: w.Key, Spend: true, Since: uint64(o.at.Load()), Format: "raw"}, w)))
}

// earn has a node paid for a request of so many tokens, in epoch 9.
func (o *office) earn(n settle.Node, id uint64, tokens uint64) settle.WorkPay {
	o.Helper()
	q := quoteOf(id, keyOf("payer"))
	q.Created, q.Expires = uint64(o.at.Load()), uint64(o.at.Load())+50
	deposit(o.T, o.cfg.Books, q.Owner, q.Amount+settle.Amount(id))
	return o.serve(q, n, tokens)
}

// serve has a quote paid by its owner's balance, and answered by a node.
func (o *office) serve(q settle.Quote, n settle.Node, tokens uint64) settle.WorkPay {
	o.Helper()
	s := settling(q.ID, tokens)
	s.Work[0].Worker = n
	must[int](o.T)(0, o.cfg.Books.Quote(q))
	must[settle.Request](o.T)(o.cfg.Books.Debit(q.ID, q.Owner))
	must[settle.Request](o.T)(o.cfg.Books.Run(q.ID, uint64(o.at.Load()), 9))
	must[settle.Request](o.T)(o.cfg.Books.End(q.ID, tokens, ""))
	return must[settle.Outcome](o.T)(o.cfg.Books.Settle(settle.DefaultParams(), s)).Workers[0]
}

// refused checks a refusal's code and field.
func refused(t testing.TB, name string, err error, code Code, field string) {
	t.Helper()
	var r *Refusal
	if !errors.As(err, &r) || r.Code != code || r.Field != field || r.Text == "" {
		t.Errorf("%s: %#v %v, want %s of %q", name, r, err, code, field)
	}
}

func TestLinkText(t *testing.T) {
	l := Link{Wallet: settle.Key{1}, Spend: true, Since: 5}
	want := "kvasir wallet link v1\nnetwork: aa" + strings.Repeat("00", 31) + "\nnode: " + settle.Key{2}.String() +
		"\npay to: " + settle.Key{1}.String() + "\nthe node may spend: yes\nsince: 5\n"
	if got := LinkText(settle.Hash{0xaa}, settle.Key{2}, l); got != want {
		t.Errorf("%q, want %q", got, want)
	}
	if got := LinkText(settle.Hash{}, settle.Key{2}, Link{}); !strings.Contains(got, "\npay to: none\nthe node may spend: no\n") {
		t.Errorf("an unlink: %q", got)
	}
}

func TestLink(t *testing.T) {
	o, n := newOffice(t, nil, nil), keyOf("node")
	alice, bob := settletest.NewWallet("alice"), settletest.NewWallet("bob")
	do := func(l Link, signer settletest.Wallet) (Linked, error) {
		return o.As(n).Link(t.Context(), o.linkOf(n, l, signer))
	}
	for i, format := range []string{"v0", "v1", "raw"} {
		l := Link{Wallet: alice.Key, Spend: i == 1, Since: testNow + uint64(i), Format: format}
		for range 2 { // again is the same
			want := Linked{n, alice.Key, i == 1, l.Since}
			if got, err := do(l, alice); err != nil || got != want {
				t.Errorf("%s: %+v, %v, want %+v", format, got, err, want)
			}
		}
	}
	good := Link{Wallet: alice.Key, Since: testNow + 5, Format: "raw"}
	with := func(change func(*Link)) Link { l := good; change(&l); return l }
	for _, tt := range []struct {
		name   string
		link   Link
		signer settletest.Wallet
		code   Code
		field  string
	}{
		{"no time", with(func(l *Link) { l.Since = 0 }), alice, CodeBad, "since"},
		{"the future", with(func(l *Link) { l.Since = testNow + 601 }), alice, CodeBad, "since"},
		{"an earlier one", with(func(l *Link) { l.Since = testNow + 1 }), alice, CodeBad, "since"},
		{"the same time, other rights", with(func(l *Link) { l.Since, l.Spend = testNow+2, true }), alice, CodeBad, "since"},
		{"somebody else's signature", good, bob, CodeRights, "signature"},
		{"another wallet", with(func(l *Link) { l.Wallet = bob.Key }), bob, CodeRights, "wallet"},
		{"an unlink by another", with(func(l *Link) { l.Wallet = settle.Key{} }), bob, CodeRights, "signature"},
		{"the vault's owner", with(func(l *Link) { l.Wallet = o.cfg.Chain.Vault().Owner }), alice, CodeBad, "wallet"},
		{"the vault", with(func(l *Link) { l.Wallet = o.cfg.Chain.Vault().Account }), alice, CodeBad, "wallet"},
	} {
		_, err := do(tt.link, tt.signer)
		refused(t, tt.name, err, tt.code, tt.field)
	}
	l := good
	l.Format, l.Signature = "v2", settle.Signature{1}
	_, err := o.As(n).Link(t.Context(), l)
	refused(t, "a format", err, CodeBad, "format")
	_, err = o.As(keyOf("other")).Link(t.Context(), o.linkOf(n, good, alice))
	refused(t, "another node's link", err, CodeRights, "signature")
	// For the identity as a key the signature of S = 0 holds for every message.
	l = with(func(l *Link) { l.Wallet, l.Signature = settle.Key{1}, settle.Signature{1} })
	_, err = o.As(keyOf("other")).Link(t.Context(), l)
	refused(t, "a key that anybody signs for", err, CodeBad, "wallet")

	off := Link{Since: testNow + 6, Format: "v0"}
	for range 2 {
		if got, err := do(off, alice); err != nil || got.Wallet != (settle.Key{}) || got.Spend {
			t.Errorf("unlinked: %+v, %v", got, err)
		}
	}
	_, err = do(with(func(l *Link) { l.Wallet, l.Since = settle.Key{}, testNow+7 }), alice)
	refused(t, "unlinked again", err, CodeState, "wallet")
	_, err = do(good, alice)
	refused(t, "the link of before", err, CodeBad, "since")
	if got, err := do(with(func(l *Link) { l.Wallet, l.Since = bob.Key, testNow+7 }), bob); err != nil || got.Wallet != bob.Key {
		t.Errorf("the next wallet: %+v, %v", got, err)
	}
	o.reopen()
	if got := must[Ledger](t)(o.As(n).Ledger(t.Context(), n)); got.Wallet != bob.Key {
		t.Errorf("after a restart: %+v", got)
	}
}

// TestPayVests: pay is the wallet's when its audits are over and there is a wallet.
func TestPayVests(t *testing.T) {
	o, n, alice := newOffice(t, nil, nil), keyOf("worker"), settletest.NewWallet("alice")
	b := o.cfg.Books
	w := o.earn(n, 1, 2000)
	if w.Bonded == 0 || w.Vesting == 0 {
		t.Fatalf("nothing to see: %+v", w)
	}
	l := must[Ledger](t)(o.As(n).Ledger(t.Context(), n))
	if l.Held != w.Vesting || l.Bonded != w.Bonded || l.Earned != w.Pay || l.Requests != 1 || l.Target == 0 || len(l.Vesting) != 1 || l.Balance != 0 {
		t.Errorf("after one request: %+v, of %+v", l, w)
	}
	o.at.Add(int64(settle.DefaultParams().AuditSeconds))
	mature := func(want int) {
		t.Helper()
		if got := must[int](t)(b.Mature()); got != want {
			t.Errorf("%d nodes were looked after, want %d", got, want)
		}
		b.verified(t)
	}
	mature(1)
	b.mustHave(t, settle.Held, n, w.Vesting) // nobody to give it to
	mature(0)
	o.link(n, alice)
	mature(1)
	mature(0)
	b.mustHave(t, settle.Held, n, 0)
	b.mustHave(t, settle.Balance, alice.Key, w.Vesting)
	if l := must[Ledger](t)(o.As(n).Ledger(t.Context(), n)); l.Wallet != alice.Key || l.Balance != w.Vesting || len(l.Vesting) != 0 || l.Earned != w.Pay {
		t.Errorf("after it vested: %+v", l)
	}
	p := must[settle.Premiums](t)(b.Premiums(keyOf("payer")))
	pool := must[settle.Amount](t)(b.Balance(settle.Account{Kind: settle.Pool}))
	if left := must[settle.Amount](t)(p.Left(testNow/settle.Day, settle.PPM)); left == 0 || left > pool {
		t.Errorf("premiums of %d, the pool has %d", left, pool)
	}
	if n := wakes(t, b); n != 0 {
		t.Errorf("%d wake-ups are left", n)
	}
}

// wakes counts what Mature has before it.
func wakes(t *testing.T, b *Books) (n int) {
	t.Helper()
	must[int](t)(0, b.store.View(func(tx *kv.Tx) error {
		return tx.Each([]byte{'w'}, func(_, _ []byte) error { n++; return nil })
	}))
	return n
}

// TestManyMature: more nodes than one update looks after.
func TestManyMature(t *testing.T) {
	o := newOffice(t, nil, nil)
	const nodes = 2*matureAtOnce + 3
	var want settle.Amount
	alice := settletest.NewWallet("alice")
	for i := range uint64(nodes) {
		n := keyOf(fmt.Sprint("node", i))
		o.link(n, alice)
		for j := range uint64(2) {
			want += o.earn(n, 1+2*i+j, 1000).Vesting
			o.at.Add(1)
		}
	}
	if n := wakes(t, o.cfg.Books); n != nodes {
		t.Errorf("%d wake-ups for %d nodes", n, nodes)
	}
	if n := must[int](t)(o.cfg.Books.Mature()); n != 0 {
		t.Errorf("%d were looked after too early", n)
	}
	o.at.Add(int64(settle.DefaultParams().AuditSeconds))
	must[int](t)(o.cfg.Books.Mature())
	o.cfg.Books.mustHave(t, settle.Balance, alice.Key, want)
	o.cfg.Books.verified(t)
}

func TestUnstake(t *testing.T) {
	o, n, alice := newOffice(t, nil, nil), keyOf("worker"), settletest.NewWallet("alice")
	b := o.cfg.Books
	bonded := o.earn(n, 1, 2000).Bonded
	_, err := o.As(n).Unstake(t.Context(), Move{Amount: 1})
	refused(t, "no id", err, CodeBad, "id")
	_, err = o.As(n).Unstake(t.Context(), Move{ID: hashOf(1)})
	refused(t, "nothing", err, CodeBad, "amount")
	_, err = o.As(n).Unstake(t.Context(), Move{ID: hashOf(1), Amount: bonded + 1})
	refused(t, "too much", err, CodeFunds, "amount")
	_, err = o.As(keyOf("eve")).Unstake(t.Context(), Move{ID: hashOf(1), Amount: 1})
	refused(t, "another's", err, CodeFunds, "amount")
	for range 3 {
		if l := must[Ledger](t)(o.As(n).Unstake(t.Context(), Move{hashOf(1), 10})); l.Unbonding != 10 || l.Bonded != bonded-10 {
			t.Errorf("%+v", l)
		}
	}
	_, err = o.As(n).Unstake(t.Context(), Move{hashOf(1), 11})
	refused(t, "another amount", err, CodeBad, "id")
	for i := range settle.MaxUnbonding - 1 {
		must[Ledger](t)(o.As(n).Unstake(t.Context(), Move{hashOf("more", i), 1}))
	}
	_, err = o.As(n).Unstake(t.Context(), Move{hashOf(2), 1})
	refused(t, "too many", err, CodeBusy, "")
	o.link(n, alice)
	o.at.Add(int64(settle.DefaultParams().UnbondingSeconds))
	must[int](t)(b.Mature())
	held := must[Ledger](t)(o.As(n).Ledger(t.Context(), n))
	if held.Unbonding != 0 || held.Bonded != bonded-9-settle.MaxUnbonding {
		t.Errorf("after they left: %+v", held)
	}
	b.verified(t)
}

// TestUnstakesAtOnce: of 50 withdrawals of one bond as many begin as it has money for.
func TestUnstakesAtOnce(t *testing.T) {
	o, n, alice := newOffice(t, nil, nil), keyOf("worker"), settletest.NewWallet("alice")
	w := o.earn(n, 1, 2000)
	var began atomic.Int64
	var all sync.WaitGroup
	for i := range 50 {
		all.Go(func() {
			_, err := o.As(n).Unstake(context.Background(), Move{hashOf("out", i), w.Bonded/2 + 1})
			if err == nil {
				began.Add(1)
			} else {
				refused(t, "one of many", err, CodeFunds, "amount")
			}
		})
	}
	all.Wait()
	o.cfg.Books.mustHave(t, settle.Unbonding, n, w.Bonded/2+1)
	if began.Load() != 1 {
		t.Errorf("%d began", began.Load())
	}
	o.link(n, alice)
	o.at.Add(int64(settle.DefaultParams().UnbondingSeconds))
	for range 5 {
		all.Go(func() { must[int](t)(o.cfg.Books.Mature()) })
	}
	all.Wait()
	o.cfg.Books.mustHave(t, settle.Balance, alice.Key, w.Bonded/2+1+w.Vesting)
	o.cfg.Books.verified(t)
}

// TestVerifySeesBonds that are not what their node's accounts have.
func TestVerifySeesBonds(t *testing.T) {
	n := keyOf("worker")
	for what, harm := range map[string]func(page, settle.Bond) error{
		"more bonded": func(p page, b settle.Bond) error { b.Bonded++; return p.save(bondKey(n), b) },
		"less held":   func(p page, b settle.Bond) error { b.Vesting[0].Amount--; return p.save(bondKey(n), b) },
		"leaving": func(p page, b settle.Bond) error {
			b.Unbonding = []settle.Pending{{Amount: 1}}
			return p.save(bondKey(n), b)
		},
		"none":      func(p page, _ settle.Bond) error { return p.Delete(bondKey(n)) },
		"another's": func(p page, b settle.Bond) error { return p.save(bondKey(keyOf("other")), b) },
	} {
		o := newOffice(t, nil, nil)
		o.earn(n, 1, 2000)
		o.cfg.Books.verified(t)
		must[int](t)(0, o.cfg.Books.store.Update(func(tx *kv.Tx) error {
			p := page{tx}
			b, err := p.bond(n)
			return errors.Join(err, harm(p, b))
		}))
		if _, err := o.cfg.Books.Verify(); !errors.Is(err, ErrBooks) {
			t.Errorf("%s: %v", what, err)
		}
	}
}

func TestClaimRefuses(t *testing.T) {
	o, n := newOffice(t, nil, nil), keyOf("node")
	claim := func(m Move) error { _, err := o.As(n).Claim(t.Context(), m); return err }
	refused(t, "no id", claim(Move{Amount: settle.MinQuote}), CodeBad, "id")
	refused(t, "dust", claim(Move{hashOf(1), settle.MinQuote - 1}), CodeBad, "amount")
	refused(t, "no wallet", claim(Move{hashOf(1), settle.MinQuote}), CodeRights, "")
	o.link(n, settletest.NewWallet("alice"))
	refused(t, "no balance", claim(Move{hashOf(1), settle.MinQuote}), CodeFunds, "amount")
}

func TestDepositRefusesTheMalformed(t *testing.T) {
	o := newOffice(t, nil, nil)
	good := Deposit{Signature: settle.Signature{1}, Owner: keyOf("alice"), Amount: 1}
	for field, change := range map[string]func(*Deposit){
		"signature": func(d *Deposit) { d.Signature = settle.Signature{} },
		"owner":     func(d *Deposit) { d.Owner = settle.Key{} },
		"amount":    func(d *Deposit) { d.Amount = 0 },
	} {
		d := good
		change(&d)
		_, err := o.As(keyOf("node")).Deposit(t.Context(), d)
		refused(t, field, err, CodeBad, field)
	}
	_, err := o.As(keyOf("node")).Deposit(t.Context(), good)
	refused(t, "no chain", err, CodeNotYet, "signature")
}

// TestReserveBegins when all of it came in, and falls with its total.
func TestReserveBegins(t *testing.T) {
	b := newBooks(t)
	reserve := func() (r settle.Reserve) {
		t.Helper()
		must[bool](t)(true, b.store.View(func(tx *kv.Tx) error { _, err := page{tx}.load([]byte{'m'}, &r); return err }))
		return r
	}
	fund := func(i, amount uint64) {
		t.Helper()
		must[int](t)(0, b.Deposit(solana.Payment{Message: hashOf(i), Signature: settle.Signature{byte(i)}, Amount: settle.Amount(amount), Memo: fundEmission},
			Credit{Owner: keyOf("alice"), Action: settle.ActFund, Amount: settle.Amount(amount)}))
	}
	for _, tt := range []struct{ fund, total, want, left uint64 }{
		{4999, 5000, 0, 0}, {1, 0, 0, 0}, {1, 5000, 5000, 5000}, {500, 5000, 5000, 5000}, {1, 6000, 5000, 5000}, {1, 4000, 4000, 4000}, {1, 0, 0, 0}, {1, 5000, 0, 0},
	} {
		fund(tt.fund+1000*tt.total, tt.fund)
		must[int](t)(0, b.KeepReserve(settle.Amount(tt.total)))
		if r := reserve(); uint64(r.Total) != tt.want || uint64(r.Remaining) != tt.left {
			t.Errorf("%d more of %d: %+v, want %d of %d", tt.fund, tt.total, r, tt.left, tt.want)
		}
	}
	b.verified(t)
}
