//go:build cgo

package ggml

// #include <stdlib.h>
// #include "ggml.h"
import "C"

import (
	"fmt"
	"hash/fnv"
	"io"
	"math"
	"strings"
	"sync"
	"unsafe"

	"kvasird/ggml/tensor"
)

// chunkElements bounds what one thread holds of a tensor: 4 MiB of float32.
const chunkElements = 1 << 20

// distinctRows bounds the time that a large tensor takes: its first rows come
// again and again. The number is prime, so that no two experts are alike.
const distinctRows = 8191

// splitmix64 is a counter-based generator: value i needs no value before it,
// so the threads may share a tensor and the bytes stay the same.
func splitmix64(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// bell is close to a standard normal value: the sum of four uniform 16-bit
// values, whose variance is 1/3.
func bell(bits uint64) float32 {
	sum := bits&0xffff + bits>>16&0xffff + bits>>32&0xffff + bits>>48
	const unit = math.Sqrt2 * 1.2247448713915890 / 65536 // sqrt(3) / 2^16
	return (float32(sum) - 2*65535) * unit
}

// distribution is mean + deviation * bell, by the part that the tensor plays:
// rows of a unit norm leave a matrix as rows of a unit norm, whatever its size,
// so that deep and wide models stay finite and every layer counts.
func (t generated) distribution() (mean, deviation float32) {
	switch {
	case strings.HasSuffix(t.name, "ssm_a"):
		return -0.5, 0.1 // a decay: negative
	case strings.HasSuffix(t.name, "norm.weight"), strings.HasSuffix(t.name, "scale"), strings.HasPrefix(t.name, "rope_f"):
		return 1, 0.1
	case t.ne[1] == 1:
		return 0, 0.1
	default:
		return 0, float32(1 / math.Sqrt(float64(t.ne[0])))
	}
}

// fill writes the tensor's data at offset.
func (t generated) fill(out io.WriterAt, offset int64, seed uint64, threads int) error {
	h := fnv.New64a()
	io.WriteString(h, t.name)
	f := filler{tensor: t, out: out, offset: offset, key: splitmix64(seed ^ h.Sum64())}
	f.total = t.elements() / t.ne[0]
	f.mean, f.deviation = t.distribution()
	rows := min(f.total, distinctRows)
	perChunk := max(1, chunkElements/t.ne[0])
	var wg sync.WaitGroup
	errs := make([]error, threads)
	for w := range threads {
		wg.Go(func() {
			for row := int64(w) * perChunk; row < rows && errs[w] == nil; row += int64(threads) * perChunk {
				errs[w] = f.rows(row, min(perChunk, rows-row))
			}
		})
	}
	wg.Wait()
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

// filler makes the rows of one tensor.
type filler struct {
	tensor          generated
	out             io.WriterAt
	offset          int64
	total           int64 // rows
	key             uint64
	mean, deviation float32
}

// rows makes n rows and writes them wherever they come.
func (f *filler) rows(first, n int64) error {
	width := f.tensor.ne[0]
	values := make([]float32, n*width)
	start := f.key + uint64(first*width)
	for i := range values {
		values[i] = f.mean + f.deviation*bell(splitmix64(start+uint64(i)))
	}
	rowSize, err := f.tensor.kind.RowBytes(width)
	if err != nil {
		return err
	}
	data := unsafe.Slice((*byte)(unsafe.Pointer(&values[0])), 4*len(values))
	if f.tensor.kind != tensor.F32 {
		data = make([]byte, n*rowSize)
		C.ggml_quantize_chunk(C.enum_ggml_type(f.tensor.kind), (*C.float)(&values[0]), unsafe.Pointer(&data[0]), 0, C.int64_t(n), C.int64_t(width), nil)
	}
	for at := first; at < f.total; at += distinctRows {
		part := data[:min(n, f.total-at)*rowSize]
		if _, err := f.out.WriteAt(part, f.offset+at*rowSize); err != nil {
			return err
		}
	}
	return nil
}

// weightType finds a type by its name, such as "Q4_K" or "f16", and refuses
// those that cannot be made from random weights alone.
func weightType(name string) (tensor.DType, error) {
	t, err := tensor.ParseDType(name)
	if err != nil {
		return 0, err
	}
	switch t {
	case tensor.F32, tensor.F16, tensor.BF16:
		return t, nil
	case tensor.Q8_1, tensor.Q8_K:
		return 0, fmt.Errorf("%s is a type of activations, not of weights", t)
	}
	if !C.ggml_is_quantized(C.enum_ggml_type(t)) {
		return 0, fmt.Errorf("%s is not a type of weights", t)
	}
	if C.ggml_quantize_requires_imatrix(C.enum_ggml_type(t)) {
		return 0, fmt.Errorf("%s needs an importance matrix, which a random model does not have", t)
	}
	return t, nil
}
