package node

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestOpenData(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "a", "b")
	d, err := OpenData(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range []string{dir, filepath.Dir(dir)} {
		if info, err := os.Stat(p); err != nil || info.Mode().Perm() != 0o700 {
			t.Errorf("%s: %v, %v, want mode 0700", p, info.Mode(), err)
		}
	}
	if _, err := OpenData(dir); err == nil || !strings.Contains(err.Error(), "in use by another kvasird") {
		t.Errorf("a second daemon: %v", err)
	}
	d.Close()
	d.Close()
	again, err := OpenData(dir)
	if err != nil {
		t.Fatalf("after Close: %v", err)
	}
	again.Close()
}

func TestOpenDataRefuses(t *testing.T) {
	dir := t.TempDir()
	open := filepath.Join(dir, "open")
	if err := os.Mkdir(open, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(open, 0o777); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]string{open: "chmod 700 " + open, file: "not a directory"} {
		if d, err := OpenData(path); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, %v, want an error with %q", path, d, err, want)
		}
	}
}
