package meter

import (
	"context"
	"crypto/ed25519"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"
	"unicode/utf8"

	"kvasird/p2p"
	"kvasird/settle"
)

const (
	answerTime   = 10 * time.Second // for a question to come and its answer to go
	mostRequests = 1024             // of which is known who was signed what
	mostAskers   = 8                // about one request
)

// Conn is a stream to a peer.
type Conn interface {
	io.ReadWriteCloser
	SetDeadline(t time.Time) error
}

// Keep keeps what was signed of a request, for longer than requests can be settled. It is
// safe for concurrent use. kv.Space is one.
type Keep interface {
	Get(ctx context.Context, key string) (value []byte, ok bool, err error)
	Put(ctx context.Context, key string, value []byte) error
}

// SignerConfig configures a Signer. Only Logger and Now have defaults.
type SignerConfig struct {
	Network settle.Hash
	Self    string             // peer id of this node
	Key     ed25519.PrivateKey // of this node
	Keep    Keep
	Logger  *slog.Logger     // nil: none
	Now     func() time.Time // nil: the clock
}

// Signer signs what this node computed for others.
type Signer struct {
	cfg  SignerConfig
	self settle.Node

	mu     sync.Mutex // guards counts
	counts map[string]*Counts

	signing sync.Mutex // held while a statement is made; guards what follows
	signed  map[settle.QuoteID]*signed
	order   []settle.QuoteID // of signed, oldest first
}

// signed is what this node said of a request.
type signed struct {
	report settle.Report
	record []byte
	by     map[string]map[uint32]uint64 // units by who asked, and part
}

// NewSigner returns a signer that has counted nothing. Error: the key is not that of Self.
func NewSigner(cfg SignerConfig) (*Signer, error) {
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	if cfg.Keep == nil {
		return nil, errors.New("meter: a signer needs a place to keep what it signed")
	}
	s := &Signer{cfg: cfg, counts: map[string]*Counts{}, signed: map[settle.QuoteID]*signed{}}
	var err error
	s.self, err = ownNode(cfg.Self, cfg.Key)
	return s, err
}

// ownNode is the node of a peer id, whose key is key.
func ownNode(self string, key ed25519.PrivateKey) (settle.Node, error) {
	n, err := NodeOf(self)
	if err == nil && (len(key) != ed25519.PrivateKeySize || string(key[ed25519.SeedSize:]) != string(n[:])) {
		err = fmt.Errorf("meter: the key is not that of peer %s", self)
	}
	return n, err
}

// Counts is where work of a model is counted, from now on under that model's id.
func (s *Signer) Counts(m *Model) *Counts {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := s.counts[m.ID]
	if c == nil {
		c = newCounts(m, s.cfg.Self, s.cfg.Now)
		s.counts[m.ID] = c
	}
	return c
}

// serve answers the question of a peer; m those about divisions and passes, and may be nil.
func (s *Signer) serve(peerID string, c Conn, m *Meter) error {
	c.SetDeadline(time.Now().Add(answerTime))
	f, err := p2p.NewFrameReader(c, maxAsk).Next()
	if err != nil {
		return fmt.Errorf("ask: %w", err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), answerTime)
	defer cancel()
	answer, say, most, err := s.answer(ctx, peerID, f, m)
	if err != nil {
		return s.refuse(c, err)
	}
	return p2p.NewFrameWriter(c, most).Write(p2p.Frame{Type: say, Payload: answer})
}

// answer is what a frame is answered with, as a frame of a type with at most so many bytes.
func (s *Signer) answer(ctx context.Context, peerID string, f p2p.Frame, m *Meter) (answer []byte, say uint8, most int, err error) {
	if f.Type != frameAsk && (m == nil || f.Type != frameDivide && f.Type != frameShow) || f.ID != 0 || f.Flags != 0 {
		return nil, 0, 0, fmt.Errorf("frame of type %d, flags %d, id %d: want an ask", f.Type, f.Flags, f.ID)
	}
	if f.Type == frameShow {
		shown, err := decodeShow(f.Payload)
		if err == nil {
			err = m.take(peerID, shown)
		}
		return nil, frameShown, 0, err
	}
	q, err := decodeAsk(f.Payload)
	if err != nil {
		return nil, 0, 0, err
	}
	if f.Type == frameDivide {
		answer, err = m.divide(ctx, peerID, q)
		return answer, frameDivision, maxDivision, err
	}
	answer, err = s.statement(ctx, peerID, q)
	return answer, frameStatement, maxStatement, err
}

// refuse says why there is no statement, and returns it.
func (s *Signer) refuse(c Conn, why error) error {
	text := why.Error()
	text = text[:min(len(text), maxText)]
	for !utf8.ValidString(text) {
		text = text[:len(text)-1]
	}
	return errors.Join(why, p2p.NewFrameWriter(c, maxText).Write(p2p.Frame{Type: frameRefused, Payload: []byte(text)}))
}

// countsOf is what was computed of the model of a question.
func (s *Signer) countsOf(q question) (*Counts, error) {
	if q.Network != s.cfg.Network {
		return nil, errors.New("this node is of another network")
	}
	s.mu.Lock()
	counts := s.counts[q.Model]
	s.mu.Unlock()
	if counts == nil {
		return nil, fmt.Errorf("nothing of model %s is computed here", q.Model)
	}
	if last := q.Lines[len(q.Lines)-1].Part; int(last) >= len(counts.accounts.model.parts) {
		return nil, fmt.Errorf("model %s has %d parts, none is number %d", q.Model, len(counts.accounts.model.parts), last)
	}
	return counts, nil
}

// statement signs what is there of a question.
func (s *Signer) statement(ctx context.Context, peerID string, q question) ([]byte, error) {
	counts, err := s.countsOf(q)
	if err != nil {
		return nil, err
	}
	s.signing.Lock()
	defer s.signing.Unlock()
	old, err := s.recall(ctx, peerID, q.Request)
	if err != nil {
		return nil, err
	}
	had := old.by[peerID]
	got := counts.take(peerID, lessThan(q.Lines, had))
	switch {
	case len(got) == 0 && had != nil:
		return old.record, nil
	case len(got) == 0:
		return nil, errors.New("nothing was computed here for this peer that is not signed already")
	}
	record, err := s.signMore(ctx, q.Request, old, peerID, got)
	if err != nil {
		counts.giveBack(peerID, got)
	}
	return record, err
}

// own signs what this node did of a peer's request, which nobody else counts.
func (s *Signer) own(ctx context.Context, peerID string, id settle.QuoteID, lines []settle.Line) ([]byte, error) {
	s.signing.Lock()
	defer s.signing.Unlock()
	old, err := s.recall(ctx, peerID, id)
	if err != nil {
		return nil, err
	}
	return s.signMore(ctx, id, old, peerID, lines)
}

// signMore signs more than before of a request, and keeps that.
func (s *Signer) signMore(ctx context.Context, id settle.QuoteID, old *signed, peerID string, more []settle.Line) ([]byte, error) {
	if old.by[peerID] == nil && len(old.by) >= mostAskers {
		return nil, fmt.Errorf("%d others asked about this request", mostAskers)
	}
	next, err := s.sign(id, old, peerID, more)
	if err == nil {
		err = s.cfg.Keep.Put(ctx, id.String(), next.record)
	}
	if err != nil {
		return nil, err
	}
	s.remember(id, next)
	return next.record, nil
}

// lessThan is the lines less what was signed of them.
func lessThan(lines []settle.Line, had map[uint32]uint64) []settle.Line {
	var out []settle.Line
	for _, l := range lines {
		if n := had[l.Part]; n < l.Units {
			out = append(out, settle.Line{Part: l.Part, Units: l.Units - n})
		}
	}
	return out
}

// recall is what was signed of a request. What an earlier run of the program signed counts as
// signed for who asks now.
func (s *Signer) recall(ctx context.Context, peerID string, id settle.QuoteID) (*signed, error) {
	if old := s.signed[id]; old != nil {
		return old, nil
	}
	old := &signed{by: map[string]map[uint32]uint64{}}
	record, ok, err := s.cfg.Keep.Get(ctx, id.String())
	if err != nil || !ok {
		return old, err
	}
	r, err := settle.ParseReport(record)
	if err == nil && (r.Role != settle.Statement || r.Request != id || r.Signer != s.self || r.Network != s.cfg.Network) {
		err = fmt.Errorf("it is another report")
	}
	if err != nil {
		return nil, fmt.Errorf("what was signed of request %s cannot be read, so no more is: %w", id, err)
	}
	old.report, old.record = r, record
	old.by[peerID] = unitsOf(r.Work[0].Lines)
	return old, nil
}

func unitsOf(lines []settle.Line) map[uint32]uint64 {
	units := map[uint32]uint64{}
	for _, l := range lines {
		units[l.Part] += l.Units
	}
	return units
}

// sign makes the statement that covers the one before and has more units.
func (s *Signer) sign(id settle.QuoteID, old *signed, peerID string, more []settle.Line) (*signed, error) {
	units := map[uint32]uint64{}
	if old.record != nil {
		units = unitsOf(old.report.Work[0].Lines)
	}
	by := maps.Clone(old.by)
	by[peerID] = maps.Clone(by[peerID])
	if by[peerID] == nil {
		by[peerID] = map[uint32]uint64{}
	}
	for _, l := range more {
		units[l.Part] += l.Units
		by[peerID][l.Part] += l.Units
	}
	if old.report.Seq >= settle.MaxReports {
		return nil, fmt.Errorf("%w: %d", settle.ErrReports, settle.MaxReports)
	}
	r := settle.Report{
		Role: settle.Statement, Network: s.cfg.Network, Request: id, Signer: s.self, Seq: old.report.Seq + 1,
		Work: []settle.Work{{Worker: s.self, Lines: linesOf(units)}},
	}
	record, err := r.Sign(s.cfg.Key)
	return &signed{r, record, by}, err
}

func linesOf(units map[uint32]uint64) []settle.Line {
	var lines []settle.Line
	for _, part := range slices.Sorted(maps.Keys(units)) {
		lines = append(lines, settle.Line{Part: part, Units: units[part]})
	}
	return lines
}

// remember keeps what was signed at hand.
func (s *Signer) remember(id settle.QuoteID, r *signed) {
	if s.signed[id] == nil {
		if len(s.order) >= mostRequests {
			delete(s.signed, s.order[0])
			s.order = s.order[1:]
		}
		s.order = append(s.order, id)
	}
	s.signed[id] = r
}
