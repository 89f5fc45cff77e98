//go:build svm

package cashier

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"kvasird/settle"
	"kvasird/settle/settletest"
)

// person is a wallet with a node.
type person struct{ wallet, node settletest.Wallet }

// sent is a transfer to the vault, that pays a quote unless its id is zero.
type sent struct {
	id    settle.QuoteID
	sig   settle.Signature
	from  person
	stake bool
}

// chronicle is a random history of a desk.
type chronicle struct {
	*branch
	rng    *rand.Rand
	people []person
	quotes []settle.Quote
	sent   []sent
	inflow settle.Amount  // of the vault, on the chain
	done   map[string]int // what succeeded
}

const (
	historySteps = 1000
	testModel    = "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"
)

func newChronicle(t *testing.T, seed uint64) *chronicle {
	c := &chronicle{branch: newBranch(t, 0), rng: rand.New(rand.NewPCG(seed, 6)), done: map[string]int{}}
	c.params, c.devnet = settle.DefaultParams(), true
	c.params.AuditSeconds, c.params.UnbondingSeconds, c.params.EmissionTotal = 20, 40, 5000
	c.reopen()
	for i := range 3 {
		p := person{c.wallet(fmt.Sprint("wallet", i), 1e9), settletest.NewWallet(fmt.Sprint("node", i))}
		c.link(p.node.Key, p.wallet)
		c.people = append(c.people, p)
	}
	return c
}

func pick[T any](c *chronicle, list []T) T { return list[c.rng.IntN(len(list))] }

// recent is one of the newest quotes.
func (c *chronicle) recent() settle.Quote { return pick(c, c.quotes[max(0, len(c.quotes)-5):]) }

// did counts what succeeded. What did not has to be a refusal.
func (c *chronicle) did(what string, err error) {
	c.Helper()
	var r *Refusal
	switch {
	case err == nil:
		c.done[what]++
	case !errors.As(err, &r):
		c.Errorf("%s: %v", what, err)
	default:
		c.done["refused: "+string(r.Code)]++
	}
}

// send brings money to the vault for something.
func (c *chronicle) send() {
	s := sent{from: pick(c, c.people)}
	memo := ""
	switch c.rng.IntN(6) {
	case 0:
		s.stake, memo = true, StakeMemo(s.from.node.Key)
	case 1:
		s.stake = true
	case 2:
		memo = pick(c, []string{fundPool, fundEmission})
	}
	amount := settle.Amount(1 + c.rng.IntN(3e6))
	s.sig = c.transfer(s.from.wallet, amount, memo)
	c.inflow += amount
	c.sent = append(c.sent, s)
}

// book has a transfer booked, now and then for somebody else.
func (c *chronicle) book() {
	s, owner := pick(c, c.sent), pick(c, c.people)
	_, err := c.deposit(s.from.node.Key, s.sig, s.from.wallet.Key, s.stake)
	c.did("deposit", err)
	if owner.wallet.Key != s.from.wallet.Key {
		if _, err := c.deposit(owner.node.Key, s.sig, owner.wallet.Key, s.stake); err == nil {
			c.Errorf("%s has the transfer of %s", owner.wallet.Key, s.from.wallet.Key)
		}
	}
}

func (c *chronicle) quote() {
	o, err := c.As(pick(c, c.people).node.Key).Quote(c.Context(), Ask{Model: testModel, PromptTokens: 1 + c.rng.Uint64N(900),
		AnswerTokens: c.rng.Uint64N(900), RequestHash: hashOf(c.rng.Uint64())})
	c.did("quote", err)
	if err == nil {
		c.quotes = append(c.quotes, o.Quote)
	}
}

// pay pays a quote with too little, too much, or as it should be, perhaps a second time.
func (c *chronicle) pay() {
	q, s := c.recent(), sent{from: pick(c, c.people)}
	amount := q.Amount + settle.Amount(len(c.sent)) // no two are one transaction
	if c.rng.IntN(4) == 0 {
		amount -= settle.Amount(c.rng.IntN(int(q.Amount)))
	}
	s.id, s.sig = q.ID, c.transfer(s.from.wallet, amount, q.ID.Memo())
	c.inflow += amount
	c.sent = append(c.sent, s)
}

func (c *chronicle) prove() {
	s := pick(c, c.sent[max(0, len(c.sent)-8):])
	if s.id == (settle.QuoteID{}) {
		s.id = c.recent().ID
	}
	for _, q := range c.quotes {
		if q.ID == s.id {
			_, err := c.As(q.Entry).Pay(c.Context(), Proof{s.id, s.sig, s.from.wallet.Key})
			c.did("pay", err)
		}
	}
}

func (c *chronicle) debit() {
	q := c.recent()
	_, err := c.As(q.Entry).Debit(c.Context(), q.ID)
	c.did("debit", err)
}

func (c *chronicle) start() {
	q := c.recent()
	_, err := c.As(q.Entry).Run(c.Context(), q.ID)
	c.did("run", err)
}

// end ends a request whose work two nodes share, of which one may not sign for all.
func (c *chronicle) end() {
	q := c.recent()
	e := Ended{ID: q.ID, Tokens: 1 + c.rng.Uint64N(q.PromptTokens+q.AnswerTokens)}
	if c.rng.IntN(4) == 0 {
		e.Failed = "a worker left"
	}
	receipt := settle.Report{Role: settle.Receipt, Seq: 1, Network: c.cfg.Network, Request: q.ID, Signer: q.Entry, Tokens: e.Tokens}
	left := e.Tokens
	for _, p := range c.people[:2] {
		units := min(left, 1+c.rng.Uint64N(e.Tokens))
		if left -= units; units == 0 {
			continue
		}
		w := settle.Work{Worker: p.node.Key, Lines: []settle.Line{{Part: 0, Units: units}}}
		receipt.Work = append(receipt.Work, w)
		s := settle.Report{Role: settle.Statement, Seq: 1, Network: c.cfg.Network, Request: q.ID, Signer: p.node.Key,
			Work: []settle.Work{{Worker: p.node.Key, Lines: []settle.Line{{Part: 0, Units: 1 + c.rng.Uint64N(units)}}}}}
		e.Statements = append(e.Statements, must[[]byte](c.T)(s.Sign(p.node.Private)))
	}
	slices.SortFunc(receipt.Work, func(a, b settle.Work) int { return slices.Compare(a.Worker[:], b.Worker[:]) })
	for _, p := range c.people {
		if p.node.Key == q.Entry {
			e.Receipt = must[[]byte](c.T)(receipt.Sign(p.node.Private))
		}
	}
	_, err := c.As(q.Entry).End(c.Context(), e)
	c.did("end", err)
}

func (c *chronicle) unstake() {
	_, err := c.As(pick(c, c.people).node.Key).Unstake(c.Context(), Move{hashOf(c.rng.IntN(50)), settle.Amount(1 + c.rng.IntN(1e5))})
	c.did("unstake", err)
}

func (c *chronicle) claim() {
	_, err := c.As(pick(c, c.people).node.Key).Claim(c.Context(), Move{hashOf(c.rng.IntN(100)), settle.Amount(1000 + c.rng.IntN(2e5))})
	c.did("claim", err)
}

func (c *chronicle) tick() {
	if c.Tick(c.Context()) == nil { // with a provider that is down it is not
		c.done["tick"]++
	}
}

// restart opens the books again: they are the same, and no more than came in.
func (c *chronicle) restart() {
	c.Helper()
	before := c.cfg.Books.verified(c.T)
	c.reopen()
	after := c.cfg.Books.verified(c.T)
	if before.Hash() != after.Hash() {
		c.Error("the books changed by being opened")
	}
	if in, _ := after.Balance(settle.Account{Kind: settle.Inflow}); in > c.inflow {
		c.Errorf("%d is credited, %d came in", in, c.inflow)
	}
	c.done["restart"]++
}

func (c *chronicle) step() {
	steps := []struct {
		weight int
		do     func()
	}{
		{6, c.send}, {12, c.book}, {6, c.quote}, {10, c.pay}, {20, c.prove}, {8, c.debit}, {16, c.start}, {16, c.end}, {4, c.unstake}, {6, c.claim}, {5, c.tick},
		{1, c.restart}, {14, func() { c.pass(1 + c.rng.IntN(30)) }},
		{1, func() { c.w.Fault(settletest.Fault{Path: "/a", HTTP: &settletest.HTTPFault{Status: 503}, Times: 2}) }},
	}
	all := 0
	for _, s := range steps {
		all += s.weight
	}
	at := c.rng.IntN(all)
	for _, s := range steps {
		if at -= s.weight; at < 0 {
			s.do()
			return
		}
	}
}

// settleAll waits for all that is under way, and has every transfer booked.
func (c *chronicle) settleAll() {
	c.Helper()
	c.w.ClearFaults()
	for range 2 { // no quote is open, no lease holds; then what was found to be paid waits
		c.pass(10_000)
		c.tick()
	}
	for range 30 {
		c.pass(100)
		c.tick()
	}
	for _, s := range c.sent {
		_, err := c.deposit(s.from.node.Key, s.sig, s.from.wallet.Key, s.stake)
		c.did("last deposit", err)
	}
}

// TestHistoriesOnChain: in random histories of all that nodes ask of a desk, with a chain
// that fails at times and with restarts, no more is credited than came in; at the end it
// is all that the vault got, what it no longer has was paid out, and the journal replays
// to what is kept.
func TestHistoriesOnChain(t *testing.T) {
	for seed := range uint64(2) {
		c := newChronicle(t, seed)
		for len(c.quotes) < 3 {
			c.send()
			c.quote()
		}
		for i := range historySteps {
			if c.step(); i == historySteps/2 {
				c.restart()
			}
		}
		c.settleAll()
		c.restart()
		l := c.cfg.Books.verified(t)
		has := func(k settle.Kind) (sum settle.Amount) {
			for _, a := range l.Accounts() {
				if a.Account.Kind == k {
					sum += a.Amount
				}
			}
			return sum
		}
		if in := has(settle.Inflow); in != c.inflow {
			t.Errorf("seed %d: %d of %d that came in is credited", seed, in, c.inflow)
		}
		if paid := has(settle.PaidOut); c.vault() != c.inflow-paid || has(settle.Leaving) != 0 || has(settle.Escrow) != 0 {
			t.Errorf("seed %d: the vault has %d of %d, %d was paid out, %d leaves, %d is in escrow", seed, c.vault(), c.inflow, paid, has(settle.Leaving), has(settle.Escrow))
		}
		if has(settle.PaidOut) == 0 || has(settle.Bonded) == 0 || has(settle.Pool) == 0 {
			t.Errorf("seed %d: nothing was paid out, bonded or insured: %+v", seed, l.Accounts())
		}
		for _, what := range []string{"deposit", "quote", "pay", "debit", "run", "end", "unstake", "claim", "tick", "restart"} {
			if c.done[what] < 3 {
				t.Errorf("seed %d: %d times %s: the history shows too little", seed, c.done[what], what)
			}
		}
		t.Logf("seed %d: %v", seed, c.done)
	}
}
