package node

import (
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"kvasird/ggml/tiny"
	"kvasird/node/api"
)

const bootPeer = "12D3KooWGsFTMJhHS4zJ6Pn8BGWZTPDw8y3KQF6dPx3ZcbfBKsYf"

// complaints are the findings that are not fine, as one text.
func complaints(t *testing.T, list []Finding) (bad, fine string) {
	t.Helper()
	var b, f []string
	for _, x := range list {
		text := strings.Join(strings.Fields(strings.Join([]string{string(x.Severity), x.Name, x.Text, x.Why, x.Fix}, " ")), " ")
		if x.Severity == SeverityOK {
			f = append(f, text)
			continue
		}
		b = append(b, text)
		if x.Fix == "" {
			t.Errorf("nothing to do about %+v", x)
		}
	}
	return strings.Join(b, "\n"), strings.Join(f, "\n")
}

// TestDoctorReach: what a running daemon says of its connections becomes findings.
func TestDoctorReach(t *testing.T) {
	well := func() *api.Reach {
		return &api.Reach{
			Reach: "public: a peer could connect", NAT: "not known", MDNS: "on: 2 nodes heard", DHT: "on", DirectPeers: 2,
			Bootstrap: []api.Contact{{ID: "boot", State: api.PeerConnected}},
		}
	}
	alone := func(r *api.Reach) { r.DirectPeers, r.Bootstrap = 0, nil }
	for _, tt := range []struct {
		name  string
		spoil func(*api.Reach)
		want  []string // in the complaints; none: there are none
	}{
		{"well", func(*api.Reach) {}, nil},
		{"alone", alone, []string{"warn network connected to nobody nobody was found yet; local network: on: 2 nodes heard start another node"}},
		{"alone, with advice", func(r *api.Reach) { alone(r); r.Advice = []string{"do a", "do b"} }, []string{"connected to nobody", "do a; do b"}},
		{"alone, and why", func(r *api.Reach) {
			r.DirectPeers = 0
			r.Bootstrap = []api.Contact{{ID: "boot", Addrs: []string{"/dns4/x"}, State: api.PeerLost, Error: "no\n route"}}
		}, []string{"connected to nobody boot: no route", "warn bootstrap boot is not connected (/dns4/x) no route see that it runs"}},
		{"bootstrap in its first attempt", func(r *api.Reach) { r.Bootstrap[0].State = api.PeerConnecting }, []string{"bootstrap boot", "still running"}},
		{"advice", func(r *api.Reach) { r.Advice = []string{"do a"} }, []string{"warn network 2 peers connected directly, 0 through a relay it could be better do a"}},
		{"no multicast", func(r *api.Reach) { r.MDNS = "failed: no interface" }, []string{"warn multicast does not work here failed: no interface let UDP port 5353"}},
		{"multicast is dropped", func(r *api.Reach) {
			r.MDNS = "on: nothing heard, not even this node itself: multicast may be blocked"
		}, []string{"warn multicast does not work here"}},
		{"symmetric", func(r *api.Reach) { r.NAT = "symmetric: so it is" }, []string{"warn nat connections through it need a relay symmetric: so it is let the router"}},
		{"relayed only", func(r *api.Reach) { r.DirectPeers, r.RelayedPeers = 0, 3 }, []string{"warn nat all peers are reached through a relay"}},
		{"private", func(r *api.Reach) { r.Reach = "private: a peer could not connect" }, []string{"warn nat nobody can connect to this node private: a peer could not connect"}},
		{"private at a relay", func(r *api.Reach) { r.Reach, r.Relayed = "private", []string{"/p2p-circuit"} }, nil},
		{"relay", func(r *api.Reach) { r.Relays = []api.Contact{{ID: "rel", State: api.PeerRefused, Error: "full"}} }, []string{"warn relay rel is not connected () full"}},
		{"limits of others", func(r *api.Reach) {
			r.Unmet = []api.Contact{{ID: "a", State: api.PeerLost, Error: "the other side may be limiting connections"}, {ID: "b", State: api.PeerConnecting}}
		}, []string{"warn peers 2 found and not connected a: the other side may be limiting connections see why"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			d := healthy(t)
			d.answered, d.reach = true, well()
			tt.spoil(d.reach)
			bad, fine := complaints(t, d.examine())
			for _, want := range tt.want {
				if !strings.Contains(bad, want) {
					t.Errorf("%s\ndoes not contain %q", bad, want)
				}
			}
			if tt.want == nil && (bad != "" || !strings.Contains(fine, "ok network 2 peers connected directly") || !strings.Contains(fine, "ok bootstrap 1 of 1 connected")) {
				t.Errorf("complaints %q beside\n%s", bad, fine)
			}
		})
	}
}

// inNetwork is healthy in a network with a file and no daemon.
func inNetwork(t *testing.T, bootstrap ...string) *doctor {
	t.Helper()
	d := healthy(t)
	d.cfg.Network = filepath.Join(t.TempDir(), "home.toml")
	if err := CreateNetwork(NewNetwork{Name: "home", Out: d.cfg.Network, Bootstrap: bootstrap}, io.Discard); err != nil {
		t.Fatal(err)
	}
	if err := d.cfg.Validate(); err != nil {
		t.Fatal(err)
	}
	d.dial = func(string, string) error { return nil }
	return d
}

// addTiny has the shipped model in the store of a configuration.
func addTiny(t *testing.T, cfg Config) (path string) {
	t.Helper()
	path, err := tiny.Write(t.TempDir())
	if err == nil {
		err = ManageModels(t.Context(), cfg, "add", []string{path}, io.Discard, io.Discard)
	}
	if err != nil {
		t.Fatal(err)
	}
	return path
}

// TestDoctorNetworkFile: without a daemon, what one would need is tried.
func TestDoctorNetworkFile(t *testing.T) {
	const tcp, udp = "/dns4/boot.example/tcp/443/tls/ws/p2p/" + bootPeer, "/ip4/192.0.2.1/udp/1/quic-v1/p2p/" + bootPeer
	for _, tt := range []struct {
		name      string
		bootstrap []string
		spoil     func(*testing.T, *doctor)
		bad, fine string // "": no complaint at all
	}{
		{"new", nil, func(*testing.T, *doctor) {}, "", "ok bootstrap none: nodes on the local network find each other"},
		{"no way in", nil, func(_ *testing.T, d *doctor) { d.cfg.MDNS = Off }, "warn bootstrap none neither the network file", "ok network home-"},
		{"answers", []string{tcp, udp}, func(t *testing.T, d *doctor) {
			d.dial = func(network, addr string) error {
				if network != "tcp" || addr != "boot.example:443" {
					t.Errorf("dialled %s %s", network, addr)
				}
				return nil
			}
		}, "", "ok bootstrap " + tcp + " answers\nok bootstrap " + udp + " not tried"},
		{"silent", []string{tcp}, func(_ *testing.T, d *doctor) {
			d.dial = func(string, string) error { return errors.New("connection refused") }
		}, "warn bootstrap " + tcp + " does not answer connection refused see that it runs", "ok store none yet"},
		{"a model", nil, func(t *testing.T, d *doctor) { addTiny(t, d.cfg) }, "", "ok store 1 models, "},
		{"a model that has gone", nil, func(t *testing.T, d *doctor) {
			loseModel(t, d.cfg, addTiny(t, d.cfg))
		}, "warn store a model cannot be used kvasir-tiny", "ok store 1 models"},
		{"a model that cannot be read", nil, func(t *testing.T, d *doctor) {
			addTiny(t, d.cfg)
			list, err := filepath.Glob(filepath.Join(d.cfg.Data, storeName, "*", "manifest.json"))
			if err != nil || len(list) != 1 {
				t.Fatal(list, err)
			}
			if err := os.WriteFile(list[0], []byte("{"), 0o600); err != nil {
				t.Fatal(err)
			}
		}, "warn store a model cannot be used", "ok store 0 models"},
		{"the store is a file", nil, func(t *testing.T, d *doctor) {
			if err := os.WriteFile(filepath.Join(d.cfg.Data, storeName), nil, 0o600); err != nil {
				t.Fatal(err)
			}
		}, "FAIL store cannot be opened", "ok network"},
		{"somebody works there", nil, func(t *testing.T, d *doctor) {
			addTiny(t, d.cfg)
			data, err := OpenData(d.cfg.Data)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { data.Close() })
		}, "warn store another process has", "ok network"},
		{"budgets fit", nil, func(_ *testing.T, d *doctor) { d.cfg.Budget.limits = budgetLimits{disk: 100 << 30, memory: 4 << 30} }, "", "ok budget disk 100.0 GiB"},
		{"disk", nil, func(_ *testing.T, d *doctor) { d.cfg.Budget.limits.disk = 101 << 30 }, "warn budget budget.disk gives 101.0 GiB more, and 100.0 GiB are free set it to 50.0 GiB", "ok network"},
		{"memory", nil, func(_ *testing.T, d *doctor) { d.cfg.Budget.limits.memory = 5 << 30 }, "warn budget budget.memory gives 5.0 GiB more", "ok network"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			d := inNetwork(t, tt.bootstrap...)
			tt.spoil(t, d)
			bad, fine := complaints(t, d.examine())
			if (tt.bad == "") != (bad == "") || !strings.Contains(bad, tt.bad) {
				t.Errorf("complaints %q, want %q", bad, tt.bad)
			}
			if !strings.Contains(fine, tt.fine) {
				t.Errorf("fine:\n%s\nwant %q", fine, tt.fine)
			}
		})
	}
}

func TestTryDial(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	if err := tryDial("tcp", l.Addr().String()); err != nil {
		t.Error(err)
	}
	l.Close()
	if err := tryDial("tcp", l.Addr().String()); err == nil {
		t.Error("a closed port answers")
	}
}

func TestFindingsArePrintable(t *testing.T) {
	var out strings.Builder
	if _, err := WriteFindings(&out, []Finding{{Name: "a", Severity: SeverityWarn, Text: "x", Why: "a peer said \x1b[2J"}}); err != nil {
		t.Fatal(err)
	}
	if strings.Contains(out.String(), "\x1b") || !strings.Contains(out.String(), "said") {
		t.Errorf("%q", out.String())
	}
}
