package experts

import (
	"errors"
	"strings"
	"sync"
	"testing"
	"time"
)

// till lets so many pairs be computed.
type till struct {
	mu    sync.Mutex // guards what follows
	left  int
	asked int // times that the dispatcher was told to pay
}

func (l *till) allow(_ string, _, pairs int) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.left < pairs {
		return errors.New("who pays is not known")
	}
	l.left -= pairs
	return nil
}

func (l *till) put(n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.left = n
}

func (l *till) has() (left, asked int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.left, l.asked
}

// TestUnpaid: a worker that wants to know who pays is not asked while others compute, has no
// worse standing for it, and is waited for a short while where it is alone, in which it may learn
// that. Small calls are computed at once, large ones are queued.
func TestUnpaid(t *testing.T) {
	for name, tokens := range map[string]int{"small": 3, "large": 40} {
		t.Run(name, func(t *testing.T) { bothReaders(t, func(t *testing.T, noLead bool) { unpaid(t, noLead, tokens) }) })
	}
}

func unpaid(t *testing.T, noLead bool, tokens int) {
	w := newSwarm(t)
	money, mine, its := &till{left: 1 << 20}, newLedger(), newLedger()
	w.start("wants", wholeLayer(), func(c *WorkerConfig) { c.Allow, c.Computed = money.allow, mine.add })
	other := w.start("other", wholeLayer(), func(c *WorkerConfig) { c.Computed = its.add })
	pays := 0
	d := w.dispatcher(func(c *Config) {
		c.NoLead, c.NoHedge = noLead, true
		c.Unpaid = func(peer string) {
			money.mu.Lock()
			defer money.mu.Unlock()
			if money.asked++; peer != "wants" {
				t.Errorf("%s is to be paid", peer)
			}
			money.left += pays
		}
	})
	waitFor(t, d, "connected", connected)
	call := testCall(0, tokens, false)
	compute := func() error { return d.Compute(t.Context(), call) }
	if err := compute(); err != nil {
		t.Fatal(err)
	}
	money.put(0)
	before, others := mine.sum(), its.sum()
	calls := 0
	for asked := 0; calls < 20 || asked == 0 && calls < 5000; calls++ { // until it is its turn
		if err := compute(); err != nil {
			t.Fatal(err)
		}
		_, asked = money.has()
	}
	if got := its.sum() - others; mine.sum() != before || got < calls*len(call.IDs) {
		t.Errorf("unpaid: %d pairs here, %d there", mine.sum()-before, got)
	}
	if _, asked := money.has(); asked == 0 {
		t.Error("nobody was told that it wants to be paid")
	}
	for _, p := range d.Peers() {
		if p.Suspect || p.Failed > 0 {
			t.Errorf("%s has a worse standing: %+v", p.ID, p)
		}
	}
	other.kill()
	within(t, patient, "alone", func() bool { return len((*d.programs.Load())[0][0].routes.Load().sessions) == 1 })
	began := time.Now()
	err := compute()
	var missing *MissingError
	if took := time.Since(began); !errors.As(err, &missing) || !strings.Contains(err.Error(), "unpaid: who pays is not known") || took > unpaidWait+patient {
		t.Errorf("alone and unpaid: %v after %v", err, took)
	}
	money.mu.Lock()
	pays = len(call.IDs) // it is paid as soon as it asks for that
	money.mu.Unlock()
	if err := compute(); err != nil {
		t.Errorf("paid when it asked: %v", err)
	}
}
