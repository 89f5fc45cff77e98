package kv

import (
	"os"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"
)

// TestIdle bounds what a store costs that nobody uses. It logs the figures.
func TestIdle(t *testing.T) {
	runtime.GC()
	before, goroutines := rssBytes(t), runtime.NumGoroutine()
	f := newFixture(t, Bounds{24 * time.Hour, 256 << 20})
	f.put("a", noise(1, 100_000))
	opened := rssBytes(t)
	time.Sleep(time.Second)
	start := cpuTime(t)
	const wait = 3 * time.Second
	time.Sleep(wait)
	used := cpuTime(t) - start
	t.Logf("memory +%d KiB, %d goroutines, %.3f %% of a core", (opened-before)>>10, runtime.NumGoroutine()-goroutines, 100*used.Seconds()/wait.Seconds())
	if grown := opened - before; grown > 32<<20 {
		t.Errorf("an open store takes %d bytes of memory", grown)
	}
	if used > wait/50 {
		t.Errorf("an idle store took %v of the processor in %v", used, wait)
	}
}

func cpuTime(t *testing.T) time.Duration {
	t.Helper()
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		t.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// rssBytes is the resident memory of this process, mapped files too.
func rssBytes(t *testing.T) int {
	t.Helper()
	data, err := os.ReadFile("/proc/self/statm")
	if err != nil {
		t.Fatal(err)
	}
	pages := 0
	for _, c := range strings.Fields(string(data))[1] {
		pages = pages*10 + int(c-'0')
	}
	return pages * os.Getpagesize()
}
