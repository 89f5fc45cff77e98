package govern

import (
	"errors"
	"fmt"
	"slices"
	"sync"

	"kvasird/settle"
)

// ErrStore is a record that may not be stored.
var ErrStore = errors.New("a record of governance may not be stored")

// Config is what a Governor needs. All fields are required.
type Config struct {
	Authority Authority
	Since     uint64   // when the genesis reference was set, unix seconds
	Store     Store    // the Governor is its only writer
	Secret    []byte   // of the authenticator, sealed, as NewSecret gave it
	Key       [32]byte // opens Secret
}

// Governor takes changes. See the package.
type Governor struct {
	secret string
	store  Store

	mu      sync.Mutex // guards what follows
	history *History
	tries   attempts
	records uint64
	broken  error
}

// Open replays the store, and refuses it if it does not follow the rules.
func Open(cfg Config) (*Governor, error) {
	h, err := NewHistory(cfg.Authority, cfg.Since)
	if err != nil {
		return nil, err
	}
	secret, err := openSecret(cfg.Key, cfg.Authority.Network, cfg.Secret)
	if err != nil {
		return nil, err
	}
	g := &Governor{secret: secret, store: cfg.Store, history: h}
	err = cfg.Store.Replay(func(b []byte) error {
		r, err := ParseRecord(b)
		if err == nil && r.Proposal != nil {
			err = h.Apply(r)
		}
		if err != nil {
			return fmt.Errorf("govern: record %d: %w", g.records, err)
		}
		g.applied(r)
		return nil
	})
	if err != nil {
		return nil, err
	}
	return g, nil
}

// Params are those of an epoch, with the sequence number of the change that made them, and when
// their reference was set, in unix seconds.
func (g *Governor) Params(epoch uint64) (p settle.Params, sequence, refSet uint64) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.history.Params(epoch)
}

// Wallets are those with authority.
func (g *Governor) Wallets() []settle.Wallet { return slices.Clone(g.history.auth.Wallets) }

// At is History.At.
func (g *Governor) At(began, now uint64) Moment {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.history.At(began, now)
}

// Soonest is History.Soonest.
func (g *Governor) Soonest(now Moment, values map[string]uint64, within uint64) uint64 {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.history.Soonest(now, values, within)
}

// Propose makes the next proposal: see History.Propose. Nothing is kept of it.
func (g *Governor) Propose(now Moment, epoch, valid uint64, values map[string]uint64) (*Proposal, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.history.Propose(now, epoch, valid, values)
}

// ProposeWithdrawal is History.ProposeWithdrawal. Nothing is kept of it.
func (g *Governor) ProposeWithdrawal(now Moment, epoch, valid uint64, w Withdrawal) (*Proposal, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.history.ProposeWithdrawal(now, epoch, valid, w)
}

// Withdrawals is History.Withdrawals.
func (g *Governor) Withdrawals() []Granted {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.history.Withdrawals()
}

// Activate takes a proposal that enough wallets signed, with a code of the authenticator, and
// returns its record, which is stored. The proposal holds from its epoch.
func (g *Governor) Activate(now Moment, p *Proposal, signatures []Signature, code string) (*Record, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.broken != nil {
		return nil, g.broken
	}
	if _, err := g.history.check(now, p); err != nil {
		return nil, err
	}
	if err := g.history.signed(p, signatures); err != nil {
		return nil, err
	}
	step, err := g.tries.check(g.secret, code, now.At)
	if errors.Is(err, ErrLocked) {
		return nil, err
	}
	if err != nil {
		return nil, errors.Join(err, g.appendLocked(&Record{Moment: now}))
	}
	r := &Record{Moment: now, Step: step, Proposal: p, Signatures: signatures}
	if err := g.appendLocked(r); err != nil {
		return nil, err
	}
	if err := g.history.Apply(r); err != nil {
		g.broken = fmt.Errorf("govern: %w: what was stored does not apply: %w", ErrStore, err)
		return nil, g.broken
	}
	return r, nil
}

func (g *Governor) appendLocked(r *Record) error {
	b, err := r.encode()
	if err != nil {
		return err
	}
	if err := g.store.Append(g.records, b); err != nil {
		g.broken = fmt.Errorf("govern: %w: %w: open it again", ErrStore, err)
		return g.broken
	}
	g.applied(r)
	return nil
}

// applied counts a stored record.
func (g *Governor) applied(r *Record) {
	g.records++
	if r.Proposal != nil {
		g.tries = attempts{step: r.Step}
		return
	}
	g.tries.failures++
	g.tries.lastFailure = r.At
}
