//go:build cgo

package ggml

/*
#cgo CFLAGS: -I${SRCDIR}/include -O2 -Wall -Werror=implicit-function-declaration
#cgo LDFLAGS: -L${SRCDIR}/lib -l:libllama.v0.5.0.so -l:libggml.v0.5.0.so -l:libggml-base.so -lm -Wl,-rpath,${SRCDIR}/lib
*/
import "C"
