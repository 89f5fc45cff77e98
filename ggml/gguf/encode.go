package gguf

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"math"

	"kvasird/ggml/tensor"
)

// outTensor is a tensor to be written: its entry and where its bytes come from.
type outTensor struct {
	name  string
	dtype tensor.DType
	shape tensor.Shape
	src   io.ReaderAt // nil for zeros
	off   int64       // in src
}

// newImage lays out a version 3 file: metadata, tensor index, padded data.
func newImage(meta Metadata, alignment int64, tensors []outTensor) (*Image, error) {
	if alignment != defaultAlignment {
		meta.set(alignmentKey, NewValue(uint32(alignment)))
	}
	header, data, err := encodeHeader(meta, alignment, tensors)
	if err != nil {
		return nil, err
	}
	im := &Image{}
	im.add(segment{src: bytes.NewReader(header), n: int64(len(header))})
	for i, t := range tensors {
		n, _ := t.dtype.Bytes(t.shape) // was checked when the header was made
		im.add(segment{src: t.src, off: t.off, n: n, hole: t.src == nil, expert: !InBackbone(t.name)})
		im.add(segment{n: data[i] - n}) // padding
	}
	return im, nil
}

// encodeHeader returns the bytes before the data and the padded size of each tensor.
func encodeHeader(meta Metadata, alignment int64, tensors []outTensor) (header []byte, padded []int64, err error) {
	b := []byte(magic)
	b = binary.LittleEndian.AppendUint32(b, 3)
	b = binary.LittleEndian.AppendUint64(b, uint64(len(tensors)))
	b = binary.LittleEndian.AppendUint64(b, uint64(meta.Len()))
	for _, kv := range meta.list {
		b = appendString(b, kv.Key)
		b = appendValue(b, kv.Value)
	}
	next := uint64(0)
	for _, t := range tensors {
		n, err := t.dtype.Bytes(t.shape)
		if err != nil {
			return nil, nil, fmt.Errorf("gguf: tensor %q: %w", t.name, err)
		}
		b = appendString(b, t.name)
		b = binary.LittleEndian.AppendUint32(b, uint32(t.shape.Dims()))
		for _, d := range t.shape[:t.shape.Dims()] {
			b = binary.LittleEndian.AppendUint64(b, uint64(d))
		}
		b = binary.LittleEndian.AppendUint32(b, uint32(t.dtype))
		b = binary.LittleEndian.AppendUint64(b, next)
		size := pad(uint64(n), uint64(alignment))
		if next+size > math.MaxInt64/2 {
			return nil, nil, fmt.Errorf("gguf: tensor %q: the file would be larger than %d bytes", t.name, int64(math.MaxInt64/2))
		}
		padded = append(padded, int64(size))
		next += size
	}
	if len(tensors) > 0 {
		b = append(b, make([]byte, pad(uint64(len(b)), uint64(alignment))-uint64(len(b)))...)
	}
	return b, padded, nil
}

func appendString(b []byte, s string) []byte {
	b = binary.LittleEndian.AppendUint64(b, uint64(len(s)))
	return append(b, s...)
}

func appendValue(b []byte, v Value) []byte {
	if v.arr {
		b = binary.LittleEndian.AppendUint32(b, uint32(Array))
	}
	b = binary.LittleEndian.AppendUint32(b, uint32(v.typ))
	if v.arr {
		b = binary.LittleEndian.AppendUint64(b, uint64(v.Len()))
	}
	if v.typ == String {
		for _, s := range v.strs {
			b = appendString(b, s)
		}
		return b
	}
	if v.raw == "" && !v.arr {
		return append(b, make([]byte, valueSizes[v.typ])...) // the zero Value
	}
	return append(b, v.raw...)
}
