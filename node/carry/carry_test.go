package carry

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"kvasird/ggml/gguf"
	"kvasird/node/gateway"
	"kvasird/p2p"
)

// counting is an Answerer that counts up from the last token of the prompt.
type counting struct {
	slots   int
	context int
	pace    time.Duration // of a token
	first   time.Duration // until the first one
	fail    int           // after so many tokens it fails; 0: never
	lacks   gateway.Abilities

	mu      sync.Mutex // guards what follows
	running int
	ahead   int // the most tokens that were drawn at once
}

func (e *counting) Context() int { return e.context }

type fullError struct{ error }

func (fullError) RetryAfter() time.Duration { return 3 * time.Second }

func (e *counting) Start(ctx context.Context, req gateway.Request, extra gateway.Extra) (Tokens, error) {
	if e.lacks != (gateway.Abilities{}) {
		return nil, lackingError{e.lacks}
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.running >= e.slots {
		return nil, fullError{fmt.Errorf("the queue is full")}
	}
	e.running++
	context.AfterFunc(ctx, func() {
		e.mu.Lock()
		defer e.mu.Unlock()
		e.running--
	})
	n := e.context - len(req.Prompt)
	if req.MaxTokens > 0 {
		n = min(n, req.MaxTokens)
	}
	return &count{e: e, extra: extra, last: req.Prompt[len(req.Prompt)-1], left: n, due: time.Now().Add(e.first)}, nil
}

func (e *counting) busy() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.running
}

type lackingError struct{ lacks gateway.Abilities }

func (e lackingError) Error() string            { return "this engine is a plain one" }
func (e lackingError) Lacks() gateway.Abilities { return e.lacks }

type count struct {
	e          *counting
	extra      gateway.Extra
	last       int32
	left, sent int
	due        time.Time
}

func (c *count) Next(ctx context.Context) (int32, error) {
	if c.left == 0 {
		return 0, io.EOF
	}
	if c.e.fail > 0 && c.sent == c.e.fail {
		return 0, errors.New("experts are missing")
	}
	select {
	case <-time.After(time.Until(c.due)):
	case <-ctx.Done():
		return 0, ctx.Err()
	}
	c.due = time.Now().Add(c.e.pace)
	c.last++
	c.left--
	c.sent++
	c.e.mu.Lock()
	c.e.ahead = max(c.e.ahead, c.sent)
	c.e.mu.Unlock()
	return c.last, nil
}

// Prob is likely as the token is small, beside those that follow on it.
func (c *count) Prob() (chosen gateway.TokenProb, top []gateway.TokenProb) {
	for i := range int32(c.extra.Top) {
		top = append(top, gateway.TokenProb{ID: c.last + i, Logprob: -float32(c.last + i)})
	}
	return gateway.TokenProb{ID: c.last, Logprob: -float32(c.last)}, top
}

func (c *count) Cached() int    { return 2 }
func (c *count) Finish() string { return "length" }

// world is some servers and a client of them.
type world struct {
	t       *testing.T
	client  *Client
	engines map[string]*counting
	servers map[string]*Server
	targets []Target
	serve   map[string]func(Conn) // instead of a server

	mu     sync.Mutex // guards what follows
	conns  map[string][]net.Conn
	down   map[string]bool // not reached
	faults []error
	rows   map[string]int // that the client was told of, by server
}

var quiet = slog.New(slog.DiscardHandler)

func newWorld(t *testing.T, names ...string) *world {
	w := &world{t: t, engines: map[string]*counting{}, servers: map[string]*Server{}, serve: map[string]func(Conn){},
		conns: map[string][]net.Conn{}, down: map[string]bool{}, rows: map[string]int{}}
	for i, name := range names {
		e := &counting{slots: 4, context: 2048, pace: time.Millisecond}
		w.engines[name] = e
		w.servers[name] = NewServer(ServerConfig{
			Find: func(id gguf.ModelID) (Answerer, error) {
				if id != modelA {
					return nil, errors.New("another model runs here")
				}
				return e, nil
			},
			Admit:  func(string) error { return nil },
			Logger: quiet,
		})
		w.targets = append(w.targets, Target{Peer: name, Slots: 4, Free: 4, Context: 2048, RTT: time.Duration(1+i) * time.Millisecond, Token: time.Millisecond})
	}
	w.client = NewClient(ClientConfig{
		Model: modelA, Vocab: 1 << 20, Targets: func() []Target { return append([]Target{}, w.targets...) }, Dial: w.dial, Logger: quiet,
		Fault:  func(_ string, err error) { w.mu.Lock(); defer w.mu.Unlock(); w.faults = append(w.faults, err) },
		Served: func(peer string, rows int) { w.mu.Lock(); defer w.mu.Unlock(); w.rows[peer] += rows },
	})
	return w
}

func (w *world) dial(_ context.Context, peer string) (Conn, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.down[peer] {
		return nil, errors.New("no route")
	}
	near, far := net.Pipe()
	w.conns[peer] = append(w.conns[peer], far)
	if f := w.serve[peer]; f != nil {
		go func() { defer far.Close(); f(far) }()
	} else {
		go w.servers[peer].Serve("entry", far)
	}
	return near, nil
}

// took checks of how many rows the client was told, and that all were of one server.
func (w *world) took(peer string, rows int) {
	w.t.Helper()
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.rows) != 1 || w.rows[peer] != rows {
		w.t.Errorf("%v rows were told, want %d of %s", w.rows, rows, peer)
	}
}

// kill breaks what a server has open, which is then not reached any more.
func (w *world) kill(peer string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.down[peer] = true
	for _, c := range w.conns[peer] {
		c.Close()
	}
}

// calls is how often a server was reached.
func (w *world) calls(peer string) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.conns[peer])
}

func request(most int) gateway.Request {
	return gateway.Request{Prompt: []int32{7, 8, 9}, MaxTokens: most}
}

// rest reads an answer to its end. The tokens have to be those that follow on the prompt.
func (w *world) rest(ctx context.Context, a *Answer, at int) (n int, err error) {
	w.t.Helper()
	for n = at; ; n++ {
		token, err := a.Next(ctx)
		if err == io.EOF {
			return n, nil
		}
		if err != nil {
			return n, err
		}
		if token != int32(10+n) {
			w.t.Fatalf("token %d is %d, want %d", n, token, 10+n)
		}
	}
}

// free checks that all servers are without requests within a time.
func (w *world) free(within time.Duration) {
	w.t.Helper()
	time.Sleep(within)
	synctest.Wait()
	for name, e := range w.engines {
		if s := w.servers[name].Stats(); s.Running != 0 || e.busy() != 0 {
			w.t.Errorf("%s still has %d requests, %d in its engine", name, s.Running, e.busy())
		}
	}
	w.client.mu.Lock()
	defer w.client.mu.Unlock()
	if len(w.client.mine) > 0 {
		w.t.Errorf("the client still counts %v", w.client.mine)
	}
}

func TestAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "a", "b")
		w.engines["a"].first = 20 * time.Second // longer than silence: WAIT keeps it alive
		a, err := w.client.Start(t.Context(), request(1000), gateway.Extra{})
		if err != nil {
			t.Fatal(err)
		}
		if n, err := w.rest(t.Context(), a, 0); n != 1000 || err != nil || a.Finish() != "length" || a.Cached() != 2 {
			t.Errorf("%d tokens, %v, finish %q, %d cached", n, err, a.Finish(), a.Cached())
		}
		w.took("a", 3+1000-1)
		synctest.Wait() // the server counts after the client has all
		if s := w.servers["a"].Stats(); s.Answered != 1 || s.Gone != 0 || len(s.Refused) > 0 {
			t.Errorf("%+v", s)
		}
		w.free(0)
	})
}

// TestSlowClient: a server does not run ahead of a client that does not read, and a client that
// never does is ended.
func TestSlowClient(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "a")
		a, err := w.client.Start(t.Context(), request(2000), gateway.Extra{})
		if err != nil {
			t.Fatal(err)
		}
		for n := range 20 {
			time.Sleep(5 * time.Second)
			if token, err := a.Next(t.Context()); err != nil || token != int32(10+n) {
				t.Fatalf("token %d is %d, %v", n, token, err)
			}
			if most := Window + n; w.engines["a"].ahead > most {
				t.Errorf("%d tokens were drawn, %d read", w.engines["a"].ahead, n)
			}
			a.mu.Lock()
			if len(a.tokens) > Window {
				t.Errorf("%d tokens wait", len(a.tokens))
			}
			a.mu.Unlock()
		}
		time.Sleep(2 * stallTime)
		var refused *RefusedError
		if _, err := w.rest(t.Context(), a, 20); !errors.As(err, &refused) || refused.Code != CodeFailed || !strings.Contains(refused.Text, "nothing was read for 1m0s") {
			t.Errorf("after the client slept: %v", err)
		}
		w.free(0)
	})
}

func TestClientLeaves(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "a")
		w.engines["a"].pace = time.Second
		for _, after := range []time.Duration{0, 500 * time.Millisecond, 5 * time.Second} {
			ctx, cancel := context.WithTimeout(t.Context(), after)
			a, err := w.client.Start(ctx, request(100), gateway.Extra{})
			if err == nil {
				_, err = w.rest(ctx, a, 0)
			}
			if !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("left after %v: %v", after, err)
			}
			cancel()
			w.free(time.Millisecond)
		}
		if s := w.servers["a"].Stats(); s.Answered != 0 || s.Gone < 2 || len(s.Refused) > 0 {
			t.Errorf("%+v", s)
		}
	})
}

// TestNextAgain: a wait that ends early loses nothing.
func TestNextAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "a")
		w.engines["a"].pace = 700 * time.Millisecond
		a, err := w.client.Start(t.Context(), request(20), gateway.Extra{})
		if err != nil {
			t.Fatal(err)
		}
		n, waits := 0, 0
		for {
			ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
			n, err = w.rest(ctx, a, n)
			cancel()
			if err == nil {
				break
			}
			waits++
		}
		if n != 20 || waits < 100 {
			t.Errorf("%d tokens in %d waits", n, waits)
		}
	})
}

func TestSecondServer(t *testing.T) {
	for _, tt := range []struct {
		name  string
		begin func(w *world)
		mid   func(w *world) // after Start
	}{
		{"not reached", func(w *world) { w.down["a"] = true }, nil},
		{"full", func(w *world) { w.engines["a"].slots = 0 }, nil},
		{"closed", func(w *world) { w.servers["a"].Close(w.t.Context()) }, nil},
		{"hangs up", func(w *world) { w.serve["a"] = func(Conn) {} }, nil},
		{"says nothing", func(w *world) { w.serve["a"] = func(c Conn) { io.Copy(io.Discard, c) } }, nil},
		{"reads nothing", func(w *world) { w.serve["a"] = func(c Conn) { time.Sleep(time.Hour) } }, nil},
		{"fails at once", func(w *world) {
			w.serve["a"] = func(c Conn) { refuseWith(c, &refusal{code: CodeFailed, text: "experts are missing"}) }
		}, nil},
		{"is killed before the first token", func(w *world) { w.engines["a"].first = time.Minute }, func(w *world) {
			time.Sleep(5 * time.Second)
			w.kill("a")
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, "a", "b")
				tt.begin(w)
				a, err := w.client.Start(t.Context(), request(10), gateway.Extra{})
				if err != nil {
					t.Fatal(err)
				}
				if tt.mid != nil {
					tt.mid(w)
				}
				if n, err := w.rest(t.Context(), a, 0); n != 10 || err != nil {
					t.Errorf("%d tokens, %v", n, err)
				}
				if w.calls("b") != 1 {
					t.Errorf("the second server was asked %d times", w.calls("b"))
				}
				w.took("b", 3+10-1)
				time.Sleep(2 * time.Hour)
			})
		})
	}
}

// refuseWith takes a request and refuses it.
func refuseWith(c Conn, r *refusal) {
	in := p2p.NewFrameReader(c, maxAsk)
	in.Next()
	in.Next()
	send(c, p2p.NewFrameWriter(c, maxAnswer), frameRefused, putRefusal(nil, r))
}

// TestNoSecondServer has what another server is not asked for.
func TestNoSecondServer(t *testing.T) {
	var rights, failed *RefusedError
	var long *LongError
	for _, tt := range []struct {
		name  string
		begin func(w *world)
		tell  func(n int, err error) bool
	}{
		{"rights", func(w *world) {
			w.servers["a"].cfg.Admit = func(string) error { return errors.New("ask its operator") }
		}, func(n int, err error) bool {
			return errors.As(err, &rights) && rights.Code == CodeRights && strings.Contains(err.Error(), "ask its operator")
		}},
		{"too long", func(w *world) { w.engines["a"].context = 3 }, func(n int, err error) bool {
			return errors.As(err, &long) && long.Prompt == 3 && long.Limit == 3
		}},
		{"killed midway", func(w *world) {
			w.engines["a"].pace = time.Second
			time.AfterFunc(5500*time.Millisecond, func() { w.kill("a") })
		}, func(n int, err error) bool { return n == 6 && strings.Contains(err.Error(), "a, is gone") }},
		{"fails midway", func(w *world) { w.engines["a"].fail = 4 }, func(n int, err error) bool {
			return n == 4 && errors.As(err, &failed) && failed.Code == CodeFailed && strings.Contains(err.Error(), "experts are missing")
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, "a", "b")
				tt.begin(w)
				n := 0
				a, err := w.client.Start(t.Context(), request(10), gateway.Extra{})
				if err == nil {
					n, err = w.rest(t.Context(), a, 0)
				}
				if err == nil || !tt.tell(n, err) {
					t.Errorf("after %d tokens: %v", n, err)
				}
				if w.calls("b") != 0 {
					t.Error("the second server was asked")
				}
				w.free(time.Second)
			})
		})
	}
}

// TestAllFull: where all are full it says when to come again, also when one of two is gone.
func TestAllFull(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "a", "b")
		w.engines["a"].slots, w.engines["b"].slots = 0, 0
		for _, gone := range []string{"none", "a", "b"} {
			w.down = map[string]bool{gone: true}
			var busy *BusyError
			if _, err := w.client.Start(t.Context(), request(10), gateway.Extra{}); !errors.As(err, &busy) || busy.RetryAfter() != 3*time.Second {
				t.Errorf("%s is gone: %v", gone, err)
			}
		}
		w.down = map[string]bool{"a": true, "b": true}
		if _, err := w.client.Start(t.Context(), request(10), gateway.Extra{}); err == nil || !strings.Contains(err.Error(), "no route") {
			t.Errorf("both are gone: %v", err)
		}
		w.targets = nil
		if _, err := w.client.Start(t.Context(), request(10), gateway.Extra{}); !errors.Is(err, ErrNobody) {
			t.Errorf("there is none: %v", err)
		}
		w.free(time.Second)
		if s := w.servers["a"].Stats(); s.Refused[CodeBusy] != 2 {
			t.Errorf("%+v", s)
		}
	})
}

// TestBounds: a server has so many requests of one peer, and so many in all.
func TestBounds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "a")
		s := w.servers["a"]
		s.cfg.MaxPeer, s.cfg.MaxAll = 2, 3
		silent := func(peer string) (Conn, chan error) {
			near, far := net.Pipe()
			done := make(chan error, 1)
			go func() { done <- s.Serve(peer, far) }()
			return near, done
		}
		read := func(c Conn) string {
			f, err := p2p.NewFrameReader(c, maxAnswer).Next()
			if err != nil {
				return err.Error()
			}
			r, err := decodeRefusal(f.Payload)
			if err != nil || r.code != CodeBusy || r.retry != busyPause {
				t.Errorf("%+v, %v", r, err)
			}
			return r.text
		}
		var open []Conn
		for _, peer := range []string{"x", "x", "y"} {
			c, _ := silent(peer)
			open = append(open, c)
			synctest.Wait()
		}
		over, _ := silent("x")
		if got := read(over); !strings.Contains(got, "2 requests of this node") {
			t.Errorf("the third of one peer: %s", got)
		}
		over, _ = silent("z")
		if got := read(over); !strings.Contains(got, "3 requests of other nodes") {
			t.Errorf("the fourth in all: %s", got)
		}
		open[0].Close()
		synctest.Wait()
		c, done := silent("z")
		synctest.Wait()
		if st := s.Stats(); st.Running != 3 || st.Refused[CodeBusy] != 2 || st.Gone != 1 {
			t.Errorf("%+v", st)
		}
		time.Sleep(askTime + time.Second) // who does not ask is let go
		if err := <-done; err != nil || s.Stats().Running != 0 {
			t.Errorf("%v, %+v", err, s.Stats())
		}
		c.Close()
	})
}

// TestClose: requests that run may end; those that do not in time are told.
func TestClose(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "a")
		w.engines["a"].pace = time.Second
		quick, err := w.client.Start(t.Context(), request(3), gateway.Extra{})
		if err != nil {
			t.Fatal(err)
		}
		slow, err := w.client.Start(t.Context(), request(1000), gateway.Extra{})
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		began := time.Now()
		w.servers["a"].Close(ctx)
		w.servers["a"].Close(ctx)
		if took := time.Since(began); took != 10*time.Second || w.servers["a"].Stats().Running != 0 {
			t.Errorf("closed after %v, %+v", took, w.servers["a"].Stats())
		}
		if n, err := w.rest(t.Context(), quick, 0); n != 3 || err != nil {
			t.Errorf("the quick one: %d, %v", n, err)
		}
		if _, err := w.rest(t.Context(), slow, 0); err == nil || !strings.Contains(err.Error(), "the node is stopping") {
			t.Errorf("the slow one: %v", err)
		}
		if _, err := w.client.Start(t.Context(), request(3), gateway.Extra{}); err == nil || !strings.Contains(err.Error(), "not ready: the node is stopping") {
			t.Errorf("afterwards: %v", err)
		}
	})
}

// TestRefusedRequests: what is wrong with a request is told before anybody is asked.
func TestRefusedRequests(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "a")
		for want, req := range map[string]gateway.Request{
			"prompt of 0 tokens": {}, "temperature is -1": {Prompt: []int32{1}, Temperature: -1}, "answer of -1": {Prompt: []int32{1}, MaxTokens: -1},
		} {
			if _, err := w.client.Start(t.Context(), req, gateway.Extra{}); err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%v, want %q", err, want)
			}
		}
		if w.calls("a") != 0 {
			t.Error("the server was asked")
		}
		a, err := w.client.Start(t.Context(), gateway.Request{Prompt: []int32{8, 9}, MaxTokens: 1 << 40}, gateway.Extra{})
		if err != nil {
			t.Fatal(err)
		}
		if n, err := w.rest(t.Context(), a, 0); n != 2046 || err != nil {
			t.Errorf("%d tokens where any number was asked for, %v", n, err)
		}
	})
}
