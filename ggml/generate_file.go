//go:build cgo

package ggml

// #include <stdlib.h>
// #include "ggml.h"
// #include "gguf.h"
import "C"

import (
	"errors"
	"fmt"
	"os"
	"unsafe"

	"kvasird/ggml/gguf"
)

// ggufFile is the header of a GGUF in the making.
type ggufFile struct{ ctx *C.struct_gguf_context }

func newGGUF() *ggufFile { return &ggufFile{ctx: C.gguf_init_empty()} }

func (f *ggufFile) free() { C.gguf_free(f.ctx) }

func (f *ggufFile) set(key string, value any) error {
	k := C.CString(key)
	defer C.free(unsafe.Pointer(k))
	switch v := value.(type) {
	case uint32:
		C.gguf_set_val_u32(f.ctx, k, C.uint32_t(v))
	case float32:
		C.gguf_set_val_f32(f.ctx, k, C.float(v))
	case bool:
		C.gguf_set_val_bool(f.ctx, k, C.bool(v))
	case string:
		s := C.CString(v)
		defer C.free(unsafe.Pointer(s))
		C.gguf_set_val_str(f.ctx, k, s)
	case []uint32:
		setArray(f, k, C.GGUF_TYPE_UINT32, v)
	case []bool:
		setArray(f, k, C.GGUF_TYPE_BOOL, v)
	case []uint64:
		setArray(f, k, C.GGUF_TYPE_UINT64, v)
	case []float32:
		setArray(f, k, C.GGUF_TYPE_FLOAT32, v)
	case []string:
		setStrings(f, k, v)
	default:
		return fmt.Errorf("metadata %q is a %T, which GGUF cannot hold here", key, value)
	}
	return nil
}

func setArray[T any](f *ggufFile, key *C.char, kind C.enum_gguf_type, v []T) {
	C.gguf_set_arr_data(f.ctx, key, kind, unsafe.Pointer(unsafe.SliceData(v)), C.size_t(len(v)))
}

func setStrings(f *ggufFile, key *C.char, v []string) {
	// A C array, since a Go one may not hold pointers for C to follow.
	list := (**C.char)(C.calloc(C.size_t(max(len(v), 1)), C.size_t(unsafe.Sizeof(key))))
	defer C.free(unsafe.Pointer(list))
	at := unsafe.Slice(list, len(v))
	for i, s := range v {
		at[i] = C.CString(s)
		defer C.free(unsafe.Pointer(at[i]))
	}
	C.gguf_set_arr_str(f.ctx, key, list, C.size_t(len(v)))
}

// addTensors puts the tensors' names, shapes and types into the header.
func (f *ggufFile) addTensors(tensors []generated) error {
	ctx := C.ggml_init(C.struct_ggml_init_params{
		mem_size: C.ggml_tensor_overhead() * C.size_t(len(tensors)+1),
		no_alloc: true,
	})
	if ctx == nil {
		return errors.New("out of memory for the tensor index")
	}
	defer C.ggml_free(ctx)
	for _, t := range tensors {
		if t.ne[0]%t.kind.BlockSize() != 0 {
			return fmt.Errorf("tensor %s: rows of %d are no multiple of %d, the block of %s; choose other sizes or another type",
				t.name, t.ne[0], t.kind.BlockSize(), t.kind)
		}
		ne := [4]C.int64_t{C.int64_t(t.ne[0]), C.int64_t(t.ne[1]), C.int64_t(t.ne[2]), C.int64_t(t.ne[3])}
		tensor := C.ggml_new_tensor(ctx, C.enum_ggml_type(t.kind), 4, &ne[0])
		name := C.CString(t.name)
		C.ggml_set_name(tensor, name)
		C.free(unsafe.Pointer(name))
		C.gguf_add_tensor(f.ctx, tensor)
	}
	return nil
}

// write makes the file: header, then the data of every tensor at the offset
// that the header gives it, but for those that cfg leaves out.
func (f *ggufFile) write(path string, tensors []generated, cfg GenerateConfig) (err error) {
	if err := f.addTensors(tensors); err != nil {
		return err
	}
	header := make([]byte, C.gguf_get_meta_size(f.ctx))
	C.gguf_get_meta_data(f.ctx, unsafe.Pointer(&header[0]))
	out, err := os.Create(path)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, out.Close()) }()
	if _, err := out.Write(header); err != nil {
		return err
	}
	end := int64(len(header))
	for i, t := range tensors {
		offset := int64(len(header)) + int64(C.gguf_get_tensor_offset(f.ctx, C.int64_t(i)))
		if !cfg.Holes || gguf.InBackbone(t.name) {
			if err := t.fill(out, offset, cfg.Seed, max(cfg.Threads, 1)); err != nil {
				return fmt.Errorf("tensor %s: %w", t.name, err)
			}
		}
		size := int64(C.gguf_get_tensor_size(f.ctx, C.int64_t(i)))
		alignment := int64(C.gguf_get_alignment(f.ctx))
		end = (offset + size + alignment - 1) / alignment * alignment
	}
	return out.Truncate(end) // the padding of the last tensor belongs to the file
}
