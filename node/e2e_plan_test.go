//go:build cgo && linux

package node

import (
	"bytes"
	"encoding/json"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"kvasird/ggml/gguf"
	"kvasird/node/api"
	"kvasird/ring/plan"
)

// livePlan is what `kvasir plan --json` prints.
type livePlan struct {
	Model      string
	Nodes      []planPeer
	Candidates []plan.Candidate
}

// of returns the candidate of a kind.
func (p livePlan) of(kind plan.Kind) plan.Candidate {
	i := slices.IndexFunc(p.Candidates, func(c plan.Candidate) bool { return c.Kind == kind })
	if i < 0 {
		return plan.Candidate{}
	}
	return p.Candidates[i]
}

// plans runs `kvasird plan` beside the daemon of c.
func (n *network) plans(c *child, opts PlanOptions, model string) (string, error) {
	n.t.Helper()
	cfg := Config{Data: c.dir, Model: ModelConfig{Context: 1024, Sequences: 1}}
	if err := cfg.Validate(); err != nil {
		n.t.Fatal(err)
	}
	var out bytes.Buffer
	err := PlanModel(n.ctx, cfg, opts, model, &out)
	return out.String(), err
}

// plansUntil plans until that is good, since peers tell of themselves now and then.
func (n *network) plansUntil(c *child, model string, good func(livePlan) bool) livePlan {
	n.t.Helper()
	for {
		text, err := n.plans(c, PlanOptions{JSON: true}, model)
		var p livePlan
		if err == nil {
			err = json.Unmarshal([]byte(text), &p)
		}
		if err == nil && good(p) {
			return p
		}
		select {
		case <-n.ctx.Done():
			n.t.Fatalf("%v\n%s", err, text)
		case <-time.After(200 * time.Millisecond):
		}
	}
}

// TestPlanOfLiveNetwork: a daemon plans over itself and what its peers tell.
func TestPlanOfLiveNetwork(t *testing.T) {
	n, at := newJoining(t, NewNetwork{Replicas: 1}, "--experts", "here", "--memory", "64MB")
	source := n.sees(n.backbone, serving)
	id := source.Model.ID
	has := map[string]gguf.Range{}
	var stages []*child
	for name, memory := range map[string]string{"s1": "14MB", "s2": "16MB"} {
		stages = append(stages, n.join(name, "--peer", at, "--model", id, "--memory", memory, "--context", "1024"))
	}
	names := []string{hereName, shortPeer(source.PeerID)}
	for i, s := range stages {
		st := n.sees(s, func(st *api.Status) bool {
			return st.Volunteer != nil && len(st.Volunteer.Windows) == 1 && st.Volunteer.Windows[0].State == api.PartServing
		})
		w := st.Volunteer.Windows[0].Layers
		name := hereName
		if i > 0 {
			name = shortPeer(st.PeerID)
			names = append(names, name)
		}
		has[name] = gguf.Range{Begin: w.Begin, End: w.End}
	}

	// the source could run all of it, so a ring is refused
	p := n.plansUntil(stages[0], id[:8], func(p livePlan) bool {
		told := 0
		for _, x := range p.Nodes {
			if x.Has != "" && (x.RTTMicro > 0 || x.Name == hereName) {
				told++
			}
		}
		return told == 3
	})
	for _, x := range p.Nodes {
		if !slices.Contains(names, x.Name) || x.LeftOut != "" || x.Memory < 14e6 || x.Memory > 128e6 || x.Disk == 0 {
			t.Errorf("node %+v, want one of %q with its budget", x, names)
		}
		if w, ok := has[x.Name]; ok && x.Has != "layers "+w.String() || !ok && x.Has != "all" {
			t.Errorf("%s has %q, want %v", x.Name, x.Has, w)
		}
	}
	whole := p.of(plan.WholeReplica)
	if len(whole.Places) != 1 || whole.Places[0].Node != shortPeer(source.PeerID) || whole.Places[0].Download != 0 || whole.Refused != "" {
		t.Errorf("whole replica: %+v, want it where it is", whole)
	}
	if r := p.of(plan.Ring); !strings.Contains(r.Refused, "slower than not splitting") {
		t.Errorf("ring: %+v, want it refused", r)
	}
	text, err := n.plans(stages[0], PlanOptions{}, "backbone")
	for _, want := range append(names, "Best: whole replica", "slower than not splitting", "has of the model") {
		if err != nil || !strings.Contains(text, want) {
			t.Errorf("%v, no %q in\n%s", err, want, text)
		}
	}
	n.plansOtherwise(stages[0])
	n.plansUnknown(at)

	// without the source, the ring that runs is what there is
	if err := n.backbone.stop(); err != nil {
		t.Fatal(err)
	}
	p = n.plansUntil(stages[0], id, func(p livePlan) bool { return len(p.Nodes) == 2 })
	r := p.of(plan.Ring)
	if r.Refused != "" || len(r.Places) != 2 {
		t.Fatalf("ring: %+v", p.Candidates)
	}
	for _, x := range r.Places {
		if x.Layers != has[x.Node] || x.Download != 0 || x.Disk == 0 {
			t.Errorf("%+v, want %v, which it has", x, has[x.Node])
		}
	}
	if w := p.of(plan.WholeReplica); !strings.Contains(w.Refused, "does not fit") {
		t.Errorf("whole replica: %+v, want that it does not fit", w)
	}
}

// plansUnknown asks a node that has nothing of the model and no use for it: it fetches the
// header.
func (n *network) plansUnknown(at string) {
	n.t.Helper()
	r := n.join("r", "--peer", at, "--role", "relay")
	n.sees(r, func(*api.Status) bool { return true }) // a plan before that would have its data folder
	p := n.plansUntil(r, "backbone", func(p livePlan) bool { return len(p.Nodes) == 4 })
	if p.Model != "backbone" || p.Nodes[0].Has != "" {
		n.t.Errorf("planned %+v for %s", p.Nodes, p.Model)
	}
	if held := n.models(r); len(held) != 1 || held[0].Held == 0 || held[0].Held > held[0].Total/4 {
		n.t.Errorf("%+v is stored, want the header", held)
	}
	if text, err := n.plans(r, PlanOptions{}, ""); err == nil || !strings.Contains(err.Error(), "no model of its own: name one") {
		n.t.Errorf("%s, %v", text, err)
	}
	if err := r.stop(); err != nil {
		n.t.Fatal(err)
	}
}

// plansOtherwise asks in other ways, and for what is not there.
func (n *network) plansOtherwise(c *child) {
	n.t.Helper()
	spec := n.write("spec.toml", []byte("[[node]]\nname = \"desk\"\nram = \"1 GB\"\n"))
	for _, tt := range []struct {
		opts        PlanOptions
		model, want string
	}{
		{PlanOptions{}, "", "whole replica"},
		{PlanOptions{}, n.whole, "it is not known which peers have parts of backbone"},
		{PlanOptions{Nodes: spec}, "backbone", "desk"},
		{PlanOptions{Nodes: spec}, n.whole, "desk"},
	} {
		text, err := n.plans(c, tt.opts, tt.model)
		if err != nil || !strings.Contains(text, tt.want) || !strings.Contains(text, "4 layers") {
			n.t.Errorf("%q with %+v: %v, want %q in\n%s", tt.model, tt.opts, err, tt.want, text)
		}
	}
	for model, want := range map[string]string{
		"nobody":                            `no model "nobody" is in the store or told of by a peer`,
		filepath.Join(n.dir, "none.gguf"):   "no such file",
		strings.Repeat("x", maxModelName+1): "at most 4096",
	} {
		if text, err := n.plans(c, PlanOptions{}, model); err == nil || !strings.Contains(err.Error(), want) {
			n.t.Errorf("%.40q: %s, %v, want %q", model, text, err, want)
		}
	}
}
