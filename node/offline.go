package node

import (
	"context"
	"io"
	"runtime"

	"kvasird/ggml"
)

// ExamineHere is Examine with the facts of this process's llama.cpp.
func ExamineHere(ctx context.Context, cfg Config) []Finding {
	rt, err := ggml.Open(ggml.Config{})
	if err != nil {
		return Examine(ctx, cfg, RuntimeFacts{Err: err}, runtime.NumCPU())
	}
	facts := RuntimeFacts{Release: rt.Release(), LibDir: rt.LibDir(), Variant: rt.Variant(), Features: rt.Features()}
	for _, d := range rt.Devices() {
		facts.Devices = append(facts.Devices, DeviceFact{
			Name: d.Name, Description: d.Description, FreeBytes: d.FreeBytes, TotalBytes: d.TotalBytes,
		})
	}
	return Examine(ctx, cfg, facts, runtime.NumCPU())
}

// ServeProbe is the child that tries out a model file: see ggml.Probe.
func ServeProbe(in io.Reader, out io.Writer) error {
	rt, err := ggml.Open(ggml.Config{})
	if err != nil {
		return err
	}
	return ggml.ServeProbe(rt, in, out)
}

// RuntimePack is Pack of this process, or why there is none.
func RuntimePack() string {
	rt, err := ggml.Open(ggml.Config{})
	if err != nil {
		return err.Error()
	}
	return Pack(rt)
}
