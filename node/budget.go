package node

import (
	"fmt"
	"math"
	"strconv"
	"strings"

	"kvasird/ggml"
)

// Budget is what a node gives to its network. The limits are hard: they count
// what is half downloaded, and hold over restarts.
type Budget struct {
	Disk     string `toml:"disk"`     // of the store, "20 GB"; "": half of what is free, at most 50 GB
	Memory   string `toml:"memory"`   // of the experts that it serves; "": half of the machine's
	VRAM     string `toml:"vram"`     // in place of Memory where they lie on a GPU; "": most of what is free there
	Upload   string `toml:"upload"`   // of weights, per second, "5 MB"; "": no limit
	Download string `toml:"download"` // likewise

	limits budgetLimits
}

// budgetLimits are the budget in bytes and bytes per second; 0 is no limit for
// the rates, and for the others: not given.
type budgetLimits struct{ disk, memory, vram, upload, download int64 }

// held is the bound on experts where they lie, and the setting that it is.
func (b *Budget) held(d ggml.Device) (limit int64, key string) {
	if onGPU(d) {
		return b.limits.vram, "budget.vram"
	}
	return b.limits.memory, "budget.memory"
}

// onGPU says whether a device has memory of its own.
func onGPU(d ggml.Device) bool { return d.Kind == "gpu" }

func (b *Budget) validate() error {
	for _, l := range []struct {
		key, text string
		to        *int64
	}{
		{"disk", b.Disk, &b.limits.disk}, {"memory", b.Memory, &b.limits.memory}, {"vram", b.VRAM, &b.limits.vram},
		{"upload", b.Upload, &b.limits.upload}, {"download", b.Download, &b.limits.download},
	} {
		if l.text == "" {
			continue
		}
		n, err := parseBytes(l.text)
		if err != nil {
			return fmt.Errorf("budget.%s %q: %w", l.key, l.text, err)
		}
		*l.to = n
	}
	return nil
}

// byteUnits are the units that people write; the longer ones first.
var byteUnits = []struct {
	name string
	size float64
}{
	{"kib", 1 << 10}, {"mib", 1 << 20}, {"gib", 1 << 30}, {"tib", 1 << 40},
	{"kb", 1e3}, {"mb", 1e6}, {"gb", 1e9}, {"tb", 1e12},
	{"k", 1e3}, {"m", 1e6}, {"g", 1e9}, {"t", 1e12}, {"b", 1},
}

// parseBytes reads "20 GB", "512MiB", "1.5g" or a plain number of bytes; at
// least 1 byte.
func parseBytes(s string) (int64, error) {
	number, unit := strings.ToLower(strings.TrimSpace(s)), 1.0
	for _, u := range byteUnits {
		if rest, ok := strings.CutSuffix(number, u.name); ok {
			number, unit = strings.TrimSpace(rest), u.size
			break
		}
	}
	v, err := strconv.ParseFloat(number, 64)
	if err != nil || math.IsNaN(v) || v*unit < 1 || v*unit > 1<<60 {
		return 0, fmt.Errorf("want a size such as 20 GB, 512 MiB or 1000000")
	}
	return int64(v * unit), nil
}
