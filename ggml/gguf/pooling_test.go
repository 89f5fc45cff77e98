package gguf

import (
	"errors"
	"strings"
	"testing"
)

func TestPooling(t *testing.T) {
	kind := func(v Value) []any { return []any{"pooling_type", v} }
	for _, tt := range []struct {
		name, arch string
		meta       []any
		want       Pooling
		says       string // why it makes no embeddings
	}{
		{"text", "qwen3", nil, NoPooling, "makes text"},
		{"text by its word", "qwen3", kind(NewValue(uint32(0))), NoPooling, "makes text"},
		{"last", "qwen3", kind(NewValue(uint32(3))), LastPooling, ""},
		{"reranker", "qwen3", kind(NewValue(uint32(4))), Ranking, "reranker"},
		{"of another day", "qwen3", kind(NewValue(uint32(77))), 77, "77"},
		{"no number", "qwen3", kind(NewValue("mean")), NoPooling, "makes text"},
		{"encoder", "bert", nil, MeanPooling, ""},
		{"encoder without a word", "bert", kind(NewValue(uint32(0))), MeanPooling, ""},
		{"first", "bert", kind(NewValue(uint32(2))), FirstPooling, ""},
	} {
		got := headerOf(t, tt.arch, 4, 3, tt.meta...).Pooling()
		err := got.Check()
		if got != tt.want || (err == nil) != (tt.says == "") || err != nil && !strings.Contains(err.Error(), tt.says) {
			t.Errorf("%s: %v (%v), want %v and %q", tt.name, got, err, tt.want, tt.says)
		}
	}
	m := headerOf(t, "qwen3", 4, 3, kind(NewValue(uint32(3)))...)
	if _, err := m.Cuts(); !errors.Is(err, ErrCut) || !strings.Contains(err.Error(), "embeddings") {
		t.Errorf("cuts of a model of embeddings: %v", err)
	}
}
