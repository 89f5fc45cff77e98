package experts

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// Kernel computes experts. Its user makes one call at a time.
type Kernel interface {
	// SetProgram checks an encoded program against the weights of a layer and returns a number
	// for it and the elements of its input and output rows. The error names what does not fit.
	// The program's bytes are only valid during the call.
	SetProgram(layer int, program []byte) (prog int, rowWidth, outWidth int, err error)
	// Compute sets out[i] = f_expert[i](rows[row[i]]) for every i. Expert ids are global. The
	// slices are only valid during the call.
	Compute(prog int, rows []float32, row, expert []int32, out []float32) error
	// Forget ends the use of a program that SetProgram returned: the kernel may drop what it
	// keeps for it and give its number to another. Until then it stays set, while slices of its
	// layer come and go.
	Forget(prog int)
}

// WorkerConfig configures a Worker. Zero fields but the first two have the default stated.
type WorkerConfig struct {
	Model  ModelID
	Kernel Kernel
	Slices []Slice // what Kernel holds, without overlaps; none yet is possible

	// Admit says whether a peer, by the text of its connection's RemoteAddr, may have experts
	// computed here; an error is told to it as the reason. It is called with locks held: it does
	// not wait, and does not call the Worker. nil: everyone may.
	Admit func(peer string) error

	// Allow says why pairs of a peer are not computed now, right before they would be: the peer is
	// told that with CodeUnpaid, and may call again. It does not wait. nil: all are.
	Allow func(peer string, layer, pairs int) error

	// Computed is told of the pairs of a peer that were computed and whose answer is about to go, one
	// call or several at a time. It does not wait. nil: nobody is told.
	Computed func(peer string, layer, pairs int)

	MaxRows      int // rows per call: 4096
	MaxPairs     int // pairs per call: 4096
	SessionQueue int // calls of one session that are not answered yet: 64
	Queue        int // calls of all sessions that wait: 256
	QueueBytes   int // bytes of these and of their replies: 256 MiB
	BatchPairs   int // pairs computed together: 4096
	MaxSessions  int // 256
	PeerSessions int // of these, of one peer, which needs one: 8

	Handshake time.Duration // for OFFER and WANT: 10 s
	Idle      time.Duration // a session silent for so long is closed: 15 s
	Drain     time.Duration // Close waits for sessions to end by themselves, SetSlices for them to know: 2 s

	Logger *slog.Logger // nil: none
}

func (c *WorkerConfig) validate() error {
	if !hostIsLittleEndian {
		return errBigEndian
	}
	if c.Kernel == nil {
		return errors.New("experts: worker without a kernel")
	}
	defaults(&c.MaxRows, 4096)
	defaults(&c.MaxPairs, 4096)
	defaults(&c.SessionQueue, 64)
	defaults(&c.Queue, 256)
	defaults(&c.QueueBytes, 256<<20)
	defaults(&c.BatchPairs, 4096)
	defaults(&c.MaxSessions, 256)
	defaults(&c.PeerSessions, 8)
	defaults(&c.Handshake, 10*time.Second)
	defaults(&c.Idle, 15*time.Second)
	defaults(&c.Drain, 2*time.Second)
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	o := c.offered(serving)
	if err := o.validate(); err != nil {
		return fmt.Errorf("experts: worker: %w", err)
	}
	return nil
}

func defaults[T int | time.Duration](field *T, value T) {
	if *field == 0 {
		*field = value
	}
}

func (c *WorkerConfig) offered(state workerState) offer {
	return offer{
		Version: wireVersion, Model: c.Model, Slices: c.Slices, MaxRows: c.MaxRows,
		MaxPairs: c.MaxPairs, Queue: c.SessionQueue, Precisions: precisions, State: state,
	}
}

// offer is the encoded offer.
func (c *WorkerConfig) offer(state workerState) []byte {
	return encodeControl(c.offered(state))
}

// Worker serves the experts of its Kernel to any number of sessions.
type Worker struct {
	cfg   WorkerConfig // Slices is guarded by mu
	rows  [countedLayers]atomic.Uint64
	count struct{ calls, batches, busy, expired, refused atomic.Uint64 }

	change sync.Mutex             // held while slices change; guards epoch; taken before the others
	epoch  uint64                 // of served
	gate   sync.RWMutex           // read by a call from its check until it is queued or computed
	served atomic.Pointer[served] // what is computed: more than is offered while a slice goes

	began    atomic.Int64              // when the kernel was last given something, unix ns; 0: it has answered
	perPair  atomic.Uint32             // float32 bits, ns: what the kernel takes for a pair
	kernel   sync.Mutex                // guards cfg.Kernel, programs, scratch
	programs map[string]*workerProgram // that a session uses, by programKey
	scratch  batchScratch

	mu       sync.Mutex // guards the rest
	hello    []byte     // encoded offer
	version  uint64     // of hello
	state    workerState
	sessions map[*workerSession]struct{}
	queue    []*job // oldest first
	bytes    int    // of queue, with replies
	closing  bool

	waiting atomic.Int32  // len(queue)
	kick    chan struct{} // queue is not empty, or done is closed; capacity 1
	done    chan struct{}
	serving sync.WaitGroup // calls of Serve
	loops   sync.WaitGroup // combiner and janitor
}

// NewWorker returns a worker that serves until Close.
func NewWorker(cfg WorkerConfig) (*Worker, error) {
	cfg.Slices = slices.Clone(cfg.Slices)
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	w := &Worker{
		cfg: cfg, hello: cfg.offer(serving),
		programs: map[string]*workerProgram{},
		sessions: map[*workerSession]struct{}{},
		kick:     make(chan struct{}, 1), done: make(chan struct{}),
	}
	w.served.Store(newServed(0, cfg.Slices))
	w.loops.Go(w.combine)
	w.loops.Go(w.watch)
	return w, nil
}

// Serve runs one session over conn, which it closes, until the dispatcher leaves, ctx ends or
// the worker is closed (nil), or something is wrong (the error says what).
func (w *Worker) Serve(ctx context.Context, conn net.Conn) error {
	s := &workerSession{link: newLink(conn), w: w, peer: fmt.Sprint(conn.RemoteAddr())}
	if refused := w.enter(s); refused != nil {
		s.conn.SetWriteDeadline(time.Now().Add(time.Second))
		if e := (*RemoteError)(nil); errors.As(refused, &e) {
			w.count.refused.Add(1)
			s.write(frameError, 0, putError(nil, e.Code, e.Text))
		}
		conn.Close()
		return refused
	}
	defer w.serving.Done()
	defer w.leave(s)
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	defer stop()
	err := s.run()
	if quiet(err) || ctx.Err() != nil || w.isClosing() {
		return nil
	}
	return err
}

func (w *Worker) enter(s *workerSession) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.closing {
		return ErrClosed
	}
	if w.cfg.Admit != nil {
		if err := w.cfg.Admit(s.peer); err != nil {
			return &RemoteError{CodeRights, err.Error()}
		}
	}
	if len(w.sessions) >= w.cfg.MaxSessions {
		return &RemoteError{CodeLimit, fmt.Sprintf("%d sessions are open already; raise the limit to serve more", w.cfg.MaxSessions)}
	}
	same := 0
	for o := range w.sessions {
		if o.peer == s.peer {
			same++
		}
	}
	if same >= w.cfg.PeerSessions {
		return &RemoteError{CodeLimit, fmt.Sprintf("%d sessions of this peer are open already, which is the most of one", same)}
	}
	w.sessions[s] = struct{}{}
	w.serving.Add(1)
	return nil
}

// leave ends a session. It counts until its programs are released, which waits for what is
// being computed.
func (w *Worker) leave(s *workerSession) {
	s.stopWriter()
	w.mu.Lock()
	w.refuseLocked(func(j *job) bool { return j.session == s }, nil)
	w.mu.Unlock()
	w.release(s)
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.sessions, s)
}

func (w *Worker) isClosing() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.closing
}

// watch closes sessions that were silent for the idle time.
func (w *Worker) watch() {
	const checks = 3 // per idle time
	tick := time.NewTicker(max(w.cfg.Idle/checks, time.Millisecond))
	defer tick.Stop()
	for {
		select {
		case <-w.done:
			return
		case <-tick.C:
		}
		w.mu.Lock()
		for s := range w.sessions {
			if s.heard.Swap(false) {
				s.silent = 0
			} else if s.silent++; s.silent > checks {
				s.conn.Close()
			}
		}
		w.mu.Unlock()
	}
}

// Close tells the dispatchers to go elsewhere, answers what they have sent, waits for them to
// leave, at most as long as the configuration says, and ends what is left.
func (w *Worker) Close() error {
	w.mu.Lock()
	if !w.closing {
		w.closing = true
		for s := range w.sessions {
			s.post(outFrame{typ: frameGoAway})
		}
		go w.end()
	}
	w.mu.Unlock()
	w.loops.Wait()
	return nil
}

func (w *Worker) end() {
	left := make(chan struct{})
	go func() {
		w.serving.Wait()
		close(left)
	}()
	select {
	case <-left:
	case <-time.After(w.cfg.Drain):
		w.mu.Lock()
		for s := range w.sessions {
			s.conn.Close()
		}
		w.mu.Unlock()
		<-left
	}
	close(w.done)
	w.wake()
}

// LayerRows is the number of rows (pairs) computed in a layer.
type LayerRows struct {
	Layer int
	Rows  uint64
}

// WorkerStats counts since the worker was made.
type WorkerStats struct {
	Sessions int           // open now
	Leaving  bool          // Drain was called
	Waiting  int           // calls in the queue now
	Calls    uint64        // answered with rows
	Batches  uint64        // kernel calls for them
	Busy     uint64        // refused because a queue was full
	Expired  uint64        // too late when their turn came
	Refused  uint64        // refused for any other reason
	Kernel   time.Duration // for how long it has been at what it computes now; 0: at nothing
	Rows     []LayerRows   // of the first 512 layers those with at least one row, ascending
}

// Stats returns the counters of the worker.
func (w *Worker) Stats() WorkerStats {
	w.mu.Lock()
	s := WorkerStats{Sessions: len(w.sessions), Waiting: len(w.queue), Leaving: w.state == leaving}
	w.mu.Unlock()
	s.Calls, s.Batches = w.count.calls.Load(), w.count.batches.Load()
	s.Busy, s.Expired, s.Refused = w.count.busy.Load(), w.count.expired.Load(), w.count.refused.Load()
	if began := w.began.Load(); began != 0 {
		s.Kernel = time.Since(time.Unix(0, began))
	}
	for i := range w.rows {
		if n := w.rows[i].Load(); n > 0 {
			s.Rows = append(s.Rows, LayerRows{i, n})
		}
	}
	return s
}
