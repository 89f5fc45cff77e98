// Package tolerance says how far the rows that two honest backends compute for the same
// expert may lie apart, and how that is measured. It holds a table that was measured
// (table.txt, made by `make equivalence`) and no policy: who is asked what, and what
// becomes of one who is outside, is decided elsewhere. Everything is pure and safe for
// concurrent use.
//
// A backend has a name: "cpu-" and llama.cpp's name of the CPU variant ("cpu-haswell",
// "cpu-armv8.2_1"), else the ggml backend in small letters ("vulkan", "cuda"), or
// Reference for plain Go with sums in float64.
package tolerance

import (
	_ "embed"
	"fmt"
	"math"
	"strconv"
	"strings"

	"kvasird/ggml/tensor"
)

// Reference is the backend of plain Go (ggml.Reference).
const Reference = "reference"

// Name is the name of a backend: reg is ggml's name of it ("CPU", "Vulkan"), variant that
// of the CPU's library ("haswell"), which only CPUs have.
func Name(reg, variant string) string {
	name := strings.TrimRight(strings.ToLower(reg), "0123456789")
	if name == "cpu" && variant != "" {
		name += "-" + variant
	}
	return name
}

// Delta is how far one row lies from another. It is 0 for equal rows, +Inf where either
// has a value that is not finite or they are not equally long, and does not depend on
// which comes first.
type Delta struct {
	// Max is the largest |a[i]-b[i]| over the root mean square of the longer row: a
	// single wrong value shows here.
	Max float64 `json:"max"`
	// L2 is |a-b| over the longer row's length, as vectors: a row that is wrong
	// everywhere shows here, a scaled one too.
	L2 float64 `json:"l2"`
}

// Between measures two rows of one pair of input row and expert.
func Between(a, b []float32) Delta {
	inf := Delta{math.Inf(1), math.Inf(1)}
	if len(a) != len(b) {
		return inf
	}
	var diff, aa, bb, worst float64
	for i := range a {
		x, y := float64(a[i]), float64(b[i])
		d := x - y
		diff, aa, bb = diff+d*d, aa+x*x, bb+y*y
		worst = max(worst, math.Abs(d)) // NaN shows in diff
	}
	switch norm := max(aa, bb); {
	case math.IsNaN(diff+norm) || math.IsInf(diff+norm, 1):
		return inf
	case norm == 0:
		return Delta{}
	default:
		return Delta{worst / math.Sqrt(norm/float64(len(a))), math.Sqrt(diff / norm)}
	}
}

// Wider is the larger of two deltas, each measure by itself.
func (d Delta) Wider(o Delta) Delta { return Delta{max(d.Max, o.Max), max(d.L2, o.L2)} }

// Band is what two honest rows may differ by: Delta's measures, at most.
type Band struct {
	Delta
	// Typical is the L2 that half of the rows stay below, as it was measured: over many
	// calls, a worker whose median is several times that rounds otherwise than it says.
	Typical float64 `json:"typical"`
	// Measured says that this pair was measured; else the band is that of its family, or
	// the widest of the quantisation.
	Measured bool `json:"measured"`
}

// Holds says whether a delta is within the band.
func (b Band) Holds(d Delta) bool { return d.Max <= b.Max && d.L2 <= b.L2 }

// The band over the largest delta that was measured. Where all rows differ about alike,
// twice that is far from any. Most CPU kernels round the activations to 8 bits, and two
// of them differ by 1e-7 until a value falls on the other side of a step: such rows are
// rare and lie a thousand times farther apart, so that more of them are to be expected
// than were seen. floor is the least band: f32 sums are rounded.
const (
	headroom     = 2
	rareHeadroom = 4
	floor        = 2e-6
)

// Row is a line of the table.
type Row struct {
	A, B    string       // backends, A <= B
	Quant   tensor.DType // of the expert's matrices
	Largest Delta        // over all rows of the measurement
	Typical float64      // median of L2
	Command string       // that measured it
}

//go:embed table.txt
var text string

type key struct {
	a, b  string
	quant tensor.DType
}

var (
	rows     = mustParse(text)
	measured = byPair(rows, Class)
	families = byPair(rows, family)
)

// Rows is the table, in its order.
func Rows() []Row { return append([]Row(nil), rows...) }

// alike are CPU variants that compute with the same instructions as far as it shows in
// the rows, or nearly so: they have the lines of the one beside them.
var alike = map[string]string{
	"cpu-x64": "cpu-sse42", "cpu-ivybridge": "cpu-sandybridge", "cpu-piledriver": "cpu-sandybridge",
	"cpu-alderlake": "cpu-haswell", "cpu-cannonlake": "cpu-skylakex", "cpu-cascadelake": "cpu-skylakex",
	"cpu-icelake": "cpu-skylakex", "cpu-cooperlake": "cpu-skylakex",
}

// Class is the backend in the table whose lines a backend has: itself, or one alike.
func Class(name string) string {
	if c, ok := alike[name]; ok {
		return c
	}
	return name
}

// family is the set of backends that share their bands. The rare rows of a pair show in
// few of the lines, but may come with any.
func family(name string) string {
	switch {
	case strings.HasPrefix(name, "cpu-arm"):
		return "cpu of ARM"
	case strings.HasPrefix(name, "cpu-"):
		return "cpu of x86"
	}
	return name
}

// Tolerance is the band of rows that backends a and b compute with weights of a
// quantisation: that of all pairs of their families, since what is rare in one pair may
// have shown in another. Where no such pair was measured it is the widest of the
// quantisation, else of the table.
func Tolerance(a, b string, quant tensor.DType) Band {
	_, exact := measured[pair(Class(a), Class(b), quant)]
	if r, ok := families[pair(family(a), family(b), quant)]; ok {
		return r.band(exact)
	}
	same, all := Row{}, Row{}
	for _, r := range rows {
		all = all.wider(r)
		if r.Quant == quant {
			same = same.wider(r)
		}
	}
	if same.Largest == (Delta{}) {
		same = all
	}
	return same.band(false)
}

func (r Row) band(measured bool) Band {
	over := func(largest float64) float64 {
		times := headroom
		if 4*r.Typical < r.Largest.L2 {
			times = rareHeadroom
		}
		return max(float64(times)*largest, floor)
	}
	return Band{Delta{over(r.Largest.Max), over(r.Largest.L2)}, max(r.Typical, floor), measured}
}

func (r Row) wider(o Row) Row {
	r.Largest, r.Typical = r.Largest.Wider(o.Largest), max(r.Typical, o.Typical)
	return r
}

func pair(a, b string, quant tensor.DType) key {
	if b < a {
		a, b = b, a
	}
	return key{a, b, quant}
}

func byPair(rows []Row, name func(string) string) map[key]Row {
	m := make(map[key]Row, len(rows))
	for _, r := range rows {
		k := pair(name(r.A), name(r.B), r.Quant)
		m[k] = r.wider(m[k])
	}
	return m
}

func mustParse(text string) []Row {
	rows, err := Parse(text)
	if err != nil {
		panic(err) // embedded, and tested
	}
	return rows
}

// Parse reads a table. A line is
//
//	backend backend quantisation max l2 typical command…
//
// with the largest Delta that was measured, and the median of L2; what follows a # and
// empty lines are passed over.
func Parse(text string) ([]Row, error) {
	var rows []Row
	seen := map[key]bool{}
	for n, line := range strings.Split(text, "\n") {
		line, _, _ = strings.Cut(line, "#")
		f := strings.Fields(line)
		if len(f) == 0 {
			continue
		}
		r, err := parseRow(f)
		if err != nil {
			return nil, fmt.Errorf("tolerance table, line %d: %w", n+1, err)
		}
		k := pair(r.A, r.B, r.Quant)
		if seen[k] {
			return nil, fmt.Errorf("tolerance table, line %d: %s, %s, %s come twice", n+1, r.A, r.B, r.Quant)
		}
		seen[k] = true
		rows = append(rows, r)
	}
	return rows, nil
}

func parseRow(f []string) (Row, error) {
	if len(f) < 7 {
		return Row{}, fmt.Errorf("%d fields, at least 7 wanted: backend backend quantisation max l2 typical command", len(f))
	}
	quant, err := tensor.ParseDType(f[2])
	if err != nil {
		return Row{}, err
	}
	r := Row{A: f[0], B: f[1], Quant: quant, Command: strings.Join(f[6:], " ")}
	for i, to := range []*float64{&r.Largest.Max, &r.Largest.L2, &r.Typical} {
		if *to, err = strconv.ParseFloat(f[3+i], 64); err != nil || !(*to >= 0 && *to <= 1) {
			return Row{}, fmt.Errorf("%q: want a number from 0 to 1", f[3+i])
		}
	}
	return r, nil
}

// String is the line of a table.
func (r Row) String() string {
	return fmt.Sprintf("%-15s %-15s %-5s %.2e %.2e %.2e  %s", r.A, r.B, r.Quant, r.Largest.Max, r.Largest.L2, r.Typical, r.Command)
}
