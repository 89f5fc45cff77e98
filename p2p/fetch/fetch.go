package fetch

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"
)

const (
	tickEvery = 250 * time.Millisecond
	// maxTries is how often a source is tried that gives nothing, unless the fetch waits.
	maxTries   = 3
	firstPause = time.Second
	maxPause   = 30 * time.Second
	// farBelow is how many times faster another source must be for one to be too slow.
	farBelow = 64
	// rateWeight is the weight of a tick in the mean rate of the fetch.
	rateWeight = 0.1
)

// Request is what a fetch is for.
type Request struct {
	Model [32]byte
	// Sink gets the bytes, and tells which it has: a fetch that is repeated resumes.
	Sink Sink
	// Spans are wanted of the files that are its keys, widened to whole groups. A file
	// without spans has its tree fetched. Nil stands for all of all files.
	Spans map[int][]Span
	// Sources is asked for the sources known now, the preferred ones first, several times
	// a second.
	Sources func() []Source
	// Progress is called several times a second and at the end, from the goroutine of
	// Fetch. It may be nil.
	Progress func(Progress)
	// Wait has the fetch wait for sources when there is none.
	Wait bool
}

// Progress is how far a fetch is. Bytes are those of the files, without trees.
type Progress struct {
	Done, Total int64         // bytes
	Rate        float64       // bytes/s of late
	Left        time.Duration // until the end at this rate; negative: unknown
	Sources     []SourceProgress
}

// SourceProgress is one source in use.
type SourceProgress struct {
	ID    string
	Bytes int64   // received in this session, wrong and repeated ones too
	Rate  float64 // bytes/s while bytes were awaited
}

// Fetch fills the sink with what is missing in it and returns nil when that is done. It
// fails with the sink's error when this machine is at fault, with *NoSourceError, or when
// ctx ends. What the sink took stays there.
func (c *Client) Fetch(ctx context.Context, req Request) error {
	j, err := newJob(c, req)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	p := &pool{j: j, known: make(map[string]*candidate), reported: time.Now(), done: j.done}
	defer func() {
		cancel()
		p.wg.Wait()
		p.report(time.Now())
	}()
	tick := time.NewTicker(tickEvery)
	defer tick.Stop()
	for {
		if over, err := j.over(); over {
			return err
		}
		if err := p.start(ctx, time.Now()); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-j.wake:
		case now := <-tick.C:
			j.dropSlow(now)
			j.broadcast() // who waits may find work to take over
			p.report(now)
		}
	}
}

// pool keeps a job's sources at work.
type pool struct {
	j  *job
	wg sync.WaitGroup // the sessions

	// For report, which belongs to the goroutine of Fetch.
	reported time.Time
	done     int64
	rate     float64

	mu    sync.Mutex // guards what follows
	known map[string]*candidate
	order []*candidate // as they became known
}

// candidate is a source, and how it did.
type candidate struct {
	active bool
	out    bool // not to be asked again
	tries  int  // in vain, in a row
	next   time.Time
	err    error // why it is not active
}

// start opens sessions with sources while there is room. The error says that nobody is left.
func (p *pool) start(ctx context.Context, now time.Time) error {
	listed := p.j.req.Sources()
	p.mu.Lock()
	defer p.mu.Unlock()
	active, hope := 0, p.j.req.Wait
	for _, k := range p.order {
		if k.active {
			active++
		}
	}
	for _, src := range listed {
		k := p.known[src.ID()]
		if k == nil {
			k = &candidate{}
			p.known[src.ID()] = k
			p.order = append(p.order, k)
		}
		if k.out || !p.j.req.Wait && k.tries >= maxTries {
			continue
		}
		hope = true
		if k.active || active >= p.j.c.cfg.Sources || now.Before(k.next) {
			continue
		}
		k.active = true
		active++
		p.wg.Go(func() { p.use(ctx, src, k) })
	}
	if active == 0 && !hope {
		return p.noSourceLocked()
	}
	return nil
}

func (p *pool) noSourceLocked() error {
	p.j.mu.Lock()
	defer p.j.mu.Unlock()
	none := &NoSourceError{Model: p.j.req.Model, Missing: p.j.total - p.j.done}
	for _, k := range p.order {
		if k.err != nil {
			none.Sources = append(none.Sources, k.err)
		}
	}
	return none
}

// use works with a source until that ends, and judges it.
func (p *pool) use(ctx context.Context, src Source, k *candidate) {
	used, err := p.j.runLink(ctx, src)
	defer p.j.poke()
	judged := err != nil && ctx.Err() == nil // else it ended because the fetch did
	if judged {
		err = p.j.c.blame(src, err)
		p.j.c.cfg.Logger.Info("source left", "source", src.ID(), "err", err)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	k.active = false
	if judged {
		k.judge(err, used, p.j.c.cfg.Cooldown)
	}
}

// judge decides when a source is tried again after err.
func (k *candidate) judge(err error, used bool, cooldown time.Duration) {
	k.err = err
	if used {
		k.tries = 0
	}
	k.tries++
	pause := min(firstPause<<min(k.tries-1, 8), maxPause)
	var bad *BadSourceError
	switch {
	case errors.As(err, &bad) && bad.Fault.Malicious():
		k.out = true
	case bad != nil:
		pause = cooldown
	case errors.Is(err, errNothing):
		pause = maxPause
		k.tries = maxTries
	}
	k.next = time.Now().Add(pause)
}

// report tells of the progress.
func (p *pool) report(now time.Time) {
	j := p.j
	j.mu.Lock()
	at := Progress{Done: j.done, Total: j.total, Left: -1}
	for l := range j.links {
		perSecond, _ := l.d.meter.rate(now)
		at.Sources = append(at.Sources, SourceProgress{l.src.ID(), l.d.meter.total(), perSecond})
	}
	j.mu.Unlock()
	if took := now.Sub(p.reported); took > 0 {
		seen := float64(at.Done-p.done) / took.Seconds()
		if p.rate == 0 {
			p.rate = seen
		} else {
			p.rate += rateWeight * (seen - p.rate)
		}
	}
	p.reported, p.done = now, at.Done
	at.Rate = p.rate
	switch {
	case at.Done == at.Total:
		at.Left = 0
	case at.Rate > 0:
		at.Left = seconds(float64(at.Total-at.Done) / at.Rate)
	}
	slices.SortFunc(at.Sources, func(a, b SourceProgress) int { return cmp.Compare(a.ID, b.ID) })
	if j.req.Progress != nil {
		j.req.Progress(at)
	}
}

// dropSlow ends the sessions of sources that trickle.
func (j *job) dropSlow(now time.Time) {
	j.mu.Lock()
	defer j.mu.Unlock()
	for l := range j.links {
		seen, ok := l.d.meter.window(now, j.c.cfg.Window)
		if !ok {
			continue
		}
		floor, of := float64(j.c.cfg.Floor), "the least"
		for other := range j.links {
			if perSecond, _ := other.d.meter.rate(now); other != l && perSecond/farBelow > floor {
				floor, of = perSecond/farBelow, fmt.Sprintf("1/%d of another's", farBelow)
			}
		}
		switch {
		case seen == 0:
			l.fail(FaultStalled, fmt.Errorf("nothing for %v", j.c.cfg.Window))
		case seen < floor:
			l.fail(FaultSlow, fmt.Errorf("%.0f bytes/s, under %.0f, %s", seen, floor, of))
		}
	}
}
