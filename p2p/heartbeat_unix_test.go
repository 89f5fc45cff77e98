//go:build unix

package p2p

import (
	"syscall"
	"testing"
	"time"
)

// A process that is stopped answers nothing while its kernel keeps the connection, and one
// that is killed is gone. Both are lost long before libp2p would notice the first.
func TestFrozenAndKilledPeer(t *testing.T) {
	for _, signal := range []syscall.Signal{syscall.SIGSTOP, syscall.SIGKILL} {
		t.Run(signal.String(), func(t *testing.T) {
			t.Parallel()
			server, child := childEcho(t, time.Millisecond)
			defer child.Kill()
			a := startHost(t, func(c *Config) { c.Network, c.Pack = "bench", "" })
			p, err := a.Hello(t.Context(), server.peer)
			if err != nil {
				t.Fatal(err)
			}
			eventually(t, "heartbeats", func() bool { return p.RTT() > 0 })
			if err := child.Signal(signal); err != nil {
				t.Fatal(err)
			}
			begin := time.Now()
			select {
			case <-p.Done():
			case <-time.After(patience):
				t.Fatal("peer is not lost")
			}
			t.Logf("%v: lost after %v", signal, time.Since(begin).Round(time.Millisecond))
			if n := a.Faults()[Unresponsive]; signal == syscall.SIGSTOP && n != 1 {
				t.Errorf("%d faults: the heartbeat did not notice", n)
			}
		})
	}
}
