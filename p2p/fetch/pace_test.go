package fetch

import (
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// What is left while the node is busy is a share of what was measured before.
func TestPaceMeasured(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var busy atomic.Bool
		p := newPacer(0, busy.Load)
		send := func(span time.Duration, pause time.Duration) (perSecond float64) {
			start, sent := time.Now(), 0
			for time.Since(start) < span {
				n, err := p.take(t.Context(), mib)
				if err != nil {
					t.Fatal(err)
				}
				sent += n
				time.Sleep(pause)
			}
			return float64(sent) / time.Since(start).Seconds()
		}
		send(30*time.Second, 10*time.Millisecond) // 100 MiB/s
		busy.Store(true)
		if got := send(10*time.Second, 0); got < 12*mib || got > 13*mib {
			t.Errorf("%.0f bytes/s while busy, want an eighth of 100 MiB", got)
		}
		busy.Store(false)
		send(60*time.Second, 100*time.Millisecond) // 10 MiB/s
		busy.Store(true)
		if got := send(10*time.Second, 0); got < 1.2*mib || got > 1.3*mib {
			t.Errorf("%.0f bytes/s while busy, want an eighth of 10 MiB", got)
		}
	})
}
