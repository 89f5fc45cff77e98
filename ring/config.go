package ring

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"time"
	"unicode/utf8"

	"kvasird/ggml/gguf"
)

// Dialer opens a connection to a peer that speaks ring/1, before ctx ends. A peer that is this
// process may be answered with one end of a net.Pipe whose other end a stage serves. It is safe
// for concurrent use.
type Dialer interface {
	Dial(ctx context.Context, peerID string) (net.Conn, error)
}

// Timing is what both sides set alike. Zero fields have the default stated.
type Timing struct {
	DeadAfter   time.Duration // a neighbour silent for so long is lost; a fifth of it between heartbeats: 5 s
	DialTimeout time.Duration // to connect and greet: 5 s
	IdleLink    time.Duration // a link without sessions is closed: 1 min
}

func (t *Timing) fill() {
	setDefault(&t.DeadAfter, 5*time.Second)
	setDefault(&t.DialTimeout, 5*time.Second)
	setDefault(&t.IdleLink, time.Minute)
}

func (t *Timing) beat() time.Duration { return max(t.DeadAfter/beatsPerDeath, time.Millisecond) }

// beatsPerDeath is the heartbeats that a silent peer misses before it counts as lost.
const beatsPerDeath = 5

func setDefault[T int | int64 | time.Duration](field *T, value T) {
	if *field == 0 {
		*field = value
	}
}

// StageConfig configures a Stage. The first block has no defaults.
type StageConfig struct {
	Peer    string     // this node's id, as chains name it
	Model   string     // model id
	Layers  gguf.Range // the window; it is the first stage if it begins at 0
	Total   int        // layers of the model; it is the last stage if Layers ends there
	Width   int        // elements of a hidden row
	Compute Compute    // the stage's until Close returned
	Dialer  Dialer     // to other stages

	Pack        string // runtime pack: stages of another one are refused
	CanTruncate bool   // Compute can drop a part of a sequence: without it there are no drafts

	Sequences   int   // sessions at once, the sequences of Compute: 4
	Context     int   // tokens of one session, prompt and answer: 8192
	Batch       int   // rows of one Decode: 512
	Chunk       int   // rows of prompts in one Decode while answers run: a quarter of Batch, at least 17
	MemoryBytes int64 // for the rows that are kept and that wait: 1 GiB
	MaxLinks    int   // incoming: 256

	Precision Precision // of the rows that this stage sends: F32

	Grace       time.Duration // a session whose predecessor is gone is kept: 15 s
	StepTimeout time.Duration // a Decode that takes longer is ended and has failed: 2 min
	SessionIdle time.Duration // a session of which nothing is heard for so long is freed: 10 min
	Timing

	// Admit says whether a peer, by the text of its connection's RemoteAddr, may use this stage;
	// the error is told to it as the reason. It does not wait. nil: everyone may.
	Admit func(peer string) error
	// Allow says why rows of an entry are not computed now, right before they would be: the entry is
	// told that with CodeUnpaid. It is called with locks held: it does not wait. nil: all are.
	Allow func(entry string, rows int) error
	// Computed is told of the rows that were computed for an entry, drafts and repetitions
	// included. It is called with locks held: it does not wait. nil: nobody is told.
	Computed func(entry string, rows int)
	Logger   *slog.Logger // nil: none
}

func (c *StageConfig) validate() error {
	setDefault(&c.Sequences, 4)
	setDefault(&c.Context, 8192)
	setDefault(&c.Batch, 512)
	setDefault(&c.Chunk, max(c.Batch/4, MaxDraft+1))
	setDefault(&c.MemoryBytes, 1<<30)
	setDefault(&c.MaxLinks, 256)
	setDefault(&c.Grace, 15*time.Second)
	setDefault(&c.StepTimeout, 2*time.Minute)
	setDefault(&c.SessionIdle, 10*time.Minute)
	c.Timing.fill()
	if c.Precision == 0 {
		c.Precision = F32
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	switch {
	case !hostIsLittleEndian:
		return errBigEndian
	case c.Compute == nil || c.Dialer == nil:
		return errors.New("ring: a stage needs a Compute and a Dialer")
	case c.Peer == "" || len(c.Peer) > maxPeerID || !utf8.ValidString(c.Peer):
		return fmt.Errorf("ring: peer id %.32q: want 1 to %d bytes of text", c.Peer, maxPeerID)
	case c.Total < 1 || c.Total > maxLayers || c.Layers.Len() < 1 || c.Layers.Begin < 0 || c.Layers.End > c.Total:
		return fmt.Errorf("ring: a stage of layers %v of %d", c.Layers, c.Total)
	case c.Width < 1 || c.Width > MaxWidth:
		return fmt.Errorf("ring: rows of %d elements, want 1 to %d", c.Width, MaxWidth)
	case c.Sequences < 1 || c.Context < 2 || c.Context > maxContext || c.Chunk <= MaxDraft || c.Batch-c.Chunk <= MaxDraft:
		return fmt.Errorf("ring: %d sequences, context %d, batch %d, chunk %d: all must be positive, the chunk above %d, and the batch above the chunk by as much",
			c.Sequences, c.Context, c.Batch, c.Chunk, MaxDraft)
	case c.Precision != F32 && c.Precision != F16:
		return fmt.Errorf("ring: precision %d", c.Precision)
	}
	return checkNames(c.Model, c.Pack)
}

// EntryConfig configures an Entry. The first block has no defaults.
type EntryConfig struct {
	Model  string
	Total  int // layers of the model
	Dialer Dialer

	Pack string // runtime pack: stages of another one are refused

	OpenTimeout time.Duration // for a ring to close, each time: 15 s
	Repairs     int           // tries in a row that bring no token before a session fails: 8
	Timing

	// Served is told which rows of a session went through its chain as it was when the tokens
	// after them came, each once. It is called with locks held: it does not wait, and does not
	// keep the chain. nil: nobody is told.
	Served func(chain Chain, rows int)

	Logger *slog.Logger // nil: none
}

func (c *EntryConfig) validate() error {
	setDefault(&c.OpenTimeout, 15*time.Second)
	setDefault(&c.Repairs, 8)
	c.Timing.fill()
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	if c.Dialer == nil {
		return errors.New("ring: entry without a dialer")
	}
	if c.Total < 1 || c.Total > maxLayers {
		return fmt.Errorf("ring: a model of %d layers", c.Total)
	}
	return checkNames(c.Model, c.Pack)
}

const (
	maxModelID = 128
	maxPack    = 256
)

func checkNames(model, pack string) error {
	if model == "" || len(model) > maxModelID || !utf8.ValidString(model) {
		return fmt.Errorf("ring: model id %.32q: want 1 to %d bytes of text", model, maxModelID)
	}
	if len(pack) > maxPack || !utf8.ValidString(pack) {
		return fmt.Errorf("ring: runtime pack %.32q: want at most %d bytes of text", pack, maxPack)
	}
	return nil
}
