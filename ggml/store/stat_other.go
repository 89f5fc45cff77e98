//go:build !unix

package store

import "os"

func inode(os.FileInfo) uint64 { return 0 }

func allocated(info os.FileInfo) int64 { return info.Size() }
