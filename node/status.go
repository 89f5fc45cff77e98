package node

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"kvasird/experts"
	"kvasird/ggml/gguf"
	"kvasird/node/api"
	"kvasird/p2p"
)

// Status says everything that this node knows of itself.
func (n *Node) Status(context.Context) (*api.Status, error) {
	n.mu.Lock()
	state := n.state
	n.mu.Unlock()
	s := &api.Status{
		PeerID: n.host.ID().String(), Version: Version, RuntimePack: Pack(n.rt), Network: n.cfg.NetworkID(),
		State: state, UptimeSec: time.Since(n.started).Seconds(), Listen: n.host.Addrs(), HTTP: n.HTTPAddr(), HTTPAccess: n.httpAccess(),
		Backend: "cpu " + n.rt.Variant(), Threads: n.cfg.Threads,
	}
	for _, r := range n.cfg.Roles {
		s.Roles = append(s.Roles, string(r))
	}
	b := n.backbone.Load()
	switch {
	case n.file != nil:
		s.Model = n.file.status()
	case b != nil:
		s.Model = b.file.status()
	}
	if s.Model != nil && n.exchange != nil {
		if id, err := gguf.ParseModelID(s.Model.ID); err == nil {
			s.Model.Price = n.exchange.prices.shown(id, time.Now())
		}
	}
	s.Slices = apiSlices(n.workers.slices())
	s.Rows = apiRows(n.workers.rows())
	if n.cfg.Has(RoleBackbone) && state == api.StateServing {
		if err := n.Ready(); err != nil {
			s.State, s.Reason = api.StateBlocked, err.Error()
		}
	}
	if b != nil {
		st := b.Stats()
		s.Tokens = &api.Tokens{
			Prompt: uint64(st.Prompt), Generated: uint64(st.Generated),
			Drafted: uint64(st.Drafted), Accepted: uint64(st.Accepted), NoDrafts: st.NoDrafts, PerSecond: st.TokensPerSecond,
			Running: st.Running, Waiting: st.Waiting,
		}
	}
	n.addPeers(s, b)
	s.Hot = n.dispatching().hotStatus()
	if n.exchange != nil {
		s.Admission = string(n.cfg.Genesis.Admission)
		s.Reach = apiReach(n.host.Report())
		s.Volunteer = n.volunteerStatus()
		s.Carried = n.carriedStatus()
		if n.settlement != nil {
			s.Earnings = n.settlement.earned.Load()
		}
	}
	return s, nil
}

func apiRows(rows []experts.LayerRows) []api.Rows {
	var out []api.Rows
	for _, r := range rows {
		out = append(out, api.Rows{Layer: r.Layer, Rows: r.Rows})
	}
	return out
}

// addPeers joins what the host and the dispatcher know of peers.
func (n *Node) addPeers(s *api.Status, b *backbone) {
	sessions := map[string]experts.PeerStatus{}
	if b != nil && b.dispatch != nil {
		for _, p := range b.dispatch.Peers() {
			sessions[p.ID] = p
		}
		s.Coverage = b.coverage(sessions)
	}
	for _, p := range n.host.Peers() {
		s.Peers = append(s.Peers, apiPeer(p, sessions[p.ID.String()]))
	}
}

var peerStates = map[p2p.State]api.PeerState{
	p2p.Connecting: api.PeerConnecting, p2p.Connected: api.PeerConnected,
	p2p.Refused: api.PeerRefused, p2p.Unreachable: api.PeerLost,
}

func apiPeer(p p2p.PeerStatus, session experts.PeerStatus) api.Peer {
	out := api.Peer{
		ID: p.ID.String(), State: peerStates[p.State], Path: string(p.Path), Slices: apiSlices(session.Slices),
		RTTMicro: session.RoundTrip.Microseconds(), Rows: apiRows(session.Rows), Failed: session.Failed,
		Standing: session.Standing, Out: session.Out,
	}
	if session.Precision > experts.F32 {
		out.Precision = session.Precision.String()
	}
	if session.RoundTrip == 0 {
		out.RTTMicro = p.RTT.Microseconds()
	}
	if !p.Since.IsZero() {
		out.SinceSec = time.Since(p.Since).Seconds()
	}
	if p.Peer != nil {
		out.Addr = p.Peer.Addr
		if len(p.Peer.Models) > 0 {
			out.Roles = []string{string(RoleWorker)}
		}
	}
	switch {
	case p.Err != nil:
		out.Reason = p.Err.Error()
	case session.Out:
		out.Reason = session.Standing
	case session.Trouble != "":
		out.Reason = session.Trouble
	case session.Suspect:
		out.Reason = "it was late or wrong: it gets no calls until it answers again"
	}
	return out
}

// coverage counts the replicas of every expert of every MoE layer.
func (b *backbone) coverage(sessions map[string]experts.PeerStatus) []api.Coverage {
	var out []api.Coverage
	for _, layer := range b.file.ExpertLayers() {
		replicas := make([]int, b.file.Experts())
		for _, p := range sessions {
			for _, s := range p.Slices {
				if p.Connected && s.FirstLayer <= layer && layer < s.EndLayer {
					for e := s.FirstExpert; e < min(s.EndExpert, len(replicas)); e++ {
						replicas[e]++
					}
				}
			}
		}
		if b.dispatch.own != nil {
			for e := range replicas {
				replicas[e]++
			}
		}
		out = append(out, layerCoverage(layer, replicas))
	}
	return out
}

func layerCoverage(layer int, replicas []int) api.Coverage {
	c := api.Coverage{Layer: layer, Experts: len(replicas), MinReplicas: slices.Min(replicas)}
	var missing []string
	for e := 0; e < len(replicas); e++ {
		if replicas[e] > 0 {
			c.Held++
			continue
		}
		begin := e
		for e+1 < len(replicas) && replicas[e+1] == 0 {
			e++
		}
		missing = append(missing, fmt.Sprintf("%d:%d", begin, e+1))
	}
	c.Missing = strings.Join(missing, ",")
	return c
}
