package cashier

import (
	"fmt"
	"slices"

	"kvasird/node/kv"
	"kvasird/settle"
)

// Penalty is what came of a verdict.
type Penalty struct {
	Slash    settle.Slash
	Payer    settle.Amount // of it, to who paid for the request
	Reporter settle.Amount
	Pool     settle.Amount
	Claimed  settle.Amount // of the pool, for what the culprit could not cover
}

// penalised is a verdict that was carried out, once for a request and a culprit.
type penalised struct {
	Verdict []byte // as it came
	Penalty Penalty
}

func penaltyKey(id settle.QuoteID, n settle.Node) []byte {
	return slices.Concat([]byte{'V'}, id[:], n[:])
}

// Penalise carries out a signed settle.Verdict: the culprit loses the penalty, out of what
// it has of that request, of its bond, and of all that can still be taken; the payer has
// his loss back first, the reporter a tenth at most, the pool the rest. What the culprit
// cannot cover is a claim on the pool, within the payer's premiums, since who pays himself
// could else be wrong on purpose. A second verdict about the same worker of a request
// changes nothing, and gives what the first one did.
//
// Errors: those of settle.ParseVerdict and settle.Verdict.Judged, settle.ErrOtherChain,
// settle.ErrClaimState, settle.ErrNoSuchWorker, settle.ErrVerdictLate.
func (d *Desk) Penalise(raw []byte) (Penalty, error) {
	v, signers, err := settle.ParseVerdict(raw)
	if err != nil {
		return Penalty{}, err
	}
	if v.Network != d.cfg.Network {
		return Penalty{}, fmt.Errorf("%w: network %x", settle.ErrOtherChain, v.Network)
	}
	r, err := d.cfg.Books.Request(v.Request)
	if err != nil {
		return Penalty{}, err
	}
	var drawn []settle.Node
	if d.cfg.Auditors != nil {
		drawn = d.cfg.Auditors(r)
	}
	_, p := d.current()
	var out penalised
	err = d.cfg.Books.store.Update(func(tx *kv.Tx) error {
		pg := page{tx}
		done, err := pg.load(penaltyKey(v.Request, v.Culprit), &out)
		if err != nil || done {
			return err
		}
		c, err := pg.trial(v, r, signers)
		if err != nil {
			return err
		}
		if err := v.Judged(signers, drawn, c.involved); err != nil {
			return err
		}
		if now := d.cfg.Books.seconds(); now > c.in.SettledAt+p.UnbondingSeconds {
			return fmt.Errorf("%w: the request was settled %d s ago", settle.ErrVerdictLate, now-c.in.SettledAt)
		}
		out = penalised{Verdict: raw}
		if out.Penalty, err = d.cfg.Books.penalise(pg, p, v, c); err != nil {
			return err
		}
		return pg.save(penaltyKey(v.Request, v.Culprit), out)
	})
	return out.Penalty, err
}

// trial is a request of which a worker is to be penalised.
type trial struct {
	in       insured
	reward   settle.Amount // of the culprit
	involved []settle.Node
}

// trial finds what a verdict is about. A signer that is linked to the payer, who may have
// of what is taken, is involved too.
func (p page) trial(v settle.Verdict, r settle.Request, signers []settle.Node) (c trial, err error) {
	if c.in, err = p.insured(v.Request); err != nil {
		return c, err
	}
	var pays []workerPay
	if _, err = p.load(paidKey(v.Request), &pays); err != nil {
		return c, err
	}
	c.involved = []settle.Node{r.Quote.Entry}
	worked := false
	for _, w := range pays {
		c.involved = append(c.involved, w.Worker)
		if w.Worker == v.Culprit {
			c.reward, worked = w.Amount, true
		}
	}
	for _, s := range signers {
		l, err := p.linked(s)
		if err != nil {
			return c, err
		}
		if l.Wallet == r.Payer {
			c.involved = append(c.involved, s)
		}
	}
	if !worked {
		err = fmt.Errorf("%w: %s", settle.ErrNoSuchWorker, v.Culprit)
	}
	return c, err
}

// penalise books a verdict that was judged.
func (b *Books) penalise(p page, params settle.Params, v settle.Verdict, c trial) (out Penalty, err error) {
	now := b.seconds()
	bond, err := p.bond(v.Culprit)
	if err != nil {
		return out, err
	}
	reporter, err := p.linked(v.Reporter)
	if err != nil {
		return out, err
	}
	loss := c.in.Loss()
	bond, out.Slash = params.Penalise(bond, c.in.Epoch, c.reward, loss)
	out.Payer, out.Reporter, out.Pool = settle.SplitSlash(out.Slash.Total(), loss)
	if reporter.Wallet == (settle.Wallet{}) {
		out.Reporter, out.Pool = 0, out.Pool+out.Reporter
	}
	if out.Slash.Total() > 0 {
		e, err := settle.SlashEntry(v.Request, v.Culprit, out.Slash, loss, c.in.Payer, reporter.Wallet, now)
		if err != nil {
			return out, err
		}
		if _, err := p.post(e); err != nil {
			return out, err
		}
		if err := p.saveBond(v.Culprit, bond); err != nil {
			return out, err
		}
	}
	c.in.Back += out.Payer
	return out, p.uncovered(params, v.Request, c.in, &out, now)
}

// uncovered claims of the pool what is open of a loss, if there is no claim yet: one of a
// request is enough, and is paid no more than what is open then.
func (p page) uncovered(params settle.Params, id settle.QuoteID, in insured, out *Penalty, now uint64) error {
	premiums, day, err := p.premiums(in.Payer, now)
	if err != nil {
		return err
	}
	left, err := premiums.Left(day, params.ClaimsPPM)
	if err != nil {
		return err
	}
	asked := min(in.Loss(), left)
	if in.Claimed || asked == 0 {
		return p.save(insuredKey(id), in)
	}
	in.Asked = asked
	in.Due, out.Claimed = now, in.Asked
	return p.claim(params, id, in, now)
}
