package cashier

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"iter"
	"maps"
	"math"
	"slices"

	"kvasird/market"
	"kvasird/node/kv"
	"kvasird/settle"
)

// Prices follow this clock. Record e is what epoch e is quoted by: it is made when e
// begins, of what was settled in e-1, by the rules and the reference of e. So what is
// settled is kept under the epoch whose price it moves, which is the next one. Record 0
// is the first of a model, made when it is first asked for and issued once that is paid. An epoch before whose begin
// nothing was settled has no record, unless it is the last, or governance changed
// something with it.

const (
	// maxPriced bounds the models that were paid for and whose prices are followed: all are in the
	// Terms.
	maxPriced = 256
	// idleFor is after how many seconds without a payment one of them gives its place to another that
	// is asked for. Its records stay in the books, and its price goes on where it was when somebody
	// asks for it again: so who pays for many models once keeps nobody else's out.
	idleFor = 2 * settle.Day
)

// price is the record that quotes are by.
type price struct {
	record *market.PriceRecord
	hash   settle.Hash
}

// done is what one settled request says of its model: an event of market.Usage.
type done struct {
	Payer   settle.Wallet
	Tokens  uint64
	Seconds uint64
	Workers []doneBy
}

type doneBy struct {
	Node  settle.Node
	Share uint64 // in 1/10⁹
	Among int
}

func modelKey(kind byte, model settle.Hash, epoch uint64) []byte {
	return binary.BigEndian.AppendUint64(append([]byte{kind}, model[:]...), epoch)
}

// modelOf reads the id of a model.
func modelOf(id string) (h settle.Hash, err error) {
	if err := h.UnmarshalText([]byte(id)); err != nil {
		return h, refusal(CodeNotFound, "model", "%.80q is no model's id, which is 64 hexadecimal digits", id)
	}
	return h, nil
}

// parts are those of a model. The books have those of a model that was paid for, so that what was done
// is settled, and asked for again, whoever serves it then and however slowly.
func (d *Desk) parts(id string, by settle.Node) ([]settle.Part, error) {
	model, err := modelOf(id)
	if err != nil {
		return nil, err
	}
	var parts []settle.Part
	err = d.cfg.Books.store.View(func(tx *kv.Tx) error {
		_, err := page{tx}.load(partsKey(model), &parts)
		return err
	})
	if err != nil || len(parts) > 0 {
		return parts, err
	}
	m, err := d.cfg.Models(id, by)
	return m.Parts, err
}

func partsKey(model settle.Hash) []byte { return append([]byte{'M'}, model[:]...) }

// keepParts writes down the parts of a model that is paid for, unless they are there. Where they are
// not known the request runs all the same: they may be when it ends.
func (d *Desk) keepParts(id string, by settle.Node) error {
	parts, err := d.parts(id, by)
	if err != nil || len(parts) == 0 {
		return nil
	}
	model, err := modelOf(id)
	if err != nil {
		return err
	}
	return d.cfg.Books.store.Update(func(tx *kv.Tx) error {
		_, has, err := tx.Get(partsKey(model))
		if err != nil || has {
			return err
		}
		return page{tx}.save(partsKey(model), parts)
	})
}

// readPrices follows the price records of the books from their first: those of a model, or all.
func (d *Desk) readPrices(of ...settle.Hash) (map[settle.Hash]*market.PriceChain, error) {
	prefix, chains := []byte{'v'}, map[settle.Hash]*market.PriceChain{}
	for _, model := range of {
		prefix = append(prefix, model[:]...)
	}
	return chains, d.cfg.Books.store.View(func(tx *kv.Tx) error {
		return tx.Each(prefix, func(k, v []byte) error {
			model := settle.Hash(k[1:33])
			chain := chains[model]
			if chain == nil {
				chain = market.NewPriceChain(d.cfg.Network, [32]byte(model), d.node)
				chains[model] = chain
			}
			if err := chain.Append(v); err != nil {
				return fmt.Errorf("%w: the price of %x: %w", ErrBooks, model[:6], err)
			}
			return nil
		})
	})
}

// startPrices reads the prices of all models that have a place: those that were paid for last.
func (d *Desk) startPrices() (err error) {
	if d.chains, err = d.readPrices(); err != nil {
		return err
	}
	paid, err := d.cfg.Books.paidAt(maps.Keys(d.chains))
	all := slices.SortedFunc(maps.Keys(d.chains), func(a, b settle.Hash) int { return cmp.Compare(paid[b], paid[a]) })
	for _, model := range all[min(len(all), maxPriced):] {
		delete(d.chains, model)
	}
	return err
}

// placeLocked makes a place for one more model that was paid for. Error: a Refusal.
func (d *Desk) placeLocked() error {
	if len(d.chains) < maxPriced {
		return nil
	}
	paid, err := d.cfg.Books.paidAt(maps.Keys(d.chains))
	if err != nil {
		return err
	}
	idle := slices.MinFunc(slices.Collect(maps.Keys(d.chains)), func(a, b settle.Hash) int { return cmp.Compare(paid[a], paid[b]) })
	if paid[idle]+idleFor > d.cfg.Books.seconds() {
		return refusal(CodeBusy, "model", "%d models have been paid for here of late, which is the limit: no other can be", maxPriced)
	}
	delete(d.chains, idle)
	return nil
}

// chainLocked finds the price of a model: a followed one, one that goes on, or a fresh one.
func (d *Desk) chainLocked(model settle.Hash, by settle.Node) (*market.PriceChain, error) {
	if chain := d.chains[model]; chain != nil {
		return chain, nil
	}
	if d.fresh[model] == nil {
		old, err := d.readPrices(model)
		if err != nil {
			return nil, err
		}
		if chain := old[model]; chain != nil {
			if err := d.placeLocked(); err != nil {
				return nil, err
			}
			d.chains[model] = chain
			return chain, nil
		}
	}
	return d.freshLocked(model, by)
}

func lastPaidKey(model settle.Hash) []byte { return append([]byte{'T'}, model[:]...) }

// paidAt says when models were last paid for with something delivered, in Unix seconds.
func (b *Books) paidAt(models iter.Seq[settle.Hash]) (map[settle.Hash]uint64, error) {
	paid := map[settle.Hash]uint64{}
	return paid, b.store.View(func(tx *kv.Tx) error {
		for model := range models {
			at, err := page{tx}.amount(lastPaidKey(model))
			if err != nil {
				return err
			}
			paid[model] = uint64(at)
		}
		return nil
	})
}

// price is the price of a model that is known, brought up to date, for a node that asks.
func (d *Desk) price(id string, by settle.Node) (price, error) {
	model, err := modelOf(id)
	if err != nil {
		return price{}, err
	}
	if _, err := d.parts(id, by); err != nil {
		var known *Refusal
		if errors.As(err, &known) { // it may come to be known
			return price{}, err
		}
		return price{}, refusal(CodeNotFound, "model", "model %s: %v", id, err)
	}
	d.pricing.Lock()
	defer d.pricing.Unlock()
	chain, err := d.chainLocked(model, by)
	if err != nil {
		return price{}, err
	}
	if err := d.followLocked(model, chain, d.moment().Epoch); err != nil {
		return price{}, err
	}
	record, hash := chain.Last()
	return price{record, hash}, nil
}

// prices are those that anybody sees, by id. The record of a fresh model is not given away: when it is
// forgotten another one of the same epoch is made, and who had both would have to believe that the
// settlement shows different prices to different people.
func (d *Desk) prices() (all []ModelPrice, err error) {
	d.pricing.Lock()
	defer d.pricing.Unlock()
	now := d.moment().Epoch
	for model, chain := range d.shownLocked() {
		if err := d.followLocked(model, chain, now); err != nil {
			return nil, err
		}
		record, hash := chain.Last()
		price := ModelPrice{Model: fmt.Sprintf("%x", model[:]), Raw: uint64(record.State.Price), Hash: hash}
		if d.fresh[model] == nil {
			var err error
			if price.Record, err = record.Sign(d.cfg.Key); err != nil {
				return nil, err
			}
		}
		all = append(all, price)
	}
	slices.SortFunc(all, func(a, b ModelPrice) int { return cmp.Compare(a.Model, b.Model) })
	return all, nil
}

func (d *Desk) firstPriceLocked(model settle.Hash, chain *market.PriceChain) error {
	p, sequence, refSet := d.cfg.Governor.Params(d.moment().Epoch)
	rules := market.RulesOf(p)
	return d.appendLocked(model, chain, market.PriceRecord{State: rules.Start(0, market.Price(d.cfg.FirstRaw)), Rules: rules,
		Sequence: sequence, Ref: market.Reference{PerFiat: settle.Amount(p.Ref), Set: refSet}}, 0)
}

// followLocked makes the records that are missing until now.
func (d *Desk) followLocked(model settle.Hash, chain *market.PriceChain, now uint64) error {
	last, _ := chain.Last()
	if last.State.Epoch >= now {
		return nil
	}
	busy, err := d.cfg.Books.doneEpochs(model)
	if err != nil {
		return err
	}
	for epoch := last.State.Epoch + 1; epoch <= now; epoch++ {
		_, sequence, _ := d.cfg.Governor.Params(epoch)
		last, _ := chain.Last()
		if busy[epoch] || sequence > last.Sequence || epoch == now {
			if err := d.nextPriceLocked(model, chain, epoch); err != nil {
				return err
			}
		}
	}
	return nil
}

// nextPriceLocked makes the record of an epoch that has begun.
func (d *Desk) nextPriceLocked(model settle.Hash, chain *market.PriceChain, epoch uint64) error {
	ended, _, _ := d.cfg.Governor.Params(epoch - 1)
	p, sequence, refSet := d.cfg.Governor.Params(epoch)
	load, err := d.load(model, epoch, market.RulesOf(ended))
	if err != nil {
		return err
	}
	last, hash := chain.Last()
	rules := market.RulesOf(p)
	state, err := rules.Next(last.State, epoch, load)
	if err != nil {
		return err
	}
	return d.appendLocked(model, chain, market.PriceRecord{Previous: hash, State: state, Load: load, Rules: rules,
		Sequence: sequence, Ref: market.Reference{PerFiat: settle.Amount(p.Ref), Set: refSet}, Issued: last.Issued + 1}, shownEpochs(rules))
}

// appendLocked issues a record: it is on the disk before anybody sees it, unless the model is a
// fresh one. What was done more than keep epochs before is forgotten with it.
func (d *Desk) appendLocked(model settle.Hash, chain *market.PriceChain, r market.PriceRecord, keep uint64) error {
	r.Network, r.Model = d.cfg.Network, [32]byte(model)
	r.Issued = max(r.Issued, d.seconds(), r.Ref.Set)
	signed, err := r.Sign(d.cfg.Key)
	if err != nil {
		return err
	}
	f := d.fresh[model]
	if f != nil {
		f.records = append(f.records, freshRecord{r.State.Epoch, signed})
	} else if err := d.cfg.Books.keepPrice(model, r.State.Epoch, signed, keep); err != nil {
		return err
	}
	if err := chain.Append(signed); err != nil {
		return fmt.Errorf("%w: a price that was made: %w", ErrBooks, err)
	}
	if d.cfg.Publish != nil && f == nil {
		d.cfg.Publish(signed)
	}
	return nil
}

// shownEpochs are how many epochs what a node showed counts for, at most as many as a
// Usage holds.
func shownEpochs(r market.PriceRules) uint64 {
	return min((settle.Day+r.EpochSeconds-1)/r.EpochSeconds, 1<<10)
}

// load is what moves the price of an epoch: what was settled in the one before, and what
// nodes showed in a day by what they were paid for.
//
// What a node announces does not bound it: who announces less than he does would have the price
// rise at will. Nor does a canary that it passed add to it: that is the word of the node which
// tried it, keys cost nothing, and passes of made-up nodes would have the price fall to its floor.
func (d *Desk) load(model settle.Hash, epoch uint64, rules market.PriceRules) (market.Load, error) {
	first := epoch - min(epoch, shownEpochs(rules)) // epochs after it are looked at
	usage, all := market.NewUsage(first), map[string]uint64{}
	type at struct {
		epoch uint64
		node  settle.Node
	}
	sums := map[at]uint64{} // of a node, in thousandths of a token
	err := d.cfg.Books.eachDone(model, func(e uint64, w done) error {
		if e <= first || e > epoch {
			return nil
		}
		var errs []error
		for _, by := range w.Workers {
			milli := mulDiv(w.Tokens*1000, by.Share, settle.PPB)
			sums[at{e, by.Node}] += milli
			all[by.Node.String()] = math.MaxUint64
			errs = append(errs, usage.Count(e, market.Work{Payer: w.Payer, Tokens: w.Tokens, Share: by.Share, Among: by.Among}),
				usage.Show(e, by.Node.String(), milli/max(w.Seconds, 1)))
		}
		return errors.Join(errs...)
	})
	if err != nil {
		return market.Load{}, err
	}
	for a, milli := range sums { // many requests at a time show more than each of them
		if err := usage.Show(a.epoch, a.node.String(), milli/rules.EpochSeconds); err != nil {
			return market.Load{}, err
		}
	}
	return usage.Close(epoch, rules, all)
}

// keepPrice writes a record down, and forgets what is older than it needs.
func (b *Books) keepPrice(model settle.Hash, epoch uint64, signed []byte, keep uint64) error {
	return b.store.Update(func(tx *kv.Tx) error {
		if err := tx.Put(modelKey('v', model, epoch), signed); err != nil || epoch < keep {
			return err
		}
		var old [][]byte
		err := tx.Each(modelKey('u', model, 0)[:33], func(k, _ []byte) error {
			if binary.BigEndian.Uint64(k[33:]) > epoch-keep || len(old) == maxForget {
				return errEnough
			}
			old = append(old, slices.Clone(k))
			return nil
		})
		if err != nil && !errors.Is(err, errEnough) {
			return err
		}
		for _, k := range old {
			if err := tx.Delete(k); err != nil {
				return err
			}
		}
		return nil
	})
}

// maxForget bounds what one update forgets; the next one goes on.
const maxForget = 4096

// eachDone calls fn for what was settled of a model and is not forgotten.
func (b *Books) eachDone(model settle.Hash, fn func(epoch uint64, w done) error) error {
	return b.store.View(func(tx *kv.Tx) error {
		return tx.Each(modelKey('u', model, 0)[:33], func(k, v []byte) error {
			var w done
			if err := decode(k, v, &w); err != nil {
				return err
			}
			return fn(binary.BigEndian.Uint64(k[33:]), w)
		})
	})
}

// doneEpochs are the epochs in which something of a model was settled.
func (b *Books) doneEpochs(model settle.Hash) (map[uint64]bool, error) {
	epochs := map[uint64]bool{}
	err := b.eachDone(model, func(epoch uint64, _ done) error { epochs[epoch] = true; return nil })
	return epochs, err
}
