package node

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"

	"kvasird/ggml/gguf"
	"kvasird/ggml/tiny"
)

// A context whose cache no machine has room for is refused before anything is loaded.
func TestAdmission(t *testing.T) {
	path, err := tiny.Write(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	m, err := gguf.OpenModel(path)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	file := &modelFile{path: path, name: "tiny", Model: m}
	tests := []struct {
		name   string
		free   int64
		gpu    int
		remote bool
		cache  string
		want   string // part of the error
		warns  bool
	}{
		{"enough", 1 << 30, 0, false, "", "", false},
		{"enough, experts elsewhere", 1 << 30, 0, true, "", "", false},
		{"room for the cache, not for the weights", 20 << 20, 0, false, "", "", true},
		{"likewise, experts elsewhere", 10 << 20, 0, true, "", "tiny takes ", false},
		{"experts elsewhere, and room for hot ones", 1 << 30, 0, true, "512MiB", "", false},
		{"no room for hot ones", 1 << 30, 0, true, "1GiB", "or --cache", false},
		{"a cache that is not used", 1 << 30, 0, false, "1GiB", "", false},
		{"no room for the cache", 1 << 20, 0, false, "", "give it a smaller --context", false},
		{"layers on a GPU", 1 << 20, -1, false, "", "", false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var log bytes.Buffer
			cfg := Config{Model: ModelConfig{Context: 8192, Sequences: 4, GPULayers: tt.gpu, Cache: tt.cache}}
			err := file.admit(cfg, tt.remote, tt.free, slog.New(slog.NewTextHandler(&log, nil)))
			if (err == nil) != (tt.want == "") || err != nil && !strings.Contains(err.Error(), tt.want) {
				t.Errorf("error %v, want one with %q", err, tt.want)
			}
			if warns := strings.Contains(log.String(), "kvasir plan"); warns != tt.warns {
				t.Errorf("logged %q", log.String())
			}
		})
	}
}
