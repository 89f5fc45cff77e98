//go:build cgo

package ggml

/*
#include <stdlib.h>
#include <gguf.h>
*/
import "C"

import (
	"fmt"
	"unsafe"
)

// ggufDump is what ggml's own parser says of a GGUF file. It exists to be compared
// with package gguf.
type ggufDump struct {
	version               uint32
	alignment, dataOffset uint64
	keys                  []ggufDumpKey
	tensors               []ggufDumpTensor
}

// ggufDumpKey is a metadata entry; raw holds numbers as the machine stores them, strs
// the strings, cut at a zero byte.
type ggufDumpKey struct {
	key       string
	typ, elem uint32 // elem is typ unless typ is array
	raw       []byte
	strs      []string
}

type ggufDumpTensor struct {
	name   string
	dtype  uint32
	ne     [4]int64
	offset uint64 // from the start of the data
	bytes  uint64
}

// dumpGGUF reads the header of a file with ggml.
func dumpGGUF(path string) (*ggufDump, error) {
	cpath := C.CString(path)
	defer C.free(unsafe.Pointer(cpath))
	ctx := C.gguf_init_from_file(cpath, C.struct_gguf_init_params{no_alloc: true})
	if ctx == nil {
		return nil, fmt.Errorf("ggml does not read %s", path)
	}
	defer C.gguf_free(ctx)
	d := &ggufDump{
		version:    uint32(C.gguf_get_version(ctx)),
		alignment:  uint64(C.gguf_get_alignment(ctx)),
		dataOffset: uint64(C.gguf_get_data_offset(ctx)),
	}
	for i := range C.gguf_get_n_kv(ctx) {
		d.keys = append(d.keys, dumpGGUFKey(ctx, i))
	}
	for i := range C.gguf_get_n_tensors(ctx) {
		ne := (*[4]int64)(unsafe.Pointer(C.gguf_get_tensor_ne(ctx, i)))
		d.tensors = append(d.tensors, ggufDumpTensor{
			C.GoString(C.gguf_get_tensor_name(ctx, i)), uint32(C.gguf_get_tensor_type(ctx, i)), *ne,
			uint64(C.gguf_get_tensor_offset(ctx, i)), uint64(C.gguf_get_tensor_size(ctx, i)),
		})
	}
	return d, nil
}

func dumpGGUFKey(ctx *C.struct_gguf_context, i C.int64_t) ggufDumpKey {
	typ := C.gguf_get_kv_type(ctx, i)
	k := ggufDumpKey{key: C.GoString(C.gguf_get_key(ctx, i)), typ: uint32(typ), elem: uint32(typ)}
	switch typ {
	case C.GGUF_TYPE_STRING:
		k.strs = []string{C.GoString(C.gguf_get_val_str(ctx, i))}
		return k
	case C.GGUF_TYPE_ARRAY:
	default:
		k.raw = C.GoBytes(C.gguf_get_val_data(ctx, i), C.int(ggufTypeSize(k.elem)))
		return k
	}
	elem := C.gguf_get_arr_type(ctx, i)
	k.elem = uint32(elem)
	n := C.gguf_get_arr_n(ctx, i)
	if elem != C.GGUF_TYPE_STRING {
		k.raw = C.GoBytes(C.gguf_get_arr_data(ctx, i), C.int(n)*C.int(ggufTypeSize(k.elem)))
		return k
	}
	for j := range n {
		k.strs = append(k.strs, C.GoString(C.gguf_get_arr_str(ctx, i, j)))
	}
	return k
}

// ggufTypeSize returns the bytes of a number or bool.
func ggufTypeSize(typ uint32) int {
	switch typ {
	case C.GGUF_TYPE_UINT16, C.GGUF_TYPE_INT16:
		return 2
	case C.GGUF_TYPE_UINT32, C.GGUF_TYPE_INT32, C.GGUF_TYPE_FLOAT32:
		return 4
	case C.GGUF_TYPE_UINT64, C.GGUF_TYPE_INT64, C.GGUF_TYPE_FLOAT64:
		return 8
	}
	return 1
}
