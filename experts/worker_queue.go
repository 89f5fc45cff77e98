package experts

import (
	"fmt"
	"slices"
	"sync"
	"time"
)

// job is a call in the queue. Jobs are pooled with their payload.
type job struct {
	session *workerSession
	id      uint64
	program *workerProgram
	epoch   uint64 // of what was served when it was checked
	payload []byte
	call    callFrame // views of payload
	expires time.Time
	refused *RemoteError // instead of being computed
	reply   *buffer      // made when computed; nil: not yet
}

var jobs = sync.Pool{New: func() any { return new(job) }}

func (j *job) release() {
	*j = job{payload: j.payload}
	jobs.Put(j)
}

// bytes is what a job costs the queue. Its rows count as they are computed, in f32.
func (j *job) bytes() int { return j.call.size() + F32.size(len(j.call.row), j.program.outWidth) }

// batchScratch gathers the calls that are computed together.
type batchScratch struct {
	jobs        []*job
	late        []*job // taken from the queue after their deadline, or refused
	row, expert []int32
	rows, out   []float32
}

// enqueue copies a checked call into the queue, or says why it is not taken.
func (w *Worker) enqueue(s *workerSession, id uint64, p *workerProgram, epoch uint64, payload []byte) *RemoteError {
	if s.jobs.Load() >= int32(w.cfg.SessionQueue) {
		return &RemoteError{CodeBusy, fmt.Sprintf("%d calls of this session wait", w.cfg.SessionQueue)}
	}
	j := jobs.Get().(*job)
	j.session, j.id, j.program, j.epoch = s, id, p, epoch
	j.payload = append(j.payload[:0], payload...)
	j.call, _ = decodeCall(j.payload, s.agreed, w.cfg.MaxRows, w.cfg.MaxPairs) // checked before
	j.expires = time.Now().Add(time.Duration(j.call.deadline) * time.Millisecond)
	w.mu.Lock()
	defer w.mu.Unlock()
	var refused *RemoteError
	switch {
	case w.closing:
		refused = &RemoteError{CodeClosing, "the worker is stopping"}
	case len(w.queue) >= w.cfg.Queue:
		refused = &RemoteError{CodeBusy, fmt.Sprintf("%d calls wait", len(w.queue))}
	case w.bytes+j.bytes() > w.cfg.QueueBytes:
		refused = &RemoteError{CodeBusy, fmt.Sprintf("%d bytes wait", w.bytes)}
	}
	if refused != nil {
		j.release()
		return refused
	}
	s.jobs.Add(1)
	w.bytes += j.bytes()
	w.queue = append(w.queue, j)
	w.waiting.Store(int32(len(w.queue)))
	w.wake()
	return nil
}

func (w *Worker) wake() {
	select {
	case w.kick <- struct{}{}:
	default:
	}
}

// refuseLocked takes jobs out of the queue for good, and says why unless that is nil.
func (w *Worker) refuseLocked(match func(*job) bool, why *RemoteError) {
	w.queue = slices.DeleteFunc(w.queue, func(j *job) bool {
		if !match(j) {
			return false
		}
		w.bytes -= j.bytes()
		if why != nil {
			w.count.refused.Add(1)
			j.fail(why)
			return true
		}
		j.session.jobs.Add(-1)
		j.release()
		return true
	})
	w.waiting.Store(int32(len(w.queue)))
}

func (w *Worker) cancel(s *workerSession, id uint64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.refuseLocked(func(j *job) bool { return j.session == s && j.id == id }, nil)
}

// combine computes what waits, whatever waits for the same program together, until Close.
func (w *Worker) combine() {
	for range w.kick {
		for w.waiting.Load() > 0 {
			w.kernel.Lock()
			w.take(time.Now())
			err := w.compute()
			w.kernel.Unlock()
			w.answer(err)
		}
		select {
		case <-w.done:
			return
		default:
		}
	}
}

// take moves the oldest call and those with the same program from the queue to the scratch,
// up to the pairs of a batch, and those that are late with them.
func (w *Worker) take(now time.Time) {
	b := &w.scratch
	b.jobs, b.late = b.jobs[:0], b.late[:0]
	pairs := 0
	w.mu.Lock()
	defer w.mu.Unlock()
	w.queue = slices.DeleteFunc(w.queue, func(j *job) bool {
		switch {
		case now.After(j.expires):
			b.late = append(b.late, j)
		case len(b.jobs) == 0 ||
			j.program == b.jobs[0].program && pairs+len(j.call.row) <= w.cfg.BatchPairs:
			if j.refused = w.unpaid(j.session, j.program, len(j.call.row)); j.refused != nil {
				b.late = append(b.late, j)
				break
			}
			b.jobs = append(b.jobs, j)
			pairs += len(j.call.row)
		default:
			return false
		}
		w.bytes -= j.bytes()
		return true
	})
	w.waiting.Store(int32(len(w.queue)))
}

// compute runs the kernel over the scratch and leaves each job its reply.
func (w *Worker) compute() error {
	b := &w.scratch
	if len(b.jobs) == 0 {
		return nil
	}
	p := b.jobs[0].program
	if j := b.jobs[0]; len(b.jobs) == 1 && j.call.precision == F32 && !j.call.sums {
		j.reply = getBuffer(F32.size(len(j.call.row), p.outWidth))
		return w.computeLocked(p, float32s(j.call.data), j.call.row, j.call.expert, float32s(j.reply.b))
	}
	b.rows, b.row, b.expert = b.rows[:0], b.row[:0], b.expert[:0]
	for _, j := range b.jobs {
		first := int32(len(b.rows) / p.rowWidth)
		b.rows = j.call.appendRows(b.rows)
		b.expert = append(b.expert, j.call.expert...)
		for _, r := range j.call.row {
			b.row = append(b.row, first+r)
		}
	}
	b.out = sized(b.out, len(b.row)*p.outWidth)
	if err := w.computeLocked(p, b.rows, b.row, b.expert, b.out); err != nil {
		return err
	}
	out := b.out
	for _, j := range b.jobs {
		own := out[:len(j.call.row)*p.outWidth]
		out = out[len(own):]
		if j.call.sums {
			own = j.call.sumRows(own, p.outWidth)
		}
		reply := j.call.precision.orF32(own)
		j.reply = getBuffer(reply.size(j.call.answers(), p.outWidth))
		reply.put(j.reply.b, own, p.outWidth)
	}
	return nil
}

// computeLocked runs the kernel, which is locked, and learns how fast it is.
func (w *Worker) computeLocked(p *workerProgram, rows []float32, row, expert []int32, out []float32) error {
	began := time.Now()
	w.began.Store(began.UnixNano())
	defer w.began.Store(0)
	err := w.cfg.Kernel.Compute(p.kernel, rows, row, expert, out)
	smooth(&w.perPair, max(1, float64(time.Since(began))/float64(len(row))))
	return err
}

// unpaid says why a call of a session is not computed, if it is not.
func (w *Worker) unpaid(s *workerSession, p *workerProgram, pairs int) *RemoteError {
	if w.cfg.Allow == nil {
		return nil
	}
	if err := w.cfg.Allow(s.peer, p.layer, pairs); err != nil {
		return &RemoteError{CodeUnpaid, err.Error()}
	}
	return nil
}

// isQuick says whether so many pairs are expected to take no longer than inlineTime.
func (w *Worker) isQuick(pairs int) bool {
	perPair := load(&w.perPair)
	if perPair == 0 {
		return pairs <= inlinePairs
	}
	return perPair*float64(pairs) <= float64(inlineTime)
}

// answer leaves the replies of the scratch, which the combiner alone uses, to the writers.
func (w *Worker) answer(err error) {
	b := &w.scratch
	for _, j := range b.late {
		if j.refused != nil {
			w.count.refused.Add(1)
			j.fail(j.refused)
			continue
		}
		w.count.expired.Add(1)
		j.fail(&RemoteError{CodeExpired, fmt.Sprintf("not computed within %d ms", j.call.deadline)})
	}
	for _, j := range b.jobs {
		if err != nil {
			w.count.refused.Add(1)
			if j.reply != nil {
				buffers.Put(j.reply)
			}
			j.fail(&RemoteError{CodeKernel, err.Error()})
			continue
		}
		w.counted(j.session, j.program, len(j.call.row))
		j.session.post(outFrame{typ: frameReply, id: j.id, pooled: j.reply})
		j.release()
	}
	if len(b.jobs) > 0 && err == nil {
		w.count.batches.Add(1)
	}
	clear(b.jobs)
	clear(b.late)
}

func (j *job) fail(e *RemoteError) {
	j.session.post(outFrame{typ: frameError, id: j.id, payload: putError(nil, e.Code, e.Text)})
	j.release()
}

// counted records a call of a session that was computed.
func (w *Worker) counted(s *workerSession, p *workerProgram, pairs int) {
	w.count.calls.Add(1)
	if w.cfg.Computed != nil {
		w.cfg.Computed(s.peer, p.layer, pairs)
	}
	if p.layer < countedLayers {
		w.rows[p.layer].Add(uint64(pairs))
	}
}
