package cashier

import (
	"errors"
	"testing"

	"kvasird/settle"
	"kvasird/settle/settletest"
)

// court is an office whose requests three nodes audit.
type court struct {
	*office
	auditors [3]settletest.Wallet
	alice    settletest.Wallet
}

func newCourt(t *testing.T) *court {
	c := &court{office: newOffice(t, nil, nil), alice: settletest.NewWallet("alice")}
	var nodes []settle.Node
	for i, name := range []string{"auditor 1", "auditor 2", "auditor 3"} {
		c.auditors[i] = settletest.NewWallet(name)
		nodes = append(nodes, c.auditors[i].Key)
	}
	c.cfg.Auditors = func(settle.Request) []settle.Node { return nodes }
	c.reopen()
	return c
}

// verdict is one about the worker of a request, which some sign.
func (c *court) verdict(id settle.QuoteID, change func(*settle.Verdict), signers ...settletest.Wallet) []byte {
	c.Helper()
	v := settle.Verdict{Network: c.cfg.Network, Request: id, Culprit: keyOf("worker"), Why: settle.WrongWork, Evidence: hashOf("digests")}
	if change != nil {
		change(&v)
	}
	var all []settle.Consent
	for _, s := range signers {
		all = append(all, must[settle.Consent](c.T)(v.Sign(s.Private)))
	}
	return must[[]byte](c.T)(v.Encode(all...))
}

// TestPenalise: the culprit bears the loss and more, once, and every sum holds.
func TestPenalise(t *testing.T) {
	c := newCourt(t)
	b, worker := c.cfg.Books, keyOf("worker")
	q := c.answered(c.alice.Key, 1)
	c.fillPool(30) // what the worker was paid for those is at stake too
	carol, reporter := settletest.NewWallet("carol"), keyOf("reporter")
	c.link(reporter, carol)
	held, bonded, pool, had := b.has(t, settle.Held, worker), b.has(t, settle.Bonded, worker), b.has(t, settle.Pool, settle.Key{}), b.has(t, settle.Balance, c.alice.Key)
	raw := c.verdict(q.ID, func(v *settle.Verdict) { v.Reporter = reporter }, c.auditors[0], c.auditors[2])
	// 1700 were paid for it, of which the penalty is 64 times: all that there is.
	all := held + bonded
	want := Penalty{Slash: settle.Slash{FromVesting: held, FromBonded: bonded}, Payer: 1700, Reporter: all / 10, Pool: all - 1700 - all/10}
	for i := range 3 { // again is the same, by other auditors too, and after a restart
		if got, err := c.Penalise(raw); err != nil || got != want {
			t.Errorf("%+v, %v, want %+v", got, err, want)
		}
		raw = c.verdict(q.ID, nil, c.auditors[1], c.auditors[2])
		if i == 1 {
			c.reopen()
		}
		b = c.cfg.Books
		b.verified(t)
		b.mustHave(t, settle.Held, worker, 0)
		b.mustHave(t, settle.Bonded, worker, 0)
		b.mustHave(t, settle.Balance, c.alice.Key, had+1700)
		b.mustHave(t, settle.Balance, carol.Key, all/10)
		b.mustHave(t, settle.Pool, settle.Key{}, pool+want.Pool)
	}
	c.link(keyOf("node"), c.alice)
	_, err := c.As(keyOf("node")).Complain(t.Context(), Complaint{ID: q.ID, Amount: 1})
	refused(t, "a claim for what came back", err, CodeBad, "amount")
	if n := wakes(t, b); n != 0 {
		t.Errorf("%d wake-ups of a node that has nothing", n)
	}
}

// TestPenaliseWithoutBond: what the culprit cannot cover is a claim on the pool, within the
// premiums of who paid, and no more than is open when it is paid.
func TestPenaliseWithoutBond(t *testing.T) {
	c := newCourt(t)
	b, worker := c.cfg.Books, keyOf("worker")
	q, other := c.answered(c.alice.Key, 1), c.answered(c.alice.Key, 2)
	c.fillPool(20)
	c.link(keyOf("node"), c.alice)
	must[Complained](t)(c.As(keyOf("node")).Complain(t.Context(), Complaint{ID: other.ID, Amount: 50}))
	left := must[settle.Amount](t)(must[settle.Premiums](t)(b.Premiums(c.alice.Key)).Left(uint64(c.at.Load())/settle.Day, settle.DefaultParams().ClaimsPPM))
	everything := c.verdict(other.ID, nil, c.auditors[0], c.auditors[1])
	p := must[Penalty](t)(c.Penalise(everything))
	if p.Payer != 1700 || p.Claimed != 0 {
		t.Errorf("of a request with a claim: %+v", p)
	}
	p = must[Penalty](t)(c.Penalise(c.verdict(q.ID, nil, c.auditors[0], c.auditors[1])))
	if p != (Penalty{Claimed: left}) || left == 0 {
		t.Errorf("of a node that has nothing: %+v, premiums for %d", p, left)
	}
	b.verified(t)
	b.mustHave(t, settle.Held, worker, 0)
	had := b.has(t, settle.Balance, c.alice.Key)
	c.nextEpoch(1) // the claim of a verdict need not wait for audits
	b.mustHave(t, settle.Balance, c.alice.Key, had+left)
	c.nextEpoch(72) // the loss that was claimed before the verdict came back by it
	b.mustHave(t, settle.Balance, c.alice.Key, had+left)
	if in := must[insured](t)(b.insured(other.ID)); !in.Over || in.Recovered != 0 || in.Back != 1700 {
		t.Errorf("%+v", in)
	}
}

// TestPenaliseSelf: who is his own payer and reporter loses what the pool keeps, and the
// pool pays him no more than his premiums.
func TestPenaliseSelf(t *testing.T) {
	c := newCourt(t)
	b, worker := c.cfg.Books, keyOf("worker")
	q := c.answered(c.alice.Key, 1)
	c.link(worker, c.alice)
	before := b.has(t, settle.Held, worker) + b.has(t, settle.Bonded, worker) + b.has(t, settle.Balance, c.alice.Key)
	p := must[Penalty](t)(c.Penalise(c.verdict(q.ID, nil, c.auditors[0], c.auditors[1])))
	if after := b.has(t, settle.Balance, c.alice.Key); after > before || p.Payer != 1700 || p.Claimed != 0 {
		t.Errorf("had %d, has %d: %+v", before, after, p)
	}
	b.verified(t)
}

func TestPenaliseRefuses(t *testing.T) {
	c := newCourt(t)
	q := c.answered(c.alice.Key, 1)
	open := quoteOf(2, c.alice.Key)
	must[int](t)(0, c.cfg.Books.Quote(open))
	a, eve := c.auditors, settletest.NewWallet("eve")
	before := c.cfg.Books.verified(t).Hash()
	good := c.verdict(q.ID, nil, a[0], a[1])
	for _, tt := range []struct {
		name string
		raw  []byte
		want error
	}{
		{"bytes", []byte{1}, settle.ErrRecord},
		{"another network", c.verdict(q.ID, func(v *settle.Verdict) { v.Network[0]++ }, a[0], a[1]), settle.ErrOtherChain},
		{"no request", c.verdict(settle.QuoteID{9}, nil, a[0], a[1]), ErrNoQuote},
		{"a request that was not answered", c.verdict(open.ID, nil, a[0], a[1]), settle.ErrClaimState},
		{"no worker of it", c.verdict(q.ID, func(v *settle.Verdict) { v.Culprit = keyOf("other") }, a[0], a[1]), settle.ErrNoSuchWorker},
		{"nobody signed", c.verdict(q.ID, nil), settle.ErrJudges},
		{"one signed", c.verdict(q.ID, nil, a[0]), settle.ErrJudges},
		{"one who was not drawn", c.verdict(q.ID, nil, a[0], eve), settle.ErrJudges},
		{"the reporter judges", c.verdict(q.ID, func(v *settle.Verdict) { v.Reporter = a[0].Key }, a[0], a[1]), settle.ErrInvolved},
	} {
		if got, err := c.Penalise(tt.raw); !errors.Is(err, tt.want) || got != (Penalty{}) {
			t.Errorf("%s: %+v, %v, want %v", tt.name, got, err, tt.want)
		}
	}
	c.link(a[0].Key, c.alice)
	if _, err := c.Penalise(good); !errors.Is(err, settle.ErrInvolved) {
		t.Errorf("a node of the payer's judges: %v", err)
	}
	late := c.verdict(q.ID, nil, a[1], a[2])
	c.at.Add(int64(settle.DefaultParams().UnbondingSeconds) + 1)
	if _, err := c.Penalise(late); !errors.Is(err, settle.ErrVerdictLate) {
		t.Errorf("too late: %v", err)
	}
	c.at.Add(-1)
	auditors := c.cfg.Auditors
	c.Desk.cfg.Auditors = nil
	if _, err := c.Penalise(late); !errors.Is(err, settle.ErrJudges) {
		t.Errorf("nobody was drawn: %v", err)
	}
	if after := c.cfg.Books.verified(t).Hash(); after != before {
		t.Error("a verdict that was refused moved money")
	}
	c.Desk.cfg.Auditors = auditors
	must[Penalty](t)(c.Penalise(late))
}
