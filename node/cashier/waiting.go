package cashier

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"time"

	"kvasird/node/kv"
	"kvasird/settle"
)

// For how long a request waits for its next step, in seconds. What it waits for is
// written down with its state, and done by Desk.Tick.
const (
	keptQuote    = 3600            // an expired quote is forgotten then
	keptReserved = 2 * lateSeconds // after the quote's end: a signature that no chain has seen is let go, the latest one too
	keptPaid     = 3600            // a paid request that nobody starts gives all back
	leaseAtLeast = 600             // a running one that nobody ends too
	leaseAtMost  = 6 * settle.Hour
)

// Why requests fail that nobody came for.
const (
	neverRan   = "nobody started the request"
	neverEnded = "the node that answered it did not say how it ended"
)

// runsFor is how long a request may run: each token of the answer has a second.
func runsFor(q settle.Quote) uint64 {
	return min(leaseAtLeast+q.AnswerTokens, leaseAtMost)
}

func dueKey(at uint64, id settle.QuoteID) []byte {
	return append(binary.BigEndian.AppendUint64([]byte{'d'}, at), id[:]...)
}

// watch writes down when something is due about a request in its state. What was written
// in earlier states is passed over when its time comes.
func (p page) watch(r settle.Request, now uint64) error {
	var at uint64
	switch r.State {
	case settle.Open:
		at = r.Quote.Expires + keptQuote
	case settle.Reserved:
		at = max(now, r.Lease) + askAgain + (now-min(now, r.Quote.Created))/4 // the longer nobody knows it, the seldomer
	case settle.Paid:
		at = now + keptPaid
	case settle.Running:
		at = r.Lease
	default:
		return nil
	}
	return p.Put(dueKey(at, r.Quote.ID), []byte{byte(r.State)})
}

// due is something to be done about a request.
type due struct {
	key   []byte
	id    settle.QuoteID
	state settle.State
}

// maxDue bounds what one Tick does of each urgency.
const maxDue = 256

// Urgencies of what is due. What waits for the chain keeps nobody's money from going back.
const (
	refunds = iota
	forgets
	rechecks
	urgencies
)

func urgencyOf(s settle.State) int {
	switch s {
	case settle.Open:
		return forgets
	case settle.Reserved:
		return rechecks
	}
	return refunds
}

// dueBy are what is due by a time: the most urgent first, and of those the oldest.
func (b *Books) dueBy(now uint64) ([]due, error) {
	var all [urgencies][]due
	err := b.store.View(func(tx *kv.Tx) error {
		return tx.Each([]byte{'d'}, func(k, v []byte) error {
			if len(k) != 25 || len(v) != 1 {
				return fmt.Errorf("%w: record %x", ErrBooks, k)
			}
			if binary.BigEndian.Uint64(k[1:]) > now {
				return errEnough
			}
			state := settle.State(v[0])
			if of := &all[urgencyOf(state)]; len(*of) < maxDue {
				*of = append(*of, due{slices.Clone(k), settle.QuoteID(k[9:]), state})
			}
			return nil
		})
	})
	if errors.Is(err, errEnough) {
		err = nil
	}
	return slices.Concat(all[:]...), err
}

// did forgets what was due; a quote that expired unpaid is forgotten with it, and how it
// was to be paid.
func (b *Books) did(all []due, now uint64) error {
	if len(all) == 0 {
		return nil
	}
	return b.store.Update(func(tx *kv.Tx) error {
		for _, d := range all {
			if err := tx.Delete(d.key); err != nil {
				return err
			}
			var r settle.Request
			ok, err := page{tx}.load(requestKey(d.id), &r)
			if err == nil && ok && r.State == settle.Open && now >= r.Quote.Expires+keptQuote {
				err = errors.Join(tx.Delete(requestKey(d.id)), tx.Delete(intentKey(d.id)))
			}
			if err != nil {
				return err
			}
		}
		return nil
	})
}

// collectFor is how long one Tick asks the chain about reserved requests, at most.
const collectFor = 30 * time.Second

// collect does what is due about requests.
func (d *Desk) collect(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, collectFor)
	defer cancel()
	now := d.cfg.Books.seconds()
	all, err := d.cfg.Books.dueBy(now)
	if err != nil {
		return err
	}
	var errs []error
	var finished []due
	for _, one := range all {
		if err := d.collectOne(ctx, one, now); err != nil {
			errs = append(errs, fmt.Errorf("request %s: %w", one.id, err))
			continue
		}
		finished = append(finished, one)
	}
	return errors.Join(append(errs, d.cfg.Books.did(finished, now))...)
}

func (d *Desk) collectOne(ctx context.Context, one due, now uint64) error {
	r, err := d.cfg.Books.Request(one.id)
	if errors.Is(err, ErrNoQuote) {
		return nil
	}
	if err != nil || r.State != one.state {
		return err
	}
	switch {
	case r.State == settle.Reserved:
		return d.recheck(ctx, r, now)
	case r.State == settle.Paid:
		err = d.giveBack(r, neverRan)
	case r.State == settle.Running && r.Lease <= now:
		err = d.giveBack(r, neverEnded)
	}
	return err
}

// giveBack ends a request that delivered nothing.
func (d *Desk) giveBack(r settle.Request, why string) error {
	_, err := d.conclude(Ended{ID: r.Quote.ID, Failed: why}, credited{})
	if errors.Is(err, ErrSettled) || errors.Is(err, settle.ErrState) {
		return nil // somebody came
	}
	return err
}
