package node

import (
	"strings"
	"testing"
)

func TestFillBudget(t *testing.T) {
	cfg := Config{Data: t.TempDir()}
	if err := fillBudget(&cfg); err != nil || cfg.Budget.limits.disk <= 0 || cfg.Budget.limits.memory <= 0 {
		t.Errorf("defaults %+v, %v", cfg.Budget.limits, err)
	}
	cfg.Budget.limits.disk = 1 << 20
	if err := fillBudget(&cfg); err == nil || !strings.Contains(err.Error(), "budget.disk of 1.0 MiB is too little") {
		t.Errorf("1 MiB of disk: %v", err)
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
