package node

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"path/filepath"
	"sync"

	"kvasird/node/api"
	"kvasird/node/gateway"
	"kvasird/node/kv"
)

// httpDoor is the listener of the gateway, which beyond loopback opens with the
// first key.
type httpDoor struct {
	opened chan struct{} // closed when there is a listener

	mu       sync.Mutex // guards what follows
	listener net.Listener
	failed   error // why the last try gave none
}

func (d *httpDoor) open(addr string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.listener != nil {
		return nil
	}
	if d.listener, d.failed = gateway.Listen(addr); d.failed != nil {
		d.listener = nil
		return d.failed
	}
	close(d.opened)
	return nil
}

// addr is where it listens, or "", perhaps with a reason.
func (d *httpDoor) addr() (string, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.listener == nil {
		return "", d.failed
	}
	return d.listener.Addr().String(), nil
}

// close is for a node that stops: a gateway that runs has closed it already.
func (d *httpDoor) close() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.listener != nil {
		d.listener.Close()
	}
	return nil
}

// exposed says whether others than programs on this machine could reach the
// gateway.
func (c *Config) exposed() bool {
	if !c.hasHTTP() {
		return false
	}
	host, _, err := net.SplitHostPort(c.HTTP)
	if err != nil || host == "localhost" {
		return err != nil
	}
	ip, err := netip.ParseAddr(host)
	return err != nil || !ip.Unmap().IsLoopback()
}

func (c *Config) hasHTTP() bool { return c.Has(RoleEntry) && c.HTTP != Off }

// asksForKey says whether a request needs a key. Beyond loopback all do, also those
// from this machine: they may come through a proxy.
func (c *Config) asksForKey() bool { return c.Gateway.RequireKey || c.exposed() }

// openHTTP opens the gateway's listener, unless nobody could be told from anybody
// there.
func (n *Node) openHTTP() error {
	n.onStop(n.http.close)
	if !n.cfg.hasHTTP() {
		return nil
	}
	if n.cfg.exposed() && n.keys.count() == 0 {
		n.log.Error("the HTTP API is not opened", "http", n.cfg.HTTP, "reason", n.noKeys())
		return nil
	}
	if n.cfg.asksForKey() && n.keys.count() == 0 {
		n.log.Warn("the HTTP API refuses all requests", "reason", n.noKeys())
	}
	return n.http.open(n.cfg.HTTP)
}

func (n *Node) noKeys() string {
	why := "it asks for a key (gateway.require_key)"
	if n.cfg.exposed() {
		why = n.cfg.HTTP + " can be reached from other machines"
	}
	return why + ", and there is no key: run `kvasir keys add NAME`"
}

// runHTTP serves the gateway once it is open.
func (n *Node) runHTTP(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return nil
	case <-n.http.opened:
		return n.gateway.Run(ctx, n.http.listener)
	}
}

// httpAccess says who may use the gateway.
func (n *Node) httpAccess() string {
	keys := n.keys.count()
	_, failed := n.http.addr()
	switch {
	case !n.cfg.hasHTTP():
		return ""
	case failed != nil:
		return fmt.Sprintf("closed: %v", failed)
	case n.cfg.asksForKey() && keys == 0:
		return "closed: " + n.noKeys()
	case n.cfg.exposed():
		return fmt.Sprintf("other machines too, with one of %d keys", keys)
	case n.cfg.asksForKey():
		return fmt.Sprintf("programs on this machine, with one of %d keys", keys)
	}
	return "programs on this machine, without a key"
}

// Keys lists the gateway's keys.
func (n *Node) Keys(context.Context) ([]api.Key, error) { return n.keys.all(), nil }

// AddKey makes a key, which opens the gateway where it waited for one.
func (n *Node) AddKey(_ context.Context, req api.NewKey) (api.CreatedKey, error) {
	made, err := n.keys.add(req)
	if err != nil {
		return made, err
	}
	switch {
	case !n.cfg.hasHTTP():
		made.Note = "This node has no HTTP API: it needs the role entry, and http other than \"off\"."
	case !n.cfg.asksForKey():
		made.Note = fmt.Sprintf("The HTTP API at %s asks nobody for a key: only programs on this machine reach it. gateway.require_key changes that.", n.HTTPAddr())
	default:
		if err := n.http.open(n.cfg.HTTP); err != nil {
			made.Note = fmt.Sprintf("The HTTP API cannot be opened: %v.", err)
			break
		}
		made.Note = fmt.Sprintf("The HTTP API at %s takes it from now on.", n.HTTPAddr())
	}
	return made, nil
}

// RevokeKey ends a key.
func (n *Node) RevokeKey(_ context.Context, name string) (api.RevokedKey, error) {
	left, err := n.keys.revoke(name)
	return api.RevokedKey{Left: left}, err
}

// kvName is the folder of the store of values in the data folder.
const kvName = "kv"

// openResponses opens the store of responses; nil where they are only kept in
// memory.
func (n *Node) openResponses() (gateway.Store, error) {
	if n.cfg.Gateway.age == 0 || !n.cfg.hasHTTP() {
		return nil, nil
	}
	const name = "responses"
	db, err := kv.Open(kv.Config{
		Path: filepath.Join(n.cfg.Data, kvName), Logger: n.log,
		Spaces: map[string]kv.Bounds{name: {Age: n.cfg.Gateway.age, Bytes: n.cfg.Gateway.bytes}},
	})
	if errors.Is(err, kv.ErrNoRoom) {
		n.log.Warn("responses are stored in memory only", "reason", err)
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	n.onStop(db.Close)
	return db.Space(name), nil
}
