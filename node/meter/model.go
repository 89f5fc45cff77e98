package meter

import (
	"fmt"
	"math"
	"strings"
	"time"

	"kvasird/ggml/gguf"
	"kvasird/p2p"
	"kvasird/settle"

	"github.com/libp2p/go-libp2p/core/peer"
)

const (
	// mostTokens bounds what is kept of a part: so many tokens' units.
	mostTokens = 1 << 17
	// staleAfter is when what nobody drew of a worker that does no more is dropped.
	staleAfter = 10 * time.Minute
)

// Model is what is counted of a model: its parts, by gguf.Model.WorkParts.
type Model struct {
	ID     string
	parts  []settle.Part
	layers int
}

// NewModel reads the parts of a model. Error: they are not usable for a settlement.
func NewModel(id string, m *gguf.Model) (*Model, error) {
	list, err := m.WorkParts()
	if err != nil {
		return nil, err
	}
	out := &Model{ID: id, layers: m.Layers()}
	for _, p := range list {
		out.parts = append(out.parts, settle.Part{Weight: p.Params, PerToken: uint64(p.PerToken)})
	}
	if _, err := settle.PartShares(out.parts); err != nil {
		return nil, fmt.Errorf("model %s: %w", id, err)
	}
	return out, nil
}

// Parts are the parts in their order. The caller must not change them.
func (m *Model) Parts() []settle.Part { return m.parts }

// NodeOf is the key of a peer, which its id holds.
func NodeOf(peerID string) (n settle.Node, err error) {
	id, err := peer.Decode(peerID)
	if err != nil {
		return n, err
	}
	return p2p.KeyOf(id)
}

// account is the units that one peer has, by part.
type account struct {
	node    settle.Node
	carried bool // it had that done, and says by whom
	units   []uint64
	at      time.Time // when something was added last
}

// carriedName is before the peer id where what it carried is counted apart.
const carriedName = "carried "

// accounts are those of a model's parts by peer, so many at most.
type accounts struct {
	model *Model
	most  int
	by    map[string]*account
	total []uint64 // of all, by part
}

func newAccounts(m *Model, most int) accounts {
	return accounts{model: m, most: max(1, most), by: map[string]*account{}, total: make([]uint64, len(m.parts))}
}

// limit is the most units that are kept of a part.
func (a *accounts) limit(part int) uint64 { return mostTokens * a.model.parts[part].PerToken }

// open returns the account of a name, in place of the one that was not used for longest
// where there are as many as may be; nil: the peer cannot be paid.
func (a *accounts) open(name string, now time.Time) *account {
	c := a.by[name]
	if c == nil {
		peerID, carried := strings.CutPrefix(name, carriedName)
		node, err := NodeOf(peerID)
		if err != nil {
			return nil
		}
		if len(a.by) >= a.most {
			a.dropOldest()
		}
		c = &account{node: node, carried: carried, units: make([]uint64, len(a.model.parts))}
		a.by[name] = c
	}
	c.at = now
	return c
}

func (a *accounts) dropOldest() {
	oldest, name := time.Time{}, ""
	for n, c := range a.by {
		if name == "" || c.at.Before(oldest) {
			oldest, name = c.at, n
		}
	}
	a.drop(name)
}

func (a *accounts) drop(name string) {
	for part, n := range a.by[name].units {
		a.total[part] -= n
	}
	delete(a.by, name)
}

func (a *accounts) put(c *account, part int, units uint64) {
	c.units[part] += units
	a.total[part] += units
}

func (a *accounts) take(c *account, part int, units uint64) {
	c.units[part] -= units
	a.total[part] -= units
}

// counted is whether units of a part are worth anything.
func (m *Model) counted(part int) bool { return part < len(m.parts) && m.parts[part].Weight > 0 }

// eachDense visits what all tokens use of a window of layers.
func (m *Model) eachDense(layers gguf.Range, visit func(part int)) {
	if layers.Begin == 0 {
		visit(gguf.EmbeddingPart)
	}
	for l := max(layers.Begin, 0); l < min(layers.End, m.layers); l++ {
		visit(gguf.DensePart(l))
	}
	if layers.End == m.layers {
		visit(gguf.HeadPart(m.layers))
	}
}

// eachExpert visits the experts of a window of layers.
func (m *Model) eachExpert(layers gguf.Range, visit func(part int)) {
	for l := max(layers.Begin, 0); l < min(layers.End, m.layers); l++ {
		visit(gguf.ExpertPart(l))
	}
}

// expertPart is the part of a layer's experts; none for a layer that the model lacks.
func (m *Model) expertPart(layer int) (part int, ok bool) {
	return gguf.ExpertPart(layer), layer >= 0 && layer < m.layers && layer < math.MaxInt32/4
}
