package settle

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
)

func sortWork(work []Work) {
	slices.SortFunc(work, func(a, b Work) int { return bytes.Compare(a.Worker[:], b.Worker[:]) })
}

// Whatever is played in whatever order: the balances and what was paid out sum to what
// came in, no balance is negative, and the journal replays to the same state. post
// checks the sum after each entry, and that a retry does nothing.
func TestRandomHistories(t *testing.T) {
	for seed := range uint64(16) {
		r := rand.New(rand.NewPCG(seed, 77))
		w := newWorld(t)
		w.p = randomParams(r)
		w.p.FloorRaw, w.p.CeilingRaw, w.p.Ref = 1e11, 1e12, 1e9
		people, nodes := []string{"alice", "bob", "carol"}, []string{"a", "b", "c"}
		total := Amount(r.Uint64N(1e9) + 1)
		w.reserve = NewReserve(total)
		if _, err := w.move(ActFund, Transfer{Account{Kind: Inflow}, Account{Kind: Emission}, total}); err != nil {
			t.Fatal(err)
		}
		done := map[string]int{}
		for i := range 400 {
			person, node := people[r.IntN(3)], nodes[r.IntN(3)]
			some := Amount(1 + r.Uint64N(1e8))
			name := fmt.Sprint("q", i)
			op, err := randomStep(w, r, person, node, name, some)
			if err == nil {
				done[op]++
			} else if !expected(err) {
				t.Fatalf("seed %d, %s: %v", seed, op, err)
			}
			w.now += r.Uint64N(2 * Day / 10)
			w.slot++
		}
		w.check()
		if seed == 0 && len(done) != 11 {
			t.Errorf("only %v were played", done)
		}
	}
}

// expected are the refusals that a random history meets.
func expected(err error) bool {
	for _, e := range []error{ErrFunds, ErrBonded, ErrPremiumCap, ErrClaimTwice, ErrClaimAmount, ErrClaimState, ErrTooManyLeave, ErrState} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}

func randomStep(w *world, r *rand.Rand, person, node, name string, some Amount) (op string, err error) {
	switch r.IntN(12) {
	case 0:
		_, err = w.move(ActDeposit, Transfer{Account{Kind: Inflow}, Account{Balance, w.key(person)}, some})
		return "deposit", err
	case 1, 2, 3:
		if _, err = w.quote(name, 1+r.Uint64N(1e6), r.Uint64N(1e6)); err != nil {
			return "quote", err
		}
		q := w.requests[name].Quote
		if r.IntN(2) == 0 {
			_, err = w.pay(name, person, q.Amount-q.Amount/4*Amount(r.IntN(2))*Amount(r.IntN(2))+some*Amount(r.IntN(2)))
		} else {
			_, err = w.debit(name, person)
		}
		if err != nil {
			return "pay", err
		}
		cut := r.Uint64N(101)
		_, err = w.settle(name, r.Uint64N(q.PromptTokens+q.AnswerTokens+1), map[string]uint64{"a": cut / 2, "b": 100 - cut}, r.IntN(2) == 0, r.IntN(5) == 0, r.Uint64N(30))
		return "settle", err
	case 4:
		_, err = w.vest(node)
		return "vest", err
	case 5:
		_, err = w.unbond(node, some/100+1)
		return "unbond", err
	case 6:
		_, err = w.unbonded(node)
		return "unbonded", err
	case 7:
		_, err = w.stake(node, some)
		return "stake", err
	case 8:
		_, err = w.payout(person, some, r.IntN(2) == 0)
		return "payout", err
	case 9, 10:
		for q := range w.outcomes { // any of those that ended
			if r.IntN(3) == 0 {
				_, err = w.slash(node, q, person)
				delete(w.outcomes, q) // one finding per request
				return "slash", err
			}
			_, err = w.claim(q, w.names[w.requests[q].Payer], 1+some/1e5)
			return "claim", err
		}
		return "idle", nil
	}
	_, err = w.poolEpoch()
	return "pool", err
}
