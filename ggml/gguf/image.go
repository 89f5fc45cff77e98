package gguf

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sort"
	"syscall"
)

// Image is a GGUF file that is not on disk: its header is in memory, its data are
// read from the files of a Model when they are asked for. It is valid until that
// model is closed, and safe for concurrent use.
type Image struct {
	segments []segment
	size     int64
	window   Range // of a stage
	tokens   *tokenRows
}

// segment is a run of bytes: from src, or zeros if src is nil.
type segment struct {
	src    io.ReaderAt
	off    int64
	n      int64
	at     int64 // where it begins in the image
	hole   bool  // zeros that need not take space on disk
	expert bool  // a tensor that a backbone leaves out
}

func (im *Image) add(s segment) {
	if s.n > 0 {
		s.at = im.size
		im.segments = append(im.segments, s)
		im.size += s.n
	}
}

// Size returns the size of the file in bytes.
func (im *Image) Size() int64 { return im.size }

// Window returns the layers of a stage in the numbering of the model; the zero Range
// of an image that is not a stage.
func (im *Image) Window() Range { return im.window }

// from returns the index of the segment that holds the byte at off.
func (im *Image) from(off int64) int {
	return sort.Search(len(im.segments), func(i int) bool { return im.segments[i].at+im.segments[i].n > off })
}

// ReadAt reads like io.ReaderAt. Bytes of the model that are not held fail with an
// error that wraps ErrNotHeld.
func (im *Image) ReadAt(p []byte, off int64) (int, error) {
	if off < 0 {
		return 0, fmt.Errorf("gguf: read an image at offset %d", off)
	}
	done := 0
	for i := im.from(off); i < len(im.segments) && done < len(p); i++ {
		s := im.segments[i]
		within := off + int64(done) - s.at
		chunk := p[done : done+int(min(s.n-within, int64(len(p)-done)))]
		if s.src == nil {
			clear(chunk)
		} else if err := readAt(s.src, chunk, s.off+within); err != nil {
			return done, fmt.Errorf("gguf: read model bytes: %w", err)
		}
		done += len(chunk)
	}
	if done < len(p) {
		return done, io.EOF
	}
	return done, nil
}

// Hole returns how many bytes from off on are a hole, whose contents do not matter.
func (im *Image) Hole(off int64) int64 {
	if i := im.from(off); off >= 0 && i < len(im.segments) && im.segments[i].hole {
		return im.segments[i].at + im.segments[i].n - off
	}
	return 0
}

// WithoutExperts returns the image with a hole in the place of every expert tensor.
func (im *Image) WithoutExperts() *Image {
	out := *im
	out.segments = slices.Clone(im.segments)
	for i := range out.segments {
		if s := &out.segments[i]; s.expert {
			s.src, s.hole = nil, true
		}
	}
	return &out
}

// dataSize returns the bytes that take space on disk.
func (im *Image) dataSize() int64 {
	n := im.size
	for _, s := range im.segments {
		if s.hole {
			n -= s.n
		}
	}
	return n
}

// WriteTo writes the whole file; memory stays below 2 MiB.
func (im *Image) WriteTo(w io.Writer) (int64, error) {
	var total int64
	for _, s := range im.segments {
		n, err := io.Copy(w, s.reader())
		total += n
		if err == nil && n < s.n {
			err = io.ErrUnexpectedEOF
		}
		if err != nil {
			return total, fmt.Errorf("gguf: write model bytes at offset %d: %w", total, err)
		}
	}
	return total, nil
}

func (s segment) reader() io.Reader {
	if s.src == nil {
		return io.LimitReader(zeros{}, s.n)
	}
	return io.NewSectionReader(s.src, s.off, s.n)
}

// zeros is an endless stream of zero bytes.
type zeros struct{}

func (zeros) Read(p []byte) (int, error) {
	clear(p)
	return len(p), nil
}

// WriteFile writes the file so that path never names a part of it: to a temporary
// file beside it that is made durable, then renamed. Holes take no space. A full
// disk is a *DiskFullError.
func (im *Image) WriteFile(ctx context.Context, path string) error {
	return replaceFile(path, im.dataSize(), func(f *os.File) (int64, error) {
		if err := f.Truncate(im.size); err != nil {
			return 0, err
		}
		return im.writeSparse(ctx, f)
	})
}

// writeSparse writes all but the holes, and returns how much that was.
func (im *Image) writeSparse(ctx context.Context, f *os.File) (written int64, err error) {
	buf := make([]byte, hashChunk)
	pos := int64(0)
	for _, s := range im.segments {
		if s.hole {
			pos += s.n
			continue
		}
		for done := int64(0); done < s.n; {
			if err := ctx.Err(); err != nil {
				return written, err
			}
			chunk := buf[:min(s.n-done, hashChunk)]
			if s.src == nil {
				clear(chunk)
			} else if err := readAt(s.src, chunk, s.off+done); err != nil {
				return written, err
			}
			n, err := f.WriteAt(chunk, pos)
			written += int64(n)
			if err != nil {
				return written, err
			}
			pos += int64(n)
			done += int64(n)
		}
	}
	return written, nil
}

// DiskFullError says that there was no room for a file.
type DiskFullError struct {
	Path    string
	Missing int64 // bytes that did not fit
	Err     error // of the system
}

func (e *DiskFullError) Error() string {
	return fmt.Sprintf("gguf: write %s: the disk is full, %d more bytes are needed: %v", e.Path, e.Missing, e.Err)
}

func (e *DiskFullError) Unwrap() error { return e.Err }

// writeError names the path, and for a full disk the bytes that did not fit.
func writeError(path string, missing int64, err error) error {
	if errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) {
		return &DiskFullError{path, missing, err}
	}
	return fmt.Errorf("gguf: write %s: %w", path, err)
}

// replaceFile makes path a file of what fill writes, all of it or nothing. fill
// returns how many of the size bytes it wrote.
func replaceFile(path string, size int64, fill func(*os.File) (int64, error)) (err error) {
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".*.part")
	if err != nil {
		return fmt.Errorf("gguf: write %s: %w", path, err)
	}
	defer func() {
		if err != nil {
			f.Close() // closed already or of no use: err says what matters
			os.Remove(f.Name())
		}
	}()
	written, err := fill(f)
	if err == nil {
		err = f.Chmod(fs.FileMode(0o644)) // models are not secret
	}
	if err == nil {
		err = f.Sync()
	}
	if err == nil {
		err = f.Close()
	}
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err == nil {
		err = syncFolder(filepath.Dir(path))
	}
	if err != nil {
		return writeError(path, size-written, err)
	}
	return nil
}

// syncFolder makes a rename durable.
func syncFolder(path string) error {
	d, err := os.Open(path)
	if err != nil {
		return err
	}
	defer d.Close()
	return d.Sync()
}
