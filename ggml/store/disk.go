package store

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"

	"kvasird/ggml/gguf"
)

// disk makes the changes on disk, so that a test can let each of them fail.
type disk struct {
	before func(op, path string) error // nil but in tests
	clone  func(from, to string) error // nil: cloneFile
}

func (d *disk) cloner() func(from, to string) error {
	if d.clone == nil {
		return cloneFile
	}
	return d.clone
}

func (d *disk) step(op, path string) error {
	if d.before == nil {
		return nil
	}
	return d.before(op, path)
}

// replace makes path a file with these bytes, durably, all of them or nothing.
func (d *disk) replace(path string, data []byte) error {
	tmp := path + ".tmp"
	err := d.create(tmp, data)
	if err == nil {
		err = d.rename(tmp, path)
	}
	if err != nil {
		os.Remove(tmp) // of no use; err says what matters
		return diskError(path, int64(len(data)), err)
	}
	return nil
}

// create writes a new file and makes its bytes durable, but not its name.
func (d *disk) create(path string, data []byte) error {
	if err := d.step("create", path); err != nil {
		return err
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	err = d.writeAt(f, data, 0)
	if err == nil {
		err = d.sync(f)
	}
	return errors.Join(err, f.Close())
}

func (d *disk) writeAt(f *os.File, p []byte, off int64) error {
	if err := d.step("write", f.Name()); err != nil {
		return err
	}
	_, err := f.WriteAt(p, off)
	return err
}

func (d *disk) sync(f *os.File) error {
	if err := d.step("sync", f.Name()); err != nil {
		return err
	}
	return f.Sync()
}

// rename moves a file or folder within a folder, durably.
func (d *disk) rename(from, to string) error {
	if err := d.step("rename", to); err != nil {
		return err
	}
	if err := os.Rename(from, to); err != nil {
		return err
	}
	return d.syncFolder(filepath.Dir(to))
}

func (d *disk) syncFolder(path string) error {
	if err := d.step("sync", path); err != nil {
		return err
	}
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}

// punch gives a span of a file back to the disk. It reports false, and no error, when
// this system or file system cannot.
func (d *disk) punch(f *os.File, s Span) (bool, error) {
	if err := d.step("punch", f.Name()); err != nil {
		return false, err
	}
	return punchHole(f, s)
}

// diskError names the path, and for a full disk the bytes that did not fit.
func diskError(path string, missing int64, err error) error {
	if errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) {
		return &gguf.DiskFullError{Path: path, Missing: missing, Err: err}
	}
	return fmt.Errorf("store: write %s: %w", path, err)
}

// stamp returns how the file at path looks now.
func stamp(path string, info os.FileInfo) source {
	return source{Path: path, Size: info.Size(), MTime: info.ModTime().UnixNano(), Inode: inode(info)}
}
