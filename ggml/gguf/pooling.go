package gguf

import (
	"fmt"
	"slices"
	"strconv"
)

// Pooling is how a model that makes embeddings makes one vector of the rows of all
// tokens of an input. Its values are those of "<arch>.pooling_type".
type Pooling int64

// The ways of llama.cpp.
const (
	NoPooling    Pooling = 0 // the model makes text
	MeanPooling  Pooling = 1 // the mean of all rows
	FirstPooling Pooling = 2 // the row of the first token, [CLS]
	LastPooling  Pooling = 3 // the row of the last token
	Ranking      Pooling = 4 // no vector: a score of how well two texts fit
)

func (p Pooling) String() string {
	if names := []string{"none", "mean", "first", "last", "rank"}; p >= 0 && int(p) < len(names) {
		return names[p]
	}
	return "type " + strconv.FormatInt(int64(p), 10)
}

// Check says why a model of this pooling makes no embeddings, or nil.
func (p Pooling) Check() error {
	switch p {
	case MeanPooling, FirstPooling, LastPooling:
		return nil
	case NoPooling:
		return fmt.Errorf("the model makes text, no embeddings")
	case Ranking:
		return fmt.Errorf("the model is a reranker (pooling_type %d): it makes neither text nor embeddings", p)
	}
	return fmt.Errorf("the model's pooling_type is %d, and 0 to %d are known", int64(p), Ranking)
}

// encoders are the architectures that see an input from both sides and make no text.
var encoders = []string{
	"bert", "eurobert", "gemma-embedding", "jina-bert-v2", "jina-bert-v3", "llama-embed", "modern-bert", "neo-bert", "nomic-bert", "nomic-bert-moe",
}

// PoolingOf is the pooling of a model of an architecture whose metadata says kind, 0 if
// it says nothing: an encoder then takes the mean.
func PoolingOf(arch string, kind int64) Pooling {
	if kind == 0 && slices.Contains(encoders, arch) {
		return MeanPooling
	}
	return Pooling(kind)
}

// Pooling is NoPooling for a model that makes text.
func (m *Model) Pooling() Pooling {
	kind, err := m.Meta().Int(m.arch + ".pooling_type")
	if err != nil { // llama.cpp does not read it either
		kind = 0
	}
	return PoolingOf(m.arch, kind)
}
