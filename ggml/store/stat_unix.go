//go:build unix

package store

import (
	"os"
	"syscall"
)

// inode returns the number of a file that stays when it is renamed.
func inode(info os.FileInfo) uint64 {
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return 0
	}
	return uint64(st.Ino)
}

// allocated returns the bytes that a file takes on disk.
func allocated(info os.FileInfo) int64 {
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return info.Size()
	}
	return int64(st.Blocks) * 512
}
