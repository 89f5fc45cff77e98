package cashier

import (
	"cmp"
	"errors"
	"maps"
	"slices"

	"kvasird/market"
	"kvasird/settle"
)

// The price of a model that nobody has paid for is in memory alone. Nodes announce what models they
// like, and a record that is issued is in the books, in the Terms and in every node's list for
// ever. It is issued when a request for the model is first settled with something delivered.
// Until then it may be forgotten, and is made anew when somebody asks again: no quote waits for a
// place.
const (
	maxFresh   = 256 // of all nodes
	maxFreshOf = 16  // that a node was the first to ask for: as many as it can announce
	// maxFreshRecords bounds the records of one, which has at most one in an epoch. Quotes end long
	// before.
	maxFreshRecords = 64
)

// freshPrice is the price of a model that nobody has paid for.
type freshPrice struct {
	chain   *market.PriceChain
	records []freshRecord // all of chain
	by      settle.Node   // who asked first
	asked   uint64        // last, Unix seconds
}

type freshRecord struct {
	epoch  uint64
	signed []byte
}

// freshLocked finds or makes the price of a model without issued records. One that was paid for
// before a crash kept its record from the books is issued at once.
func (d *Desk) freshLocked(model settle.Hash, by settle.Node) (*market.PriceChain, error) {
	if err := d.placeLocked(); err != nil {
		return nil, err
	}
	f := d.fresh[model]
	if f == nil || len(f.records) >= maxFreshRecords {
		d.crowdLocked(by)
		f = &freshPrice{chain: market.NewPriceChain(d.cfg.Network, [32]byte(model), d.node), by: by}
		d.fresh[model] = f
		err := d.firstPriceLocked(model, f.chain)
		busy, readErr := d.cfg.Books.doneEpochs(model)
		if err = errors.Join(err, readErr); err != nil {
			delete(d.fresh, model)
			return nil, err
		}
		if len(busy) > 0 {
			return f.chain, d.issueLocked(model)
		}
	}
	f.asked = d.seconds()
	return f.chain, nil
}

// crowdLocked makes room for one more of a node's: its own oldest goes where it has its part, else
// the oldest of who has most.
func (d *Desk) crowdLocked(by settle.Node) {
	count := map[settle.Node]int{}
	for _, f := range d.fresh {
		count[f.by]++
	}
	from := by
	switch {
	case count[by] >= maxFreshOf:
	case len(d.fresh) < maxFresh:
		return
	default:
		from = slices.MaxFunc(slices.Collect(maps.Keys(count)), func(a, b settle.Node) int { return cmp.Compare(count[a], count[b]) })
	}
	var oldest settle.Hash
	for model, f := range d.fresh {
		if o := d.fresh[oldest]; f.by == from && (o == nil || f.asked < o.asked) {
			oldest = model
		}
	}
	delete(d.fresh, oldest)
}

// issue writes down and tells the price of a model that was paid for.
func (d *Desk) issue(id string) error {
	model, err := modelOf(id)
	if err != nil {
		return err
	}
	d.pricing.Lock()
	defer d.pricing.Unlock()
	if d.fresh[model] == nil {
		return nil
	}
	if err := d.placeLocked(); err != nil {
		return err
	}
	return d.issueLocked(model)
}

func (d *Desk) issueLocked(model settle.Hash) error {
	f := d.fresh[model]
	for _, r := range f.records {
		if err := d.cfg.Books.keepPrice(model, r.epoch, r.signed, 0); err != nil {
			return err
		}
	}
	delete(d.fresh, model)
	d.chains[model] = f.chain
	for _, r := range f.records {
		if d.cfg.Publish != nil {
			d.cfg.Publish(r.signed)
		}
	}
	return nil
}

// shownLocked are the models whose prices anybody sees: those that were paid for, and of the others
// what was asked for last, as far as there is room. A fresh one with all the records that it may have
// is forgotten.
func (d *Desk) shownLocked() map[settle.Hash]*market.PriceChain {
	maps.DeleteFunc(d.fresh, func(_ settle.Hash, f *freshPrice) bool { return len(f.records) >= maxFreshRecords })
	shown := maps.Clone(d.chains)
	others := slices.SortedFunc(maps.Keys(d.fresh), func(a, b settle.Hash) int { return cmp.Compare(d.fresh[b].asked, d.fresh[a].asked) })
	for _, model := range others[:min(len(others), maxPriced-len(shown))] {
		shown[model] = d.fresh[model].chain
	}
	return shown
}
