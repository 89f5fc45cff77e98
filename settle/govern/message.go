package govern

import (
	"crypto/ed25519"
	"encoding/binary"
	"errors"
	"fmt"
	"strings"

	"filippo.io/edwards25519"

	"kvasird/settle"
)

// Format is how a wallet wraps the text that it signs.
type Format uint8

// The formats. What is signed, by format, for one signer:
//
//	OffchainV0  prefix, 0, network id (32 bytes, the application domain), 1 (UTF-8), 1 (signers),
//	            wallet (32 bytes), length of the text (2 bytes, little endian), text
//	OffchainV1  prefix, 1, 1 (signers), wallet (32 bytes), text
//	Raw         text
//
// The prefix is "\xffsolana offchain", 16 bytes. Raw cannot be taken for a transaction: those begin
// with the number of signatures and the number of signers that only read, which is smaller; the
// text begins with "kv", where it is greater.
const (
	OffchainV0 Format = 1 + iota
	OffchainV1
	Raw
)

// ParseFormat reads what String writes.
func ParseFormat(s string) (Format, error) {
	for _, f := range []Format{OffchainV0, OffchainV1, Raw} {
		if s == f.String() {
			return f, nil
		}
	}
	return 0, fmt.Errorf("govern: %.20q: %w: v0, v1 and raw are", s, ErrFormat)
}

func (f Format) String() string {
	if f < OffchainV0 || f > Raw {
		return "unknown"
	}
	return [...]string{"v0", "v1", "raw"}[f-1]
}

const (
	offchainPrefix = "\xffsolana offchain"
	firstLine      = "kvasir governance v1\n"
	utf8Format     = 1    // of an OffchainV0: text that a hardware wallet takes
	maxText        = 1147 // bytes: an OffchainV0 of 1232, the most that a hardware wallet takes
)

// Errors of signatures.
var (
	ErrFormat     = errors.New("no such format of a signed message")
	ErrText       = errors.New("the wallet signed another text than this proposal's")
	ErrSignature  = errors.New("the signature is not the wallet's over this proposal")
	ErrSmallOrder = errors.New("a key that anybody can sign for")
	ErrKey        = errors.New("not a point of the curve in its one encoding")
)

// Signature is one wallet's consent to a proposal.
type Signature struct {
	Wallet settle.Wallet
	Format Format
	Signed []byte // what the wallet says that it signed; it has to be what Message gives
	Bytes  settle.Signature
}

// Text is what a wallet shows its owner: every number of the proposal, for this wallet alone.
func (p *Proposal) Text(wallet settle.Wallet) string {
	var b strings.Builder
	b.WriteString(firstLine)
	fmt.Fprintf(&b, "network: %x\ncluster: %s\nproposal: %d\n", p.Network[:], p.Cluster, p.Sequence)
	for _, c := range p.Changes {
		fmt.Fprintf(&b, "%s: %d -> %d\n", c.Name, c.Old, c.New)
	}
	fmt.Fprintf(&b, "from epoch: %d\nsign before: %d\nwallet: %s\nchoice: approve\n", p.Epoch, p.Expires, wallet)
	return b.String()
}

// Message is the bytes that a wallet signs in a format.
func (p *Proposal) Message(wallet settle.Wallet, f Format) ([]byte, error) {
	text := p.Text(wallet)
	if len(text) > maxText {
		return nil, fmt.Errorf("govern: %w: a text of %d bytes, at most %d: change fewer parameters at once", ErrProposal, len(text), maxText)
	}
	var b []byte
	switch f {
	case OffchainV0:
		b = append(b, offchainPrefix+"\x00"...)
		b = append(b, p.Network[:]...)
		b = append(b, utf8Format, 1)
		b = append(b, wallet[:]...)
		b = binary.LittleEndian.AppendUint16(b, uint16(len(text)))
	case OffchainV1:
		b = append(b, offchainPrefix+"\x01\x01"...)
		b = append(b, wallet[:]...)
	case Raw:
	default:
		return nil, fmt.Errorf("govern: %d: %w", f, ErrFormat)
	}
	return append(b, text...), nil
}

// Verify says whether a wallet consents to the proposal.
func (p *Proposal) Verify(s Signature) error {
	if err := checkKey(s.Wallet); err != nil {
		return err
	}
	want, err := p.Message(s.Wallet, s.Format)
	if err != nil {
		return err
	}
	if string(s.Signed) != string(want) {
		return fmt.Errorf("govern: wallet %s, format %s: %w: propose again, and sign what that gives", s.Wallet, s.Format, ErrText)
	}
	if !ed25519.Verify(s.Wallet[:], want, s.Bytes[:]) {
		return fmt.Errorf("govern: wallet %s, format %s: %w", s.Wallet, s.Format, ErrSignature)
	}
	return nil
}

// checkKey refuses the keys of small order, for which a fixed signature fits many messages, and
// second encodings of a key.
func checkKey(k settle.Key) error {
	point, err := new(edwards25519.Point).SetBytes(k[:])
	if err != nil || string(point.Bytes()) != string(k[:]) {
		return fmt.Errorf("govern: key %s: %w", k, ErrKey)
	}
	if new(edwards25519.Point).MultByCofactor(point).Equal(edwards25519.NewIdentityPoint()) == 1 {
		return fmt.Errorf("govern: key %s: %w: use a wallet's", k, ErrSmallOrder)
	}
	return nil
}
