package node

import (
	"context"
	"errors"
	"fmt"
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

	downloadBytes = 128 << 20
	memoryDir     = "/dev/shm"
)

// downloads measures how fast a part of a model comes from several peers, verified, to
// memory and to the disk, against lanes from the same peers that carry as many bytes and do
// nothing with them. All hosts are in this process.
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
	fmt.Fprintf(b.out, "\n### Download of %s, verified, against raw lanes from the same peers\n\nAll hosts share the %d cores of this machine with the verification. To memory: to a file in %s.\n\n",
		bytesText(downloadBytes), runtime.NumCPU(), memoryDir)
	t := newTable(b.out, "peers", "raw MB/s", "to memory MB/s", "of raw", "wanted", "", "to disk MB/s", "of raw")
	for _, n := range []int{1, 2, 4} {
		var raws, memory, disk []float64
		for range b.Rounds {
			raw, err := d.raw(n)
			if err != nil {
				return err
			}
			fast, err := d.fetch(n, memoryDir)
			if err != nil {
				return err
			}
			slow, err := d.fetch(n, d.dir)
			if err != nil {
				return err
			}
			raws, memory, disk = append(raws, raw), append(memory, fast), append(disk, slow)
		}
		ratio := medianRatio(memory, raws)
		row := append([]string{strconv.Itoa(n), fmt.Sprintf("%.0f", median(raws)), fmt.Sprintf("%.0f", median(memory)),
			fmt.Sprintf("%.2f", ratio)}, atLeast(ratio, 0.8)...)
		t.row(append(row, fmt.Sprintf("%.0f", median(disk)), fmt.Sprintf("%.2f", medianRatio(disk, raws)))...)
	}
	return t.Flush()
}

// download is a model on some hosts and one that fetches it.
type download struct {
	*bench
	held  *store.Store
	model *store.Model
	hosts []*p2p.Host
	near  *p2p.Host
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
		h.HandleStream(rawProtocol, pour), h.Start())
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
func pour(_ *p2p.Peer, c p2p.Conn) {
	defer c.Close()
	w := p2p.NewFrameWriter(c, rawPiece)
	for {
		if _, err := w.Payload(rawPiece); err != nil || w.Send(1, 0, 1) != nil {
			return
		}
	}
}

// raw reads downloadBytes from lanes of n peers, and gives MB/s.
func (d *download) raw(n int) (float64, error) {
	errs := make([]error, n)
	var all sync.WaitGroup
	began := time.Now()
	for i, h := range d.hosts[:n] {
		all.Go(func() { errs[i] = d.drain(h.ID(), downloadBytes/n/rawPiece) })
	}
	all.Wait()
	return downloadBytes / 1e6 / time.Since(began).Seconds(), errors.Join(errs...)
}

func (d *download) drain(id peer.ID, frames int) error {
	c, err := d.near.OpenLane(d.ctx, id, rawProtocol)
	if err != nil {
		return err
	}
	defer c.Close()
	if !c.Lane() {
		return fmt.Errorf("no lane to peer %s", id)
	}
	r := p2p.NewFrameReader(c, rawPiece)
	for range frames {
		if _, err := r.Next(); err != nil {
			return err
		}
	}
	return nil
}

// fetch fetches downloadBytes from n peers into a new store below dir, and gives MB/s.
func (d *download) fetch(n int, dir string) (float64, error) {
	dir, err := os.MkdirTemp(dir, "kvasir-bench-")
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
		sources = append(sources, fetch.FromPeer(d.near, h.ID()))
	}
	want := map[int][]store.Span{0: {{Len: downloadBytes}}}
	began := time.Now()
	err = fetch.NewClient(fetch.ClientConfig{}).Fetch(d.ctx, fetch.Request{
		Model: m.ID(), Sink: shelf{m}, Spans: fetchSpans(want), Sources: func() []fetch.Source { return sources },
	})
	took := time.Since(began)
	if err == nil && len(m.Missing(0, want[0])) > 0 {
		err = errors.New("the download is not complete")
	}
	return downloadBytes / 1e6 / took.Seconds(), err
}

func (d *download) Close() error {
	var errs []error
	for _, h := range append(d.hosts, d.near) {
		if h != nil {
			errs = append(errs, h.Close())
		}
	}
	if d.held != nil {
		errs = append(errs, d.held.Close())
	}
	return errors.Join(errs...)
}
