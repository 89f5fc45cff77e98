//go:build nettest && linux

package p2p_test

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/libp2p/go-libp2p/core/peer"
	manet "github.com/multiformats/go-multiaddr/net"

	"kvasird/p2p"
)

// A node under test reads JSON lines on its standard input: a nodeSpec, then requests. It
// writes answers and events, one a line, to its standard output and its log to standard
// error. It closes its host and ends when its input does.

// nodePage is what a node's web server serves.
const nodePage = "a page of the node\n"

// nodeSpec is the part of p2p.Config that tests set.
type nodeSpec struct {
	Identity string   // file
	Listen   []string // nil: TCP and QUIC on port 4001 of the site's addresses
	Lanes    string   // where lanes are listened for; "": port 4002 of the site's IPv4 addresses
	NoLane   bool
	Peers, Bootstrap, Relays,
	Announce []string
	MDNS, DHT, Relay bool
	Reach            p2p.Reach
	Remember         string
	CertPEM, KeyPEM  []byte // of …/tls/ws listeners; CertPEM is also the authority of all
	Crowd            int    // so many more hosts in this process, with the same Peers
}

type request struct {
	ID  int
	Op  string
	Arg json.RawMessage
}

// message is an answer (ID set) or an event.
type message struct {
	ID     int             `json:",omitempty"`
	Error  string          `json:",omitempty"`
	Result json.RawMessage `json:",omitempty"`
	Event  *nodeEvent      `json:",omitempty"`
}

type nodeEvent struct {
	What string    // "up", "ready", "lost", "heard"
	Peer peer.ID   // for "up", the node itself
	Addr string    // "ready": where the peer is connected
	Text string    // "heard": what the peer published
	Path p2p.Path  // "ready"
	At   time.Time // on the clock of the machine, which all nodes share
}

type echoArg struct {
	Peer  peer.ID
	Size  int
	Count int
	Lane  bool
}

// besideArg asks for round trips on a stream beside a download.
type besideArg struct {
	Peer  peer.ID
	Size  int // of a round trip
	Count int
	Bulk  bool // the download has a connection of its own, if it can
}

// besideResult says what came of it.
type besideResult struct {
	Lane  bool // the download had one
	Bytes int64
	Over  time.Duration
	Times []time.Duration
}

// child is the node under test.
type child struct {
	host *p2p.Host
	news *p2p.Topic

	mu  sync.Mutex // guards out
	out *json.Encoder
}

func nodeMain() int {
	// 198.18.0.0/15 plays the public internet, so libp2p must not know it as reserved.
	isPlayground := func(n *net.IPNet) bool { return n.String() == "198.18.0.0/15" }
	manet.Unroutable4 = slices.DeleteFunc(manet.Unroutable4, isPlayground)
	manet.Private4 = slices.DeleteFunc(manet.Private4, isPlayground)
	c := &child{out: json.NewEncoder(os.Stdout)}
	if err := c.run(bufio.NewReader(os.Stdin)); err != nil {
		fmt.Fprintln(os.Stderr, "node:", err)
		return 1
	}
	return 0
}

func (c *child) run(in *bufio.Reader) (err error) {
	requests := json.NewDecoder(in)
	var spec nodeSpec
	if err := requests.Decode(&spec); err != nil {
		return fmt.Errorf("read settings: %w", err)
	}
	if c.host, err = startNode(spec, c); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, c.host.Close()) }()
	for range spec.Crowd {
		extra := spec
		extra.Identity = ""
		h, err := startNode(extra, nil)
		if err != nil {
			return err
		}
		defer h.Close()
	}
	c.event(nodeEvent{What: "up", Peer: c.host.ID()})
	for {
		var r request
		if err := requests.Decode(&r); err == io.EOF {
			return nil
		} else if err != nil {
			return fmt.Errorf("read request: %w", err)
		}
		go c.serve(r)
	}
}

// startNode starts a host, and tells c of its events if it is not nil.
func startNode(spec nodeSpec, c *child) (*p2p.Host, error) {
	cfg := p2p.Config{
		Network: "nettest", Pack: "llama-v0.5.0/1", Agent: "kvasird/nettest", Protocols: []string{"echo/1"},
		Listen: spec.Listen, LaneListen: cmp.Or(spec.Lanes, "0.0.0.0:4002"), NoLane: spec.NoLane,
		Peers: spec.Peers, Bootstrap: spec.Bootstrap, Relays: spec.Relays, Announce: spec.Announce,
		MDNS: spec.MDNS, DHT: spec.DHT, Relay: spec.Relay, Reach: spec.Reach, Remember: spec.Remember,
		Logger: slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelDebug})),
	}
	if cfg.Listen == nil {
		cfg.Listen = []string{"/ip4/0.0.0.0/tcp/4001", "/ip4/0.0.0.0/udp/4001/quic-v1"}
	}
	var err error
	if spec.Identity != "" {
		cfg.Identity, err = p2p.LoadOrCreateIdentity(spec.Identity)
	} else {
		cfg.Identity, err = p2p.NewIdentity()
	}
	if err != nil {
		return nil, err
	}
	if spec.CertPEM != nil {
		cert, err := tls.X509KeyPair(spec.CertPEM, spec.KeyPEM)
		if err != nil {
			return nil, err
		}
		cfg.TLS = &tls.Config{Certificates: []tls.Certificate{cert}, RootCAs: x509.NewCertPool()}
		cfg.TLS.RootCAs.AppendCertsFromPEM(spec.CertPEM)
	}
	if slices.ContainsFunc(cfg.Listen, func(a string) bool { return strings.HasSuffix(a, "/ws") }) {
		cfg.HTTP = http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, nodePage) })
	}
	h, err := p2p.New(cfg)
	if err != nil {
		return nil, err
	}
	echo := func(_ *p2p.Peer, c p2p.Conn) { io.Copy(c, c) }
	if err := errors.Join(h.HandleStream("echo/1", echo), h.HandleStream("gift/1", give)); err != nil {
		return nil, err
	}
	if c != nil {
		h.Watch(c)
		c.news, err = h.JoinTopic(p2p.TopicConfig{Name: "news", MaxBody: 1024, Handle: c.hear})
		if err != nil {
			return nil, err
		}
	}
	return h, h.Start()
}

func (c *child) send(m message) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.out.Encode(m); err != nil {
		fmt.Fprintln(os.Stderr, "node: write:", err)
	}
}

func (c *child) event(e nodeEvent) {
	e.At = time.Now()
	c.send(message{Event: &e})
}

func (c *child) PeerReady(p *p2p.Peer) {
	c.event(nodeEvent{What: "ready", Peer: p.ID, Addr: p.Addr, Path: p.Path()})
}

func (c *child) PeerLost(p *p2p.Peer) { c.event(nodeEvent{What: "lost", Peer: p.ID}) }

func (c *child) hear(e p2p.Envelope) {
	c.event(nodeEvent{What: "heard", Peer: e.From, Text: string(e.Body)})
}

func (c *child) serve(r request) {
	m := message{ID: r.ID}
	result, err := c.do(r.Op, r.Arg)
	if err == nil {
		m.Result, err = json.Marshal(result)
	}
	if err != nil {
		m.Error = err.Error()
	}
	c.send(m)
}

func (c *child) do(op string, arg json.RawMessage) (any, error) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	switch op {
	case "addrs":
		return c.host.Addrs(), nil
	case "publish":
		return nil, c.news.Publish([]byte(unquote(arg)), 10*time.Minute)
	case "provide":
		return nil, c.host.Provide(ctx, unquote(arg))
	case "find":
		found, err := c.host.FindProviders(ctx, unquote(arg), 10)
		var addrs []string
		for _, ai := range found {
			for _, a := range ai.Addrs {
				addrs = append(addrs, fmt.Sprintf("%s/p2p/%s", a, ai.ID))
			}
		}
		return addrs, err
	case "rtt":
		var id peer.ID
		if err := json.Unmarshal(arg, &id); err != nil {
			return nil, err
		}
		if p := c.host.Peer(id); p != nil {
			return p.RTT(), nil
		}
		return nil, fmt.Errorf("peer %s is not ready", id)
	case "report":
		return c.host.Report(), nil
	case "echo":
		var e echoArg
		if err := json.Unmarshal(arg, &e); err != nil {
			return nil, err
		}
		return c.echo(ctx, e)
	case "beside":
		var b besideArg
		if err := json.Unmarshal(arg, &b); err != nil {
			return nil, err
		}
		return c.beside(ctx, b)
	}
	return nil, fmt.Errorf("no operation %q", op)
}

// beside measures round trips while the peer sends as much as it can.
func (c *child) beside(ctx context.Context, b besideArg) (r besideResult, err error) {
	open := c.host.OpenStream
	if b.Bulk {
		open = c.host.OpenBulk
	}
	down, err := open(ctx, b.Peer, "gift/1")
	if err != nil {
		return r, err
	}
	r.Lane = down.Lane()
	begin := time.Now()
	flows, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		buf := make([]byte, 64<<10)
		for r.Bytes < giftBytes {
			n, err := down.Read(buf)
			if err != nil {
				return
			}
			if was := r.Bytes; was < giftWarm && was+int64(n) >= giftWarm {
				close(flows)
			}
			r.Bytes += int64(n)
		}
	}()
	select {
	case <-flows:
		r.Times, err = c.echo(ctx, echoArg{Peer: b.Peer, Size: b.Size, Count: b.Count})
	case <-ended:
		err = errors.New("the download ended")
	}
	down.Close()
	<-ended
	r.Over = time.Since(begin)
	return r, err
}

const (
	giftBytes = 1 << 32 // more than anybody waits for
	giftWarm  = 4 << 20 // bytes after which a download is at its rate
)

// give writes until nobody reads.
func give(_ *p2p.Peer, c p2p.Conn) {
	chunk := make([]byte, 256<<10)
	for range giftBytes / len(chunk) {
		if _, err := c.Write(chunk); err != nil {
			return
		}
	}
}

func unquote(arg json.RawMessage) (s string) {
	json.Unmarshal(arg, &s)
	return s
}

// echo has a peer send back frames of a size, one after the other, and returns how long
// each round trip took.
func (c *child) echo(ctx context.Context, e echoArg) ([]time.Duration, error) {
	open := c.host.OpenStream
	if e.Lane {
		open = c.host.OpenLane
	}
	conn, err := open(ctx, e.Peer, "echo/1")
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	deadline, _ := ctx.Deadline()
	if err := conn.SetDeadline(deadline); err != nil {
		return nil, err
	}
	return echoTimes(conn, e.Size, e.Count)
}

func echoTimes(rw io.ReadWriter, size, count int) ([]time.Duration, error) {
	sent := bytes.Repeat([]byte("kvasir.."), size/8+1)[:size]
	got := make([]byte, size)
	times := make([]time.Duration, 0, count)
	for range count {
		start := time.Now()
		failed := make(chan error, 1)
		go func() { _, err := rw.Write(sent); failed <- err }()
		_, err := io.ReadFull(rw, got)
		if err := errors.Join(err, <-failed); err != nil {
			return times, err
		}
		times = append(times, time.Since(start))
		if !bytes.Equal(sent, got) {
			return times, errors.New("the echo differs")
		}
	}
	return times, nil
}
