package plan

import (
	"fmt"
	"slices"
	"time"

	"kvasird/ggml/gguf"
)

// Node is a machine that a model may be spread over, and what it gives.
type Node struct {
	Name       string
	RAM, VRAM  int64 // bytes for the model and all that runs it; VRAM 0: no GPU
	Disk       int64 // bytes for weights
	Has        bool  // it has the model's file already
	Held       []Piece
	Cores      int // what its speed is guessed from when that is not known
	CPU, GPU   Speed
	Up, Down   float64       // bytes per second to and from others; 0: UnknownRate
	Call       time.Duration // what asking another node costs beyond round trip and compute; 0: UnknownCall
	guessedCPU bool
	guessedGPU bool
	layers     []layerHeld // Held by layer; nil: nothing
}

// Piece is what a node has of a model already, beside Disk: of each of some layers the
// dense part, that of the first and the last with the embedding and the head, and
// some experts. No two of a node share an expert.
type Piece struct {
	Layers  gguf.Range
	Dense   bool
	Experts gguf.Range
}

// layerHeld is what a node has of a layer.
type layerHeld struct {
	dense   bool
	experts int
}

// index counts what the node has of each layer of a model.
func (n Node) index(m *Model) Node {
	for i := 0; i < len(m.Layers) && len(n.Held) > 0; i++ {
		n.layers = append(n.layers, layerHeld{
			slices.ContainsFunc(n.Held, func(p Piece) bool { return p.Dense && p.Layers.Contains(i) }),
			n.experts(i, gguf.Range{End: m.Experts}),
		})
	}
	return n
}

// experts counts those of a layer that the node has, within a range.
func (n Node) experts(layer int, within gguf.Range) (count int) {
	for _, p := range n.Held {
		if p.Layers.Contains(layer) {
			count += p.Experts.Intersect(within).Len()
		}
	}
	return min(count, within.Len())
}

// Speed is how fast weights are worked through. The zero value is not known: it is
// then guessed.
type Speed struct {
	Bytes float64       // of weights per second, for the first row
	Batch float64       // likewise for every further row of a step; at least Bytes
	Layer time.Duration // for every layer of a step beyond that
}

// What is taken for what was not measured, so rather too little.
const (
	UnknownRate = 12.5e6 // bytes per second: 100 Mbit/s
	UnknownCall = 300 * time.Microsecond

	coreBytes = 3e9  // of weights per second and core
	cpuBytes  = 20e9 // at most, for all cores
	gpuBytes  = 200e9
)

// guess fills in what is not known, and notes it.
func (n Node) guess() Node {
	fill := func(s *Speed, bytes, batch float64, layer time.Duration) bool {
		if s.Bytes > 0 {
			s.Batch = max(s.Batch, s.Bytes)
			return false
		}
		*s = Speed{Bytes: bytes, Batch: batch * bytes, Layer: layer}
		return true
	}
	n.guessedCPU = fill(&n.CPU, min(cpuBytes, coreBytes*float64(max(1, n.Cores))), 2, 50*time.Microsecond)
	n.guessedGPU = fill(&n.GPU, gpuBytes, 10, 50*time.Microsecond) && n.VRAM > 0
	if n.Up <= 0 {
		n.Up = UnknownRate
	}
	if n.Down <= 0 {
		n.Down = UnknownRate
	}
	if n.Call <= 0 {
		n.Call = UnknownCall
	}
	return n
}

// device is what of the GPU's memory may be used.
func (n Node) device() int64 { return max(0, n.VRAM-deviceFree) }

func (n Node) check() error {
	switch {
	case n.Name == "":
		return fmt.Errorf("a node has no name")
	case n.RAM < 0 || n.VRAM < 0 || n.Disk < 0 || n.Cores < 0 || n.Call < 0:
		return fmt.Errorf("node %s: a size is negative", n.Name)
	}
	return nil
}
