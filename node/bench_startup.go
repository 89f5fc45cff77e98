package node

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"time"

	"kvasird/ggml"
	"kvasird/ggml/gguf"
	"kvasird/ggml/store"
)

// What the start-up measurement loads, each in a child of its own.
const (
	startBackbone = "backbone"
	startStage    = "stage"
	startWorker   = "worker"
)

// Of the model whose stage and experts are loaded.
var (
	startWindow = gguf.Range{Begin: 4, End: 8}
	startSlice  = gguf.Slice{Layers: gguf.Range{End: 8}, Experts: gguf.Range{Begin: 8, End: 16}}
)

// startup measures how long a process takes until it computes with what it has on disk:
// a backbone of a large model, a stage of a ring, experts of a worker. The same bytes
// are read as they are, likewise from the disk and from the page cache.
func (b *bench) startup() error {
	large, err := b.generated("large-shapes-q5_k.gguf", "4 GB of disk", ggml.PresetLargeShapes)
	if err != nil {
		return err
	}
	deep, err := b.deepRealModel()
	if err != nil {
		return err
	}
	fmt.Fprintf(b.out, "\n### Start-up, %d thread\n\n", b.Threads)
	t := newTable(b.out, "what", "bytes from", "MB", "ready s", "wanted", "", "loaded MB/s", "read as is MB/s", "of it", "wanted", "", "peak memory / bytes", "wanted", "", "written to disk")
	for _, part := range []struct {
		kind, path, name string
		seconds, memory  float64 // wanted at most
	}{
		{startBackbone, large, "backbone of a model of 84 GB", 12, 1.2},
		{startStage, deep, "half of 8 layers as a stage", 0, 0},
		{startWorker, deep, "half of the experts of 8 layers", 0, 0},
	} {
		for _, cold := range []bool{true, false} {
			row, err := b.startPart(part.kind, part.path, cold, part.seconds, part.memory)
			if err != nil {
				return fmt.Errorf("%s: %w", part.name, err)
			}
			t.row(append([]string{part.name}, row...)...)
		}
	}
	return t.Flush()
}

// startPart measures one start, and the read beside it.
func (b *bench) startPart(kind, path string, cold bool, seconds, memory float64) (row []string, err error) {
	spans, err := startSpans(kind, path)
	if err != nil {
		return nil, err
	}
	from := "page cache"
	if cold {
		from = "disk"
	}
	read, bytes, err := readSpans(path, spans, cold)
	if err != nil {
		return nil, err
	}
	if cold {
		if err := forgetPages(path); err != nil {
			return nil, err
		}
	}
	r, err := b.startChild(kind, path)
	if err != nil {
		return nil, err
	}
	rate := func(d time.Duration) float64 { return mb(bytes) / d.Seconds() }
	row = []string{from, fmt.Sprintf("%.0f", mb(bytes)), fmt.Sprintf("%.1f", r.ready.Seconds())}
	row = append(row, wantedAtMost(r.ready.Seconds(), seconds)...)
	row = append(row, fmt.Sprintf("%.0f", rate(r.load)), fmt.Sprintf("%.0f", rate(read)), fmt.Sprintf("%.2f", read.Seconds()/r.load.Seconds()))
	if kind == startWorker && cold {
		row = append(row, atLeast(read.Seconds()/r.load.Seconds(), 0.8)...)
	} else {
		row = append(row, notWanted...)
	}
	row = append(row, fmt.Sprintf("%.2f", float64(r.peak)/float64(bytes)))
	row = append(row, wantedAtMost(float64(r.peak)/float64(bytes), memory)...)
	return append(row, fmt.Sprint(r.written)), nil
}

func wantedAtMost(got, want float64) []string {
	if want == 0 {
		return notWanted
	}
	return atMost(got, want)
}

// startSpans is what of a file is loaded.
func startSpans(kind, path string) (spans []store.Span, err error) {
	g, err := gguf.OpenModel(path)
	if err != nil {
		return nil, err
	}
	defer g.Close()
	switch kind {
	case startBackbone:
		return store.DenseSpans(g)[0], nil
	case startStage:
		list, err := g.WindowReads(startWindow, true)
		for _, t := range list {
			spans = append(spans, store.Span{Off: t.Offset, Len: t.Bytes})
		}
		return spans, err
	}
	list, err := g.SliceTensors(startSlice)
	for _, t := range list {
		spans = append(spans, store.Span{Off: t.Offset, Len: t.Bytes})
	}
	return spans, err
}

// readSpans reads parts of a file, without what the page cache has of it when cold.
func readSpans(path string, spans []store.Span, cold bool) (took time.Duration, bytes int64, err error) {
	if cold {
		if err := forgetPages(path); err != nil {
			return 0, 0, err
		}
	}
	f, err := os.Open(path)
	if err != nil {
		return 0, 0, err
	}
	defer f.Close()
	buf := make([]byte, 1<<20)
	start := time.Now()
	for _, s := range spans {
		n, err := io.CopyBuffer(onlyWriter{io.Discard}, onlyReader{io.NewSectionReader(f, s.Off, s.Len)}, buf)
		if err != nil {
			return 0, 0, err
		}
		bytes += n
	}
	return time.Since(start), bytes, nil
}

// onlyReader and onlyWriter have a copy go through its buffer.
type (
	onlyReader struct{ io.Reader }
	onlyWriter struct{ io.Writer }
)

// started is what a child says of its start.
type started struct {
	ready   time.Duration // since it was begun
	load    time.Duration // of that, without what any process has
	peak    int64         // bytes of memory, of the whole process
	written int64         // bytes to disk
}

// startChild has a child load a part, and compute with it once.
func (b *bench) startChild(kind, path string) (r started, err error) {
	self, err := os.Executable()
	if err != nil {
		return r, err
	}
	child := exec.CommandContext(b.ctx, self, "bench", "--start", kind+":"+path, "--threads", fmt.Sprint(b.Threads))
	child.Stderr = os.Stderr
	out, err := child.StdoutPipe()
	if err != nil {
		return r, err
	}
	begin := time.Now()
	if err := child.Start(); err != nil {
		return r, err
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	r.ready = time.Since(begin)
	if err := errors.Join(err, child.Wait()); err != nil {
		return r, fmt.Errorf("the child that loads it: %w", err)
	}
	if _, err := fmt.Sscan(line, &r.load, &r.peak, &r.written); err != nil {
		return r, fmt.Errorf("the child that loads it said %q: %w", line, err)
	}
	return r, nil
}

// start is the child: it says what it took, once it has computed something.
func (b *bench) start(what string) error {
	kind, path, _ := strings.Cut(what, ":")
	load := map[string]func(string) (time.Duration, error){
		startBackbone: b.loadBackbone, startStage: b.loadStage, startWorker: b.loadWorker,
	}[kind]
	if load == nil {
		return fmt.Errorf("nothing is called %q", kind)
	}
	took, err := load(path)
	if err != nil {
		return err
	}
	peak, err := procNumber("/proc/self/status", "VmHWM:")
	if err != nil {
		return err
	}
	written, err := procNumber("/proc/self/io", "write_bytes:")
	if err != nil {
		return err
	}
	_, err = fmt.Fprintln(b.out, took.Nanoseconds(), peak<<10, written)
	return err
}

// loadBackbone computes a token. The experts of the file are holes, which is to say
// zeros, and so is what they make of any row.
func (b *bench) loadBackbone(path string) (time.Duration, error) {
	start := time.Now()
	m, err := b.rt.LoadModel(ggml.ModelConfig{Path: path, Experts: func(_ context.Context, call *ggml.ExpertCall) error {
		clear(call.Out)
		return nil
	}})
	if err != nil {
		return 0, err
	}
	took := time.Since(start)
	d, err := newDecoder(m, 1, b.Threads)
	if err != nil {
		return 0, err
	}
	_, err = d.steps(b.ctx, 1)
	return took, err // what is open ends with the process
}

// loadStage computes a row.
func (b *bench) loadStage(path string) (time.Duration, error) {
	start := time.Now()
	g, err := gguf.OpenModel(path)
	if err != nil {
		return 0, err
	}
	sums := make([]gguf.KnownFile, len(g.Parts()))
	for i, p := range g.Parts() { // a store knows the hashes, which do not count here
		f, err := os.Open(p.Path)
		if err != nil {
			return 0, err
		}
		sums[i] = gguf.KnownFile{Path: p.Path, Sum: gguf.FileSum{Name: p.Path, Size: p.Size}, Stored: wholeFile{f}}
	}
	known, err := gguf.OpenKnown(sums)
	if err != nil {
		return 0, err
	}
	c, err := openCompute(b.ctx, b.rt, path, known, startWindow, nil, stageSize{Tokens: 256, Sequences: 1, Batch: 8, Threads: b.Threads})
	if err != nil {
		return 0, err
	}
	took := time.Since(start)
	c.batch.Reset()
	row := make([]float32, c.width)
	row[0] = 1
	c.batch.AddRow(row, 0, 0, true)
	return took, c.ctx.Decode(b.ctx, c.batch)
}

// wholeFile is a file of which all is there.
type wholeFile struct{ *os.File }

func (wholeFile) Holds(off, n int64) bool { return true }

// loadWorker loads experts as a worker does.
func (b *bench) loadWorker(path string) (time.Duration, error) {
	start := time.Now()
	g, err := gguf.OpenModel(path)
	if err != nil {
		return 0, err
	}
	k, err := b.rt.NewKernel(ggml.KernelConfig{Threads: b.Threads})
	if err != nil {
		return 0, err
	}
	err = k.LoadSlice(b.ctx, g, startSlice)
	return time.Since(start), err
}

// procNumber is the number behind a word in a file of /proc.
func procNumber(path, word string) (int64, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}
	_, rest, ok := strings.Cut("\n"+string(text), "\n"+word)
	if !ok {
		return 0, fmt.Errorf("%s has no %s", path, word)
	}
	return strconv.ParseInt(strings.Fields(rest)[0], 10, 64)
}
