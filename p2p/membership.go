package p2p

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"sync"
	"time"

	"github.com/libp2p/go-libp2p/core/peer"
)

// A revocation list comes to a node by hand, through Host.Revoke, and from there to all:
// whoever takes a newer list drops the peers that it puts out and repeats its hello, which
// has the list's version in it, to the others. Whoever hears of a newer one than its own
// asks for it: it opens a stream of revokeProtocol, on which the other side says nothing
// but one frame of type frameRevocations with the list.
const (
	revokeProtocol   = "revoke/1"
	frameRevocations = 1

	// reconcileEvery is how often peers that have another version are told or asked again:
	// a hello may have been lost.
	reconcileEvery = 5 * time.Second
)

// membership is who may come into the network.
type membership struct {
	genesis *Genesis
	path    string // of the list's file, "": kept nowhere
	now     func() time.Time

	taking sync.Mutex // held while a list is checked, stored and taken

	mu      sync.Mutex // guards what follows
	revoked *Revocations
	pulling map[peer.ID]struct{} // who is being asked for a list
	refused map[string]uint64    // hellos, by RefusedError.Field
}

func newMembership(cfg *Config) *membership {
	m := &membership{
		genesis: cfg.Genesis, path: cfg.Revocations, now: time.Now,
		pulling: make(map[peer.ID]struct{}), refused: make(map[string]uint64),
	}
	if cfg.now != nil {
		m.now = cfg.now
	}
	return m
}

// validateMembership makes the network's id and what the hello shows of the ticket.
func (c *Config) validateMembership() error {
	if c.Genesis == nil {
		if c.Ticket != "" {
			return errors.New("p2p: a ticket is for a network that has a network file: give that too")
		}
		return nil
	}
	id := c.Genesis.ID()
	if c.Network != "" && c.Network != id {
		return fmt.Errorf("p2p: network %q is not that of the network file, %s", c.Network, id)
	}
	c.Network = id
	shown, err := presentTicket(c.Ticket, c.Identity)
	if err != nil {
		return fmt.Errorf("p2p: %w", err)
	}
	c.ticket = shown
	return nil
}

func (m *membership) list() *Revocations {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.revoked
}

func (m *membership) admit(id peer.ID, ticket []byte) (admission, verdict) {
	return m.genesis.admit(id, ticket, m.list(), m.now())
}

// stands reports whether a peer that was admitted may stay.
func (m *membership) stands(p *Peer) bool {
	if m.genesis == nil || p.ID == m.genesis.Authority {
		return true
	}
	revoked := m.list()
	if revoked.hasPeer(p.ID) {
		return false
	}
	a := p.admission
	return a.expires.IsZero() || m.now().Before(a.expires) && !revoked.hasSerial(a.serial)
}

func (m *membership) countRefusal(field string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.refused[field]++
}

// load reads the list that was stored. Without a file there is none; one that is not the
// authority's is an error, since to go on without it would let in who was put out.
func (m *membership) load() error {
	if m.path == "" || m.genesis == nil || m.genesis.Authority == "" {
		return nil
	}
	list, err := m.genesis.ReadRevocations(m.path)
	if err != nil {
		return fmt.Errorf("p2p: %w: remove the file if it is damaged; peers have the list too", err)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.revoked = list
	return nil
}

// take stores a list and makes it the one that counts. It reports whether it was newer; a
// list that is older, or another one of the same version, is an error.
func (m *membership) take(raw []byte) (newer bool, err error) {
	list, err := m.genesis.OpenRevocations(raw)
	if err != nil {
		return false, err
	}
	m.taking.Lock()
	defer m.taking.Unlock()
	have := m.list()
	switch {
	case list.Version < have.version():
		return false, fmt.Errorf("revocation list of version %d: this node has version %d already", list.Version, have.version())
	case list.Version == have.version() && !bytes.Equal(list.raw, have.raw):
		return false, fmt.Errorf("there are two revocation lists of version %d: make the next one from the other", list.Version)
	case list.Version == have.version():
		return false, nil
	}
	if m.path != "" {
		if err := list.WriteFile(m.path); err != nil {
			return false, err
		}
	}
	m.mu.Lock()
	m.revoked = list
	m.mu.Unlock()
	return true, nil
}

// Revoke takes a revocation list, as Revocations.Bytes gives it, if it is the authority's
// and newer than the one this node has: peers that it puts out are dropped, and the others
// get it from this node.
func (h *Host) Revoke(list []byte) error {
	newer, err := h.members.take(list)
	if err != nil || !newer {
		return err
	}
	h.cfg.Logger.Info("revocation list taken", "version", h.members.list().version())
	h.dropOutcasts()
	for _, p := range h.peers.list() {
		h.rehello(p.ID)
	}
	return nil
}

// Revocations is the list that this node goes by, or nil.
func (h *Host) Revocations() *Revocations { return h.members.list() }

// Rights are those that this node grants a peer now: none unless it is ready.
func (h *Host) Rights(id peer.ID) Rights {
	if p := h.peers.get(id); p != nil {
		return p.Rights()
	}
	return 0
}

// Refusals counts the hellos that this node refused, by RefusedError.Field.
func (h *Host) Refusals() map[string]uint64 {
	h.members.mu.Lock()
	defer h.members.mu.Unlock()
	return maps.Clone(h.members.refused)
}

// dropOutcasts ends the stay of peers whose ticket has expired or was revoked.
func (h *Host) dropOutcasts() {
	for _, p := range h.peers.list() {
		if !h.members.stands(p) {
			h.cfg.Logger.Info("peer dropped: its invitation is revoked or has expired", "peer", p.ID)
			h.disconnect(p.ID)
		}
	}
}

// watchMembers drops peers when their time is over, and sees to it that neighbours have
// one revocation list.
func (h *Host) watchMembers(ctx context.Context) {
	tick := time.NewTicker(sweepEvery)
	defer tick.Stop()
	reconciled := time.Now()
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		h.dropOutcasts()
		if time.Since(reconciled) < reconcileEvery {
			continue
		}
		reconciled = time.Now()
		have := h.members.list().version()
		for _, p := range h.peers.list() {
			if p.Revocations < have {
				h.rehello(p.ID)
			}
			h.pullFrom(p)
		}
	}
}

// pullFrom asks a peer, in the background, for its revocation list if that is newer.
func (h *Host) pullFrom(p *Peer) {
	m := h.members
	if m.genesis == nil || m.genesis.Authority == "" || p.Revocations <= m.list().version() {
		return
	}
	m.mu.Lock()
	_, asked := m.pulling[p.ID]
	m.pulling[p.ID] = struct{}{}
	m.mu.Unlock()
	if asked {
		return
	}
	leave, err := h.enter()
	if err != nil {
		return
	}
	go func() {
		defer leave()
		err := h.pull(p)
		if err != nil {
			h.cfg.Logger.Warn("no revocation list from a peer that says it has one", "peer", p.ID, "err", err)
		}
		m.mu.Lock()
		defer m.mu.Unlock()
		delete(m.pulling, p.ID)
	}()
}

func (h *Host) pull(p *Peer) error {
	ctx, cancel := context.WithTimeout(context.Background(), h.cfg.HelloTimeout)
	defer cancel()
	c, err := h.OpenStream(ctx, p.ID, revokeProtocol)
	if err != nil {
		return err
	}
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(h.cfg.HelloTimeout)); err != nil {
		return err
	}
	raw, err := nextOfType(NewFrameReader(c, MaxRevocations), frameRevocations)
	if errors.Is(err, io.EOF) {
		h.Blame(p.ID, Invalid, "it has no revocation list and says it has")
	}
	if err != nil {
		return err
	}
	list, err := h.members.genesis.OpenRevocations(raw)
	if err != nil {
		h.Blame(p.ID, Forged, err.Error())
		return err
	}
	if list.Version < p.Revocations {
		err := fmt.Errorf("revocation list of version %d, and it says it has %d", list.Version, p.Revocations)
		h.Blame(p.ID, Invalid, err.Error())
		return err
	}
	return h.Revoke(raw)
}

// serveRevocations gives a peer the list that this node has.
func (h *Host) serveRevocations(_ *Peer, c Conn) {
	list := h.members.list()
	if list == nil || c.SetDeadline(time.Now().Add(h.cfg.HelloTimeout)) != nil {
		return
	}
	if err := NewFrameWriter(c, MaxRevocations).Write(Frame{Type: frameRevocations, Payload: list.raw}); err != nil {
		h.cfg.Logger.Debug("revocation list not delivered", "peer", c.Remote(), "err", err)
	}
}
