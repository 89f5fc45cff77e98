package experts

import (
	"math"
	"testing"
	"time"
)

// A heartbeat that waited behind a call says nothing of the way to the peer.
func TestHeartbeatsBehindCalls(t *testing.T) {
	var l latency
	steps := []struct {
		rtt   time.Duration
		quiet bool
		want  time.Duration
	}{
		{5 * time.Millisecond, false, 5 * time.Millisecond},     // all that is known yet
		{200 * time.Microsecond, false, 200 * time.Microsecond}, // a shorter one is true however it came
		{6 * time.Millisecond, false, 200 * time.Microsecond},
		{1200 * time.Microsecond, true, 300 * time.Microsecond}, // the way got longer: a tenth of it
		{250 * time.Microsecond, true, 250 * time.Microsecond},
	}
	for i, s := range steps {
		l.pong(s.rtt, s.quiet)
		if got := time.Duration(load(&l.base)); math.Abs(float64(got-s.want)) > 1000 {
			t.Errorf("step %d: base is %v, want %v", i, got, s.want)
		}
	}
	// so that the time of a call is put down to its pairs
	for range 100 {
		l.answered(250*time.Microsecond+8*300*time.Microsecond, 0, 8)
	}
	if got := time.Duration(load(&l.perPair)); got < 250*time.Microsecond || got > 350*time.Microsecond {
		t.Errorf("a pair takes %v, want about 300µs", got)
	}
}
