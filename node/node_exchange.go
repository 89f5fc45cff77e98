package node

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"kvasird/ggml"
	"kvasird/ggml/gguf"
	"kvasird/market"
	"kvasird/node/api"
	"kvasird/p2p/fetch"
)

const (
	// drainTime is how long a pause waits for others to go elsewhere.
	drainTime = 30 * time.Second
	// defaultDisk bounds what is taken of a disk unless the budget says otherwise.
	defaultDisk = 50 << 30
	// memorySlack is the part of the memory that is kept free for what parts take
	// beyond what is known beforehand, see volunteer.excess.
	memorySlack = 16
	// vramParts is of how many parts of a GPU's free memory one is left for graphs and others.
	vramParts = 8
	// groupSlack is kept free for the groups of 256 KiB at the ends of parts, and for
	// the store's own files.
	groupSlack = 16 << 20
)

// fillBudget settles what the configuration left open.
func fillBudget(cfg *Config, d ggml.Device) error {
	l := &cfg.Budget.limits
	if l.disk == 0 {
		free, err := freeDisk(cfg.Data)
		if err != nil {
			return fmt.Errorf("how much disk is free: %w: name budget.disk", err)
		}
		l.disk = min(free/2, defaultDisk)
	}
	if l.memory == 0 {
		free, err := availableMemory()
		if err != nil {
			return fmt.Errorf("how much memory is free: %w: name budget.memory", err)
		}
		l.memory = free / 2
	}
	if l.vram > 0 && !onGPU(d) {
		return fmt.Errorf("budget.vram is for experts on a GPU, and %s is none: name one with --device (`kvasird doctor` lists them), or remove it", d.Name)
	}
	if onGPU(d) {
		if l.vram == 0 {
			l.vram = int64(d.FreeBytes) / vramParts * (vramParts - 1)
		}
		if l.vram > int64(d.TotalBytes) {
			return fmt.Errorf("budget.vram of %s is more than %s has, %s", bytesText(l.vram), d.Name, bytesText(int64(d.TotalBytes)))
		}
	}
	if l.disk < groupSlack+groupSlack/16 {
		return fmt.Errorf("budget.disk of %s is too little to hold any weights: give at least %s", bytesText(l.disk), bytesText(groupSlack+groupSlack/16))
	}
	return nil
}

// policyOf is what a network agreed on.
func policyOf(cfg Config) (market.Policy, error) {
	p := market.Policy{Target: cfg.Genesis.TargetReplicas}
	for _, text := range cfg.Genesis.Models {
		id, err := gguf.ParseModelID(text)
		if err != nil {
			return p, err
		}
		p.Models = append(p.Models, id)
	}
	return p, nil
}

// startExchange opens what a node in a network does beside computing: it serves
// weights, hears and tells who holds what, and as a volunteer takes on what lacks.
func (n *Node) startExchange(ctx context.Context) error {
	policy, err := policyOf(n.cfg)
	if err != nil {
		return err
	}
	n.weights = openWeights(n.cfg, n.store, n.host, n.busy, n.log)
	n.onStop(n.weights.Close)
	if err := n.host.HandleStream(fetch.Protocol, n.weights.serve); err != nil {
		return err
	}
	if n.exchange, err = newExchange(n.host, n.weights, policy, n.log); err != nil {
		return err
	}
	if err := n.startPrices(); err != nil {
		return err
	}
	n.stages = &stages{host: n.host, admit: n.admit, log: n.log}
	n.onStop(n.stages.Close)
	if err := n.host.HandleStream(ringProtocol, n.stages.serve); err != nil {
		return err
	}
	if err := n.startCarried(); err != nil {
		return err
	}
	n.exchange.onPeer = n.workers.recheck
	n.exchange.hangs = n.workers.hang
	n.exchange.machine = n.tellsMachine()
	if n.cfg.Has(RoleBackbone) || n.cfg.Has(RoleStage) {
		n.exchange.runs, n.exchange.onDirect, n.exchange.onHeard = n.runs, n.direct, n.heard
	}
	if err := n.knowOwn(ctx); err != nil {
		return err
	}
	if n.cfg.Has(RoleEntry) {
		n.exchange.rings = newRings(n)
		n.onStop(n.exchange.rings.Close)
	}
	switch {
	case n.cfg.Has(RoleVolunteer):
		return n.startVolunteer(ctx, policy)
	case n.cfg.Has(RoleStage):
		n.exchange.stager = n.newStager()
		n.onStop(n.exchange.stager.Close)
	}
	return nil
}

// newStager makes what chooses and runs a window of layers.
func (n *Node) newStager() *stager {
	id := n.cfg.Model.ID
	if id == nil {
		id = &n.file.id
	}
	l := n.cfg.Budget.limits
	held, _ := n.cfg.Budget.held(n.device)
	return &stager{
		node: n, model: *id, file: filepath.Join(n.cfg.Data, "window.json"), log: n.log, events: make(chan func(time.Time)),
		budget: market.Budget{Disk: max(0, l.disk-groupSlack), Memory: held - held/memorySlack, Bandwidth: l.download},
	}
}

// knowOwn takes in the models that are whole in the store, and the one that this
// node runs.
func (n *Node) knowOwn(ctx context.Context) error {
	if n.file != nil {
		n.weights.adopt(n.file.id, n.file.Model)
		if err := n.exchange.know(n.file.id, n.file.Model); err != nil && len(n.file.ExpertLayers()) > 0 {
			return err
		}
	}
	for _, m := range n.store.Models() {
		if !m.Complete() {
			continue
		}
		g, err := n.weights.open(ctx, m)
		if err == nil {
			err = n.exchange.know(m.ID(), g)
		}
		if err != nil {
			n.log.Warn("stored model cannot be used", "model", m.Name(), "error", err)
		}
	}
	return nil
}

func (n *Node) startVolunteer(ctx context.Context, policy market.Policy) error {
	l := n.cfg.Budget.limits
	held, key := n.cfg.Budget.held(n.device)
	n.workers.limit, n.workers.limitKey = held, key
	budget := market.Budget{Disk: max(0, l.disk-groupSlack), Memory: held - held/memorySlack, Bandwidth: l.download}
	v, err := newVolunteer(n.host.ID().String(), policy, n.weights, n.workers, budget, filepath.Join(n.cfg.Data, "parts.json"), n.log)
	if err != nil {
		return err
	}
	n.exchange.volunteer = v
	return v.restore(ctx, n.exchange.know)
}

// busy reports whether this node computes now, so that sending weights waits. An
// answer that waits for experts may be waiting for just these weights.
func (n *Node) busy() bool {
	if b := n.backbone.Load(); b != nil && b.Stats().Running > 0 && (b.dispatch == nil || !b.dispatch.Starved()) {
		return true
	}
	return n.workers.busy()
}

// runs is what this node says of the model that it runs for clients.
func (n *Node) runs(now time.Time) (news market.ModelNews, ok bool) {
	if d := n.dispatching(); d != nil {
		ok = true
		news = market.ModelNews{
			ID: d.file.id, Name: d.file.name, Full: d.file.Kind() == gguf.Full, Backbone: true, Demand: d.demand(now),
		}
	}
	if b := n.backbone.Load(); b != nil && n.Ready() == nil {
		ok = true
		news.ID, news.Name, news.Service = b.file.id, b.file.name, b.service(n.cfg.Model.Sequences)
	}
	return news, ok
}

// Coverage says who holds what of every model that is announced.
func (n *Node) Coverage(context.Context) ([]api.CoverageMap, error) {
	if n.exchange == nil {
		return nil, noNetwork("coverage")
	}
	return n.exchange.coverage(time.Now()), nil
}

func noNetwork(what string) error {
	return &api.Error{Code: api.CodeBadRequest, Message: fmt.Sprintf(
		"%s is of a network with a file: make one with `kvasir network create NAME`, and start kvasird with --network NAME.toml", what)}
}

// Pause ends or begins what this node does for others.
func (n *Node) Pause(ctx context.Context, paused bool) (api.PauseResult, error) {
	result := api.PauseResult{Paused: paused}
	switch {
	case n.exchange != nil && n.exchange.stager != nil:
		n.exchange.stager.paused.Store(paused)
		n.exchange.changed()
		return result, nil
	case n.exchange == nil || n.exchange.volunteer == nil:
		return api.PauseResult{}, &api.Error{Code: api.CodeBadRequest, Message: "this node is no volunteer and no stage: it has nothing to pause"}
	}
	n.exchange.volunteer.paused.Store(paused)
	n.exchange.changed()
	if !paused {
		return result, n.workers.resume()
	}
	limit, cancel := context.WithTimeout(ctx, drainTime)
	defer cancel()
	if err := n.workers.drain(limit); err != nil {
		result.Note = "Some peers still need what is served here: nobody else has it. It is computed for them until the node stops."
	}
	return result, nil
}

// readJSON reads what writeJSON wrote; no file is nothing read.
func readJSON(path string, v any) error {
	text, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	return json.Unmarshal(text, v)
}

// writeJSON replaces a file.
func writeJSON(path string, v any) error {
	text, err := json.Marshal(v)
	if err != nil {
		return err
	}
	return replaceFile(path, append(text, '\n'))
}

// replaceFile writes a file, mode 0600, so that it is never half there.
func replaceFile(path string, text []byte) error {
	f, err := os.CreateTemp(filepath.Dir(path), ".new-*")
	if err != nil {
		return err
	}
	defer os.Remove(f.Name())
	_, err = f.Write(text)
	if err == nil {
		err = f.Sync()
	}
	if closed := f.Close(); err == nil {
		err = closed
	}
	if err != nil {
		return err
	}
	return os.Rename(f.Name(), path)
}
