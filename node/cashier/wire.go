package cashier

// The wire format of /kvasir/<net>/settle/1, version 1.
//
// A stream is one call of Service. The node that calls is the peer of the stream, whose
// ed25519 key its handshake proved. Frames are those of package p2p: a 16-byte header
// (payload length, type, flags, id) and a payload; flags and id are 0.
//
//	type       from    payload
//	1 to 17    client  the call, first and only frame: what it takes
//	128 DONE   server  what the call gives
//	129 NO     server  Refusal; one without a code is a failure of the settlement
//
//	 1 Terms   empty         5 Debit    quote id     9 Deposit  Deposit     13 Activate Activation
//	 2 Quote   Ask           6 Run      quote id    10 Unstake  Move        14 Ledger   key
//	 3 Pay     Proof         7 End      Ended       11 Claim    Move
//	 4 PayX402 Partial       8 Link     Link        12 Propose  Change      15 Request  quote id
//	16 Complain Complaint     17 Credits quote ids, up to MaxCredits
//
// Payloads are deterministic CBOR: a struct is a map with the names of its JSON form as
// keys (the Go names where it has none), keys, hashes, ids and signatures are byte
// strings, amounts are unsigned integers. Decoding refuses any other encoding of the same
// value, unknown keys, keys given twice and trailing bytes. END has at most maxEnd bytes,
// all other calls maxCall, answers maxDone.

import (
	"context"
	"fmt"

	"kvasird/p2p"
	"kvasird/settle"
)

// Protocol names the protocol, as hosts do.
const Protocol = "settle/1"

// Limits of a payload: bytes, elements of a list, pairs of a map.
const (
	maxCall     = 64 << 10
	maxEnd      = 1 << 20
	maxDone     = 1 << 20
	maxElements = 2 * settle.MaxWorkers
	maxPairs    = 64
)

// op is a call, as the type of its frame.
type op uint8

// The calls, in the order of the table above.
const (
	opTerms op = 1 + iota
	opQuote
	opPay
	opPayX402
	opDebit
	opRun
	opEnd
	opLink
	opDeposit
	opUnstake
	opClaim
	opPropose
	opActivate
	opLedger
	opRequest
	opComplain
	opCredits
)

// The answers.
const (
	frameDone = 128
	frameNo   = 129
)

var (
	encodeCall, decodeCall = p2p.ControlCodec(maxEnd, maxElements, maxPairs)
	encodeDone, decodeDone = p2p.ControlCodec(maxDone, maxElements, maxPairs)
)

// noArgs is what Terms takes.
type noArgs struct{}

// handler carries out a call of a payload for a node.
type handler func(ctx context.Context, s Service, payload []byte) (any, error)

// handlerOf makes the handler of a method.
func handlerOf[In, Out any](call func(Service, context.Context, In) (Out, error)) handler {
	return func(ctx context.Context, s Service, payload []byte) (any, error) {
		var in In
		if err := decodeCall(payload, &in); err != nil {
			return nil, &protocolError{fmt.Sprintf("what was asked cannot be read: %v", err)}
		}
		return call(s, ctx, in)
	}
}

var handlers = map[op]handler{
	opTerms:    handlerOf(func(s Service, ctx context.Context, _ noArgs) (Terms, error) { return s.Terms(ctx) }),
	opQuote:    handlerOf(Service.Quote),
	opPay:      handlerOf(Service.Pay),
	opPayX402:  handlerOf(Service.PayX402),
	opDebit:    handlerOf(Service.Debit),
	opRun:      handlerOf(Service.Run),
	opEnd:      handlerOf(Service.End),
	opLink:     handlerOf(Service.Link),
	opDeposit:  handlerOf(Service.Deposit),
	opUnstake:  handlerOf(Service.Unstake),
	opClaim:    handlerOf(Service.Claim),
	opPropose:  handlerOf(Service.Propose),
	opActivate: handlerOf(Service.Activate),
	opLedger:   handlerOf(Service.Ledger),
	opRequest:  handlerOf(Service.Request),
	opCredits:  handlerOf(Service.Credits),
	opComplain: handlerOf(Service.Complain),
}

// protocolError is what only a peer with another idea of the protocol sends.
type protocolError struct{ text string }

func (e *protocolError) Error() string { return e.text }

// readCall finds the handler of a frame.
func readCall(f p2p.Frame) (handler, error) {
	h, ok := handlers[op(f.Type)]
	switch {
	case f.Flags != 0 || f.ID != 0:
		return nil, &protocolError{fmt.Sprintf("frame with flags %#x and id %d", f.Flags, f.ID)}
	case !ok:
		return nil, &protocolError{fmt.Sprintf("there is no call %d: is one side older than the other?", f.Type)}
	case op(f.Type) != opEnd && len(f.Payload) > maxCall:
		return nil, &protocolError{fmt.Sprintf("call %d of %d bytes, at most %d", f.Type, len(f.Payload), maxCall)}
	}
	return h, nil
}

// readAnswer reads an answer into out.
func readAnswer(f p2p.Frame, out any) error {
	if f.Flags != 0 || f.ID != 0 {
		return &protocolError{fmt.Sprintf("frame with flags %#x and id %d", f.Flags, f.ID)}
	}
	switch f.Type {
	case frameDone:
		if err := decodeDone(f.Payload, out); err != nil {
			return &protocolError{err.Error()}
		}
		return nil
	case frameNo:
		r := new(Refusal)
		if err := decodeDone(f.Payload, r); err != nil {
			return &protocolError{err.Error()}
		}
		if r.Code == "" {
			return fmt.Errorf("%w: %.1000s", ErrFailed, r.Text)
		}
		return r
	}
	return &protocolError{fmt.Sprintf("answer of type %d", f.Type)}
}
