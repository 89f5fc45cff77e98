package api

import (
	"path/filepath"
	"testing"
)

func TestNearest(t *testing.T) {
	known := []string{"status", "ask", "gguf", "bench", "doctor", "version", "help"}
	tests := []struct{ word, want string }{
		{"statsu", "status"},
		{"ask", "ask"},
		{"docter", "doctor"},
		{"ver", ""},
		{"q", ""},
		{"", ""},
		{"zzzzzzzz", ""},
		{"benchh", "bench"},
	}
	for _, tt := range tests {
		if got := Nearest(tt.word, known); got != tt.want {
			t.Errorf("Nearest(%q) = %q, want %q", tt.word, got, tt.want)
		}
	}
}

func TestTokensPerSecond(t *testing.T) {
	tests := []struct {
		done AskDone
		want float64
	}{
		{AskDone{Tokens: 11, FirstTokenSec: 0.5, Seconds: 2.5}, 5},
		{AskDone{Tokens: 1, FirstTokenSec: 0.5, Seconds: 0.5}, 0},
		{AskDone{Tokens: 5, FirstTokenSec: 0.5, Seconds: 0.5}, 0},
		{AskDone{}, 0},
	}
	for _, tt := range tests {
		if got := tt.done.TokensPerSecond(); got != tt.want {
			t.Errorf("%+v: %v tokens/s, want %v", tt.done, got, tt.want)
		}
	}
}

func TestDefaultDataDir(t *testing.T) {
	t.Setenv("HOME", "/home/a")
	t.Setenv("XDG_DATA_HOME", "/data")
	if got, err := DefaultDataDir(); got != "/data/kvasir" || err != nil {
		t.Errorf("with XDG_DATA_HOME: %q, %v", got, err)
	}
	t.Setenv("XDG_DATA_HOME", "relative") // the XDG rules say: ignore
	if got, err := DefaultDataDir(); got != filepath.Join("/home/a", ".local/share/kvasir") || err != nil {
		t.Errorf("with HOME: %q, %v", got, err)
	}
	t.Setenv("HOME", "")
	if got, err := DefaultDataDir(); err == nil {
		t.Errorf("without HOME: %q, want an error", got)
	}
}
