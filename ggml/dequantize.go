//go:build cgo

package ggml

// #include <ggml.h>
//
// static void kv_to_float(enum ggml_type type, const void * src, float * dst, int64_t n) {
//     ggml_get_type_traits(type)->to_float(src, dst, n);
// }
//
// static bool kv_has_to_float(enum ggml_type type) {
//     return ggml_get_type_traits(type)->to_float != NULL;
// }
import "C"

import (
	"fmt"
	"unsafe"

	"kvasird/ggml/tensor"
)

// typeTraits is what ggml says of a type: its name and its blocks.
type typeTraits struct {
	name         string
	elems, bytes int64
}

// traitsOf returns ggml's own table entry. It exists to be compared with package tensor.
func traitsOf(t tensor.DType) typeTraits {
	x := C.ggml_get_type_traits(C.enum_ggml_type(t))
	return typeTraits{C.GoString(x.type_name), int64(x.blck_size), int64(x.type_size)}
}

// dequantize turns src into float32 elements with ggml's own code, which is the
// measure of package tensor's. The type must have a conversion, and src the bytes of
// len(dst) elements.
func dequantize(t tensor.DType, dst []float32, src []byte) {
	C.kv_to_float(C.enum_ggml_type(t), unsafe.Pointer(unsafe.SliceData(src)), (*C.float)(unsafe.SliceData(dst)), C.int64_t(len(dst)))
}

// dequantizeRow is dequantize for any type that the library's GET_ROWS takes; src has
// the bytes of len(dst) elements.
func dequantizeRow(t tensor.DType, dst []float32, src []byte) error {
	switch {
	case t == tensor.F32:
		copy(dst, unsafe.Slice((*float32)(unsafe.Pointer(unsafe.SliceData(src))), len(dst)))
	case bool(C.kv_has_to_float(C.enum_ggml_type(t))):
		dequantize(t, dst, src)
	default:
		return fmt.Errorf("rows of type %v cannot be read", t)
	}
	return nil
}
