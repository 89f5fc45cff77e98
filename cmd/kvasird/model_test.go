package main

import (
	"errors"
	"strings"
	"testing"

	"kvasird/node"
)

// TestModelCommands runs the commands as a person types them. It asks for nothing
// that needs a model: node tests those.
func TestModelCommands(t *testing.T) {
	t.Chdir(t.TempDir())
	for _, line := range []string{"model", "model help", "model list --data d", "model --help"} {
		if err := dispatch(t.Context(), strings.Fields(line)); err != nil {
			t.Errorf("kvasird %s: %v", line, err)
		}
	}
	for _, tt := range []struct {
		line  string
		usage bool
		want  string
	}{
		{"model ad x", true, `unknown command "ad"`},
		{"model add --data d", true, "takes the FILE of a model"},
		{"model list x", true, "kvasird model list takes"},
		{"model verify --data d", true, "takes [MODEL]"},
		{"model pin a b", true, "takes [MODEL]"},
		{"model remove --dta d x", true, "see kvasird model remove --help"},
		{"model add none.gguf --data d", false, "none.gguf: no such file"},
		{"model unpin x --data d", false, `no model "x" in the store`},
		{"model list --data d --disk much", false, "budget.disk"},
	} {
		err := dispatch(t.Context(), strings.Fields(tt.line))
		if err == nil || errors.Is(err, errUsage) != tt.usage || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("kvasird %s: %v, want %q", tt.line, err, tt.want)
		}
	}
	data, err := node.OpenData("d")
	if err != nil {
		t.Fatal(err)
	}
	defer data.Close()
	if err := dispatch(t.Context(), strings.Fields("model list --data d")); !errors.Is(err, node.ErrDataBusy) {
		t.Errorf("beside another process: %v", err)
	}
}
