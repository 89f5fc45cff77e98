package tolerance

import (
	"math"
	"strings"
	"testing"

	"kvasird/ggml/tensor"
)

func TestBetween(t *testing.T) {
	inf := Delta{math.Inf(1), math.Inf(1)}
	nan := float32(math.NaN())
	for name, tt := range map[string]struct {
		a, b []float32
		want Delta
	}{
		"equal":         {[]float32{1, -2}, []float32{1, -2}, Delta{}},
		"zeros":         {[]float32{0, 0}, []float32{0, 0}, Delta{}},
		"nothing":       {nil, nil, Delta{}},
		"one value":     {[]float32{3, 4, 0, 0}, []float32{3, 4, 0, 5}, Delta{5 / math.Sqrt(50.0/4), 5 / math.Sqrt(50)}},
		"scaled":        {[]float32{1, 1}, []float32{2, 2}, Delta{0.5, 0.5}},
		"not a number":  {[]float32{1, nan}, []float32{1, nan}, inf},
		"infinite":      {[]float32{float32(math.Inf(1))}, []float32{float32(math.Inf(1))}, inf},
		"other lengths": {[]float32{1}, []float32{1, 1}, inf},
	} {
		if got := Between(tt.a, tt.b); math.Abs(got.Max-tt.want.Max) > 1e-12 || math.Abs(got.L2-tt.want.L2) > 1e-12 {
			t.Errorf("%s: %v, want %v", name, got, tt.want)
		}
		if got, back := Between(tt.a, tt.b), Between(tt.b, tt.a); got != back {
			t.Errorf("%s: %v one way, %v the other", name, got, back)
		}
	}
}

// The table has what the project claims to know, and its bands tell a wrong expert from
// a right one: its rows lie about 1.4 (L2) apart.
func TestTable(t *testing.T) {
	if len(Rows()) == 0 {
		t.Fatal("the table is empty: make equivalence")
	}
	quants := []tensor.DType{tensor.F32, tensor.F16, tensor.Q8_0, tensor.Q6_K, tensor.Q4_K, tensor.Q4_0, tensor.MXFP4}
	backends := []string{Reference, "cpu-sse42", "cpu-sandybridge", "cpu-haswell", "cpu-skylakex", "cpu-zen4"}
	for _, q := range quants {
		for _, a := range backends {
			for _, b := range backends {
				got := Tolerance(a, b, q)
				if !got.Measured {
					t.Errorf("%s, %s, %s is not measured", a, b, q)
				}
				if got != Tolerance(b, a, q) {
					t.Errorf("%s, %s, %s: the band depends on the order", a, b, q)
				}
				limit := 0.2
				if a != Reference && b != Reference {
					limit = 0.05
				}
				if !(got.L2 > 0 && got.L2 < limit) {
					t.Errorf("%s, %s, %s: L2 up to %g, want below %g", a, b, q, got.L2, limit)
				}
			}
		}
	}
	for _, r := range Rows() {
		if b := Tolerance(r.A, r.B, r.Quant); !b.Holds(r.Largest) {
			t.Errorf("%s: outside its own band %v", r, b)
		}
	}
}

func TestNotMeasured(t *testing.T) {
	known, unknown := Tolerance("cpu-haswell", Reference, tensor.Q4_K), Tolerance("cuda", "cpu-haswell", tensor.Q4_K)
	if unknown.Measured || unknown.L2 < known.L2 {
		t.Errorf("an unknown backend gets %v, want no less than %v, and not as measured", unknown, known)
	}
	if got := Tolerance("cpu-sapphirerapids", "cpu-haswell", tensor.Q4_K); got.Measured || got.Delta != Tolerance("cpu-zen4", "cpu-haswell", tensor.Q4_K).Delta {
		t.Errorf("an unknown variant gets %v, want the band of its family, and not as measured", got)
	}
	if got := Tolerance("cpu-haswell", "cpu-haswell", tensor.IQ4XS); got.Measured || got.L2 == 0 {
		t.Errorf("an unknown quantisation gets %v", got)
	}
}

func TestName(t *testing.T) {
	for _, tt := range [][3]string{{"CPU", "haswell", "cpu-haswell"}, {"CPU", "", "cpu"}, {"Vulkan", "", "vulkan"}, {"CUDA0", "", "cuda"}} {
		if got := Name(tt[0], tt[1]); got != tt[2] {
			t.Errorf("Name(%q, %q) = %q, want %q", tt[0], tt[1], got, tt[2])
		}
	}
}

func TestParseRefuses(t *testing.T) {
	const good = "a b q4_K 1e-3 1e-4 1e-5 make equivalence # why\n\n"
	if rows, err := Parse(good); err != nil || len(rows) != 1 || rows[0].Command != "make equivalence" {
		t.Fatal(rows, err)
	}
	for text, want := range map[string]string{
		"a b q4_K 1e-3 1e-4 1e-5":        "line 1: 6 fields",
		"a b q9 1e-3 1e-4 1e-5 c":        "q9",
		"a b q4_K NaN 1e-4 1e-5 c":       "want a number",
		"a b q4_K -1 1e-4 1e-5 c":        "want a number",
		"a b q4_K 2 1e-4 1e-5 c":         "want a number",
		good + "b a q4_K 1e-3 0 0 again": "come twice",
	} {
		if _, err := Parse(text); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q", text, err, want)
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add("a b q4_K 1e-3 1e-4 1e-5 make equivalence")
	f.Fuzz(func(t *testing.T, text string) {
		rows, err := Parse(text)
		if err != nil {
			return
		}
		var again strings.Builder
		for _, r := range rows {
			again.WriteString(r.String() + "\n")
		}
		if back, err := Parse(again.String()); err != nil || len(back) != len(rows) {
			t.Errorf("%q becomes %q: %v", text, again.String(), err)
		}
	})
}
