package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

const tinyModel = "../../ggml/tiny/kvasir-tiny-q4_k_m.gguf"

// TestGGUF cuts the shipped model and looks at what came out.
func TestGGUF(t *testing.T) {
	dir := t.TempDir()
	const id = "e8177a7bf6ae2ffebeb43406d90251c73edfcbce2b8a298df1a167bf3927db14"
	out := func(name string) string { return filepath.Join(dir, name) }
	tests := []struct {
		cut     []string // "" leaves the model as it is
		file    string
		inspect []string
		want    []string
	}{
		{nil, tinyModel, []string{"--id", "--tensors"}, []string{"full model", "qwen3moe", "32 per layer in 4 layers, 4 used per token", id,
			`general.license `, "blk.0.ffn_up_exps.weight"}},
		{[]string{"slice", "--layers", "0:2", "--experts", "16:32"}, out("slice.gguf"), nil, []string{"expert slice", "0:2/16:32", id}},
		{[]string{"slice", "--experts", "0:4"}, out("all-layers.gguf"), nil, []string{"0:4/0:4"}},
		{[]string{"stage", "--layers", "1:3"}, out("stage.gguf"), nil, []string{"Kind          stage", "layers 1:3", "Layers        2"}},
		{[]string{"backbone"}, out("backbone.gguf"), nil, []string{"backbone", "Left out      [0:4/0:32]", "MiB on disk", id}},
	}
	for _, tt := range tests {
		if tt.cut != nil {
			args := append(append([]string{"gguf"}, tt.cut...), "--out", tt.file, tinyModel)
			if status, report, errs := kvasir(t, "", args...); status != exitOK || !strings.Contains(report, tt.file+": ") {
				t.Fatalf("%v: status %d, out %q, err %q", args, status, report, errs)
			}
			status, _, errs := kvasir(t, "", args...)
			if status != exitFail || !strings.Contains(errs, "is already there") {
				t.Errorf("%v again: status %d, err %q", args, status, errs)
			}
			if status, _, errs = kvasir(t, "", append(args, "--force")...); status != exitOK {
				t.Errorf("%v --force: status %d, err %q", args, status, errs)
			}
		}
		status, text, errs := kvasir(t, "", append([]string{"gguf", "inspect", tt.file}, tt.inspect...)...)
		if status != exitOK {
			t.Errorf("inspect %s: status %d, err %q", tt.file, status, errs)
		}
		for _, want := range tt.want {
			if !strings.Contains(text, want) {
				t.Errorf("inspect %s: %q is not in\n%s", tt.file, want, text)
			}
		}
	}
}

func TestGGUFRefuses(t *testing.T) {
	dir := t.TempDir()
	bad := filepath.Join(dir, "bad.gguf")
	if err := os.WriteFile(bad, []byte("GGUF\x03\x00\x00\x00 and then nothing of use"), 0o600); err != nil {
		t.Fatal(err)
	}
	out := filepath.Join(dir, "out.gguf")
	tests := []struct {
		args   []string
		status int
		want   string
	}{
		{[]string{"inspect", bad}, exitFail, bad},
		{[]string{"inspect", filepath.Join(dir, "none")}, exitFail, "no such file"},
		{[]string{"slice", tinyModel}, exitUsage, "--out is missing"},
		{[]string{"stage", "--out", out, tinyModel}, exitUsage, "--layers is missing"},
		{[]string{"slice", "--layers", "0:9", "--out", out, tinyModel}, exitFail, "0:9"},
		{[]string{"slice", "--experts", "0:99", "--out", out, tinyModel}, exitFail, "0:99"},
		{[]string{"backbone", "--out", tinyModel, tinyModel}, exitFail, "is already there"},
		{[]string{"backbone", "--force", "--out", tinyModel, tinyModel}, exitFail, "is the model itself"},
		{[]string{"slice", "--out", filepath.Join(dir, "none", "x"), tinyModel}, exitFail, "no such file"},
	}
	for _, tt := range tests {
		status, text, errs := kvasir(t, "", append([]string{"gguf"}, tt.args...)...)
		if status != tt.status || text != "" || !strings.Contains(errs, tt.want) {
			t.Errorf("%v: status %d, out %q, err %q, want %d and %q", tt.args, status, text, errs, tt.status, tt.want)
		}
	}
	if left, err := filepath.Glob(filepath.Join(dir, "*")); err != nil || len(left) != 1 {
		t.Errorf("left behind: %v, %v", left, err)
	}
}
