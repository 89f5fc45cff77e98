package node

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"kvasird/experts"
	"kvasird/ggml"
	"kvasird/ggml/gguf"
	"kvasird/ggml/tiny"
	"kvasird/p2p"
)

// BenchOptions says what Bench measures.
type BenchOptions struct {
	Only    string // comma-separated names of measurements; "" = all
	Dir     string // where the large model is made and kept
	Rounds  int    // interleaved rounds of each pair
	Threads int    // of each process

	Server string // path of llama.cpp's server, for the measurement against it

	Resident string // set in the child of the memory measurement
}

// BenchFlags adds the options to a command's flags.
func BenchFlags(set *flag.FlagSet) *BenchOptions {
	o := &BenchOptions{}
	var names []string
	for _, m := range measurements {
		names = append(names, m.name)
	}
	set.StringVar(&o.Only, "only", "", "comma-separated `names` of "+strings.Join(names, ", ")+" (default: all but hot, rtt and server, which take long)")
	set.StringVar(&o.Dir, "dir", filepath.Join(os.TempDir(), "kvasir-bench"), "`folder` for the 730 MB model, which is made once and kept")
	set.IntVar(&o.Rounds, "rounds", 5, "interleaved `rounds` of each pair of runs; medians are given")
	set.IntVar(&o.Threads, "threads", 1, "compute `threads` of each process")
	set.StringVar(&o.Server, "server", "", "`path` of the llama-server that server compares with")
	set.StringVar(&o.Resident, "resident", "", "print what a backbone of this `file` holds, for the memory measurement")
	return o
}

// bench is one run of Bench.
type bench struct {
	BenchOptions
	ctx context.Context
	out io.Writer
	rt  *ggml.Runtime
	dir string // temporary
}

var measurements = []struct {
	name string
	run  func(*bench) error
	long bool // ten minutes or so: only when it is named
}{
	{"dispatch", (*bench).dispatch, false}, {"tokens", (*bench).tokens, false},
	{"kernel", (*bench).kernel, false}, {"memory", (*bench).memory, false}, {"plan", (*bench).planned, false},
	{"hot", (*bench).hot, true}, {"rtt", (*bench).rtts, true}, {"server", (*bench).servers, true},
}

// Bench measures and prints a table for each measurement. Ratios are of runs
// that alternate in this one process, since absolute times depend on the machine.
func Bench(ctx context.Context, opts *BenchOptions, out io.Writer) error {
	rt, err := ggml.Open(ggml.Config{})
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "kvasir-bench-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	b := &bench{BenchOptions: *opts, ctx: ctx, out: out, rt: rt, dir: dir}
	if opts.Resident != "" {
		return b.resident(opts.Resident)
	}
	var wanted []string
	if opts.Only != "" {
		wanted = strings.Split(opts.Only, ",")
	}
	for _, m := range measurements {
		if !slices.Contains(wanted, m.name) && (len(wanted) > 0 || m.long) {
			continue
		}
		if err := m.run(b); err != nil {
			return fmt.Errorf("bench %s: %w", m.name, err)
		}
	}
	return ctx.Err()
}

// tinyModel and realModel are the files that are measured.
func (b *bench) tinyModel() (string, error) { return tiny.Write(b.dir) }

func (b *bench) realModel() (string, error) {
	return b.generated("real-shapes-q4_k.gguf", "730 MB", ggml.PresetRealShapes)
}

// generated is a model that is made the first time and kept in b.Dir.
func (b *bench) generated(name, size string, cfg ggml.GenerateConfig) (string, error) {
	path := filepath.Join(b.Dir, name)
	if _, err := os.Stat(path); !errors.Is(err, fs.ErrNotExist) {
		return path, err
	}
	if err := os.MkdirAll(b.Dir, 0o755); err != nil {
		return "", err
	}
	fmt.Fprintf(b.out, "making %s (%s, once)\n", path, size)
	part := path + ".part" // an interrupted run leaves no half model
	if err := b.rt.GenerateModel(part, cfg); err != nil {
		return "", err
	}
	return path, os.Rename(part, path)
}

// remote is a worker process and this process's dispatcher to it.
type remote struct {
	worker *child
	host   *p2p.Host
	*experts.Dispatcher
}

// openRemote starts a worker for the whole of a model and waits for its session.
func (b *bench) openRemote(path string) (*remote, error) {
	m, err := gguf.OpenModel(path)
	if err != nil {
		return nil, err
	}
	defer m.Close()
	id, err := m.ID(b.ctx)
	if err != nil {
		return nil, err
	}
	r := &remote{}
	r.worker, err = startChild(b.dir, fmt.Sprintf("worker-%d", rand.Uint32()), "--role", "worker", "--model", path,
		"--threads", fmt.Sprint(b.Threads), "--listen", "/ip4/127.0.0.1/tcp/0", "--http", Off)
	if err != nil {
		return nil, err
	}
	limit, cancel := context.WithTimeout(b.ctx, time.Minute)
	defer cancel()
	if err := r.connect(limit, b.rt, id); err != nil {
		r.Close()
		return nil, err
	}
	return r, nil
}

func (r *remote) connect(ctx context.Context, rt *ggml.Runtime, id gguf.ModelID) error {
	st, err := r.worker.await(ctx, serving)
	if err != nil {
		return err
	}
	identity, err := p2p.NewIdentity()
	if err != nil {
		return err
	}
	r.host, err = p2p.New(p2p.Config{
		Identity: identity, Network: "kvasir", Pack: Pack(rt), Agent: "kvasird-bench",
		Protocols: []string{expertsProtocol}, Peers: []string{localAddr(st)},
	})
	if err != nil {
		return err
	}
	r.Dispatcher, err = experts.NewDispatcher(experts.Config{
		Model: experts.ModelID(id.String()), Dialer: laneDialer{r.host, id}, Logger: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		return err
	}
	r.host.Watch(&dispatchPart{Dispatcher: r.Dispatcher})
	if err := r.host.Start(); err != nil {
		return err
	}
	return awaitWorker(ctx, r.Dispatcher)
}

// awaitWorker waits for the session with the only worker.
func awaitWorker(ctx context.Context, d *experts.Dispatcher) error {
	for {
		if p := d.Peers(); len(p) == 1 && p[0].Connected {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("no session with the worker: %w", ctx.Err())
		case <-time.After(10 * time.Millisecond):
		}
	}
}

func (r *remote) Close() error {
	var errs []error
	if r.Dispatcher != nil {
		errs = append(errs, r.Dispatcher.Close())
	}
	if r.host != nil {
		errs = append(errs, r.host.Close())
	}
	return errors.Join(append(errs, r.worker.stop())...)
}

func (r *remote) compute(ctx context.Context, call *ggml.ExpertCall) error {
	return r.Compute(ctx, (*experts.Call)(call))
}

// decoder decodes one token of each of some sequences at a time.
type decoder struct {
	model *ggml.Model
	ctx   *ggml.Context
	batch *ggml.Batch
	seqs  int
	pos   int
	rng   *rand.Rand
}

const benchPositions = 96 // of a sequence, before it begins anew

func newDecoder(m *ggml.Model, seqs, threads int) (*decoder, error) {
	c, err := m.NewContext(ggml.ContextConfig{Tokens: seqs * (benchPositions + 32), Batch: max(seqs, 8), Sequences: seqs, Threads: threads})
	if err != nil {
		return nil, err
	}
	return &decoder{model: m, ctx: c, batch: ggml.NewBatch(seqs), seqs: seqs, rng: rand.New(rand.NewPCG(3, 4))}, nil
}

// steps decodes n steps and gives tokens per second.
func (d *decoder) steps(ctx context.Context, n int) (float64, error) {
	start := time.Now()
	for range n {
		if d.pos == benchPositions {
			d.ctx.SeqRemove(-1, -1, -1)
			d.pos = 0
		}
		d.batch.Reset()
		for s := range d.seqs {
			d.batch.Add(ggml.Token(d.rng.IntN(d.model.VocabSize())), d.pos, s, true)
		}
		d.pos++
		if err := d.ctx.Decode(ctx, d.batch); err != nil {
			return 0, err
		}
	}
	return float64(n*d.seqs) / time.Since(start).Seconds(), nil
}

func median[T int64 | float64 | time.Duration](list []T) T { return quantile(list, 0.5) }

func quantile[T int64 | float64 | time.Duration](list []T, q float64) T {
	s := slices.Sorted(slices.Values(list))
	return s[min(len(s)-1, int(q*float64(len(s))))]
}
