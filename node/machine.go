package node

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"syscall"
)

// availableMemory reads what the kernel says can be used without swapping.
func availableMemory() (int64, error) {
	f, err := os.Open("/proc/meminfo")
	if err != nil {
		return 0, err
	}
	defer f.Close()
	return parseMemAvailable(f)
}

func parseMemAvailable(r io.Reader) (int64, error) {
	lines := bufio.NewScanner(io.LimitReader(r, 64<<10))
	for lines.Scan() {
		rest, ok := strings.CutPrefix(lines.Text(), "MemAvailable:")
		if !ok {
			continue
		}
		var kib int64
		if _, err := fmt.Sscanf(rest, "%d kB", &kib); err != nil {
			return 0, fmt.Errorf("meminfo %q: %w", lines.Text(), err)
		}
		return kib << 10, nil
	}
	return 0, errors.Join(errors.New("meminfo has no MemAvailable"), lines.Err())
}

// freeDisk is what an unprivileged writer can have.
func freeDisk(dir string) (int64, error) {
	var st syscall.Statfs_t
	if err := syscall.Statfs(dir, &st); err != nil {
		return 0, fmt.Errorf("%s: %w", dir, err)
	}
	return int64(st.Bavail) * int64(st.Bsize), nil
}

// clockSynced asks the kernel whether a time source disciplines the clock.
func clockSynced() (bool, error) {
	const unsynced = 0x40 // STA_UNSYNC of timex.h
	var tx syscall.Timex
	if _, err := syscall.Adjtimex(&tx); err != nil {
		return false, err
	}
	return tx.Status&unsynced == 0, nil
}
