package store

import (
	"context"
	"errors"
	"fmt"

	"kvasird/ggml/gguf"
)

// headerGuess is how much of a file is fetched to see how long its header is.
const headerGuess = 1 << 20

// fileView is a file of a model as gguf sees it.
type fileView struct {
	m    *Model
	file int
}

func (v fileView) ReadAt(p []byte, off int64) (int, error) { return v.m.ReadAt(v.file, p, off) }
func (v fileView) Holds(off, n int64) bool                 { return v.m.Holds(v.file, off, n) }

// GGUF opens the model by its id, which is known, once the headers of all files are
// held (gguf.ErrNotHeld before). What is read of it is gguf.ErrNotHeld until it is
// held. It is valid until the model is removed or the store closed.
func (m *Model) GGUF(ctx context.Context) (*gguf.Model, error) {
	files := make([]gguf.KnownFile, len(m.sums))
	for i := range files {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		files[i] = gguf.KnownFile{Path: m.Path(i), Sum: m.sums[i], Stored: fileView{m, i}}
	}
	return gguf.OpenKnown(files)
}

// HeaderNeeds says which bytes of a file the header takes, and whether they are held.
// While they are not it is a guess, which grows as more of the header is held: fetch
// the span and ask again.
func (m *Model) HeaderNeeds(file int) (need Span, held bool, err error) {
	if err := m.checkFile(file); err != nil {
		return Span{}, false, err
	}
	size := m.sums[file].Size
	h, err := gguf.Parse(fileView{m, file}, size)
	if err == nil {
		return align(size, []Span{{0, h.DataOffset}})[0], true, nil
	}
	if !errors.Is(err, gguf.ErrNotHeld) {
		return Span{}, false, fmt.Errorf("store: model %s, file %d: %w", m.Name(), file+1, err)
	}
	if err := m.Err(); err != nil {
		return Span{}, false, err
	}
	have := int64(0)
	if held := m.Held(file); len(held) > 0 && held[0].Off == 0 {
		have = held[0].Len
	}
	return align(size, []Span{{0, max(headerGuess, 2*have)}})[0], false, nil
}

// SliceSpans returns which groups of which files hold the experts of a slice.
func SliceSpans(g *gguf.Model, s gguf.Slice) (map[int][]Span, error) {
	tensors, err := g.PlanSlice(s)
	if err != nil {
		return nil, err
	}
	spans := make(map[int][]Span)
	for _, t := range tensors {
		spans[t.Part] = append(spans[t.Part], Span{t.Offset, t.Bytes})
	}
	return alignAll(g, spans), nil
}

// DenseSpans returns which groups of which files hold what is not an expert: what a
// backbone needs, headers included.
func DenseSpans(g *gguf.Model) map[int][]Span {
	spans := make(map[int][]Span)
	for i, p := range g.Parts() {
		at := int64(0)
		for _, t := range p.Tensors {
			if !gguf.InBackbone(t.Name) {
				spans[i] = append(spans[i], Span{at, t.Offset - at})
				at = t.Offset + t.Bytes
			}
		}
		spans[i] = append(spans[i], Span{at, p.Size - at})
	}
	return alignAll(g, spans)
}

func alignAll(g *gguf.Model, spans map[int][]Span) map[int][]Span {
	for i, list := range spans {
		spans[i] = align(g.Parts()[i].Size, list)
	}
	return spans
}
