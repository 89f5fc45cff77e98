//go:build cgo && linux && soak

package node

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"kvasird/node/api"
)

// Soak: a swarm that formed itself has nothing to do for as long as KVASIR_SOAK says
// (`make soak`). It stays quiet, takes no more than it took, and answers at once when
// somebody asks.
const (
	idleCPU    = 0.02     // of a core, by each daemon
	idleLog    = 64 << 10 // bytes in an hour, by each daemon
	idleGrowth = 16 << 10 // KiB of memory
	soakSettle = 20 * time.Second
)

const goroutinesName = "goroutines"

// A daemon of this test writes how many goroutines it has when it is asked by a signal.
func init() {
	at := slices.Index(os.Args, "--data")
	if len(os.Args) < 2 || os.Args[1] != "run" || at < 0 {
		return
	}
	asked := make(chan os.Signal, 1)
	signal.Notify(asked, syscall.SIGUSR1)
	go func() {
		for range asked {
			path := filepath.Join(os.Args[at+1], goroutinesName)
			if err := os.WriteFile(path+".new", fmt.Append(nil, runtime.NumGoroutine()), 0o600); err == nil {
				os.Rename(path+".new", path)
			}
		}
	}()
}

// vitals is what a daemon has taken since it began, and takes.
type vitals struct {
	usage
	cpu        time.Duration
	log        int64 // bytes
	goroutines int
}

func (v vitals) String() string {
	return fmt.Sprintf("%d KiB, %d files, %d threads, %d goroutines", v.rss, v.files, v.threads, v.goroutines)
}

func logFile(c *child) string { return filepath.Join(filepath.Dir(c.dir), c.name+".log") }

func (c *child) vitals(t *testing.T) vitals {
	t.Helper()
	v := vitals{usage: c.usage(t)}
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", c.cmd.Process.Pid))
	if err != nil {
		t.Fatal(err)
	}
	fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')'):]))
	for _, f := range fields[12:14] { // user and system, in ticks of 10 ms
		ticks, err := strconv.Atoi(f)
		if err != nil {
			t.Fatal(err)
		}
		v.cpu += time.Duration(ticks) * 10 * time.Millisecond
	}
	info, err := os.Stat(logFile(c))
	if err != nil {
		t.Fatal(err)
	}
	v.log = info.Size()
	path := filepath.Join(c.dir, goroutinesName)
	os.Remove(path)
	c.cmd.Process.Signal(syscall.SIGUSR1)
	eventually(t, func() error {
		text, err := os.ReadFile(path)
		if err == nil {
			v.goroutines, err = strconv.Atoi(string(text))
		}
		return err
	})
	return v
}

func TestSoak(t *testing.T) {
	idle, err := time.ParseDuration(os.Getenv("KVASIR_SOAK"))
	if err != nil || idle < 10*time.Second {
		t.Fatalf("KVASIR_SOAK=%q: want how long, 10s or more", os.Getenv("KVASIR_SOAK"))
	}
	n := newNetwork(t, NewNetwork{Replicas: 1})
	ctx, cancel := context.WithTimeout(context.Background(), idle+5*time.Minute)
	defer cancel()
	n.ctx = ctx
	join := func(name string, args ...string) *child {
		return n.join(name, append(args, "--log-file", filepath.Join(n.dir, name+".log"))...)
	}
	n.backbone = join("backbone", "--model", n.whole, "--experts", "remote", "--wait", "60")
	all := []*child{n.backbone}
	for i := range 3 {
		all = append(all, join(fmt.Sprintf("v%d", i+1), "--memory", "8MB", "--disk", "1GB"))
	}
	st, err := n.backbone.await(n.ctx, serving)
	if err != nil {
		t.Fatal(err)
	}
	n.http = st.HTTP
	n.covered(n.backbone, 1)
	for _, q := range questions {
		n.sameAsAlone(q, nil)
	}
	time.Sleep(soakSettle)
	before := make([]vitals, len(all))
	for i, c := range all {
		before[i] = c.vitals(t)
	}
	began := time.Now()
	time.Sleep(idle)
	spent := time.Since(began)
	for i, c := range all {
		c.wasIdle(t, before[i], c.vitals(t), spent)
	}
	began = time.Now()
	if _, _, err := askTokens(n.ctx, n.backbone.client(), api.AskRequest{Prompt: questions[1], MaxTokens: 1}, io.Discard); err != nil {
		t.Fatal(err)
	}
	t.Logf("the first token after %v of nothing to do came in %v", idle, time.Since(began).Round(time.Millisecond))
	for _, q := range questions {
		n.sameAsAlone(q, nil)
	}
	for i, c := range all {
		c.level(t, before[i].usage)
	}
}

// wasIdle judges what a daemon took for nothing.
func (c *child) wasIdle(t *testing.T, before, after vitals, spent time.Duration) {
	t.Helper()
	cpu := (after.cpu - before.cpu).Seconds() / spent.Seconds()
	logged := float64(after.log-before.log) / spent.Hours()
	t.Logf("%s: %.2f %% of a core, %.0f bytes of log in an hour; %v, then %v", c.name, 100*cpu, logged, before, after)
	if cpu > idleCPU {
		t.Errorf("%s used %.2f %% of a core for nothing, want at most %.0f %%", c.name, 100*cpu, 100*idleCPU)
	}
	if after.log-before.log > idleLog/60 && logged > idleLog { // a line or two in a short test say nothing
		t.Errorf("%s logged %d bytes in %v, want at most %d in an hour", c.name, after.log-before.log, spent, idleLog)
	}
	if after.rss > before.rss+idleGrowth || after.files > before.files+2 || after.goroutines > before.goroutines+10 {
		t.Errorf("%s grew for nothing: %v before, %v after", c.name, before, after)
	}
}
