package plan

import (
	"errors"
	"math"
	"time"
)

// Sample is a measured step of a model that runs whole on the CPU.
type Sample struct {
	Model   Model
	Rows    int // in the step, one of each sequence
	Filled  int // tokens of each sequence in its cache
	Seconds float64
}

// SpeedOf is the speed with which the samples are predicted best, by the least sum
// of squared relative errors. It takes three at the least: of two models that
// differ in size for one row, and of one for several.
func SpeedOf(samples []Sample) (Speed, error) {
	var rows [][]float64
	for _, s := range samples {
		if s.Seconds <= 0 || s.Rows < 1 {
			return Speed{}, errors.New("a sample without time or rows")
		}
		// The cost is linear in 1/Bytes, 1/Batch and Layer.
		var row []float64
		for _, unit := range []Speed{
			{Bytes: 1, Batch: math.Inf(1)}, {Bytes: math.Inf(1), Batch: 1},
			{Bytes: math.Inf(1), Batch: math.Inf(1), Layer: time.Second},
		} {
			row = append(row, s.cost(unit)/s.Seconds)
		}
		rows = append(rows, row)
	}
	x, ok := leastSquares(rows, 3)
	if !ok || x[0] <= 0 {
		return Speed{}, errors.New("the samples do not tell the speed of the machine: measure again when it is idle")
	}
	s := Speed{Bytes: 1 / x[0], Layer: time.Duration(x[2] * 1e9)}
	s.Batch = max(s.Bytes, 1/max(x[1], 1e-15))
	return s, nil
}

func (s Sample) cost(speed Speed) float64 {
	q := Query{Model: s.Model, Filled: s.Filled}
	f := q.lay(Node{CPU: speed}, load{Whole, q.all(), true}, len(s.Model.Layers))
	c := q.time(f, float64(s.Rows))
	return c.total()
}

// CallSample is a measured step of one model, once whole and once with its experts
// in another process of the same machine.
type CallSample struct {
	Model         Model
	Rows          int
	Alone, Remote float64 // seconds
}

// CallOf is what asking another node costs: for a call, and the bytes per second of
// what goes to and fro. It takes two samples at the least, whose rows differ in size.
func CallOf(samples []CallSample) (call time.Duration, rate float64, err error) {
	var rows [][]float64
	for _, s := range samples {
		q := Query{Model: s.Model}
		var bytes float64
		for _, l := range s.Model.Layers {
			if l.Expert > 0 {
				bytes += float64(s.Rows) * q.rowBytes() * float64(1+l.Used)
			}
		}
		calls := float64(s.Model.moe(q.all()))
		if more := s.Remote - s.Alone; more > 0 && calls > 0 {
			rows = append(rows, []float64{calls / more, bytes / more})
		}
	}
	x, ok := leastSquares(rows, 2)
	if !ok || len(rows) < 2 {
		return 0, 0, errors.New("the samples do not tell what a call costs: measure again when the machine is idle")
	}
	return time.Duration(x[0] * 1e9), 1 / max(x[1], 1e-12), nil
}

// leastSquares finds x >= 0 with rows · x nearest to 1, dropping what would be
// negative.
func leastSquares(rows [][]float64, n int) ([]float64, bool) {
	var use []int
	for i := range n {
		use = append(use, i)
	}
	for len(use) > 0 {
		x, ok := normalEquations(rows, use)
		if !ok {
			return nil, false
		}
		least := 0
		for i := range x {
			if x[i] < x[least] {
				least = i
			}
		}
		if x[least] >= 0 {
			all := make([]float64, n)
			for i, u := range use {
				all[u] = x[i]
			}
			return all, true
		}
		use = append(use[:least:least], use[least+1:]...)
	}
	return nil, false
}

// normalEquations solves for the columns in use, by Gauss.
func normalEquations(rows [][]float64, use []int) ([]float64, bool) {
	n := len(use)
	m := make([][]float64, n)
	for i := range n {
		m[i] = make([]float64, n+1)
		for _, r := range rows {
			for j := range n {
				m[i][j] += r[use[i]] * r[use[j]]
			}
			m[i][n] += r[use[i]]
		}
	}
	for i := range n {
		// Columns differ in unit by ten orders: the pivot is compared with its own sum.
		pivot := m[i][i]
		own := 0.0
		for _, r := range rows {
			own += r[use[i]] * r[use[i]]
		}
		if !(pivot > own*1e-9) {
			return nil, false
		}
		for k := range n {
			if k == i {
				continue
			}
			f := m[k][i] / pivot
			for j := i; j <= n; j++ {
				m[k][j] -= f * m[i][j]
			}
		}
	}
	x := make([]float64, n)
	for i := range n {
		x[i] = m[i][n] / m[i][i]
	}
	return x, true
}
