package node

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
)

// Data is a node's state folder, held by one daemon at a time.
type Data struct {
	Dir  string
	lock *os.File
}

// ErrDataBusy says that another process works on a data folder.
var ErrDataBusy = errors.New("in use by another kvasird")

// OpenData opens the state folder, making it with mode 0700 when it is not
// there. A folder that others may write, or that another daemon holds, is an
// error.
func OpenData(dir string) (*Data, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("data folder: %w", err)
	}
	info, err := os.Stat(dir)
	if err != nil {
		return nil, fmt.Errorf("data folder: %w", err)
	}
	if perm := info.Mode().Perm(); perm&0o022 != 0 {
		return nil, fmt.Errorf("data folder %s has mode %04o, so others could swap the node's key: run chmod 700 %s", dir, perm, dir)
	}
	lock, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("data folder: %w", err)
	}
	// The kernel drops the lock with the process, however that ends.
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		lock.Close()
		if errors.Is(err, syscall.EWOULDBLOCK) {
			return nil, fmt.Errorf("data folder %s is %w: stop it, or choose another folder with --data", dir, ErrDataBusy)
		}
		return nil, fmt.Errorf("lock data folder %s: %w", dir, err)
	}
	return &Data{Dir: dir, lock: lock}, nil
}

// Path names a file in the folder.
func (d *Data) Path(name string) string { return filepath.Join(d.Dir, name) }

// Close lets another daemon have the folder.
func (d *Data) Close() error {
	if d.lock == nil {
		return nil
	}
	lock := d.lock
	d.lock = nil
	return lock.Close()
}
