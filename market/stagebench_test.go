package market

import (
	"fmt"
	"testing"
	"time"
)

// BenchmarkStageDecide is a node that serves, or is new, among 1,000 that hold windows of a model
// of 49 layers with a cut before each, of which so many have only claimed.
func BenchmarkStageDecide(b *testing.B) {
	m := layered(49, 1)
	for _, tt := range []struct {
		name    string
		claims  int
		serving bool
	}{{"serving", 0, true}, {"new", 0, false}, {"new, 100 claims", 100, false}, {"new, 1000 claims", 1000, false}} {
		x := newTable(b, Policy{}, modelA, Shape{Layers: 49})
		for i := range 1000 {
			begin := i * 7 % 40
			w := WindowHolding{Layers: layerRange(begin, begin+4+i%5), State: Serving}
			if i < tt.claims {
				w.State, w.Lease = Claimed, time.Minute
			}
			tell(b, x, fmt.Sprint("peer ", i), 1, t0, ModelNews{ID: modelA, Shape: Shape{Layers: 49},
				Windows: []WindowHolding{w}, Room: Footprint{9000, 9000}})
		}
		b.Run(tt.name, func(b *testing.B) {
			for b.Loop() {
				s, err := NewStager("me", Policy{}, m)
				if err != nil {
					b.Fatal(err)
				}
				if tt.serving {
					if err := s.Restore(layerRange(10, 16), true); err != nil {
						b.Fatal(err)
					}
				}
				s.Decide(x, Budget{Disk: 9000, Memory: 9000}, t0)
			}
		})
	}
}
