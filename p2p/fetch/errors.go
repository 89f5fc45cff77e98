package fetch

import (
	"errors"
	"fmt"
	"strings"
)

// Fault says how a source failed.
type Fault uint8

// Faults. FaultSlow and FaultStalled may befall an honest source; the others do not.
const (
	FaultData      Fault = 1 + iota // bytes that are not the model's
	FaultTree                       // a tree of hashes that is not the file's
	FaultModel                      // another model's manifest
	FaultHeld                       // refuses a range that it says it holds
	FaultTruncated                  // ends a range before its end
	FaultProtocol                   // breaks the protocol
	FaultSlow                       // gives less than the floor, or far less than the others
	FaultStalled                    // gives nothing for the stall timeout
)

var faultNames = [...]string{
	FaultData: "wrong data", FaultTree: "wrong tree", FaultModel: "another model",
	FaultHeld: "does not hold what it says", FaultTruncated: "truncated range",
	FaultProtocol: "broken protocol", FaultSlow: "too slow", FaultStalled: "stalled",
}

func (f Fault) String() string {
	if int(f) < len(faultNames) && f > 0 {
		return faultNames[f]
	}
	return fmt.Sprintf("fault %d", uint8(f))
}

// Malicious reports whether an honest source does not do this.
func (f Fault) Malicious() bool { return f < FaultSlow }

// BadSourceError says what a source did wrong.
type BadSourceError struct {
	Source string
	Fault  Fault
	Err    error // the details
}

func (e *BadSourceError) Error() string {
	return fmt.Sprintf("source %s: %v: %v", e.Source, e.Fault, e.Err)
}

func (e *BadSourceError) Unwrap() error { return e.Err }

// NoSourceError says that a fetch is not complete and nobody is left to ask. It wraps the
// reasons of the sources that were asked.
type NoSourceError struct {
	Model   [32]byte
	Missing int64   // bytes, without trees
	Sources []error // why each source is out
}

func (e *NoSourceError) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "model %x: no source left, %d bytes missing", e.Model[:4], e.Missing)
	if len(e.Sources) == 0 {
		b.WriteString(": no source is known")
	}
	for _, err := range e.Sources {
		fmt.Fprintf(&b, "; %v", err)
	}
	return b.String()
}

func (e *NoSourceError) Unwrap() []error { return e.Sources }

var (
	errNothing = errors.New("holds nothing of what is missing")
	errLeft    = errors.New("connection ended")
)
