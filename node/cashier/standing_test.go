package cashier

import (
	"errors"
	"testing"

	"kvasird/node/kv"
	"kvasird/settle"
)

// TestStanding: a node stands by its link and its bond of the books, until it takes either back.
func TestStanding(t *testing.T) {
	b, p, n, w := newBooks(t), settle.DefaultParams(), settle.Node{7}, settle.Wallet{8}
	save := func(l Linked, bond settle.Bond) {
		t.Helper()
		if err := b.store.Update(func(tx *kv.Tx) error {
			return errors.Join(page{tx}.save(linkKey(n), l), page{tx}.saveBond(n, bond))
		}); err != nil {
			t.Fatal(err)
		}
	}
	is := func(name string, want settle.Standing) {
		t.Helper()
		if got, err := b.standing(p, n, 10); err != nil || got != want {
			t.Errorf("%s: got %+v, %v, want %+v", name, got, err, want)
		}
	}
	is("a stranger", settle.Standing{})
	bond, _, _, err := p.Earn(settle.Bond{}, 1000, testNow, 11)
	if err != nil {
		t.Fatal(err)
	}
	save(Linked{Node: n}, bond)
	is("no wallet", settle.Standing{})
	save(Linked{Node: n, Wallet: w}, bond)
	is("linked and paid", settle.Standing{Wallet: w, Pay: 1000})
	if bond, err = p.Unbond(bond, 1, testNow); err != nil {
		t.Fatal(err)
	}
	save(Linked{Node: n, Wallet: w}, bond)
	is("what is held was taken", settle.Standing{})
}
