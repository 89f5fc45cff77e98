package node

import "syscall"

// dieWithParent has the kernel end a child by sig when this process ends. The child is
// in a process group of its own, so that Ctrl-C reaches this process only.
func dieWithParent(sig syscall.Signal) *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Pdeathsig: sig, Setpgid: true}
}
