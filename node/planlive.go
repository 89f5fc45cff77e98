package node

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"kvasird/ggml/gguf"
	"kvasird/ggml/store"
	"kvasird/market"
	"kvasird/node/api"
	"kvasird/ring/plan"
)

const (
	// headerTime bounds the fetching of a model's header for a plan.
	headerTime = 30 * time.Second
	// maxModelName bounds what a model is called by, in bytes.
	maxModelName = 4096
)

// subject is a model to plan for.
type subject struct {
	name string
	id   gguf.ModelID // zero: a file that the node does not know
	file bool         // all of it is on this machine
	g    *gguf.Model
}

// Plan says in which ways a model could run on this node and its peers, or on nodes
// that are described.
func (n *Node) Plan(ctx context.Context, req api.PlanRequest) (done *api.PlanResult, err error) {
	if len(req.Model) > maxModelName || len(req.Nodes) > maxSpecFile {
		return nil, &api.Error{Code: api.CodeBadRequest, Message: fmt.Sprintf(
			"a model is called by at most %d bytes, and nodes are described by at most %d", maxModelName, maxSpecFile)}
	}
	err = n.withSubject(ctx, req.Model, func(s subject) error {
		q, err := planQuery(s.name, s.g, req.Context, req.Sequences)
		if err != nil {
			return err
		}
		var peers []planPeer
		var notes []string
		if req.Nodes != "" {
			q.Nodes, q.RTT, err = parsePlanSpec([]byte(req.Nodes))
		} else {
			peers, notes, err = n.planAround(&q, s)
		}
		if err == nil {
			done, err = makePlan(s.name, q, notes, peers)
		}
		if err != nil {
			return &api.Error{Code: api.CodeBadRequest, Message: err.Error()}
		}
		return nil
	})
	return done, err
}

// planAround puts this node and its peers into a query.
func (n *Node) planAround(q *plan.Query, s subject) (peers []planPeer, notes []string, err error) {
	self := n.host.ID().String()
	if n.exchange == nil {
		here, notes, err := thisMachine(n.cfg)
		here.Has = s.file
		q.Nodes = []plan.Node{here}
		return nil, append(notes, "peers tell of themselves in a network with a file only, so this plan is for this machine alone: `kvasird network create` makes one, --nodes FILE describes nodes"), err
	}
	now := time.Now()
	authors, err := n.authors(now)
	if err != nil {
		return nil, nil, err
	}
	about := planSubject{id: s.id, layers: len(q.Model.Layers), experts: q.Model.Experts, overhead: q.Overhead()}
	if about.shape, err = market.ShapeOf(s.g); err != nil {
		about.id = gguf.ModelID{}
	}
	if about.id == (gguf.ModelID{}) {
		notes = append(notes, fmt.Sprintf("it is not known which peers have parts of %s: `kvasir model add` it, or name it by the id that they know it by", s.name))
	}
	q.Nodes, peers = about.planNodes(self, authors)
	q.RTT = n.between(peers, now)
	for i := range peers {
		if rtt, ok := q.RTT(hereName, peers[i].Name); ok {
			peers[i].RTTMicro = rtt.Microseconds()
		}
	}
	if len(q.Nodes) > 0 && q.Nodes[0].Name == hereName {
		q.Nodes[0].Has = q.Nodes[0].Has || s.file
	}
	return peers, append(notes, "what peers give and how fast they are is as they say: `kvasir plan --measure` on a machine has it say what it measured"), nil
}

// authors lists what this node and its peers say of themselves, and the peers that are
// connected and say nothing.
func (n *Node) authors(now time.Time) ([]market.Author, error) {
	latest := n.exchange.latest.Load()
	if latest == nil {
		return nil, errors.New("the node is starting: try again")
	}
	own := *latest
	own.Models = slices.Clone(own.Models)
	n.exchange.machine(&own) // as it is now: it may just have been measured
	list := append(n.exchange.table.Authors(now), market.Author{Peer: n.host.ID().String(), News: &own})
	for _, p := range n.host.Peers() {
		id := p.ID.String()
		if p.Peer != nil && !slices.ContainsFunc(list, func(a market.Author) bool { return a.Peer == id }) {
			list = append(list, market.Author{Peer: id})
		}
	}
	return list, nil
}

// between tells the round trips between the nodes of a plan.
func (n *Node) between(peers []planPeer, now time.Time) roundTrip {
	ids := map[string]string{}
	for _, p := range peers {
		ids[p.Name] = p.Peer
	}
	measured := n.roundTrips(now)
	return func(a, b string) (time.Duration, bool) { return measured(ids[a], ids[b]) }
}

// withSubject has work look at the header of a model that a person calls so.
func (n *Node) withSubject(ctx context.Context, name string, work func(subject) error) error {
	switch {
	case name == "" && n.file != nil:
		return work(subject{n.file.name, n.file.id, n.file.Kind() == gguf.Full, n.file.Model})
	case name == "" && n.cfg.Model.ID != nil:
		name = n.cfg.Model.ID.String()
	case name == "":
		return &api.Error{Code: api.CodeBadRequest, Message: "this node has no model of its own: name one, by its file, or by the name or id that `kvasir model list` or `kvasir coverage` shows"}
	case filepath.IsAbs(name):
		g, err := gguf.OpenModel(name)
		if err != nil {
			return &api.Error{Code: api.CodeNotFound, Message: err.Error()}
		}
		defer g.Close()
		return work(subject{nameOf(name), n.idOf(name), g.Kind() == gguf.Full, g})
	}
	if n.exchange == nil {
		return n.withStore(func(st *store.Store) error {
			m, err := findModel(st, name)
			if err != nil {
				return err
			}
			g, err := m.GGUF(ctx)
			if err != nil {
				return err
			}
			defer g.Close()
			return work(subject{m.Name(), m.ID(), m.Complete(), g})
		})
	}
	id, err := n.findModel(name, time.Now())
	if err != nil {
		return err
	}
	m, g, err := n.headerOf(ctx, id)
	if err != nil {
		return err
	}
	return work(subject{m.Name(), id, m.Complete(), g})
}

// idOf is the id of a model by its file, if this node knows that; else zero.
func (n *Node) idOf(path string) gguf.ModelID {
	info, err := os.Stat(path)
	same := func(other string) bool {
		o, wrong := os.Stat(other)
		return err == nil && wrong == nil && os.SameFile(info, o)
	}
	if n.file != nil && same(n.file.path) {
		return n.file.id
	}
	if n.store != nil {
		for _, m := range n.store.Models() {
			if same(m.Path(0)) {
				return m.ID()
			}
		}
	}
	return gguf.ModelID{}
}

// findModel finds a model of the store or of the network by id, the beginning of one, or
// name.
func (n *Node) findModel(name string, now time.Time) (gguf.ModelID, error) {
	names := map[gguf.ModelID][]string{}
	for _, m := range n.store.Models() {
		names[m.ID()] = append(names[m.ID()], m.Name())
	}
	for _, id := range n.exchange.table.Models(now) {
		names[id] = append(names[id], "")
		for _, h := range n.exchange.table.Holders(id, now) {
			names[id] = append(names[id], h.News.Name)
		}
	}
	if n.file != nil {
		names[n.file.id] = append(names[n.file.id], n.file.name)
	}
	return pickModel(name, names)
}

// pickModel picks the model of which a name, an id or the beginning of one is given.
func pickModel(name string, names map[gguf.ModelID][]string) (gguf.ModelID, error) {
	if id, err := gguf.ParseModelID(name); err == nil {
		return id, nil // whoever has it may come to be known
	}
	var found []gguf.ModelID
	for id, called := range names {
		if slices.Contains(called, name) || len(name) >= leastOfID && strings.HasPrefix(id.String(), name) {
			found = append(found, id)
		}
	}
	slices.SortFunc(found, func(a, b gguf.ModelID) int { return bytes.Compare(a[:], b[:]) })
	switch len(found) {
	case 1:
		return found[0], nil
	case 0:
		return gguf.ModelID{}, &api.Error{Code: api.CodeNotFound, Message: fmt.Sprintf(
			"no model %q is in the store or told of by a peer: name its file, all of its id, or one that `kvasir model list` or `kvasir coverage` shows", name)}
	}
	return gguf.ModelID{}, &api.Error{Code: api.CodeBadRequest, Message: fmt.Sprintf(
		"%d models have the name or an id that begins with %q: give more of the id: %v", len(found), name, found)}
}

// headerOf has the header of a model, from peers when it is not here.
func (n *Node) headerOf(ctx context.Context, id gguf.ModelID) (*store.Model, *gguf.Model, error) {
	if m := n.store.Model(id); m != nil {
		if g, err := n.weights.open(ctx, m); err == nil {
			return m, g, nil
		}
	}
	limit, cancel := context.WithTimeout(ctx, headerTime)
	defer cancel()
	why := error(context.DeadlineExceeded)
	m, g, err := n.learnModel(limit, id, func(err error) { why = err })
	if err != nil {
		return nil, nil, &api.Error{Code: api.CodeNotReady, Message: fmt.Sprintf(
			"the header of model %s is not here, and was not fetched within %v: %v. Connect this node to one that has the model, or name the model's file", id, headerTime, why)}
	}
	return m, g, nil
}
