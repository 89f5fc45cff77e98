package ggml

import (
	"errors"
	"fmt"
	"math"

	"github.com/fxamacker/cbor/v2"
)

// Limits of an encoded program. The longest known one (two scaled, biased
// banks) has 14 operations.
const (
	MaxProgramBytes = 8 << 10
	maxProgramOps   = 32
	maxRowWidth     = 1 << 18
	maxWeightName   = 48
	maxPrecision    = 40 // GGML_PREC_Q4, the loosest
)

// ErrProgram is wrapped by every refusal of an expert program.
var ErrProgram = errors.New("expert program refused")

// OpCode is an operation of an expert program. The numbers are on the wire:
// they are only ever added.
type OpCode uint8

// The closed set. A value has Width f32 per pair; "expert" is the pair's.
const (
	OpMatMul OpCode = 1 // W[expert] · A, a weight [in, out, experts]
	OpBias   OpCode = 2 // A + b[expert], a weight [width, experts]
	OpPick   OpCode = 3 // s[expert], a weight [experts]; one f32 per pair
	OpGLU    OpCode = 4 // act(A) * B; B = 0 and Flags&GLUFused: the halves of A
	OpUnary  OpCode = 5 // act(A)
	OpMul    OpCode = 6 // A * B, B as wide as A or one f32
	OpScale  OpCode = 7 // A*F[0] + F[1]
	OpClamp  OpCode = 8 // min(max(A, F[0]), F[1])
	OpSqr    OpCode = 9 // A*A
	OpView   OpCode = 10
	opEnd    OpCode = 11
)

// Activation is the function of an OpGLU or OpUnary. The numbers are on the wire.
type Activation uint8

const (
	ActSwiGLU      Activation = 1 // silu(a)*b
	ActGeGLU       Activation = 2 // gelu (tanh form)
	ActReGLU       Activation = 3
	ActSwiGLUOAI   Activation = 4 // F[0] = alpha, F[1] = limit
	ActGeGLUErf    Activation = 5
	ActGeGLUQuick  Activation = 6
	ActSwiGLUClamp Activation = 7 // F[1] = limit
	ActSiLU        Activation = 20
	ActGELU        Activation = 21
	ActReLU        Activation = 22
	ActTanh        Activation = 23
	ActSigmoid     Activation = 24
	ActGELUErf     Activation = 25
	ActGELUQuick   Activation = 26
)

func (a Activation) glu() bool   { return a >= ActSwiGLU && a <= ActSwiGLUClamp }
func (a Activation) unary() bool { return a >= ActSiLU && a <= ActGELUQuick }

// Op is one step. Value 0 is the input row, value i+1 the result of Ops[i].
type Op struct {
	Code   OpCode     `cbor:"1,keyasint"`
	A      uint8      `cbor:"2,keyasint,omitempty"`
	B      uint8      `cbor:"3,keyasint,omitempty"`
	Weight string     `cbor:"4,keyasint,omitempty"` // tensor name after "blk.L."
	Act    Activation `cbor:"5,keyasint,omitempty"`
	Fused  bool       `cbor:"6,keyasint,omitempty"` // OpGLU: halves of A
	Swap   bool       `cbor:"7,keyasint,omitempty"` // OpGLU, Fused: the second half is activated
	F      [2]uint32  `cbor:"8,keyasint,omitempty"` // float parameters, IEEE 754 bits
	Prec   [2]uint8   `cbor:"9,keyasint,omitempty"` // OpMatMul: ggml precision of sum and of A
	Offset uint32     `cbor:"10,keyasint,omitempty"`
	Width  uint32     `cbor:"11,keyasint"` // f32 per pair of the result
}

func (o *Op) float(i int) float32 { return math.Float32frombits(o.F[i]) }

// Program is what a layer's graph does with one row and one expert.
//
// Encoding: deterministic CBOR (RFC 8949 §4.2.1), integer keys, at most
// MaxProgramBytes. Floats are carried as their bits. Version history: 1, this.
type Program struct {
	Version  uint8  `cbor:"1,keyasint"`
	RowWidth uint32 `cbor:"2,keyasint"`
	Ops      []Op   `cbor:"3,keyasint"` // the last one is the result
}

const programVersion = 1

var (
	programEnc = must(cbor.CoreDetEncOptions().EncMode())
	programDec = must(cbor.DecOptions{
		DupMapKey: cbor.DupMapKeyEnforcedAPF, IndefLength: cbor.IndefLengthForbidden,
		ExtraReturnErrors: cbor.ExtraDecErrorUnknownField, TagsMd: cbor.TagsForbidden,
		MaxArrayElements: maxProgramOps, MaxMapPairs: 16, MaxNestedLevels: 6,
	}.DecMode())
)

func must[T any](v T, err error) T {
	if err != nil {
		panic(err) // constant options
	}
	return v
}

// OutWidth is the f32 per pair of the result.
func (p *Program) OutWidth() int { return int(p.Ops[len(p.Ops)-1].Width) }

// Marshal gives the one encoding of p.
func (p *Program) Marshal() ([]byte, error) { return programEnc.Marshal(p) }

// ParseProgram decodes and checks everything that can be checked without the
// weights: the op set, the order of values, widths and parameters.
func ParseProgram(b []byte) (*Program, error) {
	if len(b) > MaxProgramBytes {
		return nil, fmt.Errorf("%w: %d bytes, at most %d", ErrProgram, len(b), MaxProgramBytes)
	}
	var p Program
	if err := programDec.Unmarshal(b, &p); err != nil {
		return nil, fmt.Errorf("%w: %v", ErrProgram, err)
	}
	if err := p.check(); err != nil {
		return nil, fmt.Errorf("%w: %v", ErrProgram, err)
	}
	return &p, nil
}

func (p *Program) check() error {
	switch {
	case p.Version != programVersion:
		return fmt.Errorf("version %d, this build knows %d", p.Version, programVersion)
	case p.RowWidth == 0 || p.RowWidth > maxRowWidth:
		return fmt.Errorf("row width %d", p.RowWidth)
	case len(p.Ops) == 0 || len(p.Ops) > maxProgramOps:
		return fmt.Errorf("%d operations, 1 to %d allowed", len(p.Ops), maxProgramOps)
	}
	for i := range p.Ops {
		if err := p.checkOp(i); err != nil {
			return fmt.Errorf("operation %d: %w", i, err)
		}
	}
	return nil
}

// width of value v as seen by operation i; values of later operations do not exist yet.
func (p *Program) width(v uint8, i int) (uint32, error) {
	switch {
	case v == 0:
		return p.RowWidth, nil
	case int(v) <= i:
		return p.Ops[v-1].Width, nil
	}
	return 0, fmt.Errorf("value %d does not exist yet", v)
}

func (p *Program) isView(v uint8) bool {
	return v > 0 && int(v) <= len(p.Ops) && p.Ops[v-1].Code == OpView
}

func (p *Program) checkOp(i int) error {
	o := &p.Ops[i]
	if o.Code == 0 || o.Code >= opEnd {
		return fmt.Errorf("code %d is not in the set", o.Code)
	}
	if o.Width == 0 || o.Width > maxRowWidth {
		return fmt.Errorf("width %d", o.Width)
	}
	usesWeight := o.Code == OpMatMul || o.Code == OpBias || o.Code == OpPick
	if usesWeight != (o.Weight != "") || len(o.Weight) > maxWeightName {
		return fmt.Errorf("weight name %q", o.Weight)
	}
	if o.Code != OpGLU && (p.isView(o.A) || o.Code == OpMul && p.isView(o.B)) || o.Code == OpView && i == len(p.Ops)-1 {
		return errors.New("a view is only for the halves of a gated activation")
	}
	a, err := p.width(o.A, i)
	if err != nil {
		return err
	}
	b, err := p.width(o.B, i)
	if err != nil {
		return err
	}
	return o.checkWidths(a, b)
}

func (o *Op) checkWidths(a, b uint32) error {
	want := a
	switch o.Code {
	case OpMatMul:
		want = o.Width // known once the weight is
		if o.Prec[0] > maxPrecision || o.Prec[1] > maxPrecision {
			return fmt.Errorf("precision %d, %d", o.Prec[0], o.Prec[1])
		}
	case OpPick:
		want = 1
	case OpGLU:
		switch {
		case !o.Act.glu():
			return fmt.Errorf("activation %d is no gated one", o.Act)
		case o.Fused && (o.Act == ActSwiGLUOAI || o.Act == ActSwiGLUClamp):
			return fmt.Errorf("activation %d takes a gate and an up, not halves", o.Act)
		case o.Fused && a%2 != 0:
			return fmt.Errorf("odd width %d cannot be halved", a)
		case o.Fused:
			want = a / 2
		case a != b:
			return fmt.Errorf("gate is %d wide and up %d", a, b)
		}
	case OpUnary:
		if !o.Act.unary() {
			return fmt.Errorf("activation %d is not known", o.Act)
		}
	case OpMul:
		if b != a && b != 1 {
			return fmt.Errorf("factor is %d wide, %d or 1 expected", b, a)
		}
	case OpView:
		want = o.Width
		if uint64(o.Offset)+uint64(o.Width) > uint64(a) {
			return fmt.Errorf("view [%d, +%d) of %d", o.Offset, o.Width, a)
		}
	}
	if o.Width != want {
		return fmt.Errorf("width is %d, %d expected", o.Width, want)
	}
	return nil
}

// WeightShape is what a program must know of a weight: [In, Out, experts] for a
// matrix, [1, Out] per expert for a bias (In = 1), In = Out = 1 for a scale.
type WeightShape struct {
	In, Out int
	Dims    int // 3 matrix, 2 bias, 1 scale
}

// CheckWeights says whether the program fits the weights of a layer, by name
// after "blk.L.".
func (p *Program) CheckWeights(weights map[string]WeightShape) error {
	for i := range p.Ops {
		o := &p.Ops[i]
		if o.Weight == "" {
			continue
		}
		w, ok := weights[o.Weight]
		if !ok {
			return fmt.Errorf("%w: operation %d wants %s, which this slice does not have", ErrProgram, i, o.Weight)
		}
		if err := o.fits(w, p.mustWidth(o.A)); err != nil {
			return fmt.Errorf("%w: operation %d on %s: %v", ErrProgram, i, o.Weight, err)
		}
	}
	return nil
}

func (p *Program) mustWidth(v uint8) int {
	if v == 0 {
		return int(p.RowWidth)
	}
	return int(p.Ops[v-1].Width)
}

func (o *Op) fits(w WeightShape, a int) error {
	dims := map[OpCode]int{OpMatMul: 3, OpBias: 2, OpPick: 1}[o.Code]
	switch {
	case w.Dims != dims:
		return fmt.Errorf("%d dimensions, %d expected", w.Dims, dims)
	case o.Code == OpMatMul && w.In != a:
		return fmt.Errorf("takes rows of %d, given %d", w.In, a)
	case o.Code != OpPick && w.Out != int(o.Width):
		return fmt.Errorf("gives %d, the program says %d", w.Out, o.Width)
	}
	return nil
}
