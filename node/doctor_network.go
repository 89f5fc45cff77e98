package node

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"kvasird/ggml/store"
	"kvasird/node/api"
)

const (
	// doctorDial bounds the attempt to connect to a bootstrap.
	doctorDial = 2 * time.Second
	// doctorContacts bounds the bootstraps that are tried, and the peers that are named.
	doctorContacts = 16
)

// checkNetwork asks the running daemon how it is connected or, when none runs,
// tries what one would need.
func (d *doctor) checkNetwork() {
	switch {
	case d.answered && d.reach != nil:
		d.checkPeers()
		d.checkMulticast()
		d.checkContacts("bootstrap", d.reach.Bootstrap)
		d.checkContacts("relay", d.reach.Relays)
		d.checkNAT()
	case !d.answered && d.cfg.Genesis != nil:
		d.ok("network", "%s in %s, %s", d.cfg.Genesis.ID(), d.cfg.Network, d.cfg.Genesis.Admission)
		d.checkBootstraps()
		d.checkStore()
		d.checkBudget()
	}
}

func (d *doctor) checkPeers() {
	r := d.reach
	advice := strings.Join(r.Advice, "; ")
	switch {
	case r.DirectPeers+r.RelayedPeers == 0:
		setDefault(&advice, "start another node with this network file, or add the address of one that runs as bootstrap")
		d.add(Finding{Name: "network", Severity: SeverityWarn, Text: "connected to nobody", Why: d.whyAlone(), Fix: advice,
			Cost: "nothing is shared: only what is here can be computed"})
		return
	case advice != "":
		d.add(Finding{Name: "network", Severity: SeverityWarn, Text: peerCounts(r), Why: "it could be better", Fix: advice})
	default:
		d.ok("network", "%s", peerCounts(r))
	}
	if why := contactErrors(r.Unmet); len(why) > 0 {
		d.add(Finding{Name: "peers", Severity: SeverityWarn, Text: fmt.Sprintf("%d found and not connected", len(r.Unmet)), Why: strings.Join(why, "; "),
			Fix: "see why: a peer that has a limit lets others in later, one that refuses this node says what it wants", Cost: "what they hold is not used here"})
	}
}

// whyAlone says why no peer is connected.
func (d *doctor) whyAlone() string {
	why := contactErrors(slices.Concat(d.reach.Bootstrap, d.reach.Relays, d.reach.Unmet))
	if len(why) == 0 {
		return "nobody was found yet; local network: " + d.reach.MDNS
	}
	return strings.Join(why, "; ")
}

// contactErrors says why some of those who are not connected are not.
func contactErrors(list []api.Contact) (out []string) {
	for _, c := range list {
		if c.State != api.PeerConnected && c.Error != "" && len(out) < doctorContacts {
			out = append(out, fmt.Sprintf("%s: %s", c.ID, strings.Join(strings.Fields(c.Error), " ")))
		}
	}
	return out
}

func peerCounts(r *api.Reach) string {
	return fmt.Sprintf("%d peers connected directly, %d through a relay", r.DirectPeers, r.RelayedPeers)
}

// checkMulticast goes by the words of p2p.Report.
func (d *doctor) checkMulticast() {
	if m := d.reach.MDNS; strings.HasPrefix(m, "failed") || strings.Contains(m, "multicast may be blocked") {
		d.add(Finding{Name: "multicast", Severity: SeverityWarn, Text: "does not work here", Why: m,
			Fix: "let UDP port 5353 through the firewall, or add the address of a node on this network as bootstrap", Cost: "nodes on the local network are not found by themselves"})
		return
	}
	d.ok("multicast", "%s", d.reach.MDNS)
}

func (d *doctor) checkContacts(name string, list []api.Contact) {
	up := 0
	for _, c := range list {
		if c.State == api.PeerConnected {
			up++
			continue
		}
		why := strings.Join(strings.Fields(c.Error), " ")
		setDefault(&why, "the first attempt is still running")
		d.add(Finding{Name: name, Severity: SeverityWarn, Text: fmt.Sprintf("%s is not connected (%s)", c.ID, strings.Join(c.Addrs, ", ")), Why: why,
			Fix: "see that it runs, that its address in the network file is right, and that a firewall lets connections out"})
	}
	if up > 0 {
		d.ok(name, "%d of %d connected", up, len(list))
	}
}

// checkNAT goes by the words of p2p.Report.
func (d *doctor) checkNAT() {
	r := d.reach
	const forward = "let the router pass the port of listen on to this machine and name the outer address with --tell"
	symmetric, private := strings.HasPrefix(r.NAT, "symmetric"), strings.HasPrefix(r.Reach, "private")
	switch {
	case symmetric:
		d.add(Finding{Name: "nat", Severity: SeverityWarn, Text: "connections through it need a relay", Why: r.NAT, Fix: forward, Cost: "answers are slower"})
	case r.RelayedPeers > 0 && r.DirectPeers == 0:
		d.add(Finding{Name: "nat", Severity: SeverityWarn, Text: "all peers are reached through a relay", Why: "nat: " + r.NAT, Fix: forward, Cost: "answers are slower"})
	case private && len(r.Relayed) == 0:
		d.add(Finding{Name: "nat", Severity: SeverityWarn, Text: "nobody can connect to this node", Why: r.Reach,
			Fix: forward + ", or start a member with a public address with --role relay", Cost: "only nodes that this one connects to work with it"})
	default:
		d.ok("nat", "%s; reached: %s", r.NAT, r.Reach)
	}
}

// checkBootstraps tries the TCP addresses by which a node would come in.
func (d *doctor) checkBootstraps() {
	list := slices.Concat(d.cfg.Genesis.Contact.Bootstrap, d.cfg.Peers)
	switch {
	case len(list) == 0 && d.cfg.MDNS == Off:
		d.add(Finding{Name: "bootstrap", Severity: SeverityWarn, Text: "none", Why: "neither the network file nor peers name a node, and mdns is off",
			Fix: "add the address of a node that is always on to bootstrap in " + d.cfg.Network, Cost: "this node finds nobody"})
		return
	case len(list) == 0:
		d.ok("bootstrap", "none: nodes on the local network find each other")
		return
	}
	list = list[:min(len(list), doctorContacts)]
	errs := make([]error, len(list))
	tried := make([]bool, len(list))
	var all sync.WaitGroup
	for i, s := range list {
		network, addr, ok := dialArgs(s)
		if !ok || network != "tcp" {
			continue
		}
		tried[i] = true
		all.Go(func() { errs[i] = d.dial(network, addr) })
	}
	all.Wait()
	for i, s := range list {
		switch {
		case !tried[i]:
			d.ok("bootstrap", "%s not tried: it is not TCP", s)
		case errs[i] != nil:
			d.add(Finding{Name: "bootstrap", Severity: SeverityWarn, Text: s + " does not answer", Why: errs[i].Error(),
				Fix: "see that it runs, that the address is right, and that a firewall lets connections out", Cost: "this node comes in by others, or not at all"})
		default:
			d.ok("bootstrap", "%s answers", s)
		}
	}
}

func tryDial(network, addr string) error {
	c, err := net.DialTimeout(network, addr, doctorDial)
	if err != nil {
		return err
	}
	return c.Close()
}

// checkStore opens the store, if there is one and nobody works on it.
func (d *doctor) checkStore() {
	if _, err := os.Stat(filepath.Join(d.cfg.Data, storeName)); errors.Is(err, fs.ErrNotExist) {
		d.ok("store", "none yet")
		return
	}
	data, err := OpenData(d.cfg.Data)
	if errors.Is(err, ErrDataBusy) {
		d.add(Finding{Name: "store", Severity: SeverityWarn, Text: "another process has " + d.cfg.Data, Why: "no daemon answers at " + d.cfg.Control,
			Fix: "wait until it has started, or the command has ended; else end it"})
		return
	}
	if err != nil {
		return // checkData says why
	}
	defer data.Close()
	st, err := openStore(d.cfg)
	if err != nil {
		d.add(Finding{Name: "store", Severity: SeverityFail, Text: "cannot be opened", Why: err.Error(),
			Fix: "correct that, or choose another folder with --data", Cost: "kvasird does not start"})
		return
	}
	defer st.Close()
	d.checkModels(st)
}

func (d *doctor) checkModels(st *store.Store) {
	problems := st.Problems()
	for _, m := range st.Models() {
		if err := m.Err(); err != nil {
			problems = append(problems, fmt.Errorf("%s: %w", m.Name(), err))
		}
	}
	for _, err := range problems {
		d.add(Finding{Name: "store", Severity: SeverityWarn, Text: "a model cannot be used", Why: err.Error(),
			Fix: "bring the file back and `kvasir model add` it, or `kvasir model remove` the model", Cost: "peers cannot fetch it from here"})
	}
	used, _ := st.Used()
	d.ok("store", "%d models, %s on disk", len(st.Models()), bytesText(used))
}

// checkBudget compares what this node gives with what there is.
func (d *doctor) checkBudget() {
	limits := d.cfg.Budget.limits
	for _, b := range []struct {
		key          string
		limit, taken int64
		free         func() (int64, error)
	}{
		{"disk", limits.disk, storeBytes(filepath.Join(d.cfg.Data, storeName)), func() (int64, error) { return d.disk(d.folder()) }},
		{"memory", limits.memory, 0, d.memory},
	} {
		free, err := b.free()
		if b.limit == 0 || err != nil { // half of what is free, or said elsewhere
			continue
		}
		if left := b.limit - b.taken; left > free {
			d.add(Finding{Name: "budget", Severity: SeverityWarn, Text: fmt.Sprintf("budget.%s gives %s more, and %s are free", b.key, bytesText(left), bytesText(free)),
				Fix: fmt.Sprintf("set it to %s or less", bytesText(b.taken+free/2)), Cost: "downloads stop half-way, or the machine runs out"})
			continue
		}
		d.ok("budget", "%s %s", b.key, bytesText(b.limit))
	}
}

// storeBytes is what the files of a store take of its budget.
func storeBytes(dir string) (n int64) {
	filepath.WalkDir(dir, func(_ string, e fs.DirEntry, err error) error {
		if err == nil && e.Type().IsRegular() && !store.Kept(e.Name()) {
			if info, err := e.Info(); err == nil {
				n += bytesOnDisk(info)
			}
		}
		return nil // what cannot be read does not count
	})
	return n
}
