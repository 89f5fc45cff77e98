package experts

import (
	"errors"
	"slices"
	"sync"
	"testing"
)

// draftCall is testCall as a draft, with an output that holds no zeros before.
func draftCall(seed uint64, tokens int, ownRows bool) *Call {
	call := testCall(seed, tokens, ownRows)
	poison(call)
	call.Draft = true
	return call
}

// checkDraft fails unless the rows of local experts are those of the whole layer, the others zero.
func checkDraft(t *testing.T, call *Call, whole *ffn, here func(expert int32) bool) {
	t.Helper()
	want := alone(t, whole, call)
	for pair, e := range call.IDs {
		if !here(e) {
			clear(want[pair*call.OutWidth:][:call.OutWidth])
		}
	}
	if diff := maxDiff(call.Out, want); diff != 0 {
		t.Errorf("a draft differs by %g from what is here", diff)
	}
}

// TestDraft: a draft has what is here and zeros, asks nobody, and leaves no trace.
func TestDraft(t *testing.T) {
	const half = testExperts / 2
	for _, first := range []bool{true, false} {
		w := newSwarm(t)
		far := w.start("far", newFFN(testWidth, testHidden, layerSlice(0, testExperts)), nil)
		own, whole := newFFN(testWidth, testHidden, layerSlice(0, half)), newFFN(testWidth, testHidden, layerSlice(0, testExperts))
		served := newLedger()
		d := w.dispatcher(func(c *Config) {
			c.Local, c.Served = &Local{Kernel: own, Slices: own.slices, First: first}, served.add
		})
		waitFor(t, d, "connected", connected)
		if !d.Resident() {
			t.Error("nothing is resident")
		}
		real := testCall(0, 4, false)
		if err := d.Compute(t.Context(), real); err != nil { // the program is known from here on
			t.Fatal(err)
		}
		asked, told, demand, pairs := far.kernel.calls.Load(), served.sum(), d.Demand(), d.LocalPairs()
		for seed := range uint64(20) {
			call := draftCall(seed/2*2, 1+int(seed)%5, seed%3 == 0)
			if err := d.Compute(t.Context(), call); err != nil {
				t.Fatal(err)
			}
			checkDraft(t, call, whole, func(e int32) bool { return e < half })
		}
		if far.kernel.calls.Load() != asked || served.sum() != told || d.LocalPairs() != pairs || !slices.EqualFunc(d.Demand(), demand, slices.Equal) {
			t.Errorf("drafts asked a worker, or were told or counted: %d calls, %d pairs", far.kernel.calls.Load()-asked, served.sum()-told)
		}
	}
}

// TestDraftOfNothing: without experts here a draft is zeros, also where nobody is left to ask.
func TestDraftOfNothing(t *testing.T) {
	d := newSwarm(t).dispatcher(nil)
	call := draftCall(0, 3, false)
	if err := d.Compute(t.Context(), call); err != nil {
		t.Fatal(err)
	}
	if slices.ContainsFunc(call.Out, func(f float32) bool { return f != 0 }) || d.Resident() {
		t.Error("a draft has rows of experts that are nowhere")
	}
	var missing *MissingError
	if err := d.Compute(t.Context(), testCall(0, 3, false)); !errors.As(err, &missing) {
		t.Errorf("a real call of the same experts: %v, want what is missing", err)
	}
}

// TestDraftFails: a draft that the kernel cannot compute is an error, not zeros.
func TestDraftFails(t *testing.T) {
	own := newFFN(testWidth, testHidden, layerSlice(0, testExperts))
	own.fail.Store(true)
	d := newSwarm(t).dispatcher(func(c *Config) { c.Local = &Local{Kernel: own, Slices: own.slices} })
	if err := d.Compute(t.Context(), draftCall(0, 1, false)); err == nil {
		t.Error("a draft of a broken kernel has no error")
	}
}

// TestDraftNeverLeaks: real calls that run beside drafts of the same rows, on the same kernel
// and the same state, are those of the whole layer to the bit.
func TestDraftNeverLeaks(t *testing.T) {
	const half = testExperts / 2
	w := newSwarm(t)
	w.start("a", newFFN(testWidth, testHidden, layerSlice(0, testExperts)), nil)
	w.start("b", newFFN(testWidth, testHidden, layerSlice(half, testExperts)), nil)
	own := newFFN(testWidth, testHidden, layerSlice(0, half))
	d := w.dispatcher(func(c *Config) { c.Local = &Local{Kernel: own, Slices: own.slices, First: true} })
	waitFor(t, d, "connected", connected)
	var runs sync.WaitGroup
	for i := range uint64(4) {
		runs.Go(func() {
			whole := newFFN(testWidth, testHidden, layerSlice(0, testExperts))
			for seed := i; seed < 160; seed += 4 {
				call := testCall(seed, 1+int(seed)%7, seed%3 == 0)
				poison(call)
				call.Draft = seed/4%2 == 0
				if err := d.Compute(t.Context(), call); err != nil {
					t.Error(err)
					return
				}
				if call.Draft {
					checkDraft(t, call, whole, func(e int32) bool { return e < half })
				} else if diff := maxDiff(call.Out, alone(t, whole, call)); diff != 0 {
					t.Errorf("a real answer beside drafts differs by %g", diff)
				}
			}
		})
	}
	runs.Wait()
}

// TestDraftWhileLocalChanges: a draft asks the kernel for nothing that was dropped; each row is whole
// or zero.
func TestDraftWhileLocalChanges(t *testing.T) {
	own, whole := wholeLayer(), wholeLayer()
	d := newSwarm(t).dispatcher(func(c *Config) { c.Local = &Local{Kernel: own, Slices: nil, First: true} })
	if d.Resident() {
		t.Error("nothing is here and some experts are resident")
	}
	stop := make(chan struct{})
	var drafts sync.WaitGroup
	drafts.Go(func() {
		call := draftCall(0, 9, false)
		want, zero := alone(t, whole, call), make([]float32, call.OutWidth)
		for !ended(stop) {
			poison(call)
			if err := d.Compute(t.Context(), call); err != nil {
				t.Error(err)
				return
			}
			for at := 0; at < len(want); at += call.OutWidth {
				if row := call.Out[at:][:call.OutWidth]; !slices.Equal(row, zero) && maxDiff(row, want[at:][:call.OutWidth]) != 0 {
					t.Error("a row is neither that of its expert nor zero")
				}
			}
		}
	})
	const half = testExperts / 2
	for i := range 200 {
		held, gone := layerSlice(0, half), layerSlice(half, testExperts)
		if i%2 == 0 {
			held, gone = gone, held
		}
		own.gone.Store(nil)
		d.SetLocal([]Slice{held})
		own.gone.Store(&[]Slice{gone})
	}
	close(stop)
	drafts.Wait()
	if !d.Resident() || own.misused.Load() > 0 {
		t.Errorf("%d calls for experts that were dropped", own.misused.Load())
	}
}
