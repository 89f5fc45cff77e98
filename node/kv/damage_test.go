package kv

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

func blocks(t *testing.T, path string) int64 {
	t.Helper()
	var st syscall.Stat_t
	if err := syscall.Stat(path, &st); err != nil {
		if os.IsNotExist(err) {
			return 0
		}
		t.Fatal(err)
	}
	return st.Blocks * 512
}

const (
	damageValues = 30
	damageBytes  = 90_000
)

func damageConfig(path string) Config {
	return Config{
		Path: path, Spaces: map[string]Bounds{"a": {time.Hour, 64 << 20}},
		Logger: slog.New(slog.NewTextHandler(os.Stdout, nil)), reserve: 1,
	}
}

// child is a process that uses a store: "write" puts values until it is killed,
// and prints each that is put; "check" looks at all of the damage test, and says
// what it found; "store" is storeChild.
func child(what, path string) int {
	if what == "store" {
		return storeChild(path)
	}
	db, err := Open(damageConfig(path))
	if err != nil {
		fmt.Println("cannot open:", err)
		return 3
	}
	s := db.Space("a")
	if what == "write" {
		for i := 0; ; i++ {
			if err := s.Put(context.Background(), fmt.Sprint("k", i%20), noise(uint64(i), damageBytes)); err != nil {
				fmt.Println("cannot put:", err)
				return 3
			}
			fmt.Println("put", i)
		}
	}
	kept := 0
	for i := range damageValues {
		got, ok, err := s.Get(context.Background(), fmt.Sprint("k", i))
		switch {
		case err != nil || ok && !bytes.Equal(got, noise(uint64(i), damageBytes)):
			fmt.Println("wrong value", i, err)
			return 3
		case ok:
			kept++
		}
	}
	if err := s.Put(context.Background(), "after", []byte("x")); err != nil {
		fmt.Println("cannot put after damage:", err)
		return 3
	}
	if err := db.Close(); err != nil {
		fmt.Println("cannot close:", err)
		return 3
	}
	fmt.Println("kept", kept)
	return 0
}

// makeStore fills a folder; closed, or as a killed process leaves it.
func makeStore(t *testing.T, path string, closed bool) {
	t.Helper()
	cfg := damageConfig(path)
	cfg.Logger = slog.New(slog.DiscardHandler)
	db, err := Open(cfg)
	if err != nil {
		t.Fatal(err)
	}
	for i := range damageValues {
		if err := db.Space("a").Put(t.Context(), fmt.Sprint("k", i), noise(uint64(i), damageBytes)); err != nil {
			t.Fatal(err)
		}
	}
	if closed {
		if err := db.Close(); err != nil {
			t.Fatal(err)
		}
		return
	}
	t.Cleanup(func() { db.Close() })
}

// snapshot copies a store, perhaps one that is open and busy with its files.
func snapshot(t *testing.T, from, to string) {
	t.Helper()
	var err error
	for range 50 {
		if err = os.CopyFS(to, os.DirFS(from)); err == nil {
			break
		}
		os.RemoveAll(to)
		time.Sleep(20 * time.Millisecond)
	}
	state, stateErr := os.ReadFile(from + ".state")
	if err := errors.Join(err, stateErr, os.WriteFile(to+".state", state, 0o600)); err != nil {
		t.Fatal(err)
	}
}

var damages = []struct {
	name string
	do   func(path string, b []byte) error
}{
	{"removed", func(path string, _ []byte) error { return os.Remove(path) }},
	{"emptied", func(path string, _ []byte) error { return os.Truncate(path, 0) }},
	{"halved", func(path string, b []byte) error { return os.Truncate(path, int64(len(b)/2)) }},
	{"random", func(path string, b []byte) error { return os.WriteFile(path, noise(9, len(b)), 0o600) }},
	{"flipped in the middle", func(path string, b []byte) error { return flip(path, b, len(b)/2) }},
	{"flipped at the end", func(path string, b []byte) error { return flip(path, b, len(b)-3) }},
}

func flip(path string, b []byte, at int) error {
	if at >= 0 && at < len(b) {
		b[at] ^= 0x55
	}
	return os.WriteFile(path, b, 0o600)
}

// TestDamage harms each file of a store in each way: within three starts it is open
// again, and no value is ever wrong.
func TestDamage(t *testing.T) {
	for _, closed := range []bool{true, false} {
		live, model := filepath.Join(t.TempDir(), "kv"), filepath.Join(t.TempDir(), "kv")
		makeStore(t, live, closed)
		snapshot(t, live, model)
		files, err := filepath.Glob(filepath.Join(model, "*"))
		if err != nil {
			t.Fatal(err)
		}
		seen := map[string]bool{}
		for _, f := range append(files, model+".state") {
			name := filepath.Base(f)
			ext := filepath.Ext(name)
			if ext != "" && seen[ext] || !closed && ext != ".mem" && ext != ".vlog" {
				continue // one for all of a kind; what is busy is the table in memory and the log
			}
			seen[ext] = true
			for _, d := range damages {
				t.Run(fmt.Sprintf("closed=%v/%s/%s", closed, name, d.name), func(t *testing.T) { harm(t, model, f, d.do) })
			}
		}
	}
}

func harm(t *testing.T, model, file string, do func(string, []byte) error) {
	path := filepath.Join(t.TempDir(), "kv")
	snapshot(t, model, path)
	file = path + strings.TrimPrefix(file, model)
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if err := do(file, b); err != nil {
		t.Fatal(err)
	}
	for start := 1; ; start++ {
		t.Logf("start %d", start)
		out, err := exec.Command(os.Args[0], "child", "check", path).CombinedOutput()
		if err == nil {
			_, kept, _ := strings.Cut(string(out), "kept ")
			aside := "nothing aside"
			if _, err := os.Stat(path + ".damaged"); err == nil {
				aside = "moved aside"
				if !strings.Contains(string(out), "a new one is begun") {
					t.Errorf("moved aside without a word: %s", out)
				}
			}
			t.Logf("start %d: kept %s, %s", start, strings.TrimSpace(kept), aside)
			return
		}
		if start == 3 || strings.Contains(string(out), "wrong value") {
			t.Fatalf("start %d: %v\n%.3000s", start, err, out)
		}
	}
}

// TestStateNotWritten: when only the state file cannot be written, the store is no damaged one.
func TestStateNotWritten(t *testing.T) {
	path := filepath.Join(t.TempDir(), "kv")
	makeStore(t, path, true)
	state, err := lockState(path + ".state")
	if err != nil {
		t.Fatal(err)
	}
	state.Close()
	if _, err := open(damageConfig(path), state); !errors.Is(err, os.ErrClosed) {
		t.Errorf("opened with %v", err)
	}
	if _, err := os.Stat(path + ".damaged"); !os.IsNotExist(err) {
		t.Errorf("it was moved aside (%v)", err)
	}
}

// TestKilled ends processes amid their writing: what was put is there after.
func TestKilled(t *testing.T) {
	path := filepath.Join(t.TempDir(), "kv")
	for round := range 5 {
		cmd := exec.Command(os.Args[0], "child", "write", path)
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		last := -1
		for lines := bufio.NewScanner(out); lines.Scan(); {
			text, ok := strings.CutPrefix(lines.Text(), "put ")
			if !ok {
				t.Log(lines.Text())
				continue
			}
			if last, err = strconv.Atoi(text); err != nil {
				t.Fatal(err)
			}
			if last == 30+round*7 {
				cmd.Process.Kill()
			}
		}
		cmd.Wait()
		if last < 30 {
			t.Fatalf("the child ended after %d values", last)
		}
		var log bytes.Buffer
		cfg := damageConfig(path)
		cfg.Logger = slog.New(slog.NewTextHandler(&log, nil))
		db, err := Open(cfg)
		if err != nil {
			t.Fatal(err)
		}
		for i := last - 18; i <= last; i++ { // the next one may have replaced its predecessor by 20
			got, ok, err := db.Space("a").Get(t.Context(), fmt.Sprint("k", i%20))
			if err != nil || !ok || !bytes.Equal(got, noise(uint64(i), damageBytes)) {
				t.Errorf("round %d, value %d of %d: there %v, %v", round, i, last, ok, err)
			}
		}
		if strings.Contains(log.String(), "aside") {
			t.Errorf("a killed process damaged the store: %s", log.String())
		}
		if err := db.Close(); err != nil {
			t.Fatal(err)
		}
	}
}
