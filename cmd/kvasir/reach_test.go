package main

import (
	"encoding/json"
	"net/http"
	"strings"
	"testing"

	"kvasird/node/api"
)

// TestStatusInNetwork: how the node is connected, what it holds, and what to do.
func TestStatusInNetwork(t *testing.T) {
	slice := func(layer, begin, end int) api.Slice {
		return api.Slice{LayerBegin: layer, LayerEnd: layer + 1, ExpertBegin: begin, ExpertEnd: end}
	}
	st := &api.Status{
		PeerID: "12D3KooWabcdefgh", Network: "home-1a2b", Admission: "invitation", Roles: []string{"volunteer"}, State: api.StateServing,
		Peers: []api.Peer{{ID: "12D3KooWworker01", State: api.PeerConnected, Path: "relayed", RTTMicro: 12340},
			{ID: "12D3KooWworker02", State: api.PeerConnected, Path: "direct"}},
		Reach: &api.Reach{
			Reach: "private: a peer could not connect to X", NAT: "symmetric: so it is", MDNS: "off", DHT: "on: 3 peers in the table",
			DirectPeers: 1, RelayedPeers: 1, Observed: []string{"/ip4/192.0.2.1/tcp/1"}, Relayed: []string{"/p2p-circuit/a", "/p2p-circuit/b"},
			Bootstrap: []api.Contact{{ID: "12D3KooWboot0001", State: api.PeerLost, Error: "no route\n to host\x1b[2J"}},
			Relays:    []api.Contact{{ID: "12D3KooWrelay001", State: api.PeerConnected, Reserved: true}},
			Unmet:     []api.Contact{{ID: "12D3KooWunmet001", State: api.PeerRefused, Error: "other pack"}},
			Serving:   &api.Relaying{Reservations: 2, Circuits: 3, Refused: 4, Bytes: 5 << 20},
			Advice:    []string{"let the router pass a port on"},
		},
		Volunteer: &api.Volunteer{
			Paused: true,
			Parts: []api.Part{
				{Model: "m", ID: "ff", Slice: slice(0, 0, 16), State: api.PartServing}, {Model: "m", ID: "ff", Slice: slice(1, 0, 16), State: api.PartServing},
				{Model: "m", ID: "ff", Slice: slice(2, 8, 16), State: api.PartLoading}, {ID: "aa", Slice: slice(0, 0, 1), State: api.PartLeaving},
			},
			Memory: api.Share{Used: 1 << 20, Limit: 8 << 20}, Disk: api.Share{Used: 2 << 30},
			Downloads: []api.Progress{{What: "experts a of m", Done: 1 << 20, Total: 4 << 20, Rate: 1 << 20, LeftSec: 3, Sources: 2}, {What: "header of m", Total: 9}},
			Troubles:  []string{"experts b: the disk is full"},
		},
	}
	data := daemon(t, func(w http.ResponseWriter, r *http.Request) { json.NewEncoder(w).Encode(st) })
	status, out, errs := kvasir(t, "", "status", "--data", data)
	if status != exitOK || errs != "" {
		t.Fatalf("status %d, err %q", status, errs)
	}
	lines := strings.Join(strings.Fields(out), " ")
	for _, want := range []string{
		"Network home-1a2b, invitation",
		"Peers 1 connected directly, 1 through a relay",
		"Reached private: a peer could not connect to X NAT symmetric: so it is LAN off DHT on: 3 peers in the table",
		"Seen at /ip4/192.0.2.1/tcp/1 Relayed /p2p-circuit/a /p2p-circuit/b",
		"Bootstrap …boot0001 lost: no route to host\ufffd[2J",
		"Relays …relay001 connected, others reach this node through it",
		"As relay 2 nodes reached through it, 3 connections, 5.0 MiB carried, 4 refused",
		"Paused it takes nothing new",
		"Holds experts of aa: 1 leaving experts of m: 32 serving, 8 loading",
		"Gives memory 1.0 MiB of 8.0 MiB, disk 2.0 GiB",
		"experts a of m: 25%, 1.0 MiB of 4.0 MiB, 1.0 MiB/s, 3s left, from 2 peers",
		"header of m: 0%, 0 bytes of 9 bytes, nobody sends it now",
		"In the way experts b: the disk is full",
		"Found but not connected …unmet001 refused: other pack",
		"What to do let the router pass a port on",
		"…worker01 connected (relayed) 0s 12.34 ms", "…worker02 connected 0s -",
	} {
		if !strings.Contains(lines, want) {
			t.Errorf("%s\ndoes not contain %q", out, want)
		}
	}
	st.Reach, st.Volunteer = &api.Reach{}, &api.Volunteer{}
	_, out, _ = kvasir(t, "", "status", "--data", data)
	for _, want := range []string{"connected to nobody", "nothing yet"} {
		if !strings.Contains(out, want) {
			t.Errorf("%s\ndoes not contain %q", out, want)
		}
	}
}
