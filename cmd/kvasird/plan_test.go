package main

import (
	"errors"
	"os"
	"strings"
	"testing"
)

// TestPlanCommand runs the command as a person types it; node tests what it prints.
func TestPlanCommand(t *testing.T) {
	t.Chdir(t.TempDir())
	if err := os.WriteFile("spec.toml", []byte("[[node]]\nnam = \"a\"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		line  string
		usage bool
		want  string
	}{
		{"plan a.gguf b.gguf", true, "takes one MODEL"},
		{"plan --contxt 5", true, "see kvasird plan --help"},
		{"plan a.gguf --context much", true, "see kvasird plan --help"},
		{"plan a.gguf --data d --context 1", false, "model.context = 1"},
		{"plan a.gguf --data d", false, "a.gguf: no such file"},
		{"plan --nodes spec.toml --data d", false, `spec.toml:2: unknown key "node.nam"; did you mean "node.name"?`},
	} {
		err := dispatch(t.Context(), strings.Fields(tt.line))
		if err == nil || errors.Is(err, errUsage) != tt.usage || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("kvasird %s: %v, want %q", tt.line, err, tt.want)
		}
	}
}
