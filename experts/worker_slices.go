package experts

import (
	"context"
	"fmt"
	"slices"
	"time"
)

const (
	// patrol is how often a change looks whether the sessions and the queue are ready for it.
	patrol = 5 * time.Millisecond
	// quietDrain is how long a leaving worker must have been asked nothing for those who need
	// it to be taken as idle.
	quietDrain = 2 * time.Second
)

// served is what a worker computes, by layer. It does not change.
type served struct {
	epoch  uint64
	layers map[int][][2]int32 // ranges of experts, which may overlap
}

func newServed(epoch uint64, lists ...[]Slice) *served {
	v := &served{epoch: epoch, layers: map[int][][2]int32{}}
	for _, s := range slices.Concat(lists...) {
		for l := s.FirstLayer; l < s.EndLayer; l++ {
			v.layers[l] = append(v.layers[l], [2]int32{int32(s.FirstExpert), int32(s.EndExpert)})
		}
	}
	return v
}

// lacks returns the first of some experts of a layer that is not served, -1 if all are.
func (v *served) lacks(layer int, experts []int32) int32 {
	ranges := v.layers[layer]
next:
	for _, e := range experts {
		for _, r := range ranges {
			if r[0] <= e && e < r[1] {
				continue next
			}
		}
		return e
	}
	return -1
}

// Slices returns what is offered.
func (w *Worker) Slices() []Slice {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Clone(w.cfg.Slices)
}

// AddSlice offers a further slice, which Kernel holds already, to all sessions.
func (w *Worker) AddSlice(s Slice) error {
	w.change.Lock()
	defer w.change.Unlock()
	return w.setSlices(context.Background(), append(w.Slices(), s))
}

// RemoveSlice withdraws a slice that was offered as such: see SetSlices.
func (w *Worker) RemoveSlice(ctx context.Context, s Slice) error {
	w.change.Lock()
	defer w.change.Unlock()
	now := w.Slices()
	i := slices.Index(now, s)
	if i < 0 {
		return fmt.Errorf("experts: the slice of %v is not served: name one of %v", s, now)
	}
	return w.setSlices(ctx, slices.Delete(now, i, i+1))
}

// SetSlices offers these slices and no others. Kernel holds the new ones already, and must hold
// those that go until SetSlices has returned: the dispatchers are told first, what they sent
// before they knew is still computed, and from then on a call for it is refused (CodeExpert).
// A dispatcher that does not take the change within WorkerConfig.Drain, or until ctx ends, is
// not waited for. On an error nothing has changed.
func (w *Worker) SetSlices(ctx context.Context, list []Slice) error {
	w.change.Lock()
	defer w.change.Unlock()
	return w.setSlices(ctx, slices.Clone(list))
}

func (w *Worker) setSlices(ctx context.Context, list []Slice) error {
	if err := checkSlices(list); err != nil {
		return fmt.Errorf("experts: %w", err)
	}
	w.mu.Lock()
	if w.closing {
		w.mu.Unlock()
		return ErrClosed
	}
	before := w.cfg.Slices
	w.epoch++
	w.served.Store(newServed(w.epoch, before, list))
	w.cfg.Slices = list
	w.tellAllLocked()
	w.mu.Unlock()
	if !slices.ContainsFunc(before, func(s Slice) bool { return !slices.Contains(list, s) }) {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, w.cfg.Drain)
	defer cancel()
	w.until(ctx, w.allTaken) // else: who has not taken it yet is refused what it asks for
	w.gate.Lock()
	w.epoch++
	w.served.Store(newServed(w.epoch, list))
	w.gate.Unlock()
	w.finish(ctx, w.epoch)
	return nil
}

// finish waits for the calls that were accepted before an epoch, until ctx ends: those that
// wait still are then refused.
func (w *Worker) finish(ctx context.Context, epoch uint64) {
	old := func(j *job) bool { return j.epoch < epoch }
	if w.until(ctx, func() bool {
		w.mu.Lock()
		defer w.mu.Unlock()
		return !slices.ContainsFunc(w.queue, old)
	}) != nil {
		w.mu.Lock()
		w.refuseLocked(old, &RemoteError{CodeExpert, "the expert is not served here any more"})
		w.mu.Unlock()
	}
	w.kernel.Lock() // what was taken from the queue is computed with the kernel locked
	//lint:ignore SA2001 nothing is to be done under the lock
	w.kernel.Unlock()
}

// until waits until a condition holds; an error is why it does not.
func (w *Worker) until(ctx context.Context, ok func() bool) error {
	tick := time.NewTicker(patrol)
	defer tick.Stop()
	for !ok() {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-w.done:
			return ErrClosed
		case <-tick.C:
		}
	}
	return nil
}

// allTaken says whether every session's dispatcher knows what is offered now.
func (w *Worker) allTaken() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	for s := range w.sessions {
		if s.greeted && (s.told != w.version || s.taken != s.sent) {
			return false
		}
	}
	return true
}

// tellAllLocked makes the offer anew and sends it to every session.
func (w *Worker) tellAllLocked() {
	w.version++
	w.hello = w.cfg.offer(w.state)
	for s := range w.sessions {
		s.tellLocked()
	}
}

// tellLocked sends the offer unless the one before is still to be taken.
func (s *workerSession) tellLocked() {
	if s.greeted && s.told != s.w.version && s.taken == s.sent {
		s.told, s.sent = s.w.version, s.w.version
		s.post(outFrame{typ: frameOffer, id: s.sent, payload: s.w.hello})
	}
}

// took takes in that the dispatcher knows of an offer.
func (s *workerSession) took(id uint64, payload []byte) error {
	needed, err := decodeTaken(payload)
	if err != nil {
		return violation(err)
	}
	s.w.mu.Lock()
	defer s.w.mu.Unlock()
	if id < s.taken || id > s.sent {
		return violation(fmt.Errorf("offer %d is taken, the last one was %d", id, s.sent))
	}
	s.taken, s.needed = id, needed
	s.tellLocked()
	return nil
}

// Drain tells all dispatchers to go elsewhere and waits until they have: until every call is
// answered and nobody needs this worker any more, or who does has asked nothing for a while.
// Until ctx ends it computes what it is sent. The worker stays so until Resume or Close.
func (w *Worker) Drain(ctx context.Context) error {
	if err := w.setState(leaving); err != nil {
		return err
	}
	calls, since := w.count.calls.Load(), time.Now()
	return w.until(ctx, func() bool {
		if n := w.count.calls.Load(); n != calls {
			calls, since = n, time.Now()
		}
		return w.allTaken() && w.idle(time.Since(since) >= quietDrain)
	})
}

// idle says whether no call is to be answered and, but for quiet times, nobody needs the worker.
func (w *Worker) idle(quiet bool) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	for s := range w.sessions {
		if s.jobs.Load() > 0 || s.needed && !quiet {
			return false
		}
	}
	return true
}

// Resume ends what Drain began: the dispatchers may send their calls again.
func (w *Worker) Resume() error { return w.setState(serving) }

func (w *Worker) setState(state workerState) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.closing {
		return ErrClosed
	}
	if w.state != state {
		w.state = state
		for s := range w.sessions {
			s.needed = state == leaving // until it says otherwise
		}
		w.tellAllLocked()
	}
	return nil
}

// Recheck ends the sessions of peers that WorkerConfig.Admit refuses by now.
func (w *Worker) Recheck() {
	if w.cfg.Admit == nil {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	for s := range w.sessions {
		if err := w.cfg.Admit(s.peer); err != nil && !s.revoked.Swap(true) {
			w.count.refused.Add(1)
			s.jobs.Add(1) // which the writer takes back for every error
			s.post(outFrame{typ: frameError, payload: putError(nil, CodeRights, err.Error())})
		}
	}
}
