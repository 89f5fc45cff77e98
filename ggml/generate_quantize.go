//go:build cgo

package ggml

// #include <stdlib.h>
// #include "llama.h"
import "C"

import (
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"unsafe"

	"kvasird/ggml/gguf"
	"kvasird/ggml/tensor"
)

// fileTypes are llama.cpp's names for files that are mostly of one type.
var fileTypes = map[tensor.DType]C.enum_llama_ftype{
	tensor.F16: C.LLAMA_FTYPE_MOSTLY_F16, tensor.BF16: C.LLAMA_FTYPE_MOSTLY_BF16,
	tensor.Q4_0: C.LLAMA_FTYPE_MOSTLY_Q4_0, tensor.Q4_1: C.LLAMA_FTYPE_MOSTLY_Q4_1,
	tensor.Q5_0: C.LLAMA_FTYPE_MOSTLY_Q5_0, tensor.Q5_1: C.LLAMA_FTYPE_MOSTLY_Q5_1,
	tensor.Q8_0: C.LLAMA_FTYPE_MOSTLY_Q8_0, tensor.Q2_K: C.LLAMA_FTYPE_MOSTLY_Q2_K,
	tensor.Q3_K: C.LLAMA_FTYPE_MOSTLY_Q3_K_M, tensor.Q4_K: C.LLAMA_FTYPE_MOSTLY_Q4_K_M,
	tensor.Q5_K: C.LLAMA_FTYPE_MOSTLY_Q5_K_M, tensor.Q6_K: C.LLAMA_FTYPE_MOSTLY_Q6_K,
	tensor.IQ4NL: C.LLAMA_FTYPE_MOSTLY_IQ4_NL, tensor.IQ4XS: C.LLAMA_FTYPE_MOSTLY_IQ4_XS,
	tensor.TQ1_0: C.LLAMA_FTYPE_MOSTLY_TQ1_0, tensor.TQ2_0: C.LLAMA_FTYPE_MOSTLY_TQ2_0,
	tensor.MXFP4: C.LLAMA_FTYPE_MOSTLY_MXFP4_MOE,
}

// QuantizeModel writes a copy of an unquantised model with llama.cpp's own
// quantiser: every expert matrix exactly of type t, the other matrices too,
// but for embedding and output, which are Q8_0 if t is a quantised type. It is
// an error if the widths of the experts do not allow t. On an error dst is
// removed.
func (rt *Runtime) QuantizeModel(src, dst string, t string, threads int) error {
	want, err := tensor.ParseDType(t)
	if err != nil {
		return fmt.Errorf("quantise %s: %w", src, err)
	}
	fileType, ok := fileTypes[want]
	if !ok {
		return fmt.Errorf("quantise %s: no file can be mostly %s, want one of %v", src, want, slices.Sorted(maps.Keys(fileTypes)))
	}
	params := C.llama_model_quantize_default_params()
	params.nthread = C.int32_t(max(threads, 1))
	params.ftype = fileType
	params.pure = true
	if want != tensor.F16 && want != tensor.BF16 {
		params.token_embedding_type = C.GGML_TYPE_Q8_0
		params.output_tensor_type = C.GGML_TYPE_Q8_0
	}
	from, to := C.CString(src), C.CString(dst)
	defer C.free(unsafe.Pointer(from))
	defer C.free(unsafe.Pointer(to))
	loadMu.Lock()
	logs.clear()
	failed := C.llama_model_quantize(from, to, &params) != 0
	if failed {
		err = logs.failure("quantise " + src)
	}
	loadMu.Unlock()
	if !failed {
		err = expertsAre(dst, want)
	}
	if err != nil {
		os.Remove(dst)
	}
	return err
}

// expertsAre checks that the quantiser did not fall back to another type.
func expertsAre(path string, want tensor.DType) error {
	m, err := gguf.OpenModel(path)
	if err != nil {
		return err
	}
	defer m.Close()
	for _, layer := range m.ExpertLayers() {
		tensors, err := m.ExpertTensors(layer, gguf.Range{End: m.Experts()})
		if err != nil {
			return err
		}
		for _, e := range tensors {
			if strings.HasSuffix(e.Name, ".weight") && e.DType != want {
				return fmt.Errorf("quantise %s: %s became %s, want %s: its rows of %d are no multiple of %d",
					path, e.Name, e.DType, want, e.Shape[0], want.BlockSize())
			}
		}
	}
	return nil
}
