package node

import (
	"kvasird/ggml/gguf"
)

// has reports whether something of a model is here, or on its way.
func (v *volunteer) has(id gguf.ModelID) bool {
	if v == nil {
		return false
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	return len(v.here[id]) > 0
}
