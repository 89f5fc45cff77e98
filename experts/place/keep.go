package place

import (
	"cmp"
	"math"
	"slices"
)

// Room is what a backbone keeps experts in.
type Room struct {
	Sizes  []int64 // bytes of an expert, by layer; 0: the layer has none
	Budget int64   // bytes, which what is kept stays within
}

// An expert that is held stays until another one was used so much more: by inertia, and by
// luck standard deviations of what was counted. So neither a draw of the router nor a rounding
// has weights fetched again and again.
const (
	inertia = 0.25
	luck    = 2
)

// candidate is an expert that may be kept.
type candidate struct {
	layer, id int32
	held      bool
	worth     float64 // for each byte
}

// Keep returns the experts to keep, ascending by layer: those most used for their bytes. use is
// by layer and expert, in any one unit that counts; held is what is kept now. What nobody used
// is kept only while there is room. A layer of which any is kept takes the bytes of two at least,
// as kernels hold it.
func (r Room) Keep(use [][]float64, held [][]int32) [][]int32 {
	list := r.candidates(use, held)
	slices.SortFunc(list, func(a, b candidate) int {
		switch {
		case a.worth != b.worth:
			return cmp.Compare(b.worth, a.worth)
		case a.held && !b.held:
			return -1
		case b.held && !a.held:
			return 1
		case a.layer != b.layer:
			return cmp.Compare(a.layer, b.layer)
		}
		return cmp.Compare(a.id, b.id)
	})
	keep, left := make([][]int32, len(r.Sizes)), r.Budget
	for _, c := range list {
		cost := r.Sizes[c.layer]
		switch len(keep[c.layer]) {
		case 0:
			cost *= 2
		case 1:
			cost = 0
		}
		if cost <= left {
			left -= cost
			keep[c.layer] = append(keep[c.layer], c.id)
		}
	}
	for _, ids := range keep {
		slices.Sort(ids)
	}
	return keep
}

// candidates are the experts that were used or are held.
func (r Room) candidates(use [][]float64, held [][]int32) (list []candidate) {
	for l, size := range r.Sizes {
		if size <= 0 {
			continue
		}
		var row []float64
		if l < len(use) {
			row = use[l]
		}
		has := make([]bool, len(row))
		if l < len(held) {
			for _, e := range held[l] {
				if int(e) < len(row) {
					has[e] = true
				} else {
					list = append(list, candidate{int32(l), e, true, 0})
				}
			}
		}
		for id, n := range row {
			if has[id] {
				n += inertia*n + luck*math.Sqrt(n)
			}
			if n > 0 || has[id] {
				list = append(list, candidate{int32(l), int32(id), has[id], n / float64(size)})
			}
		}
	}
	return list
}

// Bytes is what experts take that are kept.
func (r Room) Bytes(keep [][]int32) (n int64) {
	for l, ids := range keep {
		if len(ids) > 0 {
			n += r.Sizes[l] * int64(max(len(ids), 2))
		}
	}
	return n
}
