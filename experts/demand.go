package experts

import "sync/atomic"

// count takes in what the router chose. It allocates only when an expert is met that is beyond
// all before.
func (p *program) count(d *Dispatcher, experts []int32) {
	table := p.demand.Load()
	for _, e := range experts {
		if table == nil || int(e) >= len(*table) {
			table = p.grow(d, int(e))
		}
		(*table)[e].Add(1)
	}
}

// grow makes the table reach an expert. What is counted in the old one meanwhile may be lost.
func (p *program) grow(d *Dispatcher, expert int) *[]atomic.Uint64 {
	d.mu.Lock()
	defer d.mu.Unlock()
	old := p.demand.Load()
	if old != nil && expert < len(*old) {
		return old
	}
	size := 64
	for size <= expert {
		size *= 2
	}
	table := make([]atomic.Uint64, size)
	if old != nil {
		for i := range *old {
			table[i].Store((*old)[i].Load())
		}
	}
	p.demand.Store(&table)
	return &table
}

// Demand returns how many pairs the router chose since the dispatcher was made, by layer and
// expert. A layer ends with its last expert that was chosen; one without any is empty.
func (d *Dispatcher) Demand() [][]uint64 {
	layers := *d.programs.Load()
	out := make([][]uint64, len(layers))
	for l, programs := range layers {
		for _, p := range programs {
			table := p.demand.Load()
			if table == nil {
				continue
			}
			for e := range *table {
				n := (*table)[e].Load()
				for n > 0 && e >= len(out[l]) {
					out[l] = append(out[l], 0)
				}
				if n > 0 {
					out[l][e] += n
				}
			}
		}
	}
	return out
}
