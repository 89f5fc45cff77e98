package ring

import (
	"errors"
	"fmt"
)

// ErrClosed says that the Stage or Entry was closed.
var ErrClosed = errors.New("ring: closed")

// ErrProtocol is wrapped by what ends a link with a peer that broke the protocol.
var ErrProtocol = errors.New("ring protocol broken by the peer")

func violation(err error) error { return fmt.Errorf("%w: %w", ErrProtocol, err) }

// Code says why a stage refused or ended a session or a link.
type Code uint16

const (
	CodeProtocol Code = 1 + iota // the protocol was broken
	CodeRights                   // this peer, or this key, is not served here
	CodeModel                    // another model, pack, window or row width
	CodeLimit                    // more than the stage allows to one session
	CodeBusy                     // no free sequence or memory: later, or elsewhere
	CodeLeaving                  // the stage will stop; it still serves the session
	CodeClosing                  // the stage takes no new sessions
	CodeUnknown                  // no such session (any more)
	CodeStale                    // the epoch is over
	CodeLost                     // the stage that is meant does not answer
	CodeRows                     // the rows of the stage that is meant are not finite
	CodeCompute                  // the stage could not compute
	CodeReset                    // the stage lost what it had of the session
	CodeRequest                  // the request is wrong
	CodeUnpaid                   // it is not known that somebody pays the entry's requests

	lastCode = CodeUnpaid
)

var codeNames = [...]string{"", "protocol", "rights", "model", "limit", "busy", "leaving", "closing", "unknown session", "stale epoch",
	"lost", "bad rows", "compute", "reset", "request", "unpaid"}

func (c Code) String() string {
	if c > 0 && int(c) < len(codeNames) {
		return codeNames[c]
	}
	return fmt.Sprintf("code %d", uint16(c))
}

// final says whether another chain cannot help.
func (c Code) final() bool { return c == CodeCompute || c == CodeRequest }

// StageError says which stage ended a session, or kept it from opening, and why.
type StageError struct {
	Index int // place in the chain
	Hop   Hop
	Code  Code
	Text  string
}

func (e *StageError) Error() string {
	return fmt.Sprintf("stage %d (%v): %v: %s", e.Index, e.Hop, e.Code, e.Text)
}

// RefusedError is a link that a stage refused or ended.
type RefusedError struct {
	Code Code
	Text string
}

func (e *RefusedError) Error() string { return "refused: " + e.Code.String() + ": " + e.Text }
