package node

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"kvasird/ggml"
	"kvasird/ggml/tiny"
)

// BenchOptions says what Bench measures.
type BenchOptions struct {
	Only    string // comma-separated names of measurements; "" = all
	Dir     string // where the large model is made and kept
	Rounds  int    // interleaved rounds of each pair
	Threads int    // of each process

	Server string // path of llama.cpp's server, for the measurements against it
	RPC    string // path of llama.cpp's RPC server, likewise

	Resident string // set in the child of the memory measurement
	Start    string // likewise, of the start-up measurement
}

// BenchFlags adds the options to a command's flags.
func BenchFlags(set *flag.FlagSet) *BenchOptions {
	o := &BenchOptions{}
	var names []string
	for _, m := range measurements {
		names = append(names, m.name)
	}
	set.StringVar(&o.Only, "only", "", "comma-separated `names` of "+strings.Join(names, ", ")+" (default: all but hot, rtt, server, peers, downloads, startup and lanes, which take long)")
	set.StringVar(&o.Dir, "dir", filepath.Join(os.TempDir(), "kvasir-bench"), "`folder` for the 730 MB model, which is made once and kept")
	set.IntVar(&o.Rounds, "rounds", 5, "interleaved `rounds` of each pair of runs; medians are given")
	set.IntVar(&o.Threads, "threads", 1, "compute `threads` of each process")
	set.StringVar(&o.Server, "server", "", "`path` of the llama-server that server and peers compare with")
	set.StringVar(&o.RPC, "rpc", "", "`path` of the ggml-rpc-server that peers compares with")
	set.StringVar(&o.Resident, "resident", "", "print what a backbone of this `file` holds, for the memory measurement")
	set.StringVar(&o.Start, "start", "", "print what loading a `part:file` takes, for the start-up measurement")
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
	{"wire", (*bench).wires, false},
	{"hot", (*bench).hot, true}, {"rtt", (*bench).rtts, true}, {"server", (*bench).servers, true},
	{"peers", (*bench).peers, true}, {"downloads", (*bench).downloads, true}, {"startup", (*bench).startup, true},
	{"lanes", (*bench).lanes, true},
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
	if opts.Start != "" {
		return b.start(opts.Start)
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
