//go:build nettest && linux

package p2p_test

import (
	"bytes"
	"errors"
	"io"
	"net"
	"slices"
	"testing"
	"time"
)

// plain connections check the world itself, before nodes live in it.

func (s *site) listenUDP(t *testing.T) *net.UDPConn {
	t.Helper()
	return s.boundUDP(t, ":4001")
}

func (s *site) boundUDP(t *testing.T, addr string) *net.UDPConn {
	t.Helper()
	var c *net.UDPConn
	err := inNamespace(s.ns, func() (err error) {
		a, err := net.ResolveUDPAddr("udp4", addr)
		if err == nil {
			c, err = net.ListenUDP("udp4", a)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// echoUDP answers each packet with the address it came from.
func echoUDP(c *net.UDPConn) {
	buf := make([]byte, 2048)
	for {
		_, from, err := c.ReadFromUDPAddrPort(buf)
		if err != nil {
			return
		}
		c.WriteToUDPAddrPort([]byte(from.String()), from)
	}
}

// ask sends a packet to host:4001 and returns the answer and the time it took; "" when
// there is none.
func ask(t *testing.T, c *net.UDPConn, host string, wait time.Duration) (string, time.Duration) {
	t.Helper()
	start := time.Now()
	if _, err := c.WriteToUDP([]byte("?"), &net.UDPAddr{IP: net.ParseIP(host), Port: 4001}); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 2048)
	c.SetReadDeadline(start.Add(wait))
	n, err := c.Read(buf)
	c.SetReadDeadline(time.Time{})
	var timeout net.Error
	if err != nil && !(errors.As(err, &timeout) && timeout.Timeout()) {
		t.Fatal(err)
	}
	return string(buf[:n]), time.Since(start)
}

func TestNetDelayLine(t *testing.T) {
	w := newWorld(t)
	far := w.public("far", link{Delay: 20 * time.Millisecond, Jitter: time.Millisecond})
	lossy := w.public("lossy", link{Delay: time.Millisecond, Loss: 0.2})
	slow := w.public("slow", link{Rate: 8e6, Queue: 64 << 10})
	near := w.public("near", link{})
	go echoUDP(far.listenUDP(t))
	go echoUDP(lossy.listenUDP(t))
	from := near.listenUDP(t)

	var times []time.Duration
	for range 20 {
		got, took := ask(t, from, far.addr, 20*time.Second)
		if got == "" {
			t.Fatal("no answer over a line without loss")
		}
		times = append(times, took)
	}
	if best := slices.Min(times); best < 38*time.Millisecond || best > 80*time.Millisecond {
		t.Errorf("best round trip of %v over a line of 20 ms each way", best)
	}

	lost := 0
	for range 200 {
		if got, _ := ask(t, from, lossy.addr, 50*time.Millisecond); got == "" {
			lost++
		}
	}
	if lost < 36 || lost > 150 { // 36 % at 20 % each way; late answers count as lost
		t.Errorf("%d of 200 packets lost, want about 72", lost)
	}

	const size = 2 << 20
	took := transfer(t, near, slow, size)
	if rate := float64(size) * 8 / took.Seconds(); rate > 8.4e6 || rate < 2e6 {
		t.Errorf("%.1f Mbit/s over a line of 8", rate/1e6)
	}
}

// transfer sends size bytes over TCP and returns the time until all have arrived.
func transfer(t *testing.T, from, to *site, size int) time.Duration {
	t.Helper()
	var l net.Listener
	err := inNamespace(to.ns, func() (err error) { l, err = net.Listen("tcp4", ":4002"); return })
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	received := make(chan error, 1)
	go func() {
		c, err := l.Accept()
		if err == nil {
			defer c.Close()
			var n int64
			n, err = io.Copy(io.Discard, c)
			if err == nil && n != int64(size) {
				err = io.ErrUnexpectedEOF
			}
		}
		received <- err
	}()
	start := time.Now()
	err = inNamespace(from.ns, func() error {
		c, err := net.DialTimeout("tcp4", to.addr+":4002", 20*time.Second)
		if err != nil {
			return err
		}
		defer c.Close()
		_, err = c.Write(bytes.Repeat([]byte("kvasir.."), size/8))
		return err
	})
	if err = errors.Join(err, <-received); err != nil {
		t.Fatal(err)
	}
	return time.Since(start)
}

func TestNetNAT(t *testing.T) {
	for _, c := range []struct {
		kind     natKind
		samePort bool
	}{{cone, true}, {symmetric, false}} {
		t.Run(string(c.kind), func(t *testing.T) {
			w := newWorld(t)
			one, two := w.public("one", link{}), w.public("two", link{})
			gate := w.nat("gate", c.kind, link{Delay: 5 * time.Millisecond})
			in, beside := gate.host("in"), gate.host("beside")
			outside := one.listenUDP(t)
			go echoUDP(two.listenUDP(t))
			go echoUDP(beside.listenUDP(t))
			inside := in.listenUDP(t)

			// Nobody gets in who was not asked.
			if got, _ := ask(t, outside, gate.addr, 300*time.Millisecond); got != "" {
				t.Error("a stranger got an answer")
			}
			go echoUDP(outside)
			seenByOne, _ := ask(t, inside, one.addr, 20*time.Second)
			seenByTwo, _ := ask(t, inside, two.addr, 20*time.Second)
			for _, seen := range []string{seenByOne, seenByTwo} {
				host, _, _ := net.SplitHostPort(seen)
				if host != gate.addr {
					t.Fatalf("seen as %q from outside, want an address of %s", seen, gate.addr)
				}
			}
			if (seenByOne == seenByTwo) != c.samePort {
				t.Errorf("seen as %s and as %s", seenByOne, seenByTwo)
			}
			if got, _ := ask(t, inside, beside.addr, 20*time.Second); got != in.addr+":4001" {
				t.Errorf("seen as %q on the LAN, want %s:4001", got, in.addr)
			}

			mend := w.cut()
			if got, _ := ask(t, inside, one.addr, 300*time.Millisecond); got != "" {
				t.Error("an answer across a cut network")
			}
			if got, _ := ask(t, inside, beside.addr, 20*time.Second); got == "" {
				t.Error("no answer on the LAN while the outside is cut")
			}
			mend()
			if got, _ := ask(t, inside, one.addr, 20*time.Second); got == "" {
				t.Error("no answer after the network was mended")
			}
		})
	}
}

func TestNetWebOnly(t *testing.T) {
	w := newWorld(t)
	out := w.public("out", link{})
	gate := w.nat("gate", cone, link{})
	w.nft(gate.ns, webOnly)
	in := gate.host("in")
	go echoUDP(out.listenUDP(t))
	if got, _ := ask(t, in.listenUDP(t), out.addr, 300*time.Millisecond); got != "" {
		t.Error("UDP got out")
	}
	for port, want := range map[string]bool{"443": true, "4001": false} {
		err := inNamespace(out.ns, func() error {
			l, err := net.Listen("tcp4", ":"+port)
			if err == nil {
				t.Cleanup(func() { l.Close() })
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		wait := 300 * time.Millisecond
		if want {
			wait = 20 * time.Second
		}
		err = inNamespace(in.ns, func() error {
			c, err := net.DialTimeout("tcp4", out.addr+":"+port, wait)
			if err == nil {
				c.Close()
			}
			return err
		})
		if (err == nil) != want {
			t.Errorf("dial port %s: %v", port, err)
		}
	}
}
