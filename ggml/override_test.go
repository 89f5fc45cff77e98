//go:build cgo

package ggml

import (
	"strings"
	"testing"
)

// Rules that name what is there already change nothing; `make test-vulkan` shows that
// they are followed.
func TestOverrides(t *testing.T) {
	rt := openRuntime(t)
	prompt := testTokens(12, 1536)
	logits := func(cfg ModelConfig) [][]float32 {
		cfg.Path = tinyPath
		return run(t, loadModel(t, rt, cfg), prompt, 2)
	}
	alone := logits(ModelConfig{})
	placed := logits(ModelConfig{Overrides: []Override{
		{`blk\.1\.ffn_(up|down|gate)_(ch|)exps`, "CPU"}, {`blk\.3\.ffn_(up|down|gate)_(ch|)exps`, "CPU"},
	}})
	if d := maxAbs(alone, placed); d != 0 {
		t.Errorf("max |Δ| of the logits is %g, want 0", d)
	}
	_, err := rt.LoadModel(ModelConfig{Path: tinyPath, Overrides: []Override{{"exps", "CUDA7"}}})
	if err == nil || !strings.Contains(err.Error(), `no device "CUDA7"; there are: CPU`) {
		t.Errorf("a device that is not there: %v", err)
	}
}
