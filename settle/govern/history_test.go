package govern

import (
	"testing"

	"kvasird/settle"
)

// TestEpochs compares At with a walk over all epochs, their length changing twice.
func TestEpochs(t *testing.T) {
	x := newTown(t)
	x.now = Moment{start, 0, start}
	x.must(x.change(3, map[string]uint64{"epoch_seconds": 2 * settle.Hour}))
	x.pass(1)
	x.must(x.change(9, map[string]uint64{"epoch_seconds": settle.Hour / 2 * 3, "gain": 1_000_000}))
	epoch, began := uint64(0), uint64(start)
	for now := uint64(start); now < start+30*settle.Hour; now += 600 {
		for {
			p, _, _ := x.g.Params(epoch)
			if now < began+p.EpochSeconds {
				break
			}
			epoch, began = epoch+1, began+p.EpochSeconds
		}
		if got := x.g.At(start, now); got != (Moment{now, epoch, began}) {
			t.Fatalf("after %d s: %+v, want epoch %d from %d", now-start, got, epoch, began)
		}
	}
	if epoch < 12 {
		t.Errorf("the walk ended in epoch %d", epoch)
	}
	if got := x.g.At(start, start-5); got != (Moment{start - 5, 0, start}) {
		t.Errorf("before the first: %+v", got)
	}
}

func TestSoonest(t *testing.T) {
	x := newTown(t)
	for _, tt := range []struct {
		name   string
		within uint64
		want   uint64
	}{{"fee", 0, 101}, {"fee", 1, 101}, {"fee", settle.Hour + 1, 102}, {"floor", 0, 148}, {"floor", 600, 149}, {"fee", 1 << 40, 100 + maxAhead}} {
		values := map[string]uint64{tt.name: 90_000_000_000}
		if got := x.g.Soonest(x.now, values, tt.within); got != tt.want {
			t.Errorf("%s within %d s: epoch %d, want %d", tt.name, tt.within, got, tt.want)
		}
	}
	x.must(x.change(20, map[string]uint64{"fee": 200_000}))
	if got := x.g.Soonest(x.now, map[string]uint64{"fee": 1}, 0); got != 120 {
		t.Errorf("epoch %d is before a change that is taken", got)
	}
}
