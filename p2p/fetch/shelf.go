package fetch

import "errors"

// Span is a range of bytes of a file.
type Span struct{ Off, Len int64 }

// End is the offset behind the span.
func (s Span) End() int64 { return s.Off + s.Len }

// File is one file of a model: the BLAKE3 hash and the size in bytes.
type File struct {
	Root [32]byte
	Size int64
}

// Library finds what is served. It may be called concurrently.
type Library interface {
	Shelf(model [32]byte) Shelf // nil: the model is not here
}

// Shelf is what is here of one model. Files are counted from 0. Its methods may be called
// concurrently, and slices that it returns are the caller's.
type Shelf interface {
	Files() []File
	// TreeSize is the size in bytes of a file's tree of hashes, which its size determines:
	// it is known before the tree is.
	TreeSize(file int) int64
	ReadTree(file int, p []byte, off int64) (int, error)
	// Held tells which verified bytes are here: sorted, merged, in whole groups.
	Held(file int) []Span
	// ReadAt reads verified bytes and fails for others.
	ReadAt(file int, p []byte, off int64) (int, error)
}

// Sink is a shelf to be filled. SetTree and WriteGroups verify what they are given. An
// error with a method Wrong() bool that returns true says that the source is at fault; any
// other says that this machine is, and ends the fetch. Neither keeps the slice.
type Sink interface {
	Shelf
	HasTree(file int) bool
	SetTree(file int, tree []byte) error
	// WriteGroups stores whole groups from off, a multiple of Group, on; the last group of
	// a file is as short as the file makes it.
	WriteGroups(file int, off int64, data []byte) error
}

// isWrong reports whether a sink's error is the source's fault.
func isWrong(err error) bool {
	var w interface {
		error
		Wrong() bool
	}
	return errors.As(err, &w) && w.Wrong()
}
