package node

import (
	"context"
	"fmt"
	"slices"

	"kvasird/ggml/gguf"
	"kvasird/market"
)

// keyLayers is how many layers share a provider record.
const keyLayers = 8

// modelKey is the key under which a node that has something of a model is found,
// layersKey that of one with experts of some layers.
func modelKey(id gguf.ModelID) string { return "model/" + id.String() }

func layersKey(id gguf.ModelID, layer int) string {
	return fmt.Sprintf("%s/%d", modelKey(id), layer/keyLayers*keyLayers)
}

// provide has this node found by what it announces.
func (s *exchange) provide(ctx context.Context, a *market.Announcement) {
	var keys []string
	for _, m := range a.Models {
		if m.Full || len(m.Holdings) > 0 {
			keys = append(keys, modelKey(m.ID))
		}
		for _, h := range m.Holdings {
			for layer := h.Slice.Layers.Begin; layer < h.Slice.Layers.End && h.State == market.Serving; layer++ {
				if key := layersKey(m.ID, layer); !slices.Contains(keys, key) {
					keys = append(keys, key)
				}
			}
		}
	}
	for _, key := range keys {
		if !slices.Contains(s.provided, key) {
			if err := s.host.Provide(ctx, key); err != nil {
				s.log.Warn("others do not find this node by what it holds", "key", key, "error", err)
			}
		}
	}
	for _, key := range s.provided {
		if !slices.Contains(keys, key) {
			s.host.Unprovide(key)
		}
	}
	s.provided = keys
}
