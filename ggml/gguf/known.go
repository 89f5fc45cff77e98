package gguf

import (
	"errors"
	"fmt"
	"io"
)

// Stored is a model file of which some bytes may not be here yet, such as one of
// ggml/store. It is used concurrently.
type Stored interface {
	// ReadAt fails with an error that wraps ErrNotHeld where bytes are not held.
	io.ReaderAt
	// Holds reports whether all of the n bytes at off are held.
	Holds(off, n int64) bool
}

// KnownFile is one file of a model whose sums are known.
type KnownFile struct {
	Path string // where the bytes are, for messages and for who maps the file
	Sum  FileSum
	Stored
}

// OpenKnown opens a stock model by what is known of its files, in order: it hashes
// nothing, so the sums must be verified by who gives them. The headers must be held.
// The model is Full when every byte is held, otherwise Partial: what is read of it is
// ErrNotHeld until it is held. Closing it leaves the files open.
func OpenKnown(files []KnownFile) (*Model, error) {
	if len(files) == 0 {
		return nil, errors.New("gguf: no file to open")
	}
	m := &Model{byName: make(map[string]int)}
	for i, f := range files {
		h, err := Parse(f, f.Sum.Size)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", f.Path, err)
		}
		m.parts = append(m.parts, Part{Path: f.Path, Header: h, file: f, held: f.Holds})
		m.sums = append(m.sums, f.Sum)
		if err := m.addTensors(i); err != nil {
			return nil, err
		}
	}
	if err := m.index(m.readKnown); err != nil {
		return nil, err
	}
	return m, nil
}

// readKnown takes the place of readKind: a model whose id is known has no sidecar.
func (m *Model) readKnown() error {
	if _, mini := m.Meta().Get(keyVersion); mini {
		return errors.New("gguf: this is a slice or a stage of a model: only whole models are opened by their sums")
	}
	m.id = ManifestID(m.sums)
	for _, p := range m.parts {
		if !p.holds(0, p.Size) {
			m.kind = Partial
		}
	}
	return nil
}
