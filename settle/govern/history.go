package govern

import (
	"errors"
	"fmt"
	"slices"
	"sort"
	"strings"

	"kvasird/settle"
)

// Errors of proposals.
var (
	ErrAuthority = errors.New("the genesis names no usable authority")
	ErrProposal  = errors.New("not a proposal")
	ErrNetwork   = errors.New("the proposal is of another network or cluster")
	ErrSequence  = errors.New("the proposal is not the next")
	ErrClock     = errors.New("time runs backwards")
	ErrExpired   = errors.New("the proposal is not to be signed at this time")
	ErrEpoch     = errors.New("the proposal holds from an epoch that it cannot hold from")
	ErrOldValue  = errors.New("the proposal is of other values than those in force")
	ErrNoChange  = errors.New("the proposal changes nothing")
	ErrSigner    = errors.New("the wallet has no authority")
	ErrTwice     = errors.New("the wallet has signed twice")
	ErrThreshold = errors.New("too few wallets have signed")
	ErrStep      = errors.New("the step of the authenticator does not rise")
)

const (
	maxValid = 7 * settle.Day // from when a proposal is made until it has to be taken
	maxAhead = 1000           // epochs
)

// Authority is what the genesis of a network says about its government.
type Authority struct {
	Network   settle.Hash
	Cluster   settle.Key // genesis hash of the chain
	Wallets   []settle.Wallet
	Threshold int  // wallets that have to sign
	Devnet    bool // the bounds of a devnet hold
	Params    settle.Params
}

func (a *Authority) check() error {
	if len(a.Wallets) > MaxWallets || a.Threshold < 1 || a.Threshold > len(a.Wallets) {
		return fmt.Errorf("govern: %w: %d of %d wallets, at most %d", ErrAuthority, a.Threshold, len(a.Wallets), MaxWallets)
	}
	for i, w := range a.Wallets {
		if err := settle.CheckKey(w); err != nil {
			return fmt.Errorf("govern: %w: %w", ErrAuthority, err)
		}
		if slices.Contains(a.Wallets[:i], w) {
			return fmt.Errorf("govern: %w: wallet %s is named twice", ErrAuthority, w)
		}
	}
	if err := a.Params.Validate(a.Devnet); err != nil {
		return fmt.Errorf("govern: %w: %w", ErrAuthority, err)
	}
	return nil
}

// Moment is a time, and the epoch that runs.
type Moment struct {
	At    uint64 // unix seconds
	Epoch uint64
	Began uint64 // when the epoch began, unix seconds
}

// Change is one parameter's.
type Change struct {
	Name     string
	Old, New uint64
}

// Withdrawal is an amount of the treasury for a wallet. Zero: none.
type Withdrawal struct {
	To     settle.Wallet
	Amount settle.Amount
}

// Proposal changes parameters together, or withdraws from the treasury.
type Proposal struct {
	Network  settle.Hash
	Cluster  settle.Key
	Sequence uint64   // 1 for the first, then one more each
	Epoch    uint64   // from which it holds
	Expires  uint64   // unix seconds: from then it is not taken
	Changes  []Change // by name, ascending

	Withdrawal Withdrawal
}

// taken is a change that was accepted.
type taken struct {
	epoch  uint64
	due    uint64 // when that epoch begins, unix seconds
	params settle.Params
	ref    uint64 // when the reference in params was set, unix seconds

	withdrawal Withdrawal
	pays       uint64 // epoch in which that is paid
}

// History is the changes so far, and says what holds when. Not safe for concurrent use.
type History struct {
	auth  Authority
	last  Moment
	step  uint64
	taken []taken // the genesis first
}

// NewHistory begins with the genesis, whose reference holds since a time in unix seconds.
func NewHistory(a Authority, since uint64) (*History, error) {
	if err := a.check(); err != nil {
		return nil, err
	}
	return &History{auth: a, taken: []taken{{due: since, params: a.Params, ref: since}}}, nil
}

// Sequence is the number of changes.
func (h *History) Sequence() uint64 { return uint64(len(h.taken) - 1) }

// Params are those of an epoch, with the sequence number of the change that made them, and when
// their reference was set, in unix seconds.
func (h *History) Params(epoch uint64) (p settle.Params, sequence, refSet uint64) {
	i := h.in(epoch)
	return h.taken[i].params, uint64(i), h.taken[i].ref
}

// in is the last change that holds in an epoch.
func (h *History) in(epoch uint64) int {
	return sort.Search(len(h.taken)-1, func(i int) bool { return h.taken[i+1].epoch > epoch })
}

// latest has the changes that are taken and do not hold yet.
func (h *History) latest() taken { return h.taken[len(h.taken)-1] }

// At says which epoch runs at a time, when epoch 0 began at another, both in unix seconds. Before
// that it is epoch 0.
func (h *History) At(began, now uint64) Moment {
	m := Moment{At: now, Began: began}
	for i, t := range h.taken {
		seconds, ends := t.params.EpochSeconds, ^uint64(0)
		if i+1 < len(h.taken) {
			ends = h.taken[i+1].epoch
		}
		passed := min((max(now, m.Began)-m.Began)/seconds, ends-m.Epoch)
		m.Epoch += passed
		m.Began += passed * seconds
		if m.Epoch < ends {
			break
		}
	}
	return m
}

// Soonest is the first epoch from which changes of parameters may hold when they are taken within
// a time, in seconds.
func (h *History) Soonest(now Moment, values map[string]uint64, within uint64) uint64 {
	var notice uint64
	for name := range values {
		if f, err := settle.FieldByName(name); err == nil {
			notice = max(notice, f.NoticeSeconds)
		}
	}
	epoch, due := now.Epoch, now.Began
	for epoch < now.Epoch+maxAhead && (epoch == now.Epoch || epoch < h.latest().epoch || due < now.At+within+notice) {
		p, _, _ := h.Params(epoch)
		epoch, due = epoch+1, due+p.EpochSeconds
	}
	return epoch
}

// due is when an epoch begins that lies ahead, as the changes so far have it.
func (h *History) due(now Moment, epoch uint64) uint64 {
	t := now.Began
	for e := now.Epoch; e < epoch; e++ {
		p, _, _ := h.Params(e)
		t += p.EpochSeconds
	}
	return t
}

// Propose makes the next proposal, that holds from an epoch and is to be taken within valid
// seconds, and checks everything but signatures.
func (h *History) Propose(now Moment, epoch, valid uint64, values map[string]uint64) (*Proposal, error) {
	p := h.next(now, epoch, valid)
	current := h.latest().params
	for name, v := range values {
		f, err := settle.FieldByName(name)
		if err != nil {
			return nil, fmt.Errorf("govern: %w", err)
		}
		p.Changes = append(p.Changes, Change{name, f.Get(current), v})
	}
	slices.SortFunc(p.Changes, func(a, b Change) int { return strings.Compare(a.Name, b.Name) })
	if _, err := h.check(now, p); err != nil {
		return nil, err
	}
	return p, nil
}

// ProposeWithdrawal is Propose for a withdrawal, which is paid in that epoch. What the
// treasury has is not its matter.
func (h *History) ProposeWithdrawal(now Moment, epoch, valid uint64, w Withdrawal) (*Proposal, error) {
	p := h.next(now, epoch, valid)
	p.Withdrawal = w
	if _, err := h.check(now, p); err != nil {
		return nil, err
	}
	return p, nil
}

func (h *History) next(now Moment, epoch, valid uint64) *Proposal {
	return &Proposal{Network: h.auth.Network, Cluster: h.auth.Cluster, Sequence: h.Sequence() + 1, Epoch: epoch,
		Expires: now.At + min(valid, maxValid)}
}

// Granted is a withdrawal that was taken.
type Granted struct {
	Withdrawal
	Sequence, Epoch uint64 // of its proposal
}

// Withdrawals are those that were taken, the first first.
func (h *History) Withdrawals() (all []Granted) {
	for i, t := range h.taken {
		if t.withdrawal != (Withdrawal{}) {
			all = append(all, Granted{t.withdrawal, uint64(i), t.pays})
		}
	}
	return all
}

// check returns what the proposal leads to. Signatures are not its matter.
func (h *History) check(now Moment, p *Proposal) (taken, error) {
	if p.Network != h.auth.Network || p.Cluster != h.auth.Cluster {
		return taken{}, fmt.Errorf("govern: network %x, cluster %s: %w", p.Network[:4], p.Cluster, ErrNetwork)
	}
	if p.Sequence != h.Sequence()+1 {
		return taken{}, fmt.Errorf("govern: proposal %d: %w, which is %d: propose again", p.Sequence, ErrSequence, h.Sequence()+1)
	}
	if now.At < h.last.At || now.Epoch < h.last.Epoch || now.Began > now.At || now.Began < h.last.Began {
		return taken{}, fmt.Errorf("govern: epoch %d at %d, after epoch %d at %d: %w: set the clock", now.Epoch, now.At, h.last.Epoch, h.last.At, ErrClock)
	}
	if p.Expires <= now.At || p.Expires-now.At > maxValid {
		return taken{}, fmt.Errorf("govern: proposal %d expires at %d, it is %d: %w, at most 7 days ahead: propose again", p.Sequence, p.Expires, now.At, ErrExpired)
	}
	before := h.latest()
	holds, soonest := p.Epoch, max(now.Epoch+1, before.epoch)
	if p.Withdrawal != (Withdrawal{}) {
		// It changes no parameter: its place among those that do is the next, whenever it is paid.
		// Else one that is far ahead would put off every change until then.
		holds, soonest = soonest, now.Epoch+1
	}
	if p.Epoch < soonest || p.Epoch-now.Epoch > maxAhead {
		return taken{}, fmt.Errorf("govern: epoch %d: %w: from %d to %d", p.Epoch, ErrEpoch, soonest, now.Epoch+maxAhead)
	}
	next, renewed, err := h.apply(p, before.params)
	if err != nil {
		return taken{}, err
	}
	t := taken{epoch: holds, due: max(h.due(now, holds), now.At), params: next, ref: before.ref, withdrawal: p.Withdrawal, pays: p.Epoch}
	if renewed {
		t.ref = t.due
	}
	return t, h.pace(now, p, t)
}

// apply returns the whole set after the changes, with all bounds checked.
func (h *History) apply(p *Proposal, current settle.Params) (next settle.Params, renewed bool, err error) {
	if w := p.Withdrawal; w != (Withdrawal{}) {
		return current, false, w.check(p.Changes)
	}
	if len(p.Changes) == 0 || len(p.Changes) > MaxChanges {
		return next, false, fmt.Errorf("govern: %w: %d changes, 1 to %d", ErrProposal, len(p.Changes), MaxChanges)
	}
	next = current
	for i, c := range p.Changes {
		if i > 0 && p.Changes[i-1].Name >= c.Name {
			return next, false, fmt.Errorf("govern: %.40q: %w: names ascend, each once", c.Name, ErrProposal)
		}
		f, err := settle.FieldByName(c.Name)
		if err != nil {
			return next, false, fmt.Errorf("govern: %w", err)
		}
		if v := f.Get(next); v != c.Old {
			return next, false, fmt.Errorf("govern: %s is %d, not %d: %w: propose again", c.Name, v, c.Old, ErrOldValue)
		}
		if c.Name == refName {
			renewed = true // the same value again says that it is still right
		} else if c.Old == c.New {
			return next, false, fmt.Errorf("govern: %s is %d: %w", c.Name, c.Old, ErrNoChange)
		}
		f.Set(&next, c.New)
	}
	if err := next.Validate(h.auth.Devnet); err != nil {
		return next, false, fmt.Errorf("govern: proposal %d: %w", p.Sequence, err)
	}
	return next, renewed, nil
}

// check refuses a withdrawal of nothing, to nobody, or beside changes.
func (w Withdrawal) check(changes []Change) error {
	if w.Amount == 0 || len(changes) > 0 {
		return fmt.Errorf("govern: %w: a withdrawal of %d beside %d changes: one of both", ErrProposal, w.Amount, len(changes))
	}
	return settle.CheckKey(w.To)
}

// Apply takes a record of an accepted change, as others have it: everything is checked but the
// code of the authenticator.
func (h *History) Apply(r *Record) error {
	if r.Proposal == nil {
		return fmt.Errorf("govern: %w: a wrong code changes nothing", ErrRecord)
	}
	t, err := h.check(r.Moment, r.Proposal)
	if err != nil {
		return err
	}
	signatures := slices.Clone(r.Signatures)
	for i := range signatures {
		s := &signatures[i]
		if s.Signed, err = r.Proposal.Message(s.Wallet, s.Format); err != nil {
			return err
		}
	}
	if err := h.signed(r.Proposal, signatures); err != nil {
		return err
	}
	if r.Step <= h.step {
		return fmt.Errorf("govern: step %d after %d: %w", r.Step, h.step, ErrStep)
	}
	h.last, h.step, h.taken = r.Moment, r.Step, append(h.taken, t)
	return nil
}

// signed says whether enough wallets consent.
func (h *History) signed(p *Proposal, signatures []Signature) error {
	if len(signatures) > len(h.auth.Wallets) {
		return fmt.Errorf("govern: %w: %d signatures of %d wallets", ErrTwice, len(signatures), len(h.auth.Wallets))
	}
	for i, s := range signatures {
		if !slices.Contains(h.auth.Wallets, s.Wallet) {
			return fmt.Errorf("govern: wallet %s: %w", s.Wallet, ErrSigner)
		}
		if slices.ContainsFunc(signatures[:i], func(o Signature) bool { return o.Wallet == s.Wallet }) {
			return fmt.Errorf("govern: wallet %s: %w", s.Wallet, ErrTwice)
		}
		if err := p.Verify(s); err != nil {
			return err
		}
	}
	if len(signatures) < h.auth.Threshold {
		return fmt.Errorf("govern: %w: %d of %d", ErrThreshold, len(signatures), h.auth.Threshold)
	}
	return nil
}
