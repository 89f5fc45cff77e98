package fetch

import (
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

const (
	// firstChunk is asked of a source whose rate is not known, firstRate assumed of it, in
	// bytes/s, when another's work is to be taken over.
	firstChunk = 1 << 20
	firstRate  = 1 << 20

	// Work is taken over from a source that needs stealRatio times as long, and stealSlack.
	stealRatio = 2
	stealSlack = 100 * time.Millisecond
	// maxClaims bounds the sources that one range is asked of.
	maxClaims = 2
)

// job is one fetch: what is missing, and who was asked for it.
type job struct {
	c     *Client
	req   Request
	files []File
	order []int // of files that are wanted
	total int64 // bytes wanted, without trees

	wake chan struct{} // the loop of Fetch should look

	mu      sync.Mutex     // guards what follows
	pending map[int][]Span // asked of nobody
	trees   []*work        // not here yet
	flights map[*work]struct{}
	links   map[*link]struct{} // those with a session
	done    int64
	fatal   error
	changed chan struct{} // closed and replaced when there may be something to do
}

// work is a range, or a whole tree, that is asked of sources as one thing.
type work struct {
	file   int
	tree   bool
	span   Span
	claims []*claim // guarded by job.mu
	over   bool     // likewise
}

// claim is work that was asked of a source.
type claim struct {
	work *work
	link *link
	id   uint64 // of the request, 0 before it is sent and for a tree; guarded by job.mu
	at   time.Time
	got  atomic.Int64

	stored int64 // bytes of it that the sink took; belongs to who stores, as does wrong
	wrong  bool  // the sink refused some
}

func newJob(c *Client, req Request) (*job, error) {
	j := &job{
		c: c, req: req, files: req.Sink.Files(),
		wake: make(chan struct{}, 1), changed: make(chan struct{}),
		pending: make(map[int][]Span), flights: make(map[*work]struct{}), links: make(map[*link]struct{}),
	}
	spans := req.Spans
	if spans == nil {
		spans = make(map[int][]Span, len(j.files))
		for i, f := range j.files {
			spans[i] = []Span{{0, f.Size}}
		}
	}
	j.order = slices.Sorted(maps.Keys(spans))
	for _, file := range j.order {
		if file < 0 || file >= len(j.files) {
			return nil, fmt.Errorf("fetch: model %x has no file %d", req.Model[:4], file)
		}
		want := align(spans[file], j.files[file].Size)
		missing := subtract(want, merge(req.Sink.Held(file)))
		j.total += sum(want)
		j.done += sum(want) - sum(missing)
		j.pending[file] = missing
		if !req.Sink.HasTree(file) {
			j.trees = append(j.trees, &work{file: file, tree: true, span: Span{0, req.Sink.TreeSize(file)}})
		}
	}
	return j, nil
}

// over reports whether the fetch is complete, or the local fault that ends it.
func (j *job) over() (bool, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.fatal != nil || j.completeLocked(), j.fatal
}

func (j *job) completeLocked() bool {
	if len(j.trees) > 0 || len(j.flights) > 0 {
		return false
	}
	for _, spans := range j.pending {
		if len(spans) > 0 {
			return false
		}
	}
	return true
}

func (j *job) broadcastLocked() {
	close(j.changed)
	j.changed = make(chan struct{})
}

func (j *job) broadcast() {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.broadcastLocked()
}

// poke has the loop of Fetch look at the job.
func (j *job) poke() {
	select {
	case j.wake <- struct{}{}:
	default:
	}
}

// stop ends the fetch with a local fault.
func (j *job) stop(err error) {
	j.mu.Lock()
	if j.fatal == nil {
		j.fatal = err
	}
	j.mu.Unlock()
	j.poke()
}

// take finds work for l, nil when there is none now. A tree is for a source of which nothing
// else is asked.
func (j *job) take(l *link, idle bool, now time.Time) *claim {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.fatal != nil {
		return nil
	}
	if idle {
		for _, w := range j.trees {
			if len(w.claims) == 0 && !l.noTree[w.file] {
				return j.claimLocked(w, l, now)
			}
		}
	}
	chunk := l.chunk(now, j.shareLocked())
	for _, file := range j.order {
		if j.treeMissingLocked(file) {
			continue
		}
		if s, ok := first(j.pending[file], l.held[file], chunk); ok {
			j.pending[file] = subtract(j.pending[file], []Span{s})
			return j.claimLocked(&work{file: file, span: s}, l, now)
		}
	}
	if w := j.slowestLocked(l, idle, now); w != nil {
		return j.claimLocked(w, l, now)
	}
	return nil
}

// shareLocked is what each request may ask for if all sources are to be done at about the same
// time. (Guided self-scheduling: Polychronopoulos and Kuck, 1987.)
func (j *job) shareLocked() int64 {
	left := int64(0)
	for _, spans := range j.pending {
		left += sum(spans)
	}
	return left / int64(depth*max(1, len(j.links)))
}

func (j *job) claimLocked(w *work, l *link, now time.Time) *claim {
	c := &claim{work: w, link: l, at: now}
	w.claims = append(w.claims, c)
	j.flights[w] = struct{}{}
	return c
}

func (j *job) treeMissingLocked(file int) bool {
	return slices.ContainsFunc(j.trees, func(w *work) bool { return w.file == file })
}

// slowestLocked finds the work of others that will take longest, if l would be done sooner.
func (j *job) slowestLocked(l *link, idle bool, now time.Time) *work {
	var found *work
	var longest time.Duration
	for w := range j.flights {
		if len(w.claims) == 0 || len(w.claims) >= maxClaims || !l.canLocked(w, idle) {
			continue
		}
		c := w.claims[0]
		left := c.left(now)
		if c.link != l && left > stealRatio*l.needs(w.span.Len, now)+stealSlack && left > longest {
			found, longest = w, left
		}
	}
	return found
}

// left guesses how long a source still needs for what was asked of it.
func (c *claim) left(now time.Time) time.Duration {
	perSecond, silence := c.link.d.meter.rate(now)
	if perSecond == 0 {
		return max(now.Sub(c.at), silence) // as long again
	}
	return max(seconds(float64(c.work.span.Len-c.got.Load())/perSecond), silence)
}

// seconds is a duration, bounded.
func seconds(s float64) time.Duration { return time.Duration(min(s, 1e9) * float64(time.Second)) }

// useful reports whether l could do any of what is not done yet, and the channel that is
// closed when that may have changed.
func (j *job) useful(l *link) (bool, <-chan struct{}) {
	j.mu.Lock()
	defer j.mu.Unlock()
	for _, w := range j.trees {
		if !l.noTree[w.file] {
			return true, j.changed
		}
	}
	for file, spans := range j.pending {
		if _, ok := first(spans, l.held[file], Group); ok && !j.treeMissingLocked(file) {
			return true, j.changed
		}
	}
	for w := range j.flights {
		if l.canLocked(w, true) {
			return true, j.changed
		}
	}
	return false, j.changed
}

// finish says that the work of c is in the sink, and tells others that were asked for it.
func (j *job) finish(c *claim) {
	j.mu.Lock()
	w := c.work
	if w.over {
		j.mu.Unlock()
		return
	}
	w.over = true
	delete(j.flights, w)
	if w.tree {
		j.trees = slices.DeleteFunc(j.trees, func(t *work) bool { return t == w })
	} else {
		j.done += w.span.Len
	}
	for _, other := range w.claims {
		if other != c && other.id != 0 {
			other.link.d.cancel(other.id)
		}
	}
	complete := j.completeLocked()
	if complete || w.tree {
		j.broadcastLocked()
	}
	j.mu.Unlock()
	if complete {
		j.poke()
	}
}

func (j *job) isOver(w *work) bool {
	j.mu.Lock()
	defer j.mu.Unlock()
	return w.over
}

// giveUp says that a source will not do the work of c. What is left of it goes back, unless
// another source was asked as well.
func (j *job) giveUp(c *claim) {
	var held []Span
	if !c.work.tree {
		held = merge(j.req.Sink.Held(c.work.file)) // which may take a while: not under the mutex
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	w := c.work
	i := slices.Index(w.claims, c)
	if i < 0 || w.over {
		return
	}
	w.claims = slices.Delete(w.claims, i, i+1)
	if len(w.claims) > 0 {
		return
	}
	delete(j.flights, w)
	if !w.tree {
		missing := subtract([]Span{w.span}, held)
		j.done += w.span.Len - sum(missing)
		j.pending[w.file] = merge(append(j.pending[w.file], missing...))
		w.over = true
	}
	j.broadcastLocked()
	j.poke()
}

// leave gives up all that l was asked for.
func (j *job) leave(l *link) {
	j.mu.Lock()
	delete(j.links, l)
	var mine []*claim
	for w := range j.flights {
		for _, c := range w.claims {
			if c.link == l {
				mine = append(mine, c)
			}
		}
	}
	j.mu.Unlock()
	for _, c := range mine {
		j.giveUp(c)
	}
}
