package carry

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"sync"
	"time"

	"kvasird/ggml/gguf"
	"kvasird/node/gateway"
	"kvasird/p2p"
)

const (
	dialTime = 10 * time.Second
	// attempts is how many servers a request is tried on.
	attempts = 2
)

// ClientConfig is what a client needs.
type ClientConfig struct {
	Model gguf.ModelID
	Vocab int // tokens of the model's vocabulary
	// Targets lists the servers of the model now. Mine is filled in by the client.
	Targets func() []Target
	// Dial opens a stream of Protocol to a peer.
	Dial func(ctx context.Context, peer string) (Conn, error)
	// Fault is told how a peer broke the protocol.
	Fault func(peer string, err error)
	// Served is told of the rows that a server's answer took: with its first tokens those of the
	// prompt, and none for the last token; or those of all inputs. It may be called with a lock
	// held: it does not wait. nil: nobody is told.
	Served func(peer string, rows int)
	Logger *slog.Logger
}

// Client has other nodes answer for a model.
type Client struct {
	cfg ClientConfig

	mu   sync.Mutex     // guards mine
	mine map[string]int // requests that run, by peer
}

// NewClient returns a client that waits for Start.
func NewClient(cfg ClientConfig) *Client { return &Client{cfg: cfg, mine: map[string]int{}} }

// Start has a request answered, and returns once a server took it. The end of ctx ends it. Errors:
// ErrNobody, *LongError, *BusyError, *LacksError, *RefusedError, what is wrong with the request, or why no server
// was reached.
func (c *Client) Start(ctx context.Context, req gateway.Request, extra gateway.Extra) (*Answer, error) {
	asked := askOf(c.cfg.Model, &req, &extra)
	payload, err := asked.encode()
	if err != nil {
		return nil, err
	}
	a := &Answer{client: c, req: req, asked: asked, ask: payload, notify: make(chan struct{}, 1), begun: make(chan struct{}), told: make(chan struct{}, 1)}
	go a.run(ctx)
	select {
	case <-a.begun:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.err != nil && a.err != io.EOF && a.got == 0 {
		return nil, a.err
	}
	return a, nil
}

// choose picks a server that was not tried, see Choose.
func (c *Client) choose(tried []string, prompt, room, most int) (Target, error) {
	list := slices.DeleteFunc(c.cfg.Targets(), func(t Target) bool { return slices.Contains(tried, t.Peer) })
	c.mu.Lock()
	for i := range list {
		list[i].Mine = c.mine[list[i].Peer]
	}
	c.mu.Unlock()
	return Choose(list, prompt, room, most)
}

// use counts a request that runs at a peer until the returned function is called.
func (c *Client) use(peer string) (end func()) {
	add := func(n int) {
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.mine[peer] += n; c.mine[peer] == 0 {
			delete(c.mine, peer)
		}
	}
	add(1)
	return func() { add(-1) }
}

// Answer is a request that another node answers.
type Answer struct {
	client *Client
	req    gateway.Request
	asked  ask
	ask    []byte        // asked as it travels
	begun  chan struct{} // closed when a server took the request, or none did
	notify chan struct{} // something changed for Next; holds one
	told   chan struct{} // more was read than the server knows; holds one

	mu     sync.Mutex // guards what follows
	tokens []likely   // that were not read yet, at most Window
	read   likely     // that Next returned last
	got    int        // tokens that came
	saying int        // tokens that the server knows to be read
	taken  bool       // by the server that is tried
	cached int
	finish string
	err    error // io.EOF: complete
}

// Next waits for the next token, the end token included. io.EOF ends a complete answer; any other
// error a failed one, and the tokens before it come first. When ctx ends while nothing is there, its
// error is returned and Next may be called again.
func (a *Answer) Next(ctx context.Context) (int32, error) {
	for {
		a.mu.Lock()
		if len(a.tokens) > 0 {
			a.read, a.tokens = a.tokens[0], a.tokens[1:]
			t := a.read.of.ID
			if a.got-len(a.tokens)-a.saying >= Window/4 {
				wake(a.told)
			}
			a.mu.Unlock()
			return t, nil
		}
		err := a.err
		a.mu.Unlock()
		if err != nil {
			return 0, err
		}
		select {
		case <-a.notify:
		case <-ctx.Done():
			return 0, ctx.Err()
		}
	}
}

// Prob is the log-probability of the token that Next returned last, and of the likeliest tokens at
// its place, where they were asked for. They have no bytes.
func (a *Answer) Prob() (chosen gateway.TokenProb, top []gateway.TokenProb) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.read.of, a.read.top
}

// Finish says why a complete answer ended, "stop" or "length". It is "" before.
func (a *Answer) Finish() string {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.finish
}

// Cached is how many tokens of the prompt were not computed again, known with the first token.
func (a *Answer) Cached() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.cached
}

func wake(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// attempt tries servers, see Choose, until one has answered, or until one failed that had begun to.
func (c *Client) attempt(ctx context.Context, prompt, room, most int, try func(Target) error, began func() bool) (failed error) {
	var tried []string
	for range attempts {
		t, err := c.choose(tried, prompt, room, most)
		if err != nil {
			if failed == nil {
				failed = err
			}
			break
		}
		err = try(t)
		if err == nil || ctx.Err() != nil || began() || isFinal(err) {
			failed = err
			break
		}
		c.cfg.Logger.Info("a node did not answer", "peer", t.Peer, "error", err)
		tried = append(tried, t.Peer)
		if failed != nil { // that one is busy outlasts the rest: it says when to come again
			err = fmt.Errorf("%w; and before that: %w", err, failed)
		}
		failed = err
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return failed
}

// run tries servers until one has answered.
func (a *Answer) run(ctx context.Context) {
	failed := a.client.attempt(ctx, len(a.req.Prompt), 1, a.req.MaxTokens, func(t Target) error { return a.try(ctx, t) }, func() bool { return a.came() > 0 })
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.err = failed; failed == nil {
		a.err = io.EOF
	}
	a.beginLocked()
	wake(a.notify)
}

// beginLocked lets Start return.
func (a *Answer) beginLocked() {
	select {
	case <-a.begun:
	default:
		close(a.begun)
	}
}

func isFinal(err error) bool {
	var refused *RefusedError
	var long *LongError
	return errors.As(err, &long) || errors.As(err, &refused) && refused.Code.final()
}

// came is how many tokens came.
func (a *Answer) came() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.got
}

// try has one server answer. It returns nil when the answer is complete.
func (a *Answer) try(ctx context.Context, t Target) error {
	a.mu.Lock()
	a.taken = false
	a.mu.Unlock()
	return a.client.reach(ctx, t, a.write, func(c Conn) error { return a.receive(c, t) })
}

// reach opens a stream to a server, on which write sends until its channel is closed, and receive
// reads until the end, which is told.
func (cl *Client) reach(ctx context.Context, t Target, write func(Conn, <-chan struct{}), receive func(Conn) error) error {
	defer cl.use(t.Peer)()
	limit, done := context.WithTimeout(ctx, dialTime)
	c, err := cl.cfg.Dial(limit, t.Peer)
	done()
	if err != nil {
		return fmt.Errorf("node %s is not reached: %w", t.Peer, err)
	}
	var writing sync.WaitGroup
	defer writing.Wait()
	defer c.Close() // which also tells the server that nobody reads any more
	stop := context.AfterFunc(ctx, func() { c.Close() })
	defer stop()
	ended := make(chan struct{})
	defer close(ended)
	writing.Go(func() { write(c, ended) })
	err = receive(c)
	var broken *protocolError
	if errors.As(err, &broken) {
		cl.cfg.Fault(t.Peer, err)
	}
	return err
}

// write sends the request, and what was read of the answer. When that fails, reading tells why.
func (a *Answer) write(c Conn, ended <-chan struct{}) {
	out := p2p.NewFrameWriter(c, max(maxAsk, 4*len(a.req.Prompt)))
	err := send(c, out, frameAsk, a.ask)
	if err == nil {
		err = send(c, out, framePrompt, p2p.AppendInts(nil, a.req.Prompt))
	}
	tick := time.NewTicker(wordEvery)
	defer tick.Stop()
	for err == nil {
		select {
		case <-a.told:
		case <-tick.C:
		case <-ended:
			return
		}
		a.mu.Lock()
		a.saying = a.got - len(a.tokens)
		payload := p2p.AppendInts(nil, []int32{int32(a.saying)})
		a.mu.Unlock()
		err = send(c, out, frameTaken, payload)
	}
}

// protocolError is what a server must not send.
type protocolError struct{ error }

func broke(format string, args ...any) error { return &protocolError{fmt.Errorf(format, args...)} }

// receive takes in what a server sends, until the answer is complete.
func (a *Answer) receive(c Conn, t Target) error {
	return readFrames(c, t, maxAnswer, func(f p2p.Frame) (bool, error) { return a.take(t, f) })
}

// readFrames reads the frames of a server, of so many bytes at most, until take says that it is over.
func readFrames(c Conn, t Target, size int, take func(p2p.Frame) (over bool, err error)) error {
	in := p2p.NewFrameReader(c, size)
	for {
		f, err := receive(c, in, silence)
		switch {
		case errors.Is(err, p2p.ErrFrame) || errors.Is(err, p2p.ErrFrameTooLarge):
			return broke("node %s: %w", t.Peer, err)
		case err != nil:
			return fmt.Errorf("the node that answered, %s, is gone: %w", t.Peer, noEOF(err))
		}
		over, err := take(f)
		if over || err != nil {
			return err
		}
	}
}

// noEOF keeps the end of a stream from being taken for the end of an answer.
func noEOF(err error) error {
	if err == io.EOF {
		return io.ErrUnexpectedEOF
	}
	return err
}

// take takes in one frame.
func (a *Answer) take(t Target, f p2p.Frame) (over bool, err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	switch {
	case f.Type == frameRefused:
		r, err := decodeRefusal(f.Payload)
		if err != nil {
			return false, broke("node %s: %w", t.Peer, err)
		}
		if r.code == CodeProtocol && !a.taken && a.asked.wishes() { // it speaks version 1 alone
			r.code, r.lacks = CodeLacks, gateway.Abilities{Grammar: true, Special: true, Logprobs: true}
		}
		return false, errorOf(t.Peer, r)
	case f.Type == frameBegun && len(f.Payload) == 0 && !a.taken:
		a.taken = true
		a.beginLocked()
	case f.Type == frameWait && len(f.Payload) == 0:
	case f.Type == frameTokens && a.taken && !a.asked.Logprobs:
		cached, list, err := decodeAnswer(f.Payload, a.client.cfg.Vocab)
		add := make([]likely, len(list))
		for i, id := range list {
			add[i].of.ID = id
		}
		return false, a.addLocked(t, cached, add, err)
	case f.Type == frameLikely && a.taken && a.asked.Logprobs:
		l, err := decodeLikely(f.Payload, a.client.cfg.Vocab)
		return false, a.addLocked(t, l.cached, []likely{l}, err)
	case f.Type == frameEnd && a.got > 0:
		a.finish, err = decodeEnd(f.Payload)
		if err != nil {
			return false, broke("node %s: %w", t.Peer, err)
		}
		return true, nil
	default:
		return false, broke("node %s: frame of type %d with %d bytes", t.Peer, f.Type, len(f.Payload))
	}
	return false, nil
}

// addLocked takes in tokens, or the error with which they were read.
func (a *Answer) addLocked(t Target, cached int, list []likely, err error) error {
	most := t.Context - len(a.req.Prompt)
	if a.req.MaxTokens > 0 {
		most = min(most, a.req.MaxTokens)
	}
	switch {
	case err != nil:
		return broke("node %s: %w", t.Peer, err)
	case len(list[0].top) > a.asked.Top:
		return broke("node %s: a token beside %d others, %d were asked for", t.Peer, len(list[0].top), a.asked.Top)
	case a.got+len(list)-a.saying > Window:
		return broke("node %s: %d tokens beyond those that were read, at most %d", t.Peer, a.got+len(list)-a.saying, Window)
	case a.got+len(list) > most:
		return broke("node %s: %d tokens, at most %d were asked for or fit", t.Peer, a.got+len(list), most)
	case cached > len(a.req.Prompt):
		return broke("node %s: %d tokens of a prompt of %d were not computed again", t.Peer, cached, len(a.req.Prompt))
	}
	if rows := len(list); a.client.cfg.Served != nil && rows > 0 {
		if a.got == 0 {
			rows += len(a.req.Prompt) - 1
		}
		a.client.cfg.Served(t.Peer, rows)
	}
	a.tokens, a.got, a.cached = append(a.tokens, list...), a.got+len(list), cached
	wake(a.notify)
	return nil
}
