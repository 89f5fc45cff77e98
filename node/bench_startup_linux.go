package node

import (
	"errors"
	"os"

	"golang.org/x/sys/unix"
)

// forgetPages has the page cache forget a file.
func forgetPages(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	err = f.Sync() // what is not on disk yet stays
	if err == nil {
		err = unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED)
	}
	return errors.Join(err, f.Close())
}
