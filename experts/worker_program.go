package experts

import "fmt"

// peerPrograms bounds the different programs of a layer that one peer's sessions use. A model
// has one; the second is for a peer that comes back with another while an old session of it
// lingers.
const peerPrograms = 2

// workerProgram is a program that the kernel accepted. It lives as long as a session uses it.
type workerProgram struct {
	key                string // in Worker.programs
	kernel             int    // the kernel's number for it
	layer              int
	rowWidth, outWidth int
	uses               map[string]int // program numbers that mean it, by peer; guarded by Worker.kernel
}

func programKey(layer int, program []byte) string { return fmt.Sprintf("%d %s", layer, program) }

// program returns the kernel's program for a layer, for one more number of a session, which
// release gives back. The kernel is asked if no session uses the program.
func (w *Worker) program(s *workerSession, layer int, program []byte) (*workerProgram, *RemoteError) {
	if len(w.served.Load().layers[layer]) == 0 {
		return nil, &RemoteError{CodeExpert, fmt.Sprintf("layer %d is not served here", layer)}
	}
	key := programKey(layer, program)
	w.kernel.Lock()
	defer w.kernel.Unlock()
	p := w.programs[key]
	if (p == nil || p.uses[s.peer] == 0) && w.usedLocked(s.peer, layer) >= peerPrograms {
		return nil, &RemoteError{CodeLimit, fmt.Sprintf(
			"layer %d: this peer uses %d other programs, which is the most of one: close the sessions that use them", layer, peerPrograms)}
	}
	if p == nil {
		p = &workerProgram{key: key, layer: layer, uses: map[string]int{}}
		if err := w.acceptLocked(p, program); err != nil {
			return nil, &RemoteError{CodeProgram, fmt.Sprintf("layer %d: %v", layer, err)}
		}
		w.programs[key] = p
	}
	p.uses[s.peer]++
	return p, nil
}

// usedLocked counts the programs of a layer that a peer uses; the kernel is locked.
func (w *Worker) usedLocked(peer string, layer int) (n int) {
	for _, p := range w.programs {
		if p.layer == layer && p.uses[peer] > 0 {
			n++
		}
	}
	return n
}

// acceptLocked gives a program to the kernel, which is locked.
func (w *Worker) acceptLocked(p *workerProgram, program []byte) (err error) {
	p.kernel, p.rowWidth, p.outWidth, err = w.cfg.Kernel.SetProgram(p.layer, program)
	if err != nil {
		return err
	}
	if min(p.rowWidth, p.outWidth) < 1 || max(p.rowWidth, p.outWidth) > MaxWidth {
		w.cfg.Kernel.Forget(p.kernel)
		return fmt.Errorf("rows of %d and %d elements, want 1 to %d", p.rowWidth, p.outWidth, MaxWidth)
	}
	return nil
}

// release gives back the programs of a session that has no call left in the queue; with the
// kernel locked none is being computed either. The kernel forgets those that nobody uses now.
func (w *Worker) release(s *workerSession) {
	if len(s.programs) == 0 {
		return
	}
	w.kernel.Lock()
	defer w.kernel.Unlock()
	for _, p := range s.programs {
		if p == nil {
			continue
		}
		if p.uses[s.peer]--; p.uses[s.peer] == 0 {
			delete(p.uses, s.peer)
		}
		if len(p.uses) == 0 {
			delete(w.programs, p.key)
			w.cfg.Kernel.Forget(p.kernel)
		}
	}
}
