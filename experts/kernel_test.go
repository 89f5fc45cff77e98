package experts

import (
	"bytes"
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// ffn is a plain Go SwiGLU expert layer: out = down · (silu(gate · x) ∘ (up · x)). Its weights
// follow from layer and expert, so any shard of it holds the same ones.
type ffn struct {
	width, hidden int
	slices        []Slice
	weights       map[[2]int][3][]float32 // by layer and expert: gate, up, down

	programs []int        // layer of each program, -1: forgotten
	set      atomic.Int64 // programs that are not forgotten
	busy     atomic.Bool
	calls    atomic.Int64
	delay    atomic.Int64 // ns before each Compute
	gate     atomic.Pointer[chan struct{}]
	fail     atomic.Bool
	lies     atomic.Bool             // rows are those of the next expert
	gone     atomic.Pointer[[]Slice] // must not be asked for
	misused  atomic.Int64            // calls for these
}

func newFFN(width, hidden int, slices ...Slice) *ffn {
	k := &ffn{width: width, hidden: hidden, slices: slices, weights: map[[2]int][3][]float32{}}
	for _, s := range slices {
		for layer := s.FirstLayer; layer < s.EndLayer; layer++ {
			for e := s.FirstExpert; e < s.EndExpert; e++ {
				rng := rand.New(rand.NewPCG(uint64(layer), uint64(e)))
				var m [3][]float32
				for i := range m {
					m[i] = make([]float32, width*hidden)
					for j := range m[i] {
						m[i][j] = rng.Float32() - 0.5
					}
				}
				k.weights[[2]int{layer, e}] = m
			}
		}
	}
	return k
}

// programFor is the program of such a layer. What follows a '#' makes it another one that says
// the same.
func programFor(width, hidden int) []byte { return fmt.Appendf(nil, "swiglu %d %d", width, hidden) }

func (k *ffn) SetProgram(layer int, program []byte) (prog, rowWidth, outWidth int, err error) {
	k.enter()
	defer k.busy.Store(false)
	said, _, _ := bytes.Cut(program, []byte("#"))
	if want := programFor(k.width, k.hidden); !bytes.Equal(said, want) {
		return 0, 0, 0, fmt.Errorf("program %q does not fit weights of %q", program, want)
	}
	k.set.Add(1)
	if prog = slices.Index(k.programs, -1); prog < 0 {
		prog, k.programs = len(k.programs), append(k.programs, -1)
	}
	k.programs[prog] = layer
	return prog, k.width, k.width, nil
}

func (k *ffn) Forget(prog int) {
	k.enter()
	defer k.busy.Store(false)
	if k.programs[prog] < 0 {
		panic("a program is forgotten twice")
	}
	k.programs[prog] = -1
	k.set.Add(-1)
}

// enter fails the test that calls the kernel twice at once.
func (k *ffn) enter() {
	if !k.busy.CompareAndSwap(false, true) {
		panic("two kernel calls at once")
	}
}

func (k *ffn) Compute(prog int, rows []float32, row, expert []int32, out []float32) error {
	k.enter()
	defer k.busy.Store(false)
	k.calls.Add(1)
	if gate := k.gate.Load(); gate != nil {
		<-*gate
	}
	time.Sleep(time.Duration(k.delay.Load()))
	if k.fail.Load() {
		return fmt.Errorf("device lost")
	}
	if gone := k.gone.Load(); gone != nil && slices.ContainsFunc(expert, func(e int32) bool {
		return slices.ContainsFunc(*gone, func(s Slice) bool { return s.holds(k.programs[prog], e) })
	}) {
		k.misused.Add(1)
		return fmt.Errorf("an expert of %v was dropped", *gone)
	}
	for i, r := range row {
		e := int(expert[i])
		if k.lies.Load() {
			e = (e + 1) % testExperts
		}
		m, ok := k.weights[[2]int{k.programs[prog], e}]
		if !ok {
			return fmt.Errorf("expert %d is not held", expert[i])
		}
		k.expert(m, rows[int(r)*k.width:][:k.width], out[i*k.width:][:k.width])
	}
	return nil
}

func (k *ffn) expert(m [3][]float32, x, out []float32) {
	h := make([]float32, k.hidden)
	for i := range h {
		g, u := dot(m[0][i*k.width:][:k.width], x), dot(m[1][i*k.width:][:k.width], x)
		h[i] = g / (1 + float32(math.Exp(-float64(g)))) * u
	}
	for i := range out {
		out[i] = dot(m[2][i*k.hidden:][:k.hidden], h)
	}
}

func dot(a, b []float32) (sum float32) {
	for i := range a {
		sum += a[i] * b[i]
	}
	return sum
}

// peer is a worker process of a test: a listener, and the connections that it accepted.
type peer struct {
	id     string
	worker *Worker
	kernel *ffn
	listen net.Listener

	mu    sync.Mutex // guards conns
	conns []*tap
	errs  chan error // of Serve
	wg    sync.WaitGroup
}

// tap is a connection that a test can freeze.
type tap struct {
	net.Conn
	frozen chan struct{} // replaced by an open channel while frozen
	mu     sync.Mutex
}

func (c *tap) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	c.thaw()
	return n, err
}

func (c *tap) Write(b []byte) (int, error) {
	c.thaw()
	return c.Conn.Write(b)
}

// thaw waits while the connection is frozen.
func (c *tap) thaw() {
	c.mu.Lock()
	frozen := c.frozen
	c.mu.Unlock()
	if frozen != nil {
		<-frozen
	}
}

// swarm is a dispatcher's world: peers by id.
type swarm struct {
	t     *testing.T
	mu    sync.Mutex // guards addrs
	addrs map[string]string
}

func newSwarm(t *testing.T) *swarm { return &swarm{t: t, addrs: map[string]string{}} }

func (w *swarm) Dial(ctx context.Context, id string) (net.Conn, error) {
	w.mu.Lock()
	addr := w.addrs[id]
	w.mu.Unlock()
	if addr == "" {
		return nil, fmt.Errorf("no route to %s", id)
	}
	var d net.Dialer
	return d.DialContext(ctx, "tcp", addr)
}

const testModel ModelID = "blake3:test"

// start runs a worker under an id; change may alter its configuration.
func (w *swarm) start(id string, kernel *ffn, change func(*WorkerConfig)) *peer {
	w.t.Helper()
	cfg := WorkerConfig{Model: testModel, Kernel: kernel, Slices: kernel.slices, Drain: 500 * time.Millisecond}
	if change != nil {
		change(&cfg)
	}
	worker, err := NewWorker(cfg)
	if err != nil {
		w.t.Fatal(err)
	}
	p := &peer{id: id, worker: worker, kernel: kernel, errs: make(chan error, 64)}
	p.listen = w.listen(id, func(conn net.Conn) {
		c := &tap{Conn: conn}
		p.mu.Lock()
		p.conns = append(p.conns, c)
		p.mu.Unlock()
		p.errs <- worker.Serve(context.Background(), c)
	}, &p.wg)
	w.t.Cleanup(func() { p.kill() })
	return p
}

// listen serves an id with a function per connection.
func (w *swarm) listen(id string, serve func(net.Conn), wg *sync.WaitGroup) net.Listener {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		w.t.Fatal(err)
	}
	w.mu.Lock()
	w.addrs[id] = l.Addr().String()
	w.mu.Unlock()
	wg.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			wg.Go(func() { serve(conn) })
		}
	})
	w.t.Cleanup(func() { l.Close() })
	return l
}

// kill cuts the peer off at once, as kill -9 does.
func (p *peer) kill() {
	p.listen.Close()
	p.cut()
	p.freeze(false)
	p.worker.Close()
	p.wg.Wait()
}

// cut closes the connections, which keeps the listener.
func (p *peer) cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range p.conns {
		c.Close()
	}
}

// freeze stops reading and writing, as SIGSTOP does, or goes on.
func (p *peer) freeze(on bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range p.conns {
		c.mu.Lock()
		if on && c.frozen == nil {
			c.frozen = make(chan struct{})
		} else if !on && c.frozen != nil {
			close(c.frozen)
			c.frozen = nil
		}
		c.mu.Unlock()
	}
}

// dispatcher returns a dispatcher with the peers that are started, for which none is late, however
// loaded the machine is; change may alter its configuration.
func (w *swarm) dispatcher(change func(*Config)) *Dispatcher {
	w.t.Helper()
	cfg := Config{Model: testModel, Dialer: w, Heartbeat: 50 * time.Millisecond}
	cfg.MinDeadline, cfg.MaxDeadline, cfg.DeadAfter, cfg.ProgramWait = patient, patient, patient, patient
	if change != nil {
		change(&cfg)
	}
	d, err := NewDispatcher(cfg)
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { d.Close() })
	w.mu.Lock()
	defer w.mu.Unlock()
	for id := range w.addrs {
		d.AddPeer(id)
	}
	return d
}

// hasty is for tests in which workers are late or dead.
func hasty(c *Config) {
	c.MinDeadline, c.MaxDeadline, c.DeadAfter, c.ProgramWait = 250*time.Millisecond, 10*time.Second, 2*time.Second, 2*time.Second
}

// patient bounds what must happen, however loaded the machine is.
const patient = 30 * time.Second

// waitFor waits until all peers of the dispatcher satisfy a condition.
func waitFor(t *testing.T, d *Dispatcher, what string, ok func(PeerStatus) bool) {
	t.Helper()
	within(t, patient, what, func() bool {
		return !slices.ContainsFunc(d.Peers(), func(p PeerStatus) bool { return !ok(p) })
	})
}

func connected(p PeerStatus) bool { return p.Connected }

func within(t *testing.T, limit time.Duration, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(limit); !ok(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not within %v: %s", limit, what)
		}
	}
}

// layerCall is a call of random rows and ids.
func layerCall(rng *rand.Rand, layer, width, hidden, experts, used, tokens int, ownRows bool) *Call {
	c := &Call{
		Layer: layer, Program: programFor(width, hidden), RowWidth: width, OutWidth: width,
		RowsPerToken: 1, Used: used, IDs: make([]int32, 0, tokens*used),
		Out: make([]float32, tokens*used*width),
	}
	if ownRows {
		c.RowsPerToken = used
	}
	c.Rows = make([]float32, tokens*c.RowsPerToken*width)
	for i := range c.Rows {
		c.Rows[i] = rng.Float32()*2 - 1
	}
	for range tokens {
		for _, e := range rng.Perm(experts)[:used] {
			c.IDs = append(c.IDs, int32(e))
		}
	}
	return c
}

// alone computes a call with one kernel that holds the whole layer.
func alone(t *testing.T, k *ffn, c *Call) []float32 {
	t.Helper()
	prog, _, _, err := k.SetProgram(c.Layer, c.Program)
	if err != nil {
		t.Fatal(err)
	}
	row := make([]int32, len(c.IDs))
	for i := range row {
		row[i] = c.source(int32(i))
	}
	out := make([]float32, len(c.Out))
	if err := k.Compute(prog, c.Rows, row, c.IDs, out); err != nil {
		t.Fatal(err)
	}
	return out
}

// maxDiff is the largest difference, and infinite where one side is not a number.
func maxDiff(got, want []float32) float64 {
	var most float64
	for i := range want {
		d := math.Abs(float64(got[i]) - float64(want[i]))
		if math.IsNaN(d) {
			return math.Inf(1)
		}
		most = max(most, d)
	}
	return most
}

// poison makes rows that nobody filled visible.
func poison(c *Call) {
	for i := range c.Out {
		c.Out[i] = float32(math.NaN())
	}
}
