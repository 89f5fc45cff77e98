package experts

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
)

func bitsOf(x float32) uint32 { return math.Float32bits(x) }

func f32(bits uint32) float32 { return math.Float32frombits(bits) }

// roundTrip encodes and decodes rows.
func roundTrip(t testing.TB, p Precision, rows []float32, width int) []float32 {
	t.Helper()
	b := make([]byte, p.size(len(rows)/width, width))
	p.put(b, rows, width)
	if !p.finite(b, width) {
		t.Fatalf("%v: what was encoded of %v is not finite", p, rows)
	}
	out := make([]float32, len(rows))
	p.get(out, b, width)
	return out
}

// errorBound is how far a decoded element may lie from what was encoded, by its block's largest.
func errorBound(p Precision, x, most float64) float64 {
	switch p {
	case F16:
		return max(math.Abs(x)/(1<<11), 1.0/(1<<25))
	case BF16:
		return math.Abs(x)/(1<<8) + math.SmallestNonzeroFloat32*(1<<15)
	case Q8: // half of a scale that was rounded up by at most 2^-7, and the division's rounding
		return max(most/q8Most/2*(1+1.0/64), q8Least)
	}
	return 0
}

// TestPrecisions: every element comes back as near as its encoding allows, over all magnitudes
// and lengths of the last block.
func TestPrecisions(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for _, p := range precisions {
		for width := 1; width <= 100; width++ {
			rows := make([]float32, 3*width)
			for scale := -140; scale < 127; scale += 3 {
				for i := range rows {
					rows[i] = float32(rng.NormFloat64()) * float32(math.Ldexp(1, scale))
				}
				if !p.fits(rows) {
					continue
				}
				checkNear(t, p, rows, width)
			}
		}
	}
}

func checkNear(t testing.TB, p Precision, rows []float32, width int) {
	t.Helper()
	got := roundTrip(t, p, rows, width)
	for r := 0; r < len(rows); r += width {
		for b := 0; b < width; b += q8Block {
			from, to := r+b, r+min(b+q8Block, width)
			most := float64(f32(maxAbs(rows[from:to])))
			for i := from; i < to; i++ {
				if d := math.Abs(float64(got[i]) - float64(rows[i])); !(d <= errorBound(p, float64(rows[i]), most)) {
					t.Fatalf("%v: %g became %g beside at most %g", p, rows[i], got[i], most)
				}
			}
		}
	}
}

// TestPrecisionBytes fixes the encodings.
func TestPrecisionBytes(t *testing.T) {
	tests := []struct {
		p    Precision
		row  []float32
		want string
	}{
		{F32, []float32{1, -2}, "0000803f000000c0"},
		{F16, []float32{1, -2, 65504, 1.0 / (1 << 24), 1.0 / (1 << 25), 2049, 0.1}, "003c00c0ff7b0100000000686" + "62e"},
		{BF16, []float32{1, -2, 257, 0.1}, "803f00c08043cd3d"},
		{Q8, []float32{127, -127, 1.4, 0.5, -1.5}, "803f" + "7f" + "81" + "01" + "00" + "fe"},
		{Q8, []float32{0, 0}, "00000000"},
		{Q8, []float32{1}, "023c" + "7e"}, // 1/127 is rounded up to 2^-7 · 1.015625
	}
	for _, test := range tests {
		b := make([]byte, test.p.size(1, len(test.row)))
		test.p.put(b, test.row, len(test.row))
		if got := fmt.Sprintf("%x", b); got != test.want {
			t.Errorf("%v of %v: got %s, want %s", test.p, test.row, got, test.want)
		}
	}
}

// TestPrecisionFits: what would not be finite once decoded does not fit, and what is next to it does.
func TestPrecisionFits(t *testing.T) {
	for _, p := range []Precision{F16, BF16, Q8} {
		most := f32(p.largest())
		for _, x := range []float32{most, -most} {
			if !p.fits([]float32{0, x, 0}) {
				t.Errorf("%v: %g does not fit", p, x)
			}
			checkFiniteOnce(t, p, x)
		}
		for _, x := range []float32{f32(p.largest() + 1), -f32(p.largest() + 1), float32(math.Inf(1)), float32(math.Inf(-1)), float32(math.NaN())} {
			for n := 1; n < 9; n++ {
				row := make([]float32, n)
				row[n-1] = x
				if p.fits(row) {
					t.Errorf("%v: %g fits", p, x)
				}
			}
		}
	}
	if !F32.fits([]float32{float32(math.NaN())}) {
		t.Error("f32 carries everything, for its receiver to judge")
	}
}

func checkFiniteOnce(t *testing.T, p Precision, x float32) {
	t.Helper()
	if got := roundTrip(t, p, []float32{x, 1}, 2)[0]; math.IsInf(float64(got), 0) || got == 0 {
		t.Errorf("%v: %g became %g", p, x, got)
	}
}

// TestNotFinite has the encodings that a peer must not send.
func TestNotFinite(t *testing.T) {
	tests := []struct {
		p    Precision
		at   int
		bad  []byte
		good []byte
	}{
		{F16, 2, []byte{0x00, 0x7c}, []byte{0xff, 0x7b}},
		{F16, 2, []byte{0x01, 0xfc}, []byte{0xff, 0xfb}},
		{BF16, 6, []byte{0x80, 0x7f}, []byte{0x7f, 0x7f}},
		{BF16, 6, []byte{0xc0, 0xff}, []byte{0x7f, 0xff}},
		{Q8, 0, []byte{0x00, 0x7c}, []byte{0xff, 0x7b}},
		{Q8, 34, []byte{0x80, 0x7f}, []byte{0xff, 0x7b}},      // of the short second block
		{Q8, 34 + 10, []byte{0xc0, 0xff}, []byte{0xff, 0xfb}}, // of the second row
	}
	for _, test := range tests {
		const width = 40
		b := make([]byte, test.p.size(2, width))
		if !test.p.finite(b, width) {
			t.Errorf("%v: zeros are not finite", test.p)
		}
		copy(b[test.at:], test.bad)
		if test.p.finite(b, width) {
			t.Errorf("%v: %x at %d is finite", test.p, test.bad, test.at)
		}
		copy(b[test.at:], test.good)
		if !test.p.finite(b, width) {
			t.Errorf("%v: %x at %d is not finite", test.p, test.good, test.at)
		}
	}
}

// TestHalves goes through all f16 that are finite.
func TestHalves(t *testing.T) {
	for h := range 1 << 16 {
		if h&0x7c00 == 0x7c00 {
			continue
		}
		x := fromHalf(uint16(h))
		if got := toHalf(x); got != uint16(h) {
			t.Fatalf("%#x is %g, which is %#x", h, x, got)
		}
		if h&0x7fff == 0x7bff || h >= 0x8000 {
			continue
		}
		next := fromHalf(uint16(h + 1))
		tie := (x + next) / 2
		even := uint16(h + h&1)
		if got := toHalf(tie); got != even {
			t.Fatalf("%g, between %#x and the next one, became %#x, want %#x", tie, h, got, even)
		}
		if lo, hi := toHalf(f32(bitsOf(tie)-1)), toHalf(f32(bitsOf(tie)+1)); lo != uint16(h) || hi != uint16(h+1) {
			t.Fatalf("beside the tie after %#x: %#x, %#x", h, lo, hi)
		}
	}
}

func TestPrecisionNames(t *testing.T) {
	for _, p := range precisions {
		if got, err := ParsePrecision(p.String()); err != nil || got != p {
			t.Errorf("%v is read as %v, %v", p, got, err)
		}
	}
	if _, err := ParsePrecision("f8"); err == nil {
		t.Error("f8 is a precision")
	}
	if got := Precision(9).String(); got != "precision 9" {
		t.Errorf("got %q", got)
	}
}

// FuzzRows: whatever is finite decodes to finite numbers, and those are encoded again as near as
// the encoding allows.
func FuzzRows(f *testing.F) {
	for _, p := range precisions {
		f.Add(slices.Repeat([]byte{1, 0x42, 0xfe}, 17), uint8(p), uint16(33))
	}
	f.Fuzz(func(t *testing.T, b []byte, precision uint8, w uint16) {
		p, width := Precision(precision), int(w)
		if p < F32 || p > Q8 || width == 0 {
			return
		}
		rows := len(b) / p.size(1, width)
		b = slices.Clone(b[:rows*p.size(1, width)])
		if !p.finite(b, width) {
			return
		}
		out := make([]float32, rows*width)
		p.get(out, b, width)
		for _, x := range out {
			if math.IsInf(float64(x), 0) || x != x {
				t.Fatalf("%v: %x decodes to %g", p, b, x)
			}
		}
		if p.fits(out) {
			checkNear(t, p, out, width)
		}
	})
}

// BenchmarkPrecision is 8 rows of 3072: the answer for a token.
func BenchmarkPrecision(b *testing.B) {
	const rows = 8
	src := make([]float32, rows*benchWidth)
	rng := rand.New(rand.NewPCG(1, 2))
	for i := range src {
		src[i] = float32(rng.NormFloat64())
	}
	for _, p := range precisions {
		dst := make([]byte, p.size(rows, benchWidth))
		b.Run(p.String()+"/put", func(b *testing.B) {
			b.SetBytes(int64(4 * len(src)))
			for b.Loop() {
				if !p.fits(src) {
					b.Fatal("does not fit")
				}
				p.put(dst, src, benchWidth)
			}
		})
		b.Run(p.String()+"/get", func(b *testing.B) {
			b.SetBytes(int64(4 * len(src)))
			for b.Loop() {
				if !p.finite(dst, benchWidth) {
					b.Fatal("is not finite")
				}
				p.get(src, dst, benchWidth)
			}
		})
	}
}
