package cashier

import "kvasird/settle/govern"

// moment is now, and the epoch that runs.
func (d *Desk) moment() govern.Moment {
	return d.cfg.Governor.At(uint64(d.cfg.Began.Unix()), d.cfg.Books.seconds())
}
