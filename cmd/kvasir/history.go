package main

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
)

// Limits of the history.
const (
	historyName     = "chat_history"
	maxHistoryLines = 1000
	maxHistoryLine  = 4 << 10 // bytes; a longer line is not kept
	maxHistoryFile  = 1 << 20 // bytes that are read, from the end
)

// history is what was written at earlier prompts: a file with one line each,
// the last one at the end, that only its owner reads. Several programs may add
// to it at once.
type history struct {
	lines []string // at the start, the last one at the end
	last  string   // that was added
	file  *os.File
}

// openHistory reads the history in a folder, which it makes if need be.
// A file that has grown too long is written anew with its last lines.
func openHistory(dir string) (*history, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	path := filepath.Join(dir, historyName)
	f, err := os.OpenFile(path, os.O_RDWR|os.O_APPEND|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	h := &history{file: f}
	if err := h.load(path); err != nil {
		h.file.Close()
		return nil, err
	}
	return h, nil
}

func (h *history) load(path string) error {
	st, err := h.file.Stat()
	if err != nil {
		return err
	}
	if !st.Mode().IsRegular() {
		return fmt.Errorf("%s is not a regular file", path)
	}
	if err := h.file.Chmod(0o600); err != nil {
		return err
	}
	from := max(0, st.Size()-maxHistoryFile)
	data, err := io.ReadAll(io.NewSectionReader(h.file, from, maxHistoryFile))
	if err != nil {
		return err
	}
	if from > 0 { // the first line is a part of one
		_, data, _ = bytes.Cut(data, []byte("\n"))
	}
	for line := range strings.Lines(string(data)) {
		if line = plain(strings.TrimRight(line, "\n")); line != "" && len(line) <= maxHistoryLine {
			h.lines = append(h.lines, line)
		}
	}
	extra := len(h.lines) - maxHistoryLines
	if extra <= 0 && from == 0 {
		return nil
	}
	h.lines = h.lines[max(0, extra):]
	return h.rewrite(path)
}

// rewrite puts a file with the lines alone in the place of the old one.
func (h *history) rewrite(path string) error {
	f, err := os.CreateTemp(filepath.Dir(path), historyName+".*") // with mode 0600
	if err != nil {
		return err
	}
	defer os.Remove(f.Name()) // no more there once renamed
	_, err = f.WriteString(strings.Join(h.lines, "\n") + "\n")
	if e := f.Close(); err == nil {
		err = e
	}
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		return err
	}
	h.file.Close()
	h.file, err = os.OpenFile(path, os.O_WRONLY|os.O_APPEND, 0)
	return err
}

// add keeps a line. One that is empty, very long or said twice is not kept.
func (h *history) add(line string) error {
	if strings.TrimSpace(line) == "" || len(line) > maxHistoryLine || line == h.last {
		return nil
	}
	h.last = line
	_, err := h.file.WriteString(plain(line) + "\n")
	return err
}

func (h *history) Close() error { return h.file.Close() }
