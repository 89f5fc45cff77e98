package fetch

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

const (
	// depth is how many ranges are asked of a source at a time: one on the way, one asked.
	depth = 2
	// A range is what a source gives in so long.
	mostTime  = time.Second / 2
	leastTime = time.Second / 32
	// maxRetracted bounds how often a source may be without what it had.
	maxRetracted = 8
)

// link is one session with a source, for one job. A goroutine asks and reads, another gives
// the sink what was read, so that verification and reading overlap.
type link struct {
	j      *job
	src    Source
	d      *dialog
	cancel context.CancelCauseFunc // ends the session, with the reason

	held   map[int][]Span // guarded by job.mu
	noTree map[int]bool   // likewise

	queue     []*claim // asked, in order
	retracted []*claim // refused, to be compared with what the source holds
	refusals  int

	free   chan []byte
	filled chan filled
	stored atomic.Int64 // ranges and trees that the sink took
}

// filled is what was read of a range, in order: whole groups, but at its end. The last of it
// brings the buffer back.
type filled struct {
	claim *claim
	data  []byte
	buf   []byte
}

// runLink works for the job with a source until the job is over, and returns why it ended
// before that. It reports whether the source was of use.
func (j *job) runLink(ctx context.Context, src Source) (used bool, err error) {
	d, files, err := j.c.open(ctx, src, j.req.Model)
	if err != nil {
		return false, err
	}
	defer d.close()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	stop := context.AfterFunc(ctx, d.close)
	defer stop()
	l := &link{
		j: j, src: src, d: d, cancel: cancel, noTree: make(map[int]bool), held: make(map[int][]Span),
		free: make(chan []byte, depth), filled: make(chan filled, depth),
	}
	for range depth {
		l.free <- nil
	}
	if !slices.Equal(files, j.files) {
		return false, d.fault(FaultModel, errors.New("its files are not the model's"))
	}
	var storing sync.WaitGroup
	storing.Go(l.storeAll)
	if err = l.refresh(j.order); err == nil {
		j.enter(l)
		err = l.work(ctx)
	}
	close(l.filled)
	storing.Wait()
	if cause := context.Cause(ctx); cause != nil {
		err = cause
	}
	j.leave(l)
	return l.stored.Load() > 0, err
}

// fail ends the session.
func (l *link) fail(kind Fault, err error) { l.cancel(l.d.fault(kind, err)) }

func (j *job) enter(l *link) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.links[l] = struct{}{}
}

// refresh asks what the source holds of files.
func (l *link) refresh(files []int) error {
	for _, file := range files {
		spans, err := l.d.held(file, l.j.files[file].Size)
		if err != nil {
			return err
		}
		l.j.mu.Lock()
		l.held[file] = spans
		l.j.mu.Unlock()
	}
	return nil
}

// chunk is how many bytes to ask for at once: half a second's worth, and towards the end its
// share of what is left, but leastTime's worth, since the next request must be there in time.
func (l *link) chunk(now time.Time, share int64) int64 {
	perSecond, _ := l.d.meter.rate(now)
	n := float64(firstChunk)
	if perSecond > 0 {
		n = min(perSecond*mostTime.Seconds(), max(perSecond*leastTime.Seconds(), float64(share)))
	}
	return min(max(int64(n)/Group*Group, Group), l.j.c.most)
}

// needs guesses how long the source would need for n bytes.
func (l *link) needs(n int64, now time.Time) time.Duration {
	perSecond, _ := l.d.meter.rate(now)
	if perSecond == 0 {
		perSecond = firstRate
	}
	return seconds(float64(n) / perSecond)
}

// canLocked reports whether l could do w.
func (l *link) canLocked(w *work, idle bool) bool {
	if w.tree {
		return idle && !l.noTree[w.file]
	}
	return covers(l.held[w.file], w.span)
}

// work asks and reads until there is nothing left to do.
func (l *link) work(ctx context.Context) error {
	for ctx.Err() == nil {
		for len(l.queue) < depth && len(l.retracted) == 0 {
			more, err := l.askMore(ctx)
			if err != nil {
				return err
			}
			if !more {
				break
			}
		}
		var err error
		switch {
		case len(l.queue) > 0:
			c := l.queue[0]
			l.queue = l.queue[1:]
			err = l.receive(ctx, c)
		case len(l.retracted) > 0:
			err = l.checkRetracted()
		default:
			var over bool
			if over, err = l.rest(ctx); over {
				return nil
			}
		}
		if err != nil {
			return err
		}
	}
	return ctx.Err()
}

// askMore asks for another range, or fetches a tree. It reports false when there is nothing
// to do, or a limit says to read first what was asked for.
func (l *link) askMore(ctx context.Context) (bool, error) {
	idle := len(l.queue) == 0
	if lim := l.j.c.limiter; lim != nil && !idle && lim.Tokens() < float64(l.j.c.most) {
		return false, nil
	}
	c := l.j.take(l, idle, time.Now())
	if c == nil {
		return false, nil
	}
	if c.work.tree {
		return true, l.fetchTree(ctx, c)
	}
	if err := l.limit(ctx, c.work.span.Len); err != nil {
		return false, err
	}
	id, err := l.d.ask(frameAskData, ask{uint32(c.work.file), uint32(c.work.span.Len), uint64(c.work.span.Off)})
	if err != nil {
		return false, err
	}
	l.j.asked(c, id)
	l.queue = append(l.queue, c)
	return true, nil
}

// asked notes the request of c, by which others may cancel it.
func (j *job) asked(c *claim, id uint64) {
	j.mu.Lock()
	defer j.mu.Unlock()
	c.id = id
	if c.work.over {
		c.link.d.cancel(id)
	}
}

// limit waits until the client may ask for n bytes.
func (l *link) limit(ctx context.Context, n int64) error {
	if l.j.c.limiter == nil {
		return nil
	}
	err := l.j.c.limiter.WaitN(ctx, int(n))
	if err != nil {
		<-ctx.Done() // which is nearer than the turn: no fault of the source
	}
	return err
}

// receive reads the answer to c and hands it on to be stored, piece by piece, so that it is
// verified while the next one comes, and while it is in the cache of the processor. When it
// breaks off, the whole groups of it are not lost.
func (l *link) receive(ctx context.Context, c *claim) error {
	var buf []byte
	select {
	case buf = <-l.free:
	case <-ctx.Done():
		return ctx.Err()
	}
	want, given := int(c.work.span.Len), 0
	if cap(buf) < want {
		buf = make([]byte, want)
	}
	buf = buf[:want]
	err := l.d.readRange(c.id, buf, func(n int) {
		c.got.Store(int64(n))
		if n < want {
			n -= n % Group
		}
		if n > given {
			l.filled <- filled{claim: c, data: buf[given:n]}
			given = n
		}
	})
	l.filled <- filled{claim: c, buf: buf}
	var no refusal
	if errors.As(err, &no) {
		l.settle()
		return l.refused(c, no)
	}
	return err
}

// settle waits until all that was read is stored, which is when all buffers are back.
func (l *link) settle() {
	var bufs [depth][]byte
	for i := range bufs {
		bufs[i] = <-l.free
	}
	for _, b := range bufs {
		l.free <- b
	}
}

// refused takes a claim back that the source refuses.
func (l *link) refused(c *claim, no refusal) error {
	over := l.j.isOver(c.work)
	l.j.giveUp(c)
	switch {
	case no.code == codeCancelled && over:
		return nil
	case no.code == codeCancelled:
		return l.d.fault(FaultProtocol, malformed("a request is cancelled that was not"))
	case no.code != codeNotHeld:
		return no
	case c.work.tree:
		l.j.mu.Lock()
		l.noTree[c.work.file] = true
		l.j.mu.Unlock()
		return nil
	}
	l.j.mu.Lock()
	l.held[c.work.file] = subtract(l.held[c.work.file], []Span{c.work.span})
	l.j.mu.Unlock()
	l.retracted = append(l.retracted, c)
	if l.refusals++; l.refusals > maxRetracted {
		return fmt.Errorf("%w: it keeps dropping what it has", errNothing)
	}
	return nil
}

// checkRetracted asks a source that refused ranges whether it still says that it holds them.
func (l *link) checkRetracted() error {
	for _, c := range l.retracted {
		if err := l.refresh([]int{c.work.file}); err != nil {
			return err
		}
		if covers(l.held[c.work.file], c.work.span) {
			return l.d.fault(FaultHeld, fmt.Errorf("%d bytes at %d of file %d", c.work.span.Len, c.work.span.Off, c.work.file))
		}
	}
	l.retracted = nil
	return nil
}

// rest waits for something to do. A source that could not do anything is asked again what it
// holds, and left when that is nothing of use.
func (l *link) rest(ctx context.Context) (over bool, err error) {
	if over, _ := l.j.over(); over {
		return true, nil
	}
	useful, changed := l.j.useful(l)
	var enough <-chan time.Time
	if !useful {
		timer := time.NewTimer(l.j.c.cfg.HeldEvery)
		defer timer.Stop()
		enough = timer.C
	}
	for {
		select {
		case <-ctx.Done():
			return false, ctx.Err()
		case <-changed:
			if over, _ := l.j.over(); over {
				return true, nil
			}
			if useful {
				return false, nil
			}
			if useful, changed = l.j.useful(l); useful {
				return false, nil
			}
		case <-enough:
			if err := l.refresh(l.j.order); err != nil {
				return false, err
			}
			if useful, _ := l.j.useful(l); !useful {
				return false, errNothing
			}
			return false, nil
		}
	}
}

// storeAll gives the sink what was read.
func (l *link) storeAll() {
	for f := range l.filled {
		l.store(f)
		if f.buf != nil {
			l.free <- f.buf
		}
	}
}

func (l *link) store(f filled) {
	w, c := f.claim.work, f.claim
	if len(f.data) == 0 || c.wrong || l.j.isOver(w) {
		return
	}
	off := w.span.Off + c.stored
	err := l.j.req.Sink.WriteGroups(w.file, off, f.data)
	switch {
	case err == nil:
		if c.stored += int64(len(f.data)); c.stored == w.span.Len {
			l.stored.Add(1)
			l.j.finish(c)
		}
	case isWrong(err):
		c.wrong = true
		l.fail(FaultData, err)
	default:
		l.j.stop(fmt.Errorf("fetch: store %d bytes at %d of file %d: %w", len(f.data), off, w.file, err))
	}
}

// fetchTree reads a whole tree, range after range, and gives it to the sink.
func (l *link) fetchTree(ctx context.Context, c *claim) error {
	file, size := c.work.file, c.work.span.Len
	var tree []byte // grows by a range as bytes arrive
	for int64(len(tree)) < size && !l.j.isOver(c.work) {
		n := min(size-int64(len(tree)), l.j.c.most)
		if err := l.limit(ctx, n); err != nil {
			return err
		}
		id, err := l.d.ask(frameAskTree, ask{uint32(file), uint32(n), uint64(len(tree))})
		if err != nil {
			return err
		}
		at := len(tree)
		tree = slices.Grow(tree, int(n))[:at+int(n)]
		err = l.d.readRange(id, tree[at:], func(n int) { c.got.Store(int64(at + n)) })
		var no refusal
		if errors.As(err, &no) {
			return l.refused(c, no)
		}
		if err != nil {
			return err
		}
	}
	if l.j.isOver(c.work) {
		return nil
	}
	err := l.j.req.Sink.SetTree(file, tree)
	switch {
	case err == nil:
		l.stored.Add(1)
		l.j.finish(c)
	case isWrong(err):
		return l.d.fault(FaultTree, err)
	default:
		l.j.stop(fmt.Errorf("fetch: store the tree of file %d: %w", file, err))
	}
	return nil
}
