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
	tests := []struct {
		name         string
		spun, parked time.Duration // how long a read waits
		want         bool
	}{
		{"wake-ups cost much", 20 * time.Microsecond, 60 * time.Microsecond, true},
		{"the peer needs this core", 230 * time.Microsecond, 32 * time.Microsecond, false},
		{"no difference", 40 * time.Microsecond, 40 * time.Microsecond, false},
		{"too little gain", 38 * time.Microsecond, 40 * time.Microsecond, false},
		{"idle", time.Second, time.Second, false},
	}
	const reads = 1000
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var c spinChoice
			// What was true before must not matter for ever.
			for range reads {
				c.learn(c.spins(), time.Millisecond)
			}
			spun := 0
			for i := range 2 * reads {
				s := c.spins()
				if i >= reads && s {
					spun++
				}
				if s {
					c.learn(s, tt.spun)
				} else {
					c.learn(s, tt.parked)
				}
			}
			most := spun > reads*9/10
			few := spun < reads/10
			if tt.want && !most || !tt.want && !few {
				t.Errorf("%d of %d reads spin", spun, reads)
			}
		})
	}
}
