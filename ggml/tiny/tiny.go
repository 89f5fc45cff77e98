// Package tiny embeds the model that ships: a small trained mixture of experts
// (qwen3moe, 4 layers of 32 experts, 4 used, Q4_K_M) that the demo, the canaries
// and the tests run for real, so that an answer can be checked. README.md in this
// folder says how it was made and under which licence. It holds data and no code.
package tiny

import (
	_ "embed"
	"fmt"
	"os"
	"path/filepath"
)

// Name is the file name that Write uses.
const Name = "kvasir-tiny-q4_k_m.gguf"

// GGUF is the model file.
//
//go:embed kvasir-tiny-q4_k_m.gguf
var GGUF []byte

// Write puts the model into dir, unless it is there, and returns its path.
func Write(dir string) (string, error) {
	path := filepath.Join(dir, Name)
	if info, err := os.Stat(path); err == nil && info.Size() == int64(len(GGUF)) {
		return path, nil
	}
	tmp, err := os.CreateTemp(dir, Name+".*")
	if err != nil {
		return "", fmt.Errorf("write the shipped model: %w", err)
	}
	defer os.Remove(tmp.Name())
	_, err = tmp.Write(GGUF)
	if err2 := tmp.Close(); err == nil {
		err = err2
	}
	if err == nil {
		err = os.Rename(tmp.Name(), path)
	}
	if err != nil {
		return "", fmt.Errorf("write the shipped model: %w", err)
	}
	return path, nil
}
