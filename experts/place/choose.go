package place

import "slices"

// Block is a range of layers and experts: [FromLayer, ToLayer) × [From, To).
type Block struct {
	FromLayer, ToLayer int32
	From, To           int32
}

// Candidate is a peer that might be connected to. Less Cost is better: its round trip.
type Candidate struct {
	Cost   float32
	Blocks []Block
}

// Choose returns the indexes of the candidates to connect to, ascending: all if they are no more
// than most. Else those of least cost that hold an expert of which fewer than replicas holders
// are chosen yet, and, if these are not most, the next ones by cost. No more than most are
// chosen, so experts may be left without a holder.
func Choose(list []Candidate, replicas, most int) []int {
	order := make([]int, len(list))
	for i := range order {
		order[i] = i
	}
	if len(list) <= most {
		return order
	}
	slices.SortStableFunc(order, func(a, b int) int {
		switch {
		case list[a].Cost < list[b].Cost:
			return -1
		case list[a].Cost > list[b].Cost:
			return 1
		}
		return 0
	})
	var chosen, rest []int
	held := map[int32][]int32{}                           // holders chosen, by layer and expert
	for want := int32(1); int(want) <= replicas; want++ { // every expert once before any twice
		rest = rest[:0]
		for _, i := range order {
			if len(chosen) < most && adds(held, &list[i], want) {
				chosen = append(chosen, i)
				continue
			}
			rest = append(rest, i)
		}
		order = append(order[:0], rest...)
	}
	chosen = append(chosen, order[:most-len(chosen)]...)
	slices.Sort(chosen)
	return chosen
}

// adds says whether a candidate holds an expert that fewer than want hold, and then counts it.
func adds(held map[int32][]int32, c *Candidate, want int32) bool {
	scarce := false
	for _, b := range c.Blocks {
		for l := b.FromLayer; l < b.ToLayer && !scarce; l++ {
			row := held[l]
			for e := b.From; e < b.To && !scarce; e++ {
				scarce = int(e) >= len(row) || row[e] < want
			}
		}
	}
	if !scarce {
		return false
	}
	for _, b := range c.Blocks {
		for l := b.FromLayer; l < b.ToLayer; l++ {
			row := held[l]
			if missing := int(b.To) - len(row); missing > 0 {
				row = append(row, make([]int32, missing)...)
				held[l] = row
			}
			for e := b.From; e < b.To; e++ {
				row[e]++
			}
		}
	}
	return true
}
