package node

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"sync"
	"time"

	"github.com/libp2p/go-libp2p/core/peer"

	"kvasird/ggml/store"
	"kvasird/p2p"
	"kvasird/p2p/fetch"
)

const (
	rawProtocol = "bench-raw/1"
	rawPiece    = 256 << 10 // bytes of a frame

	// What is asked of rawProtocol: a frame, whose id is where in the file to begin.
	pourNothing uint8 = 1 // frames with whatever is in them
	pourFile    uint8 = 2 // frames with the model's bytes

	downloadBytes = 128 << 20
	memoryDir     = "/dev/shm"
)

// downloadLines are what lies between each peer and the one that downloads.
var downloadLines = []struct {
	name string
	line line
}{{"loopback", line{}}, {"200 Mbit/s, 5 ms", line{rtt: 5 * time.Millisecond, rate: 200e6 / 8}}}

// downloads measures how fast a part of a model comes from several peers, verified, to
// memory and to the disk, against lanes from the same peers that carry as many bytes: raw
// ones, of which nothing is read nor kept, and copying ones, from file to file. All hosts
// are in this process.
func (b *bench) downloads() error {
	path, err := b.realModel()
	if err != nil {
		return err
	}
	d := &download{bench: b}
	defer d.Close()
	if err := d.open(path, 4); err != nil {
		return err
	}
	fmt.Fprintf(b.out, "\n### Download of %s, verified, against raw lanes from the same peers\n\n"+
		"All hosts share the %d cores of this machine with the verification. Raw: read and dropped. Copied: from file to file, unverified. "+
		"Memory: files in %s. Disk: until all is durable. Opening the lanes takes no round trips of the line.\n\n",
		bytesText(downloadBytes), runtime.NumCPU(), memoryDir)
	t := newTable(b.out, "line to each", "peers", "raw MB/s", "copied MB/s", "verified MB/s", "CPU of each, ns/byte", "of the machine in use", "of copied", "of raw", "wanted", "", "to disk MB/s", "of raw")
	for _, l := range downloadLines {
		d.line = l.line
		for _, n := range []int{1, 2, 4} {
			row, err := d.row(n)
			if err != nil {
				return fmt.Errorf("%s, %d peers: %w", l.name, n, err)
			}
			t.row(append([]string{l.name, strconv.Itoa(n)}, row...)...)
		}
	}
	return t.Flush()
}

// row measures with n peers, each way in turn.
func (d *download) row(n int) ([]string, error) {
	ways := []func() (mbps float64, err error){
		func() (float64, error) { return d.pourAll(n, pourNothing) },
		func() (float64, error) { return d.pourAll(n, pourFile) },
		func() (float64, error) { return d.fetch(n, memoryDir, false) },
		func() (float64, error) { return d.fetch(n, d.dir, true) },
	}
	const raw, copied, memory, disk = 0, 1, 2, 3
	rates, costs := make([][]float64, len(ways)), make([][]float64, len(ways))
	var busy []float64
	all := &crew{} // this process alone
	for range d.Rounds {
		for i, way := range ways {
			own, machine, err := all.cpu()
			if err != nil {
				return nil, err
			}
			mbps, err := way()
			if err != nil {
				return nil, err
			}
			ownAfter, machineAfter, err := all.cpu()
			if err != nil {
				return nil, err
			}
			rates[i] = append(rates[i], mbps)
			costs[i] = append(costs[i], float64((ownAfter-own).Nanoseconds())/downloadBytes)
			if i == memory {
				busy = append(busy, machineAfter.busySince(machine))
			}
		}
	}
	ratio := medianRatio(rates[memory], rates[raw])
	verdict := atLeast(ratio, 0.8)
	if ratio < 0.8 && median(busy) >= coresFull {
		verdict[1] = "cores full"
	}
	rate := func(i int) string { return fmt.Sprintf("%.0f", median(rates[i])) }
	row := []string{rate(raw), rate(copied), rate(memory),
		fmt.Sprintf("%.1f / %.1f / %.1f", median(costs[raw]), median(costs[copied]), median(costs[memory])), fmt.Sprintf("%.0f %%", 100*median(busy)),
		fmt.Sprintf("%.2f", medianRatio(rates[memory], rates[copied])), fmt.Sprintf("%.2f", ratio)}
	return append(append(row, verdict...), rate(disk), fmt.Sprintf("%.2f", medianRatio(rates[disk], rates[raw]))), nil
}

// download is a model on some hosts and one that fetches it.
type download struct {
	*bench
	held  *store.Store
	model *store.Model
	hosts []*p2p.Host
	near  *p2p.Host
	line  line           // to each of hosts
	lines sync.WaitGroup // of connections that are open
}

func (d *download) open(path string, peers int) (err error) {
	if d.held, err = store.Open(filepath.Join(d.dir, "held"), 0); err != nil {
		return err
	}
	if d.model, err = d.held.Import(d.ctx, []string{path}, nil); err != nil {
		return err
	}
	var addrs []string
	for range peers {
		h, err := d.host(nil)
		if err != nil {
			return err
		}
		d.hosts = append(d.hosts, h)
		addrs = append(addrs, h.Addrs()[0])
	}
	if d.near, err = d.host(addrs); err != nil {
		return err
	}
	for _, h := range d.hosts {
		if err := awaitPeer(d.ctx, d.near, h.ID()); err != nil {
			return err
		}
	}
	return nil
}

// host starts a host that gives the model, and raw bytes.
func (d *download) host(peers []string) (*p2p.Host, error) {
	identity, err := p2p.NewIdentity()
	if err != nil {
		return nil, err
	}
	h, err := p2p.New(p2p.Config{Identity: identity, Network: "kvasir", Pack: Pack(d.rt), Agent: "kvasird-bench",
		Listen: []string{"/ip4/127.0.0.1/tcp/0"}, Peers: peers})
	if err != nil {
		return nil, err
	}
	server := fetch.NewServer(fetch.ServerConfig{Library: library{d.held}})
	return h, errors.Join(
		h.HandleStream(fetch.Protocol, func(_ *p2p.Peer, c p2p.Conn) { server.Serve(d.ctx, c) }),
		h.HandleStream(rawProtocol, d.pour), h.Start())
}

// awaitPeer waits until a peer is greeted.
func awaitPeer(ctx context.Context, h *p2p.Host, id peer.ID) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	for h.Peer(id) == nil {
		select {
		case <-ctx.Done():
			return fmt.Errorf("peer %s is not greeted: %w", id, ctx.Err())
		case <-time.After(10 * time.Millisecond):
		}
	}
	return nil
}

// pour writes frames until the reader leaves.
func (d *download) pour(_ *p2p.Peer, c p2p.Conn) {
	defer c.Close()
	asked, err := p2p.NewFrameReader(c, 0).Next()
	if err != nil {
		return
	}
	w := p2p.NewFrameWriter(c, rawPiece)
	for off := int64(asked.ID); ; off += rawPiece {
		p, err := w.Payload(rawPiece)
		if err == nil && asked.Type == pourFile {
			_, err = d.model.ReadAt(0, p, off)
		}
		if err != nil || w.Send(1, 0, 1) != nil {
			return
		}
	}
}

// pourAll reads downloadBytes from lanes of n peers, and writes what is of a file to one.
func (d *download) pourAll(n int, what uint8) (mbps float64, err error) {
	f, err := os.CreateTemp(memoryDir, "kvasir-bench-")
	if err != nil {
		return 0, err
	}
	defer os.Remove(f.Name())
	defer f.Close()
	errs := make([]error, n)
	var all sync.WaitGroup
	share := int64(downloadBytes / n)
	began := time.Now()
	for i, h := range d.hosts[:n] {
		all.Go(func() { errs[i] = d.drain(h.ID(), what, int64(i)*share, share, f) })
	}
	all.Wait()
	return sinceMbps(began), errors.Join(errs...)
}

func sinceMbps(began time.Time) float64 { return downloadBytes / 1e6 / time.Since(began).Seconds() }

func (d *download) drain(id peer.ID, what uint8, off, size int64, f *os.File) error {
	c, err := d.near.OpenLane(d.ctx, id, rawProtocol)
	if err != nil {
		return err
	}
	if c, err = d.over(c); err != nil {
		return err
	}
	defer c.Close()
	if !c.Lane() {
		return fmt.Errorf("no lane to peer %s", id)
	}
	if err := p2p.NewFrameWriter(c, 0).Write(p2p.Frame{Type: what, ID: uint64(off)}); err != nil {
		return err
	}
	r := p2p.NewFrameReader(c, rawPiece)
	for end := off + size; off < end; off += rawPiece {
		frame, err := r.Next()
		if err == nil && what == pourFile {
			_, err = f.WriteAt(frame.Payload, off)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// over has what goes through a lane go over the line too.
func (d *download) over(lane p2p.Conn) (p2p.Conn, error) {
	if d.line == (line{}) {
		return lane, nil
	}
	near, far, err := delayedPair(0)
	if err != nil {
		return nil, errors.Join(err, lane.Close())
	}
	d.lines.Go(func() { bridge(d.ctx, far, netConn{lane}, d.line) })
	return overLine{near, lane}, nil
}

// overLine is the end of a line behind which a lane is.
type overLine struct {
	net.Conn
	lane p2p.Conn
}

func (c overLine) Remote() peer.ID { return c.lane.Remote() }
func (c overLine) Lane() bool      { return c.lane.Lane() }

// lineSource is a source at the other end of a line.
type lineSource struct {
	fetch.Source
	d *download
}

func (s lineSource) Open(ctx context.Context) (p2p.Conn, error) {
	c, err := s.Source.Open(ctx)
	if err != nil {
		return nil, err
	}
	return s.d.over(c)
}

// fetch fetches downloadBytes from n peers into a new store below dir; durable: and waits
// until the disk has them.
func (d *download) fetch(n int, dir string, durable bool) (mbps float64, err error) {
	dir, err = os.MkdirTemp(dir, "kvasir-bench-")
	if err != nil {
		return 0, err
	}
	defer os.RemoveAll(dir)
	st, err := store.Open(dir, 0)
	if err != nil {
		return 0, err
	}
	defer st.Close()
	m, err := st.Create(d.model.ID(), d.model.Files())
	if err != nil {
		return 0, err
	}
	var sources []fetch.Source
	for _, h := range d.hosts[:n] {
		sources = append(sources, lineSource{fetch.FromPeer(d.near, h.ID()), d})
	}
	want := map[int][]store.Span{0: {{Len: downloadBytes}}}
	began := time.Now()
	err = fetch.NewClient(fetch.ClientConfig{}).Fetch(d.ctx, fetch.Request{
		Model: m.ID(), Sink: shelf{m}, Spans: fetchSpans(want), Sources: func() []fetch.Source { return sources },
	})
	if err == nil && durable {
		err = m.Flush()
	}
	mbps = sinceMbps(began)
	if err == nil && len(m.Missing(0, want[0])) > 0 {
		err = errors.New("the download is not complete")
	}
	return mbps, err
}

func (d *download) Close() error {
	var errs []error
	for _, h := range append(d.hosts, d.near) {
		if h != nil {
			errs = append(errs, h.Close())
		}
	}
	d.lines.Wait()
	if d.held != nil {
		errs = append(errs, d.held.Close())
	}
	return errors.Join(errs...)
}
