package settle

import (
	"bytes"
	"crypto/ed25519"
	"errors"
	"fmt"
)

// Limits of a report.
const (
	MaxReport  = 256 << 10 // bytes, signed
	MaxWorkers = 1024      // of one request
	MaxReports = 256       // of one signer about one request
)

// Role says what a report is: a worker's statement of its own work, or the receipt that
// joins the work of all, by the entry node or the payer.
type Role uint8

// The roles.
const (
	Statement Role = iota + 1
	Receipt
)

func (r Role) String() string {
	return map[Role]string{Statement: "statement", Receipt: "receipt"}[r]
}

var reportDomains = map[Role]string{Statement: "kvasir statement 1\n", Receipt: "kvasir receipt 1\n"}

// Report is what one node says of one request so far. It is cumulative: the last one
// says all, so that order, loss and repetition do not matter.
//
// On the wire it is a map 1: the report, itself a map in bytes, 2: the signature of 64
// bytes over SHA-256 of the role's domain and those bytes. Core deterministic CBOR, keys
// are integers, nothing follows.
type Report struct {
	Role    Role    `cbor:"1,keyasint"`
	Network Hash    `cbor:"2,keyasint"`
	Request QuoteID `cbor:"3,keyasint"`
	Signer  Node    `cbor:"4,keyasint"`
	Seq     uint64  `cbor:"5,keyasint"` // from 1
	Tokens  uint64  `cbor:"6,keyasint"` // delivered, prompt included; 0 in a statement
	Work    []Work  `cbor:"7,keyasint"` // by worker, ascending; one in a statement
}

type envelope struct {
	Body      []byte    `cbor:"1,keyasint"`
	Signature Signature `cbor:"2,keyasint"`
}

// Refusals of reports.
var (
	ErrReport       = errors.New("the report is not well formed")
	ErrEquivocation = errors.New("the signer says two things: it is suspended, and both records are kept")
	ErrReports      = errors.New("too many reports about one request")
	ErrOtherChain   = errors.New("the report is of another signer, request, network or role")
)

func (r Report) check() error {
	bad := ""
	switch {
	case r.Role != Statement && r.Role != Receipt:
		bad = fmt.Sprintf("role %d", r.Role)
	case r.Seq == 0 || r.Seq == ^uint64(0):
		bad = "the sequence begins with 1"
	case r.Request == QuoteID{} || r.Network == Hash{}:
		bad = "it names no request or no network"
	case r.Tokens > 2*MaxTokens:
		bad = fmt.Sprintf("%d tokens, at most %d", r.Tokens, 2*MaxTokens)
	case r.Role == Statement && (len(r.Work) != 1 || r.Work[0].Worker != r.Signer || r.Tokens != 0):
		bad = "a statement has the work of its signer alone, and no tokens"
	case len(r.Work) > MaxWorkers:
		bad = fmt.Sprintf("%d workers, at most %d", len(r.Work), MaxWorkers)
	}
	if bad != "" {
		return fmt.Errorf("%w: %s", ErrReport, bad)
	}
	for i, w := range r.Work {
		if i > 0 && bytes.Compare(r.Work[i-1].Worker[:], w.Worker[:]) >= 0 {
			return fmt.Errorf("%w: worker %s is not in order", ErrReport, w.Worker)
		}
		if err := checkLines(w.Lines, MaxParts); err != nil {
			return fmt.Errorf("%w: worker %s: %w", ErrReport, w.Worker, err)
		}
	}
	return nil
}

// Sign encodes the report with a signature by its signer's key. Error: ErrReport.
func (r Report) Sign(key ed25519.PrivateKey) ([]byte, error) {
	if err := r.check(); err != nil {
		return nil, err
	}
	if !bytes.Equal(key.Public().(ed25519.PublicKey), r.Signer[:]) {
		return nil, fmt.Errorf("%w: the key is not its signer's", ErrReport)
	}
	body, err := encMode.Marshal(r)
	if err != nil {
		return nil, err
	}
	h := signedHash(reportDomains[r.Role], body)
	b, err := encMode.Marshal(envelope{body, Signature(ed25519.Sign(key, h[:]))})
	if err == nil && len(b) > MaxReport {
		err = fmt.Errorf("%w: %d bytes, at most %d", ErrReport, len(b), MaxReport)
	}
	return b, err
}

// ParseReport reads and verifies a signed report. Errors: ErrRecord, ErrReport,
// ErrWeakKey, ErrSignature.
func ParseReport(b []byte) (Report, error) {
	var e envelope
	if err := decode(b, MaxReport, &e); err != nil {
		return Report{}, err
	}
	var r Report
	if err := decode(e.Body, MaxReport, &r); err != nil {
		return Report{}, err
	}
	if err := r.check(); err != nil {
		return Report{}, err
	}
	h := signedHash(reportDomains[r.Role], e.Body)
	if err := Verify(r.Signer, h[:], e.Signature); err != nil {
		return Report{}, err
	}
	return r, nil
}

// Hash names the content of a report, whoever signed it how often.
func (r Report) Hash() Hash {
	body := must(encMode.Marshal(r)) // integers and bytes: it cannot fail
	return signedHash(reportDomains[r.Role], body)
}

// Chain is what one signer said about one request. Its zero value has heard nothing.
type Chain struct {
	Last Report // of the highest sequence number
	Seen []Seen
}

// Seen is the content under a sequence number.
type Seen struct {
	Seq  uint64
	Hash Hash
}

// Equivocation are two records that one signer cannot both mean: the record of Seq whose
// content is Old, and the one whose content is New. Its error is ErrEquivocation.
type Equivocation struct {
	Signer   Node
	Request  QuoteID
	Old, New Seen
}

func (e *Equivocation) Error() string {
	return fmt.Sprintf("%v: %s about %s, sequence %d and %d", ErrEquivocation, e.Signer, e.Request, e.Old.Seq, e.New.Seq)
}

// Unwrap gives ErrEquivocation.
func (e *Equivocation) Unwrap() error { return ErrEquivocation }

// Take adds a verified report. The same report again, or an older one, changes nothing.
// Errors: ErrOtherChain, ErrReports, *Equivocation.
func (c Chain) Take(r Report) (Chain, error) {
	now := Seen{r.Seq, r.Hash()}
	if len(c.Seen) == 0 {
		return Chain{r, []Seen{now}}, nil
	}
	last := c.Last
	if r.Role != last.Role || r.Network != last.Network || r.Request != last.Request || r.Signer != last.Signer {
		return c, ErrOtherChain
	}
	for _, s := range c.Seen {
		if s == now {
			return c, nil
		}
		if s.Seq == now.Seq {
			return c, &Equivocation{r.Signer, r.Request, s, now}
		}
	}
	older, newer := last, r
	if r.Seq < last.Seq {
		older, newer = r, last
	}
	if !newer.covers(older) {
		return c, &Equivocation{r.Signer, r.Request, Seen{last.Seq, last.Hash()}, now}
	}
	if len(c.Seen) >= MaxReports {
		return c, fmt.Errorf("%w: %d, join them in fewer", ErrReports, len(c.Seen))
	}
	return Chain{newer, append(append([]Seen(nil), c.Seen...), now)}, nil
}

// covers says whether nothing of old is less in r.
func (r Report) covers(old Report) bool {
	if r.Tokens < old.Tokens {
		return false
	}
	units := r.units()
	for _, w := range old.Work {
		for _, l := range w.Lines {
			if units[unitKey{w.Worker, l.Part}] < l.Units {
				return false
			}
		}
	}
	return true
}

type unitKey struct {
	worker Node
	part   uint32
}

func (r Report) units() map[unitKey]uint64 {
	units := map[unitKey]uint64{}
	for _, w := range r.Work {
		for _, l := range w.Lines {
			units[unitKey{w.Worker, l.Part}] = l.Units
		}
	}
	return units
}
