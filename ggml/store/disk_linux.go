package store

import (
	"errors"
	"os"

	"golang.org/x/sys/unix"
)

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
