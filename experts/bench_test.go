package experts

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"
)

// The benchmarks measure what dispatch costs beyond compute: the kernel only copies. One call
// is one token of a layer with rows of 3072 and 8 experts per token. Workers run in processes
// of their own.

const (
	benchWidth = 3072
	benchUsed  = 8
)

// mirror is a kernel whose experts return their row.
type mirror struct{ width int }

func (m mirror) SetProgram(int, []byte) (int, int, int, error) { return 0, m.width, m.width, nil }

func (m mirror) Forget(int) {}

func (m mirror) Compute(_ int, rows []float32, row, _ []int32, out []float32) error {
	for i, r := range row {
		copy(out[i*m.width:][:m.width], rows[int(r)*m.width:])
	}
	return nil
}

const benchEnv = "EXPERTS_BENCH_WORKER"

// TestMain turns the test binary into a worker, or a raw echo, when a benchmark asks for it.
func TestMain(m *testing.M) {
	what := os.Getenv(benchEnv)
	if what == "" {
		os.Exit(m.Run())
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	fmt.Println(l.Addr())
	go func() { // ends with the parent
		io.Copy(io.Discard, os.Stdin)
		os.Exit(0)
	}()
	serve := echo
	if what == "worker" {
		w, err := NewWorker(WorkerConfig{
			Model: testModel, Kernel: mirror{benchWidth}, Slices: []Slice{{EndLayer: 1, EndExpert: 64}},
		})
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		serve = func(c net.Conn) { w.Serve(context.Background(), c) }
	}
	for {
		conn, err := l.Accept()
		if err != nil {
			os.Exit(1)
		}
		go serve(conn)
	}
}

// raw is a call without any protocol: a byte that says how many tokens, and as many bytes as the
// frames of their call have, each way.
type raw struct {
	conn    net.Conn
	r       *bufio.Reader
	out, in []byte
}

func newRaw(c net.Conn) *raw {
	const most = 32
	return &raw{
		conn: c, r: bufio.NewReaderSize(c, readBuffer),
		out: make([]byte, 16+callSize(F32, most, most*benchUsed, benchWidth, false)),
		in:  make([]byte, 16+4*most*benchUsed*benchWidth),
	}
}

func rawSizes(tokens int) (call, reply int) {
	return 16 + callSize(F32, tokens, tokens*benchUsed, benchWidth, false), 16 + 4*tokens*benchUsed*benchWidth
}

func (w *raw) call(tokens int) error {
	call, reply := rawSizes(tokens)
	w.out[0] = byte(tokens)
	if _, err := w.conn.Write(w.out[:call]); err != nil {
		return err
	}
	_, err := io.ReadFull(w.r, w.in[:reply])
	return err
}

func echo(c net.Conn) {
	w := newRaw(c)
	for {
		if _, err := io.ReadFull(w.r, w.out[:1]); err != nil {
			return
		}
		call, reply := rawSizes(int(w.out[0]))
		if _, err := io.ReadFull(w.r, w.out[1:call]); err != nil {
			return
		}
		if _, err := c.Write(w.in[:reply]); err != nil {
			return
		}
	}
}

// child starts the test binary as a process of that kind and returns its address.
func child(b *testing.B, what string) string {
	b.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), benchEnv+"="+what)
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
	return strings.TrimSpace(line)
}

func benchCall(tokens int) *Call {
	c := &Call{
		Program: []byte("mirror"), RowWidth: benchWidth, OutWidth: benchWidth, RowsPerToken: 1, Used: benchUsed,
		Rows: make([]float32, tokens*benchWidth), Out: make([]float32, tokens*benchUsed*benchWidth),
	}
	for i := range tokens * benchUsed {
		c.IDs = append(c.IDs, int32(i*7%64))
	}
	return c
}

type staticDialer map[string]string

func (s staticDialer) Dial(ctx context.Context, id string) (net.Conn, error) {
	var d net.Dialer
	return d.DialContext(ctx, "tcp", s[id])
}

func benchDispatcher(b *testing.B, workers int, noLead bool) *Dispatcher {
	b.Helper()
	addrs := staticDialer{}
	for i := range workers {
		addrs[fmt.Sprint(i)] = child(b, "worker")
	}
	d, err := NewDispatcher(Config{Model: testModel, Dialer: addrs, NoLead: noLead})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { d.Close() })
	for id := range addrs {
		d.AddPeer(id)
	}
	for end := time.Now().Add(5 * time.Second); ; time.Sleep(time.Millisecond) {
		if !slices.ContainsFunc(d.Peers(), func(p PeerStatus) bool { return !p.Connected }) {
			return d
		}
		if time.Now().After(end) {
			b.Fatal("workers do not connect")
		}
	}
}

// percentiles reports p50 and p99 of what f takes.
func percentiles(b *testing.B, f func()) {
	b.Helper()
	took := make([]time.Duration, 0, 1<<20)
	b.ReportAllocs()
	for b.Loop() {
		began := time.Now()
		f()
		if len(took) < cap(took) {
			took = append(took, time.Since(began))
		}
	}
	slices.Sort(took)
	b.ReportMetric(float64(took[len(took)/2])/1e3, "µs-p50")
	b.ReportMetric(float64(took[len(took)*99/100])/1e3, "µs-p99")
}

// BenchmarkDispatch is one call over loopback TCP to worker processes.
func BenchmarkDispatch(b *testing.B) {
	for _, workers := range []int{1, 3} {
		for _, tokens := range []int{1, 8, 32} {
			b.Run(fmt.Sprintf("workers=%d/tokens=%d", workers, tokens), func(b *testing.B) {
				dispatchBench(b, benchDispatcher(b, workers, false), tokens)
			})
		}
	}
}

// BenchmarkReader compares who reads the answer to one token: Compute, which leads, or the
// reader goroutine; in a goroutine of its own thread, as in a callback from C, or in any.
func BenchmarkReader(b *testing.B) {
	for _, locked := range []bool{false, true} {
		for _, noLead := range []bool{false, true} {
			b.Run(fmt.Sprintf("thread=%v/lead=%v", locked, !noLead), func(b *testing.B) {
				d := benchDispatcher(b, 1, noLead)
				if locked {
					runtime.LockOSThread()
					defer runtime.UnlockOSThread()
				}
				dispatchBench(b, d, 1)
			})
		}
	}
}

func dispatchBench(b *testing.B, d *Dispatcher, tokens int) {
	call := benchCall(tokens)
	percentiles(b, func() {
		if err := d.Compute(b.Context(), call); err != nil {
			b.Fatal(err)
		}
	})
}

// BenchmarkSlowReplica is one token over two workers of the whole layer: both well; one with 50 ms
// added to every frame's way; one that stalls for 50 ms in one call of 2000; both that do. Hedging
// on and off.
func BenchmarkSlowReplica(b *testing.B) {
	for _, fault := range []string{"none", "far", "stalls", "both stall"} {
		for _, off := range []bool{false, true} {
			b.Run(fmt.Sprintf("fault=%s/hedge=%v", fault, !off), func(b *testing.B) {
				addrs := staticDialer{"0": child(b, "worker"), "1": child(b, "worker")}
				dial := &faultyDialer{addrs, fault}
				d, err := NewDispatcher(Config{Model: testModel, Dialer: dial, NoHedge: off})
				if err != nil {
					b.Fatal(err)
				}
				b.Cleanup(func() { d.Close() })
				d.AddPeer("0")
				d.AddPeer("1")
				for end := time.Now().Add(30 * time.Second); slices.ContainsFunc(d.Peers(), func(p PeerStatus) bool { return !p.Connected }); {
					if time.Now().After(end) {
						b.Fatal("workers do not connect")
					}
					time.Sleep(time.Millisecond)
				}
				dispatchBench(b, d, 1)
				h := d.Hedges()
				b.ReportMetric(100*float64(h.Hedged)/float64(h.Sent), "%-hedged")
			})
		}
	}
}

// faultyDialer has something be wrong with what peer 1 sends, or both.
type faultyDialer struct {
	staticDialer
	fault string
}

func (f *faultyDialer) Dial(ctx context.Context, id string) (net.Conn, error) {
	c, err := f.staticDialer.Dial(ctx, id)
	if err != nil || f.fault == "none" || id == "0" && f.fault != "both stall" {
		return c, err
	}
	return delayed(c, f.fault), nil
}

// delayed passes on what comes from a connection 50 ms later, always or one time in 2000.
func delayed(c net.Conn, fault string) net.Conn {
	here, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		panic(err)
	}
	defer here.Close()
	out, err := net.Dial("tcp", here.Addr().String())
	if err != nil {
		panic(err)
	}
	in, err := here.Accept()
	if err != nil {
		panic(err)
	}
	type chunk struct {
		b  []byte
		at time.Time
	}
	line := make(chan chunk, 1024)
	go func() { // ends with the connections, as the others do
		defer close(line)
		for n := 0; ; n++ {
			b := make([]byte, 256<<10)
			got, err := c.Read(b)
			if err != nil {
				return
			}
			at := time.Now()
			if fault == "far" || n%2000 == 1999 {
				at = at.Add(50 * time.Millisecond)
			}
			line <- chunk{b[:got], at}
		}
	}()
	go func() {
		defer in.Close()
		for k := range line {
			time.Sleep(time.Until(k.at))
			in.Write(k.b)
		}
	}()
	go func() {
		defer c.Close()
		io.Copy(c, in)
	}()
	return out
}

// BenchmarkRawTCP moves the same bytes without any protocol: the floor.
func BenchmarkRawTCP(b *testing.B) {
	for _, tokens := range []int{1, 8, 32} {
		b.Run(fmt.Sprintf("tokens=%d", tokens), func(b *testing.B) {
			conn, err := net.Dial("tcp", child(b, "echo"))
			if err != nil {
				b.Fatal(err)
			}
			defer conn.Close()
			w := newRaw(conn)
			percentiles(b, func() {
				if err := w.call(tokens); err != nil {
					b.Fatal(err)
				}
			})
		})
	}
}
