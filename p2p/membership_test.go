package p2p

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/libp2p/go-libp2p/core/peer"
)

// club is a network with an authority, for tests.
type club struct {
	*Genesis
	authority Identity
}

func newClub(t testing.TB, admission Admission) club {
	t.Helper()
	authority, err := NewIdentity()
	if err != nil {
		t.Fatal(err)
	}
	g, err := NewGenesis("club", admission, authority.ID(), time.Now())
	if err != nil {
		t.Fatal(err)
	}
	return club{g, authority}
}

// invite issues a ticket for a peer, "" for whoever has it, that is good for a day.
func (c club) invite(t testing.TB, subject peer.ID, rights Rights) string {
	t.Helper()
	text, err := c.IssueTicket(c.authority, Ticket{
		Rights: rights, Subject: subject, NotBefore: time.Now(), Expires: time.Now().Add(24 * time.Hour),
	})
	if err != nil {
		t.Fatal(err)
	}
	return text
}

// revoke is the next list, with one more ticket in it.
func (c club) revoke(t testing.TB, last *Revocations, ticket string) *Revocations {
	t.Helper()
	tk, err := ParseTicket(ticket)
	if err != nil {
		t.Fatal(err)
	}
	list, err := c.Revoke(c.authority, last, []Serial{tk.Serial}, nil)
	if err != nil {
		t.Fatal(err)
	}
	return list
}

// start starts a member, whose ticket is made from its peer id.
func (c club) start(t testing.TB, ticket func(peer.ID) string, change func(*Config)) *Host {
	t.Helper()
	return startHost(t, func(cfg *Config) {
		cfg.Network, cfg.Genesis = "", c.Genesis
		if ticket != nil {
			cfg.Ticket = ticket(cfg.Identity.ID())
		}
		if change != nil {
			change(cfg)
		}
	})
}

// boss starts a node that is the authority.
func (c club) boss(t testing.TB, change func(*Config)) *Host {
	return c.start(t, nil, func(cfg *Config) {
		cfg.Identity = c.authority
		if change != nil {
			change(cfg)
		}
	})
}

// bound gives a ticket with all rights for the peer.
func (c club) bound(t testing.TB) func(peer.ID) string {
	return func(id peer.ID) string { return c.invite(t, id, Join|Infer) }
}

func (c club) bearer(t testing.TB) func(peer.ID) string {
	return func(peer.ID) string { return c.invite(t, "", Join) }
}

func TestRightsByAdmission(t *testing.T) {
	invitation, closed, open := newClub(t, Invitation), newClub(t, Closed), newClub(t, Open)
	member, err := NewIdentity()
	if err != nil {
		t.Fatal(err)
	}
	closed.Contact.Members = []peer.ID{member.ID()}
	tests := []struct {
		name   string
		club   club
		start  func(c club) *Host
		rights Rights
	}{
		{"open", open, func(c club) *Host { return c.start(t, nil, nil) }, Join | Infer},
		{"whoever has it", invitation, func(c club) *Host { return c.start(t, c.bearer(t), nil) }, Join},
		{"for the peer", invitation, func(c club) *Host { return c.start(t, c.bound(t), nil) }, Join | Infer},
		{"member", closed, func(c club) *Host { return c.start(t, nil, func(cfg *Config) { cfg.Identity = member }) }, Join | Infer},
		{"for the peer in a closed network", closed, func(c club) *Host { return c.start(t, c.bound(t), nil) }, Join | Infer},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			boss, guest := tt.club.boss(t, nil), tt.start(tt.club)
			p := hello(t, guest, boss)
			if p.Rights() != Join|Infer || guest.Rights(boss.ID()) != Join|Infer {
				t.Errorf("the authority has %v", p.Rights())
			}
			eventually(t, "the guest is ready", func() bool { return boss.Peer(guest.ID()) != nil })
			if got := boss.Rights(guest.ID()); got != tt.rights {
				t.Errorf("the guest has %v, want %v", got, tt.rights)
			}
			c, err := guest.OpenStream(t.Context(), boss.ID(), "echo/1")
			if err != nil {
				t.Fatal(err)
			}
			if err := echo(c, 100); err != nil {
				t.Error(err)
			}
			if got := boss.Rights(seedIdentity(t, 7).ID()); got != 0 {
				t.Errorf("a peer that is not here has %v", got)
			}
		})
	}
}

// Who is not invited reads why, on both sides, and it is counted.
func TestUninvited(t *testing.T) {
	invitation, closed, other := newClub(t, Invitation), newClub(t, Closed), newClub(t, Invitation)
	expired := func(id peer.ID) string {
		text, err := invitation.IssueTicket(invitation.authority, Ticket{
			Rights: Join, Subject: id, NotBefore: time.Unix(1e9, 0), Expires: time.Unix(1e9+1, 0),
		})
		if err != nil {
			t.Fatal(err)
		}
		return text
	}
	tests := []struct {
		name   string
		club   club
		ticket func(peer.ID) string
		field  string
		want   string
	}{
		{"missing", invitation, nil, "invitation", "the invitation is missing: ask for a ticket for 12D3"},
		{"expired", invitation, expired, "invitation", "the invitation is expired on 2001-09-09 01:46:41 UTC: ask whoever runs the network for a new ticket"},
		{"for another peer", invitation, func(peer.ID) string { return invitation.bound(t)(seedIdentity(t, 8).ID()) }, "invitation", "the invitation is for another peer: ask for one for 12D3"},
		{"for another network", invitation, other.bound(t), "invitation", "the invitation is for network " + other.ID()},
		{"closed", closed, closed.bearer(t), "invitation", "the invitation is for no peer in particular: this network is closed"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			boss, guest := tt.club.boss(t, nil), tt.club.start(t, tt.ticket, nil)
			_, err := guest.Hello(t.Context(), infoOf(t, boss))
			var refused *RefusedError
			if !errors.As(err, &refused) || refused.Field != tt.field || !refused.ByPeer || !strings.Contains(err.Error(), "refused us: "+tt.want) {
				t.Errorf("got %v, want %q", err, tt.want)
			}
			eventually(t, "both disconnect", func() bool {
				return len(boss.node.Network().Conns()) == 0 && len(guest.node.Network().Conns()) == 0
			})
			_, err = boss.Hello(t.Context(), infoOf(t, guest))
			if !errors.As(err, &refused) || refused.Field != tt.field || refused.ByPeer ||
				!strings.Contains(err.Error(), strings.Replace(tt.want, "the invitation", "refused: its invitation", 1)) {
				t.Errorf("the authority got %v", err)
			}
			if got := boss.Refusals()[tt.field]; got < 2 {
				t.Errorf("%d refusals counted, want 2", got)
			}
			if boss.Rights(guest.ID()) != 0 || boss.Peer(guest.ID()) != nil {
				t.Error("it is in")
			}
		})
	}
}

func TestMembershipConfigRefused(t *testing.T) {
	c := newClub(t, Invitation)
	for name, tt := range map[string]struct {
		change func(*Config)
		want   string
	}{
		"ticket without network": {func(cfg *Config) { cfg.Genesis = nil }, "give that too"},
		"another name":           {func(cfg *Config) { cfg.Network = "home" }, `network "home" is not that of the network file, club-`},
		"damaged ticket":         {func(cfg *Config) { cfg.Ticket = "kvt1-AAAA" }, "ticket is damaged"},
	} {
		cfg := testConfig(t)
		cfg.Network, cfg.Genesis, cfg.Ticket = "", c.Genesis, c.invite(t, cfg.Identity.ID(), Join)
		tt.change(&cfg)
		if _, err := New(cfg); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v, want an error with %q", name, err, tt.want)
		}
	}
}

// A ticket that leaked is revoked at one node: nodes that have no connection to it drop and
// refuse its holder within seconds, and still do after a restart.
func TestRevocationReachesAll(t *testing.T) {
	c := newClub(t, Invitation)
	leaked := c.invite(t, "", Join)
	dir := t.TempDir()
	boss := c.boss(t, nil)
	middle := c.start(t, c.bound(t), nil)
	var far Config
	last := c.start(t, c.bound(t), func(cfg *Config) { cfg.Revocations = filepath.Join(dir, "revocations"); far = *cfg })
	thief := c.start(t, func(peer.ID) string { return leaked }, nil)
	hello(t, middle, boss)
	hello(t, last, middle)
	p := hello(t, thief, last)
	eventually(t, "the thief is in", func() bool { return last.Rights(thief.ID()) == Join })

	list := c.revoke(t, nil, leaked)
	if err := boss.Revoke(list.Bytes()); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the list reaches the last node", func() bool { return last.Revocations().version() == 1 })
	eventually(t, "the thief is dropped", func() bool { return last.Peer(thief.ID()) == nil })
	select {
	case <-p.Done():
	case <-time.After(patience):
		t.Error("the thief did not notice")
	}
	refusedAs(t, thief, last, "revoked")
	if middle.Peer(last.ID()) == nil || boss.Peer(middle.ID()) == nil {
		t.Error("others were dropped as well")
	}

	// The list that this node has stays whatever comes, and over a restart.
	if err := last.Revoke(list.Bytes()); err != nil {
		t.Errorf("the same list again: %v", err)
	}
	if err := last.Close(); err != nil {
		t.Fatal(err)
	}
	again, err := New(far)
	if err != nil {
		t.Fatal(err)
	}
	if err := again.Start(); err != nil {
		t.Fatal(err)
	}
	defer again.Close()
	refusedAs(t, thief, again, "revoked")
}

func refusedAs(t testing.TB, from, to *Host, got string) {
	t.Helper()
	_, err := from.Hello(t.Context(), infoOf(t, to))
	var refused *RefusedError
	if !errors.As(err, &refused) || refused.Field != "invitation" || refused.Got != got {
		t.Errorf("got %v, want a refusal with %q", err, got)
	}
}

func TestRevokeTakesNothingOlder(t *testing.T) {
	c := newClub(t, Invitation)
	path := filepath.Join(t.TempDir(), "revocations")
	boss := c.boss(t, func(cfg *Config) { cfg.Revocations = path })
	first := c.revoke(t, nil, c.invite(t, "", Join))
	second := c.revoke(t, first, c.invite(t, "", Join))
	fork := c.revoke(t, first, c.invite(t, "", Join))
	forged := slices.Clone(second.Bytes())
	forged[len(forged)-1] ^= 1
	if err := boss.Revoke(second.Bytes()); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name string
		list []byte
		want string
	}{
		{"older", first.Bytes(), "version 1: this node has version 2 already"},
		{"another of the same version", fork.Bytes(), "two revocation lists of version 2"},
		{"forged", forged, "not signed"},
	} {
		if err := boss.Revoke(tt.list); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v, want an error with %q", tt.name, err, tt.want)
		}
	}
	if got, err := os.ReadFile(path); err != nil || string(got) != string(second.Bytes()) {
		t.Errorf("the file has %x, %v", got, err)
	}
	// A file that is not the authority's keeps the node from starting.
	if err := os.WriteFile(path, forged, 0o600); err != nil {
		t.Fatal(err)
	}
	cfg := testConfig(t)
	cfg.Network, cfg.Genesis, cfg.Revocations = "", c.Genesis, path
	h, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	if err := h.Start(); err == nil || !strings.Contains(err.Error(), path) || !strings.Contains(err.Error(), "not signed") {
		t.Errorf("start with a forged list: %v", err)
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	// A list that can not be stored is not taken: a restart would forget it.
	if err := os.Mkdir(path, 0o700); err != nil {
		t.Fatal(err)
	}
	third := c.revoke(t, second, c.invite(t, "", Join))
	if err := boss.Revoke(third.Bytes()); err == nil || boss.Revocations().version() != 2 {
		t.Errorf("not stored: %v, version %d", err, boss.Revocations().version())
	}
}

// A peer that says it has a newer list, and has none, changes nothing.
func TestLiesAboutRevocations(t *testing.T) {
	c := newClub(t, Invitation)
	boss, guest := c.boss(t, nil), c.start(t, c.bound(t), nil)
	liar := c.start(t, c.bound(t), nil)
	mine := c.revoke(t, nil, c.invite(t, "", Join))
	if err := boss.Revoke(mine.Bytes()); err != nil {
		t.Fatal(err)
	}
	forged, err := c.Genesis.Revoke(c.authority, nil, nil, []peer.ID{guest.ID()})
	if err != nil {
		t.Fatal(err)
	}
	forged.raw[len(forged.raw)-1] ^= 1
	forged.Version = 99
	liar.members.mu.Lock()
	liar.members.revoked = forged
	liar.members.mu.Unlock()
	hello(t, guest, boss)
	hello(t, liar, boss)
	eventually(t, "it costs the liar its standing", func() bool {
		s := boss.Standing(liar.ID())
		return s.Score > 0 && s.Last == Forged
	})
	if got := boss.Revocations().version(); got != 1 || boss.Rights(guest.ID()) == 0 {
		t.Errorf("version %d, rights of the guest %v", got, boss.Rights(guest.ID()))
	}
}

// A ticket that expires ends the stay, not the next hello alone.
func TestTicketExpiresWhileConnected(t *testing.T) {
	c := newClub(t, Invitation)
	var ahead atomic.Int64 // ns by which the boss's clock is ahead
	boss := c.boss(t, func(cfg *Config) {
		cfg.now = func() time.Time { return time.Now().Add(time.Duration(ahead.Load())) }
	})
	guest := c.start(t, c.bound(t), nil)
	p := hello(t, guest, boss)
	eventually(t, "the guest is in", func() bool { return boss.Rights(guest.ID()) == Join|Infer })
	ahead.Store(int64(25 * time.Hour))
	select {
	case <-p.Done():
	case <-time.After(patience):
		t.Fatal("the guest is not dropped")
	}
	_, err := guest.Hello(t.Context(), infoOf(t, boss))
	if err == nil || !strings.Contains(err.Error(), "the invitation is expired on") {
		t.Errorf("got %v", err)
	}
}
