package node

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestHumanLog(t *testing.T) {
	tests := []struct {
		name string
		log  func(*slog.Logger)
		want string // after the time
	}{
		{"info", func(l *slog.Logger) { l.Info("peer ready", "peer", "12D3", "slices", 2) }, "peer ready  peer=12D3 slices=2"},
		{"level", func(l *slog.Logger) { l.Warn("slow") }, "WARN slow"},
		{"below level", func(l *slog.Logger) { l.Debug("x") }, ""},
		{"with", func(l *slog.Logger) { l.With("a", 1).Info("m", "b", 2) }, "m  a=1 b=2"},
		{"group", func(l *slog.Logger) { l.WithGroup("g").Info("m", "msg", 2) }, "m  g.msg=2"},
		{"terminal codes", func(l *slog.Logger) { l.Info("m", "reason", "\x1b[2Jx\ny") }, `m  reason="\x1b[2Jx\ny"`},
		{"spaces", func(l *slog.Logger) { l.Info("m", "err", errors.New("a b")) }, `m  err="a b"`},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var out bytes.Buffer
			tt.log(slog.New(newHumanHandler(&out, slog.LevelInfo)))
			_, got, _ := strings.Cut(out.String(), " ")
			if strings.TrimSuffix(got, "\n") != tt.want || strings.Count(out.String(), "\n") > 1 {
				t.Errorf("got %q, want %q", got, tt.want)
			}
		})
	}
}

// TestOpenLog: without a terminal, lines are JSON, to the file if there is one.
func TestOpenLog(t *testing.T) {
	dir := t.TempDir()
	for _, file := range []string{"", filepath.Join(dir, "log.json")} {
		stderr, err := os.Create(filepath.Join(dir, "stderr"))
		if err != nil {
			t.Fatal(err)
		}
		defer stderr.Close()
		l, err := OpenLog(LogSettings{Level: "warn", File: file}, stderr)
		if err != nil {
			t.Fatal(err)
		}
		l.Info("not this")
		l.Warn("this", "layer", 3)
		if err := errors.Join(l.Close(), l.Close()); err != nil {
			t.Errorf("close twice: %v", err)
		}
		name := file
		if file == "" {
			name = stderr.Name()
		}
		data, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		var line struct {
			Msg   string
			Layer int
		}
		if err := json.Unmarshal(data, &line); err != nil || line.Msg != "this" || line.Layer != 3 {
			t.Errorf("file %q: one line of JSON wanted, got %q, %v", file, data, err)
		}
	}
	if _, err := OpenLog(LogSettings{Level: "info", File: filepath.Join(dir, "none", "x")}, os.Stderr); err == nil {
		t.Error("a log file in a folder that is not there was accepted")
	}
}

func TestLogRotation(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	const limit, keep = 64, 3
	r, err := openRotating(path, limit, keep)
	if err != nil {
		t.Fatal(err)
	}
	var last string
	for i := range 100 {
		last = fmt.Sprintf("line %02d ------------\n", i) // 21 bytes: 3 fit
		if n, err := r.Write([]byte(last)); n != len(last) || err != nil {
			t.Fatal(n, err)
		}
		if i == 50 { // a restart goes on where it was
			r.Close()
			if r, err = openRotating(path, limit, keep); err != nil {
				t.Fatal(err)
			}
		}
	}
	long := strings.Repeat("x", 2*limit) + "\n" // longer than a file: whole, alone
	r.Write([]byte(long))
	r.Close()
	if _, err := r.Write([]byte("x")); !errors.Is(err, os.ErrClosed) {
		t.Errorf("write after close: %v", err)
	}
	files, err := filepath.Glob(path + "*")
	if err != nil || len(files) != keep {
		t.Fatalf("files %v, want %d", files, keep)
	}
	for i, want := range []string{long, last, "line 98 ------------\n"} {
		data, err := os.ReadFile(files[i])
		if err != nil || !strings.HasSuffix(string(data), want) {
			t.Errorf("%s holds %q, want it to end in %q (%v)", files[i], data, want, err)
		}
		info, err := os.Stat(files[i])
		if err != nil || info.Mode().Perm() != 0o600 || (i > 0 && info.Size() > limit) {
			t.Errorf("%s: %v bytes, mode %v, %v", files[i], info.Size(), info.Mode(), err)
		}
	}
}
