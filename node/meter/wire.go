package meter

// The wire format of /kvasir/<net>/work/1, version 3.
//
// Frames are those of package p2p: a 16-byte header (payload length, type, flags, id) and
// a payload. Flags and id are 0. A stream is one question and one answer.
//
//	type         from    payload
//	1 ASK        entry   CBOR, at most maxAsk bytes
//	2 STATEMENT  worker  a settle.Report of the worker, signed: its statement about the request
//	3 REFUSED    worker  UTF-8 text, up to maxText bytes: why there is none
//	4 DIVIDE     entry   an ASK's payload: who computed these units of what the worker answered?
//	5 DIVISION   worker  CBOR, at most maxDivision bytes
//	6 SHOW       entry   CBOR, at most maxAsk bytes: passes of requests that this computes for
//	7 SHOWN      worker  empty: all are taken, else it is REFUSED
//
// ASK is a deterministic CBOR map with integer keys: 1 version, 2 network (32 bytes), 3
// request (16 bytes), 4 model id, 5 lines: maps of 1 part and 2 units, by part ascending,
// units above 0, up to settle.MaxParts. Decoding refuses any other encoding of the same
// value, unknown keys and keys given twice. The entry is who the connection says.
//
// The statement has of each line what the worker computed for the entry, was not signed
// before, and is not above what the line says, added to what it signed of the request
// before. Asked again, it says the same.
//
// DIVISION is a deterministic CBOR map: 1 version, 2 shares: maps of 1 parts and units in turn,
// by part ascending, units above 0, and 2 the statement of who did that, as in STATEMENT. There
// are up to settle.MaxWorkers of them, each of another signer, and their units of a part are not
// above those of its line in DIVIDE. The answerer divides at most what it computed for the entry
// and neither signed nor divided before. Asked again about the request, it says the same.
//
// SHOW is a deterministic CBOR map: 1 version, 2 passes: maps of 1 a signed settle.Pass and 2 the
// entry's signature by which it lends it (settle.Pass.Lend), 1 to mostLent of them. Shown by the
// entry, it is lent to the worker, which may show it on to those who compute for it; shown by
// another, it is lent to that one.
//
// Version 2 had neither SHOW nor SHOWN.

import (
	"fmt"

	"kvasird/p2p"
	"kvasird/settle"
)

const (
	// Protocol names the protocol, as hosts do.
	Protocol = "work/1"

	version      = 3
	mostLent     = 64
	maxAsk       = 96 << 10
	maxText      = 1 << 10
	maxModel     = 128 // bytes of a model id
	maxStatement = settle.MaxReport
	maxDivision  = 1 << 20
)

const (
	frameAsk uint8 = 1 + iota
	frameStatement
	frameRefused
	frameDivide
	frameDivision
	frameShow
	frameShown
)

// show is a SHOW.
type show struct {
	Version uint       `cbor:"1,keyasint"`
	Passes  []lentPass `cbor:"2,keyasint"`
}

type lentPass struct {
	Record []byte           `cbor:"1,keyasint"`
	Lent   settle.Signature `cbor:"2,keyasint"`
}

func decodeShow(payload []byte) (s show, err error) {
	if err := decodeAskRecord(payload, &s); err != nil {
		return s, fmt.Errorf("show: %w", err)
	}
	if s.Version != version || len(s.Passes) == 0 || len(s.Passes) > mostLent {
		return s, fmt.Errorf("show: version %d, %d passes: want %d, and 1 to %d", s.Version, len(s.Passes), version, mostLent)
	}
	return s, nil
}

// question is an ASK or a DIVIDE.
type question struct {
	Version uint           `cbor:"1,keyasint"`
	Network settle.Hash    `cbor:"2,keyasint"`
	Request settle.QuoteID `cbor:"3,keyasint"`
	Model   string         `cbor:"4,keyasint"`
	Lines   []settle.Line  `cbor:"5,keyasint"`
}

var encodeAsk, decodeAskRecord = p2p.ControlCodec(maxAsk, settle.MaxParts, 16)

func decodeAsk(payload []byte) (q question, err error) {
	if err := decodeAskRecord(payload, &q); err != nil {
		return q, fmt.Errorf("ask: %w", err)
	}
	switch {
	case q.Version != version:
		return q, fmt.Errorf("ask: version %d, this side speaks %d", q.Version, version)
	case q.Request == settle.QuoteID{}:
		return q, fmt.Errorf("ask: it names no request")
	case q.Model == "" || len(q.Model) > maxModel:
		return q, fmt.Errorf("ask: model id of %d bytes, want 1 to %d", len(q.Model), maxModel)
	case len(q.Lines) == 0:
		return q, fmt.Errorf("ask: no lines")
	}
	for i, l := range q.Lines {
		if l.Units == 0 || i > 0 && l.Part <= q.Lines[i-1].Part {
			return q, fmt.Errorf("ask: line %d: %d units of part %d: want parts ascending, units above 0", i, l.Units, l.Part)
		}
	}
	return q, nil
}

// division is a DIVISION.
type division struct {
	Version uint            `cbor:"1,keyasint"`
	Shares  []divisionShare `cbor:"2,keyasint"`
}

type divisionShare struct {
	Units     []uint64 `cbor:"1,keyasint"` // parts and units in turn
	Statement []byte   `cbor:"2,keyasint"`
}

var encodeDivision, decodeDivisionRecord = p2p.ControlCodec(maxDivision, 2*settle.MaxParts, 16)

// decodeDivision reads shares without a look at what they are of. Their workers are who signed.
func decodeDivision(payload []byte) ([]share, error) {
	var d division
	if err := decodeDivisionRecord(payload, &d); err != nil {
		return nil, fmt.Errorf("division: %w", err)
	}
	if d.Version != version || len(d.Shares) == 0 || len(d.Shares) > settle.MaxWorkers {
		return nil, fmt.Errorf("division: version %d, %d shares: want %d, and 1 to %d", d.Version, len(d.Shares), version, settle.MaxWorkers)
	}
	shares := make([]share, len(d.Shares))
	for i, s := range d.Shares {
		if len(s.Units) == 0 || len(s.Units)%2 != 0 {
			return nil, fmt.Errorf("division: share %d: %d numbers, want pairs", i, len(s.Units))
		}
		for j := 0; j < len(s.Units); j += 2 {
			part, units := s.Units[j], s.Units[j+1]
			if part >= settle.MaxParts || j > 0 && part <= s.Units[j-2] || units == 0 {
				return nil, fmt.Errorf("division: share %d: %d units of part %d: want parts ascending, units above 0", i, units, part)
			}
			shares[i].work.Lines = append(shares[i].work.Lines, settle.Line{Part: uint32(part), Units: units})
		}
		shares[i].statement = s.Statement
	}
	return shares, nil
}

// shareOf is a share on the wire.
func shareOf(s share) divisionShare {
	out := divisionShare{Statement: s.statement}
	for _, l := range s.work.Lines {
		out.Units = append(out.Units, uint64(l.Part), l.Units)
	}
	return out
}
