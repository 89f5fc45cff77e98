//go:build cgo

package ggml

/*
#include "kernel.h"
*/
import "C"

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"kvasird/ggml/gguf"
)

// Load reads the experts of some ranges of a layer from an opened model, slice
// or backbone file, as one bank: they can only be dropped together.
func (k *Kernel) Load(m *gguf.Model, layer int, ranges ...gguf.Range) error {
	k.loading.Lock()
	defer k.loading.Unlock()
	b, err := planBank(m, layer, ranges)
	if err != nil {
		return err
	}
	return k.load(context.Background(), m, []*bank{b})
}

// LoadSlices reads every MoE layer of some slices, which may overlap. All or
// nothing is loaded. The experts of a layer can then only be dropped together.
func (k *Kernel) LoadSlices(m *gguf.Model, parts ...gguf.Slice) error {
	k.loading.Lock()
	defer k.loading.Unlock()
	banks, err := planSlices(m, parts)
	if err != nil {
		return err
	}
	return k.load(context.Background(), m, banks)
}

// LoadSlice reads every MoE layer of a slice while others compute: only the last
// step, which takes no time, waits for a call under way. All or nothing is loaded;
// the end of ctx is such a failure. An expert that is held already is refused.
func (k *Kernel) LoadSlice(ctx context.Context, m *gguf.Model, s gguf.Slice) error {
	k.loading.Lock()
	defer k.loading.Unlock()
	banks, err := planSlices(m, []gguf.Slice{s})
	if err != nil {
		return err
	}
	return k.load(ctx, m, banks)
}

// SliceBytes is the memory that a slice will take: held as long as it is loaded
// (what Bytes grows by), and passing while it is loaded, beside that.
func (k *Kernel) SliceBytes(m *gguf.Model, s gguf.Slice) (held, passing int64, err error) {
	k.loading.Lock()
	defer k.loading.Unlock()
	banks, err := planSlices(m, []gguf.Slice{s})
	if err != nil {
		return 0, 0, err
	}
	k.expect(m)
	for _, b := range banks {
		held += b.bytes(k)
	}
	return held, fillers * fillSpace(banks), nil
}

// DropSlice frees the experts of a slice, once a call under way is done. Programs
// stay set: what they are asked of these experts is ErrNotLoaded until they are
// loaded again. What was loaded in one piece is dropped in one piece: a slice that
// cuts one is refused, as is one of which nothing is loaded.
func (k *Kernel) DropSlice(s gguf.Slice) error {
	k.loading.Lock()
	defer k.loading.Unlock()
	gone, err := k.within(s)
	if err != nil {
		return err
	}
	k.mu.Lock()
	for _, b := range gone {
		k.removeLocked(b)
	}
	k.mu.Unlock()
	freeBanks(gone)
	C.kv_memory_trim()
	return nil
}

// ReplaceSlice keeps of a slice, which was loaded in one piece, the parts rest, each
// of which can then be dropped by itself, and frees the others, all while calls are
// computed. Until it returns both are in memory. On an error nothing has changed.
func (k *Kernel) ReplaceSlice(ctx context.Context, m *gguf.Model, s gguf.Slice, rest ...gguf.Slice) error {
	if len(rest) == 0 {
		return k.DropSlice(s)
	}
	k.loading.Lock()
	defer k.loading.Unlock()
	gone, err := k.within(s)
	if err != nil {
		return err
	}
	var banks []*bank
	for _, r := range rest {
		if !s.Layers.Covers(r.Layers) || !s.Experts.Covers(r.Experts) {
			return fmt.Errorf("slice %v is no part of %v", r, s)
		}
		list, err := planSlices(m, []gguf.Slice{r})
		if err != nil {
			return err
		}
		banks = append(banks, list...)
	}
	k.expect(m)
	if err = k.fill(ctx, banks); err == nil {
		err = k.swap(gone, banks)
	}
	if err != nil {
		gone = banks
	}
	freeBanks(gone)
	C.kv_memory_trim()
	return err
}

// swap takes banks in for others, which it does not free, all or none.
func (k *Kernel) swap(gone, banks []*bank) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, b := range gone {
		k.removeLocked(b)
	}
	err := k.takeInLocked(banks)
	if err != nil { // what was built before is built again
		err = errors.Join(err, k.takeInLocked(gone))
	}
	return err
}

// within returns the banks in a slice, which cuts none.
func (k *Kernel) within(s gguf.Slice) ([]*bank, error) {
	var found []*bank
	for layer, banks := range k.banks {
		if !s.Layers.Contains(layer) {
			continue
		}
		for _, b := range banks {
			inside := 0
			for _, r := range b.ranges {
				inside += r.Intersect(s.Experts).Len()
			}
			if inside > 0 && inside < b.held() {
				return nil, fmt.Errorf("slice %v cuts the experts %v of layer %d, which were loaded together: drop them together", s, b.ranges, layer)
			}
			if inside > 0 {
				found = append(found, b)
			}
		}
	}
	if len(found) == 0 {
		return nil, fmt.Errorf("slice %v: %w", s, ErrNotLoaded)
	}
	return found, nil
}

// planSlices makes a bank for every MoE layer of some slices.
func planSlices(m *gguf.Model, parts []gguf.Slice) ([]*bank, error) {
	var banks []*bank
	for _, layer := range m.ExpertLayers() {
		var ranges []gguf.Range
		for _, s := range parts {
			if s.Layers.Contains(layer) {
				ranges = append(ranges, s.Experts)
			}
		}
		if ranges = mergeRanges(ranges); len(ranges) == 0 {
			continue
		}
		b, err := planBank(m, layer, ranges)
		if err != nil {
			return nil, err
		}
		banks = append(banks, b)
	}
	if len(banks) == 0 {
		return nil, fmt.Errorf("%w: no MoE layer is in the slices %v", ErrNotLoaded, parts)
	}
	return banks, nil
}

// expect sets what the layouts of banks depend on beside their weights.
func (k *Kernel) expect(m *gguf.Model) { k.used = max(m.ExpertsUsed(), 1) }

// load fills banks and takes them in, all or none; k.loading is held.
func (k *Kernel) load(ctx context.Context, m *gguf.Model, banks []*bank) error {
	for _, b := range banks {
		for _, other := range k.banks[b.layer] {
			for e, at := range b.index {
				if at >= 0 && e < len(other.index) && other.index[e] >= 0 {
					return fmt.Errorf("layer %d: expert %d is loaded already", b.layer, e)
				}
			}
		}
	}
	k.expect(m)
	err := k.fill(ctx, banks)
	if err == nil {
		err = k.takeIn(banks)
	}
	if err != nil {
		freeBanks(banks)
		C.kv_memory_trim()
	}
	return err
}

func (k *Kernel) fill(ctx context.Context, banks []*bank) error {
	for _, b := range banks {
		if err := b.alloc(k); err != nil {
			return err
		}
	}
	return readBanks(ctx, banks)
}

// takeIn has every program of a layer compute on its new banks too.
func (k *Kernel) takeIn(banks []*bank) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.takeInLocked(banks)
}

func (k *Kernel) takeInLocked(banks []*bank) error {
	for i, b := range banks {
		if err := k.addLocked(b); err != nil {
			for _, b := range banks[:i+1] {
				k.removeLocked(b)
			}
			return err
		}
	}
	return nil
}

func (k *Kernel) addLocked(b *bank) error {
	k.banks[b.layer] = append(k.banks[b.layer], b)
	for i := range k.programs {
		p := &k.programs[i]
		if p.Program == nil || p.layer != b.layer {
			continue
		}
		c, err := k.build(p.Program, b)
		if err != nil {
			return fmt.Errorf("layer %d: a program that is in use does not fit these experts: %w", b.layer, err)
		}
		p.on = append(p.on, programOn{b, c})
	}
	return nil
}

// removeLocked forgets a bank, which it does not free, and what programs keep for it.
func (k *Kernel) removeLocked(b *bank) {
	k.banks[b.layer] = slices.DeleteFunc(k.banks[b.layer], func(o *bank) bool { return o == b })
	if len(k.banks[b.layer]) == 0 {
		delete(k.banks, b.layer)
	}
	for i := range k.programs {
		k.programs[i].on = slices.DeleteFunc(k.programs[i].on, func(o programOn) bool {
			if o.bank == b {
				C.kv_program_free(o.c)
			}
			return o.bank == b
		})
	}
}
