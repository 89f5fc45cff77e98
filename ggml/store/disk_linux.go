package store

import (
	"errors"
	"os"

	"golang.org/x/sys/unix"
)

// cloneFile makes a file that shares its blocks with another one, and has its times.
func cloneFile(from, to string) error {
	src, err := os.Open(from)
	if err != nil {
		return err
	}
	defer src.Close()
	info, err := src.Stat()
	if err != nil {
		return err
	}
	dst, err := os.OpenFile(to, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	err = unix.IoctlFileClone(int(dst.Fd()), int(src.Fd()))
	if err == nil {
		err = os.Chtimes(to, info.ModTime(), info.ModTime())
	}
	if err == nil {
		err = dst.Sync()
	}
	return errors.Join(err, dst.Close())
}

func punchHole(f *os.File, s Span) (bool, error) {
	for {
		err := unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, s.Off, s.Len)
		switch {
		case err == nil:
			return true, nil
		case errors.Is(err, unix.EINTR):
			continue
		case errors.Is(err, unix.EOPNOTSUPP), errors.Is(err, unix.ENOSYS):
			return false, nil
		}
		return false, &os.PathError{Op: "punch a hole in", Path: f.Name(), Err: err}
	}
}
