package store

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"strings"
	"unicode"

	"kvasird/ggml/gguf"
)

// Limits of a model, checked before anything is made for it.
const (
	MaxFiles         = 4096
	MaxModelBytes    = 1 << 42 // 4 TiB, of which the trees are 1 GiB
	maxNameBytes     = 255
	maxPathBytes     = 4096
	maxManifestBytes = 16 << 20
	manifestVersion  = 1
)

// manifest is manifest.json: JSON with these fields alone, nothing after the object.
// The sums of the files hash to the model id, which is the folder's name: no other
// check is needed for what matters. A source that was damaged fits no file.
type manifest struct {
	Version int            `json:"version"`
	Pinned  bool           `json:"pinned,omitempty"`
	Files   []manifestFile `json:"files"` // in order
}

type manifestFile struct {
	gguf.FileSum
	Source *source `json:"source,omitempty"` // of an imported file
}

// source says where an imported file is, and how a change of it is noticed.
type source struct {
	Path   string `json:"path"` // absolute, where the user has it
	Size   int64  `json:"size"`
	MTime  int64  `json:"mtime"`            // in nanoseconds since 1970
	Inode  uint64 `json:"inode"`            // of what is read; 0 where the system has none
	Kept   string `json:"kept,omitempty"`   // keptClone or keptLink: what is read is in the model's folder
	Origin uint64 `json:"origin,omitempty"` // inode of the user's file, if it is kept
}

// user returns the user's file, of which this is what is read.
func (s source) user() source {
	if s.Kept != "" {
		s.Inode = s.Origin
	}
	return s
}

// sameFile reports whether two sources are one unchanged file, by whatever path.
func (s source) sameFile(o source) bool {
	return s.Size == o.Size && s.MTime == o.MTime && s.Inode == o.Inode && (s.Inode != 0 || s.Path == o.Path)
}

func parseManifest(id gguf.ModelID, text []byte) (*manifest, error) {
	if len(text) > maxManifestBytes {
		return nil, fmt.Errorf("more than %d bytes", maxManifestBytes)
	}
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	var m manifest
	if err := d.Decode(&m); err != nil {
		return nil, err
	}
	if _, err := d.Token(); err != io.EOF {
		return nil, errors.New("bytes after the object")
	}
	if m.Version != manifestVersion {
		return nil, fmt.Errorf("version %d, this program knows %d", m.Version, manifestVersion)
	}
	for i, f := range m.Files {
		if s := f.Source; s != nil && (len(s.Path) > maxPathBytes || !filepath.IsAbs(s.Path) || strings.ContainsRune(s.Path, 0)) {
			return nil, fmt.Errorf("file %d: the source is not an absolute path of at most %d bytes", i+1, maxPathBytes)
		}
		if s := f.Source; s != nil && s.Kept != "" && s.Kept != keptClone && s.Kept != keptLink {
			return nil, fmt.Errorf("file %d: kept as %.20q, this program knows %s and %s", i+1, s.Kept, keptClone, keptLink)
		}
	}
	return &m, checkSums(id, m.sums())
}

func (m *manifest) encode() ([]byte, error) {
	text, err := json.MarshalIndent(m, "", "\t")
	if err == nil && len(text) > maxManifestBytes {
		err = errors.New("the manifest would be too large")
	}
	return text, err
}

func (m *manifest) sums() []gguf.FileSum {
	var sums []gguf.FileSum
	for _, f := range m.Files {
		sums = append(sums, f.FileSum)
	}
	return sums
}

// checkSums checks what a peer may have said of a model.
func checkSums(id gguf.ModelID, files []gguf.FileSum) error {
	if len(files) < 1 || len(files) > MaxFiles {
		return fmt.Errorf("%d files, a model has 1 to %d", len(files), MaxFiles)
	}
	left := int64(MaxModelBytes)
	for i, f := range files {
		if f.Size < 1 || f.Size > left {
			return fmt.Errorf("file %d: %d bytes, a file has at least 1 and a model at most %d", i+1, f.Size, int64(MaxModelBytes))
		}
		left -= f.Size
		if f.Name == "" || len(f.Name) > maxNameBytes || strings.ContainsAny(f.Name, `/\`) ||
			strings.ContainsFunc(f.Name, func(r rune) bool { return r == unicode.ReplacementChar || !unicode.IsPrint(r) }) {
			return fmt.Errorf("file %d: the name %.300q is not a printable file name of at most %d bytes", i+1, f.Name, maxNameBytes)
		}
	}
	if got := gguf.ManifestID(files); got != id {
		return fmt.Errorf("the files are those of model %v, not of %v", got, id)
	}
	return nil
}

// dataName returns the name of the data of file i (from 0) of count, such as llama.cpp
// wants it for a split set.
func dataName(i, count int) string {
	if count == 1 {
		return "model.gguf"
	}
	return fmt.Sprintf("model-%05d-of-%05d.gguf", i+1, count)
}

func treeName(i int) string { return fmt.Sprintf("tree-%05d", i+1) }
func heldName(i int) string { return fmt.Sprintf("held-%05d", i+1) }

const manifestName = "manifest.json"
