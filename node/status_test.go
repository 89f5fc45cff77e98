package node

import (
	"errors"
	"reflect"
	"testing"
	"time"

	"github.com/libp2p/go-libp2p/core/peer"

	"kvasird/experts"
	"kvasird/ggml/gguf"
	"kvasird/market"
	"kvasird/node/api"
	"kvasird/p2p"
)

// TestAPIReach: every field of the report is passed on.
func TestAPIReach(t *testing.T) {
	kept := p2p.KeptPeer{ID: "a", Addrs: []string{"/ip4/127.0.0.1/tcp/1"}, State: p2p.Unreachable, Err: "gone", Holds: true}
	contact := api.Contact{ID: peer.ID("a").String(), Addrs: kept.Addrs, State: api.PeerLost, Error: "gone", Reserved: true}
	got := apiReach(p2p.Report{
		Reach: "public", NAT: "passable", MDNS: "off", DHT: "on", Listening: []string{"l"}, Observed: []string{"o"}, Announced: []string{"t"},
		Relayed: []string{"r"}, DHTPeers: 9, DirectPeers: 2, RelayedPeers: 1, Bootstrap: []p2p.KeptPeer{kept}, Relays: []p2p.KeptPeer{kept},
		Unmet: []p2p.KeptPeer{kept}, Serving: &p2p.RelayTraffic{Reservations: 1, Circuits: 2, Refused: 3, Bytes: 4}, Advice: []string{"do"},
	})
	want := &api.Reach{
		Reach: "public", NAT: "passable", MDNS: "off", DHT: "on", Listening: []string{"l"}, Observed: []string{"o"}, Announced: []string{"t"},
		Relayed: []string{"r"}, DirectPeers: 2, RelayedPeers: 1, Bootstrap: []api.Contact{contact}, Relays: []api.Contact{contact},
		Unmet: []api.Contact{contact}, Serving: &api.Relaying{Reservations: 1, Circuits: 2, Refused: 3, Bytes: 4}, Advice: []string{"do"},
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
	for i, v := 0, reflect.ValueOf(*got); i < v.NumField(); i++ {
		if v.Field(i).IsZero() {
			t.Errorf("%s is not tested", v.Type().Field(i).Name)
		}
	}
}

func TestAPIPeer(t *testing.T) {
	for _, tt := range []struct {
		host    p2p.PeerStatus
		session experts.PeerStatus
		want    api.Peer
	}{
		{p2p.PeerStatus{State: p2p.Connected, Path: p2p.Relayed, RTT: 5 * time.Millisecond}, experts.PeerStatus{},
			api.Peer{State: api.PeerConnected, Path: "relayed", RTTMicro: 5000}},
		{p2p.PeerStatus{State: p2p.Connected, Path: p2p.Direct, RTT: 5 * time.Millisecond}, experts.PeerStatus{RoundTrip: time.Millisecond},
			api.Peer{State: api.PeerConnected, Path: "direct", RTTMicro: 1000}},
		{p2p.PeerStatus{State: p2p.Unreachable, Err: errors.New("gone")}, experts.PeerStatus{}, api.Peer{State: api.PeerLost, Reason: "gone"}},
	} {
		if got := apiPeer(tt.host, tt.session); !reflect.DeepEqual(got, tt.want) {
			t.Errorf("got  %+v\nwant %+v", got, tt.want)
		}
	}
}

// TestShownHoldings: what the status shows does not change with what the
// volunteer goes on with.
func TestShownHoldings(t *testing.T) {
	s := &exchange{}
	hold := market.Holding{Slice: gguf.Slice{Layers: gguf.Range{End: 1}, Experts: gguf.Range{End: 4}}, State: market.Loading}
	live := map[gguf.ModelID][]market.Holding{{1}: {hold}}
	s.show(live)
	live[gguf.ModelID{1}][0].State = market.Serving
	live[gguf.ModelID{2}] = nil
	if want := (map[gguf.ModelID][]market.Holding{{1}: {hold}}); !reflect.DeepEqual(s.shown, want) {
		t.Errorf("got %v, want %v", s.shown, want)
	}
}
