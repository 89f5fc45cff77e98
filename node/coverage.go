package node

import (
	"cmp"
	"slices"
	"time"

	"kvasird/ggml/gguf"
	"kvasird/market"
	"kvasird/node/api"
)

// maxSegments bounds the scarcest ranges that are listed.
const maxSegments = 64

// coverage shows what the table knows of every model, and the windows of this node.
func (s *exchange) coverage(now time.Time) []api.CoverageMap {
	maps := []api.CoverageMap{}
	for _, id := range s.table.Models(now) {
		c, ok := s.table.Coverage(id, now)
		if !ok {
			continue
		}
		m := coverageMap(c, s.table.Holders(id, now))
		m.Price = s.prices.shown(id, now)
		if w, ok := s.table.WindowCoverage(id, now, s.stager.windows(id)...); ok {
			m.Ring = ringMap(w, s.windows(id, now))
		}
		maps = append(maps, m)
	}
	return maps
}

// windows lists the windows of a model, this node's too.
func (s *exchange) windows(id gguf.ModelID, now time.Time) []market.WindowHolder {
	return append(s.table.Windows(id, now), s.stager.windows(id)...)
}

// coverageMap shows people what a table knows of a model.
func coverageMap(c market.Coverage, holders []market.Holder) api.CoverageMap {
	m := api.CoverageMap{Model: c.Name, ID: c.Model.String(), Target: c.Target, Experts: c.Shape.Experts}
	for _, l := range c.Layers {
		row := api.LayerMap{Layer: l.Layer, Replicas: make([]int, c.Shape.Experts)}
		for _, s := range l.Segments {
			for e := s.Experts.Begin; e < s.Experts.End; e++ {
				row.Replicas[e] = s.Replicas
				if s.Claimed > 0 {
					if row.Claimed == nil {
						row.Claimed = make([]int, c.Shape.Experts)
					}
					row.Claimed[e] = s.Claimed
				}
			}
			if s.Scarcity > 0 {
				m.Segments = append(m.Segments, api.Segment{
					Layer: l.Layer, ExpertBegin: s.Experts.Begin, ExpertEnd: s.Experts.End,
					Replicas: s.Replicas, Target: s.Target, Scarcity: s.Scarcity,
				})
			}
		}
		m.Layers = append(m.Layers, row)
	}
	slices.SortStableFunc(m.Segments, func(a, b api.Segment) int { return cmp.Compare(b.Scarcity, a.Scarcity) })
	m.Segments = m.Segments[:min(len(m.Segments), maxSegments)]
	for _, h := range holders {
		m.Holders = append(m.Holders, apiHolder(h))
	}
	return m
}

// ringMap shows who runs windows of a model; nil when nobody does.
func ringMap(c market.WindowCoverage, holders []market.WindowHolder) *api.RingMap {
	if len(holders) == 0 {
		return nil
	}
	m := &api.RingMap{Layers: c.Layers, Chains: c.Chains}
	for _, r := range c.Missing {
		m.Missing = append(m.Missing, api.LayerSpan{Begin: r.Begin, End: r.End})
	}
	for _, h := range holders {
		w := apiWindow(h.WindowHolding)
		w.Peer = h.Peer
		m.Windows = append(m.Windows, w)
	}
	slices.SortStableFunc(m.Windows, func(a, b api.Window) int { return cmp.Compare(a.Layers.Begin, b.Layers.Begin) })
	return m
}

func apiWindow(w market.WindowHolding) api.Window {
	return api.Window{
		Layers: api.LayerSpan{Begin: w.Layers.Begin, End: w.Layers.End}, State: partStates[w.State],
		Sequences: w.Slots, Free: w.Free, TokenMicro: w.Token.Microseconds(),
	}
}

func apiHolder(h market.Holder) api.Holder {
	out := api.Holder{Peer: h.Peer, Whole: h.News.Full}
	for _, hold := range h.News.Holdings {
		s := apiSlice(hold.Slice)
		switch hold.State {
		case market.Serving:
			out.Serving = append(out.Serving, s)
		case market.Leaving:
			out.Serving, out.Leaving = append(out.Serving, s), true
		default:
			out.Claimed = append(out.Claimed, s)
		}
	}
	return out
}

func apiSlice(s gguf.Slice) api.Slice {
	return api.Slice{
		LayerBegin: s.Layers.Begin, LayerEnd: s.Layers.End, ExpertBegin: s.Experts.Begin, ExpertEnd: s.Experts.End,
	}
}
