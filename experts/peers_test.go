package experts

import (
	"context"
	"errors"
	"fmt"
	"net"
	"runtime"
	"testing"
	"time"

	libp2p "github.com/libp2p/go-libp2p/core/peer"

	"kvasird/p2p"
)

const testProtocol = "experts/1"

// conn gives a p2p.Conn the addresses of a net.Conn.
type conn struct{ p2p.Conn }

func (conn) LocalAddr() net.Addr  { return nil }
func (conn) RemoteAddr() net.Addr { return nil }

// hostDialer opens lanes, or streams where there are none.
type hostDialer struct{ *p2p.Host }

func (h hostDialer) Dial(ctx context.Context, id string) (net.Conn, error) {
	to, err := libp2p.Decode(id)
	if err != nil {
		return nil, err
	}
	c, err := h.OpenLane(ctx, to, testProtocol)
	if err != nil {
		return nil, err
	}
	return conn{c}, nil
}

func startHost(t testing.TB, lane bool, serve func(net.Conn)) *p2p.Host {
	t.Helper()
	return startHostWith(t, serve, func(c *p2p.Config) { c.NoLane = !lane })
}

func startHostWith(t testing.TB, serve func(net.Conn), change func(*p2p.Config), watchers ...p2p.Watcher) *p2p.Host {
	t.Helper()
	id, err := p2p.NewIdentity()
	if err != nil {
		t.Fatal(err)
	}
	cfg := p2p.Config{
		Identity: id, Network: "test", Pack: "p/1", Agent: "test", Protocols: []string{testProtocol},
		Capabilities: p2p.Capabilities{
			Backends: []p2p.Backend{{Name: "CPU", Device: "test", Accumulate: "f32"}}, Models: []string{string(testModel)},
		},
	}
	change(&cfg)
	h, err := p2p.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	for _, w := range watchers {
		h.Watch(w)
	}
	if err := h.HandleStream(testProtocol, func(_ *p2p.Peer, c p2p.Conn) { serve(conn{c}) }); err != nil {
		t.Fatal(err)
	}
	if err := h.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { h.Close() })
	return h
}

// overHosts connects a dispatcher and a worker by real peers.
func overHosts(t testing.TB, lane bool, kernel Kernel, slices []Slice, change func(*Config)) *Dispatcher {
	t.Helper()
	worker, err := NewWorker(WorkerConfig{Model: testModel, Kernel: kernel, Slices: slices})
	if err != nil {
		t.Fatal(err)
	}
	there := startHost(t, lane, func(c net.Conn) { worker.Serve(context.Background(), c) })
	t.Cleanup(func() { worker.Close() })
	here := startHost(t, lane, func(c net.Conn) { c.Close() })
	to, err := p2p.ParsePeer(there.Addrs()[0])
	if err != nil {
		t.Fatal(err)
	}
	if _, err := here.Hello(t.Context(), to); err != nil {
		t.Fatal(err)
	}
	cfg := Config{Model: testModel, Dialer: hostDialer{here}}
	change(&cfg)
	d, err := NewDispatcher(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })
	d.AddPeer(there.ID().String())
	for end := time.Now().Add(patient); !d.Peers()[0].Connected; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not connected: %+v", d.Peers())
		}
	}
	return d
}

// TestOverPeers has real lanes and streams, whose deadlines are what interrupts a read.
func TestOverPeers(t *testing.T) {
	for _, lane := range []bool{true, false} {
		t.Run(fmt.Sprintf("lane=%v", lane), func(t *testing.T) {
			bothReaders(t, func(t *testing.T, noLead bool) {
				kernel := newFFN(testWidth, testHidden, layerSlice(0, testExperts))
				d := overHosts(t, lane, kernel, kernel.slices, func(c *Config) {
					c.NoLead, c.MinDeadline, c.MaxDeadline, c.ProgramWait = noLead, patient, patient, patient
				})
				whole := newFFN(testWidth, testHidden, layerSlice(0, testExperts))
				for seed := range uint64(50) {
					call := testCall(seed, 1+int(seed%4)*9, seed%3 == 0)
					poison(call)
					if err := d.Compute(t.Context(), call); err != nil {
						t.Fatal(err)
					}
					if diff := maxDiff(call.Out, alone(t, whole, call)); diff != 0 {
						t.Fatalf("maximum difference %g", diff)
					}
				}
				gate := make(chan struct{})
				kernel.gate.Store(&gate)
				ctx, cancel := context.WithTimeout(t.Context(), 30*time.Millisecond)
				defer cancel()
				began := time.Now()
				if err := d.Compute(ctx, testCall(0, 1, false)); !errors.Is(err, context.DeadlineExceeded) {
					t.Errorf("got %v, want the context's", err)
				}
				if took := time.Since(began); took > patient/2 {
					t.Errorf("the cancel took %v", took)
				}
				kernel.gate.Store(nil)
				close(gate)
				if err := d.Compute(t.Context(), testCall(0, 1, false)); err != nil {
					t.Errorf("after the cancel: %v", err)
				}
			})
		})
	}
}

// BenchmarkLane is one token over a lane between two hosts of this process, from a goroutine of
// its own thread.
func BenchmarkLane(b *testing.B) {
	for _, noLead := range []bool{false, true} {
		b.Run(fmt.Sprintf("lead=%v", !noLead), func(b *testing.B) {
			d := overHosts(b, true, mirror{benchWidth}, []Slice{{EndLayer: 1, EndExpert: 64}},
				func(c *Config) { c.NoLead = noLead })
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			dispatchBench(b, d, 1)
		})
	}
}
