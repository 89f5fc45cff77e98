// Package ggml runs models through the stock llama.cpp shared libraries and
// takes the experts out of them.
//
// It holds four things: the Runtime (backends, devices), the Model and Context
// that wrap llama.cpp, the swarm device (a ggml backend of ours to which
// llama.cpp hands the expert part of every layer), and the Kernel that computes
// such a part over a slice of experts on any ggml backend. Between the device
// and the kernel stands the expert Program: what the model's graph does with
// one row and one expert, as a short list from a closed set of operations.
//
// It is not a network package: whoever computes the experts is behind an
// ExpertFunc. It is the only package that uses cgo; without cgo the
// constructors say what is missing, and Program and the plain Go reference
// kernel remain.
//
// Invariants. A backbone whose experts are elsewhere holds no byte of them:
// their buffer is reserved address space, never memory. A failed expert call
// fails the decode that made it and nothing else. Every C object is freed
// exactly once, by Close, which may be called again; one that is dropped
// without Close is reported with the line that made it.
//
// Concurrency. A Runtime and a Model may be used from any goroutine. A Context,
// a Sampler and a Kernel belong to one goroutine at a time; different contexts
// of one model may decode at the same time. An ExpertFunc is called on the
// thread that is inside Decode.
package ggml
