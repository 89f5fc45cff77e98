package experts

// draft computes what is here of a call; the rows of other experts are zero. It asks no peer,
// waits for nobody, and tells and counts nothing of what a real call does.
func (d *Dispatcher) draft(p *program, call *Call) error {
	clear(call.Out)
	if d.cfg.Local == nil {
		return nil
	}
	d.held.using.RLock() // what is taken here stays here until it is computed
	defer d.held.using.RUnlock()
	r := d.runs.get(d, nil)
	defer d.runs.put(r)
	r.begin(p, call)
	r.here = r.here[:0]
	r.pending = r.takeLocal(r.pending)
	r.computeHere()
	if r.localFailed {
		return r.missingError()
	}
	return nil
}

// Resident reports whether some experts are here to draft with now.
func (d *Dispatcher) Resident() bool { return d.cfg.Local != nil && len(d.held.set.Load().slices) > 0 }
