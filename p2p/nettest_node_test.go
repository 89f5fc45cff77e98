//go:build nettest && linux

package p2p_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/libp2p/go-libp2p/core/peer"

	"kvasird/p2p"
)

// patience is for what must happen, on a machine that may be busy.
const patience = 60 * time.Second

// node is a node under test, in its own process.
type node struct {
	t     testing.TB
	site  *site
	name  string
	id    peer.ID
	cmd   *exec.Cmd
	stdin io.WriteCloser
	log   string // file
	ended chan struct{}
	gone  bool // killed or frozen by the test
	done  bool // stopped

	mu       sync.Mutex // guards what follows
	changed  chan struct{}
	events   []nodeEvent
	answers  map[int]message
	requests int
}

// start runs a node at a site and waits until it is up.
func (s *site) start(spec nodeSpec) *node {
	s.w.t.Helper()
	n := &node{t: s.w.t, site: s, name: s.ns, ended: make(chan struct{}), changed: make(chan struct{}), answers: make(map[int]message)}
	dir := s.dir()
	if spec.Identity == "" {
		spec.Identity = filepath.Join(dir, "identity")
	}
	n.log = filepath.Join(dir, "log")
	if err := n.spawn(s); err != nil {
		n.t.Fatalf("start %s: %v", n.name, err)
	}
	n.t.Cleanup(n.stop)
	n.write(spec)
	n.id = n.await("come up", func(e nodeEvent) bool { return e.What == "up" }).Peer
	return n
}

// Where nodes listen unless a spec says something else, and the TLS websocket of relays.
const (
	viaTCP  = "/tcp/4001"
	viaQUIC = "/udp/4001/quic-v1"
	viaWeb  = "/tcp/443/tls/ws"
)

// at is the node's address for others.
func (n *node) at(via string) string {
	return fmt.Sprintf("/ip4/%s%s/p2p/%s", n.site.addr, via, n.id)
}

// dir is the site's own folder; a node that starts there again finds its identity.
func (s *site) dir() string {
	dir := filepath.Join(s.w.dir, s.ns)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		s.w.t.Fatal(err)
	}
	return dir
}

func (n *node) spawn(s *site) error {
	log, err := os.OpenFile(n.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	n.cmd = exec.Command("/proc/self/exe")
	n.cmd.Env = append(os.Environ(), roleEnv+"=node")
	n.cmd.Stderr = log
	out, errOut := n.cmd.StdoutPipe()
	in, errIn := n.cmd.StdinPipe()
	if err := errors.Join(errOut, errIn, inNamespace(s.ns, n.cmd.Start)); err != nil {
		return err
	}
	n.stdin = in
	go n.read(out)
	return nil
}

// read takes in what the node says until it ends.
func (n *node) read(out io.Reader) {
	defer close(n.ended)
	lines := json.NewDecoder(out)
	for {
		var m message
		if lines.Decode(&m) != nil {
			n.cmd.Wait()
			return
		}
		n.mu.Lock()
		if m.Event != nil {
			n.events = append(n.events, *m.Event)
		} else {
			n.answers[m.ID] = m
		}
		close(n.changed)
		n.changed = make(chan struct{})
		n.mu.Unlock()
	}
}

func (n *node) write(v any) {
	n.t.Helper()
	if err := json.NewEncoder(n.stdin).Encode(v); err != nil {
		n.t.Fatalf("%s: %v", n.name, err)
	}
}

// wait looks at what the node said, under n.mu, again after each message.
func (n *node) wait(bound time.Duration, look func() bool) bool {
	timeout := time.After(bound)
	for {
		n.mu.Lock()
		ok, changed := look(), n.changed
		n.mu.Unlock()
		if ok {
			return true
		}
		select {
		case <-changed:
		case <-n.ended:
			return false
		case <-timeout:
			return false
		}
	}
}

// await returns the first event, from the start on, for which is holds.
func (n *node) await(what string, is func(nodeEvent) bool) nodeEvent {
	n.t.Helper()
	return n.awaitSince(what, time.Time{}, is)
}

func (n *node) awaitSince(what string, since time.Time, is func(nodeEvent) bool) (found nodeEvent) {
	n.t.Helper()
	ok := n.wait(patience, func() bool {
		for _, e := range n.events {
			if e.At.After(since) && is(e) {
				found = e
				return true
			}
		}
		return false
	})
	if !ok {
		n.t.Fatalf("%s ended, or did not %s within %v", n.name, what, patience)
	}
	return found
}

// meets waits until other is ready here over a path, and says how.
func (n *node) meets(other *node, path p2p.Path) nodeEvent {
	n.t.Helper()
	return n.meetsSince(other, path, time.Time{})
}

func (n *node) meetsSince(other *node, path p2p.Path, since time.Time) nodeEvent {
	n.t.Helper()
	return n.awaitSince(fmt.Sprintf("meet %s (%s)", other.name, path), since, func(e nodeEvent) bool {
		return e.What == "ready" && e.Peer == other.id && (path == "" || e.Path == path)
	})
}

// loses waits until other is lost here.
func (n *node) loses(other *node, since time.Time) nodeEvent {
	n.t.Helper()
	return n.awaitSince("lose "+other.name, since, func(e nodeEvent) bool {
		return e.What == "lost" && e.Peer == other.id
	})
}

// now is the path to other at the moment; "" when it is not ready.
func (n *node) now(other *node) p2p.Path {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.nowLocked(other)
}

func (n *node) nowLocked(other *node) (path p2p.Path) {
	for _, e := range n.events {
		if e.Peer == other.id && (e.What == "ready" || e.What == "lost") {
			path = e.Path
		}
	}
	return path
}

// has waits until other is ready.
func (n *node) has(other *node) {
	n.t.Helper()
	if !n.wait(patience, func() bool { return n.nowLocked(other) != "" }) {
		n.t.Fatalf("%s does not have %s after %v", n.name, other.name, patience)
	}
}

// call has the node do something and stores the result.
func (n *node) call(op string, arg, result any) error {
	n.t.Helper()
	raw, err := json.Marshal(arg)
	if err != nil {
		n.t.Fatal(err)
	}
	n.mu.Lock()
	n.requests++
	id := n.requests
	n.mu.Unlock()
	n.write(request{ID: id, Op: op, Arg: raw})
	var answer message
	if !n.wait(2*patience, func() bool { m, ok := n.answers[id]; answer = m; return ok }) {
		n.t.Fatalf("%s ended, or did not answer %s", n.name, op)
	}
	if answer.Error != "" {
		return errors.New(answer.Error)
	}
	if result == nil {
		return nil
	}
	return json.Unmarshal(answer.Result, result)
}

// hears waits until other's words have come here.
func (n *node) hears(other *node, text string, since time.Time) nodeEvent {
	n.t.Helper()
	return n.awaitSince("hear "+text, since, func(e nodeEvent) bool {
		return e.What == "heard" && e.Peer == other.id && e.Text == text
	})
}

// reports waits until what the node says of its connections is as wanted.
func (n *node) reports(what string, is func(p2p.Report) bool) p2p.Report {
	n.t.Helper()
	for end := time.Now().Add(patience); ; time.Sleep(200 * time.Millisecond) {
		var r p2p.Report
		if err := n.call("report", nil, &r); err != nil {
			n.t.Fatal(err)
		}
		if is(r) {
			return r
		}
		if time.Now().After(end) {
			n.t.Fatalf("%s does not report %s within %v: %+v", n.name, what, patience, r)
		}
	}
}

// measures waits until the round-trip time to other is known: from then on its heart is
// heard.
func (n *node) measures(other *node) time.Duration {
	n.t.Helper()
	for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
		var rtt time.Duration
		if err := n.call("rtt", other.id, &rtt); err != nil {
			n.t.Fatal(err)
		}
		if rtt > 0 {
			return rtt
		}
	}
	n.t.Fatalf("%s has no round-trip time to %s after %v", n.name, other.name, patience)
	return 0
}

// echo has other send back frames and returns the round trips' times.
func (n *node) echo(other *node, size, count int, lane bool) []time.Duration {
	n.t.Helper()
	var times []time.Duration
	if err := n.call("echo", echoArg{Peer: other.id, Size: size, Count: count, Lane: lane}, &times); err != nil {
		n.t.Fatalf("%s: echo by %s: %v", n.name, other.name, err)
	}
	return times
}

func (n *node) signal(sig syscall.Signal) {
	n.t.Helper()
	n.gone = true
	if err := n.cmd.Process.Signal(sig); err != nil {
		n.t.Fatal(err)
	}
}

// kill ends the node without a word to anybody.
func (n *node) kill() {
	n.t.Helper()
	n.signal(syscall.SIGKILL)
	<-n.ended
}

// stop has the node close its host and end, unless the test has ended it.
func (n *node) stop() {
	if n.done {
		return
	}
	n.done = true
	n.stdin.Close()
	if n.gone {
		n.cmd.Process.Kill()
	}
	select {
	case <-n.ended:
	case <-time.After(patience):
		n.t.Errorf("%s did not close within %v", n.name, patience)
		n.cmd.Process.Kill()
		<-n.ended
	}
	if code := n.cmd.ProcessState.ExitCode(); code != 0 && !n.gone {
		n.t.Errorf("%s ended with status %d", n.name, code)
	}
	if n.t.Failed() {
		n.t.Logf("the end of the log of %s\n%s", n.name, n.tail())
	}
}

// tail is the end of the node's log.
func (n *node) tail() string {
	raw, err := os.ReadFile(n.log)
	if err != nil {
		return err.Error()
	}
	lines := strings.Split(strings.TrimSpace(string(raw)), "\n")
	lines = lines[max(0, len(lines)-20):]
	for i, l := range lines {
		lines[i] = l[:min(len(l), 1000)]
	}
	return "\t" + strings.Join(lines, "\n\t")
}
