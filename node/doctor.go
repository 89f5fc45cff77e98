package node

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/multiformats/go-multiaddr"
	manet "github.com/multiformats/go-multiaddr/net"

	"kvasird/ggml/gguf"
	"kvasird/node/api"
	"kvasird/node/client"
)

// Severity orders findings.
type Severity string

// The severities. Only SeverityFail keeps a node from working.
const (
	SeverityOK   Severity = "ok"
	SeverityWarn Severity = "warn"
	SeverityFail Severity = "FAIL"
)

// Finding is what the doctor says of one thing. Why, Fix and Cost are empty for
// what is fine.
type Finding struct {
	Name     string
	Severity Severity
	Text     string // what is
	Why      string
	Fix      string // what to do
	Cost     string // what it costs to leave it
}

// RuntimeFacts is what the doctor is told of llama.cpp; the daemon fills it.
type RuntimeFacts struct {
	Err      error    // why the runtime does not open, nil when it does; the rest is then empty
	Release  string   // of llama.cpp, "llama.cpp v0.5.0"
	LibDir   string   // folder of the libraries
	Variant  string   // CPU variant in use, "haswell"
	Features []string // CPU features that it uses, "AVX2"
	Devices  []DeviceFact
}

// DeviceFact is a device that can compute.
type DeviceFact struct {
	Name        string
	Description string
	FreeBytes   uint64
	TotalBytes  uint64
}

// What the doctor finds too little.
const (
	leastMemory = 256 << 20 // beyond the model file
	leastDisk   = 1 << 30
)

// doctor is one examination. The fields that are functions are the machine's
// answers, replaced in tests.
type doctor struct {
	cfg      Config
	runtime  RuntimeFacts
	now      time.Time
	cores    int
	synced   func() (bool, error)             // the clock, by the kernel
	memory   func() (free int64, err error)   // bytes that can be used without swapping
	disk     func(dir string) (int64, error)  // free bytes
	listen   func(network, addr string) error // tries a port
	dial     func(network, addr string) error // tries to connect
	answered bool                             // a daemon runs with this configuration
	reach    *api.Reach                       // how it is connected; nil without a network file
	findings []Finding
}

// Examine looks at this machine as a node with that configuration would need
// it. It changes nothing but binds the ports for a moment.
func Examine(ctx context.Context, cfg Config, rt RuntimeFacts, cores int) []Finding {
	st, err := client.New(cfg.Control).Status(ctx)
	d := &doctor{
		cfg: cfg, runtime: rt, now: time.Now(), cores: cores, synced: clockSynced, memory: availableMemory,
		disk: freeDisk, listen: tryListen, dial: tryDial, answered: err == nil,
	}
	if d.answered {
		d.reach = st.Reach
	}
	return d.examine()
}

func (d *doctor) examine() []Finding {
	for _, check := range []func(){
		d.checkDaemon, d.checkLibraries, d.checkDevices, d.checkThreads, d.checkModel,
		d.checkData, d.checkDisk, d.checkPorts, d.checkAccess, d.checkNetwork, d.checkClock,
	} {
		check()
	}
	return d.findings
}

func (d *doctor) add(f Finding) { d.findings = append(d.findings, f) }

func (d *doctor) ok(name, format string, args ...any) {
	d.add(Finding{Name: name, Severity: SeverityOK, Text: fmt.Sprintf(format, args...)})
}

func (d *doctor) checkDaemon() {
	if d.answered {
		d.ok("daemon", "answers at %s", d.cfg.Control)
		return
	}
	d.ok("daemon", "not running; looked from outside")
}

func (d *doctor) checkLibraries() {
	if err := d.runtime.Err; err != nil {
		d.add(Finding{Name: "libraries", Severity: SeverityFail, Text: "llama.cpp does not load", Why: err.Error(),
			Fix: "run make deps, then make build", Cost: "no model can run here"})
		return
	}
	d.ok("libraries", "%s in %s", d.runtime.Release, d.runtime.LibDir)
	if d.runtime.Variant == "" {
		d.add(Finding{Name: "cpu", Severity: SeverityFail, Text: "no library for this CPU was loaded",
			Why: "there is no libggml-cpu-*.so that fits in " + d.runtime.LibDir, Fix: "run make deps", Cost: "nothing can be computed"})
		return
	}
	d.ok("cpu", "%s", strings.TrimSpace("variant "+d.runtime.Variant+" "+strings.Join(d.runtime.Features, " ")))
}

func (d *doctor) checkDevices() {
	for _, v := range d.runtime.Devices {
		if v.TotalBytes == 0 {
			d.ok("device", "%s: %s", v.Name, v.Description)
			continue
		}
		d.ok("device", "%s: %s, %s of %s free", v.Name, v.Description, bytesText(int64(v.FreeBytes)), bytesText(int64(v.TotalBytes)))
	}
}

func (d *doctor) checkThreads() {
	if d.cfg.Threads <= d.cores {
		d.ok("threads", "%d of %d cores", d.cfg.Threads, d.cores)
		return
	}
	d.add(Finding{Name: "threads", Severity: SeverityWarn, Text: fmt.Sprintf("%d on %d cores", d.cfg.Threads, d.cores),
		Why: "compute threads wait for each other at every step", Fix: fmt.Sprintf("set threads = %d", d.cores),
		Cost: "many times slower, as soon as the machine does anything else"})
}

// checkModel compares the model's bytes on disk, holes left out, with the
// memory: what is not in the file is never loaded.
func (d *doctor) checkModel() {
	free, err := d.memory()
	if err != nil {
		d.add(Finding{Name: "memory", Severity: SeverityWarn, Text: "cannot be told", Why: err.Error()})
		return
	}
	var need int64
	if path := d.cfg.Model.Path; path != "" {
		if need, err = modelBytes(path); err != nil {
			d.add(Finding{Name: "model", Severity: SeverityFail, Text: path + " cannot be used", Why: err.Error(),
				Fix: "correct model.path, or bring the file again", Cost: "the node has nothing to run or serve"})
			return
		}
		d.ok("model", "%s, %s on disk", path, bytesText(need))
	}
	if free >= need+leastMemory || d.answered {
		d.ok("memory", "%s available", bytesText(free))
		return
	}
	d.add(Finding{Name: "memory", Severity: SeverityWarn, Text: bytesText(free) + " available",
		Why: fmt.Sprintf("the whole model needs %s", bytesText(need+leastMemory)),
		Fix: "serve a smaller [[slice]], use a backbone file (kvasir gguf backbone), or end other programs", Cost: "loading may fail, or the machine swaps"})
}

func (d *doctor) checkData() {
	info, err := os.Stat(d.cfg.Data)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		d.ok("data", "%s will be made", d.cfg.Data)
	case err != nil:
		d.add(Finding{Name: "data", Severity: SeverityFail, Text: d.cfg.Data + " cannot be read", Why: err.Error(), Fix: "choose another folder with --data"})
	case !info.IsDir():
		d.add(Finding{Name: "data", Severity: SeverityFail, Text: d.cfg.Data + " is no folder", Fix: "choose another with --data"})
	case info.Mode().Perm()&0o022 != 0:
		d.add(Finding{Name: "data", Severity: SeverityFail, Text: fmt.Sprintf("%s has mode %04o", d.cfg.Data, info.Mode().Perm()),
			Why: "others could swap the node's key", Fix: "chmod 700 " + d.cfg.Data})
	default:
		d.ok("data", "%s", d.cfg.Data)
	}
}

// folder is the state folder or, before it is made, the nearest one above.
func (d *doctor) folder() string {
	dir := d.cfg.Data
	for {
		if _, err := os.Stat(dir); err == nil || dir == filepath.Dir(dir) {
			return dir
		}
		dir = filepath.Dir(dir)
	}
}

func (d *doctor) checkDisk() {
	dir := d.folder()
	free, err := d.disk(dir)
	if err != nil {
		d.add(Finding{Name: "disk", Severity: SeverityWarn, Text: "cannot be told", Why: err.Error()})
		return
	}
	if free >= leastDisk {
		d.ok("disk", "%s free at %s", bytesText(free), dir)
		return
	}
	d.add(Finding{Name: "disk", Severity: SeverityWarn, Text: fmt.Sprintf("%s free at %s", bytesText(free), dir),
		Fix: "free some, or choose another folder with --data", Cost: "logs and models may not be written"})
}

func (d *doctor) checkPorts() {
	if d.answered {
		d.ok("ports", "held by the running daemon")
		return
	}
	addrs := map[string]string{} // host:port → key of the configuration
	var order []string
	note := func(network, addr, key string) {
		order = append(order, network+" "+addr)
		addrs[network+" "+addr] = key
	}
	for _, s := range d.cfg.Listen {
		if network, addr, ok := dialArgs(s); ok {
			note(network, addr, "listen")
		}
	}
	for _, own := range [][2]string{{"http", d.cfg.HTTP}, {"lane", d.cfg.Lane}} {
		if own[1] != Off {
			note("tcp", own[1], own[0])
		}
	}
	busy := false
	for _, a := range order {
		network, addr, _ := strings.Cut(a, " ")
		if err := d.listen(network, addr); err != nil {
			busy = true
			d.add(Finding{Name: "ports", Severity: SeverityFail, Text: a + " cannot be used", Why: err.Error(),
				Fix: fmt.Sprintf("end the program that has it, or set another %s", addrs[a]), Cost: "kvasird does not start"})
		}
	}
	if !busy {
		d.ok("ports", "free: %s", strings.Join(order, ", "))
	}
}

// dialArgs gives the network and address of a multiaddr.
func dialArgs(s string) (network, addr string, ok bool) {
	a, err := multiaddr.NewMultiaddr(s)
	if err != nil {
		return "", "", false
	}
	// Only the transport counts: /udp/4001/quic-v1 binds /udp/4001.
	transport, _ := multiaddr.SplitFunc(a, func(c multiaddr.Component) bool {
		return !slices.Contains([]int{multiaddr.P_IP4, multiaddr.P_IP6, multiaddr.P_DNS, multiaddr.P_DNS4, multiaddr.P_DNS6,
			multiaddr.P_TCP, multiaddr.P_UDP}, c.Protocol().Code)
	})
	network, addr, err = manet.DialArgs(transport)
	return strings.TrimRight(network, "46"), addr, err == nil
}

func tryListen(network, addr string) error {
	if network == "udp" {
		c, err := net.ListenPacket(network, addr)
		if err != nil {
			return err
		}
		return c.Close()
	}
	l, err := net.Listen(network, addr)
	if err != nil {
		return err
	}
	return l.Close()
}

// releaseYear is when this program was written: no sane clock shows less.
const releaseYear = 2026

func (d *doctor) checkClock() {
	if d.now.Year() < releaseYear {
		d.add(Finding{Name: "clock", Severity: SeverityFail, Text: "shows " + d.now.UTC().Format(time.DateTime),
			Why: "it was never set", Fix: "set it, and turn on time synchronisation", Cost: "peers refuse what this node signs"})
		return
	}
	synced, err := d.synced()
	if err == nil && !synced {
		d.add(Finding{Name: "clock", Severity: SeverityWarn, Text: "is not synchronised", Why: "the kernel knows no time source",
			Fix: "turn on time synchronisation (on Debian: apt-get install systemd-timesyncd)", Cost: "it drifts until peers disagree with this node"})
		return
	}
	d.ok("clock", "%s UTC", d.now.UTC().Format(time.DateTime))
}

// modelBytes is what all files of a model take on disk.
func modelBytes(path string) (total int64, err error) {
	m, err := gguf.OpenModel(path)
	if err != nil {
		return 0, err
	}
	defer m.Close()
	for _, p := range m.Parts() {
		info, err := os.Stat(p.Path)
		if err != nil {
			return 0, err
		}
		total += bytesOnDisk(info)
	}
	return total, nil
}

// bytesOnDisk leaves the holes of a sparse file out.
func bytesOnDisk(info fs.FileInfo) int64 {
	if st, ok := info.Sys().(*syscall.Stat_t); ok {
		return min(st.Blocks*512, info.Size())
	}
	return info.Size()
}

func bytesText(n int64) string {
	switch {
	case n >= 1<<30:
		return fmt.Sprintf("%.1f GiB", float64(n)/(1<<30))
	case n >= 1<<20:
		return fmt.Sprintf("%.1f MiB", float64(n)/(1<<20))
	}
	return fmt.Sprintf("%d bytes", n)
}

// WriteFindings prints findings for a person and says whether none failed.
func WriteFindings(w io.Writer, findings []Finding) (ok bool, err error) {
	count := map[Severity]int{}
	var b strings.Builder
	for _, f := range findings {
		count[f.Severity]++
		fmt.Fprintf(&b, " %-4s  %-10s %s\n", f.Severity, f.Name, f.Text)
		for _, part := range [][2]string{{"why", f.Why}, {"fix", f.Fix}, {"cost", f.Cost}} {
			if part[1] != "" {
				fmt.Fprintf(&b, "       %-10s %s\n", "  "+part[0], part[1])
			}
		}
	}
	fmt.Fprintf(&b, "\n%d to fix, %d to consider, %d fine\n", count[SeverityFail], count[SeverityWarn], count[SeverityOK])
	_, err = io.WriteString(w, printable(b.String()))
	return count[SeverityFail] == 0, err
}
