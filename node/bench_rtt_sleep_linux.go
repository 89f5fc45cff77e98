package node

import (
	"syscall"
	"time"
)

// sleepUntil waits in the kernel: the timers of the Go runtime are a millisecond
// coarse on Linux, as much as a short line is long.
func sleepUntil(due time.Time) {
	for {
		wait := time.Until(due)
		if wait <= 0 {
			return
		}
		t := syscall.NsecToTimespec(int64(wait))
		_ = syscall.Nanosleep(&t, nil) // interrupted by a signal: the rest is slept next
	}
}
