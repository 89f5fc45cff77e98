//go:build cgo

package ggml

/*
#include <stdlib.h>
#include "image.h"
*/
import "C"

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime/cgo"
	"unsafe"

	"kvasird/ggml/gguf"
)

// imageReader is an image while the library reads it.
type imageReader struct {
	image *gguf.Image
	err   error // of the first read that failed
}

// imagesAsFiles is set where the C library has no files that are functions.
var imagesAsFiles = !bool(C.kv_has_images())

// loadImage loads a model from an image; nil without an error when the library has its
// own words for the failure.
func loadImage(image *gguf.Image, name string, params C.struct_llama_model_params) (*C.struct_llama_model, error) {
	if imagesAsFiles {
		return loadCopy(image, name, params)
	}
	r := &imageReader{image: image}
	h := cgo.NewHandle(r)
	defer h.Delete()
	c := C.kv_load_image(C.uintptr_t(h), C.int64_t(image.Size()), params)
	if r.err != nil {
		if c != nil {
			C.llama_model_free(c)
		}
		return nil, fmt.Errorf("load %s: %w", name, r.err)
	}
	return c, nil
}

//export kvImageRead
func kvImageRead(handle C.uintptr_t, dst *C.char, n, off C.int64_t) C.int64_t {
	r := cgo.Handle(handle).Value().(*imageReader)
	if hole := r.image.Hole(int64(off)); hole > 0 {
		return min(n, C.int64_t(hole))
	}
	got, err := r.image.ReadAt(unsafe.Slice((*byte)(unsafe.Pointer(dst)), int(n)), int64(off))
	if err != nil && err != io.EOF {
		r.err = errors.Join(r.err, err)
		return -1
	}
	return C.int64_t(got)
}

// loadCopy loads an image where the C library takes files only: from a temporary file
// that is gone when it is loaded.
func loadCopy(image *gguf.Image, name string, params C.struct_llama_model_params) (*C.struct_llama_model, error) {
	dir, err := os.MkdirTemp("", "kvasir-stage-*")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	file := filepath.Join(dir, "stage.gguf")
	if err := image.WriteFile(context.Background(), file); err != nil {
		return nil, fmt.Errorf("load %s: %w", name, err)
	}
	path := C.CString(file)
	defer C.free(unsafe.Pointer(path))
	return C.llama_model_load_from_file(path, params), nil
}
