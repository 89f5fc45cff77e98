package p2p

import (
	"context"
	"sync/atomic"
	"time"

	"github.com/libp2p/go-libp2p/core/peer"
	pbv2 "github.com/libp2p/go-libp2p/p2p/protocol/circuitv2/pb"
	"github.com/libp2p/go-libp2p/p2p/protocol/circuitv2/relay"
	ma "github.com/multiformats/go-multiaddr"
)

const (
	// What a relay gives. libp2p's own buffer of 2 KiB halves the throughput.
	relayBuffer         = 64 << 10 // bytes, two for each circuit
	relayReservations   = 1024
	relayReservationTTL = time.Hour
	relayCircuits       = 256 // of a peer
	relayAllCircuits    = 4096
	relayPerIP          = 256
	relayPerASN         = 1024

	// aclWait is how long a relay waits for the end of a hello that a request overtook.
	aclWait = 2 * time.Second
)

// relayService carries the traffic of members that cannot be reached directly. The data is
// encrypted between the two ends: the relay sees who and how much.
type relayService struct {
	h       *Host
	service *relay.Relay
	carries *carries

	reservations, circuits, refused atomic.Int64
	carried                         atomic.Int64 // bytes
}

func newRelayService(h *Host) (*relayService, error) {
	s := &relayService{h: h}
	s.carries = newCarries(s)
	h.handlers[carryProtocol] = s.carries.serve // for lanes; Start holds the lock
	h.setStreamHandler(carryProtocol, s.carries.serve)
	resources := relay.Resources{
		ReservationTTL: relayReservationTTL, BufferSize: relayBuffer,
		MaxReservations:      relayReservations,
		MaxReservationsPerIP: relayPerIP, MaxReservationsPerASN: relayPerASN,
		MaxCircuits: relayCircuits,
	}
	var err error
	s.service, err = relay.New(h.node,
		relay.WithResources(resources),
		relay.WithACL(s),
		relay.WithMetricsTracer(s),
		// Addresses of a LAN are as good as any: who got the reservation came by one.
		relay.WithReservationAddressFilter(func(ma.Multiaddr) bool { return true }))
	return s, err
}

// AllowReserve lets members in.
func (s *relayService) AllowReserve(p peer.ID, _ ma.Multiaddr) bool { return s.isMember(p) }

// AllowConnect connects members with members.
func (s *relayService) AllowConnect(src peer.ID, _ ma.Multiaddr, dest peer.ID) bool {
	return s.isMember(src) && s.isMember(dest)
}

// isMember reports whether a peer passed the hello and may still join: its invitation may
// have ended a moment ago, and it is about to be dropped, with what it has here.
func (s *relayService) isMember(id peer.ID) bool {
	ctx, cancel := context.WithTimeout(context.Background(), aclWait)
	defer cancel()
	p, err := s.h.peers.await(ctx, id)
	return err == nil && p.Rights().Has(Join) && s.h.members.stands(p)
}

// What follows counts for Report.

func (s *relayService) RelayStatus(bool)               {}
func (s *relayService) ConnectionOpened()              { s.circuits.Add(1) }
func (s *relayService) ConnectionClosed(time.Duration) { s.circuits.Add(-1) }
func (s *relayService) BytesTransferred(n int)         { s.carried.Add(int64(n)) }
func (s *relayService) ReservationClosed(n int)        { s.reservations.Add(int64(-n)) }
func (s *relayService) ReservationAllowed(renewal bool) {
	if !renewal {
		s.reservations.Add(1)
	}
}

func (s *relayService) ConnectionRequestHandled(status pbv2.Status)  { s.count(status) }
func (s *relayService) ReservationRequestHandled(status pbv2.Status) { s.count(status) }

func (s *relayService) count(status pbv2.Status) {
	if status != pbv2.Status_OK {
		s.refused.Add(1)
	}
}
