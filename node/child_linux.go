package node

import "syscall"

// dieWithParent has the kernel end a child when this process ends. The child is
// in a process group of its own, so that Ctrl-C reaches this process only.
func dieWithParent() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Pdeathsig: syscall.SIGTERM, Setpgid: true}
}
