package cashier

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"kvasird/node/kv"
	"kvasird/settle"
)

// testNow is the time of these tests, in Unix seconds.
const testNow = 1_800_000_000

// The test binary is also the process that a test kills.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == "child" {
		if err := child(os.Args[2:]); err != nil {
			fmt.Println(err)
			os.Exit(3)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// children are what child processes do, by name.
var children = map[string]func(args []string) error{"request": requestChild}

func child(args []string) error { return children[args[0]](args[1:]) }

func openBooks(t testing.TB, dir string) *Books {
	t.Helper()
	b, err := Open(dir, slog.New(slog.DiscardHandler), func() time.Time { return time.Unix(testNow, 0) })
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := b.Close(); err != nil {
			t.Error(err)
		}
	})
	return b
}

func newBooks(t testing.TB) *Books {
	t.Helper()
	return openBooks(t, filepath.Join(t.TempDir(), "books"))
}

func keyOf(name string) settle.Key { return sha256.Sum256([]byte(name)) }

func hashOf(v ...any) settle.Hash { return sha256.Sum256(fmt.Append(nil, v...)) }

// testParts is one part, so that a worker that did all of it has all of the pay.
var testParts = []settle.Part{{Weight: 1, PerToken: 1}}

func quoteOf(n uint64, owner settle.Wallet) settle.Quote {
	q, err := settle.NewQuote(settle.Quote{
		ID: settle.QuoteID(binary.BigEndian.AppendUint64(make([]byte, 8), n)), Model: "m", PromptTokens: 1000, AnswerTokens: 1000,
		RequestHash: hashOf("body", n), PriceRecord: hashOf("price"), PriceRaw: 1_000_000_000_000, Ref: 1_000_000, Entry: keyOf("entry"), Owner: owner,
		Created: testNow - 5, Expires: testNow + 50, ClaimHash: hashOf("secret"),
	}, 0)
	if err != nil {
		panic(err)
	}
	return q
}

func must[T any](t testing.TB) func(T, error) T {
	return func(v T, err error) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}

// deposit brings money in.
func deposit(t testing.TB, b *Books, owner settle.Wallet, amount settle.Amount) {
	t.Helper()
	e, err := settle.DepositEntry(settle.Payment{Message: hashOf("deposit", owner, amount), Payer: owner, Amount: amount}, testNow)
	must[bool](t)(b.Post(must[settle.Entry](t)(e, err)))
}

func (b *Books) mustHave(t testing.TB, kind settle.Kind, id settle.Key, want settle.Amount) {
	t.Helper()
	if got, err := b.Balance(settle.Account{Kind: kind, ID: id}); err != nil || got != want {
		t.Errorf("%s of %s is %d, %v, want %d", kind, id, got, err, want)
	}
}

func (b *Books) verified(t testing.TB) *settle.Ledger {
	t.Helper()
	return must[*settle.Ledger](t)(b.Verify())
}

func settling(id settle.QuoteID, tokens uint64) settle.Settling {
	return settle.Settling{
		Job:  settle.Job{Request: settle.Request{Quote: settle.Quote{ID: id}}, Parts: testParts},
		Work: []settle.Work{{Worker: keyOf("worker"), Lines: []settle.Line{{Part: 0, Units: tokens}}}}, Timing: settle.OnTime, Epoch: 9,
	}
}

// step is one of a request's steps; each may be done again.
type step struct {
	name string
	do   func(b *Books) error
}

// paidByChain and paidByBalance are a request from its quote to its end.
func paidByChain(q settle.Quote, payer settle.Wallet) []step {
	proof := settle.Payment{Signature: settle.Signature{7}, Message: hashOf("message"), Memo: q.ID.Memo(), Payer: payer, Amount: q.Amount + 11, Slot: 5, Time: testNow}
	steps := []step{
		{"quote", func(b *Books) error { return again(b.Quote(q), settle.ErrQuote) }},
		{"reserve", func(b *Books) error {
			_, err := b.Reserve(q.ID, proof.Signature, testNow)
			return again(err, settle.ErrState)
		}},
		{"pay", func(b *Books) error { _, err := b.Pay(q.ID, proof); return err }},
	}
	return append(steps, served(q)...)
}

func paidByBalance(q settle.Quote, payer settle.Wallet) []step {
	e, err := settle.DepositEntry(settle.Payment{Message: hashOf("deposit"), Payer: payer, Amount: q.Amount + 11}, testNow)
	if err != nil {
		panic(err)
	}
	steps := []step{
		{"deposit", func(b *Books) error { _, err := b.Post(e); return err }},
		{"quote", func(b *Books) error { return again(b.Quote(q), settle.ErrQuote) }},
		{"debit", func(b *Books) error { _, err := b.Debit(q.ID, payer); return again(err, settle.ErrState) }},
	}
	return append(steps, served(q)...)
}

func served(q settle.Quote) []step {
	return []step{
		{"run", func(b *Books) error { _, err := b.Run(q.ID, testNow, 9); return again(err, settle.ErrState) }},
		{"end", func(b *Books) error {
			_, err := b.End(q.ID, 500, "the worker left")
			return again(err, settle.ErrState)
		}},
		{"settle", func(b *Books) error {
			_, err := b.Settle(settle.DefaultParams(), settling(q.ID, 500))
			return again(err, ErrSettled)
		}},
	}
}

// again takes the refusal of a step that was done before for its success.
func again(err, done error) error {
	if errors.Is(err, done) {
		return nil
	}
	return err
}

var requestWays = map[string]func(settle.Quote, settle.Wallet) []step{"chain": paidByChain, "balance": paidByBalance}

// requestChild does the first steps of a request, and is killed.
func requestChild(args []string) error {
	b, err := Open(args[0], slog.New(slog.DiscardHandler), func() time.Time { return time.Unix(testNow, 0) })
	if err != nil {
		return err
	}
	var n int
	if _, err := fmt.Sscan(args[2], &n); err != nil {
		return err
	}
	for _, s := range requestWays[args[1]](quoteOf(1, keyOf("alice")), keyOf("alice"))[:n] {
		if err := s.do(b); err != nil {
			return fmt.Errorf("%s: %w", s.name, err)
		}
	}
	return syscall.Kill(os.Getpid(), syscall.SIGKILL)
}

// TestRequestKilled kills the process after every step of a request. Who begins all over
// comes to the same end, and the sums hold.
func TestRequestKilled(t *testing.T) {
	q, alice := quoteOf(1, keyOf("alice")), keyOf("alice")
	for way, make := range requestWays {
		steps := make(q, alice)
		for n := range len(steps) + 1 {
			dir := filepath.Join(t.TempDir(), "books")
			out, err := exec.Command(os.Args[0], "child", "request", dir, way, fmt.Sprint(n)).CombinedOutput()
			var exit *exec.ExitError
			if !errors.As(err, &exit) || exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
				t.Fatalf("%s, %d steps: %v\n%s", way, n, err, out)
			}
			b := openBooks(t, dir)
			b.verified(t)
			for range 2 {
				for _, s := range steps {
					if err := s.do(b); err != nil {
						t.Fatalf("%s, killed after %d steps, again %s: %v", way, n, s.name, err)
					}
				}
			}
			l := b.verified(t)
			used := must[settle.Amount](t)(q.Used(500))
			b.mustHave(t, settle.Balance, alice, q.Amount-used+11)
			b.mustHave(t, settle.Inflow, settle.Key{}, q.Amount+11)
			if pay, _ := l.Balance(settle.Account{Kind: settle.Held, ID: keyOf("worker")}); pay == 0 {
				t.Errorf("%s, killed after %d steps: the worker has nothing: %+v", way, n, l.Accounts())
			}
			if r := must[settle.Request](t)(b.Request(q.ID)); r.State != settle.Credit {
				t.Errorf("%s, killed after %d steps: the request is %s", way, n, r.State)
			}
		}
	}
}

// TestOneSignature: of many that claim one signature, for requests of their own, one has
// it; when the chain says no, the next one may.
func TestOneSignature(t *testing.T) {
	b := newBooks(t)
	const callers = 50
	sig := settle.Signature{1}
	var has atomic.Int64
	var all sync.WaitGroup
	for i := range uint64(callers) {
		must[int](t)(0, b.Quote(quoteOf(i+1, settle.Wallet{})))
		all.Go(func() {
			switch _, err := b.Reserve(quoteOf(i+1, settle.Wallet{}).ID, sig, testNow+9); {
			case err == nil:
				if !has.CompareAndSwap(0, int64(i+1)) {
					t.Error("two requests have the signature")
				}
			case !errors.Is(err, ErrUsed):
				t.Error(err)
			}
		})
	}
	all.Wait()
	if has.Load() == 0 {
		t.Fatal("nobody has the signature")
	}
	first, other := quoteOf(uint64(has.Load()), settle.Wallet{}).ID, quoteOf(uint64(has.Load())%callers+1, settle.Wallet{}).ID
	if _, err := b.Reserve(first, sig, testNow+9); !errors.Is(err, settle.ErrLease) {
		t.Errorf("a second caller of the same request: %v", err)
	}
	r := must[settle.Request](t)(b.Refuse(first, "it pays somebody else"))
	if r.State != settle.Open || r.Reason != "it pays somebody else" {
		t.Errorf("after a refusal: %+v", r)
	}
	must[settle.Request](t)(b.Reserve(other, sig, testNow+9))
}

// TestPaymentOnce: what came in for one thing is never booked for another, whatever
// signature it comes under.
func TestPaymentOnce(t *testing.T) {
	b, q, alice := newBooks(t), quoteOf(1, settle.Wallet{}), keyOf("alice")
	for _, s := range paidByChain(q, alice)[:3] {
		if err := s.do(b); err != nil {
			t.Fatal(err)
		}
	}
	e := must[settle.Entry](t)(settle.DepositEntry(settle.Payment{Message: hashOf("message"), Payer: alice, Amount: q.Amount}, testNow))
	if _, err := b.Post(e); !errors.Is(err, settle.ErrKeyReused) {
		t.Errorf("a payment is booked as a deposit too: %v", err)
	}
	q2 := quoteOf(2, settle.Wallet{})
	must[int](t)(0, b.Quote(q2))
	must[settle.Request](t)(b.Reserve(q2.ID, settle.Signature{8}, testNow))
	if _, err := b.Pay(q2.ID, settle.Payment{Signature: settle.Signature{8}, Message: hashOf("message"), Memo: q2.ID.Memo(), Payer: alice,
		Amount: q2.Amount, Slot: 5, Time: testNow}); !errors.Is(err, settle.ErrKeyReused) {
		t.Errorf("one message under another signature pays a second request: %v", err)
	}
	if r := must[settle.Request](t)(b.Request(q2.ID)); r.State != settle.Reserved {
		t.Errorf("after the refusal the request is %s", r.State)
	}
	b.verified(t)
}

func TestLatePaymentIsCredit(t *testing.T) {
	for what, change := range map[string]func(*settle.Payment){
		"late":  func(p *settle.Payment) { p.Time = testNow + 51 },
		"short": func(p *settle.Payment) { p.Amount-- },
	} {
		b, q, alice := newBooks(t), quoteOf(1, settle.Wallet{}), keyOf("alice")
		proof := settle.Payment{Signature: settle.Signature{7}, Message: hashOf("message"), Memo: q.ID.Memo(), Payer: alice, Amount: q.Amount, Slot: 5, Time: testNow}
		change(&proof)
		must[int](t)(0, b.Quote(q))
		must[settle.Request](t)(b.Reserve(q.ID, proof.Signature, testNow))
		for range 2 {
			if r := must[settle.Request](t)(b.Pay(q.ID, proof)); r.State != settle.Credit {
				t.Errorf("%s: the request is %s", what, r.State)
			}
		}
		b.mustHave(t, settle.Balance, alice, proof.Amount)
		if _, err := b.Run(q.ID, testNow, 9); !errors.Is(err, settle.ErrState) {
			t.Errorf("%s: it runs: %v", what, err)
		}
		b.verified(t)
	}
}

func TestBooksRefuse(t *testing.T) {
	b, q := newBooks(t), quoteOf(1, settle.Wallet{})
	if _, err := b.Request(q.ID); !errors.Is(err, ErrNoQuote) {
		t.Error(err)
	}
	must[int](t)(0, b.Quote(q))
	if err := b.Quote(q); !errors.Is(err, settle.ErrQuote) {
		t.Errorf("the same id twice: %v", err)
	}
	if _, err := b.Debit(q.ID, keyOf("poor")); !errors.Is(err, settle.ErrFunds) {
		t.Errorf("a debit without a balance: %v", err)
	}
	if r := must[settle.Request](t)(b.Request(q.ID)); r.State != settle.Open {
		t.Errorf("after a debit that failed the request is %s", r.State)
	}
	if _, err := b.Settle(settle.DefaultParams(), settling(q.ID, 1)); !errors.Is(err, settle.ErrState) {
		t.Errorf("an open request is settled: %v", err)
	}
}

// TestVerifySees damage of every kind that a record can have.
func TestVerifySees(t *testing.T) {
	for what, harm := range map[string]func(*kv.Tx) error{
		"a balance": func(tx *kv.Tx) error { return tx.Put(balanceKey(settle.Account{Kind: settle.Pool}), make([]byte, 8)) },
		"a new one": func(tx *kv.Tx) error {
			return tx.Put(balanceKey(settle.Account{Kind: settle.Treasury}), []byte("\x00\x00\x00\x00\x00\x00\x00\x01"))
		},
		"one gone": func(tx *kv.Tx) error { return tx.Delete(balanceKey(settle.Account{Kind: settle.Pool})) },
		"an entry": func(tx *kv.Tx) error { return tx.Put(journalKey(1), []byte{0xa0}) },
		"no entry": func(tx *kv.Tx) error { return tx.Delete(journalKey(1)) },
		"entry twice": func(tx *kv.Tx) error {
			v, _, err := tx.Get(journalKey(1))
			return errors.Join(err, tx.Put(journalKey(2), v))
		},
		"a number": func(tx *kv.Tx) error { return tx.Put(balanceKey(settle.Account{Kind: settle.Pool}), []byte{1}) },
	} {
		b := newBooks(t)
		e := must[settle.Entry](t)(settle.NewEntry(settle.ActFund, hashOf("fund"), testNow,
			settle.Transfer{From: settle.Account{Kind: settle.Inflow}, To: settle.Account{Kind: settle.Pool}, Amount: 5}))
		must[bool](t)(b.Post(e))
		b.verified(t)
		must[int](t)(0, b.store.Update(harm))
		if _, err := b.Verify(); !errors.Is(err, ErrBooks) {
			t.Errorf("%s: %v", what, err)
		}
	}
}

// TestHistories runs many requests at a time, at random, and opens the books again: the
// journal replays to what is kept, and nothing was made or lost.
func TestHistories(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "books")
	b := openBooks(t, dir)
	owners := []settle.Wallet{keyOf("a"), keyOf("b"), keyOf("c")}
	for _, o := range owners {
		deposit(t, b, o, 20*quoteOf(1, o).Amount)
	}
	var all sync.WaitGroup
	for c := range uint64(8) {
		all.Go(func() {
			rng := rand.New(rand.NewPCG(1, c))
			for i := range uint64(20) {
				owner := owners[rng.IntN(3)]
				q := quoteOf(1+c*100+i, owner)
				tokens := rng.Uint64N(2000)
				steps := []func() error{
					func() error { return b.Quote(q) },
					func() error { _, err := b.Debit(q.ID, owner); return err },
					func() error { _, err := b.Run(q.ID, testNow, 9); return err },
					func() error { _, err := b.End(q.ID, tokens, []string{"", "lost"}[rng.IntN(2)]); return err },
					func() error { _, err := b.Settle(settle.DefaultParams(), settling(q.ID, tokens)); return err },
				}
				for n, s := range steps[:1+rng.IntN(len(steps))] {
					if err := s(); err != nil {
						if n != 1 || !errors.Is(err, settle.ErrFunds) {
							t.Errorf("step %d: %v", n, err)
						}
						break
					}
				}
			}
		})
	}
	all.Wait()
	before := b.verified(t)
	if err := b.Close(); err != nil {
		t.Fatal(err)
	}
	b = openBooks(t, dir)
	after := b.verified(t)
	if before.Hash() != after.Hash() || !slices.Equal(before.Accounts(), after.Accounts()) {
		t.Error("the books changed by being opened")
	}
	b.mustHave(t, settle.Inflow, settle.Key{}, 60*quoteOf(1, owners[0]).Amount)
}

// BenchmarkBooks: quotes that prepaid balances pay, or that signatures are reserved for,
// both on the disk before they count.
func BenchmarkBooks(b *testing.B) {
	ways := map[string]func(*Books, settle.Quote) error{
		"debits": func(books *Books, q settle.Quote) error { _, err := books.Debit(q.ID, q.Owner); return err },
		"reservations": func(books *Books, q settle.Quote) error {
			_, err := books.Reserve(q.ID, settle.Signature(append(make([]byte, 48), q.ID[:]...)), testNow)
			return err
		},
	}
	for _, accounts := range []int{1_000, 1_000_000} {
		books := newBooks(b)
		owner := func(i int) settle.Wallet { return keyOf(fmt.Sprint("owner", i)) }
		fill(b, books, accounts, owner)
		id := uint64(0)
		for _, callers := range []int{1, 256} {
			for what, do := range ways {
				b.Run(fmt.Sprintf("accounts=%d/callers=%d/%s", accounts, callers, what), func(b *testing.B) {
					benchBooks(b, books, callers, what, do, func(i int) settle.Quote { return quoteOf(id+uint64(i)+1, owner(1+i*7919%accounts)) })
					id += uint64(b.N)
				})
			}
		}
	}
}

// fill gives so many owners a balance.
func fill(b *testing.B, books *Books, accounts int, owner func(int) settle.Wallet) {
	var next atomic.Int64
	inParallel(512, func() {
		for i := next.Add(1); i <= int64(accounts); i = next.Add(1) {
			e, err := settle.DepositEntry(settle.Payment{Message: hashOf(i), Payer: owner(int(i)), Amount: 1 << 40}, testNow)
			if err == nil {
				_, err = books.Post(e)
			}
			if err != nil {
				b.Error(err)
				return
			}
		}
	})
}

func benchBooks(b *testing.B, books *Books, callers int, what string, do func(*Books, settle.Quote) error, quote func(int) settle.Quote) {
	times := make([]time.Duration, b.N)
	var next atomic.Int64
	inParallel(callers, func() {
		for i := next.Add(1) - 1; i < int64(b.N); i = next.Add(1) - 1 {
			q, began := quote(int(i)), time.Now()
			err := books.Quote(q)
			if err == nil {
				err = do(books, q)
			}
			if err != nil {
				b.Error(err)
				return
			}
			times[i] = time.Since(began)
		}
	})
	slices.Sort(times)
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), what+"/s")
	b.ReportMetric(times[len(times)*99/100].Seconds()*1e3, "p99-ms")
}

func inParallel(n int, fn func()) {
	var all sync.WaitGroup
	for range n {
		all.Go(fn)
	}
	all.Wait()
}

func TestOpenRefuses(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "books")
	openBooks(t, dir)
	if _, err := Open(dir, slog.New(slog.DiscardHandler), nil); !errors.Is(err, kv.ErrBusy) || !strings.Contains(err.Error(), dir) {
		t.Errorf("opened twice: %v", err)
	}
}
