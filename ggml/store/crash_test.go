package store

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

var errCrash = errors.New("crashed")

// crasher lets every change on disk fail from the given one on, as if the process had
// died there. It keeps what each file held when it was last made durable.
type crasher struct {
	mu     sync.Mutex
	left   int // changes until the crash
	fail   int // changes until the one that fails alone; negative for none
	synced map[string][]byte
}

func newCrasher(left int) *crasher {
	return &crasher{left: left, fail: -1, synced: make(map[string][]byte)}
}

func (c *crasher) dieAfter(changes int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.left = changes
}

func (c *crasher) before(op, path string) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.left <= 0 {
		return errCrash
	}
	c.left--
	if c.fail--; c.fail == -1 {
		return syscall.EIO
	}
	if op == "sync" && strings.HasSuffix(path, ".gguf") {
		b, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		c.synced[filepath.Base(path)] = b
	}
	return nil
}

// losePower takes from the data files what was not made durable. What was given back
// to the disk stays gone: that is the worst that can happen.
func (c *crasher) losePower(t *testing.T, dir string) {
	paths, err := filepath.Glob(filepath.Join(dir, "*", "*.gguf"))
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range paths {
		now, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		durable := c.synced[filepath.Base(path)]
		for off := 0; off < len(now); off += Group {
			group := now[off:min(off+Group, len(now))]
			if bytes.Equal(group, make([]byte, len(group))) {
				continue
			}
			clear(group)
			if off < len(durable) {
				copy(group, durable[off:])
			}
		}
		if err := os.WriteFile(path, now, 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// memoryDir returns a folder where a sync costs nothing, if there is one: what a crash
// loses is simulated.
func memoryDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("/dev/shm", "store")
	if err != nil {
		return t.TempDir()
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

// stride is how far apart the changes are at which something is made to happen: the race
// detector looks at some of them.
func stride() int {
	if raceEnabled {
		return 5
	}
	return 1
}

// scenario is a life of a store, in which a step that fails by itself is tried again.
// sure are the groups of file 0 that must be held whatever happens later.
func (fx *fixture) scenario(s *Store, sure map[int]bool) error {
	m, err := s.Create(fx.id, fx.sums)
	if errors.Is(err, syscall.EIO) {
		m, err = s.Create(fx.id, fx.sums)
	}
	if err != nil {
		return err
	}
	flush := func(groups ...int) error {
		err := m.Flush()
		for _, g := range groups {
			sure[g] = err == nil && m.Holds(0, int64(g)*Group, 1)
		}
		return err
	}
	steps := []func() error{
		func() error { return m.SetTree(0, fx.trees[0]) },
		func() error { return m.SetTree(1, fx.trees[1]) },
		func() error { return fx.write(m, 0, Span{0, 3 * Group}) },
		func() error { return flush(0, 1, 2) },
		func() error { return fx.write(m, 0, Span{4 * Group, 2 * Group}) },
		func() error { return fx.write(m, 1, fx.whole(1)) },
		func() error { delete(sure, 1); return m.Drop(0, []Span{{Group, Group}, {4 * Group, Group}}) },
		func() error { return fx.write(m, 0, Span{Group, Group}) },
		func() error { return flush(1, 5) },
		func() error { return s.Pin(fx.id, true) },
		func() error { delete(sure, 0); return m.Drop(0, []Span{{0, Group}}) },
		func() error { return fx.write(m, 0, fx.whole(0)) },
		func() error { return flush(0, 3, 4, 6) },
	}
	for _, step := range steps {
		err := step()
		if errors.Is(err, syscall.EIO) {
			err = step()
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// TestCrashAnywhere stops a store before each change on disk that it makes, as a kill
// and as a loss of power, and looks at what the next one finds.
func TestCrashAnywhere(t *testing.T) {
	fx := newFixture(randomData(1, 6*Group+77), randomData(2, Group+1))
	dir := memoryDir(t)
	for at, finished := 0, false; !finished; at += stride() {
		killed, unplugged := filepath.Join(dir, fmt.Sprint(at), "killed"), filepath.Join(dir, fmt.Sprint(at), "unplugged")
		c := newCrasher(at)
		s, err := open(killed, 0, &disk{before: c.before})
		if err != nil {
			t.Fatal(err)
		}
		sure := make(map[int]bool)
		err = fx.scenario(s, sure)
		if finished = err == nil; !finished && !errors.Is(err, errCrash) {
			t.Fatalf("crash before change %d: %v", at, err)
		}
		c.dieAfter(0)
		s.Close() // fails, as the process is dead
		if err := os.CopyFS(unplugged, os.DirFS(killed)); err != nil {
			t.Fatal(err)
		}
		c.losePower(t, unplugged)
		for _, dir := range []string{killed, unplugged} {
			fx.checkSurvivor(t, dir, sure, fmt.Sprintf("crash before change %d, %s", at, filepath.Base(dir)))
		}
		if os.RemoveAll(filepath.Dir(killed)); at > 200 {
			t.Fatal("the scenario does not end")
		}
	}
}

// TestFailureAnywhere lets each change on disk fail once, with a crash at the end.
func TestFailureAnywhere(t *testing.T) {
	fx := newFixture(randomData(1, 6*Group+77), randomData(2, Group+1))
	dir := memoryDir(t)
	for at := 0; ; at += stride() {
		sub := filepath.Join(dir, fmt.Sprint(at))
		c := newCrasher(1 << 30)
		s, err := open(sub, 0, &disk{before: c.before})
		if err != nil {
			t.Fatal(err)
		}
		c.fail = at
		sure := make(map[int]bool)
		if err := fx.scenario(s, sure); err != nil {
			t.Fatalf("failure of change %d: %v", at, err)
		}
		fx.checkHeld(t, s.Model(fx.id))
		c.dieAfter(0)
		s.Close()
		c.losePower(t, sub)
		fx.checkSurvivor(t, sub, sure, fmt.Sprintf("failure of change %d", at))
		os.RemoveAll(sub)
		if c.fail >= 0 {
			return // the scenario has fewer changes
		}
	}
}

// TestDropAfterFailedFlush gives groups back that a flush may have put into the set on
// disk although it failed.
func TestDropAfterFailedFlush(t *testing.T) {
	fx := newFixture(randomData(1, 4*Group))
	for at := range 6 { // the changes of a flush
		dir := t.TempDir()
		c := newCrasher(1 << 30)
		s, err := open(dir, 0, &disk{before: c.before})
		if err != nil {
			t.Fatal(err)
		}
		m := fx.create(t, s)
		m.flushMu.Lock() // keeps the flush in the background away
		fx.mustWrite(t, m, 0, fx.whole(0))
		c.fail = at
		if err := m.flushFile(0); !errors.Is(err, syscall.EIO) {
			t.Fatalf("change %d did not fail: %v", at, err)
		}
		m.flushMu.Unlock()
		if err := m.Drop(0, []Span{{0, 2 * Group}}); err != nil {
			t.Fatal(err)
		}
		c.dieAfter(0)
		s.Close()
		fx.checkSurvivor(t, dir, nil, fmt.Sprintf("failure of change %d of a flush", at))
	}
}

// checkSurvivor opens a store after a crash: it must hold what is sure, nothing wrong,
// and be able to go on.
func (fx *fixture) checkSurvivor(t *testing.T, dir string, sure map[int]bool, what string) {
	t.Helper()
	c := newCrasher(1 << 30)
	s, err := open(dir, 0, &disk{before: c.before})
	if err != nil {
		t.Fatalf("%s: %v", what, err)
	}
	defer func() { c.dieAfter(0); s.Close() }() // quickly: nobody opens it again
	if p := s.Problems(); len(p) > 0 {
		t.Errorf("%s: %v", what, p)
	}
	if left, _ := filepath.Glob(filepath.Join(dir, ".*")); len(left) > 0 {
		t.Errorf("%s: left %v", what, left)
	}
	if m := s.Model(fx.id); m != nil {
		fx.checkHeld(t, m)
		for g, must := range sure {
			if must && !m.Holds(0, int64(g)*Group, 1) {
				t.Errorf("%s: group %d was durable and is lost", what, g)
			}
		}
	} else if len(sure) > 0 {
		t.Errorf("%s: the model is lost", what)
	}
	m := fx.create(t, s)
	for i := range fx.data {
		fx.mustWrite(t, m, i, fx.whole(i))
	}
	if !m.Complete() {
		t.Errorf("%s: the model could not be completed", what)
	}
}

// The child that TestKill kills writes, drops and flushes groups at random for ever.
// It says on its standard output, before or after it happens, what the parent may
// count on: "drop N" before, "flushed N N …" after.
const killedEnv = "KVASIR_STORE_TEST_DIR"

const killedGroups = 96

func killedFixture() *fixture { return newFixture(randomData(9, killedGroups*Group-1000)) }

func TestMain(m *testing.M) {
	if dir := os.Getenv(killedEnv); dir != "" {
		err := killedChild(dir)
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(m.Run())
}

func killedChild(dir string) error {
	fx := killedFixture()
	s, err := Open(dir, 0)
	if err != nil {
		return err
	}
	m, err := s.Create(fx.id, fx.sums)
	if err != nil {
		return err
	}
	if err := m.SetTree(0, fx.trees[0]); err != nil {
		return err
	}
	for err == nil {
		g := rand.IntN(killedGroups)
		n := min(1+rand.IntN(4), killedGroups-g)
		span := Span{int64(g) * Group, min(int64(n)*Group, fx.sums[0].Size-int64(g)*Group)}
		switch rand.IntN(8) {
		case 0:
			fmt.Println("drop", g, g+n)
			err = m.Drop(0, []Span{span})
		case 1, 2:
			held := slices.Collect(groupsIn(m.Held(0)))
			err = m.Flush()
			fmt.Println("flushed", strings.Trim(fmt.Sprint(held), "[]"))
		default:
			err = fx.write(m, 0, span)
		}
	}
	return err
}

func TestKill(t *testing.T) {
	fx, dir := killedFixture(), t.TempDir()
	for round := range 6 {
		child := exec.Command(os.Args[0])
		child.Env = append(os.Environ(), killedEnv+"="+dir)
		var stderr bytes.Buffer
		child.Stderr = &stderr
		out, err := child.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := child.Start(); err != nil {
			t.Fatal(err)
		}
		sure := make(map[int]bool)
		lines := bufio.NewScanner(out)
		lines.Buffer(nil, 1<<20)
		for doomed := false; lines.Scan(); {
			readPromise(t, lines.Text(), sure)
			// In every other round something was flushed before its time is measured.
			if !doomed && (round%2 == 0 || len(sure) > 0) {
				doomed = true
				time.AfterFunc(time.Duration(rand.IntN(400))*time.Millisecond, func() { child.Process.Kill() })
			}
		}
		if err := child.Wait(); child.ProcessState.Exited() {
			t.Fatalf("round %d: the child ended by itself: %v: %s", round, err, stderr.String())
		}
		s, err := Open(dir, 0)
		if err != nil {
			t.Fatal(err)
		}
		m := s.Model(fx.id)
		if m == nil || len(s.Problems()) > 0 {
			t.Fatalf("round %d: model %v, problems %v", round, m, s.Problems())
		}
		fx.checkHeld(t, m)
		for g := range sure {
			if !m.Holds(0, int64(g)*Group, 1) {
				t.Errorf("round %d: group %d was flushed and is lost", round, g)
			}
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// readPromise takes in one line of the child, which is short enough to be written to a
// pipe in one piece.
func readPromise(t *testing.T, line string, sure map[int]bool) {
	fields := strings.Fields(line)
	if len(fields) == 0 {
		return
	}
	var groups []int
	for _, f := range fields[1:] {
		g, err := strconv.Atoi(f)
		if err != nil {
			t.Fatalf("the child said %q", line)
		}
		groups = append(groups, g)
	}
	switch fields[0] {
	case "drop":
		for g := groups[0]; g < groups[1]; g++ {
			delete(sure, g)
		}
	case "flushed":
		for _, g := range groups {
			sure[g] = true
		}
	}
}
