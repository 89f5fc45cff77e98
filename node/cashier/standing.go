package cashier

import (
	"errors"

	"kvasird/node/kv"
	"kvasird/settle"
)

// Standing is how a node stands among the holders of models now.
func (d *Desk) Standing(n settle.Node) (settle.Standing, error) {
	epoch := d.moment().Epoch
	p, _, _ := d.cfg.Governor.Params(epoch)
	return d.cfg.Books.standing(p, n, epoch)
}

func (b *Books) standing(p settle.Params, n settle.Node, epoch uint64) (s settle.Standing, err error) {
	err = b.store.View(func(tx *kv.Tx) error {
		l, err := page{tx}.linked(n)
		bond, bondErr := page{tx}.bond(n)
		if err = errors.Join(err, bondErr); err != nil {
			return err
		}
		s, err = p.Standing(l.Wallet, bond, max(epoch, bond.Epoch)) // it may have been paid in the next one
		return err
	})
	return s, err
}
