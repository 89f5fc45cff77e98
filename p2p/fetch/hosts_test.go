package fetch

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"kvasird/p2p"

	"github.com/libp2p/go-libp2p/core/peer"
)

// startHost starts a host that serves lib, if there is one.
func startHost(t testing.TB, cfg ServerConfig, noLane bool) (*p2p.Host, *Server) {
	t.Helper()
	id, err := p2p.NewIdentity()
	if err != nil {
		t.Fatal(err)
	}
	h, err := p2p.New(p2p.Config{
		Identity: id, Network: "testnet", NoLane: noLane, HelloTimeout: patience,
		Listen: []string{"/ip4/127.0.0.1/tcp/0"},
	})
	if err != nil {
		t.Fatal(err)
	}
	var srv *Server
	ctx, cancel := context.WithCancel(context.Background())
	if cfg.Library != nil {
		srv = NewServer(cfg)
		if err := h.HandleStream(Protocol, func(_ *p2p.Peer, c p2p.Conn) { srv.Serve(ctx, c) }); err != nil {
			t.Fatal(err)
		}
	}
	if err := h.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cancel()
		if err := h.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
	})
	return h, srv
}

// meet has h say hello to other, and makes a source of it.
func meet(t testing.TB, h, other *p2p.Host) Source {
	t.Helper()
	ai, err := p2p.ParsePeer(other.Addrs()[0])
	if err != nil {
		t.Fatal(err)
	}
	if _, err := h.Hello(t.Context(), ai); err != nil {
		t.Fatal(err)
	}
	return FromPeer(h, other.ID())
}

func eventually(t testing.TB, what string, cond func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		if cond() {
			return
		}
	}
	t.Errorf("did not happen: %s", what)
}

func TestHosts(t *testing.T) {
	m := makeModel(1, 20*mib+77, mib)
	for _, noLane := range []bool{false, true} {
		t.Run(fmt.Sprintf("lane=%v", !noLane), func(t *testing.T) {
			client, _ := startHost(t, ServerConfig{}, noLane)
			liar, _ := startHost(t, ServerConfig{Library: wrongShelf{m.full(), true, false}}, noLane)
			said := blames{}
			c := NewClient(ClientConfig{VerifyManifest: verifyManifest, Blame: said.add})
			bad := meet(t, client, liar)
			if files, err := c.Manifest(t.Context(), bad, m.id); err != nil || !slices.Equal(files, m.files) {
				t.Fatalf("%v, %v", files, err)
			}
			var sources []Source
			var servers []*Server
			for range 3 {
				h, srv := startHost(t, ServerConfig{Library: m, Rate: 8 * mib}, noLane)
				servers = append(servers, srv)
				sources = append(sources, meet(t, client, h))
			}
			conn, err := sources[0].Open(t.Context())
			if err != nil || conn.Lane() == noLane {
				t.Fatalf("opened %v, %v", conn, err)
			}
			conn.Close()
			before := runtime.NumGoroutine()
			sink := newJudge(t, m)
			sink.wrote = func() { // not complete before all three were of use
				if len(said.of(bad.ID())) == 0 {
					return // they are not asked yet
				}
				for _, srv := range servers {
					eventually(t, "every source gives", func() bool { return srv.Stats().Bytes > 0 })
				}
			}
			err = c.Fetch(t.Context(), Request{Model: m.id, Sink: sink, Wait: true, Sources: func() []Source {
				if len(said.of(bad.ID())) == 0 {
					return []Source{bad}
				}
				return append([]Source{bad}, sources...)
			}})
			if err != nil {
				t.Fatal(err)
			}
			sink.check(nil)
			if got := said.of(bad.ID()); !slices.Equal(got, []Fault{FaultData}) {
				t.Errorf("the liar is blamed for %v", got)
			}
			for _, srv := range servers {
				eventually(t, "session ended", func() bool { return srv.Stats().Sessions == 0 })
			}
			eventually(t, fmt.Sprintf("goroutines back to %d", before), func() bool { return runtime.NumGoroutine() <= before })
		})
	}
}

// A peer that is killed while it gives is done without, and what it gave stays.
func TestHostLost(t *testing.T) {
	m := makeModel(1, 10*mib)
	client, _ := startHost(t, ServerConfig{}, false)
	dying, _ := startHost(t, ServerConfig{Library: m, Rate: mib}, false)
	living, srv := startHost(t, ServerConfig{Library: m}, false)
	first, second := meet(t, client, dying), meet(t, client, living)
	sink := newJudge(t, m)
	var lost atomic.Bool
	sink.wrote = func() {
		if sum(sink.held[0]) >= 2*mib && lost.CompareAndSwap(false, true) {
			go dying.Close()
		}
	}
	err := NewClient(ClientConfig{}).Fetch(t.Context(), Request{Model: m.id, Sink: sink, Wait: true, Sources: func() []Source {
		if lost.Load() {
			return []Source{first, second}
		}
		return []Source{first}
	}})
	if err != nil {
		t.Fatal(err)
	}
	sink.check(nil)
	if n := srv.Stats().Bytes; n < mib || n > 9*mib {
		t.Errorf("%d bytes of 10 MiB from the second source", n)
	}
}

// The peer is gone before it is asked.
func TestHostGone(t *testing.T) {
	m := makeModel(1, mib)
	client, _ := startHost(t, ServerConfig{}, false)
	err := NewClient(ClientConfig{}).Fetch(t.Context(), Request{Model: m.id, Sink: newJudge(t, m), Sources: these(FromPeer(client, client.ID()))})
	if !errors.Is(err, p2p.ErrNotAdmitted) {
		t.Error(err)
	}
}

// Whatever the size, a fetch takes the memory of its buffers.
func TestMemory(t *testing.T) {
	m := makeModel(1, 96*mib)
	client, _ := startHost(t, ServerConfig{}, false)
	var sources []Source
	for range 2 {
		h, _ := startHost(t, ServerConfig{Library: m}, false)
		sources = append(sources, meet(t, client, h))
	}
	sink := newJudge(t, m)
	defer debug.SetGCPercent(debug.SetGCPercent(-1))
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	if err := NewClient(ClientConfig{}).Fetch(t.Context(), Request{Model: m.id, Sink: sink, Sources: these(sources...)}); err != nil {
		t.Fatal(err)
	}
	runtime.ReadMemStats(&after)
	sink.check(nil)
	// For each source two ranges here, a piece read and a piece written, grown by doubling.
	if got, most := after.TotalAlloc-before.TotalAlloc, uint64(2*(2*2*MaxRange+4*maxPiece)); got > most {
		t.Errorf("allocated %d bytes for %d, want at most %d", got, 96*mib, most)
	}
}

// pour writes frames of a piece each until the reader leaves.
func pour(_ *p2p.Peer, c p2p.Conn) {
	w := p2p.NewFrameWriter(c, maxPiece)
	for {
		if _, err := w.Payload(maxPiece); err != nil || w.Send(framePiece, 0, 1) != nil {
			return
		}
	}
}

const benchBytes = 128 * mib

// rawLane times the reading of benchBytes from a lane.
func rawLane(b *testing.B, h *p2p.Host, id peer.ID) time.Duration {
	c, err := h.OpenLane(b.Context(), id, "raw/1")
	if err != nil {
		b.Fatal(err)
	}
	defer c.Close()
	if !c.Lane() {
		b.Fatal("no lane")
	}
	r := p2p.NewFrameReader(c, maxPiece)
	start := time.Now()
	for range benchBytes / maxPiece {
		if _, err := r.Next(); err != nil {
			b.Fatal(err)
		}
	}
	return time.Since(start)
}

// verifyAll times the sink alone.
func verifyAll(b *testing.B, sink *judge) time.Duration {
	start := time.Now()
	for off := int64(0); off < benchBytes; off += MaxRange {
		if err := sink.WriteGroups(0, off, sink.m.data[0][off:off+MaxRange]); err != nil {
			b.Fatal(err)
		}
	}
	return time.Since(start)
}

func mbps(n int, took time.Duration) float64 { return float64(n) * benchBytes / 1e6 / took.Seconds() }

func benchHosts(b *testing.B, m *model) (client, server *p2p.Host, src Source) {
	client, _ = startHost(b, ServerConfig{}, false)
	id, err := p2p.NewIdentity()
	if err != nil {
		b.Fatal(err)
	}
	server, err = p2p.New(p2p.Config{Identity: id, Network: "testnet", Listen: []string{"/ip4/127.0.0.1/tcp/0"}})
	if err != nil {
		b.Fatal(err)
	}
	srv := NewServer(ServerConfig{Library: m})
	if err := errors.Join(server.HandleStream("raw/1", pour),
		server.HandleStream(Protocol, func(_ *p2p.Peer, c p2p.Conn) { srv.Serve(context.Background(), c) }),
		server.Start()); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { server.Close() })
	return client, server, meet(b, client, server)
}

func BenchmarkRawLane(b *testing.B) {
	client, server, _ := benchHosts(b, makeModel(1, 1))
	b.SetBytes(benchBytes)
	for b.Loop() {
		rawLane(b, client, server.ID())
	}
}

// BenchmarkFetch downloads from one peer over a lane, in turns with the lane alone and the
// sink alone. Every core can do either, so no fetch is faster than what both leave of the
// cores together, which the last figure compares it with.
func BenchmarkFetch(b *testing.B) {
	m := makeModel(1, benchBytes)
	for _, where := range []string{"memory", "file"} {
		b.Run(where, func(b *testing.B) {
			client, server, src := benchHosts(b, m)
			sink, alone := newJudge(b, m), newJudge(b, m)
			alone.trees[0] = m.trees[0]
			if where == "file" {
				sink.space, alone.space = benchFile(b), benchFile(b)
			}
			var raw, verify, fetch time.Duration
			n := 0
			b.SetBytes(benchBytes)
			for b.Loop() {
				b.StopTimer()
				raw += rawLane(b, client, server.ID())
				alone.held[0], sink.held[0], sink.trees[0] = nil, nil, nil
				verify += verifyAll(b, alone)
				b.StartTimer()
				start := time.Now()
				if err := NewClient(ClientConfig{}).Fetch(b.Context(), Request{Model: m.id, Sink: sink, Sources: these(src)}); err != nil {
					b.Fatal(err)
				}
				fetch += time.Since(start)
				n++
			}
			bound := raw.Seconds() + verify.Seconds()/float64(runtime.GOMAXPROCS(0))
			b.ReportMetric(mbps(n, raw), "raw-MB/s")
			b.ReportMetric(mbps(n, verify), "sink-MB/s")
			b.ReportMetric(raw.Seconds()/fetch.Seconds(), "of-raw")
			b.ReportMetric(math.Round(1000*bound/fetch.Seconds())/1000, "of-bound")
		})
	}
}

func benchFile(b *testing.B) *os.File {
	f, err := os.Create(filepath.Join(b.TempDir(), "model"))
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { f.Close() })
	return f
}
