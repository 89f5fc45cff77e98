package market

import (
	"bytes"
	"crypto/ed25519"
	"errors"
	"fmt"
	"maps"
	"slices"

	"kvasird/ggml/gguf"
	"kvasird/settle"
)

const (
	// MaxPriced bounds the models of a PriceBook.
	MaxPriced = 256
	// KeptPrices is how many records of each model a PriceBook keeps, the newest: those of more
	// than a day, in which the reference must not jump, whatever the epoch is.
	KeptPrices = 256
)

// Errors of a PriceBook.
var (
	ErrNoPrice    = errors.New("no price record of the model is known")
	ErrManyPrices = errors.New("more models have prices than are kept")
)

// PriceBook keeps a PriceChain and the newest records of every model of a network. Once two
// records of a model claim the same place, both are kept for ever, and the model has no price any
// more: whoever publishes prices has shown different ones to different people. Not safe for
// concurrent use.
type PriceBook struct {
	network   settle.Hash
	publisher settle.Key
	models    map[gguf.ModelID]*priced
}

type priced struct {
	chain *PriceChain
	kept  [][]byte // signed records, oldest first; the last is the chain's
	fork  []byte   // a record that contradicts one that is kept; nil: there is none
	ahead uint64   // epoch of the newest record that cannot follow yet; 0: none
}

// NewPriceBook is empty.
func NewPriceBook(network settle.Hash, publisher settle.Key) *PriceBook {
	return &PriceBook{network: network, publisher: publisher, models: map[gguf.ModelID]*priced{}}
}

// Take takes a record, of any model, and says whether it is news: then the book has changed. An
// error is one of PriceRecord or PriceChain, or ErrManyPrices. ErrPriceOld and ErrPriceGap are
// nobody's fault; with ErrPriceFork the evidence is news the first time.
func (b *PriceBook) Take(record []byte) (news bool, err error) {
	r, m, err := b.read(record)
	if err != nil {
		return false, err
	}
	before, _ := m.chain.Last()
	err = m.chain.Append(record)
	switch {
	case errors.Is(err, ErrPriceOld) && m.denies(r, record):
		err = fmt.Errorf("market: epoch %d: %w", r.State.Epoch, ErrPriceFork)
		fallthrough
	case errors.Is(err, ErrPriceFork):
		m.fork = bytes.Clone(record)
		return true, err
	case errors.Is(err, ErrPriceGap):
		m.ahead = max(m.ahead, r.State.Epoch)
		return false, err
	case err != nil:
		return false, err
	}
	last, _ := m.chain.Last()
	if last == before {
		return false, nil // the last one again
	}
	m.kept = append(m.kept, bytes.Clone(record))
	m.kept = m.kept[max(0, len(m.kept)-KeptPrices):]
	if m.ahead <= r.State.Epoch {
		m.ahead = 0
	}
	b.models[r.Model] = m
	return true, nil
}

// Check says whether a record may be taken next, and changes nothing.
func (b *PriceBook) Check(record []byte) error {
	_, m, err := b.read(record)
	if err != nil {
		return err
	}
	chain := *m.chain
	chain.refs = slices.Clone(chain.refs)
	return chain.Append(record)
}

// read reads a record, and finds its model, or makes it without keeping it.
func (b *PriceBook) read(record []byte) (*PriceRecord, *priced, error) {
	r, err := ParsePriceRecord(record, b.publisher)
	if err != nil {
		return nil, nil, err
	}
	m := b.models[r.Model]
	switch {
	case r.Network != b.network:
		return nil, nil, fmt.Errorf("market: %w", ErrPriceNetwork)
	case m == nil && len(b.models) >= MaxPriced:
		return nil, nil, fmt.Errorf("market: model %s: %w: %d", r.Model, ErrManyPrices, MaxPriced)
	case m == nil:
		m = &priced{chain: NewPriceChain(b.network, r.Model, b.publisher)}
	case m.fork != nil:
		return nil, nil, m.forked(r.Model)
	}
	return r, m, nil
}

// denies says whether a record contradicts one that is kept of the same epoch.
func (m *priced) denies(r *PriceRecord, record []byte) bool {
	i, same := m.find(r.State.Epoch)
	return same && !bytes.Equal(unsigned(m.kept[i]), unsigned(record))
}

func unsigned(record []byte) []byte { return record[:len(record)-ed25519.SignatureSize] }

// find is the place of an epoch among the kept records.
func (m *priced) find(epoch uint64) (i int, same bool) {
	return slices.BinarySearchFunc(m.kept, epoch, func(k []byte, epoch uint64) int {
		switch e := epochOf(k); {
		case e < epoch:
			return -1
		case e > epoch:
			return 1
		}
		return 0
	})
}

// epochOf is the epoch of a record that was parsed before.
func epochOf(record []byte) uint64 {
	var w wirePrice
	if decMode.Unmarshal(unsigned(record), &w) != nil {
		return 0
	}
	return w.Epoch
}

func (m *priced) forked(id gguf.ModelID) error {
	return fmt.Errorf("market: model %s: %w: keep both records, and stop paying", id, ErrPriceFork)
}

// Price is the newest record of a model and its hash; ErrNoPrice or ErrPriceFork when there is
// none to go by. The record is not changed.
func (b *PriceBook) Price(id gguf.ModelID) (*PriceRecord, settle.Hash, error) {
	m := b.models[id]
	switch {
	case m == nil:
		return nil, settle.Hash{}, fmt.Errorf("market: model %s: %w", id, ErrNoPrice)
	case m.fork != nil:
		return nil, settle.Hash{}, m.forked(id)
	}
	last, hash := m.chain.Last()
	return last, hash, nil
}

// Models are those with records, in the order of their ids.
func (b *PriceBook) Models() []gguf.ModelID {
	return slices.SortedFunc(maps.Keys(b.models), func(x, y gguf.ModelID) int { return bytes.Compare(x[:], y[:]) })
}

// Newest are the newest records, one of each model, in the order of Models, those of forked ones
// with the record that contradicts. They are not changed.
func (b *PriceBook) Newest() [][]byte {
	var out [][]byte
	for _, id := range b.Models() {
		m := b.models[id]
		out = append(out, m.kept[len(m.kept)-1])
		if m.fork != nil {
			out = append(out, m.fork)
		}
	}
	return out
}

// Behind are the models of which a record is known that does not follow yet, with the last epoch
// that does: what is after it has to be fetched.
func (b *PriceBook) Behind() map[gguf.ModelID]uint64 {
	out := map[gguf.ModelID]uint64{}
	for id, m := range b.models {
		if last, _ := m.chain.Last(); m.ahead > 0 && m.fork == nil {
			out[id] = last.State.Epoch
		}
	}
	return out
}

// After are the kept records of a model after an epoch, oldest first, so many at most. They are
// not changed.
func (b *PriceBook) After(id gguf.ModelID, epoch uint64, most int) [][]byte {
	m := b.models[id]
	if m == nil {
		return nil
	}
	i, same := m.find(epoch)
	if same {
		i++
	}
	return m.kept[i:min(len(m.kept), i+most)]
}

// Records are all records that are kept, for Take of an empty book to make this one again.
func (b *PriceBook) Records() [][]byte {
	var out [][]byte
	for _, id := range b.Models() {
		m := b.models[id]
		out = append(out, m.kept...)
		if m.fork != nil {
			out = append(out, m.fork)
		}
	}
	return out
}
