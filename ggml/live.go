package ggml

import (
	"fmt"
	"log/slog"
	"runtime"
	"sort"
	"sync"
)

// live knows every object that holds C memory, with the line that made it.
var live = struct {
	mu      sync.Mutex // guards the rest
	next    uint64
	objects map[uint64]string
}{objects: map[uint64]string{}}

// track registers an object of the given kind, made by the caller's caller.
// The returned function forgets it and reports whether it was the first call:
// who gets true frees the C object. An object that the garbage collector finds
// without that is reported to the logger; its memory stays allocated, since
// others may still use it.
func track[T any](owner *T, kind string, log *slog.Logger) (release func() bool) {
	where := "unknown"
	if _, file, line, ok := runtime.Caller(2); ok {
		where = fmt.Sprintf("%s:%d", file, line)
	}
	live.mu.Lock()
	live.next++
	id := live.next
	live.objects[id] = kind + " made at " + where
	live.mu.Unlock()
	runtime.AddCleanup(owner, func(id uint64) {
		live.mu.Lock()
		defer live.mu.Unlock()
		if what, ok := live.objects[id]; ok {
			log.Error("an object was dropped without Close", "object", what)
		}
	}, id)
	return func() bool {
		live.mu.Lock()
		defer live.mu.Unlock()
		_, ok := live.objects[id]
		delete(live.objects, id)
		return ok
	}
}

// Live lists the objects that hold C memory and are not closed, each with the
// line that made it. Tests end with it empty.
func Live() []string {
	live.mu.Lock()
	defer live.mu.Unlock()
	out := make([]string, 0, len(live.objects))
	for _, what := range live.objects {
		out = append(out, what)
	}
	sort.Strings(out)
	return out
}
