//go:build cgo

package ggml

import (
	"bytes"
	"io"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"kvasird/ggml/gguf"
	"kvasird/ggml/tensor"
)

// generate writes a model into the test's folder.
func generate(t testing.TB, rt *Runtime, cfg GenerateConfig) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), cfg.Arch+".gguf")
	if err := rt.GenerateModel(path, cfg); err != nil {
		t.Fatal(err)
	}
	return path
}

// runs loads a file with the ordinary loader and decodes nine tokens at once
// and three singly.
func runs(t testing.TB, rt *Runtime, path string) [][]float32 {
	t.Helper()
	m := loadModel(t, rt, ModelConfig{Path: path})
	var prompt []Token
	for i := range 12 {
		prompt = append(prompt, Token((i*7+1)%m.VocabSize()))
	}
	logits := run(t, m, prompt, 3)
	for i, l := range logits {
		if len(l) != m.VocabSize() {
			t.Fatalf("token %d: %d logits, want %d", i, len(l), m.VocabSize())
		}
		square := 0.0
		for _, v := range l {
			square += float64(v) * float64(v)
		}
		if rms := math.Sqrt(square / float64(len(l))); !(rms > 0.1 && rms < 10) {
			t.Fatalf("token %d: the logits' root mean square is %g, want about 1", i, rms)
		}
	}
	return logits
}

// expertNames lists a file's expert tensors without "blk.L.", once each.
func expertNames(t testing.TB, path string) map[string]gguf.ExpertTensor {
	t.Helper()
	m, err := gguf.OpenModel(path)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	if m.Experts() != defaultExperts || m.ExpertsUsed() != defaultUsed {
		t.Errorf("%d of %d experts used, want %d of %d", m.ExpertsUsed(), m.Experts(), defaultUsed, defaultExperts)
	}
	names := map[string]gguf.ExpertTensor{}
	if len(m.ExpertLayers()) < 2 {
		t.Errorf("expert layers are %v, want two at least", m.ExpertLayers())
	}
	for _, layer := range m.ExpertLayers() {
		tensors, err := m.ExpertTensors(layer, gguf.Range{End: m.Experts()})
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range tensors {
			names[blockName.ReplaceAllString(e.Name, "")] = e
		}
	}
	return names
}

func TestGeneratedModelsRun(t *testing.T) {
	rt := openRuntime(t)
	for _, arch := range GenerateArchitectures() {
		t.Run(arch, func(t *testing.T) {
			t.Parallel()
			path := generate(t, rt, GenerateConfig{Arch: arch})
			runs(t, rt, path)
			names := expertNames(t, path)
			for _, want := range []string{"ffn_up_exps.weight", "ffn_gate_exps.weight", "ffn_down_exps.weight"} {
				if _, ok := names[want]; !ok && !(arch == "nemotron_h_moe" && want == "ffn_gate_exps.weight") {
					t.Errorf("no %s", want)
				}
			}
		})
	}
}

func TestGeneratedVariantsRun(t *testing.T) {
	rt := openRuntime(t)
	tests := []struct {
		name   string
		cfg    GenerateConfig
		archs  []string
		want   []string
		absent []string
	}{
		{"fused", GenerateConfig{Fused: true}, GenerateFused(), []string{"ffn_gate_up_exps.weight"}, []string{"ffn_up_exps.weight", "ffn_gate_exps.weight"}},
		{"scales", GenerateConfig{Scales: true}, []string{"qwen3moe", "llama", "gpt-oss", "grovemoe"},
			[]string{"ffn_up_exps.scale", "ffn_gate_exps.scale", "ffn_down_exps.scale"}, nil},
		{"biases", GenerateConfig{Biases: true}, []string{"qwen3moe", "gpt-oss"}, nil, []string{"ffn_up_exps.scale"}},
	}
	for _, tt := range tests {
		for _, arch := range tt.archs {
			t.Run(tt.name+"/"+arch, func(t *testing.T) {
				tt.cfg.Arch = arch
				path := generate(t, rt, tt.cfg)
				runs(t, rt, path)
				names := expertNames(t, path)
				for _, n := range tt.want {
					if _, ok := names[n]; !ok {
						t.Errorf("no %s", n)
					}
				}
				for _, n := range tt.absent {
					if _, ok := names[n]; ok {
						t.Errorf("%s is there", n)
					}
				}
			})
		}
	}
}

func TestGenerateSameConfigSameBytes(t *testing.T) {
	rt := openRuntime(t)
	read := func(cfg GenerateConfig) []byte {
		cfg.Arch = "qwen3moe"
		b, err := os.ReadFile(generate(t, rt, cfg))
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	one := read(GenerateConfig{Seed: 7, Type: "Q4_K", Threads: 1})
	if !bytes.Equal(one, read(GenerateConfig{Seed: 7, Type: "Q4_K", Threads: 2})) {
		t.Error("two threads made other bytes than one")
	}
	if bytes.Equal(one, read(GenerateConfig{Seed: 8, Type: "Q4_K"})) {
		t.Error("another seed made the same bytes")
	}
}

// A model with holes is the same model with zeros for experts.
func TestGenerateHoles(t *testing.T) {
	rt := openRuntime(t)
	cfg := GenerateConfig{Arch: "qwen35moe"}
	full := openGGUF(t, generate(t, rt, cfg))
	cfg.Holes = true
	holed := openGGUF(t, generate(t, rt, cfg))
	read := func(m *gguf.Model, name string) []byte {
		r, err := m.Section(name)
		if err != nil {
			t.Fatal(err)
		}
		b, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	for _, x := range full.Tensors() {
		want := read(full, x.Name)
		if !gguf.InBackbone(x.Name) {
			want = make([]byte, len(want))
		}
		if !bytes.Equal(read(holed, x.Name), want) {
			t.Errorf("%s differs", x.Name)
		}
	}
	if len(holed.ExpertLayers()) == 0 {
		t.Error("there are no experts")
	}
}

func TestGenerateOverridesAndDrop(t *testing.T) {
	rt := openRuntime(t)
	path := generate(t, rt, GenerateConfig{
		Arch: "qwen3moe", Layers: 3, Experts: 5, ExpertsUsed: 3, Embedding: 64, FeedForward: 96, Heads: 4, Vocab: 40,
		Overrides: map[string]any{"context_length": uint32(99), "general.name": nil, "rope.freq_base": float32(5000)},
		Drop:      regexp.MustCompile(`^output\.weight$`),
	})
	runs(t, rt, path)
	m, err := gguf.OpenModel(path)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	if n, err := m.Meta().Int("qwen3moe.context_length"); n != 99 || err != nil {
		t.Errorf("context_length is %d, %v, want 99", n, err)
	}
	if _, ok := m.Meta().Get("general.name"); ok {
		t.Error("general.name was to be removed")
	}
	if m.Experts() != 5 || m.ExpertsUsed() != 3 || m.Layers() != 3 {
		t.Errorf("%d experts, %d used, %d layers, want 5, 3, 3", m.Experts(), m.ExpertsUsed(), m.Layers())
	}
	if _, err := m.Section("output.weight"); err == nil {
		t.Error("output.weight was to be dropped")
	}
}

func TestQuantizedModelsRun(t *testing.T) {
	rt := openRuntime(t)
	for _, name := range []string{"F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "TQ1_0", "TQ2_0", "MXFP4"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			want, err := tensor.ParseDType(name)
			if err != nil {
				t.Fatal(err)
			}
			src := generate(t, rt, GenerateConfig{Arch: "qwen3moe"})
			dst := filepath.Join(t.TempDir(), "quantised.gguf")
			if err := rt.QuantizeModel(src, dst, name, 1); err != nil {
				t.Fatal(err)
			}
			direct := generate(t, rt, GenerateConfig{Arch: "qwen3moe", Type: name})
			for _, path := range []string{dst, direct} {
				runs(t, rt, path)
				for n, e := range expertNames(t, path) {
					if e.DType != want {
						t.Errorf("%s is %s, want %s", n, e.DType, want)
					}
				}
			}
			compareExperts(t, dst, direct)
		})
	}
}

// compareExperts expects the same expert bytes from the library's quantiser and
// from writing the type at once.
func compareExperts(t testing.TB, a, b string) {
	t.Helper()
	var data [2][]byte
	for i, path := range []string{a, b} {
		m, err := gguf.OpenModel(path)
		if err != nil {
			t.Fatal(err)
		}
		defer m.Close()
		tensors, err := m.ExpertTensors(1, gguf.Range{End: m.Experts()})
		if err != nil {
			t.Fatal(err)
		}
		slices.SortFunc(tensors, func(x, y gguf.ExpertTensor) int { return strings.Compare(x.Name, y.Name) })
		for _, e := range tensors {
			part := make([]byte, e.Bytes)
			if err := e.ReadInto(part); err != nil {
				t.Fatal(err)
			}
			data[i] = append(data[i], part...)
		}
	}
	if !bytes.Equal(data[0], data[1]) {
		t.Error("the expert bytes differ")
	}
}

func TestGenerateRefuses(t *testing.T) {
	rt := openRuntime(t)
	tests := []struct {
		cfg  GenerateConfig
		want string
	}{
		{GenerateConfig{Arch: "gpt2"}, `unknown architecture "gpt2"`},
		{GenerateConfig{Arch: "qwen3moe", Fused: true}, "does not take fused"},
		{GenerateConfig{Arch: "qwen3moe", Experts: 2, ExpertsUsed: 3}, "3 experts used of 2"},
		{GenerateConfig{Arch: "qwen3moe", Embedding: -1}, "Embedding is -1"},
		{GenerateConfig{Arch: "qwen3moe", Layers: 1 << 21}, "Layers is 2097152"},
		{GenerateConfig{Arch: "qwen3moe", Embedding: 256, Heads: 3}, "3 heads do not divide"},
		{GenerateConfig{Arch: "qwen3moe", Type: "Q9"}, "Q9"},
		{GenerateConfig{Arch: "qwen3moe", Type: "IQ2_XXS"}, "importance matrix"},
		{GenerateConfig{Arch: "qwen3moe", Type: "I32"}, "not a type of weights"},
		{GenerateConfig{Arch: "qwen3moe", Type: "Q8_K"}, "activations"},
		{GenerateConfig{Arch: "qwen3moe", Type: "Q4_K", FeedForward: 96}, "rows of 96"},
		{GenerateConfig{Arch: "qwen3moe", Overrides: map[string]any{"x": 1}}, `override "x" is a int`},
		{GenerateConfig{Arch: "qwen3moe", Overrides: map[string]any{"block_count": nil}}, "key not found in model: qwen3moe.block_count"},
	}
	for _, tt := range tests {
		path := filepath.Join(t.TempDir(), "m.gguf")
		err := rt.GenerateModel(path, tt.cfg)
		if err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%+v: got %v, want %q", tt.cfg, err, tt.want)
		}
		if _, err := os.Stat(path); err == nil {
			t.Errorf("%+v: a file was left behind", tt.cfg)
		}
	}
}

func TestQuantizeRefuses(t *testing.T) {
	rt := openRuntime(t)
	src := generate(t, rt, GenerateConfig{Arch: "qwen3moe", Embedding: 64, FeedForward: 96})
	for _, tt := range []struct{ src, kind, want string }{
		{src, "Q4_K", "want q4_K"},
		{src, "Q9", "Q9"},
		{src, "I32", "no file can be mostly"},
		{src + ".missing", "Q8_0", "failed to load model"},
	} {
		dst := filepath.Join(t.TempDir(), "q.gguf")
		if err := rt.QuantizeModel(tt.src, dst, tt.kind, 1); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: got %v, want %q", tt.kind, err, tt.want)
		}
		if _, err := os.Stat(dst); err == nil {
			t.Errorf("%s: a file was left behind", tt.kind)
		}
	}
}
