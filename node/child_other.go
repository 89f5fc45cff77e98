//go:build !linux

package node

import "syscall"

// dieWithParent: only Linux can; elsewhere stop ends the children.
func dieWithParent(syscall.Signal) *syscall.SysProcAttr { return &syscall.SysProcAttr{Setpgid: true} }
