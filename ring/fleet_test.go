package ring

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"os"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"kvasird/ggml/gguf"
)

// patient bounds what a test waits for.
const patient = time.Minute

// fleet is a network of nodes in this process, with stages or none, that can be cut, frozen and
// killed.
type fleet struct {
	t     testing.TB
	tcp   bool // loopback sockets instead of pipes
	serve sync.WaitGroup

	mu    sync.Mutex
	nodes map[string]*member
	conns []*fleetConn
	cuts  map[[2]string]bool
}

type member struct {
	name   string
	stage  *Stage
	double *double
	also   *member // a second stage of the node
	dead   bool
	frozen chan struct{} // not nil: the node neither reads nor writes nor closes; closed when it goes on
}

func newFleet(t testing.TB) *fleet {
	f := &fleet{t: t, nodes: map[string]*member{}, cuts: map[[2]string]bool{}}
	f.node("entry")
	return f
}

func (f *fleet) node(name string) *member {
	f.mu.Lock()
	defer f.mu.Unlock()
	m := &member{name: name}
	f.nodes[name] = m
	return m
}

// stage adds a node with a stage.
func (f *fleet) stage(name string, layers gguf.Range, change ...func(*StageConfig, *double)) *member {
	f.t.Helper()
	m := f.node(name)
	f.fill(m, layers, change...)
	return m
}

func (f *fleet) fill(m *member, layers gguf.Range, change ...func(*StageConfig, *double)) {
	f.t.Helper()
	name := m.name
	m.double = newDouble(f.t, layers)
	cfg := StageConfig{
		Peer: name, Model: testModel, Layers: layers, Total: testLayers, Width: testWidth, Compute: m.double,
		Dialer: f.dialer(name), CanTruncate: true, Sequences: 16, Context: 512, Batch: 64, Chunk: 20, Logger: testLogger(f.t),
	}
	for _, c := range change {
		c(&cfg, m.double)
	}
	st, err := NewStage(cfg)
	if err != nil {
		f.t.Fatal(err)
	}
	f.mu.Lock()
	m.stage = st
	f.mu.Unlock()
}

// find returns the stage of a node that a link asks for.
func (m *member) find(_ string, layers gguf.Range) (*Stage, error) {
	if m.also != nil && m.also.stage.Layers() == layers {
		return m.also.stage, nil
	}
	return m.stage, nil
}

func testLogger(t testing.TB) *slog.Logger {
	if os.Getenv("RING_LOG") == "" {
		return nil
	}
	return slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelDebug}))
}

// windows cuts the layers into n parts as equal as can be.
func windows(n int) []gguf.Range {
	var list []gguf.Range
	for i := range n {
		list = append(list, gguf.Range{Begin: i * testLayers / n, End: (i + 1) * testLayers / n})
	}
	return list
}

// ring adds n stages and returns their chain.
func (f *fleet) ring(n int, change ...func(*StageConfig, *double)) Chain {
	var chain Chain
	for i, w := range windows(n) {
		name := fmt.Sprintf("s%d", i)
		f.stage(name, w, change...)
		chain = append(chain, Hop{name, w})
	}
	return chain
}

func (f *fleet) entry(change ...func(*EntryConfig)) *Entry {
	f.t.Helper()
	cfg := EntryConfig{Model: testModel, Total: testLayers, Dialer: f.dialer("entry"), Logger: testLogger(f.t)}
	for _, c := range change {
		c(&cfg)
	}
	e, err := NewEntry(cfg)
	if err != nil {
		f.t.Fatal(err)
	}
	return e
}

type dialFunc func(ctx context.Context, peer string) (net.Conn, error)

func (d dialFunc) Dial(ctx context.Context, peer string) (net.Conn, error) { return d(ctx, peer) }

func (f *fleet) dialer(from string) Dialer {
	return dialFunc(func(ctx context.Context, to string) (net.Conn, error) {
		f.mu.Lock()
		a, b := f.nodes[from], f.nodes[to]
		switch {
		case b == nil || b.stage == nil || a.dead || b.dead || f.cuts[[2]string{from, to}]:
			f.mu.Unlock()
			return nil, fmt.Errorf("no way from %s to %s", from, to)
		case a.frozen != nil || b.frozen != nil:
			f.mu.Unlock()
			<-ctx.Done()
			return nil, ctx.Err()
		}
		f.mu.Unlock()
		p, q, err := f.pair()
		if err != nil {
			return nil, err
		}
		near, far := &fleetConn{Conn: p, f: f, owner: a, other: b, gone: make(chan struct{})}, &fleetConn{Conn: q, f: f, owner: b, other: a, gone: make(chan struct{})}
		f.mu.Lock()
		f.conns = append(f.conns, near, far)
		wait := b.stage.cfg.DialTimeout
		f.mu.Unlock()
		f.serve.Go(func() {
			if err := Serve(context.Background(), far, wait, b.find); err != nil && os.Getenv("RING_LOG") != "" {
				f.t.Logf("%s served %s: %v", to, from, err)
			}
		})
		return near, nil
	})
}

func (f *fleet) pair() (p, q net.Conn, err error) {
	if !f.tcp {
		p, q = net.Pipe()
		return p, q, nil
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, nil, err
	}
	defer l.Close()
	if p, err = net.Dial("tcp", l.Addr().String()); err != nil {
		return nil, nil, err
	}
	q, err = l.Accept()
	return p, q, err
}

// fleetConn is one end of a connection.
type fleetConn struct {
	net.Conn
	f            *fleet
	owner, other *member
	once         sync.Once
	gone         chan struct{} // closed by Close or a deadline in the past
}

type nodeAddr string

func (a nodeAddr) Network() string { return "fleet" }
func (a nodeAddr) String() string  { return string(a) }

func (c *fleetConn) RemoteAddr() net.Addr { return nodeAddr(c.other.name) }

// gate waits while the owner is frozen.
func (c *fleetConn) gate() error {
	for {
		c.f.mu.Lock()
		frozen := c.owner.frozen
		c.f.mu.Unlock()
		if frozen == nil {
			return nil
		}
		select {
		case <-frozen:
		case <-c.gone:
			return net.ErrClosed
		}
	}
}

func (c *fleetConn) Read(b []byte) (int, error) {
	if err := c.gate(); err != nil {
		return 0, err
	}
	n, err := c.Conn.Read(b)
	if e := c.gate(); e != nil {
		return 0, e
	}
	return n, err
}

func (c *fleetConn) Write(b []byte) (int, error) {
	if err := c.gate(); err != nil {
		return 0, err
	}
	return c.Conn.Write(b)
}

func (c *fleetConn) SetDeadline(t time.Time) error {
	if !t.IsZero() && t.Before(time.Now()) {
		c.once.Do(func() { close(c.gone) })
	}
	return c.Conn.SetDeadline(t)
}

// Close of a frozen node is not seen by the other side.
func (c *fleetConn) Close() error {
	c.once.Do(func() { close(c.gone) })
	c.f.mu.Lock()
	frozen := c.owner.frozen
	c.f.mu.Unlock()
	if frozen != nil {
		return nil
	}
	return c.Conn.Close()
}

// between closes the connections of a node, or those between two.
func (f *fleet) between(a, b string) {
	f.mu.Lock()
	var list []*fleetConn
	for _, c := range f.conns {
		if c.owner.name == a && (b == "" || c.other.name == b) || c.other.name == a && (b == "" || c.owner.name == b) {
			list = append(list, c)
		}
	}
	f.mu.Unlock()
	for _, c := range list {
		c.Conn.Close()
	}
}

// kill ends a node without a word of its stage.
func (f *fleet) kill(name string) {
	f.mu.Lock()
	m := f.nodes[name]
	m.dead = true
	f.mu.Unlock()
	f.between(name, "")
	m.stage.Close()
}

func (f *fleet) freeze(name string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.nodes[name].frozen = make(chan struct{})
}

// cut breaks the connections between two nodes; with apart no new ones can be made.
func (f *fleet) cut(a, b string, apart bool) {
	f.mu.Lock()
	f.cuts[[2]string{a, b}], f.cuts[[2]string{b, a}] = apart, apart
	f.mu.Unlock()
	f.between(a, b)
}

// close ends everything, and checks that nothing is left behind.
func (f *fleet) close(entries ...*Entry) {
	f.t.Helper()
	for _, e := range entries {
		e.Close()
	}
	f.mu.Lock()
	var list []*member
	for _, m := range f.nodes {
		if m.frozen != nil {
			close(m.frozen)
			m.frozen = nil
		}
		list = append(list, m)
		if m.also != nil {
			list = append(list, m.also)
		}
	}
	f.mu.Unlock()
	for _, m := range list {
		if m.stage != nil {
			f.between(m.name, "")
			m.stage.Close()
			if n := m.double.samplers.Load(); n != 0 {
				f.t.Errorf("%s: %d samplers are open", m.name, n)
			}
		}
	}
	f.serve.Wait()
}

// free waits until all sequences of the living nodes are free, and returns how long that took.
func (f *fleet) free() time.Duration {
	f.t.Helper()
	start := time.Now()
	for {
		busy := ""
		for name, m := range f.nodes {
			if m.stage == nil || m.dead || m.frozen != nil {
				continue
			}
			if s := m.stage.Stats(); s.Free != s.Sequences || s.Sessions != 0 || s.Reserved != 0 {
				busy = fmt.Sprintf("%s: %+v", name, s)
			}
		}
		if busy == "" {
			return time.Since(start)
		}
		if time.Since(start) > patient {
			f.t.Fatalf("not free after %v: %s", patient, busy)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// request is a random request.
func request(r *rand.Rand) Request {
	req := Request{MaxTokens: 1 + r.IntN(120)}
	for range 1 + r.IntN(90) {
		req.Tokens = append(req.Tokens, 1+r.Int32N(7))
	}
	switch r.IntN(3) {
	case 0:
		req.Sampling = Sampling{Temperature: 0.5 + r.Float32(), Seed: r.Uint32(), PresencePenalty: r.Float32()}
	case 1:
		req.Sampling = Sampling{LogitBias: map[int32]float32{3: 1, 60: -2}}
	}
	if r.IntN(3) == 0 {
		req.Sampling.Grammar = sumGrammar
	}
	if r.IntN(3) == 0 {
		req.Sampling.Logprobs, req.Sampling.Top = true, r.IntN(MaxTop+1)
	}
	return req
}

// answer reads a session to its end.
func answer(ctx context.Context, s *Session) (list []int32, probs []Prob, err error) {
	for {
		part, err := s.Next(ctx)
		if err == io.EOF {
			return list, probs, nil
		}
		if err != nil {
			return list, probs, err
		}
		list, probs = append(list, part...), append(probs, s.Probs()...)
	}
}

// ask runs a request and compares its answer with the oracle's.
func ask(t testing.TB, e *Entry, chain Chain, req Request, replan Replan) error {
	ctx, cancel := context.WithTimeout(context.Background(), 10*patient)
	defer cancel()
	s, err := e.Open(ctx, chain, req, replan)
	if err != nil {
		return err
	}
	defer s.Close()
	got, likely, err := answer(ctx, s)
	if err != nil {
		return err
	}
	want, probs, finish := oracle(t, req)
	if !slices.Equal(got, want) || s.Finish() != finish {
		return fmt.Errorf("answer differs: got %d tokens %v (%s), want %d tokens %v (%s)", len(got), got, s.Finish(), len(want), want, finish)
	}
	if !reflect.DeepEqual(likely, probs) {
		return fmt.Errorf("log-probabilities differ: got %v, want %v", likely, probs)
	}
	return nil
}

// wantError checks that err is of a stage, with a code and a text.
func wantError(t testing.TB, err error, index int, code Code, text string) {
	t.Helper()
	var se *StageError
	if !errors.As(err, &se) || se.Index != index || se.Code != code || !strings.Contains(err.Error(), text) {
		t.Errorf("got error %v, want one of stage %d, %v, with %q", err, index, code, text)
	}
}
