package experts

import (
	"fmt"
	"math"
	"strings"
	"sync"
	"testing"
	"time"

	"kvasird/experts/audit"
	rows "kvasird/experts/tolerance"
)

// findings notes what Found and Fault tell.
type findings struct {
	mu     sync.Mutex
	list   []Audited
	faults map[string]int
}

func (f *findings) config(c *Config) {
	f.faults = map[string]int{}
	c.AuditInterval, c.Band = 4, func(string, string) float64 { return 1e-3 }
	c.Found = func(a Audited) { f.mu.Lock(); defer f.mu.Unlock(); f.list = append(f.list, a) }
	c.Fault = func(id string, _ error) { f.mu.Lock(); defer f.mu.Unlock(); f.faults[id]++ }
}

// culprits are those who were found, each once.
func (f *findings) culprits() map[string]bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	out := map[string]bool{}
	for _, a := range f.list {
		out[a.Culprit] = true
	}
	return out
}

// first waits for the first finding: a worker is out right before it is told.
func (f *findings) first(t *testing.T) (a Audited) {
	t.Helper()
	within(t, patient, "told", func() bool {
		f.mu.Lock()
		defer f.mu.Unlock()
		if len(f.list) > 0 {
			a = f.list[0]
		}
		return len(f.list) > 0
	})
	return a
}

func statusOf(t *testing.T, d *Dispatcher, id string) PeerStatus {
	t.Helper()
	for _, p := range d.Peers() {
		if p.ID == id {
			return p
		}
	}
	t.Fatalf("no peer %s", id)
	return PeerStatus{}
}

// liars starts workers that are right for canaries; those named begin to be wrong once all serve.
func liars(t *testing.T, ids []string, wrong []string, change func(*Config)) (*swarm, *Dispatcher, map[string]*peer) {
	w := newSwarm(t)
	peers := map[string]*peer{}
	for _, id := range ids {
		peers[id] = w.start(id, wholeLayer(), nil)
	}
	d := w.dispatcher(change)
	waitFor(t, d, "connected", connected)
	for layer := range 2 {
		if err := d.Compute(t.Context(), testCall(uint64(layer), 1, false)); err != nil {
			t.Fatal(err)
		}
		within(t, patient, "all serve", func() bool { return len((*d.programs.Load())[layer][0].routes.Load().sessions) == len(ids) })
	}
	for _, id := range wrong {
		peers[id].kernel.lies.Store(true)
	}
	return w, d, peers
}

// TestAudit has one of three workers answer canaries rightly and calls wrongly: it is found, gets no
// calls, and comes back, by a canary first, when its score has fallen. Nobody else is blamed.
func TestAudit(t *testing.T) { bothReaders(t, auditFinds) }

func auditFinds(t *testing.T, noLead bool) {
	var f findings
	_, d, peers := liars(t, []string{"a", "b", "liar"}, []string{"liar"}, func(c *Config) { f.config(c); c.NoLead = noLead })
	n := 0
	within(t, patient, "found", func() bool {
		n++
		if err := d.Compute(t.Context(), testCall(uint64(n), 1+n%3, n%2 == 0)); err != nil {
			t.Fatal(err)
		}
		return statusOf(t, d, "liar").Out
	})
	evidence := f.first(t)
	if c := f.culprits(); len(c) != 1 || !c["liar"] || f.faults["liar"] == 0 || len(f.faults) != 1 {
		t.Errorf("found %v, faults %v, want the liar alone", c, f.faults)
	}
	p := statusOf(t, d, "liar")
	if !p.Suspect || !strings.Contains(p.Standing, "no calls for ") || !strings.Contains(p.Standing, ", expert ") {
		t.Errorf("status %+v does not say that it is out, and why", p)
	}
	if len(evidence.Answers) != 3 || len(evidence.Answers[0].Rows) != testWidth {
		t.Errorf("evidence %+v", evidence)
	}
	peers["liar"].kernel.lies.Store(false)
	before := peers["liar"].kernel.calls.Load()
	for i := range 100 {
		call := testCall(uint64(i), 2, false)
		if err := d.Compute(t.Context(), call); err != nil || maxDiff(call.Out, alone(t, wholeLayer(), call)) != 0 {
			t.Fatalf("%v, or wrong rows", err)
		}
	}
	peers["liar"].cut() // a new session of it is no new start
	within(t, patient, "connected again", func() bool { return statusOf(t, d, "liar").Connected })
	for i := range 100 {
		if err := d.Compute(t.Context(), testCall(uint64(i), 2, false)); err != nil {
			t.Fatal(err)
		}
	}
	if got := peers["liar"].kernel.calls.Load(); got != before {
		t.Errorf("it was asked %d times while it is out", got-before)
	}
	d.mu.Lock()
	tally := d.tallies["liar"]
	tally.standing = audit.Standing{Audited: 1, Found: 1}
	tally.outUntil.Store(time.Now().UnixNano())
	for _, s := range d.sessions {
		s.tellProver() // it waits for the hour to pass
	}
	d.mu.Unlock()
	within(t, patient, "it computes again", func() bool {
		if err := d.Compute(t.Context(), testCall(1, 2, false)); err != nil {
			t.Fatal(err)
		}
		return peers["liar"].kernel.calls.Load() > before+5 && !statusOf(t, d, "liar").Out
	})
}

// TestAuditByOwnCopy finds the only worker there is, by the own copy, which takes over.
func TestAuditByOwnCopy(t *testing.T) {
	var f findings
	_, d, _ := liars(t, []string{"liar"}, []string{"liar"}, func(c *Config) {
		f.config(c)
		own := wholeLayer()
		c.Local = &Local{Kernel: own, Slices: own.slices}
	})
	within(t, patient, "found", func() bool {
		if err := d.Compute(t.Context(), testCall(1, 1, false)); err != nil {
			t.Fatal(err)
		}
		return statusOf(t, d, "liar").Out
	})
	call := testCall(2, 3, false)
	if err := d.Compute(t.Context(), call); err != nil || maxDiff(call.Out, alone(t, wholeLayer(), call)) != 0 {
		t.Errorf("%v, or wrong rows", err)
	}
	if got := f.first(t).Against; len(got) != 1 || got[0] != "" {
		t.Errorf("against %v, want the own copy", got)
	}
}

// TestAuditOpen has two differ, with nobody to say who is wrong: neither is blamed.
func TestAuditOpen(t *testing.T) {
	var f findings
	_, d, _ := liars(t, []string{"a", "liar"}, []string{"liar"}, f.config)
	within(t, patient, "seen", func() bool {
		if err := d.Compute(t.Context(), testCall(1, 1, false)); err != nil {
			t.Fatal(err)
		}
		return d.Audits().Open > 3
	})
	for _, p := range d.Peers() {
		if p.Out || p.Suspect {
			t.Errorf("%s is blamed: %+v", p.ID, p)
		}
	}
	if len(f.culprits()) != 0 {
		t.Errorf("found %v", f.culprits())
	}
}

// TestAuditsOfTheHonest: nobody is found, about one answer of so many is audited, and what a worker
// is sent for an audit is what it is sent for a call of one row: rows that were in a call, each of
// its experts once.
func TestAuditsOfTheHonest(t *testing.T) {
	w := newSwarm(t)
	var f findings
	kernels := []*ffn{wholeLayer(), wholeLayer(), wholeLayer()}
	for i, k := range kernels {
		w.start(fmt.Sprint("w", i), k, nil)
	}
	d := w.dispatcher(f.config)
	waitFor(t, d, "connected", connected)
	for i := range 400 {
		if err := d.Compute(t.Context(), testCall(uint64(i), 1+i%4, i%2 == 0)); err != nil {
			t.Fatal(err)
		}
	}
	within(t, patient, "audits are done", func() bool { return len(d.audits.free) == auditsWaiting })
	a, sent := d.Audits(), d.Hedges().Sent
	if a.Found+a.Open+a.Nobody != 0 || a.Audited == 0 || a.Audited+a.Skipped > sent/2 || a.Audited+a.Skipped < sent/8 {
		t.Errorf("%+v of %d answers, want about a quarter of them, and nobody found", a, sent)
	}
	for _, p := range d.Peers() {
		if p.Out || !strings.Contains(p.Standing, "right") {
			t.Errorf("%s stands as %q", p.ID, p.Standing)
		}
	}
}

// TestReofferIsTried: when what a worker offers of a layer changes, what stays is tried again too.
func TestReofferIsTried(t *testing.T) {
	w := newSwarm(t)
	k := newFFN(testWidth, testHidden, layerSlice(0, 32), layerSlice(32, testExperts))
	p := w.start("a", k, func(c *WorkerConfig) { c.Slices = []Slice{layerSlice(0, 32)} })
	own := wholeLayer()
	d := w.dispatcher(func(c *Config) { c.Local = &Local{Kernel: own, Slices: own.slices} })
	waitFor(t, d, "connected", connected)
	if err := d.Compute(t.Context(), testCall(0, 1, false)); err != nil {
		t.Fatal(err)
	}
	within(t, patient, "serves", func() bool { return len((*d.programs.Load())[0][0].routes.Load().sessions) == 1 })
	k.lies.Store(true) // it loaded something else meanwhile
	if err := p.worker.AddSlice(layerSlice(32, testExperts)); err != nil {
		t.Fatal(err)
	}
	within(t, patient, "serves nothing any more", func() bool { return len((*d.programs.Load())[0][0].routes.Load().sessions) == 0 })
}

// TestPrecisionBands: what rows lose on the way by a precision is within what is allowed for it.
func TestPrecisionBands(t *testing.T) {
	for _, p := range []Precision{F16, BF16, Q8} {
		k := wholeLayer()
		most := 0.0
		for seed := range uint64(200) {
			call := testCall(seed, 1, false)
			want, got := alone(t, k, call), through(t, p, k, call)
			for i := range call.IDs {
				most = math.Max(most, rows.Between(got[i*testWidth:][:testWidth], want[i*testWidth:][:testWidth]).Max)
			}
		}
		t.Logf("%v: rows are off by up to %.3g, %.3g is allowed", p, most, precisionBand[p])
		if most > precisionBand[p] || most < precisionBand[p]/20 {
			t.Errorf("%v: off by up to %g, allowed is %g", p, most, precisionBand[p])
		}
	}
}
