package store

import (
	"os"
	"testing"
)

// diskBytes returns how much disk space a file takes.
func diskBytes(t testing.TB, path string) int64 {
	t.Helper()
	info, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	return allocated(info)
}
