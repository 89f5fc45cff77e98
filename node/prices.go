package node

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/libp2p/go-libp2p/core/peer"
	"golang.org/x/time/rate"

	"kvasird/ggml/gguf"
	"kvasird/market"
	"kvasird/node/cashier"
	"kvasird/p2p"
	"kvasird/settle"
)

const (
	// priceValidity is how long an envelope of prices counts, and priceAgain when it is sent
	// again, so that there is always one for who comes.
	priceValidity = time.Hour
	priceAgain    = 20 * time.Minute
	// pricePause is between two envelopes.
	pricePause = 3 * time.Second
)

// pricesConfig says whose prices these are. The first five fields are required.
type pricesConfig struct {
	Host      *p2p.Host
	Network   settle.Hash
	Publisher peer.ID // who settles: its key signs the records
	File      string  // where they are remembered
	Logger    *slog.Logger
	// History gives records of long ago, like After of a market.PriceBook; nil: those of the book
	// have to do.
	History func(id gguf.ModelID, after uint64, most int) ([][]byte, error)
}

// prices are the prices of a network with a token, as this node follows them: every node hears
// them, computes each again, and passes them on. On the node that settles, Publish makes them.
type prices struct {
	host      *p2p.Host
	publisher peer.ID
	network   settle.Hash
	file      string
	history   func(id gguf.ModelID, after uint64, most int) ([][]byte, error)
	log       *slog.Logger
	topic     *p2p.Topic
	key       settle.Key
	asks      askPaces
	wake      chan struct{} // something changed; holds one

	mu      sync.Mutex // guards what follows
	book    *market.PriceBook
	unsaved bool
	unsaid  bool // of the publisher
}

// pricesFile is what is remembered.
type pricesFile struct {
	Network string   `json:"network"` // hexadecimal
	Records [][]byte `json:"records"`
}

// startPrices follows the prices of a network with a token.
func (n *Node) startPrices() error {
	t, err := readToken(n.cfg.Genesis)
	if err != nil || t == nil {
		return err
	}
	n.exchange.prices, err = openPrices(pricesConfig{
		Host: n.host, Network: n.cfg.Genesis.Hash(), Publisher: t.peer, File: filepath.Join(n.cfg.Data, "prices.json"), Logger: n.log,
	})
	return err
}

// keepIn has the prices of a settlement on this node come from its books, those from before its
// last stop too.
func (p *prices) keepIn(ctx context.Context, books *cashier.Books, desk *cashier.Desk) error {
	p.history = func(id gguf.ModelID, after uint64, most int) ([][]byte, error) {
		return books.PriceRecords(settle.Hash(id), after, most)
	}
	terms, err := desk.Terms(ctx)
	for _, price := range terms.Prices {
		p.Publish(price.Record)
	}
	return err
}

// openPrices reads what is remembered, and takes part in telling prices. run has to be started.
func openPrices(cfg pricesConfig) (*prices, error) {
	key, err := p2p.KeyOf(cfg.Publisher)
	if err != nil {
		return nil, fmt.Errorf("who settles: %w", err)
	}
	p := &prices{
		host: cfg.Host, publisher: cfg.Publisher, network: cfg.Network, file: cfg.File, history: cfg.History, log: cfg.Logger, key: key,
		wake: make(chan struct{}, 1), book: market.NewPriceBook(cfg.Network, key),
		unsaid: cfg.Publisher == cfg.Host.ID(), asks: askPaces{by: map[peer.ID]*rate.Limiter{}},
	}
	if err := p.restore(); err != nil {
		return nil, err
	}
	if p.topic, err = cfg.Host.JoinTopic(p2p.TopicConfig{
		Name: market.PriceTopic, MaxBody: p2p.MaxBody, Check: p.check, Handle: p.hear,
	}); err != nil {
		return nil, err
	}
	return p, cfg.Host.HandleStream(pricesProtocol, p.serve)
}

// restore takes the remembered records, unless they are of another network.
func (p *prices) restore() error {
	var f pricesFile
	if err := readJSON(p.file, &f); err != nil {
		return fmt.Errorf("%s: %w: remove it to begin with the next price that is heard", p.file, err)
	}
	if f.Network != hex.EncodeToString(p.network[:]) {
		return nil
	}
	for i, r := range f.Records {
		if _, err := p.book.Take(r); err != nil && !errors.Is(err, market.ErrPriceFork) {
			return fmt.Errorf("%s: record %d: %w: remove it to begin with the next price that is heard", p.file, i, err)
		}
	}
	return nil
}

// Publish tells everybody a record that this node signed. One that does not follow those that were
// told is not told, so that no mistake of this node becomes evidence against it; those in between,
// which a crash may have kept from being told, come from the history. It may be called again, and
// neither waits nor calls the history.
func (p *prices) Publish(record []byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := p.publishLocked(record); errors.Is(err, market.ErrPriceGap) && p.history != nil {
		p.book.Take(record) // which notes that it is behind
		p.stir()
	} else if err != nil {
		p.log.Error("own price record is not told", "error", err)
	}
}

func (p *prices) publishLocked(record []byte) error {
	if p.host.ID() != p.publisher {
		return fmt.Errorf("prices are told by %s, which this node is not", p.publisher)
	}
	if err := p.book.Check(record); err != nil {
		return err
	}
	news, err := p.book.Take(record)
	if news {
		p.unsaved, p.unsaid = true, true
		p.stir()
	}
	return err
}

// fill tells what the history has beyond what was told, of the models that are behind.
func (p *prices) fill() error {
	p.mu.Lock()
	behind := p.book.Behind()
	p.mu.Unlock()
	for model, after := range behind {
		for {
			list, err := p.history(model, after, maxPriceList)
			if err != nil {
				return err
			}
			if len(list) == 0 {
				break
			}
			p.mu.Lock()
			for _, record := range list {
				err = errors.Join(err, p.publishLocked(record))
			}
			last, _, lost := p.book.Price(model)
			p.mu.Unlock()
			if err = errors.Join(err, lost); err != nil {
				return err
			}
			after = last.State.Epoch
		}
	}
	return nil
}

// Price is what a model costs now, as far as this node knows; see market.PriceBook.
func (p *prices) Price(id gguf.ModelID) (*market.PriceRecord, settle.Hash, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.book.Price(id)
}

func (p *prices) stir() {
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

// check judges an envelope of prices: by what all nodes of the network know.
func (p *prices) check(e p2p.Envelope) error {
	if e.From != p.publisher {
		return fmt.Errorf("prices are told by %s", p.publisher)
	}
	list, err := readPriceList(e.Body)
	if err != nil {
		return err
	}
	for i, r := range list {
		rec, err := market.ParsePriceRecord(r, p.key)
		if err == nil && rec.Network != p.network {
			err = market.ErrPriceNetwork
		}
		if err != nil {
			return fmt.Errorf("record %d: %w", i, err)
		}
	}
	return nil
}

// hear takes in what passed check.
func (p *prices) hear(e p2p.Envelope) {
	if list, err := readPriceList(e.Body); err == nil {
		p.take(list)
	}
}

// take takes records in, and says whether one was news. What can only be a fault of who gave them
// is the error.
func (p *prices) take(list [][]byte) (news bool, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, r := range list {
		changed, bad := p.book.Take(r)
		news = news || changed
		switch {
		case bad == nil || errors.Is(bad, market.ErrPriceOld) || errors.Is(bad, market.ErrPriceGap):
		case errors.Is(bad, market.ErrPriceFork):
			if changed {
				p.log.Error("whoever settles told two different prices: nothing is paid by them any more", "error", bad, "evidence", p.file)
			}
		case errors.Is(bad, market.ErrPriceSignature) || errors.Is(bad, market.ErrPriceFormat):
			err = bad
		default:
			p.log.Warn("price record refused", "error", bad)
		}
	}
	p.unsaved = p.unsaved || news
	if news || len(p.book.Behind()) > 0 {
		p.stir()
	}
	return news, err
}

// records answers an ask.
func (p *prices) records(id gguf.ModelID, after uint64, all bool) [][]byte {
	p.mu.Lock()
	defer p.mu.Unlock()
	if all {
		list := p.book.Newest()
		list = list[min(after, uint64(len(list))):]
		return list[:min(len(list), maxPriceList)]
	}
	if p.history != nil {
		list, err := p.history(id, after, maxPriceList)
		if err == nil {
			return list
		}
		p.log.Error("old price records cannot be read", "model", id.String(), "error", err)
	}
	return p.book.After(id, after, maxPriceList)
}

// run remembers what is heard, has the publisher repeat what it said, and fetches what lacks,
// until ctx ends.
func (p *prices) run(ctx context.Context) {
	var said, sought time.Time
	for {
		p.save()
		next := priceSeek
		switch now := time.Now(); {
		case p.host.ID() == p.publisher:
			if p.history != nil {
				if err := p.fill(); err != nil {
					p.log.Error("own price records are not told", "error", err)
				}
			}
			if p.isUnsaid() || now.Sub(said) >= priceAgain {
				p.say(ctx)
				said = now
			}
			next = priceAgain
			if p.isUnsaid() {
				next = pricePause
			}
		case now.Sub(sought) >= priceSeek && p.lacks(now):
			p.seek(ctx)
			sought = now
		}
		select {
		case <-ctx.Done():
			p.save()
			return
		case <-p.wake:
		case <-time.After(next):
		}
	}
}

// save writes the file if there is news.
func (p *prices) save() {
	p.mu.Lock()
	f := pricesFile{hex.EncodeToString(p.network[:]), p.book.Records()}
	unsaved := p.unsaved
	p.unsaved = false
	p.mu.Unlock()
	if !unsaved {
		return
	}
	if err := writeJSON(p.file, f); err != nil {
		p.log.Error("prices are not remembered", "error", err)
		p.mu.Lock()
		p.unsaved = true
		p.mu.Unlock()
	}
}

func (p *prices) isUnsaid() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.unsaid
}

// say tells the newest record of every model.
func (p *prices) say(ctx context.Context) {
	p.mu.Lock()
	list := p.book.Newest()
	p.unsaid = false
	p.mu.Unlock()
	for page := range slices.Chunk(list, maxPriceList) {
		if err := p.topic.Publish(encodePriceList(priceList{page}), priceValidity); err != nil {
			p.log.Warn("prices not sent", "error", err)
			p.mu.Lock()
			p.unsaid = true
			p.mu.Unlock()
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(pricePause):
		}
	}
}
