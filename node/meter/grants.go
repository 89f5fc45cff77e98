package meter

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"kvasird/ggml/gguf"
	"kvasird/settle"
)

// What is computed for a peer.
const (
	// passPPM is how much more than its tokens a pass allows: for hedges, retries, drafts.
	passPPM = 1_500_000
	// freeEvery is how long the window lasts that a peer has without a pass.
	freeEvery = 5 * time.Minute
	// freePairs is the least of a window in pairs of an expert part: a canary of an engine has 32
	// tokens, and those of a dispatcher try every slice.
	freePairs = 1024
	// strangers is what all peers without a settled request have together, in tokens.
	strangers      = 4096
	mostPasses     = 8192
	mostPresenters = 8 // of a pass: its entry, and those that it lent it to
	// mostOpen bounds what passes allow whose outcome is not known, of one standing: that of 90 of the
	// largest ones.
	mostOpen = 1 << 62
	// clockSkew is how far clocks of the settlement and of this node may differ.
	clockSkew = 10 * time.Minute
)

// ErrUnpaid is wrapped by why something is not computed for a peer.
var ErrUnpaid = errors.New("who pays is not known")

var (
	errNoPass  = fmt.Errorf("%w: nothing is left of what was shown to be paid, nor of what is computed without", ErrUnpaid)
	errDoubted = fmt.Errorf("%w: what this node shows is not believed for a while: most of what was computed by it was not credited", ErrUnpaid)
)

// GrantsConfig configures Grants. Only Logger and Now have defaults.
type GrantsConfig struct {
	Network    settle.Hash
	Self       settle.Node
	Settlement settle.Node   // who signs passes
	Params     settle.Params // has the windows
	// Credits says what requests credited to this node, in their order.
	Credits func(ctx context.Context, ids []settle.QuoteID) ([]Credit, error)
	Logger  *slog.Logger     // nil: none
	Now     func() time.Time // nil: the clock
}

// Grants is what this node computes for whom: what passes of paid requests allow, and a small
// window without one, for canaries and for new peers.
type Grants struct {
	cfg GrantsConfig

	mu        sync.Mutex // guards what follows
	models    map[string]*lending
	passes    map[settle.QuoteID]*grant
	standings map[shower]*standing // of those who show passes
}

// lending is a model that something is computed of.
type lending struct {
	model     *Model
	worth     []uint64 // of a unit of each part, in billionths of a token
	peers     map[string]*allowance
	strangers window // of all
	most      int    // peers
}

// window is what was computed without a pass since a time, in units by part.
type window struct {
	used []uint64
	at   time.Time
}

// allowance is what a peer may have computed.
type allowance struct {
	node settle.Node
	st   *standing // by its own passes; nil: it showed none yet
	window
	last   time.Time // that something was asked
	grants []held    // that it showed, by their end
	begin  []int     // of grants, by part: those before have nothing left
}

// grant is what is left of a pass.
type grant struct {
	pass      settle.Pass
	left      []uint64 // units by part
	worth     int64    // of all that it allowed at first, in billionths of a token
	by        []*presenter
	at, asked time.Time // when it was shown first, and when its outcome was asked for
	concluded bool      // it is known what it credited. What is left can be used until its end
}

// presenter is who showed a pass, and what was computed for it by that.
type presenter struct {
	st    *standing // that it began with
	node  settle.Node
	spent int64 // worth
}

// held is a grant, and as whom a peer has it.
type held struct {
	*grant
	as *presenter
}

// cost is what a row or a pair takes of a part.
type cost struct {
	part         int
	units, worth uint64 // worth of a unit to this node
}

// NewGrants returns grants of no model. Error: the configuration lacks something.
func NewGrants(cfg GrantsConfig) (*Grants, error) {
	if cfg.Network == (settle.Hash{}) || cfg.Settlement == (settle.Node{}) || cfg.Credits == nil || cfg.Params.VoucherWindow == 0 {
		return nil, errors.New("meter: grants need the network, who settles, its parameters, and a way to ask")
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	return &Grants{cfg: cfg, models: map[string]*lending{}, passes: map[settle.QuoteID]*grant{}, standings: map[shower]*standing{}}, nil
}

// lend is what is computed of a model, from now on.
func (g *Grants) lend(m *Model) *lending {
	g.mu.Lock()
	defer g.mu.Unlock()
	l := g.models[m.ID]
	if l == nil {
		l = &lending{model: m, peers: map[string]*allowance{}, most: max(1, min(mostPeers, mostCells/len(m.parts)))}
		l.strangers.used = make([]uint64, len(m.parts))
		shares, _ := settle.PartShares(m.parts) // NewModel has checked them
		for i, s := range shares {
			l.worth = append(l.worth, uint64(s)/m.parts[i].PerToken)
		}
		g.models[m.ID] = l
	}
	return l
}

// Pairs says of (row, expert) pairs of a layer whether they are computed for a peer, and takes
// them from what it may have. The error wraps ErrUnpaid. One lock is held for it.
func (g *Grants) Pairs(m *Model) func(peerID string, layer, pairs int) error {
	l := g.lend(m)
	costs := make([]cost, m.layers)
	for layer := range costs {
		part, _ := m.expertPart(layer)
		costs[layer] = cost{part: part, units: 1}
		if part < len(l.worth) {
			costs[layer].worth = l.worth[part]
		}
	}
	return func(peerID string, layer, pairs int) error {
		if layer < 0 || layer >= len(costs) {
			return nil // the model has no such layer, and the worker no experts of it
		}
		return g.spend(l, peerID, costs[layer:layer+1], uint64(pairs), true)
	}
}

// Window is Pairs for rows of a window of layers. Their experts are worth something to this node
// only where it is paid for them. Without free all needs a pass.
func (g *Grants) Window(m *Model, layers gguf.Range, experts, free bool) func(peerID string, rows int) error {
	l := g.lend(m)
	var costs []cost
	m.eachDense(layers, func(part int) { costs = append(costs, cost{part, 1, l.worth[part]}) })
	m.eachExpert(layers, func(part int) {
		c := cost{part, m.parts[part].PerToken, l.worth[part]}
		if !experts {
			c.worth = 0
		}
		costs = append(costs, c)
	})
	return func(peerID string, rows int) error { return g.spend(l, peerID, costs, uint64(rows), free) }
}

// spend takes n times some costs, all or none.
func (g *Grants) spend(l *lending, peerID string, costs []cost, n uint64, free bool) error {
	now := g.cfg.Now()
	g.mu.Lock()
	defer g.mu.Unlock()
	a := l.open(peerID, now)
	if a == nil {
		return errNoPass
	}
	if a.node == g.cfg.Self {
		return nil
	}
	if a.st == nil {
		a.st = g.standings[shower{a.node, a.node}]
	}
	if a.st.doubted(now) {
		return errDoubted
	}
	a.expire(now)
	for _, c := range costs {
		if need := n * c.units; l.model.counted(c.part) && a.granted(c.part, need, now) < need && (!free || !g.freeLocked(l, a, c.part, need, now)) {
			return errNoPass
		}
	}
	for _, c := range costs {
		if l.model.counted(c.part) {
			g.payLocked(l, a, c, n*c.units, now)
		}
	}
	return nil
}

// payLocked takes units of a part out of grants, those that end first, and then of the window.
func (g *Grants) payLocked(l *lending, a *allowance, c cost, need uint64, now time.Time) {
	for i := a.begin[c.part]; i < len(a.grants) && need > 0; i++ {
		p := a.grants[i]
		st := p.as.st
		if !st.usable(now) {
			continue
		}
		k := min(need, p.left[c.part])
		need -= k
		p.left[c.part] -= k
		p.as.spent += int64(k * c.worth)
		st.balance += int64(k * c.worth)
		if p.concluded {
			st.late += int64(k * c.worth)
		}
	}
	if need == 0 {
		return
	}
	a.used[c.part] += need
	if a.st.stranger() {
		l.strangers.used[c.part] += need
	}
}

// freeLocked is whether there is enough of a part with what a peer may have without a pass.
func (g *Grants) freeLocked(l *lending, a *allowance, part int, need uint64, now time.Time) bool {
	room := a.room(part, l.free(part, g.cfg.Params.Window(a.st.requests())), now)
	if a.st.stranger() {
		room = min(room, l.strangers.room(part, l.free(part, strangers), now))
	}
	return a.granted(part, need, now)+room >= need
}

// expire lets go of passes that have ended.
func (a *allowance) expire(now time.Time) {
	for len(a.grants) > 0 && a.grants[0].over(now) {
		a.remove(0)
	}
}

// remove takes a grant out.
func (a *allowance) remove(i int) {
	a.grants = slices.Delete(a.grants, i, i+1)
	for part, at := range a.begin {
		if at > i {
			a.begin[part]--
		}
	}
}

// add puts a grant in its place.
func (a *allowance) add(p held) {
	i := len(a.grants)
	for i > 0 && a.grants[i-1].pass.Expires > p.pass.Expires {
		i--
	}
	a.grants = slices.Insert(a.grants, i, p)
	for part := range a.begin {
		a.begin[part] = min(a.begin[part], i)
	}
}

// granted is what passes allow of a part, as far as it is needed.
func (a *allowance) granted(part int, need uint64, now time.Time) (sum uint64) {
	i := a.begin[part]
	for i < len(a.grants) && a.grants[i].left[part] == 0 {
		i++
	}
	for a.begin[part] = i; i < len(a.grants) && sum < need; i++ {
		if p := a.grants[i]; p.as.st.usable(now) {
			sum += p.left[part]
		}
	}
	return sum
}

// free is a window of so many tokens, in units of a part.
func (l *lending) free(part int, tokens uint64) uint64 {
	units := tokens * l.model.parts[part].PerToken
	if first := gguf.ExpertPart(0); part >= first && (part-first)%2 == 0 {
		units = max(units, freePairs)
	}
	return units
}

// room is what is left of a window.
func (w *window) room(part int, most uint64, now time.Time) uint64 {
	if now.Sub(w.at) >= freeEvery {
		clear(w.used)
		w.at = now
	}
	return most - min(most, w.used[part])
}

// over is whether the pass has expired.
func (p *grant) over(now time.Time) bool {
	return now.After(time.Unix(int64(min(p.pass.Expires, 1<<40)), 0).Add(clockSkew))
}

// open returns the allowance of a peer, in place of the one that was not used for longest, of those
// that showed no pass if there are some; nil: its id holds no key.
func (l *lending) open(peerID string, now time.Time) *allowance {
	a := l.peers[peerID]
	if a == nil {
		node, err := NodeOf(peerID)
		if err != nil {
			return nil
		}
		if len(l.peers) >= l.most {
			l.dropOldest()
		}
		a = &allowance{node: node, begin: make([]int, len(l.model.parts)), window: window{used: make([]uint64, len(l.model.parts)), at: now}}
		l.peers[peerID] = a
	}
	a.last = now
	return a
}

func (l *lending) dropOldest() {
	name, oldest := "", (*allowance)(nil)
	for n, a := range l.peers {
		shows, showed := len(a.grants) > 0, oldest != nil && len(oldest.grants) > 0
		if oldest == nil || showed && !shows || showed == shows && a.last.Before(oldest.last) {
			name, oldest = n, a
		}
	}
	delete(l.peers, name)
}

// Take believes a pass that a peer shows: its entry, or who has a signature of that, which lends it.
// The same one again changes nothing. Errors: those of settle.ParsePass, ErrUnpaid, and what is
// wrong with it here.
func (g *Grants) Take(peerID string, record []byte, lent settle.Signature) (settle.Pass, error) {
	p, err := settle.ParsePass(record)
	if err != nil {
		return p, err
	}
	by, err := NodeOf(peerID)
	if err != nil {
		return p, err
	}
	to := by // whom the entry lent it to
	if by == p.Entry {
		to = g.cfg.Self
	}
	switch {
	case p.Network != g.cfg.Network || p.Signer != g.cfg.Settlement:
		return p, errors.New("the pass is of another network, or not by who settles")
	case (&grant{pass: p}).over(g.cfg.Now()):
		return p, errors.New("the pass has expired")
	}
	if err := p.VerifyLent(to, lent); err != nil {
		return p, fmt.Errorf("the pass of %s is not lent to %s: %w", p.Entry, to, err)
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	return p, g.takeLocked(peerID, by, p)
}

func (g *Grants) takeLocked(peerID string, by settle.Node, p settle.Pass) error {
	now := g.cfg.Now()
	l := g.models[p.Model]
	if l == nil {
		return fmt.Errorf("nothing of model %s is computed here", p.Model)
	}
	who := shower{by, p.Entry}
	known := g.standings[who]
	one := g.passes[p.Request]
	switch {
	case known.doubted(now):
		return errDoubted
	case one == nil:
		one = l.grant(p, now)
	case p.Entry != one.pass.Entry || p.Model != one.pass.Model:
		return errors.New("the request has another pass")
	case one.presenter(by) != nil:
		return nil
	case len(one.by) >= mostPresenters:
		return fmt.Errorf("%d others showed this pass", mostPresenters)
	}
	if known != nil && known.open > mostOpen-one.worth {
		return errors.New("the passes whose outcome is not known allow too much: wait for some to end")
	}
	if g.passes[p.Request] == nil {
		g.makeRoomLocked(len(l.model.parts))
		g.passes[p.Request] = one
	}
	as := &presenter{st: g.standingLocked(who, now), node: by}
	one.by = append(one.by, as)
	if !one.concluded {
		as.st.open += one.worth
	}
	a := l.open(peerID, now)
	if by == p.Entry {
		a.st = as.st
	}
	a.add(held{one, as})
	return nil
}

// grant is all that a pass allows.
func (l *lending) grant(p settle.Pass, now time.Time) *grant {
	one := &grant{pass: p, at: now}
	for i, part := range l.model.parts {
		units := p.Tokens * part.PerToken * passPPM / settle.PPM // below 2⁵⁶: 2²⁵ tokens, 2¹⁰ of each
		one.left, one.worth = append(one.left, units), one.worth+int64(units*l.worth[i])
	}
	return one
}

// presenter is a node as one that showed the pass; nil: it did not.
func (p *grant) presenter(n settle.Node) *presenter {
	for _, by := range p.by {
		if by.node == n {
			return by
		}
	}
	return nil
}

// spent is what was computed by a pass, for all.
func (p *grant) spent() (sum int64) {
	for _, by := range p.by {
		sum += by.spent
	}
	return sum
}

// makeRoomLocked forgets the oldest pass where there are as many as may be, one whose outcome is
// known if there is.
func (g *Grants) makeRoomLocked(parts int) {
	if len(g.passes) < max(1, min(mostPasses, mostCells/parts)) {
		return
	}
	var oldest *grant
	for _, p := range g.passes {
		if oldest == nil || p.concluded && !oldest.concluded || p.concluded == oldest.concluded && p.at.Before(oldest.at) {
			oldest = p
		}
	}
	g.forgetLocked(oldest)
}

// forgetLocked ends the use of a pass. One whose outcome is not known says nothing of who showed it.
func (g *Grants) forgetLocked(p *grant) {
	delete(g.passes, p.pass.Request)
	for _, by := range p.by {
		if !p.concluded {
			by.st.open -= p.worth
			by.st.balance -= by.spent
		}
	}
	for _, a := range g.models[p.pass.Model].peers {
		if i := slices.IndexFunc(a.grants, func(h held) bool { return h.grant == p }); i >= 0 {
			a.remove(i)
		}
	}
}
