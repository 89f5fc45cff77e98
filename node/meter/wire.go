package meter

// The wire format of /kvasir/<net>/work/1, version 1.
//
// Frames are those of package p2p: a 16-byte header (payload length, type, flags, id) and
// a payload. Flags and id are 0. A stream is one question and one answer.
//
//	type         from    payload
//	1 ASK        entry   CBOR, at most maxAsk bytes
//	2 STATEMENT  worker  a settle.Report of the worker, signed: its statement about the request
//	3 REFUSED    worker  UTF-8 text, up to maxText bytes: why there is none
//
// ASK is a deterministic CBOR map with integer keys: 1 version, 2 network (32 bytes), 3
// request (16 bytes), 4 model id, 5 lines: maps of 1 part and 2 units, by part ascending,
// units above 0, up to settle.MaxParts. Decoding refuses any other encoding of the same
// value, unknown keys and keys given twice. The entry is who the connection says.
//
// The statement has of each line what the worker computed for the entry, was not signed
// before, and is not above what the line says, added to what it signed of the request
// before. Asked again, it says the same.

import (
	"fmt"

	"kvasird/p2p"
	"kvasird/settle"
)

const (
	// Protocol names the protocol, as hosts do.
	Protocol = "work/1"

	version   = 1
	maxAsk    = 96 << 10
	maxText   = 1 << 10
	maxModel  = 128 // bytes of a model id
	maxAnswer = settle.MaxReport
)

const (
	frameAsk uint8 = 1 + iota
	frameStatement
	frameRefused
)

// question is an ASK.
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
