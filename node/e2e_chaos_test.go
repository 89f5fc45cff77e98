//go:build cgo && linux && chaos

package node

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// Chaos: six volunteers, two replicas of every expert, blows for three minutes
// under requests without a pause. No request fails, every answer is the model's,
// and after each blow the coverage comes back. It runs in a network namespace of
// its own (`make test-chaos`), where it may drop packets.
const (
	chaosTime     = 3 * time.Minute
	recovery      = 90 * time.Second // for the coverage to be back, on a machine as busy as this
	chaosWorkers  = 6
	chaosReplicas = 2
)

// blow is something that happens to a volunteer. The returned function, which may
// be nil, ends it; the volunteer is then to come back.
type blow struct {
	name   string
	strike func(c *chaos, i int) (mend func())
}

var blows = []blow{
	{"kill -9", func(c *chaos, i int) func() {
		v := c.volunteers[i]
		v.cmd.Process.Kill()
		<-v.exited
		return func() { c.again(i) }
	}},
	{"SIGSTOP", func(c *chaos, i int) func() {
		v := c.volunteers[i]
		v.cmd.Process.Signal(syscall.SIGSTOP)
		return func() { v.cmd.Process.Signal(syscall.SIGCONT) }
	}},
	{"black hole", func(c *chaos, i int) func() { return c.cutOff(c.addr(i)) }},
	{"restart", func(c *chaos, i int) func() {
		if err := c.volunteers[i].stop(); err != nil {
			c.t.Error(err)
		}
		return func() { c.again(i) }
	}},
}

type chaos struct {
	*network
	volunteers []*child
}

func (c *chaos) addr(i int) string { return fmt.Sprintf("127.0.0.%d", 11+i) }

// volunteer starts volunteer i, or starts it again with what it had.
func (c *chaos) volunteer(i int) *child {
	return c.start(fmt.Sprintf("v%d", i), "--network", c.file, "--listen", "/ip4/"+c.addr(i)+"/tcp/0",
		"--http", Off, "--memory", "9MB", "--disk", "1GB")
}

// again starts a volunteer that ended, and waits until it answers: a signal before
// that would end it without a word.
func (c *chaos) again(i int) {
	c.t.Helper()
	c.volunteers[i] = c.volunteer(i)
	if _, err := c.volunteers[i].await(c.ctx, serving); err != nil {
		c.t.Fatal(err)
	}
}

func (c *chaos) nft(args ...string) {
	c.t.Helper()
	if out, err := exec.Command("nft", args...).CombinedOutput(); err != nil {
		c.t.Errorf("nft %s: %v: %s", strings.Join(args, " "), err, out)
	}
}

// blackHole makes a place for addresses whose packets are dropped.
func (c *chaos) blackHole() {
	c.t.Helper()
	c.nft("add", "table", "inet", "kvchaos")
	c.t.Cleanup(func() { c.nft("delete", "table", "inet", "kvchaos") })
	c.nft("add", "set", "inet", "kvchaos", "lost", "{", "type", "ipv4_addr", ";", "}")
	c.nft("add", "chain", "inet", "kvchaos", "out", "{", "type", "filter", "hook", "output", "priority", "0", ";", "}")
	c.nft("add", "rule", "inet", "kvchaos", "out", "ip", "saddr", "@lost", "drop")
	c.nft("add", "rule", "inet", "kvchaos", "out", "ip", "daddr", "@lost", "drop")
}

// cutOff drops what comes from an address and goes to it.
func (c *chaos) cutOff(addr string) (mend func()) {
	c.nft("add", "element", "inet", "kvchaos", "lost", "{", addr, "}")
	return func() { c.nft("delete", "element", "inet", "kvchaos", "lost", "{", addr, "}") }
}

// recovered waits until the coverage is at its target, and returns how long that took.
func (c *chaos) recovered(what string) time.Duration {
	c.t.Helper()
	began := time.Now()
	for {
		maps, err := c.backbone.client().Coverage(c.ctx)
		if err == nil && len(maps) == 1 {
			err = leastCovered(maps[0], chaosReplicas)
		}
		if err == nil && len(maps) == 1 {
			return time.Since(began)
		}
		if time.Since(began) > recovery {
			c.t.Fatalf("%s: after %v: %v", what, recovery, err)
		}
		time.Sleep(100 * time.Millisecond)
	}
}

func TestChaos(t *testing.T) {
	c := &chaos{network: newNetwork(t, NewNetwork{Replicas: chaosReplicas})}
	ctx, cancel := context.WithTimeout(context.Background(), 9*time.Minute)
	defer cancel()
	c.ctx = ctx
	c.blackHole()
	c.backbone = c.join("backbone", "--model", c.whole, "--experts", "remote", "--wait", "60")
	for i := range chaosWorkers {
		c.volunteers = append(c.volunteers, c.volunteer(i))
	}
	first, done := context.WithTimeout(c.ctx, 2*time.Minute)
	defer done()
	st, err := c.backbone.await(first, serving)
	if err != nil {
		t.Fatal(err)
	}
	c.http = st.HTTP
	t.Logf("%v until every expert had %d replicas", c.recovered("the start").Round(time.Second), chaosReplicas)
	c.sameAsAlone(questions[0], nil)
	before := c.backbone.usage(t)

	stop := make(chan struct{})
	var asking sync.WaitGroup
	answers, longest := 0, time.Duration(0)
	asking.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
			}
			q := questions[answers%len(questions)]
			began := time.Now()
			status, got, body := c.chat(long(q), func(int) {})
			longest = max(longest, time.Since(began))
			if want := reference().answer(t, q, true); status != http.StatusOK || got != want || body != "" {
				t.Errorf("request %d: status %d, error %q\n got %q\nwant %q", answers, status, body, got, want)
			}
			answers++
		}
	})
	random := rand.New(rand.NewPCG(1, uint64(os.Getpid())))
	for end := time.Now().Add(chaosTime); time.Now().Before(end) && !t.Failed(); {
		b, i := blows[random.IntN(len(blows))], random.IntN(chaosWorkers)
		mend := b.strike(c, i)
		lasts := time.Duration(4+random.IntN(8)) * time.Second
		time.Sleep(lasts)
		mend()
		t.Logf("%s of v%d for %v: the coverage is back %v later, %d answers", b.name, i, lasts, c.recovered(b.name).Round(time.Millisecond), answers)
	}
	close(stop)
	asking.Wait()
	t.Logf("%d answers, all the model's; the longest took %v", answers, longest.Round(time.Millisecond))
	c.sameAsAlone(questions[1], nil)
	before.files += 2 * chaosWorkers // whoever came back may fetch, or be fetched from
	c.backbone.level(t, before)
}
