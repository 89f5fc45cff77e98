package plan

import (
	"math"
	"testing"
	"time"
)

// mixture is a model of MoE layers, some of whose numbers differ from any other's.
func mixture(layers, width int, expert int64) Model {
	m := Model{Arch: "qwen3moe", Width: width, Vocab: 2000, Experts: 32, Embedding: 1e6, Head: 1e6}
	for range layers {
		m.Layers = append(m.Layers, Layer{Dense: expert * 3, Expert: expert, Used: 4, KV: 4096})
	}
	m.Files, _ = m.Bytes()
	return m
}

// TestCalibrateRecovers: a speed that samples were made with is found again, and is
// within a tenth when each sample is off by up to 3 %.
func TestCalibrateRecovers(t *testing.T) {
	want := Speed{Bytes: 12e9, Batch: 31e9, Layer: 40 * time.Microsecond}
	small, large := mixture(4, 256, 100e3), mixture(2, 2048, 5e6)
	for _, noise := range []float64{0, 0.03} {
		var samples []Sample
		for i, s := range []Sample{{small, 1, 48, 0}, {large, 1, 48, 0}, {small, 8, 48, 0}, {large, 8, 48, 0}} {
			s.Seconds = s.cost(want) * (1 + noise*float64(1-2*(i%2)))
			samples = append(samples, s)
		}
		got, err := SpeedOf(samples)
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range samples {
			if r := s.cost(got) / s.cost(want); math.Abs(r-1) > 1e-6+1.5*noise {
				t.Errorf("with %.0f %% of noise %+v predicts %.3f of what %+v does", 100*noise, got, r, want)
			}
		}
		if noise == 0 && math.Abs(got.Bytes/want.Bytes-1) > 1e-6 {
			t.Errorf("%+v, want %+v", got, want)
		}
	}
}

func TestCallOf(t *testing.T) {
	small, large := mixture(4, 256, 100e3), mixture(2, 2048, 5e6)
	samples := []CallSample{
		{small, 1, 0.001, 0.001 + 4*(100e-6+5*4*256/200e6)},
		{large, 1, 0.005, 0.005 + 2*(100e-6+5*4*2048/200e6)},
	}
	call, rate, err := CallOf(samples)
	if err != nil || math.Abs(call.Seconds()/100e-6-1) > 0.01 || math.Abs(rate/200e6-1) > 0.01 {
		t.Errorf("%v, %.0f bytes per second, %v; want 100µs, 200 MB/s", call, rate, err)
	}
}

func TestCalibrateRefuses(t *testing.T) {
	m := mixture(4, 256, 100e3)
	for _, bad := range [][]Sample{nil, {{m, 1, 48, 0.001}}, {{m, 1, 48, 0.001}, {m, 1, 48, 0.002}}, {{m, 1, 48, -1}}, {{m, 0, 48, 1}}} {
		if s, err := SpeedOf(bad); err == nil {
			t.Errorf("%d samples: %+v", len(bad), s)
		}
	}
	for _, bad := range [][]CallSample{nil, {{m, 1, 1, 2}}, {{m, 1, 1, 2}, {m, 1, 2, 1}}} {
		if c, _, err := CallOf(bad); err == nil {
			t.Errorf("%d samples: %v", len(bad), c)
		}
	}
}
