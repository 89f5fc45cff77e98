package p2p

import (
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/libp2p/go-libp2p/core/peer"
)

// hearings is what a topic handed over.
type hearings struct {
	mu  sync.Mutex
	all []Envelope
}

func (l *hearings) handle(e Envelope) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.all = append(l.all, e)
}

func (l *hearings) bodies() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	var out []string
	for _, e := range l.all {
		out = append(out, string(e.Body))
	}
	return out
}

func (l *hearings) heard(body string) bool { return slices.Contains(l.bodies(), body) }

const testTopic = "coverage"

// startGossip starts a host that joined testTopic.
func startGossip(t testing.TB, change func(*Config)) (*Host, *Topic, *hearings) {
	t.Helper()
	h, log := startHost(t, change), &hearings{}
	topic, err := h.JoinTopic(TopicConfig{Name: testTopic, MaxBody: 1000, Handle: log.handle})
	if err != nil {
		t.Fatal(err)
	}
	return h, topic, log
}

func latestOf(topic *Topic, id peer.ID) string {
	for _, e := range topic.Latest() {
		if e.From == id {
			return string(e.Body)
		}
	}
	return ""
}

func TestGossip(t *testing.T) {
	a, ta, la := startGossip(t, nil)
	b, tb, lb := startGossip(t, nil)
	c, tc, lc := startGossip(t, nil)
	// A line: what a says reaches c only by b.
	hello(t, a, b)
	hello(t, b, c)
	for i, from := range []*Topic{ta, tb, tc, ta} {
		body := fmt.Sprintf("news %d", i)
		if err := from.Publish([]byte(body), time.Minute); err != nil {
			t.Fatal(err)
		}
		for j, log := range []*hearings{la, lb, lc} {
			if j != i%3 {
				eventually(t, body+" arrives", func() bool { return log.heard(body) })
			}
		}
	}
	for _, topic := range []*Topic{ta, tb, tc} {
		if got := []string{latestOf(topic, a.ID()), latestOf(topic, b.ID()), latestOf(topic, c.ID())}; !slices.Equal(got, []string{"news 3", "news 1", "news 2"}) {
			t.Errorf("latest: %q", got)
		}
	}
	if la.heard("news 0") {
		t.Error("own envelope was handed over")
	}
	if list := b.Standings(); len(list) != 0 {
		t.Errorf("honest peers have faults: %v", list)
	}
}

// Who comes late learns what was said before, and a restart counts once.
func TestGossipLateJoiner(t *testing.T) {
	a, ta, _ := startGossip(t, nil)
	if err := ta.Publish([]byte("early"), time.Minute); err != nil {
		t.Fatal(err)
	}
	id, err := NewIdentity()
	if err != nil {
		t.Fatal(err)
	}
	for i := range 3 {
		b, tb, lb := startGossip(t, func(c *Config) { c.Identity = id })
		hello(t, b, a)
		eventually(t, "the newcomer hears what was said", func() bool { return lb.heard("early") })
		body := fmt.Sprintf("run %d", i)
		if err := tb.Publish([]byte(body), time.Minute); err != nil {
			t.Fatal(err)
		}
		eventually(t, body+" replaces the run before", func() bool { return latestOf(ta, id.ID()) == body })
		if n := len(ta.Latest()); n != 2 {
			t.Errorf("%d authors, want 2", n)
		}
		if err := b.Close(); err != nil {
			t.Error(err)
		}
	}
}

// What a newcomer says before any mesh knows it reaches those behind its first peer too.
func TestFirstWordsAreHeardByAll(t *testing.T) {
	a, _, la := startGossip(t, nil)
	b, _, _ := startGossip(t, nil)
	c, tc, _ := startGossip(t, nil)
	hello(t, a, b)
	hello(t, c, b)
	if err := tc.Publish([]byte("first"), time.Minute); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the first words arrive", func() bool { return la.heard("first") })
}

// Joining while running pulls as well, and takes part from then on.
func TestJoinTopicWhileRunning(t *testing.T) {
	a, ta, _ := startGossip(t, nil)
	b := startHost(t, nil)
	hello(t, a, b)
	if err := ta.Publish([]byte("early"), time.Minute); err != nil {
		t.Fatal(err)
	}
	var log hearings
	if _, err := b.JoinTopic(TopicConfig{Name: testTopic, MaxBody: 1000, Handle: log.handle}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "what was said is pulled", func() bool { return log.heard("early") })
	for i := 0; !log.heard("late"); i++ {
		if i == 10 {
			t.Fatal("news do not come")
		}
		if err := ta.Publish([]byte("late"), time.Minute); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Second)
	}
}
