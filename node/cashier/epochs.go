package cashier

import (
	"encoding/binary"
	"maps"
	"slices"

	"kvasird/node/kv"
	"kvasird/settle"
)

// endEpochs brings the prices of all models up to date, and the reserve.
func (d *Desk) endEpochs() error {
	now := d.moment().Epoch
	if err := d.cfg.Books.endReserve(now, func(epoch uint64) settle.Params {
		p, _, _ := d.cfg.Governor.Params(epoch)
		return p
	}); err != nil {
		return err
	}
	d.pricing.Lock()
	defer d.pricing.Unlock()
	for _, model := range slices.Collect(maps.Keys(d.chains)) {
		if err := d.followLocked(model, d.chains[model], now); err != nil {
			return err
		}
	}
	return nil
}

// endReserve takes the fees of the epochs before now into the reserve, each once.
func (b *Books) endReserve(now uint64, params func(epoch uint64) settle.Params) error {
	next, ok, err := b.nextEnd()
	if err != nil || ok && next >= now {
		return err
	}
	return b.store.Update(func(tx *kv.Tx) error {
		p := page{tx}
		var r settle.Reserve
		has, err := p.load([]byte{'m'}, &r)
		if err != nil {
			return err
		}
		for e := next; ok && has && e < now; e++ {
			fees, err := p.amount(feesKey(e))
			if err == nil {
				r, err = params(e).EndEpoch(r, fees)
			}
			if err != nil {
				return err
			}
		}
		if has {
			if err := p.save([]byte{'m'}, r); err != nil {
				return err
			}
		}
		for e := next; ok && e < now; e++ {
			if err := tx.Delete(feesKey(e)); err != nil {
				return err
			}
		}
		return tx.Put([]byte{'z'}, binary.BigEndian.AppendUint64(nil, now))
	})
}

// nextEnd is the first epoch whose fees the reserve has not taken.
func (b *Books) nextEnd() (next uint64, ok bool, err error) {
	err = b.store.View(func(tx *kv.Tx) error {
		v, has, err := tx.Get([]byte{'z'})
		if err == nil && has {
			ok = true
			next, err = number(v)
		}
		return err
	})
	return next, ok, err
}

func feesKey(epoch uint64) []byte { return binary.BigEndian.AppendUint64([]byte{'f'}, epoch) }

// amount is a number of the store, 0 when it is not there.
func (p page) amount(key []byte) (settle.Amount, error) {
	v, ok, err := p.Get(key)
	if err != nil || !ok {
		return 0, err
	}
	n, err := number(v)
	return settle.Amount(n), err
}

func (p page) putAmount(key []byte, a settle.Amount) error {
	return p.Put(key, binary.BigEndian.AppendUint64(nil, uint64(a)))
}
