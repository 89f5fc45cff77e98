package experts

import (
	"slices"
	"sync"
	"sync/atomic"
)

// Local is the backbone's own copy of some experts: all of them as a last resort, or the most
// used ones, which a Cache changes.
type Local struct {
	Kernel Kernel  // holds at least what Slices and SetLocal say
	Slices []Slice // until SetLocal says otherwise
	First  bool    // compute here whatever is here; else only what no peer computes
}

// localSet is which experts the backbone has itself, as calls look it up. It does not change.
type localSet struct {
	slices []Slice
	layers [][]uint64 // bits of the experts, by layer
}

func newLocalSet(list []Slice) *localSet {
	s := &localSet{slices: slices.Clone(list)}
	for _, l := range list {
		for layer := l.FirstLayer; layer < l.EndLayer; layer++ {
			for layer >= len(s.layers) {
				s.layers = append(s.layers, nil)
			}
			for e := l.FirstExpert; e < l.EndExpert; e++ {
				for e/64 >= len(s.layers[layer]) {
					s.layers[layer] = append(s.layers[layer], 0)
				}
				s.layers[layer][e/64] |= 1 << (e % 64)
			}
		}
	}
	return s
}

// some says whether any expert of a layer is here.
func (s *localSet) some(layer int) bool { return layer < len(s.layers) && s.layers[layer] != nil }

func (s *localSet) holds(layer int, expert int32) bool {
	if !s.some(layer) || int(expert)/64 >= len(s.layers[layer]) {
		return false
	}
	return s.layers[layer][expert/64]>>(expert%64)&1 != 0
}

// holding is the set of now, with those who use it.
type holding struct {
	set   atomic.Pointer[localSet]
	using sync.RWMutex // read-held from looking an expert up until it is computed
}

// SetLocal changes which experts the backbone computes itself. Config.Local's kernel holds them
// before it is called; when it returns, no call asks the kernel for any other one, so that those
// may be dropped. It waits for what is being computed here, and may be called while calls run.
// Without Config.Local it does nothing.
func (d *Dispatcher) SetLocal(list []Slice) {
	if d.cfg.Local == nil {
		return
	}
	d.held.set.Store(newLocalSet(list))
	d.held.using.Lock()
	//lint:ignore SA2001 who used the set of before is done, and nobody does any more
	d.held.using.Unlock()
	d.announce() // calls that wait for coverage look again
}

// LocalPairs returns the number of pairs that the backbone's own copy computed.
func (d *Dispatcher) LocalPairs() uint64 { return d.ownPairs.Load() }

// Pairs returns the number of pairs of all calls that succeeded, without canaries.
func (d *Dispatcher) Pairs() uint64 { return d.allPairs.Load() }
