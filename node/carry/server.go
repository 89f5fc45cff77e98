package carry

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"kvasird/ggml/gguf"
	"kvasird/node/gateway"
	"kvasird/p2p"
)

const (
	// wordEvery is how often each side lets the other know that it is there, silence how long the
	// other waits for that.
	wordEvery = 3 * time.Second
	silence   = 10 * time.Second
	// askTime is how long a client may take to ask, writeTime how long the other side may take to
	// let a frame through, stallTime how long a client may read nothing that is ready.
	askTime   = 10 * time.Second
	writeTime = 10 * time.Second
	stallTime = time.Minute
	// busyPause is when to come again to a server that has too many requests.
	busyPause = time.Second

	defaultPeer = 64
	defaultAll  = 256
)

// Conn is a stream between two nodes. Close ends both directions and may be called at any time.
type Conn interface {
	io.ReadWriteCloser
	SetReadDeadline(t time.Time) error
	SetWriteDeadline(t time.Time) error
}

// Tokens is a running generation, read by one goroutine. Next waits for the next token, the end
// token included; io.EOF ends a complete answer, and Finish then says why, "stop" or "length". When
// ctx ends first, its error is returned and Next may be called again.
type Tokens interface {
	Next(ctx context.Context) (int32, error)
	Cached() int // tokens of the prompt that were not computed again
	Finish() string
	gateway.ProbStream
}

// Answerer is what a server answers from. The end of ctx ends a request and frees what it holds.
// Errors have the methods that gateway.Engine names.
type Answerer interface {
	Context() int // tokens of one request, prompt and answer together
	Start(ctx context.Context, req gateway.Request, extra gateway.Extra) (Tokens, error)
}

// ServerConfig is what a server needs.
type ServerConfig struct {
	// Find returns what answers for a model here, or why nothing does.
	Find func(model gguf.ModelID) (Answerer, error)
	// Admit says why a peer may not infer here.
	Admit           func(peer string) error
	MaxPeer, MaxAll int // requests at once, of one peer and in all; 0: 64 and 256
	Logger          *slog.Logger
}

// Server answers requests of other nodes.
type Server struct {
	cfg     ServerConfig
	end     chan struct{} // closed: no request goes on
	running sync.WaitGroup

	mu      sync.Mutex // guards what follows
	closing bool
	all     int
	peers   map[string]int // of all, by peer
	stats   Stats
}

// Stats counts since the server was made.
type Stats struct {
	Running  int             // requests now
	Answered uint64          // completely
	Gone     uint64          // whose client left
	Refused  map[Code]uint64 // instead of an answer, or in its course
}

// NewServer returns a server that waits for Serve.
func NewServer(cfg ServerConfig) *Server {
	if cfg.MaxPeer == 0 {
		cfg.MaxPeer = defaultPeer
	}
	if cfg.MaxAll == 0 {
		cfg.MaxAll = defaultAll
	}
	return &Server{cfg: cfg, end: make(chan struct{}), peers: map[string]int{}, stats: Stats{Refused: map[Code]uint64{}}}
}

// Stats returns a copy.
func (s *Server) Stats() Stats {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := s.stats
	out.Running, out.Refused = s.all, maps.Clone(s.stats.Refused)
	return out
}

// Close takes no new requests, waits for those that run until ctx ends, and then ends them.
func (s *Server) Close(ctx context.Context) {
	s.mu.Lock()
	first := !s.closing
	s.closing = true
	s.mu.Unlock()
	stop := context.AfterFunc(ctx, func() {
		if first {
			close(s.end)
		}
	})
	defer stop()
	s.running.Wait()
}

// enter counts a request, or refuses it.
func (s *Server) enter(peer string) error {
	if err := s.cfg.Admit(peer); err != nil {
		return refuse(CodeRights, "%v", err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	busy := func(n int, whose string) error {
		return &refusal{code: CodeBusy, retry: busyPause, text: fmt.Sprintf("%d requests %s run here, which is the most at once", n, whose)}
	}
	switch {
	case s.closing:
		return refuse(CodeNotReady, "the node is stopping")
	case s.peers[peer] >= s.cfg.MaxPeer:
		return busy(s.cfg.MaxPeer, "of this node")
	case s.all >= s.cfg.MaxAll:
		return busy(s.cfg.MaxAll, "of other nodes")
	}
	s.all++
	s.peers[peer]++
	s.running.Add(1)
	return nil
}

func (s *Server) leave(peer string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.all--
	if s.peers[peer]--; s.peers[peer] == 0 {
		delete(s.peers, peer)
	}
	s.running.Done()
}

// errGone says that the client has left.
var errGone = errors.New("the client left")

// Serve answers the request of a peer, proved to be who it is, and returns when that is over. It
// closes c. The error says how the peer broke the protocol.
func (s *Server) Serve(peer string, c Conn) error {
	var reading sync.WaitGroup
	defer reading.Wait()
	defer c.Close()
	out := p2p.NewFrameWriter(c, maxAnswer)
	err := s.enter(peer)
	if err == nil {
		defer s.leave(peer)
		err = s.answer(peer, c, out, &reading)
	}
	var gone bool
	s.count(func(st *Stats) {
		switch {
		case err == nil:
			st.Answered++
		case errors.Is(err, errGone):
			st.Gone++
			gone = true
		default:
			st.Refused[refusalOf(err).code]++
		}
	})
	if err == nil || gone {
		return nil
	}
	r := refusalOf(err)
	s.cfg.Logger.Info("request of a node refused", "peer", peer, "code", r.code.String(), "reason", r.text)
	_ = send(c, out, frameRefused, putRefusal(nil, r)) // or it left
	if r.code == CodeProtocol {
		return r
	}
	return nil
}

func (s *Server) count(f func(*Stats)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f(&s.stats)
}

// send writes a frame within writeTime.
func send(c Conn, out *p2p.FrameWriter, typ uint8, payload []byte) error {
	if err := c.SetWriteDeadline(time.Now().Add(writeTime)); err != nil {
		return err
	}
	return out.Write(p2p.Frame{Type: typ, Payload: payload})
}

// receive reads a frame within a time.
func receive(c Conn, in *p2p.FrameReader, within time.Duration) (p2p.Frame, error) {
	if err := c.SetReadDeadline(time.Now().Add(within)); err != nil {
		return p2p.Frame{}, err
	}
	f, err := in.Next()
	if err == nil && (f.Flags != 0 || f.ID != 0) {
		err = fmt.Errorf("%w: frame with flags %#x and id %d", p2p.ErrFrame, f.Flags, f.ID)
	}
	return f, err
}

// read reads a client's frame of a type. Whoever sends what is no frame breaks the protocol; whoever
// sends nothing has left.
func read(c Conn, in *p2p.FrameReader, want uint8, within time.Duration) ([]byte, error) {
	f, err := receive(c, in, within)
	switch {
	case errors.Is(err, p2p.ErrFrame) || errors.Is(err, p2p.ErrFrameTooLarge):
		return nil, refuse(CodeProtocol, "%v", err)
	case err != nil:
		return nil, errGone
	case f.Type != want:
		return nil, refuse(CodeProtocol, "frame of type %d, want %d", f.Type, want)
	}
	return f.Payload, nil
}

// answer reads the request and sends what comes of it. What it leaves in reading ends when c is
// closed.
func (s *Server) answer(peer string, c Conn, out *p2p.FrameWriter, reading *sync.WaitGroup) error {
	from, a, tokens, err := s.readRequest(c)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancelCause(context.Background())
	defer cancel(nil)
	l := &answering{c: c, out: out, extra: a.extra(), news: make(chan struct{}, 1)}
	run := l.run
	if len(a.Inputs) > 0 {
		e, ok := from.(Embedder)
		if !ok {
			return refuse(CodeNotReady, "the model makes text, no embeddings")
		}
		run = func(ctx context.Context) error { return l.embed(ctx, e, peer, a.split(tokens)) }
	} else {
		req := a.request()
		req.Prompt, req.Owner = tokens, peer // those whom it serves share its turns
		if l.tokens, err = from.Start(ctx, req, l.extra); err != nil {
			return err
		}
	}
	reading.Go(func() { cancel(l.read(p2p.NewFrameReader(c, 4))) })
	ended := make(chan struct{})
	defer close(ended)
	go func() {
		select {
		case <-s.end:
			cancel(refuse(CodeNotReady, "the node is stopping"))
		case <-ended:
		}
	}()
	if err := run(ctx); err != nil {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		return err
	}
	return nil
}

// readRequest reads what is asked for and finds who answers it.
func (s *Server) readRequest(c Conn) (from Answerer, a ask, tokens []int32, err error) {
	payload, err := read(c, p2p.NewFrameReader(c, maxAsk), frameAsk, askTime)
	if err != nil {
		return nil, a, nil, err
	}
	if a, err = decodeAsk(payload); err != nil {
		return nil, a, nil, refuse(CodeProtocol, "%v", err)
	}
	if from, err = s.cfg.Find(gguf.ModelID(a.Model)); err != nil {
		return nil, a, nil, refuse(CodeNotReady, "%v", err)
	}
	if err := a.fits(from.Context()); err != nil { // before memory is taken for it
		return nil, a, nil, err
	}
	payload, err = read(c, p2p.NewFrameReader(c, 4*a.Prompt), framePrompt, askTime)
	if err != nil {
		return nil, a, nil, err
	}
	if tokens, err = decodeTokens(payload, 0); err != nil {
		return nil, a, nil, refuse(CodeProtocol, "%v", err)
	}
	if len(tokens) != a.Prompt {
		return nil, a, nil, refuse(CodeProtocol, "prompt of %d tokens, %d were told", len(tokens), a.Prompt)
	}
	return from, a, tokens, nil
}

// fits refuses what is longer than a context. An input may fill it, a prompt leaves room for a token.
func (a *ask) fits(context int) error {
	longest := a.Prompt + 1
	if len(a.Inputs) > 0 {
		longest = slices.Max(a.Inputs)
	}
	if longest > context {
		return &refusal{code: CodeLong, prompt: min(longest, a.Prompt), limit: context}
	}
	return nil
}

// answering is an answer on its way to the client.
type answering struct {
	c      Conn
	out    *p2p.FrameWriter
	tokens Tokens
	extra  gateway.Extra
	news   chan struct{} // taken has changed; holds one
	sent   uint32        // tokens, of run alone

	mu    sync.Mutex // guards taken
	taken uint32     // tokens that the client read
}

// read takes in what the client read, until it leaves.
func (l *answering) read(in *p2p.FrameReader) error {
	for {
		payload, err := read(l.c, in, frameTaken, silence)
		if err != nil {
			return err
		}
		n, err := decodeTaken(payload)
		if err != nil {
			return refuse(CodeProtocol, "%v", err)
		}
		l.mu.Lock()
		back := n < l.taken
		l.taken = n
		l.mu.Unlock()
		if back {
			return refuse(CodeProtocol, "fewer tokens were read than before")
		}
		select {
		case l.news <- struct{}{}:
		default:
		}
	}
}

// room is how many tokens may be sent.
func (l *answering) room() (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.taken > l.sent {
		return 0, refuse(CodeProtocol, "%d tokens were read, %d were sent", l.taken, l.sent)
	}
	return Window - int(l.sent-l.taken), nil
}

// run sends tokens until the answer is complete.
func (l *answering) run(ctx context.Context) error {
	if err := l.send(frameBegun, nil); err != nil {
		return err
	}
	for moved := time.Now(); ; {
		room, err := l.room()
		switch {
		case err != nil:
		case room > 0:
			moved = time.Now()
			err = l.next(ctx)
		case time.Since(moved) > stallTime:
			err = refuse(CodeFailed, "nothing was read for %v", stallTime)
		default:
			err = l.await(ctx)
		}
		if errors.Is(err, io.EOF) {
			return l.send(frameEnd, putEnd(l.tokens.Finish()))
		}
		if err != nil {
			return err
		}
	}
}

// next sends a token, or that there is none yet.
func (l *answering) next(ctx context.Context) error {
	limit, cancel := context.WithTimeout(ctx, wordEvery)
	defer cancel()
	t, err := l.tokens.Next(limit)
	switch {
	case err == nil:
		l.sent++
		return l.tell(t)
	case ctx.Err() == nil && limit.Err() != nil && !errors.Is(err, io.EOF):
		return l.send(frameWait, nil)
	}
	return err
}

// tell sends a token.
func (l *answering) tell(t int32) error {
	cached := min(l.tokens.Cached(), MaxPrompt)
	if !l.extra.Logprobs {
		return l.send(frameTokens, putAnswer(nil, cached, t))
	}
	chosen, top := l.tokens.Prob()
	return l.send(frameLikely, putLikely(nil, &likely{cached, chosen, top}))
}

// await waits for the client to read.
func (l *answering) await(ctx context.Context) error {
	select {
	case <-l.news:
		return nil
	case <-time.After(wordEvery):
		return l.send(frameWait, nil)
	case <-ctx.Done():
		return ctx.Err()
	}
}

// send writes a frame; when that fails the client has left.
func (l *answering) send(typ uint8, payload []byte) error {
	if send(l.c, l.out, typ, payload) != nil {
		return errGone
	}
	return nil
}
