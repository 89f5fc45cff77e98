package cashier

import (
	"context"
	"crypto/ed25519"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"kvasird/node/kv"
	"kvasird/settle"
	"kvasird/settle/govern"
	"kvasird/settle/settletest"
)

func init() { children["claims"] = claimsChild }

// answered is a request that a wallet paid, and that a worker answered, at this time.
func (o *office) answered(owner settle.Wallet, id uint64) settle.Quote {
	o.Helper()
	q := quoteOf(id, owner)
	q.Created, q.Expires = uint64(o.at.Load()), uint64(o.at.Load())+50
	deposit(o.T, o.cfg.Books, q.Owner, q.Amount+settle.Amount(id))
	o.serve(q, keyOf("worker"), 2000)
	return q
}

// fillPool has others pay premiums.
func (o *office) fillPool(requests uint64) {
	o.Helper()
	for i := range requests {
		o.answered(keyOf("others"), 1000+i)
	}
}

// signed is a complaint that a wallet signed.
func (o *office) signed(c Complaint, w settletest.Wallet) Complaint {
	o.Helper()
	f := must[govern.Format](o.T)(govern.ParseFormat(c.Format))
	m := must[[]byte](o.T)(govern.Wrap(o.cfg.Network, w.Key, f, ComplaintText(o.cfg.Network, c, w.Key)))
	c.Signature = settle.Signature(ed25519.Sign(w.Private, m))
	return c
}

// nextEpoch passes time until n epochs have begun since, and does what is due.
func (o *office) nextEpoch(n uint64) {
	o.Helper()
	o.at.Add(int64(n * o.params.EpochSeconds))
	must[int](o.T)(0, o.Mature(o.Context()))
	o.cfg.Books.verified(o.T)
}

func (b *Books) has(t testing.TB, kind settle.Kind, id settle.Key) settle.Amount {
	t.Helper()
	return must[settle.Amount](t)(b.Balance(settle.Account{Kind: kind, ID: id}))
}

func TestComplaintText(t *testing.T) {
	got := ComplaintText(settle.Hash{0xaa}, Complaint{ID: settle.QuoteID{0xbb}, Amount: 7}, settle.Key{1})
	want := "kvasir insurance claim v1\nnetwork: aa" + fmt.Sprintf("%062d", 0) + "\nrequest: bb" + fmt.Sprintf("%030d", 0) + "\nclaim: 7\nwallet: " + settle.Key{1}.String() + "\n"
	if got != want {
		t.Errorf("%q, want %q", got, want)
	}
}

// TestComplain: a claim is taken once, from who paid, within what he paid in, and paid when
// the audits are over and an epoch has ended since.
func TestComplain(t *testing.T) {
	o, n, alice, eve := newOffice(t, nil, nil), keyOf("node"), settletest.NewWallet("alice"), settletest.NewWallet("eve")
	b := o.cfg.Books
	q := o.answered(alice.Key, 1)
	o.fillPool(10)
	in := must[insured](t)(b.insured(q.ID))
	most := must[settle.Amount](t)(must[settle.Premiums](t)(b.Premiums(alice.Key)).Left(in.SettledAt/settle.Day, settle.DefaultParams().ClaimsPPM))
	if in.Used != 2000 || in.Fee != 300 || most != 90 {
		t.Fatalf("%+v, premiums for %d", in, most)
	}
	good := Complaint{ID: q.ID, Amount: 80, Format: "v0"}
	ask := func(c Complaint) (Complained, error) { return o.As(n).Complain(t.Context(), c) }
	forged := o.signed(good, alice)
	forged.Amount++
	unpaid := quoteOf(2, alice.Key)
	must[int](t)(0, b.Quote(unpaid))
	for _, tt := range []struct {
		name  string
		c     Complaint
		code  Code
		field string
	}{
		{"no such request", Complaint{ID: settle.QuoteID{9}, Amount: 1}, CodeNotFound, "request"},
		{"an unpaid one", Complaint{ID: unpaid.ID, Amount: 1}, CodeState, "request"},
		{"a node that is not linked", good, CodeRights, "signature"},
		{"another wallet's signature", o.signed(good, eve), CodeRights, "signature"},
		{"another amount than was signed", forged, CodeRights, "signature"},
		{"a format", Complaint{ID: q.ID, Amount: 1, Format: "v7", Signature: settle.Signature{1}}, CodeBad, "format"},
		{"nothing", o.signed(Complaint{ID: q.ID, Format: "raw"}, alice), CodeBad, "amount"},
		{"more than was paid", o.signed(Complaint{ID: q.ID, Amount: 1701, Format: "raw"}, alice), CodeBad, "amount"},
		{"more than its premiums", o.signed(Complaint{ID: q.ID, Amount: most + 1, Format: "raw"}, alice), CodeFunds, "amount"},
	} {
		_, err := ask(tt.c)
		refused(t, tt.name, err, tt.code, tt.field)
	}
	o.link(n, alice)
	due := in.SettledAt + settle.DefaultParams().AuditSeconds
	for _, c := range []Complaint{o.signed(good, alice), good, {ID: q.ID, Amount: 80, Format: "raw"}} { // again is the same
		if got, err := ask(c); err != nil || got != (Complained{Asked: 80, Due: due}) {
			t.Errorf("%+v: %+v, %v", c, got, err)
		}
	}
	_, err := ask(Complaint{ID: q.ID, Amount: 10})
	refused(t, "another amount", err, CodeState, "request")
	had, pool := b.has(t, settle.Balance, alice.Key), b.has(t, settle.Pool, settle.Key{})
	o.nextEpoch(72) // its epoch begins when it is due, and it was due in none before
	o.reopen()
	o.cfg.Books.mustHave(t, settle.Balance, alice.Key, had)
	for range 2 {
		o.nextEpoch(1)
		o.cfg.Books.mustHave(t, settle.Balance, alice.Key, had+80)
		o.cfg.Books.mustHave(t, settle.Pool, settle.Key{}, pool-80)
	}
	if got := must[Complained](t)(ask(good)); got != (Complained{80, due, true, 80}) {
		t.Errorf("afterwards: %+v", got)
	}
}

// TestComplainsInTime: the claim window is a day, and what was not delivered is no claim's.
func TestComplainsInTime(t *testing.T) {
	o, n, alice := newOffice(t, nil, nil), keyOf("node"), settletest.NewWallet("alice")
	o.link(n, alice)
	late, in := o.answered(alice.Key, 1), o.answered(alice.Key, 2)
	failed := quoteOf(3, alice.Key)
	deposit(t, o.cfg.Books, alice.Key, failed.Amount+3)
	must[int](t)(0, o.cfg.Books.Quote(failed))
	must[settle.Request](t)(o.cfg.Books.Debit(failed.ID, alice.Key))
	must[settle.Request](t)(o.cfg.Books.Run(failed.ID, testNow, 9))
	must[Settled](t)(o.conclude(Ended{ID: failed.ID, Failed: "nobody has the layer"}, credited{}))
	_, err := o.As(n).Complain(t.Context(), Complaint{ID: failed.ID, Amount: 1})
	refused(t, "not delivered", err, CodeState, "request")
	o.at.Add(settle.Day)
	must[Complained](t)(o.As(n).Complain(t.Context(), Complaint{ID: in.ID, Amount: 1}))
	o.at.Add(1)
	_, err = o.As(n).Complain(t.Context(), Complaint{ID: late.ID, Amount: 1})
	refused(t, "a day and a second later", err, CodeState, "request")
}

// claimants are payers with a claim each, of what their premiums let them have.
func (o *office) claimants(n uint64) (all []settle.Wallet) {
	o.Helper()
	for i := range n {
		w := keyOf(fmt.Sprint("payer ", i))
		q := o.answered(w, 1+i)
		must[int](o.T)(0, o.cfg.Books.Complain(settle.DefaultParams(), q.ID, w, 90))
		all = append(all, w)
	}
	return all
}

// TestClaimsShare: what is asked of the pool in an epoch is paid from a tenth of it, to each
// his part; claims of an epoch that runs wait for its end.
func TestClaimsShare(t *testing.T) {
	o := newOffice(t, nil, nil)
	b := o.cfg.Books
	first := o.claimants(claimsAtOnce + 3)
	o.at.Add(int64(o.params.EpochSeconds))
	second := o.answered(keyOf("late"), 500)
	must[int](t)(0, b.Complain(settle.DefaultParams(), second.ID, second.Owner, 90))
	pool := b.has(t, settle.Pool, settle.Key{})
	o.nextEpoch(72)
	part := pool / 10 * 90 / settle.Amount(len(first)*90)
	for i, w := range first {
		b.mustHave(t, settle.Balance, w, part+settle.Amount(1+i)) // that much was left of its deposit
	}
	b.mustHave(t, settle.Pool, settle.Key{}, pool-part*settle.Amount(len(first)))
	before := b.has(t, settle.Balance, second.Owner)
	pool = b.has(t, settle.Pool, settle.Key{})
	must[int](t)(0, o.Mature(t.Context()))
	b.mustHave(t, settle.Balance, second.Owner, before)
	o.nextEpoch(1)
	b.mustHave(t, settle.Balance, second.Owner, before+90)
	b.mustHave(t, settle.Pool, settle.Key{}, pool-90)
}

// claimsChild pays what is due, and is killed at the n-th update.
func claimsChild(args []string) error {
	var n int
	var at int64
	if _, err := fmt.Sscan(args[1], &n); err != nil {
		return err
	}
	if _, err := fmt.Sscan(args[2], &at); err != nil {
		return err
	}
	cut = func(string) {
		if n--; n < 0 {
			syscall.Kill(os.Getpid(), syscall.SIGKILL)
			select {}
		}
	}
	b, err := Open(args[0], slog.New(slog.DiscardHandler), func() time.Time { return time.Unix(at, 0) })
	if err != nil {
		return err
	}
	return errors.Join(b.PayClaims(settle.DefaultParams(), claimMoment(at)), b.Close())
}

func claimMoment(at int64) govern.Moment {
	return govern.Moment{At: uint64(at), Epoch: 100, Began: uint64(at) - 5}
}

// TestClaimsKilled kills the process at every update of a round. Whoever goes on comes to
// the same balances, and every claim is paid once.
func TestClaimsKilled(t *testing.T) {
	o := newOffice(t, nil, nil)
	o.claimants(2*claimsAtOnce + 3)
	o.at.Add(int64(o.params.AuditSeconds) + 10)
	must[int](t)(0, o.cfg.Books.Close())
	var want settle.Hash
	for n := 9; n >= 0; n-- { // the first is not killed
		dir := filepath.Join(t.TempDir(), "books")
		must[int](t)(0, errors.Join(os.CopyFS(dir, os.DirFS(o.dir)), copyFile(o.dir+".state", dir+".state")))
		out, err := exec.CommandContext(context.Background(), os.Args[0], "child", "claims", dir, fmt.Sprint(n), fmt.Sprint(o.at.Load())).CombinedOutput()
		var exit *exec.ExitError
		killed := errors.As(err, &exit) && exit.Sys().(syscall.WaitStatus).Signal() == syscall.SIGKILL
		if err != nil && !killed || n < 3 && !killed {
			t.Fatalf("step %d: killed %v, %v\n%s", n, killed, err, out)
		}
		b := openBooks(t, dir)
		for range 2 {
			must[int](t)(0, b.PayClaims(settle.DefaultParams(), claimMoment(o.at.Load())))
		}
		got := b.verified(t).Hash()
		if want == (settle.Hash{}) {
			want = got
		}
		left := 0
		must[int](t)(0, b.store.View(func(tx *kv.Tx) error {
			return page{tx}.eachDue(^uint64(0), func(settle.QuoteID, settle.Amount) error { left++; return nil })
		}))
		if got != want || left > 0 {
			t.Errorf("killed at step %d: %d claims are left, balances %x, want %x", n, left, got[:4], want[:4])
		}
	}
	o.cfg.Books = openBooks(t, o.dir) // for the cleanup
}

func copyFile(from, to string) error {
	raw, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	return os.WriteFile(to, raw, 0o600)
}
