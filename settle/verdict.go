package settle

import (
	"bytes"
	"crypto/ed25519"
	"errors"
	"fmt"
	"slices"
)

// Who judges: Auditors are drawn for a request, and VerdictSigners of them have to agree.
const (
	Auditors       = 3
	VerdictSigners = 2

	maxVerdict = 1 << 10 // bytes, signed
)

// Why says what a worker did. A number that is only off by the rounding of a backend is
// no reason: it makes a node unfit for a part, and costs nothing.
type Why uint8

// The reasons.
const (
	WrongWork     Why = iota + 1 // beyond ten times the tolerance of the backends, twice
	Contradiction                // two records that one signer cannot both mean, see Equivocation
	OtherWeights                 // not the model's
	lastWhy       = OtherWeights
	verdictDomain = "kvasir verdict 1\n"
)

func (w Why) String() string {
	if w == 0 || w > lastWhy {
		return fmt.Sprintf("reason %d", uint8(w))
	}
	return [...]string{"wrong work", "contradiction", "other weights"}[w-1]
}

// Verdict is what the auditors of a request found of one of its workers.
//
// Signed it is a map 1: the verdict, itself a map in bytes, 2: an array of an array of
// signer and signature for each who signed, signers ascending, over SHA-256 of the domain
// and those bytes. Core deterministic CBOR, keys are integers, nothing follows.
type Verdict struct {
	Network  Hash    `cbor:"1,keyasint"`
	Request  QuoteID `cbor:"2,keyasint"`
	Culprit  Node    `cbor:"3,keyasint"`
	Why      Why     `cbor:"4,keyasint"`
	Evidence Hash    `cbor:"5,keyasint"` // of what shows it, which the auditors keep
	Reporter Node    `cbor:"6,keyasint"` // who pointed at it; zero: the draw did
}

// Consent is an auditor's signature of a verdict.
type Consent struct {
	_         struct{} `cbor:",toarray"`
	Auditor   Node
	Signature Signature
}

type verdictEnvelope struct {
	Body     []byte    `cbor:"1,keyasint"`
	Consents []Consent `cbor:"2,keyasint"`
}

// Refusals of a verdict.
var (
	ErrVerdict      = errors.New("the verdict is not well formed")
	ErrJudges       = errors.New("the verdict is not signed by two of those who were drawn to audit the request")
	ErrInvolved     = errors.New("who took part in the request does not judge it")
	ErrVerdictLate  = errors.New("the bonds of the request's workers have left")
	ErrNoSuchWorker = errors.New("the node was not paid for the request")
)

func (v Verdict) check() error {
	bad := ""
	switch {
	case v.Network == Hash{} || v.Request == QuoteID{}:
		bad = "it names no network or no request"
	case v.Culprit == Node{}:
		bad = "it names no culprit"
	case v.Why == 0 || v.Why > lastWhy:
		bad = v.Why.String()
	case v.Evidence == Hash{}:
		bad = "it names no evidence"
	}
	if bad != "" {
		return fmt.Errorf("%w: %s", ErrVerdict, bad)
	}
	return nil
}

// Sign is an auditor's consent. Error: ErrVerdict.
func (v Verdict) Sign(key ed25519.PrivateKey) (Consent, error) {
	if err := v.check(); err != nil {
		return Consent{}, err
	}
	body, err := encMode.Marshal(v)
	if err != nil {
		return Consent{}, err
	}
	h := signedHash(verdictDomain, body)
	return Consent{Auditor: Node(key.Public().(ed25519.PublicKey)), Signature: Signature(ed25519.Sign(key, h[:]))}, nil
}

// Encode joins a verdict with what its auditors signed, in any order. Error: ErrVerdict.
func (v Verdict) Encode(consents ...Consent) ([]byte, error) {
	if err := v.check(); err != nil {
		return nil, err
	}
	body, err := encMode.Marshal(v)
	if err != nil {
		return nil, err
	}
	sorted := slices.SortedFunc(slices.Values(consents), func(a, b Consent) int { return bytes.Compare(a.Auditor[:], b.Auditor[:]) })
	return encMode.Marshal(verdictEnvelope{body, sorted})
}

// ParseVerdict reads a verdict and who signed it, each once. Whether those may judge,
// Judged says. Errors: ErrRecord, ErrVerdict, ErrWeakKey, ErrSignature.
func ParseVerdict(b []byte) (v Verdict, signers []Node, err error) {
	var e verdictEnvelope
	if err := decode(b, maxVerdict, &e); err != nil {
		return v, nil, err
	}
	if err := decode(e.Body, maxVerdict, &v); err != nil {
		return v, nil, err
	}
	if err := v.check(); err != nil {
		return v, nil, err
	}
	if len(e.Consents) > Auditors {
		return v, nil, fmt.Errorf("%w: %d signatures, at most %d", ErrVerdict, len(e.Consents), Auditors)
	}
	h := signedHash(verdictDomain, e.Body)
	for i, c := range e.Consents {
		if i > 0 && bytes.Compare(signers[i-1][:], c.Auditor[:]) >= 0 {
			return v, nil, fmt.Errorf("%w: signer %s is not in order", ErrVerdict, c.Auditor)
		}
		if err := Verify(c.Auditor, h[:], c.Signature); err != nil {
			return v, nil, err
		}
		signers = append(signers, c.Auditor)
	}
	return v, signers, nil
}

// Judged refuses a verdict whose signers are not enough of the drawn auditors, or of whom
// one took part in the request: its entry, its workers, the reporter. Errors: ErrJudges,
// ErrInvolved.
func (v Verdict) Judged(signers, drawn, involved []Node) error {
	judges := 0
	for _, s := range signers {
		switch {
		case s == v.Culprit || s == v.Reporter || slices.Contains(involved, s):
			return fmt.Errorf("%w: %s", ErrInvolved, s)
		case slices.Contains(drawn, s):
			judges++
		}
	}
	if len(drawn) > Auditors || judges < VerdictSigners || judges < len(signers) {
		return fmt.Errorf("%w: %d of %d signers are of the %d drawn, %d are needed, and no others", ErrJudges, judges, len(signers), len(drawn), VerdictSigners)
	}
	return nil
}
