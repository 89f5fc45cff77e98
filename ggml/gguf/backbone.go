package gguf

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
)

// WriteBackbone writes a sparse copy of a full model at dst: every byte outside of
// the stacked expert weights and biases is where it was, the experts are holes that
// take no disk space. Beside it goes dst.kvasir.json, which says what the model was
// and what is missing (see sidecar).
//
// The copy of a split set is a split set: dst must then end in -00001-of-0000N.gguf
// like the first of its files. The sidecar is written first, so that a file with
// holes is never taken for a full model. All of the model is read, to know its id,
// unless that is known. Of a Partial model all but the experts must be held.
func WriteBackbone(ctx context.Context, dst string, m *Model) error {
	if m.kind != Full && m.kind != Partial {
		return fmt.Errorf("gguf: %s is a %v: a backbone is made from a full model", m.parts[0].Path, m.kind)
	}
	layers := m.ExpertLayers()
	if len(layers) == 0 {
		return fmt.Errorf("gguf: %s: %w: it is its own backbone", m.parts[0].Path, ErrNoExperts)
	}
	paths, err := m.copyPaths(dst)
	if err != nil {
		return err
	}
	side := sidecar{
		Version: formatVersion,
		Holes:   []Slice{{Range{layers[0], layers[len(layers)-1] + 1}, Range{0, m.experts}}},
	}
	sums, err := m.Manifest(ctx)
	if err != nil {
		return err
	}
	side.Model = ManifestID(sums)
	for i, p := range m.parts {
		header, err := hashRange(ctx, p.file, p.DataOffset)
		if err != nil {
			return fmt.Errorf("gguf: hash %s: %w", p.Path, err)
		}
		side.Files = append(side.Files, sidecarFile{sums[i], header})
	}
	if err := writeSidecar(paths[0]+sidecarSuffix, &side); err != nil {
		return err
	}
	for i, path := range paths {
		if err := m.sparseImage(i).WriteFile(ctx, path); err != nil {
			return err
		}
	}
	return nil
}

// BackboneImage returns the model without its experts as one file: what else there is as
// it is, but for the metadata that say that it is split. In the place of expert weights
// are holes of the smallest type, in the place of their biases such of their own.
func (m *Model) BackboneImage() (*Image, error) {
	var meta Metadata
	for _, kv := range m.Meta().list {
		if !strings.HasPrefix(kv.Key, "split.") {
			meta.set(kv.Key, kv.Value)
		}
	}
	out := make([]outTensor, len(m.tensors))
	for i, t := range m.tensors {
		out[i] = outTensor{t.Name, t.DType, t.Shape, m.parts[t.Part].file, t.Offset}
		if !InBackbone(t.Name) {
			out[i].src, out[i].off = nil, 0
			if strings.HasSuffix(t.Name, ".weight") {
				out[i].dtype = smallestType(t.Shape[0])
			}
		}
	}
	return newImage(meta, m.parts[0].Alignment, out)
}

// copyPaths returns the path of every file of a copy whose first file is dst.
func (m *Model) copyPaths(dst string) ([]string, error) {
	paths := []string{dst}
	if n := len(m.parts); n > 1 {
		prefix, ok := strings.CutSuffix(dst, splitSuffix(0, n))
		if !ok {
			return nil, fmt.Errorf("gguf: %s must end in %s: the model has %d files", dst, splitSuffix(0, n), n)
		}
		for i := 1; i < n; i++ {
			paths = append(paths, prefix+splitSuffix(i, n))
		}
	}
	for i, path := range paths {
		if info, err := os.Stat(path); err == nil {
			if orig, err := os.Stat(m.parts[i].Path); err == nil && os.SameFile(info, orig) {
				return nil, fmt.Errorf("gguf: %s is the model itself: choose another name", path)
			}
		}
	}
	return paths, nil
}

// sparseImage returns file i of the model with holes where expert slabs are.
func (m *Model) sparseImage(i int) *Image {
	part := m.parts[i]
	im := &Image{}
	copyTo := func(end int64) {
		im.add(segment{src: part.file, off: im.size, n: end - im.size})
	}
	for _, t := range part.Tensors {
		if !InBackbone(t.Name) {
			copyTo(t.Offset)
			im.add(segment{n: t.Bytes, hole: true})
		}
	}
	copyTo(part.Size)
	return im
}

func writeSidecar(path string, side *sidecar) error {
	text, err := json.MarshalIndent(side, "", "\t")
	if err != nil {
		return fmt.Errorf("gguf: %w", err)
	}
	if len(text) > maxSidecarBytes {
		return errors.New("gguf: the sidecar would be too large")
	}
	return replaceFile(path, int64(len(text)), func(f *os.File) (int64, error) {
		n, err := f.Write(text)
		return int64(n), err
	})
}
