package node

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/libp2p/go-libp2p/core/peer"
	"golang.org/x/time/rate"

	"kvasird/ggml/gguf"
	"kvasird/market"
	"kvasird/node/api"
	"kvasird/p2p"
)

const (
	// priceSeek is between two attempts to get what lacks.
	priceSeek = 20 * time.Second
	// seekPrices is how many peers are asked in one.
	seekPrices = 4
	// staleEpochs is after how many epochs without a record others are asked.
	staleEpochs = 2
	// What a peer may ask.
	priceAskEvery = 500 * time.Millisecond
	priceAskBurst = 64
	maxPriceAsker = 1024
)

// lacks says whether there may be records that this node did not hear.
func (p *prices) lacks(now time.Time) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	models := p.book.Models()
	return len(models) == 0 || len(p.book.Behind()) > 0 || slices.ContainsFunc(models, func(id gguf.ModelID) bool {
		r, _, err := p.book.Price(id)
		return err == nil && uint64(now.Unix()) > r.Issued+staleEpochs*r.Rules.EpochSeconds
	})
}

// seek asks peers for what lacks, whoever settles first.
func (p *prices) seek(ctx context.Context) {
	asked := 0
	peers := p.host.Peers()
	slices.SortStableFunc(peers, func(a, b p2p.PeerStatus) int {
		return boolOrder(b.ID == p.publisher) - boolOrder(a.ID == p.publisher)
	})
	for _, s := range peers {
		if s.Peer == nil || !slices.Contains(s.Peer.Protocols, pricesProtocol) {
			continue
		}
		if asked++; asked > seekPrices || !p.lacks(time.Now()) || ctx.Err() != nil {
			return
		}
		if err := p.fetch(ctx, s.ID); err != nil {
			p.log.Info("price records not fetched", "peer", s.ID.String(), "error", err)
		}
	}
}

func boolOrder(b bool) int {
	if b {
		return 1
	}
	return 0
}

// fetch gets from a peer what it has and this node lacks: first the newest of all models, then
// what is missing before them.
func (p *prices) fetch(ctx context.Context, id peer.ID) error {
	for skip := 0; skip <= market.MaxPriced; skip += maxPriceList {
		list, err := p.fetchOnce(ctx, id, priceAsk{After: uint64(skip)})
		if err != nil {
			return err
		}
		if len(list) < maxPriceList {
			break
		}
	}
	p.mu.Lock()
	behind := p.book.Behind()
	p.mu.Unlock()
	for model, after := range behind {
		for {
			list, err := p.fetchOnce(ctx, id, priceAsk{model[:], after})
			if err != nil {
				return err
			}
			p.mu.Lock()
			still, ok := p.book.Behind()[model]
			p.mu.Unlock()
			if len(list) == 0 || !ok || still == after {
				break // there is no more, or it does not lead on
			}
			after = still
		}
	}
	return nil
}

// fetchOnce asks a peer once and takes what it gives.
func (p *prices) fetchOnce(ctx context.Context, id peer.ID, a priceAsk) ([][]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, priceTimeout)
	defer cancel()
	c, err := p.host.OpenStream(ctx, id, pricesProtocol)
	if err != nil {
		return nil, err
	}
	defer context.AfterFunc(ctx, func() { c.Close() })()
	list, err := askPrices(c, a)
	if err == nil {
		_, err = p.take(list)
	}
	if isPeersFault(err) {
		p.host.Blame(id, p2p.WrongData, err.Error())
	}
	return list, err
}

// shown is what people are shown of a model's price; nil when none is known.
func (p *prices) shown(id gguf.ModelID, now time.Time) *api.Price {
	if p == nil {
		return nil
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	r, _, err := p.book.Price(id)
	switch {
	case errors.Is(err, market.ErrPriceFork):
		return &api.Price{Trouble: "whoever settles told two different prices: do not pay"}
	case err != nil:
		return nil
	}
	out := &api.Price{Epoch: r.State.Epoch, Raw: uint64(r.State.Price), AgeSec: now.Sub(time.Unix(int64(r.Issued), 0)).Seconds()}
	million, err := r.State.Price.Amount(1_000_000, r.Ref.PerFiat)
	_, behind := p.book.Behind()[id]
	warn, refStale := r.Ref.At(uint64(now.Unix()))
	switch out.Million = uint64(million); {
	case err != nil:
		out.Trouble = err.Error()
	case behind:
		out.Trouble = "there are newer prices, and those between are missing"
	case refStale != nil:
		out.Trouble = refStale.Error()
	case warn:
		out.Trouble = "what the token is worth was not set for a week"
	}
	return out
}

// askPaces bound how often a peer asks. It is safe for concurrent use.
type askPaces struct {
	mu sync.Mutex // guards by
	by map[peer.ID]*rate.Limiter
}

func (a *askPaces) allow(id peer.ID, now time.Time) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	l := a.by[id]
	if l == nil {
		if len(a.by) >= maxPriceAsker {
			clear(a.by)
		}
		l = rate.NewLimiter(rate.Every(priceAskEvery), priceAskBurst)
		a.by[id] = l
	}
	return l.AllowN(now, 1)
}
