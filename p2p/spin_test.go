package p2p

import (
	"errors"
	"io"
	"net"
	"testing"
	"time"
)

func tcpPair(t testing.TB) (a, b *net.TCPConn) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	dialled, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	accepted, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { dialled.Close(); accepted.Close() })
	return dialled.(*net.TCPConn), accepted.(*net.TCPConn)
}

// Whatever mix of looks, spins and waits it takes, the bytes come in order.
func TestSpinConnReads(t *testing.T) {
	a, b := tcpPair(t)
	s := newSpinConn(a)
	s.spinFor(5 * time.Millisecond)
	want := []byte("0123456789abcdefghijklmnopqrstuvwxyz")
	go func() {
		for i := range want {
			time.Sleep(time.Duration(i%10) * time.Millisecond) // within the budget, and past it
			b.Write(want[i : i+1])
		}
		b.CloseWrite()
	}()
	got, err := io.ReadAll(s)
	if err != nil || string(got) != string(want) {
		t.Errorf("got %q, %v", got, err)
	}
	a.Close()
	if _, err := s.Read(make([]byte, 1)); !errors.Is(err, net.ErrClosed) {
		t.Errorf("read of a closed conn: %v", err)
	}
}

// A reset is reported as in any read.
func TestSpinConnReset(t *testing.T) {
	a, b := tcpPair(t)
	s := newSpinConn(a)
	s.spinFor(maxSpin)
	if err := b.SetLinger(0); err != nil {
		t.Fatal(err)
	}
	time.AfterFunc(2*time.Millisecond, func() { b.Close() })
	var op *net.OpError
	if _, err := s.Read(make([]byte, 1)); !errors.As(err, &op) {
		t.Errorf("got %v, want a *net.OpError", err)
	}
}

func TestSpinChoice(t *testing.T) {
	waits := func(spun, parked time.Duration) func(bool) time.Duration {
		return func(spin bool) time.Duration {
			if spin {
				return spun
			}
			return parked
		}
	}
	tests := []struct {
		name string
		wait func(spun bool) time.Duration
		want bool
	}{
		{"wake-ups cost much", waits(20*time.Microsecond, 60*time.Microsecond), true},
		{"the peer needs this core", waits(230*time.Microsecond, 32*time.Microsecond), false},
		{"no difference", waits(40*time.Microsecond, 40*time.Microsecond), false},
		{"too little gain", waits(38*time.Microsecond, 40*time.Microsecond), false},
		{"idle", waits(time.Second, time.Second), false},
	}
	const reads = 4 * minSpinRun
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var c spinChoice
			// What was true before must not matter for ever.
			for range reads {
				c.learn(time.Millisecond)
			}
			for range maxSpinRun {
				c.learn(tt.wait(c.spins()))
			}
			spun := 0
			for range reads {
				if c.spins() {
					spun++
				}
				c.learn(tt.wait(c.spins()))
			}
			if most := spun > reads*9/10; most != tt.want {
				t.Errorf("%d of %d reads spin", spun, reads)
			}
			if few := spun < reads/10; few == tt.want {
				t.Errorf("%d of %d reads spin", spun, reads)
			}
		})
	}
}
