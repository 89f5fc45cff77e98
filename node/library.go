package node

import (
	"kvasird/ggml/gguf"
	"kvasird/ggml/store"
	"kvasird/p2p/fetch"
)

// library shows the model store to package fetch.
type library struct{ store *store.Store }

func (l library) Shelf(model [32]byte) fetch.Shelf {
	if m := l.store.Model(gguf.ModelID(model)); m != nil {
		return shelf{m}
	}
	return nil
}

// shelf is a stored model, to be read from and to be filled.
type shelf struct{ *store.Model }

func (s shelf) Files() []fetch.File {
	var out []fetch.File
	for _, f := range s.Model.Files() {
		out = append(out, fetch.File{Root: f.Root, Size: f.Size})
	}
	return out
}

func (s shelf) Held(file int) []fetch.Span {
	var out []fetch.Span
	for _, h := range s.Model.Held(file) {
		out = append(out, fetch.Span(h))
	}
	return out
}

func fetchSpans(spans map[int][]store.Span) map[int][]fetch.Span {
	out := make(map[int][]fetch.Span, len(spans))
	for file, list := range spans {
		out[file] = []fetch.Span{}
		for _, s := range list {
			out[file] = append(out[file], fetch.Span(s))
		}
	}
	return out
}

// sumsOf names the files of a model that a source described; names are for
// people here, peers only know roots and sizes.
func sumsOf(name string, files []fetch.File) []gguf.FileSum {
	var out []gguf.FileSum
	for i, f := range files {
		out = append(out, gguf.FileSum{Name: partName(name, i, len(files)), Size: f.Size, Root: f.Root})
	}
	return out
}
