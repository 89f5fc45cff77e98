package experts

import (
	"context"
	"errors"
	"fmt"
	"math"
)

// Canary has every connected peer compute one row with the first expert of each of its slices
// in every layer whose program it accepted, so that each part that serves has been tried. It
// learns of programs from Compute: run a token through the model first. A peer that fails is
// suspect from then on; the error names all of them.
func (d *Dispatcher) Canary(ctx context.Context) error {
	d.mu.Lock()
	sessions := append([]*session(nil), d.sessions...)
	d.mu.Unlock()
	var errs []error
	for _, s := range sessions {
		for _, layer := range *d.programs.Load() {
			for _, p := range layer {
				if err := d.try(ctx, s, p); err != nil {
					errs = append(errs, fmt.Errorf("peer %s: %w", s.peer, err))
				}
			}
		}
	}
	return errors.Join(errs...)
}

// try computes the first experts of a peer in a layer there and nowhere else.
func (d *Dispatcher) try(ctx context.Context, s *session, p *program) error {
	call := &Call{
		Layer: p.layer, Program: p.bytes, RowWidth: p.rowWidth, OutWidth: p.outWidth, RowsPerToken: 1, Used: 1,
	}
	for _, slice := range s.offer.Slices {
		if slice.FirstLayer <= p.layer && p.layer < slice.EndLayer {
			call.IDs = append(call.IDs, int32(slice.FirstExpert))
		}
	}
	if len(call.IDs) == 0 {
		return nil
	}
	call.Rows = make([]float32, len(call.IDs)*p.rowWidth)
	for i := range call.Rows {
		call.Rows[i] = float32(math.Sin(float64(i)))
	}
	call.Out = make([]float32, len(call.IDs)*p.outWidth)
	if err := call.validate(); err != nil {
		return err
	}
	r := d.runs.get(d, ctx.Done())
	defer d.runs.put(r)
	r.only = s
	return r.compute(ctx, p, call)
}
