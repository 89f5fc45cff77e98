package node

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"
)

// cpu is the time that this process and the workers had so far, and the machine's.
func (c *crew) cpu() (own time.Duration, machine machineTime, err error) {
	pids := []int{os.Getpid()}
	for _, w := range c.workers {
		pids = append(pids, w.cmd.Process.Pid)
	}
	for _, pid := range pids {
		used, err := cpuOf(pid)
		if err != nil {
			return 0, machine, err
		}
		own += used
	}
	machine, err = cpuOfMachine()
	return own, machine, err
}

const cpuTick = 10 * time.Millisecond // of Linux, as it counts for programs

// cpuOf is the time that a process had so far.
func cpuOf(pid int) (time.Duration, error) {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, err
	}
	fields := strings.Fields(string(stat[strings.LastIndexByte(string(stat), ')')+1:]))
	if len(fields) < 13 {
		return 0, fmt.Errorf("/proc/%d/stat has %d fields", pid, len(fields))
	}
	return sumTicks(fields[11:13]) // user, system
}

// machineTime is the time of all cores so far.
type machineTime struct{ all, idle time.Duration }

// busySince is the share of the time since an earlier one that the cores were in use.
func (m machineTime) busySince(before machineTime) float64 {
	return 1 - (m.idle-before.idle).Seconds()/(m.all-before.all).Seconds()
}

func cpuOfMachine() (m machineTime, err error) {
	stat, err := os.ReadFile("/proc/stat")
	if err != nil {
		return m, err
	}
	first, _, _ := strings.Cut(string(stat), "\n")
	fields := strings.Fields(first)
	if len(fields) < 9 {
		return m, fmt.Errorf("/proc/stat begins with %q", first)
	}
	if m.all, err = sumTicks(fields[1:9]); err == nil { // user to steal; guests are in user
		m.idle, err = sumTicks(fields[4:6]) // idle, waiting for a disk
	}
	return m, err
}

func sumTicks(fields []string) (sum time.Duration, err error) {
	for _, f := range fields {
		n, err := strconv.ParseInt(f, 10, 64)
		if err != nil {
			return 0, err
		}
		sum += time.Duration(n) * cpuTick
	}
	return sum, nil
}
