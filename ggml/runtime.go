//go:build cgo

package ggml

/*
#include <stdlib.h>
#include "bridge.h"
#include "swarm.h"
*/
import "C"

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"unsafe"
)

// Runtime is the process's set of backends.
type Runtime struct {
	log     *slog.Logger
	libDir  string
	variant string
}

var (
	runtimeMu  sync.Mutex // guards runtimeOne
	runtimeOne *Runtime
	// loadMu serialises what fills process-wide slots of llama.cpp: model loads
	// (whose log lines explain their failure) and the creation of contexts.
	loadMu sync.Mutex
)

// Open loads the backends and registers the swarm device. A registered device
// cannot be unregistered, so a process has one Runtime: a second Open with the
// same variant returns the first.
func Open(cfg Config) (*Runtime, error) {
	runtimeMu.Lock()
	defer runtimeMu.Unlock()
	if runtimeOne != nil {
		if cfg.Variant != "" && cfg.Variant != runtimeOne.variant {
			return nil, fmt.Errorf("the CPU variant %s is loaded already, %s needs a process of its own", runtimeOne.variant, cfg.Variant)
		}
		return runtimeOne, nil
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	rt := &Runtime{log: cfg.Logger, libDir: cfg.LibDir}
	if rt.libDir == "" {
		rt.libDir = filepath.Dir(C.GoString(C.kv_lib_path()))
	}
	logs.set(cfg.Logger)
	C.kv_log_install()
	if err := rt.loadBackends(cfg.Variant); err != nil {
		return nil, err
	}
	C.kv_swarm_register()
	C.llama_backend_init()
	rt.variant = loadedVariant()
	runtimeOne = rt
	return rt, nil
}

func (rt *Runtime) loadBackends(variant string) error {
	if variant == "" {
		dir := C.CString(rt.libDir)
		defer C.free(unsafe.Pointer(dir))
		C.ggml_backend_load_all_from_path(dir)
	} else if err := rt.loadVariant(variant); err != nil {
		return err
	}
	if C.ggml_backend_dev_by_type(C.GGML_BACKEND_DEVICE_TYPE_CPU) == nil {
		return fmt.Errorf("no CPU backend in %s: run `make deps`", rt.libDir)
	}
	return nil
}

func (rt *Runtime) loadVariant(variant string) error {
	path := filepath.Join(rt.libDir, "libggml-cpu-"+variant+".so")
	if _, err := os.Stat(path); err != nil {
		return fmt.Errorf("no CPU variant %q: %w", variant, err)
	}
	others, err := filepath.Glob(filepath.Join(rt.libDir, "libggml-*.so"))
	if err != nil {
		return err
	}
	for _, lib := range others {
		base := filepath.Base(lib)
		if lib != path && (strings.HasPrefix(base, "libggml-cpu-") || base == "libggml-base.so") {
			continue
		}
		c := C.CString(lib)
		reg := C.ggml_backend_load(c)
		C.free(unsafe.Pointer(c))
		if reg == nil && lib == path {
			return fmt.Errorf("the CPU variant %s does not run on this machine", variant)
		}
	}
	return nil
}

// loadedVariant is the name in the file name of the CPU backend that is mapped.
func loadedVariant() string {
	maps, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		return "unknown"
	}
	_, rest, ok := strings.Cut(string(maps), "libggml-cpu-")
	if !ok {
		return "built-in"
	}
	name, _, _ := strings.Cut(rest, ".so")
	return name
}

// Variant is the CPU variant in use.
func (rt *Runtime) Variant() string { return rt.variant }

// Features lists what the CPU backend uses of this CPU, such as "AVX2".
func (rt *Runtime) Features() []string {
	reg := C.ggml_backend_dev_backend_reg(C.ggml_backend_dev_by_type(C.GGML_BACKEND_DEVICE_TYPE_CPU))
	var out []string
	for f := C.kv_features(reg); f != nil && f.name != nil; f = (*C.struct_ggml_backend_feature)(unsafe.Add(unsafe.Pointer(f), unsafe.Sizeof(*f))) {
		if C.GoString(f.value) == "1" {
			out = append(out, C.GoString(f.name))
		}
	}
	return out
}

// LibDir is the folder that the backends come from.
func (rt *Runtime) LibDir() string { return rt.libDir }

// Release identifies the llama.cpp build and its backend interface. Peers with
// different releases do not compute together.
func (rt *Runtime) Release() string {
	return fmt.Sprintf("llama.cpp %s, ggml %s, abi %d", C.GoString(C.llama_version()), C.GoString(C.ggml_version()), int(swarmABI))
}

// Devices lists what can compute here. The swarm device is not among them.
func (rt *Runtime) Devices() []Device {
	kinds := map[C.enum_ggml_backend_dev_type]string{
		C.GGML_BACKEND_DEVICE_TYPE_CPU: "cpu", C.GGML_BACKEND_DEVICE_TYPE_GPU: "gpu",
		C.GGML_BACKEND_DEVICE_TYPE_IGPU: "igpu", C.GGML_BACKEND_DEVICE_TYPE_ACCEL: "accel",
	}
	var out []Device
	for i := 0; i < int(C.ggml_backend_dev_count()); i++ {
		dev := C.ggml_backend_dev_get(C.size_t(i))
		var free, total C.size_t
		C.ggml_backend_dev_memory(dev, &free, &total)
		d := Device{
			Index: i, Name: C.GoString(C.ggml_backend_dev_name(dev)),
			Description: C.GoString(C.ggml_backend_dev_description(dev)),
			Kind:        kinds[C.ggml_backend_dev_type(dev)],
			Backend:     C.GoString(C.ggml_backend_reg_name(C.ggml_backend_dev_backend_reg(dev))),
			FreeBytes:   uint64(free), TotalBytes: uint64(total),
		}
		if d.Name != "kvasir-swarm" {
			out = append(out, d)
		}
	}
	return out
}

// Device finds a device by name; "" is the CPU.
func (rt *Runtime) Device(name string) (Device, error) {
	var names []string
	for _, d := range rt.Devices() {
		if d.Name == name || (name == "" && d.Kind == "cpu") {
			return d, nil
		}
		names = append(names, d.Name)
	}
	return Device{}, fmt.Errorf("no device %q; there are: %s", name, strings.Join(names, ", "))
}

// libraryLog passes llama.cpp's log on and keeps the last errors, which are the
// only words it has for a failed load.
type libraryLog struct {
	mu     sync.Mutex // guards all below
	log    *slog.Logger
	level  int
	line   strings.Builder
	errors []string
}

var logs = libraryLog{log: slog.New(slog.DiscardHandler)}

func (l *libraryLog) set(log *slog.Logger) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.log = log
}

//export kvLog
func kvLog(level C.int, text *C.char) {
	logs.add(int(level), C.GoString(text))
}

func (l *libraryLog) add(level int, text string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if level != C.GGML_LOG_LEVEL_CONT {
		l.level = level
	}
	l.line.WriteString(text)
	if !strings.HasSuffix(text, "\n") && l.line.Len() < 4096 {
		return
	}
	line := strings.TrimSpace(l.line.String())
	l.line.Reset()
	if l.level == C.GGML_LOG_LEVEL_ERROR && len(l.errors) < 16 {
		l.errors = append(l.errors, line)
	}
	l.log.Debug("llama.cpp", "text", line)
}

func (l *libraryLog) clear() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.errors = nil
}

// failure turns the errors logged since clear into one.
func (l *libraryLog) failure(what string) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.errors) == 0 {
		return errors.New(what)
	}
	return fmt.Errorf("%s: %s", what, strings.Join(l.errors, "; "))
}
