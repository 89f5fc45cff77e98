//go:build cgo

package ggml

// #include "trace.h"
import "C"

import (
	"fmt"
	"runtime/cgo"
	"strings"
	"unsafe"
)

//export kvTrace
func kvTrace(handle C.uintptr_t, name *C.char, isInt C.int, width, rows C.int64_t, data unsafe.Pointer) {
	c := cgo.Handle(handle).Value().(*Context)
	t := Traced{Width: int(width)}
	what := C.GoString(name)
	if _, err := fmt.Sscanf(what[strings.LastIndexByte(what, '-')+1:], "%d", &t.Layer); err != nil {
		return
	}
	n := int(width * rows)
	if isInt != 0 {
		t.Experts = unsafe.Slice((*int32)(data), n)
	} else {
		t.Rows = unsafe.Slice((*float32)(data), n)
	}
	c.trace(t)
}
