package market

import (
	"cmp"
	"slices"
	"sync"
	"time"

	"kvasird/ggml/gguf"
)

// Record is an announcement as it came in: Body, verified to be signed by From. It is what a
// signed envelope of the topic Topic carries.
type Record struct {
	From     string // identity of the author, and the only node that the body speaks of
	Seq      uint64 // grows with every record of the author, over restarts too
	Issued   time.Time
	Validity time.Duration
	Body     []byte
}

// MaxAuthors bounds a table, and MaxBodies the bytes of all bodies in it; decoded they take
// about four times as much.
const (
	MaxAuthors = 16384
	MaxBodies  = 64 << 20
)

// maxTallies bounds the models that are counted at once; others are counted again when asked for.
const maxTallies = 64

// Table keeps the latest record of every author and counts replicas. It is safe for concurrent
// use. Times given to it must not run backwards by more than a record's validity.
type Table struct {
	policy Policy // constant

	mu      sync.Mutex // guards all below
	authors map[string]*author
	tallies map[gguf.ModelID]*tally
	known   map[gguf.ModelID]Shape // from verified headers
	next    time.Time              // the first instant at which some author's next is due
	version uint64                 // grows with every change of what is counted
	peers   int                    // authors that are present and not away
	arrived uint64                 // records of authors that were not there before
	bodies  int                    // bytes
}

// author is what is known of one node. It stays until no record of it that was ever seen could
// still be valid, so that none can be replayed after a later and shorter one.
type author struct {
	id       string
	hash     uint64
	seq      uint64
	issued   time.Time
	expires  time.Time
	forget   time.Time
	arrival  uint64 // order in which authors came
	body     int    // bytes of the record's
	lost     bool
	lostAt   time.Time
	news     *Announcement
	present  bool      // what it says counts
	counted  time.Time // instant as of which it counts
	next     time.Time // instant at which what is counted of it changes
	stalled  time.Time // since when it claims and nothing new of it serves; zero: it does not
	progress int       // cells that serve, and layers of windows
}

// NewTable returns an empty table.
func NewTable(p Policy) (*Table, error) {
	if err := p.validate(); err != nil {
		return nil, err
	}
	return &Table{policy: p, authors: map[string]*author{}, tallies: map[gguf.ModelID]*tally{},
		known: map[gguf.ModelID]Shape{}}, nil
}

// SetShape tells the shape of a model from its verified header. From then on announcements that
// contradict it are refused, and what was announced before does not count.
func (t *Table) SetShape(id gguf.ModelID, s Shape) error {
	if err := s.Check(); err != nil {
		return refuse(BadShape, "%v", err)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.known[id] = s
	delete(t.tallies, id)
	t.version++
	return nil
}

// Check says why a record is to be refused, as a *RefusedError, or nil.
func (t *Table) Check(r Record) error {
	a, err := Decode(r.Body)
	if err != nil {
		return err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.checkLocked(r, a)
}

func (t *Table) checkLocked(r Record, a *Announcement) error {
	if r.From == "" {
		return refuse(NoAuthor, "a record without author")
	}
	if slices.ContainsFunc(a.Near, func(n Neighbour) bool { return n.Peer == r.From }) {
		return refuse(BadNear, "%s is its own neighbour", r.From)
	}
	for i := range a.Models {
		m := &a.Models[i]
		if s, ok := t.known[m.ID]; ok && !s.Equal(m.Shape) {
			return refuse(WrongShape, "model %v has %v, announced as %v", m.ID, s, m.Shape)
		}
	}
	return nil
}

// Update takes a record in. It reports whether it was newer than what was known of its author;
// an older one, or one received twice, is no error and changes nothing.
func (t *Table) Update(r Record, now time.Time) (newer bool, err error) {
	a, err := Decode(r.Body)
	if err != nil {
		return false, err
	}
	return t.update(r, a, now)
}

// update is Update of a body that is decoded already.
func (t *Table) update(r Record, a *Announcement, now time.Time) (newer bool, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if err := t.checkLocked(r, a); err != nil {
		return false, err
	}
	expires := r.Issued.Add(r.Validity)
	if !now.Before(expires) {
		return false, refuse(Expired, "a record of %s valid until %v", r.From, expires)
	}
	x := t.authors[r.From]
	if x != nil && r.Seq <= x.seq {
		return false, nil
	}
	if x, err = t.roomLocked(x, r, now); err != nil {
		return false, err
	}
	if expires.After(x.forget) {
		x.forget = expires
	}
	if x.present && x.next.Equal(x.expires) && a.same(x.news) {
		x.seq, x.issued, x.expires, x.next, x.news = r.Seq, r.Issued, expires, expires, a
		t.dueLocked(expires)
		return true, nil
	}
	t.uncountLocked(x)
	x.seq, x.issued, x.expires, x.lost, x.news = r.Seq, r.Issued, expires, false, a
	x.noteProgress(now)
	t.dropDisputedLocked(a)
	t.countLocked(x, now)
	return true, nil
}

// same reports whether both count alike, whatever else they say. Claims never do: their leases
// were extended.
func (a *Announcement) same(b *Announcement) bool {
	return a.Away == b.Away && slices.EqualFunc(a.Models, b.Models, func(x, y ModelNews) bool {
		return x.ID == y.ID && x.Full == y.Full && x.Backbone == y.Backbone && x.Shape.Equal(y.Shape) &&
			slices.EqualFunc(x.Windows, y.Windows, func(v, w WindowHolding) bool {
				return v.Layers == w.Layers && v.State == w.State && v.Lease == 0 && w.Lease == 0
			}) && x.Room == y.Room &&
			slices.EqualFunc(x.Holdings, y.Holdings, func(h, o Holding) bool { return h == o && h.Lease == 0 }) &&
			slices.EqualFunc(x.Demand, y.Demand, func(d, e LayerDemand) bool {
				return d.Layer == e.Layer && d.Pairs == e.Pairs && slices.Equal(d.Hot, e.Hot)
			})
	})
}

// noteProgress starts or ends the time for which the author only claims.
func (x *author) noteProgress(now time.Time) {
	claims, serving := false, 0
	for i := range x.news.Models {
		for _, h := range x.news.Models[i].Holdings {
			if h.State == Claimed || h.State == Loading {
				claims = true
			} else {
				serving += h.Slice.Layers.Len() * h.Slice.Experts.Len()
			}
		}
		for _, w := range x.news.Models[i].Windows {
			if w.wanted() {
				claims = true
			} else {
				serving += w.Layers.Len()
			}
		}
	}
	if !claims {
		x.stalled = time.Time{}
	} else if x.stalled.IsZero() || serving > x.progress {
		x.stalled = now
	}
	x.progress = serving
}

// Version returns a number that grows whenever what is counted changes.
func (t *Table) Version(now time.Time) uint64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.sweepLocked(now)
	return t.version
}

// sweepLocked brings what leases and validities took from authors up to date.
func (t *Table) sweepLocked(now time.Time) {
	if now.Before(t.next) {
		return
	}
	t.next = now.Add(time.Hour)
	for id, x := range t.authors {
		if !now.Before(x.forget) {
			t.uncountLocked(x)
			t.bodies -= x.body
			delete(t.authors, id)
			continue
		}
		if x.present && !now.Before(x.next) {
			t.uncountLocked(x)
			t.countLocked(x, now)
		}
		t.dueLocked(x.forget)
		if x.present {
			t.dueLocked(x.next)
		}
	}
}

func (t *Table) dueLocked(at time.Time) {
	if at.Before(t.next) {
		t.next = at
	}
}

// countLocked adds what the author says to the tallies, as of now.
func (t *Table) countLocked(x *author, now time.Time) {
	if x.lost || !now.Before(x.expires) {
		return
	}
	x.present, x.counted, x.next = true, now, x.expires
	t.noteLocked(x, 1)
	for i := range x.news.Models {
		m := &x.news.Models[i]
		for _, h := range m.Holdings {
			x.dueBefore(x.leaseEnd(h.State, h.Lease), now)
		}
		for _, w := range m.Windows {
			x.dueBefore(x.leaseEnd(w.State, w.Lease), now)
		}
		if y := t.tallies[m.ID]; y != nil {
			y.add(x, m, 1)
		}
	}
	t.dueLocked(x.next)
	t.dueLocked(x.forget)
}

// uncountLocked takes out what countLocked added.
func (t *Table) uncountLocked(x *author) {
	if !x.present {
		return
	}
	for i := range x.news.Models {
		m := &x.news.Models[i]
		if y := t.tallies[m.ID]; y != nil {
			if y.add(x, m, -1); y.authors == 0 {
				delete(t.tallies, m.ID)
			}
		}
	}
	x.present = false
	t.noteLocked(x, -1)
}

// noteLocked notes that an author came, sign 1, or went.
func (t *Table) noteLocked(x *author, sign int) {
	t.version++
	if !x.news.Away {
		t.peers += sign
	}
}

// dueBefore notes an instant at which what is counted changes.
func (x *author) dueBefore(end, now time.Time) {
	if now.Before(end) && end.Before(x.next) {
		x.next = end
	}
}

// leaseEnd is the instant from which a holding does not count, if its record is still valid then.
func (x *author) leaseEnd(s State, lease time.Duration) time.Time {
	if s != Claimed && s != Loading {
		return x.expires
	}
	end := x.issued.Add(lease)
	if limit := x.stalled.Add(patience); limit.Before(end) {
		return limit
	}
	return end
}

// stateOf returns the state in which a holding is counted, 0 if it is not.
func (x *author) stateOf(s State, lease time.Duration) State {
	if !x.counted.Before(x.leaseEnd(s, lease)) {
		return 0
	}
	return s
}

// Holder is what one author says about a model.
type Holder struct {
	Peer string
	News *ModelNews // not to be changed
}

// Holders lists who says something about a model, by peer. Authors that say the model has
// another shape are left out.
func (t *Table) Holders(id gguf.ModelID, now time.Time) []Holder {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.sweepLocked(now)
	shape, _, ok := t.shapeLocked(id)
	var list []Holder
	if !ok {
		return nil
	}
	for _, x := range t.authors {
		if m := x.model(id); m != nil && m.Shape.Equal(shape) {
			list = append(list, Holder{x.id, m})
		}
	}
	slices.SortFunc(list, func(a, b Holder) int { return cmp.Compare(a.Peer, b.Peer) })
	return list
}

// Author is a node and the latest that it says of itself.
type Author struct {
	Peer string
	News *Announcement // not to be changed
}

// Authors lists those with a valid record that are neither lost nor away, by peer.
func (t *Table) Authors(now time.Time) []Author {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.sweepLocked(now)
	var list []Author
	for _, x := range t.authors {
		if x.present && !x.news.Away {
			list = append(list, Author{x.id, x.news})
		}
	}
	slices.SortFunc(list, func(a, b Author) int { return cmp.Compare(a.Peer, b.Peer) })
	return list
}

// Models lists the ids that present authors announce, ascending.
func (t *Table) Models(now time.Time) []gguf.ModelID {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.sweepLocked(now)
	return t.modelsLocked()
}

func (t *Table) modelsLocked() []gguf.ModelID {
	seen := map[gguf.ModelID]bool{}
	var list []gguf.ModelID
	for _, x := range t.authors {
		if !x.present {
			continue
		}
		for i := range x.news.Models {
			if id := x.news.Models[i].ID; !seen[id] {
				seen[id] = true
				list = append(list, id)
			}
		}
	}
	slices.SortFunc(list, compareIDs)
	return list
}

func compareIDs(a, b gguf.ModelID) int { return slices.Compare(a[:], b[:]) }

// model returns what a present author says of a model, or nil.
func (x *author) model(id gguf.ModelID) *ModelNews {
	if !x.present {
		return nil
	}
	for i := range x.news.Models {
		if m := &x.news.Models[i]; m.ID == id {
			return m
		}
	}
	return nil
}

// shapeLocked returns the shape of a model: the verified one, else the one that most present
// authors announce, of equals that of the author that came first.
func (t *Table) shapeLocked(id gguf.ModelID) (s Shape, trusted, ok bool) {
	if s, ok := t.known[id]; ok {
		return s, true, true
	}
	type vote struct {
		shape Shape
		n     int
		first uint64
	}
	var votes []vote
	for _, x := range t.authors {
		m := x.model(id)
		if m == nil {
			continue
		}
		i := slices.IndexFunc(votes, func(v vote) bool { return v.shape.Equal(m.Shape) })
		if i < 0 {
			i = len(votes)
			votes = append(votes, vote{m.Shape, 0, x.arrival})
		}
		votes[i].n++
		votes[i].first = min(votes[i].first, x.arrival)
	}
	if len(votes) == 0 {
		return Shape{}, false, false
	}
	best := slices.MinFunc(votes, func(a, b vote) int {
		return cmp.Or(cmp.Compare(b.n, a.n), cmp.Compare(a.first, b.first))
	})
	return best.shape, false, true
}

// dropDisputedLocked has models counted anew whose unverified shape the announcement disputes.
func (t *Table) dropDisputedLocked(a *Announcement) {
	for i := range a.Models {
		m := &a.Models[i]
		if y := t.tallies[m.ID]; y != nil && !y.trusted && !y.shape.Equal(m.Shape) {
			delete(t.tallies, m.ID)
		}
	}
}

// Verified lists the models whose shape was set, ascending.
func (t *Table) Verified() []gguf.ModelID {
	t.mu.Lock()
	defer t.mu.Unlock()
	list := make([]gguf.ModelID, 0, len(t.known))
	for id := range t.known {
		list = append(list, id)
	}
	slices.SortFunc(list, compareIDs)
	return list
}

// Shape returns the shape of a model that was set.
func (t *Table) Shape(id gguf.ModelID) (Shape, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	s, ok := t.known[id]
	return s, ok
}
