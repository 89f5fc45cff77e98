package experts

import (
	"fmt"
	"slices"
	"strings"
)

// Gap is what nobody computes now of some layers, which lack the same experts.
type Gap struct {
	Layers  []int // ascending
	Experts []int // ascending, each once
}

// CoverageError says which experts nobody computes now, and why those who might do not. It
// ends once a worker for them is back.
type CoverageError struct {
	Gaps    []Gap
	Reasons []string
}

func (e *CoverageError) Error() string {
	const most = 4
	var gaps []string
	for _, g := range e.Gaps[:min(len(e.Gaps), most)] {
		gaps = append(gaps, fmt.Sprintf("experts %s of layers %s", ranges(g.Experts), ranges(g.Layers)))
	}
	if more := len(e.Gaps) - most; more > 0 {
		gaps = append(gaps, fmt.Sprintf("some of other layers, in %d more ways", more))
	}
	reasons := "no peer offers them"
	if len(e.Reasons) > 0 {
		reasons = strings.Join(e.Reasons, "; ")
	}
	return fmt.Sprintf("no worker for %s: %s", strings.Join(gaps, ", "), reasons)
}

// Covered is nil while every one of the first experts of some layers has somebody who computes
// it, a worker that proved itself and answers or the backbone's own copy; else it is a
// *CoverageError. Of a layer without a call so far it knows nothing, and takes it for covered.
func (d *Dispatcher) Covered(layers []int, experts int) error {
	table := *d.programs.Load()
	e := &CoverageError{}
	for _, layer := range layers {
		if layer >= len(table) {
			continue
		}
		for _, p := range table[layer] {
			missing := subtract([]span{{0, int32(experts)}}, d.computed(p))
			if len(missing) == 0 {
				continue
			}
			e.add(layer, missing)
			if len(e.Reasons) == 0 {
				e.Reasons = d.reasons(p)
			}
			break
		}
	}
	if len(e.Gaps) == 0 {
		return nil
	}
	return e
}

func (e *CoverageError) add(layer int, missing []span) {
	var list []int
	for _, s := range missing {
		for x := s.from; x < s.to; x++ {
			list = append(list, int(x))
		}
	}
	at := slices.IndexFunc(e.Gaps, func(g Gap) bool { return slices.Equal(g.Experts, list) })
	if at < 0 {
		at = len(e.Gaps)
		e.Gaps = append(e.Gaps, Gap{Experts: list})
	}
	e.Gaps[at].Layers = append(e.Gaps[at].Layers, layer)
}

// computed are the experts of a program that a call would find somebody for.
func (d *Dispatcher) computed(p *program) (list []span) {
	r := p.routes.Load()
	for _, replica := range r.replicas {
		if trust(r.sessions[replica.Peer].trust.Load()) != banned {
			list = append(list, span{replica.From, replica.To})
		}
	}
	list = union(list, nil)
	if local := d.cfg.Local; local != nil && (p.local.ready.Load() || !p.local.tried.Load()) {
		list = union(list, spansOf(d.held.set.Load().slices, p.layer))
	}
	return list
}
