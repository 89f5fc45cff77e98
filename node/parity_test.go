//go:build cgo && linux

package node

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"kvasird/experts"
	"kvasird/ggml"
	"kvasird/ggml/gguf"
)

// tcpWorkers serves the experts of a model from several workers over loopback TCP.
type tcpWorkers struct {
	model     experts.ModelID
	listeners map[string]net.Listener
	serving   sync.WaitGroup
	close     []func()
}

func (w *tcpWorkers) Dial(ctx context.Context, id string) (net.Conn, error) {
	var d net.Dialer
	return d.DialContext(ctx, "tcp", w.listeners[id].Addr().String())
}

// start adds a worker for a range of experts of every layer.
func (w *tcpWorkers) start(t *testing.T, rt *ggml.Runtime, m *gguf.Model, held gguf.Range) {
	t.Helper()
	slice := gguf.Slice{Layers: gguf.Range{End: m.Layers()}, Experts: held}
	k, err := rt.NewKernel(ggml.KernelConfig{})
	if err != nil {
		t.Fatal(err)
	}
	if err := k.LoadSlices(m, slice); err != nil {
		t.Fatal(err)
	}
	worker, err := experts.NewWorker(experts.WorkerConfig{Model: w.model, Kernel: k, Slices: wireSlices([]gguf.Slice{slice}), Drain: time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	w.listeners[fmt.Sprint("worker-", len(w.listeners))] = l
	w.serving.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			w.serving.Go(func() {
				if err := worker.Serve(context.Background(), conn); err != nil {
					t.Error(err)
				}
			})
		}
	})
	w.close = append(w.close, func() { l.Close(); worker.Close(); k.Close() })
}

func (w *tcpWorkers) stop() {
	for _, f := range w.close {
		f()
	}
	w.serving.Wait()
}

// archLogits gives the logits of 12 tokens, 9 in one batch and 3 alone.
func archLogits(t *testing.T, m *ggml.Model) []float32 {
	t.Helper()
	c, err := m.NewContext(ggml.ContextConfig{Tokens: 64, Batch: 16})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	var out []float32
	b := ggml.NewBatch(16)
	for i := range 12 {
		b.Add(ggml.Token(i*31%m.VocabSize()), i, 0, true)
		if i < 8 {
			continue
		}
		if err := c.Decode(context.Background(), b); err != nil {
			t.Fatal(err)
		}
		for j := range b.Len() {
			out = append(out, c.Logits(j)...)
		}
		b.Reset()
	}
	return out
}

// TestArchitecturesThroughWorkers: every MoE architecture, its experts with two
// workers behind the protocol, gives the logits of the model alone, bit for bit.
func TestArchitecturesThroughWorkers(t *testing.T) {
	rt, err := ggml.Open(ggml.Config{})
	if err != nil {
		t.Fatal(err)
	}
	for _, arch := range ggml.GenerateArchitectures() {
		if arch == "refact" { // whose graph never uses its experts
			continue
		}
		t.Run(arch, func(t *testing.T) {
			t.Parallel()
			path := filepath.Join(t.TempDir(), "model.gguf")
			if err := rt.GenerateModel(path, ggml.GenerateConfig{Arch: arch, Seed: 11}); err != nil {
				t.Fatal(err)
			}
			m, err := gguf.OpenModel(path)
			if err != nil {
				t.Fatal(err)
			}
			defer m.Close()
			id, err := m.ID(context.Background())
			if err != nil {
				t.Fatal(err)
			}
			w := &tcpWorkers{model: experts.ModelID(id.String()), listeners: map[string]net.Listener{}}
			defer w.stop()
			w.start(t, rt, m, gguf.Range{End: 3})
			w.start(t, rt, m, gguf.Range{Begin: 3, End: m.Experts()})
			if worst := throughWorkers(t, rt, path, w); worst != 0 {
				t.Errorf("max |Δ| of the logits is %g, want 0", worst)
			}
		})
	}
}

// throughWorkers gives the largest difference between the swarm's logits and the
// model's alone.
func throughWorkers(t *testing.T, rt *ggml.Runtime, path string, w *tcpWorkers) float64 {
	t.Helper()
	d, err := experts.NewDispatcher(experts.Config{Model: w.model, Dialer: w, CoverageWait: 5 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	for id := range w.listeners {
		d.AddPeer(id)
	}
	calls := 0
	swarm, err1 := rt.LoadModel(ggml.ModelConfig{Path: path, Experts: func(ctx context.Context, call *ggml.ExpertCall) error {
		calls++
		return d.Compute(ctx, (*experts.Call)(call))
	}})
	alone, err2 := rt.LoadModel(ggml.ModelConfig{Path: path})
	if err := errors.Join(err1, err2); err != nil {
		t.Fatal(err)
	}
	defer swarm.Close()
	defer alone.Close()
	got, want := archLogits(t, swarm), archLogits(t, alone)
	if calls == 0 || len(got) != len(want) || slices.ContainsFunc(got, func(x float32) bool { return math.IsNaN(float64(x)) }) {
		t.Fatalf("%d calls, %d logits, %d wanted, or not a number among them", calls, len(got), len(want))
	}
	worst := 0.0
	for i := range got {
		worst = max(worst, math.Abs(float64(got[i])-float64(want[i])))
	}
	return worst
}
