package node

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"time"

	"kvasird/node/api"
	"kvasird/p2p"
)

// What lies beside a network file, home.toml.
const (
	networkSuffix     = ".toml"
	authoritySuffix   = ".authority.key" // signs tickets and revocations
	revocationsSuffix = ".revocations"   // the newest list that was made here

	// In a network with a token, the secret of the authenticator, sealed, and what opens it.
	authenticatorSuffix    = ".authenticator"
	authenticatorKeySuffix = ".authenticator.key"
)

// ownTicketTime is how long a ticket is good that the authority's machine gives
// itself. It makes a new one at every start.
const ownTicketTime = 365 * 24 * time.Hour

// namesFile says whether a network setting is a file rather than a name.
func namesFile(network string) bool {
	return strings.HasSuffix(network, networkSuffix) || strings.ContainsAny(network, `/\`)
}

// beside is the path of what belongs to a network file.
func beside(file, suffix string) string { return strings.TrimSuffix(file, networkSuffix) + suffix }

// ReadNetwork reads a network file. A key that is not known is an error that
// names its line and the nearest known one.
func ReadNetwork(file string) (*p2p.Genesis, error) {
	// Opening a pipe would wait for its writer.
	info, err := os.Stat(file)
	if err == nil && !info.Mode().IsRegular() {
		err = fmt.Errorf("%s is not a file", file)
	}
	if err != nil {
		return nil, fmt.Errorf("network file: %w", err)
	}
	f, err := os.Open(file)
	if err != nil {
		return nil, fmt.Errorf("network file: %w", err)
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, p2p.MaxGenesis+1))
	if err != nil {
		return nil, fmt.Errorf("network file: %w", err)
	}
	g, err := p2p.ParseGenesis(text)
	var unknown *p2p.UnknownKeyError
	if errors.As(err, &unknown) {
		return nil, fmt.Errorf("network file %s:%w%s", file, err, Suggest(unknown.Key, p2p.GenesisKeys))
	}
	if err == nil {
		_, err = readToken(g)
	}
	if err != nil {
		return nil, fmt.Errorf("network file %s: %w", file, err)
	}
	return g, nil
}

// readNetwork reads the network file, if there is one, and checks the ticket.
func (c *Config) readNetwork() error {
	if !namesFile(c.Network) {
		if c.Ticket != "" {
			return fmt.Errorf("a ticket is for a network that has a file: name that as network, not %q", c.Network)
		}
		c.Genesis = nil
		return nil
	}
	g, err := ReadNetwork(c.Network)
	if err != nil {
		return err
	}
	c.Genesis = g
	if c.Ticket == "" {
		return nil
	}
	t, err := p2p.ParseTicket(c.Ticket)
	if err != nil {
		return err
	}
	if t.Network != g.ID() {
		return fmt.Errorf("the ticket is for network %s, and %s is %s", t.Network, c.Network, g.ID())
	}
	return nil
}

// NetworkID is the network as protocol ids name it.
func (c *Config) NetworkID() string {
	if c.Genesis != nil {
		return c.Genesis.ID()
	}
	return c.Network
}

// anyInterface are the default addresses of a node in a network of machines.
func anyInterface() []string {
	out := []string{"/ip4/0.0.0.0/tcp/19001", "/ip4/0.0.0.0/udp/19001/quic-v1"}
	if hasIPv6() {
		out = append(out, "/ip6/::/tcp/19001", "/ip6/::/udp/19001/quic-v1")
	}
	return out
}

// hasIPv6 says whether this machine has an address that others reach.
func hasIPv6() bool {
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		return false
	}
	for _, a := range addrs {
		if n, ok := a.(*net.IPNet); ok && n.IP.To4() == nil && n.IP.IsGlobalUnicast() {
			return true
		}
	}
	return false
}

// revocationsPath is where the node keeps the newest revocation list.
func (c *Config) revocationsPath() string {
	return filepath.Join(c.Data, "revocations-"+c.NetworkID())
}

// ticketPath is where the node remembers its ticket.
func (c *Config) ticketPath() string { return filepath.Join(c.Data, "ticket-"+c.NetworkID()) }

// ticket is what this node shows to the others: the configured one, which it
// remembers for the next start; on the machine that has the authority's key one
// that it gives itself; else the remembered one; or "".
func (c *Config) ticket(me p2p.Identity, now time.Time) (string, error) {
	if c.Genesis == nil || c.Genesis.Admission == p2p.Open {
		return "", nil
	}
	if c.Ticket != "" {
		if _, err := c.Genesis.CheckTicket(c.Ticket, me, now); err != nil {
			return "", fmt.Errorf("ticket: the %w", err)
		}
		return c.Ticket, writeTicket(c.ticketPath(), c.Ticket)
	}
	authority, err := p2p.LoadIdentity(beside(c.Network, authoritySuffix))
	if err == nil && authority.ID() == c.Genesis.Authority {
		return c.Genesis.IssueTicket(authority, p2p.Ticket{
			Rights: p2p.Join | p2p.Infer, Subject: me.ID(), NotBefore: now, Expires: now.Add(ownTicketTime), Note: "authority's machine",
		})
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return "", err
	}
	text, err := os.ReadFile(c.ticketPath())
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	return strings.TrimSpace(string(text)), err
}

// writeTicket replaces the file, which nobody else may read: whoever has a
// ticket can use it.
func writeTicket(path, ticket string) error {
	if err := replaceFile(path, []byte(ticket+"\n")); err != nil {
		return fmt.Errorf("remember the ticket: %w", err)
	}
	return nil
}

// joinNetwork sets what of a host follows from the network file.
func (c *Config) joinNetwork(host *p2p.Config, now time.Time) error {
	ticket, err := c.ticket(host.Identity, now)
	if err != nil {
		return err
	}
	if ticket == "" && c.Genesis.Admission == p2p.Invitation {
		host.Logger.Warn("this network is by invitation and there is no ticket: ask for one for this peer id and start with --ticket",
			"peer_id", host.Identity.ID())
	}
	host.Network, host.Genesis, host.Ticket = "", c.Genesis, ticket
	host.Bootstrap, host.Relays = c.Genesis.Contact.Bootstrap, c.Genesis.Contact.Relays
	host.Revocations = c.revocationsPath()
	return nil
}

// handOutRevocations gives the host the list that was made on this machine while
// no daemon ran, for all.
func (n *Node) handOutRevocations() {
	if n.cfg.Genesis == nil || n.cfg.Genesis.Authority == "" {
		return
	}
	list, err := n.cfg.Genesis.ReadRevocations(beside(n.cfg.Network, revocationsSuffix))
	if have := n.host.Revocations(); err == nil && list != nil && (have == nil || have.Version < list.Version) {
		err = n.host.Revoke(list.Bytes())
	}
	if err != nil {
		n.log.Warn("revocations that were made here are not handed out", "error", err)
	}
}

// revoke takes a list from `kvasird network revoke`.
func (c *Control) revoke(w http.ResponseWriter, r *http.Request) {
	var req api.RevokeRequest
	if c.read(w, r, &req) {
		result, err := c.daemon.Revoke(r.Context(), req.List)
		c.answer(w, result, err)
	}
}

// Revoke takes a revocation list for this node and all others.
func (n *Node) Revoke(_ context.Context, list []byte) (api.RevokeResult, error) {
	if err := n.host.Revoke(list); err != nil {
		return api.RevokeResult{}, &api.Error{Code: api.CodeBadRequest, Message: err.Error()}
	}
	var result api.RevokeResult
	for _, p := range n.host.Peers() {
		if p.State == p2p.Connected {
			result.Peers++
		}
	}
	return result, nil
}
