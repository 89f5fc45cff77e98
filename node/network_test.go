package node

import (
	"bytes"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"kvasird/p2p"
)

// makeNetwork creates a network in a new folder and returns its file.
func makeNetwork(t *testing.T, admission string) (string, *p2p.Genesis) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "home.toml")
	if err := CreateNetwork(NewNetwork{Name: "home", Admission: admission, Out: file}, new(bytes.Buffer)); err != nil {
		t.Fatal(err)
	}
	g, err := ReadNetwork(file)
	if err != nil {
		t.Fatal(err)
	}
	return file, g
}

// invite issues a ticket.
func invite(t *testing.T, opts NewTicket) string {
	t.Helper()
	var out bytes.Buffer
	if err := Invite(opts, &out, new(bytes.Buffer)); err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(out.String())
}

func newIdentity(t *testing.T) p2p.Identity {
	t.Helper()
	id, err := p2p.NewIdentity()
	if err != nil {
		t.Fatal(err)
	}
	return id
}

func TestReadNetworkRefuses(t *testing.T) {
	dir := t.TempDir()
	file := func(name, text string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	for _, tt := range []struct{ path, want string }{
		{filepath.Join(dir, "none.toml"), "no such file"},
		{dir, "is not a file"},
		{file("key.toml", "version = 1\nadmision = \"open\"\n"), `key.toml:2: unknown key "admision"; did you mean "admission"?`},
		{file("name.toml", "version = 1\n"), "name.toml: "},
		{file("large.toml", "#"+strings.Repeat("a", p2p.MaxGenesis)), "larger than"},
	} {
		if g, err := ReadNetwork(tt.path); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%v, %v, want an error with %q", g, err, tt.want)
		}
	}
}

func TestConfigNetwork(t *testing.T) {
	file, g := makeNetwork(t, "invitation")
	other, _ := makeNetwork(t, "invitation")
	c := Config{Data: t.TempDir(), Network: file}
	for range 2 { // Validate may be called again
		if err := c.Validate(); err != nil {
			t.Fatal(err)
		}
	}
	if c.Genesis == nil || c.NetworkID() != g.ID() || c.Listen[0] != "/ip4/0.0.0.0/tcp/19001" || c.Listen[1] != "/ip4/0.0.0.0/udp/19001/quic-v1" ||
		c.Lane != "0.0.0.0:0" {
		t.Errorf("got %+v", c)
	}
	// A file that the configuration names is in its folder.
	config := filepath.Join(filepath.Dir(file), "kvasird.toml")
	if err := os.WriteFile(config, []byte("network = \"home.toml\"\nlisten = [\"/ip4/127.0.0.1/tcp/0\"]\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	c = Config{Data: t.TempDir()}
	if err := ReadConfigFile(config, &c); err != nil {
		t.Fatal(err)
	}
	if err := c.Validate(); err != nil || c.NetworkID() != g.ID() || len(c.Listen) != 1 {
		t.Errorf("got %+v, %v", c, err)
	}
	byName := Config{Data: t.TempDir(), Network: "home"}
	if err := byName.Validate(); err != nil || byName.Genesis != nil || byName.NetworkID() != "home" {
		t.Errorf("a name gives %+v, %v", byName, err)
	}
	for _, tt := range []struct {
		name string
		set  Config
		want string
	}{
		{"no file", Config{Network: "none/x"}, "network file: stat none/x"},
		{"ticket without file", Config{Ticket: "kvt1-"}, "a ticket is for a network that has a file"},
		{"damaged ticket", Config{Network: file, Ticket: "kvt1-AAAA"}, "ticket is damaged"},
		{"ticket of another network", Config{Network: file, Ticket: invite(t, NewTicket{File: other})}, "the ticket is for network home-"},
	} {
		tt.set.Data = "/data"
		if err := tt.set.Validate(); err == nil || !strings.Contains(err.Error(), "configuration: "+tt.want) {
			t.Errorf("%s: %v, want an error with %q", tt.name, err, tt.want)
		}
	}
}

// TestTicketIsRemembered: a ticket is given once.
func TestTicketIsRemembered(t *testing.T) {
	file, g := makeNetwork(t, "invitation")
	me, now := newIdentity(t), time.Now()
	ticket := invite(t, NewTicket{File: file, For: me.ID().String(), Infer: true})
	// The friend's machine has the file and not the key.
	theirs := filepath.Join(t.TempDir(), "home.toml")
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(theirs, text, 0o600); err != nil {
		t.Fatal(err)
	}
	data := t.TempDir()
	start := func(ticket string) (string, error) {
		c := Config{Data: data, Network: theirs, Ticket: ticket}
		if err := c.Validate(); err != nil {
			t.Fatal(err)
		}
		return c.ticket(me, now)
	}
	if got, err := start(""); got != "" || err != nil {
		t.Errorf("before it was given: %q, %v", got, err)
	}
	for _, given := range []string{ticket, ""} {
		if got, err := start(given); got != ticket || err != nil {
			t.Errorf("given %q: %q, %v", given, got, err)
		}
	}
	if st, err := os.Stat(filepath.Join(data, "ticket-"+g.ID())); err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", st, err)
	}
	for _, tt := range []struct {
		name string
		opts NewTicket
		want string
	}{
		{"for another peer", NewTicket{File: file, For: newIdentity(t).ID().String()}, "ticket: the invitation is for another peer: ask for one for " + me.ID().String()},
	} {
		if got, err := start(invite(t, tt.opts)); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %q, %v, want an error with %q", tt.name, got, err, tt.want)
		}
	}
	// What was refused is not remembered.
	if got, err := start(""); got != ticket || err != nil {
		t.Errorf("after a refusal: %q, %v", got, err)
	}
}

// TestNetworkOfTwo goes the way of two people: create, start, invite, start,
// revoke.
func TestNetworkOfTwo(t *testing.T) {
	file, g := makeNetwork(t, "invitation")
	theirs := filepath.Join(t.TempDir(), "home.toml")
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(theirs, text, 0o600); err != nil {
		t.Fatal(err)
	}
	open := func(file, ticket string, id p2p.Identity) *p2p.Host {
		c := Config{Data: t.TempDir(), Network: file, Ticket: ticket}
		if err := c.Validate(); err != nil {
			t.Fatal(err)
		}
		hc := p2p.Config{Identity: id, Pack: "test", Agent: "test", HelloTimeout: 20 * time.Second, Logger: slog.New(slog.DiscardHandler)}
		if err := c.joinNetwork(&hc, time.Now()); err != nil {
			t.Fatal(err)
		}
		h, err := p2p.New(hc)
		if err != nil {
			t.Fatal(err)
		}
		if err := h.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { h.Close() })
		return h
	}
	friend := newIdentity(t)
	here := open(file, "", newIdentity(t)) // gives itself a ticket
	there := open(theirs, invite(t, NewTicket{File: file, For: friend.ID().String(), Infer: true}), friend)
	address, err := p2p.ParsePeer(here.Addrs()[0])
	if err != nil {
		t.Fatal(err)
	}
	p, err := there.Hello(t.Context(), address)
	if err != nil {
		t.Fatal(err)
	}
	if all := p2p.Join | p2p.Infer; p.Rights() != all || p.Network != g.ID() {
		t.Errorf("the rights here are %v in %s", p.Rights(), p.Network)
	}
	// No daemon runs in that folder, so the next start hands the list out.
	var out bytes.Buffer
	if err := RevokeMember(t.Context(), Revocation{File: file, What: friend.ID().String(), Data: t.TempDir()}, &out); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(out.String(), "No daemon runs here: it is handed out when") {
		t.Errorf("said %q", out.String())
	}
	n := &Node{cfg: Config{Network: file, Genesis: g}, host: here, log: slog.New(slog.DiscardHandler)}
	n.handOutRevocations()
	select {
	case <-p.Done():
	case <-time.After(20 * time.Second):
		t.Error("who was put out is still in")
	}
	if _, err := there.Hello(t.Context(), address); err == nil || !strings.Contains(err.Error(), "revoked") {
		t.Errorf("put out, it comes back: %v", err)
	}
}
