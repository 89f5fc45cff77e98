//go:build svm

package solana

import (
	"encoding/json"
	"fmt"
	"slices"
	"testing"
	"time"

	sdk "github.com/gagliardetto/solana-go"

	"kvasird/settle"
	"kvasird/settle/settletest"
)

// price is what every quote of these tests asks.
const price = 100_000

// world is a chain with tokens, wallets and a vault for each token.
type world struct {
	*settletest.Chain
	t *testing.T

	mint, other, fee, wsol, drained settletest.Mint
	operator, operator2             settletest.Wallet // of the vaults; of the same people
	alice, bob, eve                 settletest.Wallet
	forwarder, genesis              settle.Key
	alarms                          []error
	memos                           int
	timeout                         time.Duration
}

func newWorld(t *testing.T) *world {
	w := &world{Chain: settletest.Start(t), t: t, timeout: 20 * time.Second}
	for _, p := range []struct {
		name string
		w    *settletest.Wallet
	}{{"operator", &w.operator}, {"operator 2", &w.operator2}, {"alice", &w.alice}, {"bob", &w.bob}, {"eve", &w.eve}} {
		*p.w = w.NewWallet(p.name)
	}
	w.mint = w.NewMint("kvr", settletest.Token)
	w.other = w.NewMint("other", settletest.Token)
	w.fee = w.NewMint("fee", settletest.Token2022, settletest.TransferFee(w.eve.Key, 100))
	w.drained = w.NewMint("delegate", settletest.Token2022, settletest.PermanentDelegate(w.eve.Key))
	for _, m := range []settletest.Mint{w.mint, w.other, w.fee, w.drained} {
		for _, p := range []settletest.Wallet{w.operator2, w.alice, w.bob, w.eve} {
			m.Fund(p.Key, 100*price)
		}
		m.Fund(w.operator.Key, 100*price)
	}
	w.wsol = w.Native()
	for _, p := range []settletest.Wallet{w.operator, w.alice, w.eve} {
		w.Run([]settletest.Wallet{p}, settletest.CreateATA(p.Key, p.Key, w.wsol.Key, w.wsol.Program),
			settletest.SendSOL(p.Key, w.wsol.ATA(p.Key), 100*price), w.wsol.SyncNative(w.wsol.ATA(p.Key)))
	}
	w.forwarder = w.AddForwarder("forwarder")
	result, err := w.Call("getGenesisHash")
	if err == nil {
		err = json.Unmarshal(result, &w.genesis)
	}
	if err != nil {
		t.Fatal(err)
	}
	return w
}

// client is one of the vault of a token, by default the first.
func (w *world) client(m settletest.Mint, providers ...string) *Client {
	w.t.Helper()
	if m.Key == (settle.Key{}) {
		m = w.mint
	}
	cfg := Config{Genesis: w.genesis, Vault: Vault{Owner: w.operator.Key, Mint: m.Key, Program: m.Program}, Decimals: m.Decimals,
		Operators: []settle.Wallet{w.operator2.Key}, Timeout: w.timeout, Alarm: func(err error) { w.alarms = append(w.alarms, err) }}
	for _, p := range providers {
		cfg.Providers = append(cfg.Providers, w.URL(p))
	}
	cl, err := New(cfg)
	if err != nil {
		w.t.Fatal(err)
	}
	return cl
}

// vault is the vault's account of the first token.
func (w *world) vault() settle.Key { return w.mint.ATA(w.operator.Key) }

func (w *world) memo() string {
	w.memos++
	return fmt.Sprintf("kvr1:%032x", w.memos)
}

func (w *world) wallets(ws ...settletest.Wallet) []settletest.Wallet { return ws }

// transfer is a transfer of the price from a wallet's account to the vault.
func (w *world) transfer(from settletest.Wallet, amount settle.Amount) settletest.Instruction {
	return w.mint.TransferChecked(w.mint.ATA(from.Key), w.vault(), from.Key, amount)
}

// claimOf sends instructions with a memo that Alice signs, and claims them for her.
func (w *world) claimOf(signers []settletest.Wallet, in ...settletest.Instruction) Claim {
	w.t.Helper()
	memo := w.memo()
	sig := w.Run(signers, append(in, settletest.Memo(memo, w.alice.Key))...)
	return Claim{Signature: sig, Owner: w.alice.Key, Amount: price, Memo: memo}
}

// paid is a good payment of Alice's.
func (w *world) paid() Claim {
	w.t.Helper()
	return w.claimOf(w.wallets(w.alice), w.transfer(w.alice, price))
}

// landed sends a transaction that fails on the chain.
func (w *world) landed(signers []settletest.Wallet, in ...settletest.Instruction) settle.Signature {
	w.t.Helper()
	raw := w.Sign(settletest.Tx{Signers: signers, Instructions: in})
	if _, err := w.SendRaw(raw, true); err == nil {
		w.t.Fatal("a transaction that has to fail passed the preflight")
	}
	sig, err := w.SendRaw(raw, false)
	if err != nil {
		w.t.Fatal(err)
	}
	return sig
}

// refused sends a transaction that no node takes, and gives its name.
func (w *world) refused(raw []byte, code int) settle.Signature {
	w.t.Helper()
	_, err := w.SendRaw(raw, true)
	if e, ok := err.(*settletest.RPCError); !ok || e.Code != code {
		w.t.Errorf("sent: %v, want error %d", err, code)
	}
	return settle.Signature(raw[1:65])
}

// patched is a fault that changes what a provider says of a transaction.
func (w *world) patched(sig settle.Signature, change func(answer map[string]any)) settletest.Fault {
	w.t.Helper()
	answer := w.Answer(sig)
	change(answer)
	text, err := json.Marshal(answer)
	if err != nil {
		w.t.Fatal(err)
	}
	return settletest.Fault{Method: "getTransaction", First: sig.String(), Result: text}
}

// metaOf is a transaction's meta in an answer.
func metaOf(answer map[string]any) map[string]any { return answer["meta"].(map[string]any) }

// entry is the token balance of an account in an answer, in a list of it.
func (w *world) entry(answer map[string]any, list string, account settle.Key) map[string]any {
	w.t.Helper()
	field := answer["transaction"].([]any)
	tx, _, err := readTransaction([]string{field[0].(string), field[1].(string)})
	if err != nil {
		w.t.Fatal(err)
	}
	index := slices.Index(tx.Message.AccountKeys, sdk.PublicKey(account))
	for _, b := range metaOf(answer)[list].([]any) {
		if e := b.(map[string]any); e["accountIndex"] == float64(index) {
			return e
		}
	}
	w.t.Fatalf("no entry of %s in %s", account, list)
	return nil
}

const (
	preList  = "preTokenBalances"
	postList = "postTokenBalances"
)

// setAmount changes the amount of a token balance in an answer.
func setAmount(entry map[string]any, amount settle.Amount) {
	entry["uiTokenAmount"].(map[string]any)["amount"] = amount.String()
}

// blockTime is when a transaction landed, in seconds since 1970.
func (w *world) blockTime(sig settle.Signature) int64 {
	w.t.Helper()
	return int64(w.Answer(sig)["blockTime"].(float64))
}
