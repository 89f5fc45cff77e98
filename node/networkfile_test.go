package node

import (
	"bytes"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"kvasird/node/api"
	"kvasird/p2p"
)

func TestCreateNetwork(t *testing.T) {
	for _, admission := range []string{"", "open", "invitation", "closed"} {
		t.Run(admission, func(t *testing.T) {
			t.Chdir(t.TempDir())
			var out bytes.Buffer
			opts := NewNetwork{Name: "home", Admission: admission, Replicas: 3, Bootstrap: []string{somePeer}, Relays: []string{somePeer}}
			if err := CreateNetwork(opts, &out); err != nil {
				t.Fatal(err)
			}
			g, err := ReadNetwork("home.toml")
			if err != nil {
				t.Fatal(err)
			}
			if g.TargetReplicas != 3 || !slices.Equal(g.Contact.Bootstrap, opts.Bootstrap) || !slices.Equal(g.Contact.Relays, opts.Relays) {
				t.Errorf("got %+v", g)
			}
			if !strings.Contains(out.String(), g.ID()) || !strings.Contains(out.String(), "kvasird run --network home.toml") {
				t.Errorf("said %s", out.String())
			}
			if st, err := os.Stat("home.toml"); err != nil || st.Mode().Perm()&^0o022 != 0o644 {
				t.Errorf("%v, %v", st, err)
			}
			key, err := p2p.LoadIdentity("home.authority.key")
			if isOpen := admission == "" || admission == "open"; isOpen {
				if err == nil || g.Authority != "" {
					t.Errorf("an open network has the authority %s", key.ID())
				}
				return
			}
			if err != nil || key.ID() != g.Authority || !strings.Contains(out.String(), "keep it secret") {
				t.Errorf("key %s, authority %s, %v", key.ID(), g.Authority, err)
			}
		})
	}
}

func TestCreateNetworkRefuses(t *testing.T) {
	t.Chdir(t.TempDir())
	for name, text := range map[string]string{"there.toml": "mine", "keyed.authority.key": "mine"} {
		if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, tt := range []struct {
		name string
		opts NewNetwork
		want string
	}{
		{"name", NewNetwork{Name: "My Net"}, `name = "My Net": want 1 to 32`},
		{"no name", NewNetwork{Out: "x.toml"}, "want 1 to 32"},
		{"admission", NewNetwork{Name: "a", Admission: "maybe"}, "want open, invitation or closed"},
		{"replicas", NewNetwork{Name: "a", Admission: "closed", Replicas: 99}, "target_replicas = 99: want 1 to 16"},
		{"bootstrap", NewNetwork{Name: "a", Bootstrap: []string{"x"}}, `contact.bootstrap: "x"`},
		{"model", NewNetwork{Name: "a", Models: []string{"x"}}, "no model id"},
		{"file is there", NewNetwork{Name: "there"}, "there.toml is there already: choose another file with --out"},
		{"key is there", NewNetwork{Name: "keyed", Admission: "closed"}, "keyed.authority.key is there already"},
		{"other suffix", NewNetwork{Name: "a", Out: "a.conf"}, "must end in .toml"},
	} {
		if err := CreateNetwork(tt.opts, new(bytes.Buffer)); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v, want an error with %q", tt.name, err, tt.want)
		}
	}
	files, err := filepath.Glob("*")
	if err != nil || !slices.Equal(files, []string{"keyed.authority.key", "there.toml"}) {
		t.Errorf("left %v, %v", files, err)
	}
	for _, name := range files {
		if text, err := os.ReadFile(name); string(text) != "mine" {
			t.Errorf("%s was changed to %q, %v", name, text, err)
		}
	}
}

func TestShowNetwork(t *testing.T) {
	file, g := makeNetwork(t, "invitation")
	show := func() string {
		var out bytes.Buffer
		if err := ShowNetwork(file, &out); err != nil {
			t.Fatal(err)
		}
		return out.String()
	}
	for _, want := range []string{"network     " + g.ID(), "by invitation", "authority   " + g.Authority.String(), "2 wanted of every expert", "models      any", "bootstrap   none", "nothing from here"} {
		if !strings.Contains(show(), want) {
			t.Errorf("%s\ndoes not contain %q", show(), want)
		}
	}
	revoke(t, file, invite(t, NewTicket{File: file}))
	if want := "revoked     1 tickets, 0 peers (list 1)"; !strings.Contains(show(), want) {
		t.Errorf("%s\ndoes not contain %q", show(), want)
	}
}

func TestInvite(t *testing.T) {
	file, g := makeNetwork(t, "invitation")
	me, now := newIdentity(t), time.Now()
	for _, tt := range []struct {
		name   string
		opts   NewTicket
		rights p2p.Rights
		days   int
		notes  string
	}{
		{"whoever has it", NewTicket{}, p2p.Join, 30, "for whoever has it, so send it with care"},
		{"for a peer", NewTicket{For: me.ID().String(), Note: "Ada"}, p2p.Join, 365, "for peer " + me.ID().String() + " alone"},
		{"with infer", NewTicket{For: me.ID().String(), Infer: true, Days: 7}, p2p.Join | p2p.Infer, 7, "join, infer"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			tt.opts.File = file
			var out, notes bytes.Buffer
			if err := Invite(tt.opts, &out, &notes); err != nil {
				t.Fatal(err)
			}
			text := strings.TrimSuffix(out.String(), "\n")
			if rights, err := g.CheckTicket(text, me, now); err != nil || rights != tt.rights {
				t.Errorf("rights %v, %v", rights, err)
			}
			ticket, err := p2p.ParseTicket(text)
			if err != nil {
				t.Fatal(err)
			}
			if got := ticket.Expires.Sub(ticket.NotBefore); got != time.Duration(tt.days)*24*time.Hour || ticket.Note != tt.opts.Note {
				t.Errorf("good for %v, note %q", got, ticket.Note)
			}
			if !strings.Contains(notes.String(), tt.notes) || !strings.Contains(notes.String(), "kvasird network revoke "+file+" "+ticket.Serial.String()) {
				t.Errorf("said %s", notes.String())
			}
		})
	}
}

func TestInviteRefuses(t *testing.T) {
	file, _ := makeNetwork(t, "invitation")
	open, _ := makeNetwork(t, "open")
	other, _ := makeNetwork(t, "closed")
	me := newIdentity(t).ID().String()
	for _, tt := range []struct {
		name string
		opts NewTicket
		want string
	}{
		{"infer for whoever has it", NewTicket{File: file, Infer: true}, "must be for one peer"},
		{"open network", NewTicket{File: open}, "is open"},
		{"no peer id", NewTicket{File: file, For: "me"}, `peer id "me"`},
		{"days", NewTicket{File: file, Days: -1}, "-1 days"},
		{"many days", NewTicket{File: file, For: me, Days: maxTicketDays + 1}, "3651 days"},
		{"another key", NewTicket{File: file, Key: beside(other, authoritySuffix)}, "this is the key of"},
		{"no key", NewTicket{File: file, Key: "none"}, "is not at none: it is on the machine where the network was created; name it with --key"},
		{"no file", NewTicket{File: "none.toml"}, "none.toml: no such file"},
	} {
		var out bytes.Buffer
		if err := Invite(tt.opts, &out, new(bytes.Buffer)); err == nil || !strings.Contains(err.Error(), tt.want) || out.Len() > 0 {
			t.Errorf("%s: %q, %v, want an error with %q", tt.name, out.String(), err, tt.want)
		}
	}
}

// revoke revokes where no daemon runs, and returns what was said.
func revoke(t *testing.T, file, what string) string {
	t.Helper()
	var out bytes.Buffer
	if err := RevokeMember(t.Context(), Revocation{File: file, What: what, Data: t.TempDir()}, &out); err != nil {
		t.Fatal(err)
	}
	return out.String()
}

func TestRevokeMember(t *testing.T) {
	file, g := makeNetwork(t, "invitation")
	one, two := invite(t, NewTicket{File: file}), invite(t, NewTicket{File: file})
	second, err := p2p.ParseTicket(two)
	if err != nil {
		t.Fatal(err)
	}
	me := newIdentity(t).ID()
	for i, what := range []string{one, second.Serial.String(), me.String(), one} {
		if said := revoke(t, file, what); !strings.Contains(said, "No daemon runs here") {
			t.Errorf("said %q", said)
		}
		list, err := g.ReadRevocations(beside(file, revocationsSuffix))
		if err != nil || list.Version != uint64(i+1) {
			t.Fatalf("after %d: %+v, %v", i, list, err)
		}
	}
	list, err := g.ReadRevocations(beside(file, revocationsSuffix))
	if err != nil || len(list.Serials) != 2 || len(list.Peers) != 1 || list.Peers[0] != me || !slices.Contains(list.Serials, second.Serial) {
		t.Errorf("list %+v, %v", list, err)
	}
	// A list that the daemon got from elsewhere is not lost.
	data := t.TempDir()
	cfg := Config{Data: data, Genesis: g}
	if err := os.Rename(beside(file, revocationsSuffix), cfg.revocationsPath()); err != nil {
		t.Fatal(err)
	}
	if err := RevokeMember(t.Context(), Revocation{File: file, What: newIdentity(t).ID().String(), Data: data}, new(bytes.Buffer)); err != nil {
		t.Fatal(err)
	}
	list, err = g.ReadRevocations(beside(file, revocationsSuffix))
	if err != nil || list.Version != 5 || len(list.Serials) != 2 || len(list.Peers) != 2 {
		t.Errorf("list %+v, %v", list, err)
	}
}

// TestRevokeMemberTellsTheDaemon: the list reaches the daemon on this machine as
// the file has it.
func TestRevokeMemberTellsTheDaemon(t *testing.T) {
	file, _ := makeNetwork(t, "invitation")
	data := t.TempDir()
	d := &daemonFunc{}
	c, err := OpenControl(filepath.Join(data, api.SocketName), d, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close(t.Context())
	var out bytes.Buffer
	opts := Revocation{File: file, What: newIdentity(t).ID().String(), Data: data}
	if err := RevokeMember(t.Context(), opts, &out); err != nil {
		t.Fatal(err)
	}
	stored, err := os.ReadFile(beside(file, revocationsSuffix))
	if err != nil || !bytes.Equal(stored, d.list) || !strings.Contains(out.String(), "has told 3 peers") {
		t.Errorf("the daemon got %x, the file has %x, %v; said %q", d.list, stored, err, out.String())
	}
	d.err = &api.Error{Code: api.CodeBadRequest, Message: "it is for another network"}
	if err := RevokeMember(t.Context(), opts, &out); err == nil || !strings.Contains(err.Error(), "the daemon here did not take it: it is for another network") {
		t.Errorf("a daemon that refuses: %v", err)
	}
}

func TestRevokeMemberRefuses(t *testing.T) {
	file, g := makeNetwork(t, "invitation")
	open, _ := makeNetwork(t, "open")
	other, _ := makeNetwork(t, "invitation")
	for _, tt := range []struct {
		name string
		opts Revocation
		want string
	}{
		{"nothing like it", Revocation{File: file, What: "me"}, "neither a ticket"},
		{"damaged ticket", Revocation{File: file, What: "kvt1-AA"}, "damaged"},
		{"ticket of another network", Revocation{File: file, What: invite(t, NewTicket{File: other})}, "the ticket is for network"},
		{"authority", Revocation{File: file, What: g.Authority.String()}, "can not be revoked"},
		{"open network", Revocation{File: open, What: "me"}, "is open"},
	} {
		tt.opts.Data = t.TempDir()
		var out bytes.Buffer
		if err := RevokeMember(t.Context(), tt.opts, &out); err == nil || !strings.Contains(err.Error(), tt.want) || out.Len() > 0 {
			t.Errorf("%s: %q, %v, want an error with %q", tt.name, out.String(), err, tt.want)
		}
	}
	if _, err := os.Stat(beside(file, revocationsSuffix)); !os.IsNotExist(err) {
		t.Errorf("a list was written: %v", err)
	}
}
