package p2p

import (
	"bufio"
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/libp2p/go-libp2p/core/peer"
)

// The benchmarks send a frame and wait for it to come back: what one call of an expert
// pays for the way. They report the median, p50-µs. The other side runs once in the same
// process and once in its own.
//
//	go test ./p2p -run '^$' -bench Echo -benchtime 20000x -count 5

const (
	echoFrame = 12 << 10
	// echoEnv makes the test binary an echo server with this spin.
	echoEnv = "KVASIR_ECHO_SPIN"
)

func TestMain(m *testing.M) {
	if spin, ok := os.LookupEnv(echoEnv); ok {
		serveEcho(spin)
		return
	}
	os.Exit(m.Run())
}

// echoServer is the other side of the benchmarks.
type echoServer struct {
	peer peer.AddrInfo
	tcp  string // raw TCP
}

// echoFrames sends back each frame with one Write.
func echoFrames(c interface {
	Read([]byte) (int, error)
	Write([]byte) (int, error)
}) {
	r, w := NewFrameReader(c, echoFrame), NewFrameWriter(c, echoFrame)
	for {
		f, err := r.Next()
		if err != nil || w.Write(f) != nil {
			return
		}
	}
}

// echoHost is a host and a TCP listener that echo frames.
func echoHost(id Identity, spin time.Duration) (*Host, net.Listener, error) {
	h, err := New(Config{Identity: id, Network: "bench", Listen: []string{"/ip4/127.0.0.1/tcp/0"}, Spin: spin})
	if err != nil {
		return nil, nil, err
	}
	if err := h.HandleStream("frames/1", func(_ *Peer, c Conn) { echoFrames(c) }); err != nil {
		return nil, nil, err
	}
	if err := h.Start(); err != nil {
		return nil, nil, err
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, nil, err
	}
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				echoFrames(c)
			}()
		}
	}()
	return h, l, nil
}

// serveEcho is the child process: it says where it listens and echoes until stdin ends.
func serveEcho(spin string) {
	d, err := time.ParseDuration(spin)
	if err != nil {
		panic(err)
	}
	id, err := NewIdentity()
	if err != nil {
		panic(err)
	}
	h, l, err := echoHost(id, d)
	if err != nil {
		panic(err)
	}
	fmt.Println(h.Addrs()[0], l.Addr())
	bufio.NewReader(os.Stdin).ReadByte()
	l.Close()
	h.Close()
}

func startEcho(b *testing.B, process bool, spin time.Duration) echoServer {
	b.Helper()
	if !process {
		id, err := NewIdentity()
		if err != nil {
			b.Fatal(err)
		}
		h, l, err := echoHost(id, spin)
		if err != nil {
			b.Fatal(err)
		}
		b.Cleanup(func() { l.Close(); h.Close() })
		return echoServer{infoOf(b, h), l.Addr().String()}
	}
	server, _ := childEcho(b, spin)
	return server
}

// childEcho starts an echo server in a process of its own.
func childEcho(b testing.TB, spin time.Duration) (echoServer, *os.Process) {
	b.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), fmt.Sprintf("%s=%v", echoEnv, spin))
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		b.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		b.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { in.Close(); cmd.Wait() })
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		b.Fatal(err)
	}
	addr, tcp, _ := strings.Cut(strings.TrimSpace(line), " ")
	ai, err := ParsePeer(addr)
	if err != nil {
		b.Fatal(err)
	}
	return echoServer{ai, tcp}, cmd.Process
}

type readWriteCloser interface {
	Read([]byte) (int, error)
	Write([]byte) (int, error)
	Close() error
}

// measure runs b.N round trips over c.
func measure(b *testing.B, c readWriteCloser) {
	defer c.Close()
	r, w := NewFrameReader(c, echoFrame), NewFrameWriter(c, echoFrame)
	trip := func() {
		if _, err := w.Payload(echoFrame); err != nil {
			b.Fatal(err)
		}
		if err := w.Send(1, 0, 1); err != nil {
			b.Fatal(err)
		}
		if _, err := r.Next(); err != nil {
			b.Fatal(err)
		}
	}
	for range 500 {
		trip()
	}
	took := make([]time.Duration, 0, b.N)
	for b.Loop() {
		start := time.Now()
		trip()
		took = append(took, time.Since(start))
	}
	slices.Sort(took)
	b.ReportMetric(float64(took[len(took)/2].Nanoseconds())/1e3, "p50-µs")
	b.ReportMetric(float64(took[len(took)*99/100].Nanoseconds())/1e3, "p99-µs")
}

type opener func(h *Host, ctx context.Context, id peer.ID, proto string) (Conn, error)

func benchmarkConn(b *testing.B, open opener, wantLane bool, spin time.Duration) {
	for _, where := range []string{"goroutines", "processes"} {
		b.Run(where, func(b *testing.B) {
			server := startEcho(b, where == "processes", spin)
			h := startHost(b, func(c *Config) { c.Network, c.Pack, c.Protocols, c.Spin = "bench", "", nil, spin })
			if _, err := h.Hello(b.Context(), server.peer); err != nil {
				b.Fatal(err)
			}
			c, err := open(h, b.Context(), server.peer.ID, "frames/1")
			if err != nil {
				b.Fatal(err)
			}
			if c.Lane() != wantLane {
				b.Fatalf("lane: %v", c.Lane())
			}
			measure(b, c)
		})
	}
}

func BenchmarkTCPEcho(b *testing.B) {
	for _, where := range []string{"goroutines", "processes"} {
		b.Run(where, func(b *testing.B) {
			c, err := net.Dial("tcp", startEcho(b, where == "processes", -1).tcp)
			if err != nil {
				b.Fatal(err)
			}
			measure(b, c)
		})
	}
}

func BenchmarkStreamEcho(b *testing.B) { benchmarkConn(b, (*Host).OpenStream, false, -1) }

func BenchmarkLaneEcho(b *testing.B) {
	for _, spin := range []time.Duration{-1, 50 * time.Microsecond, 200 * time.Microsecond} {
		name := "spin=" + spin.String()
		if spin < 0 {
			name = "spin=off"
		}
		b.Run(name, func(b *testing.B) { benchmarkConn(b, (*Host).OpenLane, true, spin) })
	}
}
