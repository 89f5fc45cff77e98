package gguf

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
)

// Metadata keys of the files that this package writes.
//
//	kvasir.version        u32  of these keys; 1
//	kvasir.model_id       str  ModelID of the whole model
//	kvasir.slice.layers   str  an expert slice: Range of layers, such as "0:2"
//	kvasir.slice.experts  str  an expert slice: Range of experts
//	kvasir.stage.layers   str  a stage: the window, in the numbering of the model
//	kvasir.stage.total    u32  a stage: number of layers of the model
const (
	keyVersion      = "kvasir.version"
	keyModelID      = "kvasir.model_id"
	keySliceLayers  = "kvasir.slice.layers"
	keySliceExperts = "kvasir.slice.experts"
	keyStageLayers  = "kvasir.stage.layers"
	keyStageTotal   = "kvasir.stage.total"

	formatVersion = 1
)

// sidecarSuffix is added to the name of a backbone's first file.
const sidecarSuffix = ".kvasir.json"

// maxSidecarBytes bounds the sidecar; one of a 99999-file split set is smaller.
const maxSidecarBytes = 32 << 20

// sidecar is the JSON beside the first file of a sparse backbone. Unknown fields,
// other versions and trailing bytes are refused.
type sidecar struct {
	Version int           `json:"version"`
	Model   ModelID       `json:"model"`
	Files   []sidecarFile `json:"files"` // in order
	Holes   []Slice       `json:"holes"` // weights and biases of these experts are not there
}

// sidecarFile says what a file was before holes were cut into it.
type sidecarFile struct {
	FileSum
	Header Hash `json:"header"` // BLAKE3 of the bytes before the tensor data
}

// readKind finds out which kind of file this is.
func (m *Model) readKind() error {
	if _, ok := m.Meta().Get(keyVersion); ok {
		return m.readMini()
	}
	return m.readSidecar()
}

func (m *Model) readMini() error {
	version, err := m.Meta().Int(keyVersion)
	if err != nil {
		return err
	}
	if version != formatVersion {
		return fmt.Errorf("gguf: %s %d, this program knows %d: write the file again", keyVersion, version, formatVersion)
	}
	id, err := m.Meta().Text(keyModelID)
	if err != nil {
		return err
	}
	if m.id, err = ParseModelID(id); err != nil {
		return err
	}
	if _, ok := m.Meta().Get(keyStageLayers); ok {
		m.kind = Stage
		return m.readRange(keyStageLayers, &m.slice.Layers, maxIndex)
	}
	m.kind = ExpertSlice
	if err := m.readRange(keySliceLayers, &m.slice.Layers, m.layers); err != nil {
		return err
	}
	return m.readRange(keySliceExperts, &m.slice.Experts, m.experts)
}

func (m *Model) readRange(key string, dst *Range, limit int) error {
	text, err := m.Meta().Text(key)
	if err != nil {
		return err
	}
	if *dst, err = ParseRange(text); err != nil {
		return fmt.Errorf("gguf: %s: %w", key, err)
	}
	if !dst.within(limit) {
		return fmt.Errorf("gguf: %s is %v, the model has %d", key, *dst, limit)
	}
	return nil
}

// readSidecar makes the model a Backbone if it has a sidecar that fits it.
func (m *Model) readSidecar() error {
	path := m.parts[0].Path + sidecarSuffix
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("gguf: %w", err)
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, maxSidecarBytes+1))
	if err != nil {
		return fmt.Errorf("gguf: %w", err)
	}
	side, err := parseSidecar(text)
	if err == nil {
		err = m.checkSidecar(side)
	}
	if err != nil {
		return fmt.Errorf("gguf: %s does not describe this file (remove it if the file is complete): %w", path, err)
	}
	m.kind, m.id, m.holes = Backbone, side.Model, side.Holes
	for _, file := range side.Files {
		m.sums = append(m.sums, file.FileSum)
	}
	return nil
}

func parseSidecar(text []byte) (*sidecar, error) {
	if len(text) > maxSidecarBytes {
		return nil, fmt.Errorf("more than %d bytes", maxSidecarBytes)
	}
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	var side sidecar
	if err := d.Decode(&side); err != nil {
		return nil, err
	}
	if _, err := d.Token(); err != io.EOF {
		return nil, errors.New("bytes after the object")
	}
	if side.Version != formatVersion {
		return nil, fmt.Errorf("version %d, this program knows %d", side.Version, formatVersion)
	}
	return &side, nil
}

func (m *Model) checkSidecar(side *sidecar) error {
	if len(side.Files) != len(m.parts) {
		return fmt.Errorf("%d files, the model has %d", len(side.Files), len(m.parts))
	}
	sums := make([]FileSum, len(side.Files))
	for i, file := range side.Files {
		sums[i] = file.FileSum
		part := m.parts[i]
		header, err := hashRange(context.Background(), part.file, part.DataOffset)
		if err != nil {
			return err
		}
		if file.Size != part.Size || file.Header != header {
			return fmt.Errorf("file %d has another size or header", i+1)
		}
	}
	if id := ManifestID(sums); id != side.Model {
		return fmt.Errorf("model id %v, its files give %v", side.Model, id)
	}
	for _, hole := range side.Holes {
		if !hole.Layers.within(m.layers) || !hole.Experts.within(m.experts) {
			return fmt.Errorf("hole %v, the model has %d layers and %d experts", hole, m.layers, m.experts)
		}
	}
	return nil
}
