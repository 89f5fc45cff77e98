package ggml

import (
	"bytes"
	"encoding/hex"
	"errors"
	"math"
	"strings"
	"testing"
)

// swiglu is the program of most architectures: gate, up → SWIGLU → down.
func swiglu(width, ff uint32) *Program {
	return &Program{Version: programVersion, RowWidth: width, Ops: []Op{
		{Code: OpMatMul, Weight: "ffn_gate_exps.weight", Width: ff},
		{Code: OpMatMul, Weight: "ffn_up_exps.weight", Width: ff},
		{Code: OpGLU, A: 1, B: 2, Act: ActSwiGLU, Width: ff},
		{Code: OpMatMul, A: 3, Weight: "ffn_down_exps.weight", Width: width},
	}}
}

func TestProgramLiteralBytes(t *testing.T) {
	p := &Program{Version: 1, RowWidth: 4, Ops: []Op{
		{Code: OpMatMul, Weight: "w", Width: 8},
		{Code: OpClamp, A: 1, F: [2]uint32{math.Float32bits(-1), math.Float32bits(2)}, Width: 8},
	}}
	got, err := p.Marshal()
	if err != nil {
		t.Fatal(err)
	}
	// {1: 1, 2: 4, 3: [{1: 1, 4: "w", 8: [0,0], 9: h'0000', 11: 8}, …]}
	const want = "a301010204" + "0382" +
		"a5" + "0101" + "046177" + "08820000" + "09420000" + "0b08" +
		"a5" + "0108" + "0201" + "08821abf8000001a40000000" + "09420000" + "0b08"
	if hex.EncodeToString(got) != want {
		t.Errorf("got  %x\nwant %s", got, want)
	}
	back, err := ParseProgram(got)
	if err != nil {
		t.Fatal(err)
	}
	again, err := back.Marshal()
	if err != nil || !bytes.Equal(got, again) {
		t.Errorf("parsed and written again: %x, %v", again, err)
	}
}

func TestProgramRefused(t *testing.T) {
	tests := []struct {
		name string
		edit func(p *Program)
		want string
	}{
		{"version", func(p *Program) { p.Version = 9 }, "version 9"},
		{"no row", func(p *Program) { p.RowWidth = 0 }, "row width 0"},
		{"huge row", func(p *Program) { p.RowWidth = 1 << 30 }, "row width"},
		{"no ops", func(p *Program) { p.Ops = nil }, "0 operations"},
		{"many ops", func(p *Program) {
			for len(p.Ops) <= maxProgramOps {
				p.Ops = append(p.Ops, p.Ops[0])
			}
		}, "array"},
		{"op outside the set", func(p *Program) { p.Ops[2].Code = 77 }, "code 77 is not in the set"},
		{"value of the future", func(p *Program) { p.Ops[0].A = 3 }, "value 3 does not exist yet"},
		{"own value", func(p *Program) { p.Ops[2].B = 3 }, "value 3 does not exist yet"},
		{"zero width", func(p *Program) { p.Ops[0].Width = 0 }, "width 0"},
		{"huge width", func(p *Program) { p.Ops[0].Width = 1 << 20 }, "width 1048576"},
		{"weight missing", func(p *Program) { p.Ops[0].Weight = "" }, "weight name"},
		{"weight too many", func(p *Program) { p.Ops[2].Weight = "x" }, "weight name"},
		{"weight name long", func(p *Program) { p.Ops[0].Weight = strings.Repeat("x", 99) }, "weight name"},
		{"halves differ", func(p *Program) { p.Ops[0].Width = 4 }, "gate is 4 wide and up 8"},
		{"odd halves", func(p *Program) { p.Ops[0].Width = 7; p.Ops[2].B, p.Ops[2].Fused = 0, true }, "odd width 7"},
		{"halves clamped", func(p *Program) { p.Ops[2].Fused, p.Ops[2].Act = true, ActSwiGLUClamp }, "not halves"},
		{"activation", func(p *Program) { p.Ops[2].Act = ActSiLU }, "activation 20"},
		{"unary activation", func(p *Program) { p.Ops[2] = Op{Code: OpUnary, A: 1, Act: 99, Width: 8} }, "activation 99"},
		{"precision", func(p *Program) { p.Ops[0].Prec[0] = 200 }, "precision"},
		{"factor", func(p *Program) { p.Ops[2] = Op{Code: OpMul, A: 1, Width: 8} }, "factor is 4 wide"},
		{"view past the end", func(p *Program) { p.Ops[2] = Op{Code: OpView, A: 1, Offset: 4, Width: 8} }, "view [4, +8) of 8"},
		{"view scaled", func(p *Program) {
			p.Ops[1] = Op{Code: OpView, A: 1, Width: 4}
			p.Ops[2] = Op{Code: OpScale, A: 2, Width: 4}
		}, "a view is only for"},
		{"view as result", func(p *Program) { p.Ops[3] = Op{Code: OpView, A: 3, Width: 4} }, "a view is only for"},
		{"width changed", func(p *Program) { p.Ops[2].Width = 9 }, "width is 9, 8 expected"},
		{"pick wide", func(p *Program) { p.Ops[2] = Op{Code: OpPick, Weight: "s", Width: 2} }, "width is 2, 1 expected"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			p := swiglu(4, 8)
			tt.edit(p)
			b, err := p.Marshal()
			if err != nil {
				t.Fatal(err)
			}
			if _, err = ParseProgram(b); !errors.Is(err, ErrProgram) || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("got %v, want %q", err, tt.want)
			}
		})
	}
	for name, b := range map[string][]byte{
		"empty": {}, "garbled": {0xff, 0x00}, "trailing": append(must(swiglu(4, 8).Marshal()), 0),
		"too long": make([]byte, MaxProgramBytes+1), "unknown key": {0xa1, 0x18, 0x63, 0x01},
	} {
		if _, err := ParseProgram(b); !errors.Is(err, ErrProgram) {
			t.Errorf("%s: got %v, want ErrProgram", name, err)
		}
	}
}

func TestProgramAgainstWeights(t *testing.T) {
	weights := func() map[string]WeightShape {
		return map[string]WeightShape{
			"ffn_gate_exps.weight": {In: 4, Out: 8, Dims: 3}, "ffn_up_exps.weight": {In: 4, Out: 8, Dims: 3},
			"ffn_down_exps.weight": {In: 8, Out: 4, Dims: 3},
		}
	}
	p := swiglu(4, 8)
	if err := p.CheckWeights(weights()); err != nil {
		t.Error(err)
	}
	for want, edit := range map[string]func(map[string]WeightShape){
		"wants ffn_down_exps.weight":        func(w map[string]WeightShape) { delete(w, "ffn_down_exps.weight") },
		"takes rows of 5, given 4":          func(w map[string]WeightShape) { w["ffn_up_exps.weight"] = WeightShape{5, 8, 3} },
		"gives 9, the program says 8":       func(w map[string]WeightShape) { w["ffn_gate_exps.weight"] = WeightShape{4, 9, 3} },
		"2 dimensions, 3 expected":          func(w map[string]WeightShape) { w["ffn_gate_exps.weight"] = WeightShape{1, 8, 2} },
		"ffn_gate_exps.weight: 0 dimension": func(w map[string]WeightShape) { w["ffn_gate_exps.weight"] = WeightShape{} },
	} {
		w := weights()
		edit(w)
		if err := p.CheckWeights(w); !errors.Is(err, ErrProgram) || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %q", err, want)
		}
	}
}

func FuzzParseProgram(f *testing.F) {
	f.Add(must(swiglu(4, 8).Marshal()))
	f.Add([]byte{0xa0})
	f.Fuzz(func(t *testing.T, b []byte) {
		p, err := ParseProgram(b)
		if err != nil {
			return
		}
		p.CheckWeights(map[string]WeightShape{"ffn_up_exps.weight": {4, 8, 3}})
		again, err := p.Marshal()
		if err != nil {
			t.Fatal(err)
		}
		if _, err := ParseProgram(again); err != nil {
			t.Fatalf("a program that was read is refused when written again: %v", err)
		}
	})
}
