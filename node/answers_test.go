package node

import (
	"log/slog"
	"slices"
	"testing"

	"kvasird/ggml/gguf"
	"kvasird/node/gateway"
)

// A peer that gives its model the name of another does not take that one's place.
func TestAnswersByName(t *testing.T) {
	g, err := gateway.New(gateway.Config{})
	if err != nil {
		t.Fatal(err)
	}
	a := answers{gateway: g, names: &GatewayConfig{}, log: slog.New(slog.DiscardHandler)}
	mine, theirs := &ringModel{name: "mine"}, &ringModel{name: "theirs"}
	if _, _, err := a.find(""); err == nil {
		t.Error("a model was found where there is none")
	}
	for _, m := range []struct {
		id     gguf.ModelID
		engine *ringModel
	}{{gguf.ModelID{1}, mine}, {gguf.ModelID{2}, theirs}, {gguf.ModelID{2}, theirs}} {
		if err := a.set(m.id, gateway.Model{ID: "model", Engine: m.engine}); err != nil {
			t.Fatal(err)
		}
	}
	var names []string
	for _, m := range a.list {
		names = append(names, m.ID)
	}
	if want := []string{"model", "model-020000000000"}; !slices.Equal(names, want) {
		t.Errorf("names %q, want %q", names, want)
	}
	if _, got, err := a.find("model"); err != nil || got != mine {
		t.Errorf("the name finds %v, %v; want the model that had it first", got, err)
	}
	if _, _, err := a.find(""); err == nil {
		t.Error("no name finds one of two models")
	}
	if _, _, err := a.find("modle"); err == nil {
		t.Error("a name that nothing has finds a model")
	}
}
