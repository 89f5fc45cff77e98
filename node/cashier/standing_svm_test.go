//go:build svm

package cashier

import (
	"testing"

	"kvasird/node/kv"
	"kvasird/settle"
)

// TestStakeAloneDoesNotStand: a node that was made up, with a wallet and a stake that the chain
// proves, is no holder; who was paid is, until it takes the held part out.
func TestStakeAloneDoesNotStand(t *testing.T) {
	s := newShop(t)
	madeUp := keyOf("made up")
	for node, wallet := range map[settle.Node]settle.Wallet{madeUp: s.alice.Key, s.worker.Key: keyOf("volunteer")} {
		must[int](t)(0, s.cfg.Books.store.Update(func(tx *kv.Tx) error {
			return page{tx}.save(linkKey(node), Linked{Node: node, Wallet: wallet})
		}))
	}
	sig := s.pay(100_000, StakeMemo(madeUp))
	s.Advance(40)
	if l := must[Ledger](t)(s.As(madeUp).Deposit(t.Context(), Deposit{Signature: sig, Owner: s.alice.Key, Amount: 100_000, Stake: true})); l.Bonded != 100_000 {
		t.Fatalf("%+v", l)
	}
	if got := must[settle.Standing](t)(s.Standing(madeUp)); got != (settle.Standing{}) {
		t.Errorf("a stake alone stands as %+v", got)
	}
	s.served(1000)
	l := must[Ledger](t)(s.As(s.worker.Key).Ledger(t.Context(), s.worker.Key))
	if got := must[settle.Standing](t)(s.Standing(s.worker.Key)); got != (settle.Standing{Wallet: keyOf("volunteer"), Pay: l.Earned}) || l.Earned == 0 {
		t.Errorf("who earned %d stands as %+v", l.Earned, got)
	}
	if got := must[settle.Standing](t)(s.Standing(s.entry.Key)); got != (settle.Standing{}) {
		t.Errorf("without a wallet: %+v", got)
	}
	must[Ledger](t)(s.As(s.worker.Key).Unstake(t.Context(), Move{ID: settle.Hash{1}, Amount: 1}))
	if got := must[settle.Standing](t)(s.Standing(s.worker.Key)); got != (settle.Standing{}) {
		t.Errorf("who took of what is held stands as %+v", got)
	}
}
