package store

import "kvasird/ggml/gguf"

// WindowSpans returns which groups of which files a stage of a window needs: headers,
// the blocks of the window, with their experts or without, and what StageImage and
// RowStage read besides.
func WindowSpans(g *gguf.Model, window gguf.Range, experts bool) (map[int][]Span, error) {
	reads, err := g.WindowReads(window, experts)
	if err != nil {
		return nil, err
	}
	spans := make(map[int][]Span)
	for i, p := range g.Parts() {
		spans[i] = append(spans[i], Span{0, p.DataOffset})
	}
	for _, t := range reads {
		spans[t.Part] = append(spans[t.Part], Span{t.Offset, t.Bytes})
	}
	return alignAll(g, spans), nil
}
