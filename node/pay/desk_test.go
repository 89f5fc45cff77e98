//go:build svm

package pay

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"kvasird/node/cashier"
	"kvasird/settle"
	"kvasird/settle/govern"
	"kvasird/settle/settletest"
	"kvasird/settle/solana"
)

// devnet is a cluster that x402 clients know. The local chain passes for it.
var devnet = must(settle.ParseKey("EtWTRABZaYq6iMfeYKouRu166VU2xqa1wcaWoxPkrZBG"))

const modelID = "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff"

// keyed is a client with the keys of the vault.
type keyed struct {
	*solana.Client
	vault, fee ed25519.PrivateKey
}

func (k keyed) Sign(ctx context.Context, p solana.Payout) (solana.Signed, error) {
	return k.Client.Sign(ctx, k.vault, k.fee, p)
}

// square is a shop whose settlement is a desk on a local chain.
type square struct {
	*shop
	chain    *settletest.Chain
	mint     settletest.Mint
	operator settletest.Wallet
	books    *cashier.Books
	desk     *cashier.Teller
}

func newSquare(t *testing.T) *square {
	t.Helper()
	s := &square{shop: &shop{t: t}, chain: settletest.StartTicking(t, 20*time.Millisecond)}
	s.chain.Fault(settletest.Fault{Method: "getGenesisHash", Result: must(json.Marshal(devnet))})
	s.operator = s.chain.NewWallet("operator")
	s.mint = s.chain.NewMint("kvr", settletest.Token)
	s.mint.Fund(s.operator.Key, 1)
	worker := oneWorker{settletest.NewWallet("worker").Private, new(atomic.Uint64)}
	entry := settletest.NewWallet("entry")
	s.worker = worker.node()
	s.openDesk(entry.Key)
	s.serve(Config{Settlement: s.desk, Key: entry.Private, Meter: worker, Wait: 20 * time.Second}, words{}, modelID)
	return s
}

func (s *square) openDesk(entry settle.Node) {
	s.t.Helper()
	fee := s.chain.NewWallet("fee payer")
	client := must(solana.New(solana.Config{Providers: []string{s.chain.URL("a")}, Genesis: devnet, Decimals: 6, Timeout: 20 * time.Second,
		Vault: solana.Vault{Owner: s.operator.Key, Mint: s.mint.Key, Program: settletest.Token}}))
	if err := client.Check(s.t.Context()); err != nil {
		s.t.Fatal(err)
	}
	s.books = must(cashier.Open(filepath.Join(s.t.TempDir(), "books"), slog.New(slog.DiscardHandler), nil))
	s.t.Cleanup(func() {
		if _, err := s.books.Verify(); err != nil {
			s.t.Error(err)
		}
		if err := s.books.Close(); err != nil {
			s.t.Error(err)
		}
	})
	network, began := settle.Hash(keyOf("network")), time.Now()
	_, sealed, err := govern.NewSecret(bytes.NewReader(bytes.Repeat([]byte{7}, 64)), [32]byte{9}, network)
	if err != nil {
		s.t.Fatal(err)
	}
	governor := must(govern.Open(govern.Config{Since: uint64(began.Unix()), Store: s.books.GovernStore(), Secret: sealed, Key: [32]byte{9},
		Authority: govern.Authority{Network: network, Cluster: devnet, Wallets: []settle.Wallet{s.operator.Key}, Threshold: 1, Params: settle.DefaultParams()}}))
	desk := must(cashier.OpenDesk(cashier.DeskConfig{Network: network, Cluster: devnet, Key: settletest.NewWallet("settlement").Private, Books: s.books,
		Chain: client, Vault: keyed{client, s.operator.Private, fee.Private}, Governor: governor, Decimals: 6, FirstRaw: 1e12, Began: began,
		Fee: fee.Private,
		Models: func(string, settle.Node) (cashier.Model, error) {
			return cashier.Model{Name: "m", Parts: []settle.Part{{Weight: 1, PerToken: 1}}}, nil
		}}))
	s.desk = desk.As(entry)
}

// vault is what is in it beyond what it began with.
func (s *square) vault() settle.Amount { return s.chain.Balance(s.mint.ATA(s.operator.Key)) - 1 }

func (s *square) balance(kind settle.Kind, id settle.Key) settle.Amount {
	s.t.Helper()
	return must(s.books.Balance(settle.Account{Kind: kind, ID: id}))
}

// until asks again as the answers say, which is sooner here.
func (s *square) until(text string, header ...string) *answer {
	s.t.Helper()
	for range 200 {
		a := s.post(text, header...)
		if a.status != 503 {
			return a
		}
		time.Sleep(50 * time.Millisecond)
	}
	s.t.Fatal("it stays 503")
	return nil
}

// settled waits until a request gave back what it did not use.
func (s *square) settled(payer settle.Wallet, want settle.Amount) {
	s.t.Helper()
	for range 200 {
		if s.balance(settle.Balance, payer) == want {
			return
		}
		time.Sleep(20 * time.Millisecond)
	}
	s.t.Errorf("%s has %d back, want %d", payer, s.balance(settle.Balance, payer), want)
}

// A wallet pays a real quote on the chain, is answered, and gets the rest back; the
// worker has its pay.
func TestDeskTransfer(t *testing.T) {
	s := newSquare(t)
	alice := s.chain.NewWallet("alice")
	from := s.mint.Fund(alice.Key, 100_000)
	o := s.post(body).offer(t)
	if o.Amount != quoted || o.Vault != s.mint.ATA(s.operator.Key) || o.Cluster != devnet {
		t.Fatalf("got %+v", o)
	}
	short := s.post(body).offer(t)
	sig := s.chain.Run([]settletest.Wallet{alice}, s.mint.TransferChecked(from, o.Vault, alice.Key, o.Amount), settletest.Memo(o.Memo, alice.Key))
	s.until(body, byTransfer(o, sig, settletest.NewWallet("eve").Key)...).is(t, "as Eve", 402, "payment_required")
	s.post(body, byTransfer(short, sig, alice.Key)...) // it pays another quote: refused once it is final
	a := s.until(body, byTransfer(o, sig, alice.Key)...)
	if a.status != 200 || !strings.Contains(a.body, `"text":"xxxx"`) {
		t.Fatalf("%d %s", a.status, a.body)
	}
	s.settled(alice.Key, quoted-used)
	if got := s.balance(settle.Held, s.worker) + s.balance(settle.Bonded, s.worker); got != used*85/100 {
		t.Errorf("the worker has %d, want %d", got, used*85/100)
	}
	s.until(body, byTransfer(o, sig, alice.Key)...).is(t, "again", 409, "already_answered")
	if s.vault() != quoted {
		t.Errorf("the vault has %d, want %d", s.vault(), quoted)
	}
}

// TestX402Client runs the tests in testdata/x402, whose packages `make test-x402`
// installs: the client of the x402 project pays over HTTP and gets its answers.
func TestX402Client(t *testing.T) {
	if _, err := os.Stat("testdata/x402/node_modules"); err != nil {
		t.Fatal("the client is missing: run make x402-deps")
	}
	s := newSquare(t)
	alice, poor := s.chain.NewWallet("alice"), s.chain.NewWallet("poor")
	from := s.mint.Fund(alice.Key, 100_000)
	s.mint.Open(poor.Key)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, "node", "--test", "--test-reporter=spec", "--test-concurrency=1")
	cmd.Dir = "testdata/x402"
	cmd.Env = append(os.Environ(), "KVASIR_URL="+s.url, "KVASIR_RPC="+s.chain.URL("a"),
		"KVASIR_MINT="+s.mint.Key.String(), "KVASIR_SEED="+hex.EncodeToString(alice.Private.Seed()), "KVASIR_POOR="+hex.EncodeToString(poor.Private.Seed()))
	out, err := cmd.CombinedOutput()
	if err != nil || !strings.Contains(string(out), "ℹ pass 4\n") {
		t.Fatalf("%v\n%s", err, out)
	}
	const paid = 3
	s.settled(alice.Key, paid*(quoted-used))
	if s.vault() != paid*quoted || s.chain.Balance(from) != 100_000-paid*quoted {
		t.Errorf("the vault has %d, alice has %d", s.vault(), s.chain.Balance(from))
	}
	if got := s.balance(settle.Held, s.worker) + s.balance(settle.Bonded, s.worker); got != paid*used*85/100 {
		t.Errorf("the worker has %d, want %d", got, paid*used*85/100)
	}
	t.Logf("%s%s", out, fmt.Sprintf("the vault has %d\n", s.vault()))
}
