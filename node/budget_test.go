package node

import (
	"strings"
	"testing"

	"kvasird/ggml"
)

func TestFillBudget(t *testing.T) {
	cpu := ggml.Device{Name: "CPU", Kind: "cpu"}
	gpu := ggml.Device{Name: "CUDA0", Kind: "gpu", FreeBytes: 8 << 30, TotalBytes: 10 << 30}
	integrated := ggml.Device{Name: "Vulkan0", Kind: "igpu", FreeBytes: 8 << 30, TotalBytes: 10 << 30}
	tests := []struct {
		name   string
		device ggml.Device
		limits budgetLimits
		held   int64 // bytes that experts may take; 0: half of the memory that is free
		key    string
		want   string // part of the error
	}{
		{"defaults on the CPU", cpu, budgetLimits{}, 0, "budget.memory", ""},
		{"memory on the CPU", cpu, budgetLimits{memory: 5 << 20}, 5 << 20, "budget.memory", ""},
		{"a GPU that shares the memory", integrated, budgetLimits{memory: 5 << 20}, 5 << 20, "budget.memory", ""},
		{"defaults on a GPU", gpu, budgetLimits{memory: 5 << 20}, 7 << 30, "budget.vram", ""},
		{"VRAM on a GPU", gpu, budgetLimits{vram: 3 << 30}, 3 << 30, "budget.vram", ""},
		{"VRAM without a GPU", cpu, budgetLimits{vram: 3 << 30}, 0, "", "budget.vram is for experts on a GPU, and CPU is none"},
		{"more VRAM than there is", gpu, budgetLimits{vram: 11 << 30}, 0, "", "more than CUDA0 has, 10.0 GiB"},
		{"little disk", cpu, budgetLimits{disk: 1 << 20}, 0, "", "budget.disk of 1.0 MiB is too little"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			cfg := Config{Data: t.TempDir(), Budget: Budget{limits: tt.limits}}
			err := fillBudget(&cfg, tt.device)
			if tt.want != "" {
				if err == nil || !strings.Contains(err.Error(), tt.want) {
					t.Fatalf("got %v, want %q", err, tt.want)
				}
				return
			}
			held, key := cfg.Budget.held(tt.device)
			if err != nil || cfg.Budget.limits.disk <= 0 || held <= 0 || tt.held > 0 && held != tt.held || key != tt.key {
				t.Errorf("%s %d, %v; want %s %d", key, held, err, tt.key, tt.held)
			}
		})
	}
}

func TestParseBytes(t *testing.T) {
	tests := []struct {
		in   string
		want int64 // 0: refused
	}{
		{"20 GB", 20e9}, {"512MiB", 512 << 20}, {"1.5g", 15e8}, {"1000", 1000}, {" 7 kb ", 7000}, {"3b", 3}, {"2 TiB", 2 << 40},
		{"", 0}, {"-1", 0}, {"0", 0}, {"0.1b", 0}, {"GB", 0}, {"ten GB", 0}, {"1e30", 0}, {"nan", 0}, {"inf tb", 0}, {"5 GBs", 0},
	}
	for _, tt := range tests {
		got, err := parseBytes(tt.in)
		if got != tt.want || (err != nil) != (tt.want == 0) {
			t.Errorf("parseBytes(%q) = %d, %v, want %d", tt.in, got, err, tt.want)
		}
	}
}
