package audit

import (
	"bytes"
	"crypto/ed25519"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"unicode/utf8"

	"github.com/fxamacker/cbor/v2"
)

// Limits of a record.
const (
	MaxRecord   = 5 << 20 // bytes, signed
	mostAnswers = 4
	mostText    = 256 // bytes of a name
	mostReason  = 1 << 10

	recordDomain = "kvasir audit 1\n"
)

// Record is what an audit found, as who audited signs it.
//
// Signed it is a map 1: the record, itself a map in bytes, 2: the signer's ed25519 key, 3: the
// signature over SHA-256 of the domain and those bytes. Core deterministic CBOR, keys are integers,
// nothing follows.
type Record struct {
	Network string         `cbor:"1,keyasint"` // id
	Model   string         `cbor:"2,keyasint"` // id
	Layer   uint32         `cbor:"3,keyasint"`
	Program [32]byte       `cbor:"4,keyasint"` // SHA-256 of the expert program
	Inputs  [32]byte       `cbor:"5,keyasint"` // SHA-256 of the row, little-endian f32
	Expert  uint32         `cbor:"6,keyasint"` // of the pair that is off most
	Answers []RecordAnswer `cbor:"7,keyasint"` // for that pair
	Culprit string         `cbor:"8,keyasint"` // peer id
	Wrong   bool           `cbor:"9,keyasint"` // beyond SlashFactor bands, else drift
	Reason  string         `cbor:"10,keyasint"`
	Time    int64          `cbor:"11,keyasint"` // Unix seconds
}

// RecordAnswer is the row that one computed.
type RecordAnswer struct {
	By  string `cbor:"1,keyasint"` // peer id; empty: the signer's own copy
	Row []byte `cbor:"2,keyasint"` // little-endian f32
}

type recordEnvelope struct {
	Body      []byte `cbor:"1,keyasint"`
	Signer    []byte `cbor:"2,keyasint"`
	Signature []byte `cbor:"3,keyasint"`
}

// ErrRecord refuses a record.
var ErrRecord = errors.New("the record of an audit is not well formed")

var (
	encMode = must(cbor.CoreDetEncOptions().EncMode())
	decMode = must(cbor.DecOptions{
		DupMapKey: cbor.DupMapKeyEnforcedAPF, IndefLength: cbor.IndefLengthForbidden, TagsMd: cbor.TagsForbidden,
		MaxNestedLevels: 4, MaxArrayElements: 32, MaxMapPairs: 16, ExtraReturnErrors: cbor.ExtraDecErrorUnknownField,
	}.DecMode())
)

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

// RowBytes is a row as records have it.
func RowBytes(row []float32) []byte {
	out := make([]byte, 0, 4*len(row))
	for _, x := range row {
		out = binary.LittleEndian.AppendUint32(out, math.Float32bits(x))
	}
	return out
}

func (r Record) check() error {
	bad := ""
	switch {
	case !isName(r.Network) || !isName(r.Model) || !isName(r.Culprit):
		bad = "it names no network, model or culprit"
	case len(r.Answers) < 2 || len(r.Answers) > mostAnswers:
		bad = fmt.Sprintf("%d answers, 2 to %d", len(r.Answers), mostAnswers)
	case r.Reason == "" || len(r.Reason) > mostReason || !utf8.ValidString(r.Reason):
		bad = "it gives no reason"
	case r.Time <= 0:
		bad = "it has no time"
	}
	accused := false
	for i, a := range r.Answers {
		accused = accused || a.By == r.Culprit
		if a.By != "" && !isName(a.By) || len(a.Row) == 0 || len(a.Row)%4 != 0 || len(a.Row) != len(r.Answers[0].Row) {
			bad = fmt.Sprintf("answer %d is of nobody, or no row like the others", i)
		}
		for _, o := range r.Answers[:i] {
			if o.By == a.By {
				bad = fmt.Sprintf("answer %d is of one who answered before", i)
			}
		}
	}
	if bad == "" && !accused {
		bad = "the culprit answered nothing"
	}
	if bad != "" {
		return fmt.Errorf("%w: %s", ErrRecord, bad)
	}
	return nil
}

func isName(s string) bool { return s != "" && len(s) <= mostText && utf8.ValidString(s) }

func recordHash(body []byte) []byte {
	h := sha256.Sum256(append([]byte(recordDomain), body...))
	return h[:]
}

// Sign encodes a record with a signature. Error: ErrRecord.
func (r Record) Sign(key ed25519.PrivateKey) ([]byte, error) {
	if err := r.check(); err != nil {
		return nil, err
	}
	body, err := encMode.Marshal(r)
	if err != nil {
		return nil, err
	}
	return encMode.Marshal(recordEnvelope{body, key.Public().(ed25519.PublicKey), ed25519.Sign(key, recordHash(body))})
}

// ParseRecord reads a signed record, and who signed it. Error: ErrRecord.
func ParseRecord(b []byte) (r Record, signer ed25519.PublicKey, err error) {
	var e recordEnvelope
	if err := decode(b, &e); err != nil {
		return r, nil, err
	}
	if err := decode(e.Body, &r); err != nil {
		return Record{}, nil, err
	}
	if err := r.check(); err != nil {
		return Record{}, nil, err
	}
	if len(e.Signer) != ed25519.PublicKeySize || !ed25519.Verify(e.Signer, recordHash(e.Body), e.Signature) {
		return Record{}, nil, fmt.Errorf("%w: the signature does not hold", ErrRecord)
	}
	return r, e.Signer, nil
}

func decode(b []byte, v any) error {
	if len(b) > MaxRecord {
		return fmt.Errorf("%w: %d bytes, at most %d", ErrRecord, len(b), MaxRecord)
	}
	if err := decMode.Unmarshal(b, v); err != nil {
		return fmt.Errorf("%w: %v", ErrRecord, err)
	}
	if again, err := encMode.Marshal(v); err != nil || !bytes.Equal(again, b) {
		return fmt.Errorf("%w: it is not in its one encoding", ErrRecord)
	}
	return nil
}
