//go:build svm

package cashier

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"kvasird/node/kv"
	"kvasird/settle"
	"kvasird/settle/settletest"
	"kvasird/settle/solana"
)

func init() { children["payout"] = payoutChild }

// bank is a chain with a vault.
type bank struct {
	*settletest.Chain
	mint     settletest.Mint
	operator settletest.Wallet
	genesis  settle.Key
}

func newBank(t *testing.T, vault settle.Amount) *bank {
	w := &bank{Chain: settletest.Start(t)}
	w.operator = w.NewWallet("operator")
	w.mint = w.NewMint("kvr", settletest.Token)
	w.mint.Fund(w.operator.Key, vault)
	w.mint.Open(settletest.NewWallet("alice").Key)
	result, err := w.Call("getGenesisHash")
	if err == nil {
		err = json.Unmarshal(result, &w.genesis)
	}
	if err != nil {
		t.Fatal(err)
	}
	return w
}

func vaultAt(url string, genesis, mint settle.Key, operator settletest.Wallet) (Vault, error) {
	cl, err := solana.New(solana.Config{Providers: []string{url}, Genesis: genesis, Decimals: 6,
		Vault: solana.Vault{Owner: operator.Key, Mint: mint, Program: settletest.Token}, Timeout: 20 * time.Second})
	return keyed{cl, operator.Private, operator.Private}, err
}

func (w *bank) client(t *testing.T) Vault {
	t.Helper()
	return must[Vault](t)(vaultAt(w.URL("a"), w.genesis, w.mint.Key, w.operator))
}

func (w *bank) has(owner settle.Wallet) settle.Amount { return w.Balance(w.mint.ATA(owner)) }

// resolve asks until nothing is open.
func (w *bank) resolve(t *testing.T, b *Books, v Vault) {
	t.Helper()
	for range 20 {
		if open, err := b.Resolve(t.Context(), v); open == 0 && err == nil {
			return
		}
		w.Advance(40)
	}
	t.Fatal("payouts stay open")
}

func TestClaimPays(t *testing.T) {
	w, b := newBank(t, 1000), newBooks(t)
	v, alice, id := w.client(t), settletest.NewWallet("alice").Key, hashOf("claim")
	deposit(t, b, alice, 700)
	for range 3 { // again is the same
		p := must[Payout](t)(b.Claim(t.Context(), v, id, alice, 300))
		if p.Outcome != solana.Pending {
			t.Errorf("at once it is %s", p.Outcome)
		}
	}
	b.mustHave(t, settle.Leaving, alice, 300)
	b.mustHave(t, settle.Balance, alice, 400)
	w.resolve(t, b, v)
	b.mustHave(t, settle.PaidOut, settle.Key{}, 300)
	b.mustHave(t, settle.Leaving, alice, 0)
	if got := w.has(alice); got != 300 {
		t.Errorf("%d arrived", got)
	}
	if p := must[Payout](t)(b.Claim(t.Context(), v, id, alice, 300)); p.Outcome != solana.Landed {
		t.Errorf("afterwards it is %s", p.Outcome)
	}
	for _, tt := range []struct {
		id     settle.Hash
		owner  settle.Wallet
		amount settle.Amount
		want   error
	}{
		{id, alice, 301, ErrOtherClaim}, {id, keyOf("eve"), 300, ErrOtherClaim}, {hashOf(2), alice, 401, settle.ErrFunds},
		{hashOf(3), alice, 0, ErrNothing}, {hashOf(4), w.operator.Key, 1, settle.ErrFunds},
	} {
		if _, err := b.Claim(t.Context(), v, tt.id, tt.owner, tt.amount); !errors.Is(err, tt.want) {
			t.Errorf("%d: %v, want %v", tt.amount, err, tt.want)
		}
	}
	b.verified(t)
	if got := w.has(alice); got != 300 {
		t.Errorf("%d arrived after refusals", got)
	}
}

// TestClaimsAtOnce: of many claims of one balance one is paid at a time, and none beyond
// what it has.
func TestClaimsAtOnce(t *testing.T) {
	w, b := newBank(t, 10_000), newBooks(t)
	v, alice := w.client(t), settletest.NewWallet("alice").Key
	deposit(t, b, alice, 350)
	var paid, refused atomic.Int64
	var all sync.WaitGroup
	for i := range 100 {
		all.Go(func() {
			switch _, err := b.Claim(t.Context(), v, hashOf("claim", i), alice, 50); {
			case err == nil:
				paid.Add(1)
			case errors.Is(err, ErrUnderWay):
				refused.Add(1)
			default:
				t.Error(err)
			}
		})
	}
	all.Wait()
	w.resolve(t, b, v)
	if paid.Load() != 1 || refused.Load() != 99 || w.has(alice) != 50 {
		t.Errorf("%d paid, %d refused, %d arrived, want 1, 99, 50", paid.Load(), refused.Load(), w.has(alice))
	}
	for range 3 { // and one claim three times
		all.Go(func() {
			if _, err := b.Claim(t.Context(), v, hashOf("same"), alice, 300); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	w.resolve(t, b, v)
	if got := w.has(alice); got != 350 {
		t.Errorf("%d arrived", got)
	}
	b.mustHave(t, settle.Balance, alice, 0)
	b.verified(t)
}

// slowVault answers about one payout each time it is asked to resolve, and then stops
// who asks.
type slowVault struct {
	Vault
	stop  context.CancelFunc
	asked []settle.Signature
	had   time.Duration // for the last answer
}

func (v *slowVault) Resolve(ctx context.Context, s solana.Signed) (solana.Outcome, error) {
	v.asked = append(v.asked, s.Signature)
	if end, ok := ctx.Deadline(); ok {
		v.had = time.Until(end)
	}
	v.stop()
	return 0, ctx.Err()
}

// TestResolveGoesOn: when the time is over, the next call asks about those behind, and
// then about the first ones again.
func TestResolveGoesOn(t *testing.T) {
	w, b := newBank(t, 1000), newBooks(t)
	client := w.client(t)
	const owners = 4
	for i := range owners {
		owner := settletest.NewWallet(fmt.Sprint("owner ", i)).Key
		w.mint.Open(owner)
		deposit(t, b, owner, 10)
		must[Payout](t)(b.Claim(t.Context(), client, hashOf("claim", i), owner, 10))
	}
	v := &slowVault{Vault: client}
	for range 2 * owners {
		ctx, stop := context.WithCancel(t.Context())
		v.stop = stop
		if open, err := b.Resolve(ctx, v); open != owners || !errors.Is(err, context.Canceled) {
			t.Fatalf("%d open, %v", open, err)
		}
	}
	seen := map[settle.Signature]int{}
	for _, s := range v.asked {
		seen[s]++
	}
	if len(v.asked) != 2*owners || len(seen) != owners {
		t.Errorf("%d times asked, about %d of %d", len(v.asked), len(seen), owners)
	}
	w.resolve(t, b, client)
}

// TestClaimFails: what the chain will never have is the owner's balance again.
func TestClaimFails(t *testing.T) {
	w, b := newBank(t, 100), newBooks(t) // the vault has less than the books say
	v, alice := w.client(t), settletest.NewWallet("alice").Key
	deposit(t, b, alice, 300)
	must[Payout](t)(b.Claim(t.Context(), v, hashOf(1), alice, 300))
	b.mustHave(t, settle.Balance, alice, 0)
	if open, err := b.Resolve(t.Context(), v); open != 1 || err == nil {
		t.Errorf("an empty vault: %d open, %v", open, err)
	}
	w.resolve(t, b, v)
	b.mustHave(t, settle.Balance, alice, 300)
	b.mustHave(t, settle.PaidOut, settle.Key{}, 0)
	if p, _, err := b.Payout(hashOf(1)); err != nil || p.Outcome != solana.Expired {
		t.Errorf("it is %s, %v", p.Outcome, err)
	}
	w.mint.Fund(w.operator.Key, 200)
	must[Payout](t)(b.Claim(t.Context(), v, hashOf(2), alice, 300))
	w.resolve(t, b, v)
	if got := w.has(alice); got != 300 {
		t.Errorf("%d arrived", got)
	}
	b.verified(t)
}

// TestProviderDown: a provider that does not answer decides nothing.
func TestProviderDown(t *testing.T) {
	w, b := newBank(t, 1000), newBooks(t)
	v, alice := w.client(t), settletest.NewWallet("alice").Key
	deposit(t, b, alice, 300)
	w.Fault(settletest.Fault{HTTP: &settletest.HTTPFault{Status: 503}})
	if _, err := b.Claim(t.Context(), v, hashOf(1), alice, 300); err == nil {
		t.Error("a claim was signed without a chain")
	}
	b.mustHave(t, settle.Balance, alice, 300)
	w.ClearFaults()
	w.Fault(settletest.Fault{Method: "sendTransaction", HTTP: &settletest.HTTPFault{Status: 503}})
	must[Payout](t)(b.Claim(t.Context(), v, hashOf(1), alice, 300))
	w.Fault(settletest.Fault{HTTP: &settletest.HTTPFault{Status: 503}})
	if open, err := b.Resolve(t.Context(), v); open != 1 || err == nil {
		t.Errorf("without a chain: %d open, %v", open, err)
	}
	b.mustHave(t, settle.Leaving, alice, 300)
	w.ClearFaults()
	w.resolve(t, b, v)
	if got := w.has(alice); got != 300 {
		t.Errorf("%d arrived", got)
	}
}

// burning are parameters by which a part of the fee is burnt.
func burning() settle.Params {
	p := settle.DefaultParams()
	p.InsurancePPM, p.BurnPPM, p.TreasuryPPM = 350_000, 350_000, 300_000
	return p
}

// TestBurns: what is to be burnt leaves the vault for nowhere, once in an epoch, and what
// fails stays to be burnt.
func TestBurns(t *testing.T) {
	s := newShop(t)
	s.params = burning()
	s.start()
	r, _ := s.served(2000)
	in, burnt := r.Quote.Amount, r.Quote.Amount*15/100*35/100
	s.cfg.Books.mustHave(t, settle.Burnt, settle.Key{}, burnt)
	for range 3 {
		must[int](t)(0, s.Tick(t.Context()))
	}
	var open []Payout
	must[int](t)(0, s.cfg.Books.store.View(func(tx *kv.Tx) (err error) { open, err = page{tx}.open(); return err }))
	if len(open) != 1 || !open[0].Burn || open[0].Amount != burnt {
		t.Errorf("open: %+v", open)
	}
	s.bank.resolve(t, s.cfg.Books, s.cfg.Vault)
	s.cfg.Books.mustHave(t, settle.Burnt, settle.Key{}, 0)
	s.cfg.Books.mustHave(t, settle.PaidOut, settle.Key{}, burnt)
	s.cfg.Books.verified(t)
	if got := s.has(s.operator.Key); got != in-burnt {
		t.Errorf("the vault has %d, want %d", got, in-burnt)
	}
}

// leaving are the ways in which money leaves, 20 of it, to Alice or to nobody.
var leaving = map[string]func(*Books, Vault) (Payout, error){
	"claim": func(b *Books, v Vault) (Payout, error) {
		return b.Claim(context.Background(), v, hashOf("claim"), settletest.NewWallet("alice").Key, 20)
	},
	"withdrawal": func(b *Books, v Vault) (Payout, error) {
		return b.Withdraw(context.Background(), v, hashOf("withdrawal"), settletest.NewWallet("alice").Key, 20)
	},
	"burn": func(b *Books, v Vault) (Payout, error) { return b.Burn(context.Background(), v, hashOf("burn"), 20) },
}

// payoutChild pays out, and asks until it knows what became of it; it is killed at the
// n-th step that it passes. Its arguments: books, chain, genesis, mint, n, the way.
func payoutChild(args []string) error {
	var n int
	var keys [2]settle.Key
	for i, text := range args[2:4] {
		raw, err := hex.DecodeString(text)
		if err != nil || copy(keys[i][:], raw) != len(keys[i]) {
			return fmt.Errorf("key %q: %w", text, err)
		}
	}
	if _, err := fmt.Sscan(args[4], &n); err != nil {
		return err
	}
	cut = func(string) {
		if n--; n < 0 {
			syscall.Kill(os.Getpid(), syscall.SIGKILL)
			select {}
		}
	}
	b, err := Open(args[0], slog.New(slog.DiscardHandler), func() time.Time { return time.Unix(testNow, 0) })
	if err != nil {
		return err
	}
	v, err := vaultAt(args[1], keys[0], keys[1], settletest.NewWallet("operator"))
	if err != nil {
		return err
	}
	if _, err := leaving[args[5]](b, v); err != nil {
		return err
	}
	for {
		open, err := b.Resolve(context.Background(), v)
		if open == 0 {
			return err
		}
		time.Sleep(300 * time.Millisecond) // each time is a step
	}
}

// TestPayoutKilled kills the process at every step of a payout. After a restart it is
// paid, once.
func TestPayoutKilled(t *testing.T) {
	for way := range leaving {
		for n := 0; payoutKilled(t, way, n); n++ {
			if n == 20 {
				t.Fatalf("%s: no end after %d steps", way, n)
			}
		}
	}
}

// payoutKilled says whether the process was killed before it was done.
func payoutKilled(t *testing.T, way string, n int) bool {
	alice, dir := settletest.NewWallet("alice").Key, filepath.Join(t.TempDir(), "books")
	w, b := newBank(t, 5000), openBooks(t, dir)
	steps := paidByBalance(quoteOf(1, alice), alice)
	for _, s := range steps[:len(steps)-1] {
		must[int](t)(0, s.do(b))
	}
	must[settle.Outcome](t)(b.Settle(burning(), settling(quoteOf(1, alice).ID, 500))) // that fills the treasury too
	had, ids := map[settle.Kind]settle.Amount{}, map[settle.Kind]settle.Key{settle.Balance: alice, settle.Treasury: {}, settle.Burnt: {}}
	for kind, id := range ids {
		if had[kind] = must[settle.Amount](t)(b.Balance(settle.Account{Kind: kind, ID: id})); had[kind] < 20 {
			t.Fatalf("%s has %d: too little to see anything", kind, had[kind])
		}
	}
	had[map[string]settle.Kind{"claim": settle.Balance, "withdrawal": settle.Treasury, "burn": settle.Burnt}[way]] -= 20
	arrive := settle.Amount(20)
	if way == "burn" {
		arrive = 0
	}
	must[int](t)(0, b.Close())
	killed := runKilled(t, w, dir, way, n)
	b = openBooks(t, dir)
	v := w.client(t)
	b.verified(t)
	w.resolve(t, b, v) // as a start does
	if n > 0 {         // it was written down: nobody has to ask again
		b.mustHave(t, settle.PaidOut, settle.Key{}, 20)
	}
	must[Payout](t)(leaving[way](b, v))
	w.resolve(t, b, v)
	w.Advance(400)
	b.mustHave(t, settle.PaidOut, settle.Key{}, 20)
	for kind, id := range ids {
		b.mustHave(t, kind, id, had[kind])
	}
	if got, left := w.has(alice), w.has(w.operator.Key); got != arrive || left != 5000-20 {
		t.Errorf("%s killed at step %d: %d arrived, the vault has %d", way, n, got, left)
	}
	b.verified(t)
	if !killed && n < 5 {
		t.Errorf("%s: the process was killed at %d steps only", way, n)
	}
	return killed
}

// runKilled runs payoutChild while slots pass, so that its payout becomes final.
func runKilled(t *testing.T, w *bank, dir, way string, n int) (killed bool) {
	t.Helper()
	cmd := exec.Command(os.Args[0], "child", "payout", dir, w.URL("a"), hex.EncodeToString(w.genesis[:]), hex.EncodeToString(w.mint.Key[:]), fmt.Sprint(n), way)
	ended := make(chan struct{})
	var all sync.WaitGroup
	all.Go(func() {
		for {
			select {
			case <-ended:
				return
			case <-time.After(20 * time.Millisecond):
				w.Advance(1) // a transaction has three seconds to land
			}
		}
	})
	out, err := cmd.CombinedOutput()
	close(ended)
	all.Wait()
	var exit *exec.ExitError
	killed = errors.As(err, &exit) && exit.Sys().(syscall.WaitStatus).Signal() == syscall.SIGKILL
	if err != nil && !killed {
		t.Fatalf("%s, step %d: %v\n%s", way, n, err, out)
	}
	return killed
}
