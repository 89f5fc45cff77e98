package p2p

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"time"

	"github.com/libp2p/go-libp2p/core/peer"
	"github.com/libp2p/zeroconf/v2"
	ma "github.com/multiformats/go-multiaddr"
)

// On a local network nodes find each other by DNS-SD (RFC 6763) over multicast. The service
// is named after the network, the instance is random, and as in libp2p's discovery each
// text record holds one address: "dnsaddr=" and a multiaddr that ends in /p2p/ID. Records
// of others are only a hint where a peer may be: the hello decides.
const (
	mdnsDomain  = "local"
	mdnsPrefix  = "dnsaddr="
	mdnsPort    = 4001 // the records need one; only the text counts
	maxMDNSText = 16   // addresses of one node
	maxTXT      = 255  // bytes of one text, a limit of DNS
	mdnsQueue   = 64   // answers not looked at yet

	// mdnsRetry is when to begin again after a failure or when the addresses changed.
	mdnsRetry = 30 * time.Second
)

// mdnsService is the service name of a network: a label may have 15 letters, digits and
// hyphens (RFC 6335), so the network id is hashed.
func mdnsService(network string) string {
	sum := sha256.Sum256([]byte("/kvasir/" + network))
	return "_kv-" + hex.EncodeToString(sum[:6]) + "._udp"
}

// mdns announces this node on the local network and reports who else is there.
type mdns struct {
	h     *Host
	found func(peer.AddrInfo)

	mu     sync.Mutex // guards what follows
	err    error      // why it does not work; nil: it does
	echo   bool       // the own announcement came back: multicast works here
	others map[peer.ID]struct{}
}

// run announces and browses until ctx ends, and begins again after a failure.
func (m *mdns) run(ctx context.Context) {
	for ctx.Err() == nil {
		err := m.once(ctx)
		if ctx.Err() != nil {
			return
		}
		m.mu.Lock()
		changed := err != nil && m.err == nil
		m.err = err
		m.mu.Unlock()
		if changed {
			m.h.cfg.Logger.Warn("cannot find peers on the local network", "err", err)
		}
		select {
		case <-time.After(mdnsRetry):
		case <-ctx.Done():
		}
	}
}

func (m *mdns) failure() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.err
}

// describe says for Report whether it works.
func (m *mdns) describe() string {
	m.mu.Lock()
	defer m.mu.Unlock()
	switch {
	case m.err != nil:
		return fmt.Sprintf("failed: %v", m.err)
	case len(m.others) > 0:
		return fmt.Sprintf("on: %d nodes heard", len(m.others))
	case m.echo:
		return "on: nobody else heard; a network that drops multicast looks like that too"
	default:
		return "on: nothing heard, not even this node itself: multicast may be blocked"
	}
}

// once announces and browses until ctx ends, something fails, or the addresses change.
func (m *mdns) once(ctx context.Context) error {
	ifaces, traffic, err := multicastInterfaces()
	if err != nil {
		return err
	}
	texts, ips, err := m.records()
	if err != nil {
		return err
	}
	instance := make([]byte, 20)
	rand.Read(instance)
	name := hex.EncodeToString(instance)
	service := mdnsService(m.h.cfg.Network)
	server, err := zeroconf.RegisterProxy(name, service, mdnsDomain, mdnsPort, name, ips, texts, ifaces)
	if err != nil {
		return fmt.Errorf("announce by multicast: %w", err)
	}
	defer server.Shutdown()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	m.mu.Lock()
	m.err = nil
	m.mu.Unlock()
	entries := make(chan *zeroconf.ServiceEntry, mdnsQueue)
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() {
		for e := range entries {
			m.hear(e)
		}
	})
	wg.Go(func() { m.cancelOnChange(ctx, cancel, texts) })
	err = zeroconf.Browse(ctx, service, mdnsDomain, entries, zeroconf.SelectIPTraffic(traffic), zeroconf.SelectIfaces(ifaces))
	cancel()
	if err != nil && !errors.Is(err, context.Canceled) {
		return fmt.Errorf("browse by multicast: %w", err)
	}
	return nil
}

// cancelOnChange ends an announcement whose addresses are no longer ours.
func (m *mdns) cancelOnChange(ctx context.Context, cancel context.CancelFunc, said []string) {
	tick := time.NewTicker(mdnsRetry)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		now, _, err := m.records()
		if err != nil || strings.Join(now, " ") != strings.Join(said, " ") {
			cancel()
			return
		}
	}
}

// multicastInterfaces are those to use, and the versions of IP that work on one of them:
// browsing on both fails when one does not work.
func multicastInterfaces() ([]net.Interface, zeroconf.IPType, error) {
	all, err := net.Interfaces()
	if err != nil {
		return nil, 0, err
	}
	var out []net.Interface
	var traffic zeroconf.IPType
	for _, i := range all {
		if i.Flags&net.FlagUp == 0 || i.Flags&net.FlagMulticast == 0 {
			continue
		}
		addrs, err := i.Addrs()
		if err != nil || len(addrs) == 0 {
			continue
		}
		out = append(out, i)
		for _, a := range addrs {
			if n, ok := a.(*net.IPNet); ok && n.IP.To4() != nil {
				traffic |= zeroconf.IPv4
			} else if ok {
				traffic |= zeroconf.IPv6
			}
		}
	}
	if len(out) == 0 {
		return nil, 0, errors.New("no network interface takes multicast")
	}
	return out, traffic, nil
}

// records are the texts to announce and the IP addresses in them.
func (m *mdns) records() (texts, ips []string, err error) {
	addrs, err := m.h.node.Network().InterfaceListenAddresses()
	if err != nil {
		return nil, nil, err
	}
	// A multicast goes no further than the link.
	if near := within(onLink, addrs); len(near) > 0 {
		addrs = near
	}
	for _, a := range addrs {
		ip, isIP := firstIP(a)
		text := fmt.Sprintf("%s%s/p2p/%s", mdnsPrefix, a, m.h.ID())
		_, isWS := protocolOf(a, ma.P_WS)
		if !isIP || isCircuit(a) || isWS || len(text) > maxTXT || len(texts) == maxMDNSText {
			continue
		}
		texts, ips = append(texts, text), append(ips, ip)
	}
	if len(texts) == 0 {
		return nil, nil, errors.New("no TCP or QUIC listener whose address could be announced")
	}
	return texts, ips, nil
}

func firstIP(a ma.Multiaddr) (string, bool) {
	if v, ok := protocolOf(a, ma.P_IP4); ok {
		return v, true
	}
	return protocolOf(a, ma.P_IP6)
}

// count notes who was heard and reports whether it is another node.
func (m *mdns) count(id peer.ID) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if id == m.h.ID() {
		m.echo = true
		return false
	}
	if len(m.others) < maxCandidates {
		m.others[id] = struct{}{}
	}
	return true
}

// hear takes the addresses from an answer.
func (m *mdns) hear(e *zeroconf.ServiceEntry) {
	for _, ai := range parseMDNS(e.Text) {
		if m.count(ai.ID) {
			m.found(ai)
		}
	}
}

// parseMDNS reads text records; what is no address is left aside.
func parseMDNS(texts []string) []peer.AddrInfo {
	var addrs []ma.Multiaddr
	for _, text := range texts[:min(len(texts), maxMDNSText)] {
		s, ok := strings.CutPrefix(text, mdnsPrefix)
		if !ok || len(text) > maxTXT {
			continue
		}
		a, err := ma.NewMultiaddr(s)
		if err != nil {
			continue
		}
		if bare, id := peer.SplitAddr(a); id != "" && bare != nil && !isCircuit(bare) {
			addrs = append(addrs, a)
		}
	}
	infos, err := peer.AddrInfosFromP2pAddrs(addrs...)
	if err != nil {
		return nil
	}
	return infos
}
