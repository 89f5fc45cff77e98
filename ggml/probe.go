package ggml

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"time"

	"kvasird/ggml/gguf"
)

// An abort inside the library ends the process, and a model file that is wrong
// in a way of its own can cause one. So a file that is not yet known to be good
// is loaded and run for one token in a child process first.

// ProbeRequest is what the child is asked, as JSON on its standard input: about a file
// or about a stage.
type ProbeRequest struct {
	Path string `json:"path"`
	// Files and Layers, instead of Path, are a stage: the files of the whole model, in
	// order, whose bytes for these layers are there.
	Files     []ProbeFile `json:"files,omitempty"`
	Layers    gguf.Range  `json:"layers,omitzero"`
	Backbone  bool        `json:"backbone"` // experts elsewhere: they are not loaded and answer zeros
	NoRepack  bool        `json:"no_repack"`
	GPULayers int         `json:"gpu_layers"`
	Overrides []Override  `json:"overrides,omitempty"`
	Threads   int         `json:"threads"`
}

// ProbeFile is a file of a model and what is known of it: nothing is hashed again.
type ProbeFile struct {
	Path string       `json:"path"`
	Sum  gguf.FileSum `json:"sum"`
}

// name says what is tried.
func (req ProbeRequest) name() string {
	if len(req.Files) > 0 {
		return fmt.Sprintf("the stage of layers %v of %s", req.Layers, req.Files[0].Path)
	}
	return req.Path
}

type probeReply struct {
	Error string `json:"error"`
}

// ErrProbe is wrapped by Probe when the file cannot be used.
var ErrProbe = errors.New("probe failed")

// Probe runs child, a command that ends in ServeProbe, and reports what became
// of the file. The child is killed when ctx ends.
func Probe(ctx context.Context, child *exec.Cmd, req ProbeRequest) error {
	in, err := json.Marshal(req)
	if err != nil {
		return err
	}
	var out, words bytes.Buffer
	child.Stdin = bytes.NewReader(in)
	child.Stdout, child.Stderr = &limited{buf: &out}, &limited{buf: &words}
	child.Env = append(child.Environ(), "GGML_NO_BACKTRACE=1") // an abort would start a debugger, and wait for it
	if err := child.Start(); err != nil {
		return fmt.Errorf("%w: the probe process does not start: %v", ErrProbe, err)
	}
	stop := context.AfterFunc(ctx, func() { child.Process.Kill() })
	err = child.Wait()
	stop()
	if ctx.Err() != nil {
		return fmt.Errorf("%w: %s: no result in time: %v", ErrProbe, req.name(), ctx.Err())
	}
	var reply probeReply
	if json.Unmarshal(out.Bytes(), &reply) != nil {
		return fmt.Errorf("%w: llama.cpp aborts on %s (%v): %s", ErrProbe, req.name(), err, cause(words.String()))
	}
	if reply.Error != "" {
		return fmt.Errorf("%w: %s", ErrProbe, reply.Error)
	}
	return nil
}

// limited keeps the last bytes of what a child says.
type limited struct{ buf *bytes.Buffer }

func (l *limited) Write(p []byte) (int, error) {
	l.buf.Write(p)
	if extra := l.buf.Len() - 64<<10; extra > 0 {
		l.buf.Next(extra)
	}
	return len(p), nil
}

// crash matches the lines that a failed assertion (file.cpp:12: …), an uncaught
// exception and the Go runtime begin with.
var crash = regexp.MustCompile(`\.(c|cc|cpp|cu|h|m):\d+: |what\(\): |^SIG[A-Z]+: |^fatal error: |^panic: `)

// cause is the line that says why a process crashed, from the much that it says.
func cause(words string) string {
	lines := strings.Split(strings.TrimSpace(words), "\n")
	for _, line := range lines {
		if crash.MatchString(line) {
			return strings.TrimSpace(line)
		}
	}
	return lines[len(lines)-1]
}

// ServeProbe is the child's side: one request from r, one reply to w.
func ServeProbe(rt *Runtime, r io.Reader, w io.Writer) error {
	var req ProbeRequest
	if err := json.NewDecoder(io.LimitReader(r, maxProbeRequest)).Decode(&req); err != nil {
		return fmt.Errorf("probe request: %w", err)
	}
	var reply probeReply
	if err := rt.probe(req); err != nil {
		reply.Error = err.Error()
	}
	return json.NewEncoder(w).Encode(reply)
}

// maxProbeRequest bounds what the child reads: a model of a thousand files fits.
const maxProbeRequest = 1 << 20

func (rt *Runtime) probe(req ProbeRequest) error {
	cfg := ModelConfig{Path: req.Path, NoRepack: req.NoRepack, GPULayers: req.GPULayers, Overrides: req.Overrides}
	if req.Backbone {
		cfg.Experts = func(_ context.Context, call *ExpertCall) error {
			clear(call.Out)
			return nil
		}
	}
	last := true
	if len(req.Files) > 0 {
		model, err := req.open()
		if err != nil {
			return err
		}
		defer model.Close()
		if cfg.Image, err = model.RowStage(context.Background(), req.Layers); err != nil {
			return err
		}
		last = req.Layers.End == model.Layers()
	}
	m, err := rt.LoadModel(cfg)
	if err != nil {
		return err
	}
	defer m.Close()
	if !m.HasDecoder() {
		return fmt.Errorf("%s is an encoder (%s): it cannot generate", req.name(), m.Arch())
	}
	if m.Pooling() != gguf.NoPooling {
		return probeEmbedding(m, req)
	}
	return probeDecode(m, req, last)
}

// probeEmbedding makes the vector of a word.
func probeEmbedding(m *Model, req ProbeRequest) error {
	tokens, err := m.Tokenize("a", true, false)
	if err != nil || len(tokens) == 0 { // inputs can be tokens too
		tokens = []Token{0}
	}
	c, err := m.NewContext(ContextConfig{Tokens: 256, Batch: 256, Threads: req.Threads, Embeddings: true})
	if err != nil {
		return fmt.Errorf("%s: %w", req.name(), err)
	}
	defer c.Close()
	b := NewBatch(len(tokens))
	for i, t := range tokens {
		b.Add(t, i, 0, true)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute)
	defer cancel()
	if err := c.Decode(ctx, b); err != nil {
		return err
	}
	if len(c.Embedding(0)) == 0 {
		return fmt.Errorf("%s gives no embedding", req.name())
	}
	return nil
}

// probeDecode computes one token, or one row of a stage.
func probeDecode(m *Model, req ProbeRequest, last bool) error {
	c, err := m.NewContext(ContextConfig{Tokens: 256, Batch: 8, Threads: req.Threads, Boundary: !last})
	if err != nil {
		return err
	}
	defer c.Close()
	b := NewBatch(1)
	if req.Layers.Begin > 0 {
		b = NewRowBatch(1, m.EmbeddingLength())
		row := make([]float32, m.EmbeddingLength())
		row[0] = 1
		b.AddRow(row, 0, 0, true)
	} else {
		b.Add(max(m.BOS(), 0), 0, 0, true)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute)
	defer cancel()
	if err := c.Decode(ctx, b); err != nil {
		return err
	}
	if last && len(c.Logits(0)) == 0 {
		return fmt.Errorf("%s gives no logits", req.name())
	}
	return nil
}

// open opens the model of a stage as a store would, whose files say themselves which
// bytes they have: here a byte that is missing reads as zero.
func (req ProbeRequest) open() (*probedModel, error) {
	p := &probedModel{}
	var known []gguf.KnownFile
	for _, file := range req.Files {
		f, err := os.Open(file.Path)
		if err != nil {
			p.Close()
			return nil, err
		}
		p.files = append(p.files, f)
		known = append(known, gguf.KnownFile{Path: file.Path, Sum: file.Sum, Stored: probedFile{f}})
	}
	var err error
	if p.Model, err = gguf.OpenKnown(known); err != nil {
		p.Close()
		return nil, err
	}
	return p, nil
}

// probedModel is a model whose files it closes.
type probedModel struct {
	*gguf.Model
	files []*os.File
}

func (p *probedModel) Close() {
	for _, f := range p.files {
		f.Close() // it was only read
	}
}

type probedFile struct{ *os.File }

func (probedFile) Holds(off, n int64) bool { return true }
