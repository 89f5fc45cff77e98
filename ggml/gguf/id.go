package gguf

import (
	"context"
	"encoding/hex"
	"fmt"
	"io"

	"lukechampine.com/blake3"
)

// ModelID names a model by the content of all its files.
//
// It is the BLAKE3 hash of the manifest, this text with one line per file in the
// order of the split set (a model in one file has one line):
//
//	kvasir model 1\n
//	<root hash: 64 lower-case hex digits> <size in bytes: decimal>\n
//
// The root hash is the plain BLAKE3 hash of the file, which is also the root of its
// Bao tree. File names do not count: a renamed model is the same model.
type ModelID [32]byte

// String returns 64 lower-case hex digits.
func (id ModelID) String() string { return hex.EncodeToString(id[:]) }

// ParseModelID reads what String writes, and nothing else.
func ParseModelID(s string) (ModelID, error) {
	var id ModelID
	err := parseHash(id[:], s)
	return id, err
}

// MarshalText writes what String writes.
func (id ModelID) MarshalText() ([]byte, error) { return []byte(id.String()), nil }

// UnmarshalText reads what String writes.
func (id *ModelID) UnmarshalText(b []byte) error { return parseHash(id[:], string(b)) }

// Hash is a BLAKE3 hash.
type Hash [32]byte

// String returns 64 lower-case hex digits.
func (h Hash) String() string { return hex.EncodeToString(h[:]) }

// MarshalText writes what String writes.
func (h Hash) MarshalText() ([]byte, error) { return []byte(h.String()), nil }

// UnmarshalText reads what String writes.
func (h *Hash) UnmarshalText(b []byte) error { return parseHash(h[:], string(b)) }

func parseHash(dst []byte, s string) error {
	b, err := hex.DecodeString(s)
	if err != nil || len(b) != len(dst) || hex.EncodeToString(b) != s {
		return fmt.Errorf("gguf: %.80q is not a hash of %d lower-case hex digits", s, 2*len(dst))
	}
	copy(dst, b)
	return nil
}

// FileSum is what the manifest and a backbone's sidecar say of one model file.
type FileSum struct {
	Name string `json:"name"` // without folder
	Size int64  `json:"size"` // in bytes
	Root Hash   `json:"root"` // BLAKE3 of the whole file
}

// ManifestID returns the id of the model with these files, in order.
func ManifestID(files []FileSum) ModelID {
	h := blake3.New(32, nil)
	fmt.Fprintf(h, "kvasir model 1\n")
	for _, f := range files {
		fmt.Fprintf(h, "%v %d\n", f.Root, f.Size)
	}
	return ModelID(h.Sum(nil))
}

// ID returns the id of the model that m is, or is a part of. For a full model it
// reads every byte of every file once (memory stays below 2 MiB) and remembers the
// result; a slice, a stage and a backbone say it at once.
func (m *Model) ID(ctx context.Context) (ModelID, error) {
	if m.kind != Full {
		return m.id, nil
	}
	files, err := m.Manifest(ctx)
	if err != nil {
		return ModelID{}, err
	}
	return ManifestID(files), nil
}

// Manifest returns the sums of the original model files, as ID computes or knows
// them. A slice and a stage do not know them.
func (m *Model) Manifest(ctx context.Context) ([]FileSum, error) {
	if m.kind == ExpertSlice || m.kind == Stage {
		return nil, fmt.Errorf("gguf: %s is a %v: it does not know the files of its model", m.parts[0].Path, m.kind)
	}
	m.sumsMu.Lock()
	defer m.sumsMu.Unlock()
	if m.sums != nil {
		return m.sums, nil
	}
	sums := make([]FileSum, len(m.parts))
	for i, p := range m.parts {
		root, err := hashRange(ctx, p.file, p.Size)
		if err != nil {
			return nil, fmt.Errorf("gguf: hash %s: %w", p.Path, err)
		}
		sums[i] = FileSum{p.baseName(), p.Size, root}
	}
	m.sums = sums
	return sums, nil
}

// hashChunk is how many bytes are read and hashed at a time.
const hashChunk = 1 << 20

// hashRange returns the BLAKE3 hash of the first size bytes of r.
func hashRange(ctx context.Context, r io.ReaderAt, size int64) (Hash, error) {
	h := blake3.New(32, nil)
	buf := make([]byte, min(size, hashChunk))
	for off := int64(0); off < size; {
		if err := ctx.Err(); err != nil {
			return Hash{}, err
		}
		chunk := buf[:min(size-off, hashChunk)]
		if err := readAt(r, chunk, off); err != nil {
			return Hash{}, err
		}
		h.Write(chunk) // a hash never fails
		off += int64(len(chunk))
	}
	return Hash(h.Sum(nil)), nil
}

// readAt fills dst, as io.ReaderAt may return io.EOF together with all the bytes.
func readAt(r io.ReaderAt, dst []byte, off int64) error {
	n, err := r.ReadAt(dst, off)
	if n == len(dst) {
		return nil
	}
	if err == io.EOF {
		err = io.ErrUnexpectedEOF
	}
	return fmt.Errorf("%d of %d bytes at offset %d: %w", n, len(dst), off, err)
}
