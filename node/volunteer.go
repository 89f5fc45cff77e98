package node

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"sync"
	"sync/atomic"
	"time"

	"kvasird/ggml/gguf"
	"kvasird/ggml/store"
	"kvasird/market"
)

const (
	// loadsAtOnce bounds the parts that are downloaded at a time.
	loadsAtOnce = 2
	// troubleTime is how long it is told what was in the way of a part.
	troubleTime = 15 * time.Minute
)

// volunteer carries out what market.Volunteer decides. A nil one is a node that
// is none.
type volunteer struct {
	market  *market.Volunteer
	weights *weights
	workers *workers
	budget  market.Budget
	file    string // of the parts that are on disk
	log     *slog.Logger
	paused  atomic.Bool

	sizes map[gguf.ModelID][]int64 // bytes of an expert, by layer; of the swarm's goroutine
	jobs  map[market.Part]*job     // likewise
	done  chan jobResult
	slots chan struct{}
	loops sync.WaitGroup

	mu      sync.Mutex // guards what follows
	trouble map[market.Part]trouble
	here    map[gguf.ModelID][]gguf.Slice // on disk, or on its way there
}

// trouble is what was last in the way of a part.
type trouble struct {
	text string
	at   time.Time
}

// job is the loading of a part, or its deletion.
type job struct {
	cancel  context.CancelFunc
	deletes bool
}

type jobResult struct {
	part market.Part
	job  *job
	err  error
}

func newVolunteer(id string, policy market.Policy, w *weights, ws *workers, budget market.Budget, file string, log *slog.Logger) (*volunteer, error) {
	v := &volunteer{
		weights: w, workers: ws, budget: budget, file: file, log: log, sizes: map[gguf.ModelID][]int64{},
		jobs: map[market.Part]*job{}, done: make(chan jobResult), slots: make(chan struct{}, loadsAtOnce),
		trouble: map[market.Part]trouble{}, here: map[gguf.ModelID][]gguf.Slice{},
	}
	var err error
	v.market, err = market.NewVolunteer(id, policy, func(model gguf.ModelID, layer int) int64 {
		if list := v.sizes[model]; layer < len(list) {
			return list[layer]
		}
		return 0
	})
	return v, err
}

// size works out what an expert of each layer takes, on disk or in memory,
// whichever is more.
func (v *volunteer) size(id gguf.ModelID, g *gguf.Model) error {
	if v.sizes[id] != nil {
		return nil
	}
	part, err := v.workers.open(id, g)
	if err != nil {
		return err
	}
	list, err := expertSizes(g)
	if err != nil {
		return err
	}
	held, err := heldSizes(part.kernel, g)
	if err != nil {
		return err
	}
	for layer, n := range held {
		list[layer] = max(list[layer], n)
	}
	v.sizes[id] = list
	return nil
}

// decide starts what is to be done now.
func (v *volunteer) decide(ctx context.Context, t *market.Table, now time.Time) market.Decision {
	if v.paused.Load() {
		return market.Decision{Next: now.Add(time.Second)}
	}
	budget := v.budget
	budget.Memory = min(budget.Memory, v.workers.limit-v.excess())
	d := v.market.Decide(t, budget, now)
	for _, p := range d.Load {
		v.start(ctx, p, false)
	}
	for _, p := range d.Drop {
		v.start(ctx, p, true)
	}
	if len(d.Load)+len(d.Drop) > 0 {
		v.save()
	}
	return d
}

// excess is what the parts that are loaded take in memory beyond what the market
// counts for them: an expert that is loaded alone is held twice.
func (v *volunteer) excess() int64 {
	excess := v.workers.bytes()
	for id, banks := range v.workers.loaded() {
		for _, b := range banks {
			excess -= v.sizes[id][b.Layers.Begin] * int64(b.Experts.Len())
		}
	}
	return max(0, excess)
}

// start begins to load or delete a part. Deleting ends its loading first.
func (v *volunteer) start(ctx context.Context, p market.Part, deletes bool) {
	before := v.jobs[p]
	if before != nil && before.deletes {
		return
	}
	if before != nil {
		before.cancel()
		return // its result comes, and Decide asks again
	}
	ctx, cancel := context.WithCancel(ctx)
	j := &job{cancel: cancel, deletes: deletes}
	if !deletes {
		v.keep(p)
	}
	v.jobs[p] = j
	v.loops.Go(func() {
		var err error
		if deletes {
			err = v.drop(ctx, p)
		} else {
			err = v.load(ctx, p)
		}
		v.done <- jobResult{p, j, err}
	})
}

// load brings a part here and has it served.
func (v *volunteer) load(ctx context.Context, p market.Part) error {
	select {
	case v.slots <- struct{}{}:
	case <-ctx.Done():
		return ctx.Err()
	}
	defer func() { <-v.slots }()
	m, g, err := v.weights.learn(ctx, p.Model)
	if err != nil {
		return err
	}
	spans, err := store.SliceSpans(g, p.Slice)
	if err != nil {
		return err
	}
	what := fmt.Sprintf("experts %v of %s", p.Slice, m.Name())
	if err := v.weights.fetchPatiently(ctx, m, spans, what, func(err error) { v.note(p, err) }); err != nil {
		return err
	}
	return v.workers.add(ctx, p.Model, g, p.Slice)
}

// note keeps what is in a part's way, for the status.
func (v *volunteer) note(p market.Part, err error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if err == nil {
		delete(v.trouble, p)
		return
	}
	if v.trouble[p].text != err.Error() {
		v.log.Warn("part is not served yet", "slice", p.Slice.String(), "error", err)
	}
	now := time.Now()
	maps.DeleteFunc(v.trouble, func(_ market.Part, t trouble) bool { return now.Sub(t.at) > troubleTime })
	v.trouble[p] = trouble{err.Error(), now}
}

// drop has a part served by others only, and gives its memory and disk back.
func (v *volunteer) drop(ctx context.Context, p market.Part) error {
	m, g, err := v.weights.learn(ctx, p.Model)
	if err != nil {
		return err
	}
	if err := v.workers.remove(ctx, p.Model, g, p.Slice); err != nil {
		return err
	}
	if m.Complete() || m.Pinned() {
		return nil
	}
	return dropSpans(m, g, p.Slice, v.beside(p))
}

// dropSpans deletes the bytes of a slice but for those that others share.
func dropSpans(m *store.Model, g *gguf.Model, s gguf.Slice, keep []gguf.Slice) error {
	gone, err := store.SliceSpans(g, s)
	if err != nil {
		return err
	}
	kept := store.DenseSpans(g)
	for _, k := range keep {
		more, err := store.SliceSpans(g, k)
		if err != nil {
			return err
		}
		for file, list := range more {
			kept[file] = append(kept[file], list...)
		}
	}
	for file, list := range gone {
		if err := m.Drop(file, subtract(list, kept[file])); err != nil {
			return err
		}
	}
	return nil
}

// subtract returns what of some spans is in none of others.
func subtract(list, others []store.Span) []store.Span {
	for _, o := range others {
		var left []store.Span
		for _, s := range list {
			begin, end := max(s.Off, o.Off), min(s.Off+s.Len, o.Off+o.Len)
			if begin >= end {
				left = append(left, s)
				continue
			}
			if s.Off < begin {
				left = append(left, store.Span{Off: s.Off, Len: begin - s.Off})
			}
			if end < s.Off+s.Len {
				left = append(left, store.Span{Off: end, Len: s.Off + s.Len - end})
			}
		}
		list = left
	}
	return list
}

// results is where jobs end; nil, which never does, for a node that is no volunteer.
func (v *volunteer) results() <-chan jobResult {
	if v == nil {
		return nil
	}
	return v.done
}

// finish waits for the jobs, whose context has ended.
func (v *volunteer) finish() {
	if v == nil {
		return
	}
	finishJobs(&v.loops, v.done, func(r jobResult) { v.take(r, time.Now()) })
}

// finishJobs waits for jobs, whose context has ended, and takes in what they came to.
func finishJobs[T any](jobs *sync.WaitGroup, done <-chan T, take func(T)) {
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		jobs.Wait()
	}()
	for {
		select {
		case r := <-done:
			take(r)
		case <-ended:
			return
		}
	}
}

// take takes the end of a job in.
func (v *volunteer) take(r jobResult, now time.Time) {
	r.job.cancel()
	delete(v.jobs, r.part)
	switch {
	case r.job.deletes && r.err == nil:
		v.forget(r.part)
		v.market.Dropped(r.part)
	case r.job.deletes:
		v.log.Warn("part not deleted", "slice", r.part.Slice.String(), "error", r.err)
	case r.err == nil:
		v.market.Done(r.part, now)
	case errors.Is(r.err, context.Canceled):
		v.note(r.part, nil)
	default:
		v.note(r.part, r.err)
		v.market.Failed(r.part, now)
	}
	v.save()
}

// holdings is what to announce.
func (v *volunteer) holdings() map[gguf.ModelID][]market.Holding {
	if v == nil {
		return nil
	}
	all := v.market.Holdings()
	if v.paused.Load() {
		for id, list := range all {
			var left []market.Holding
			for _, h := range list {
				if h.State == market.Serving || h.State == market.Leaving {
					left = append(left, market.Holding{Slice: h.Slice, State: market.Leaving})
				}
			}
			all[id] = left
		}
	}
	return all
}

func (v *volunteer) announced(now time.Time) {
	if v != nil {
		v.market.Announced(now)
	}
}

// keep notes that a slice is on disk, or on its way there.
func (v *volunteer) keep(p market.Part) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.cutLocked(p)
	v.here[p.Model] = append(v.here[p.Model], p.Slice)
}

// forget notes that a slice, or a part of one, is on disk no more.
func (v *volunteer) forget(p market.Part) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.cutLocked(p)
}

func (v *volunteer) cutLocked(p market.Part) {
	var left []gguf.Slice
	for _, s := range v.here[p.Model] {
		left = append(left, without(s, p.Slice)...)
	}
	v.here[p.Model] = left
}

// beside lists what of a model is here or on its way beside a part.
func (v *volunteer) beside(p market.Part) []gguf.Slice {
	v.mu.Lock()
	defer v.mu.Unlock()
	var out []gguf.Slice
	for _, s := range v.here[p.Model] {
		out = append(out, without(s, p.Slice)...)
	}
	return out
}

// save writes what is here, so that it is found after a restart.
func (v *volunteer) save() {
	v.mu.Lock()
	here := maps.Clone(v.here) // whose lists are replaced or grow, and are never changed
	v.mu.Unlock()
	if err := writeJSON(v.file, here); err != nil {
		v.log.Warn("parts not noted: after a restart they are chosen anew", "error", err)
	}
}

// restore takes up what was here before a restart, half of a download included,
// and deletes what nobody knows of.
func (v *volunteer) restore(ctx context.Context, know func(gguf.ModelID, *gguf.Model) error) error {
	before := map[gguf.ModelID][]gguf.Slice{}
	if err := readJSON(v.file, &before); err != nil {
		v.log.Warn("what was served before is not known: it is chosen anew", "file", v.file, "error", err)
	}
	for id, list := range before {
		m := v.weights.store.Model(id)
		if m == nil {
			continue
		}
		g, err := v.weights.open(ctx, m)
		if errors.Is(err, gguf.ErrNotHeld) {
			continue // not even its header came
		}
		if err == nil {
			err = know(id, g)
		}
		if err != nil {
			return err
		}
		for _, s := range list {
			if err := v.restorePart(ctx, m, g, market.Part{Model: id, Slice: s}); err != nil {
				return fmt.Errorf("%s: %w", v.file, err)
			}
		}
	}
	return nil
}

// restorePart takes up one part: it serves at once if all of it is here.
func (v *volunteer) restorePart(ctx context.Context, m *store.Model, g *gguf.Model, p market.Part) error {
	spans, err := store.SliceSpans(g, p.Slice)
	if err != nil {
		return err
	}
	complete := true
	for file, list := range spans {
		complete = complete && len(m.Missing(file, list)) == 0
	}
	if complete {
		if err := v.workers.add(ctx, p.Model, g, p.Slice); err != nil {
			v.log.Warn("part that was served before cannot be", "slice", p.Slice.String(), "error", err)
			complete = false
		}
	}
	if err := v.market.Restore(p, complete, time.Now()); err != nil {
		return err
	}
	v.keep(p)
	return nil
}
