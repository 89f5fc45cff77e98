package market

import (
	"errors"
	"fmt"
	"slices"

	"kvasird/ggml/gguf"
)

// StageModel is what a Stager must know of a model: where it may be cut, and what windows take.
type StageModel struct {
	ID     gguf.ModelID
	Cuts   []int       // layers at which a window may begin, ascending, without 0
	Layers []Footprint // of every layer; memory with what its sequences take
	First  Footprint   // more of the window with the first layer: the embedding
	Last   Footprint   // more of the window with the last layer: the output head
	Shared Footprint   // of First and Last, once too often where one window has both
}

// fit is a StageModel made ready: bounds are told by their index in at.
type fit struct {
	StageModel
	at   []int       // 0, the cuts, the number of layers
	sums []Footprint // of the layers before a bound
}

func newFit(m StageModel) (*fit, error) {
	layers := len(m.Layers)
	if layers < 1 || layers > MaxLayers {
		return nil, fmt.Errorf("market: a model of %d layers, want 1 to %d", layers, MaxLayers)
	}
	if !least(m.First, m.Last, m.Shared) || m.Shared.beyond(m.First) || m.Shared.beyond(m.Last) {
		return nil, errors.New("market: the first and the last stage take less than nothing more, or less than they share")
	}
	f := &fit{StageModel: m, at: []int{0}}
	var sum Footprint
	for l, size := range m.Layers {
		if !least(size) {
			return nil, fmt.Errorf("market: layer %d takes %+v bytes, want 0 to %d", l, size, int64(MaxHint))
		}
		if l == 0 || slices.Contains(m.Cuts, l) {
			f.sums = append(f.sums, sum)
		}
		sum = sum.plus(size)
	}
	f.at = append(append(f.at, m.Cuts...), layers)
	f.sums = append(f.sums, sum)
	for i := range f.at[1:] {
		if f.at[i] >= f.at[i+1] {
			return nil, fmt.Errorf("market: cuts %v are not ascending between 0 and the %d layers", m.Cuts, layers)
		}
	}
	return f, nil
}

// least reports whether all are plausible.
func least(list ...Footprint) bool {
	for _, f := range list {
		if min(f.Disk, f.Memory) < 0 || max(f.Disk, f.Memory) > MaxHint/MaxLayers {
			return false
		}
	}
	return true
}

func (f Footprint) plus(o Footprint) Footprint {
	return Footprint{f.Disk + o.Disk, f.Memory + o.Memory}
}
func (f Footprint) minus(o Footprint) Footprint {
	return Footprint{f.Disk - o.Disk, f.Memory - o.Memory}
}

// beyond reports whether f takes more of anything than there is.
func (f Footprint) beyond(room Footprint) bool { return f.Disk > room.Disk || f.Memory > room.Memory }

// takes is what the window between two bounds takes.
func (f *fit) takes(i, j int) Footprint {
	n := f.sums[j].minus(f.sums[i])
	if i == 0 {
		n = n.plus(f.First)
	}
	if j == len(f.at)-1 {
		n = n.plus(f.Last)
		if i == 0 {
			n = n.minus(f.Shared)
		}
	}
	return n
}

// reach is the furthest bound of a window from i that fits; i if none does.
func (f *fit) reach(i int, room Footprint) int {
	j := len(f.at) - 1
	for j > i && f.takes(i, j).beyond(room) {
		j--
	}
	return j
}

// legal returns the bounds of a window, false if it may not be cut so.
func (f *fit) legal(w gguf.Range) (i, j int, ok bool) {
	i, begins := slices.BinarySearch(f.at, w.Begin)
	j, ends := slices.BinarySearch(f.at, w.End)
	return i, j, begins && ends && i < j
}

// fits reports whether a window is legal and has room.
func (f *fit) fits(w gguf.Range, room Footprint) bool {
	i, j, ok := f.legal(w)
	return ok && !f.takes(i, j).beyond(room)
}
