package p2p

import (
	"context"
	"sync"
	"time"

	dhtpb "github.com/libp2p/go-libp2p-kad-dht/pb"
	"github.com/libp2p/go-libp2p/core/network"
	"github.com/libp2p/go-libp2p/core/peer"
	"golang.org/x/time/rate"
)

// What one peer may ask of the DHT of this node. Its provider records take memory here
// until they run out, so their rate bounds their number: a peer has at most about
// recordBurst + recordRate * providerTTL of them.
const (
	requestRate  = 50 // a second, of any kind
	requestBurst = 2000
	recordRate   = 4 // a second
	recordBurst  = 2 * maxProvided

	maxRecordAddrs = 16 // of a provider; the others are cut off

	// unknownRequest is a type that the DHT does not serve: it ends the stream instead.
	unknownRequest dhtpb.Message_MessageType = -1
)

// requestLimits bounds the requests of each ready peer to the DHT.
type requestLimits struct {
	h *Host

	mu    sync.Mutex // guards peers
	peers map[peer.ID]*requestLimit
}

type requestLimit struct{ all, records *rate.Limiter }

func newRequestLimits(h *Host) *requestLimits {
	return &requestLimits{h: h, peers: make(map[peer.ID]*requestLimit)}
}

// check is called by the DHT with each request, before it is served. One too many is not
// served, and costs the peer its standing.
func (l *requestLimits) check(_ context.Context, s network.Stream, req *dhtpb.Message) {
	id := s.Conn().RemotePeer()
	if !l.allow(id, req.GetType() == dhtpb.Message_ADD_PROVIDER, time.Now()) {
		req.Type = unknownRequest
		l.h.Blame(id, Flood, "asked too much of the DHT")
		return
	}
	for _, p := range req.ProviderPeers {
		p.Addrs = p.Addrs[:min(len(p.Addrs), maxRecordAddrs)]
	}
}

func (l *requestLimits) allow(id peer.ID, record bool, now time.Time) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	limit := l.peers[id]
	if limit == nil {
		limit = &requestLimit{rate.NewLimiter(requestRate, requestBurst), rate.NewLimiter(recordRate, recordBurst)}
		l.peers[id] = limit
	}
	return limit.all.AllowN(now, 1) && (!record || limit.records.AllowN(now, 1))
}

// prune forgets the peers whose limits have recovered in full, so that to leave and come
// back does not renew them.
func (l *requestLimits) prune(now time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for id, limit := range l.peers {
		if limit.all.TokensAt(now) >= requestBurst && limit.records.TokensAt(now) >= recordBurst {
			delete(l.peers, id)
		}
	}
}
