//go:build svm

package settletest

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"time"

	"kvasird/settle"
)

// market is a chain with a token that two wallets have.
type market struct {
	*Chain
	mint       Mint
	alice, bob Wallet
	from, to   settle.Key
}

func newMarket(t *testing.T) market {
	c := Start(t)
	m := market{Chain: c, mint: c.NewMint("kvr", Token), alice: c.NewWallet("alice"), bob: c.NewWallet("bob")}
	m.from, m.to = m.mint.Fund(m.alice.Key, 1000), m.mint.Open(m.bob.Key)
	return m
}

func (m market) tx(version int, amount settle.Amount, memo string) Tx {
	return Tx{Version: version, Signers: []Wallet{m.alice}, Instructions: []Instruction{
		m.mint.TransferChecked(m.from, m.to, m.alice.Key, amount), Memo(memo, m.alice.Key)}}
}

// codeOf is the code of an error that a node answered.
func codeOf(err error) int {
	var e *RPCError
	if errors.As(err, &e) {
		return e.Code
	}
	return 0
}

// state is what getTransaction says at a commitment: null when it has nothing.
func (m market) known(t *testing.T, sig settle.Signature, commitment string) bool {
	t.Helper()
	result, err := m.Call("getTransaction", sig, map[string]any{"commitment": commitment, "maxSupportedTransactionVersion": 1})
	if err != nil {
		t.Fatal(err)
	}
	return string(result) != "null"
}

func TestTransactions(t *testing.T) {
	m := newMarket(t)
	table := m.NewTable("table", m.from, m.to, m.mint.Key)
	for _, tt := range []struct {
		name    string
		tx      Tx
		version any
		loaded  int
	}{
		{"legacy", m.tx(Legacy, 10, "legacy"), "legacy", 0},
		{"0", m.tx(V0, 10, "0"), 0.0, 0},
		{"0 with a table", func() Tx { tx := m.tx(V0, 10, "table"); tx.Tables = []Table{table}; return tx }(), 0.0, 3},
		{"1", m.tx(V1, 10, "1"), 1.0, 0},
	} {
		before := m.Balance(m.to)
		sig := m.Send(tt.tx)
		if got := m.Balance(m.to) - before; got != 10 {
			t.Errorf("%s: %d arrived", tt.name, got)
		}
		m.Advance(1)
		answer := m.Answer(sig)
		meta := answer["meta"].(map[string]any)
		loaded := meta["loadedAddresses"].(map[string]any)
		if answer["version"] != tt.version || len(loaded["writable"].([]any))+len(loaded["readonly"].([]any)) != tt.loaded {
			t.Errorf("%s: version %v, loaded %v", tt.name, answer["version"], loaded)
		}
		if pre, post := meta["preTokenBalances"].([]any), meta["postTokenBalances"].([]any); len(pre) != 2 || len(post) != 2 || meta["fee"] != 5000.0 {
			t.Errorf("%s: balances %v, %v, fee %v", tt.name, pre, post, meta["fee"])
		}
	}
}

func TestLanding(t *testing.T) {
	m := newMarket(t)
	tooMuch := m.Sign(m.tx(Legacy, 5000, "too much"))
	if _, err := m.SendRaw(tooMuch, true); codeOf(err) != -32002 || !strings.Contains(err.Error(), `"InstructionError":[0,{"Custom":1}]`) {
		t.Errorf("a transfer of more than there is: %v", err)
	}
	sig, err := m.SendRaw(tooMuch, false)
	if err != nil {
		t.Fatal(err)
	}
	m.Advance(1)
	if meta := m.Answer(sig)["meta"].(map[string]any); meta["err"] == nil || meta["fee"] != 5000.0 {
		t.Errorf("it did not land as failed: %v", meta)
	}
	forged := m.Sign(m.tx(Legacy, 1, "forged"))
	forged[10] ^= 1
	if _, err := m.SendRaw(forged, false); codeOf(err) != -32003 {
		t.Errorf("a forged signature: %v", err)
	}
	if _, err := m.SendRaw(m.Sign(m.tx(Legacy, 1, "x"))[:100], false); codeOf(err) != -32602 {
		t.Errorf("a transaction that is cut off: %v", err)
	}
	again, late := m.Sign(m.tx(Legacy, 1, "again")), m.Sign(m.tx(Legacy, 1, "late"))
	if _, err := m.SendRaw(again, true); err != nil {
		t.Error(err)
	}
	if _, err := m.SendRaw(again, true); codeOf(err) != -32002 || !strings.Contains(err.Error(), "AlreadyProcessed") {
		t.Errorf("the same transaction again: %v", err)
	}
	_, lastValid := m.Blockhash()
	m.Advance(int(lastValid + 1 - m.Slot()))
	if _, err := m.SendRaw(late, true); codeOf(err) != -32002 || !strings.Contains(err.Error(), "BlockhashNotFound") {
		t.Errorf("a transaction after its end: %v", err)
	}
	sig, err = m.SendRaw(late, false)
	m.Advance(32)
	if err != nil || m.known(t, sig, "finalized") {
		t.Errorf("a transaction after its end: %v, or it landed", err)
	}
}

func TestCommitmentAndRollback(t *testing.T) {
	m := newMarket(t)
	first := m.Send(m.tx(Legacy, 10, "first"))
	fork := m.Advance(1)
	second := m.Send(m.tx(Legacy, 10, "second"))
	if !m.known(t, first, "confirmed") || m.known(t, first, "finalized") || m.known(t, second, "confirmed") {
		t.Error("commitments are wrong")
	}
	m.Advance(1)
	if !m.known(t, second, "confirmed") {
		t.Error("the second is not confirmed")
	}
	m.Rollback(fork - 1)
	if m.known(t, second, "confirmed") || m.Balance(m.to) != 10 || m.Slot() != fork-1 {
		t.Errorf("after the fork: balance %d, slot %d", m.Balance(m.to), m.Slot())
	}
	m.Advance(32)
	if !m.known(t, first, "finalized") || m.known(t, second, "finalized") {
		t.Error("the fork is not gone, or more than it")
	}
	m.Send(m.tx(Legacy, 10, "second")) // programs run after a fork too
}

func TestDurableNonce(t *testing.T) {
	m := newMarket(t)
	account, nonce := m.NewNonce("nonce", m.alice)
	tx := m.tx(Legacy, 10, "later")
	tx.Instructions = append([]Instruction{AdvanceNonce(account, m.alice.Key)}, tx.Instructions...)
	tx.Blockhash = nonce
	raw := Sign(tx)
	m.Advance(1000)
	if _, err := m.SendRaw(raw, true); err != nil || m.Balance(m.to) != 10 {
		t.Errorf("%v, %d arrived", err, m.Balance(m.to))
	}
	if _, err := m.SendRaw(raw, true); err == nil {
		t.Error("the nonce was good for two transactions")
	}
}

func TestForward(t *testing.T) {
	m := newMarket(t)
	f := m.AddForwarder("forwarder")
	sig := m.Run([]Wallet{m.alice}, Forward(f, m.mint.TransferChecked(m.from, m.to, m.alice.Key, 7)), Forward(f, Memo("inside", m.alice.Key)))
	m.Advance(1)
	inner := m.Answer(sig)["meta"].(map[string]any)["innerInstructions"].([]any)
	if len(inner) != 2 || m.Balance(m.to) != 7 {
		t.Errorf("inner calls %v, %d arrived", inner, m.Balance(m.to))
	}
}

func TestFaults(t *testing.T) {
	m := newMarket(t)
	ask := func(method string) (string, error) {
		result, err := m.Call(method)
		return string(result), err
	}
	m.Fault(Fault{Path: "/other", Method: "getHealth", Error: &RPCFault{-32005, "Node is behind"}})
	if s, err := ask("getHealth"); s != `"ok"` || err != nil {
		t.Errorf("another provider's fault: %s, %v", s, err)
	}
	m.Fault(Fault{Path: "/tests", Method: "getHealth", Times: 1, Error: &RPCFault{-32005, "Node is behind"}})
	if _, err := ask("getHealth"); codeOf(err) != -32005 {
		t.Errorf("a node behind: %v", err)
	}
	if s, err := ask("getHealth"); s != `"ok"` || err != nil {
		t.Errorf("after the fault: %s, %v", s, err)
	}
	m.Fault(Fault{Result: json.RawMessage(`"lie"`)})
	if s, err := ask("getVersion"); s != `"lie"` || err != nil {
		t.Errorf("a lie: %s, %v", s, err)
	}
	m.ClearFaults()
	if s, err := ask("getHealth"); s != `"ok"` || err != nil {
		t.Errorf("after all faults: %s, %v", s, err)
	}
	if _, err := ask("getBlockProduction"); codeOf(err) != -32601 {
		t.Errorf("an unknown method: %v", err)
	}
}

func TestExtensions(t *testing.T) {
	c := Start(t)
	eve, alice, bob := c.NewWallet("eve"), c.NewWallet("alice"), c.NewWallet("bob")
	m := c.NewMint("all", Token2022, TransferFee(eve.Key, 100), PermanentDelegate(eve.Key))
	from, to := m.Fund(alice.Key, 1000), m.Open(bob.Key)
	c.Run([]Wallet{alice}, m.TransferChecked(from, to, alice.Key, 100))
	c.Run([]Wallet{eve}, m.TransferWithFee(from, to, eve.Key, 200, 2))
	if got := c.Balance(to); got != 99+198 {
		t.Errorf("%d arrived", got)
	}
	c.NewMint("hidden", Token2022, ConfidentialTransfers(eve.Key))
}

func TestTicking(t *testing.T) {
	c := StartTicking(t, 5*time.Millisecond)
	first := c.Slot()
	for deadline := time.Now().Add(20 * time.Second); c.Slot() < first+10; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("the chain stands still")
		}
	}
}
