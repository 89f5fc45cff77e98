package node

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"kvasird/ggml/gguf"
	"kvasird/market"
	"kvasird/p2p"
)

// Price records travel in two ways. On the topic market.PriceTopic, whoever settles says its newest
// ones. By the protocol prices/1 anybody may be asked for those that somebody lacks: one frame of
// type 1 with an ask, one of type 2 with a list, and the stream ends. Both are deterministic CBOR;
// the body of an envelope is a list.
//
//	ask:  {1: model, 32 bytes, left out: all, 2: number, left out: 0}
//	list: {1: [signed record, …]}, at most 31 of at most 512 bytes
//
// With a model the answer is the records after the epoch of that number, oldest first; without,
// the newest record of each model, but for so many of the first ones. An empty list says that
// there are no more.
const (
	pricesProtocol = "prices/1"

	framePriceAsk  = 1
	framePriceList = 2

	maxPriceAsk  = 64
	maxPriceList = 31 // so that a list fits an envelope
	priceTimeout = 10 * time.Second
)

var errPriceWire = errors.New("price records: malformed")

type priceAsk struct {
	Model []byte `cbor:"1,keyasint,omitempty"`
	After uint64 `cbor:"2,keyasint,omitempty"`
}

type priceList struct {
	Records [][]byte `cbor:"1,keyasint"`
}

var encodePriceAsk, decodePriceAsk = p2p.ControlCodec(maxPriceAsk, 16, 16)
var encodePriceList, decodePriceList = p2p.ControlCodec(p2p.MaxBody, maxPriceList, 16)

// readPriceList reads a list within its bounds. The records may be anything.
func readPriceList(body []byte) ([][]byte, error) {
	var l priceList
	if err := decodePriceList(body, &l); err != nil {
		return nil, fmt.Errorf("list of %w: %v", errPriceWire, err)
	}
	if l.Records == nil { // an empty list is written as such
		return nil, fmt.Errorf("list of %w: no list", errPriceWire)
	}
	if i := slices.IndexFunc(l.Records, func(r []byte) bool { return len(r) > market.MaxPriceRecord }); i >= 0 {
		return nil, fmt.Errorf("list of %w: record %d has %d bytes, at most %d", errPriceWire, i, len(l.Records[i]), market.MaxPriceRecord)
	}
	return l.Records, nil
}

// readPriceAsk reads an ask; all says that it is for the newest of all models.
func readPriceAsk(payload []byte) (id gguf.ModelID, after uint64, all bool, err error) {
	var a priceAsk
	if err := decodePriceAsk(payload, &a); err != nil {
		return id, 0, false, fmt.Errorf("ask for %w: %v", errPriceWire, err)
	}
	if n := len(a.Model); n != 0 && n != len(id) {
		return id, 0, false, fmt.Errorf("ask for %w: a model id of %d bytes, want %d", errPriceWire, n, len(id))
	}
	copy(id[:], a.Model)
	return id, a.After, len(a.Model) == 0, nil
}

// readPriceFrame reads the one frame of a side.
func readPriceFrame(c p2p.Conn, typ uint8, most int) ([]byte, error) {
	f, err := p2p.NewFrameReader(c, most).Next()
	switch {
	case err != nil:
		return nil, err
	case f.Type != typ || f.Flags != 0 || f.ID != 0:
		return nil, fmt.Errorf("%w: type %d, flags %#x, id %d, want type %d", p2p.ErrFrame, f.Type, f.Flags, f.ID, typ)
	}
	return f.Payload, nil
}

// serve answers who asks for price records.
func (p *prices) serve(from *p2p.Peer, c p2p.Conn) {
	if !p.asks.allow(from.ID, time.Now()) {
		p.host.Blame(from.ID, p2p.Flood, "asks for price records")
		return
	}
	c.SetDeadline(time.Now().Add(priceTimeout))
	payload, err := readPriceFrame(c, framePriceAsk, maxPriceAsk)
	if err != nil {
		if isPeersFault(err) {
			p.host.Blame(from.ID, p2p.Malformed, err.Error())
		}
		return
	}
	id, after, all, err := readPriceAsk(payload)
	if err != nil {
		p.host.Blame(from.ID, p2p.Malformed, err.Error())
		return
	}
	list := append([][]byte{}, p.records(id, after, all)...)
	if err := p2p.NewFrameWriter(c, p2p.MaxBody).Write(p2p.Frame{Type: framePriceList, Payload: encodePriceList(priceList{list})}); err != nil {
		p.log.Info("price records not sent", "peer", from.ID.String(), "error", err)
	}
}

// isPeersFault tells nonsense, or what is not signed as it should be, from a line that ended or is
// slow.
func isPeersFault(err error) bool {
	return slices.ContainsFunc([]error{p2p.ErrFrame, p2p.ErrFrameTooLarge, errPriceWire, market.ErrPriceSignature, market.ErrPriceFormat},
		func(fault error) bool { return errors.Is(err, fault) })
}

// askPrices asks over a fresh stream.
func askPrices(c p2p.Conn, a priceAsk) ([][]byte, error) {
	defer c.Close()
	c.SetDeadline(time.Now().Add(priceTimeout))
	if err := p2p.NewFrameWriter(c, maxPriceAsk).Write(p2p.Frame{Type: framePriceAsk, Payload: encodePriceAsk(a)}); err != nil {
		return nil, err
	}
	payload, err := readPriceFrame(c, framePriceList, p2p.MaxBody)
	if err != nil {
		return nil, err
	}
	return readPriceList(payload)
}
