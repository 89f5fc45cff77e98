//go:build nettest && linux

package p2p_test

import (
	"slices"
	"testing"
	"time"

	"kvasird/p2p"
)

// besides measures 12 KiB there and back on a stream beside a download of other's, which has
// a connection of its own or not.
func (n *node) besides(other *node, bulk bool) besideResult {
	n.t.Helper()
	var r besideResult
	if err := n.call("beside", besideArg{Peer: other.id, Size: 12 << 10, Count: 30, Bulk: bulk}, &r); err != nil {
		n.t.Fatalf("%s: download from %s: %v", n.name, other.name, err)
	}
	slices.Sort(r.Times)
	return r
}

func (r besideResult) median() time.Duration { return r.Times[len(r.Times)/2] }

func (r besideResult) rate() float64 { return float64(r.Bytes) / 1e6 / r.Over.Seconds() }

// A download has a connection of its own through a relay and through a hole, and does not
// hold up what else goes to the peer there.
func TestNetBulkHasItsOwnConnection(t *testing.T) {
	narrow := link{Delay: 5 * time.Millisecond, Rate: 40e6}
	tests := []struct {
		name string
		kind natKind
		path p2p.Path
		own  bool // what is shared holds up, so it must be faster
	}{
		{"relayed", symmetric, p2p.Relayed, true},
		{"punched", cone, p2p.Direct, false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			s := newSwarm(t)
			a := s.nat("nata", tt.kind, narrow).host("a").start(s.member(viaQUIC))
			b := s.nat("natb", tt.kind, narrow).host("b").start(s.member(viaQUIC))
			a.meets(b, tt.path)
			b.meets(a, tt.path)
			own := a.besides(b, true)
			shared := a.besides(b, false)
			t.Logf("12 KiB beside a download: %v on the shared connection (%.1f MB/s), %v beside one of its own (%.1f MB/s): %.2f times",
				shared.median(), shared.rate(), own.median(), own.rate(), float64(shared.median())/float64(own.median()))
			if shared.Lane || !own.Lane {
				t.Fatalf("own connection: %v for a stream, %v for a download", shared.Lane, own.Lane)
			}
			if tt.own && own.median() > shared.median() {
				t.Errorf("beside a connection of its own it takes %v, and %v without", own.median(), shared.median())
			}
		})
	}
}
