package node

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"kvasird/ggml/gguf"
	"kvasird/market"
	"kvasird/p2p"
	"kvasird/settle"
)

var pricedModel = gguf.ModelID{3}

// mint is who settles in a test: it signs records that follow each other.
type mint struct {
	t    *testing.T
	id   p2p.Identity
	key  ed25519.PrivateKey
	last *market.PriceRecord
}

func newMint(t *testing.T) *mint {
	t.Helper()
	id, err := p2p.NewIdentity()
	if err != nil {
		t.Fatal(err)
	}
	return &mint{t: t, id: id, key: id.PrivateKey()}
}

// next is the record of the next epoch.
func (m *mint) next() []byte {
	m.t.Helper()
	rules := market.RulesOf(settle.DefaultParams())
	now := uint64(time.Now().Unix())
	r := market.PriceRecord{Network: settle.Hash{1}, Model: pricedModel, Rules: rules, Sequence: 1,
		State: rules.Start(0, 300_000_000_000), Ref: market.Reference{PerFiat: 5_000_000, Set: now - 60}, Issued: now}
	if m.last != nil {
		load := market.Load{Counted: 900, Capacity: 1000, Heard: true}
		state, err := rules.Next(m.last.State, m.last.State.Epoch+1, load)
		if err != nil {
			m.t.Fatal(err)
		}
		hash, err := m.last.Hash()
		if err != nil {
			m.t.Fatal(err)
		}
		r.State, r.Load, r.Previous, r.Ref, r.Issued = state, load, hash, m.last.Ref, m.last.Issued+1
	}
	m.last = &r
	return m.sign(r)
}

func (m *mint) sign(r market.PriceRecord) []byte {
	m.t.Helper()
	b, err := r.Sign(m.key)
	if err != nil {
		m.t.Fatal(err)
	}
	return b
}

// priceNode is a host that follows prices.
type priceNode struct {
	*prices
	host *p2p.Host
	file string
	stop func()
}

// follow starts a node; with a mint's identity it is the publisher.
func (m *mint) follow(file string, publisher bool, change func(*pricesConfig), peers ...*priceNode) *priceNode {
	m.t.Helper()
	id := m.id
	if !publisher {
		var err error
		if id, err = p2p.NewIdentity(); err != nil {
			m.t.Fatal(err)
		}
	}
	cfg := p2p.Config{Identity: id, Network: "prices", Pack: "p/1", Agent: "test", Protocols: []string{pricesProtocol},
		Listen: []string{"/ip4/127.0.0.1/tcp/0"}, NoLane: true}
	for _, p := range peers {
		cfg.Peers = append(cfg.Peers, p.host.Addrs()[0])
	}
	h, err := p2p.New(cfg)
	if err != nil {
		m.t.Fatal(err)
	}
	pc := pricesConfig{Host: h, Network: settle.Hash{1}, Publisher: m.id.ID(), File: file, Logger: slog.New(slog.DiscardHandler)}
	if change != nil {
		change(&pc)
	}
	p, err := openPrices(pc)
	if err != nil {
		m.t.Fatal(err)
	}
	if err := h.Start(); err != nil {
		m.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var loop sync.WaitGroup
	loop.Go(func() { p.run(ctx) })
	n := &priceNode{prices: p, host: h, file: file, stop: sync.OnceFunc(func() { cancel(); loop.Wait(); h.Close() })}
	m.t.Cleanup(n.stop)
	return n
}

// knows waits until a node has the mint's last record.
func (m *mint) knows(p *priceNode) {
	m.t.Helper()
	want, err := m.last.Hash()
	if err != nil {
		m.t.Fatal(err)
	}
	m.within("a node has the last record", func() bool {
		_, hash, err := p.Price(pricedModel)
		return err == nil && hash == want
	})
}

func (m *mint) within(what string, ok func() bool) {
	m.t.Helper()
	for end := time.Now().Add(60 * time.Second); !ok(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			m.t.Fatalf("not within a minute: %s", what)
		}
	}
}

// TestPricesReachEverybody has records reach a node that is connected, one that only knows that
// node, and one that comes later; each remembers them.
func TestPricesReachEverybody(t *testing.T) {
	m := newMint(t)
	dir := t.TempDir()
	settles := m.follow(filepath.Join(dir, "a"), true, nil)
	near := m.follow(filepath.Join(dir, "b"), false, nil, settles)
	far := m.follow(filepath.Join(dir, "c"), false, nil, near)
	for range 3 {
		settles.Publish(m.next())
	}
	m.knows(near)
	m.knows(far)
	late := m.follow(filepath.Join(dir, "d"), false, nil, far)
	m.knows(late)
	for _, n := range []*priceNode{settles, near, far, late} {
		n.stop()
		m.knows(m.follow(n.file, n == settles, nil)) // alone, from its file
	}
	if shown := near.shown(pricedModel, time.Now()); shown == nil || shown.Epoch != 2 || shown.Trouble != "" ||
		shown.Million != (shown.Raw*5_000_000+999_999_999_999)/1_000_000_000_000 {
		t.Errorf("shown %+v", shown)
	}
	if shown := near.shown(gguf.ModelID{}, time.Now()); shown != nil {
		t.Errorf("of an unknown model: %+v", shown)
	}
}

// TestPriceGapIsFilled has a node that missed more records than a list holds get them from another
// one, which does not settle.
func TestPriceGapIsFilled(t *testing.T) {
	m := newMint(t)
	dir := t.TempDir()
	first := m.next()
	behind := m.follow(filepath.Join(dir, "behind"), false, nil)
	if _, err := behind.take([][]byte{first}); err != nil {
		t.Fatal(err)
	}
	other := m.follow(filepath.Join(dir, "other"), false, nil)
	other.take([][]byte{first})
	for range 2*maxPriceList + 5 {
		if news, err := other.take([][]byte{m.next()}); !news || err != nil {
			t.Fatal(news, err)
		}
	}
	_, newest, _ := other.Price(pricedModel)
	if _, hash, _ := behind.Price(pricedModel); hash == newest {
		t.Fatal("not behind")
	}
	behind.take(other.records(gguf.ModelID{}, 0, true))
	if shown := behind.shown(pricedModel, time.Now()); shown == nil || !strings.Contains(shown.Trouble, "missing") {
		t.Errorf("shown %+v, want that some are missing", shown)
	}
	ai, err := p2p.ParsePeer(other.host.Addrs()[0])
	if err == nil {
		_, err = behind.host.Hello(t.Context(), ai)
	}
	if err == nil {
		err = behind.fetch(t.Context(), other.host.ID())
	}
	if err != nil {
		t.Fatal(err)
	}
	m.knows(behind)
	if shown := behind.shown(pricedModel, time.Now()); shown.Trouble != "" {
		t.Errorf("shown %+v", shown)
	}
}

// TestPublisherFillsFromHistory has a publisher that lost what it remembers of the last records
// tell them from its history, and one that goes back refuse to.
func TestPublisherFillsFromHistory(t *testing.T) {
	m := newMint(t)
	file := filepath.Join(t.TempDir(), "a")
	var all [][]byte
	for range 5 {
		all = append(all, m.next())
	}
	history := func(id gguf.ModelID, after uint64, most int) ([][]byte, error) {
		from := min(int(after)+1, len(all))
		return all[from:min(len(all), from+most)], nil
	}
	p := m.follow(file, true, func(c *pricesConfig) { c.History = history })
	p.Publish(all[0])
	p.Publish(all[4])
	m.knows(p)
	twin := *m.last
	twin.Issued++
	p.Publish(m.sign(twin))
	m.knows(p) // a contradiction is not told, and does not end the model
	if got := p.records(pricedModel, 1, false); !slices.EqualFunc(got, all[2:], bytes.Equal) {
		t.Errorf("%d records after epoch 1", len(got))
	}
	other := m.follow(filepath.Join(t.TempDir(), "b"), false, nil)
	other.Publish(all[0])
	if _, _, err := other.Price(pricedModel); !errors.Is(err, market.ErrNoPrice) {
		t.Errorf("who does not settle published: %v", err)
	}
}

// TestForkedPricesEnd has two records of one epoch, told to two nodes, reach both as evidence.
func TestForkedPricesEnd(t *testing.T) {
	m := newMint(t)
	dir := t.TempDir()
	a := m.follow(filepath.Join(dir, "a"), false, nil)
	b := m.follow(filepath.Join(dir, "b"), false, nil, a)
	first := m.next()
	twin := *m.last
	twin.Ref.PerFiat++
	a.take([][]byte{first})
	b.take([][]byte{m.sign(twin)})
	m.within("connected", func() bool { return b.host.Peer(a.host.ID()) != nil && a.host.Peer(b.host.ID()) != nil })
	if err := b.fetch(t.Context(), a.host.ID()); err != nil {
		t.Fatal(err)
	}
	if err := a.fetch(t.Context(), b.host.ID()); err != nil {
		t.Fatal(err)
	}
	for _, n := range []*priceNode{a, b} {
		n.stop()
		again := m.follow(n.file, false, nil)
		for _, n := range []*priceNode{n, again} {
			if _, _, err := n.Price(pricedModel); !errors.Is(err, market.ErrPriceFork) {
				t.Errorf("%v, want a fork", err)
			}
			if shown := n.shown(pricedModel, time.Now()); shown == nil || !strings.Contains(shown.Trouble, "do not pay") {
				t.Errorf("shown %+v", shown)
			}
		}
	}
}

func TestPriceFileThatIsBad(t *testing.T) {
	m := newMint(t)
	dir := t.TempDir()
	h, err := p2p.New(p2p.Config{Identity: m.id, Network: "prices", Pack: "p/1", Agent: "test", NoLane: true})
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	cfg := pricesConfig{Host: h, Network: settle.Hash{1}, Publisher: m.id.ID(), Logger: slog.New(slog.DiscardHandler)}
	zeros := strings.Repeat("0", 62)
	for name, text := range map[string]string{
		"not JSON":     "{",
		"not a record": `{"network":"01` + zeros + `","records":["AAAA"]}`,
	} {
		cfg.File = filepath.Join(dir, name)
		if err := os.WriteFile(cfg.File, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := openPrices(cfg); err == nil || !strings.Contains(err.Error(), cfg.File) || !strings.Contains(err.Error(), "remove it") {
			t.Errorf("%s: %v", name, err)
		}
	}
	cfg.File = filepath.Join(dir, "of another network")
	if err := os.WriteFile(cfg.File, []byte(`{"network":"02`+zeros+`","records":["AAAA"]}`), 0o600); err != nil {
		t.Fatal(err)
	}
	if p, err := openPrices(cfg); err != nil || len(p.book.Models()) != 0 {
		t.Errorf("of another network: %v", err)
	}
	cfg.Publisher = "nobody"
	if _, err := openPrices(cfg); err == nil || !strings.Contains(err.Error(), "who settles") {
		t.Errorf("no publisher: %v", err)
	}
}
