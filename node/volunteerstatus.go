package node

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"kvasird/ggml/gguf"
	"kvasird/market"
	"kvasird/node/api"
	"kvasird/p2p"
)

// has reports whether something of a model is here, or on its way.
func (v *volunteer) has(id gguf.ModelID) bool {
	if v == nil {
		return false
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	return len(v.here[id]) > 0
}

// troubles says what is in the way of parts.
func (v *volunteer) troubles() []string {
	v.mu.Lock()
	defer v.mu.Unlock()
	var out []string
	for p, t := range v.trouble {
		if time.Since(t.at) < troubleTime {
			out = append(out, fmt.Sprintf("experts %v: %s", p.Slice, t.text))
		}
	}
	slices.Sort(out)
	return out
}

var partStates = map[market.State]api.PartState{
	market.Claimed: api.PartClaimed, market.Loading: api.PartLoading,
	market.Serving: api.PartServing, market.Leaving: api.PartLeaving,
}

// volunteerStatus says what this node has taken on; nil when it is neither a
// volunteer nor a stage.
func (n *Node) volunteerStatus() *api.Volunteer {
	used, reserved := n.store.Used()
	limit, _ := n.cfg.Budget.held(n.device)
	out := &api.Volunteer{
		Downloads: n.weights.progress(),
		Disk:      api.Share{Used: used + reserved, Limit: n.cfg.Budget.limits.disk},
		Memory:    api.Share{Used: n.workers.bytes(), Limit: limit}, OnGPU: onGPU(n.device),
	}
	switch v, st := n.exchange.volunteer, n.exchange.stager; {
	case v != nil:
		out.Paused, out.Parts, out.Troubles = v.paused.Load(), n.parts(), v.troubles()
	case st != nil:
		st.status(out)
	default:
		return nil
	}
	return out
}

// parts lists what the volunteer holds, by model and slice.
func (n *Node) parts() []api.Part {
	n.exchange.mu.Lock()
	shown := n.exchange.shown // never changed, only replaced
	n.exchange.mu.Unlock()
	var out []api.Part
	for id, list := range shown {
		name := ""
		if m := n.store.Model(id); m != nil {
			name = m.Name()
		}
		for _, h := range list {
			out = append(out, api.Part{Model: name, ID: id.String(), Slice: apiSlice(h.Slice), State: partStates[h.State]})
		}
	}
	slices.SortFunc(out, func(a, b api.Part) int {
		return cmp.Or(cmp.Compare(a.ID, b.ID), cmp.Compare(a.Slice.LayerBegin, b.Slice.LayerBegin),
			cmp.Compare(a.Slice.ExpertBegin, b.Slice.ExpertBegin))
	})
	return out
}

func apiReach(r p2p.Report) *api.Reach {
	out := &api.Reach{
		Reach: r.Reach, NAT: r.NAT, MDNS: r.MDNS, DHT: r.DHT,
		Listening: r.Listening, Observed: r.Observed, Announced: r.Announced, Relayed: r.Relayed,
		DirectPeers: r.DirectPeers, RelayedPeers: r.RelayedPeers,
		Bootstrap: apiContacts(r.Bootstrap), Relays: apiContacts(r.Relays), Unmet: apiContacts(r.Unmet),
		Advice: r.Advice,
	}
	if s := r.Serving; s != nil {
		out.Serving = &api.Relaying{Reservations: s.Reservations, Circuits: s.Circuits, Refused: s.Refused, Bytes: s.Bytes}
	}
	return out
}

func apiContacts(list []p2p.KeptPeer) []api.Contact {
	var out []api.Contact
	for _, k := range list {
		out = append(out, api.Contact{ID: k.ID.String(), Addrs: k.Addrs, State: peerStates[k.State], Error: k.Err, Reserved: k.Holds})
	}
	return out
}
