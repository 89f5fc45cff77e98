//go:build nettest && linux

package p2p_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"
)

const netnsDir = "/run/netns"

// world is an internet of the test's own: a router, "wan", to which sites are attached.
//
//	public site:  198.18.n.2/30 ── 198.18.n.1 wan
//	behind a NAT: 10.77.n.x/24 ── 10.77.n.1, 198.18.n.2/30 ── 198.18.n.1 wan
type world struct {
	t     testing.TB
	name  string // of this world, the prefix of its namespaces
	dir   string // files of the nodes
	sites int
}

var worlds atomic.Int32

func newWorld(t testing.TB) *world {
	t.Helper()
	w := &world{t: t, name: fmt.Sprintf("w%d", worlds.Add(1)), dir: t.TempDir()}
	w.addNamespace(w.wan())
	w.nft(w.wan(), "add table ip kv")
	return w
}

// site is a network namespace with one machine or router in it.
type site struct {
	w     *world
	ns    string
	n     int    // of the public network
	addr  string // IPv4
	hosts int    // behind a NAT
}

func (w *world) wan() string { return w.name + "-wan" }

// public attaches a machine with a public address.
func (w *world) public(name string, l link) *site {
	w.t.Helper()
	w.sites++
	s := &site{w: w, ns: w.name + "-" + name, n: w.sites, addr: fmt.Sprintf("198.18.%d.2", w.sites)}
	w.addNamespace(s.ns)
	wanEnd := fmt.Sprintf("to%d", s.n)
	if l == (link{}) {
		w.ip("", "link add %s netns %s type veth peer name up0 netns %s", wanEnd, w.wan(), s.ns)
	} else {
		w.delayline(w.wan(), wanEnd, s.ns, "up0", l)
	}
	w.ip(w.wan(), "addr add 198.18.%d.1/30 dev %s\nlink set %s up", s.n, wanEnd, wanEnd)
	w.ip(s.ns, "addr add %s/30 dev up0\nlink set up0 up\nroute add default via 198.18.%d.1", s.addr, s.n)
	return s
}

// Rules of NATs. Where the kernel has br_netfilter, the LAN's own traffic passes kfwd too.
// Packets to the NAT itself are dropped, or an early packet of a peer that
// punches would take the port that the NAT's own connection wants.
const (
	natRules = `table ip kv {
		chain kpost { type nat hook postrouting priority srcnat; oifname "up0" %s; }
		chain kfwd { type filter hook forward priority filter; policy drop; ct state established,related accept; iifname "lan0" accept; }
		chain kinp { type filter hook input priority filter; policy accept; iifname "up0" ct state new drop; }
	}`
	// remapRules are of a router behind whose interface to%[1]d the address %[2]s is.
	remapRules = `table ip kv {
		chain kpre { type nat hook prerouting priority dstnat; ip daddr %[2]s udp dport 31001 dnat to %[2]s:4001; }
		chain kpost { type nat hook postrouting priority srcnat; ip saddr %[2]s udp sport 4001 snat to %[2]s:31001; }
		chain kremap { type filter hook forward priority filter; policy accept; oifname "to%[1]d" meta l4proto udp ct state new ct status != dnat drop; }
	}`
	// webOnly is added where nothing but TCP to port 443 gets out.
	webOnly = `table ip kv {
		chain kweb { type filter hook forward priority -10; policy accept; oifname "up0" udp dport 1-65535 drop; oifname "up0" tcp dport != 443 drop; }
	}`
)

type natKind string

const (
	cone      natKind = "masquerade"              // keeps the port, whatever the destination
	symmetric natKind = "masquerade fully-random" // another port for each destination
)

// nat attaches a NAT router with a LAN behind it.
func (w *world) nat(name string, kind natKind, l link) *site {
	w.t.Helper()
	s := w.public(name, l)
	w.ip(s.ns, "link add lan0 type bridge mcast_snooping 0\naddr add 10.77.%d.1/24 dev lan0\nlink set lan0 up", s.n)
	w.nft(s.ns, fmt.Sprintf(natRules, kind))
	return s
}

// host attaches a machine to the LAN of a NAT.
func (s *site) host(name string) *site {
	s.w.t.Helper()
	s.hosts++
	h := &site{w: s.w, ns: s.w.name + "-" + name, n: s.n, addr: fmt.Sprintf("10.77.%d.%d", s.n, s.hosts+1)}
	s.w.addNamespace(h.ns)
	s.w.ip("", "link add lan%d netns %s type veth peer name eth0 netns %s", s.hosts, s.ns, h.ns)
	s.w.ip(s.ns, "link set lan%d master lan0\nlink set lan%d up", s.hosts, s.hosts)
	s.w.ip(h.ns, "addr add %s/24 dev eth0\nlink set eth0 up\nroute add default via 10.77.%d.1", h.addr, s.n)
	return h
}

// remapping attaches a machine with a public address whose provider gives its UDP another
// port, 31001 for 4001. To the port 4001 itself nothing gets through.
func (w *world) remapping(name string, l link) *site {
	w.t.Helper()
	s := w.public(name, l)
	w.nft(w.wan(), fmt.Sprintf(remapRules, s.n, s.addr))
	return s
}

// cut drops every packet between sites until the returned function is called. Nobody is
// told: connections just fall silent.
func (w *world) cut() (mend func()) {
	w.t.Helper()
	w.nft(w.wan(), `table ip kv { chain kcut { type filter hook forward priority -20; policy drop; }; }`)
	return func() { w.nft(w.wan(), "delete chain ip kv kcut") }
}

// addNamespace makes one that routes, without IPv6, and deletes it when the test ends.
func (w *world) addNamespace(ns string) {
	w.t.Helper()
	w.ip("", "netns add %s", ns)
	w.t.Cleanup(func() { w.ip("", "netns del %s", ns) })
	w.ip(ns, "link set lo up")
	err := inNamespace(ns, func() error {
		if err := os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0); err != nil {
			return err
		}
		err := os.WriteFile("/proc/sys/net/ipv6/conf/all/disable_ipv6", []byte("1"), 0)
		if os.IsNotExist(err) {
			return nil
		}
		return err
	})
	if err != nil {
		w.t.Fatal(err)
	}
}

// ip has ip(8) run one command a line, in a namespace or where the tests are.
func (w *world) ip(ns, format string, args ...any) {
	w.t.Helper()
	cmd := []string{"-batch", "-"}
	if ns != "" {
		cmd = append([]string{"-n", ns}, cmd...)
	}
	lines := fmt.Sprintf(format, args...)
	w.check("ip "+strings.Join(cmd, " ")+": "+lines, pipe(lines, "ip", cmd...))
}

// nft loads rules in a namespace.
func (w *world) nft(ns, rules string) {
	w.t.Helper()
	w.check("nft in "+ns+": "+rules, inNamespace(ns, func() error { return pipe(rules, "nft", "-f", "-") }))
}

func (w *world) check(what string, err error) {
	w.t.Helper()
	if err != nil {
		w.t.Fatalf("%s: %v", what, err)
	}
}

func pipe(input, name string, args ...string) error {
	cmd := exec.Command(name, args...)
	cmd.Stdin = strings.NewReader(input)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%w: %s", err, out)
	}
	return nil
}

// inNamespace runs f on a thread in the namespace. Sockets that f opens and processes that
// it starts stay there.
func inNamespace(ns string, f func() error) error {
	done := make(chan error, 1)
	go func() {
		// Never unlocked: the thread ends with the goroutine, nobody else gets it.
		runtime.LockOSThread()
		done <- func() error {
			h, err := os.Open(filepath.Join(netnsDir, ns))
			if err != nil {
				return err
			}
			defer h.Close()
			if err := unix.Setns(int(h.Fd()), unix.CLONE_NEWNET); err != nil {
				return fmt.Errorf("enter namespace %s: %w", ns, err)
			}
			return f()
		}()
	}()
	return <-done
}
