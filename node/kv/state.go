package kv

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"syscall"
)

// stateFile says how the store was left, and is locked while it is open. Its text
// is "clean", "open", or "opening N": the N-th opening in a row that has not ended.
// Any other text counts as "open".
type stateFile struct {
	*os.File
	clean    bool
	openings int
}

// errState says that the state file cannot be written, which is no damage of the store.
var errState = errors.New("the state of the store is not kept")

const maxState = 64 // bytes of the file that are read

// lockState opens the file, or makes it.
func lockState(path string) (*stateFile, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	// The kernel drops the lock with the process, however that ends.
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		f.Close()
		if errors.Is(err, syscall.EWOULDBLOCK) {
			return nil, ErrBusy
		}
		return nil, err
	}
	text, err := io.ReadAll(io.LimitReader(f, maxState))
	if err != nil {
		f.Close()
		return nil, err
	}
	s := &stateFile{File: f, clean: len(text) == 0 || strings.TrimSpace(string(text)) == "clean"}
	if _, err := fmt.Sscanf(string(text), "opening %d", &s.openings); err != nil || s.openings < 0 {
		s.openings = 0
	}
	return s, nil
}

func (s *stateFile) opening() error {
	s.openings++
	return s.write(fmt.Sprintf("opening %d", s.openings))
}

func (s *stateFile) opened() error { return s.write("open") }
func (s *stateFile) closed() error { return s.write("clean") }

// write replaces the text, which is shorter than a sector.
func (s *stateFile) write(text string) error {
	_, err := s.WriteAt(fmt.Appendf(nil, "%-31s\n", text), 0)
	if err == nil {
		err = s.Sync()
	}
	if err != nil {
		err = fmt.Errorf("%w: %w", errState, err)
	}
	return err
}
