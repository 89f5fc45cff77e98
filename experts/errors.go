package experts

import (
	"errors"
	"fmt"
	"strings"
)

// ErrClosed says that the Dispatcher or Worker was closed.
var ErrClosed = errors.New("experts: closed")

// ErrProtocol is wrapped by what ends a session with a peer that broke the protocol.
var ErrProtocol = errors.New("experts protocol broken by the peer")

func violation(err error) error { return fmt.Errorf("%w: %w", ErrProtocol, err) }

// Code says why a worker did not answer a request.
type Code uint16

const (
	CodeProtocol Code = 1 + iota // the session broke the protocol; it ends
	CodeBusy                     // the queue is full: try another replica, or this one later
	CodeExpired                  // the deadline passed before the call was computed
	CodeExpert                   // an expert or layer is outside the worker's slices
	CodeProgram                  // the kernel refused the program, or it was never given
	CodeLimit                    // more than was offered, or than one peer may have
	CodeKernel                   // the kernel failed
	CodeClosing                  // the worker is stopping
	CodeRights                   // this peer is not served here; the session ends
	CodeUnpaid                   // it is not known that somebody pays: show that, or go elsewhere

	lastCode = CodeUnpaid
)

var codeNames = [...]string{"", "protocol", "busy", "expired", "expert", "program", "limit", "kernel", "closing", "rights", "unpaid"}

func (c Code) String() string {
	if c > 0 && int(c) < len(codeNames) {
		return codeNames[c]
	}
	return fmt.Sprintf("code %d", uint16(c))
}

// RemoteError is what a worker answered instead of rows.
type RemoteError struct {
	Code Code
	Text string
}

func (e *RemoteError) Error() string { return "worker: " + e.Code.String() + ": " + e.Text }

// WrongModelError ends a session between sides that hold different models. Both get it.
type WrongModelError struct{ Offered, Wanted ModelID }

func (e *WrongModelError) Error() string {
	return fmt.Sprintf("worker serves model %s, dispatcher wants %s", e.Offered, e.Wanted)
}

// MissingError says that nobody computed some experts of a call, and why those who might have
// did not. The call can be repeated once a worker for them is back.
type MissingError struct {
	Layer   int
	Experts []int // ascending, each once
	Reasons []string
}

func (e *MissingError) Error() string {
	reasons := "no peer offers them"
	if len(e.Reasons) > 0 {
		reasons = strings.Join(e.Reasons, "; ")
	}
	return fmt.Sprintf("layer %d: no worker for experts %s: %s", e.Layer, ranges(e.Experts), reasons)
}

// ranges writes ascending numbers as "1-3, 7", at most eight ranges of them.
func ranges(n []int) string {
	var b strings.Builder
	for i, count := 0, 0; i < len(n); count++ {
		if count == 8 {
			fmt.Fprintf(&b, " and %d more", len(n)-i)
			break
		}
		j := i
		for j+1 < len(n) && n[j+1] == n[j]+1 {
			j++
		}
		if i > 0 {
			b.WriteString(", ")
		}
		fmt.Fprint(&b, n[i])
		if j > i {
			fmt.Fprintf(&b, "-%d", n[j])
		}
		i = j + 1
	}
	return b.String()
}
