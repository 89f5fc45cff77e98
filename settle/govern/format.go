package govern

import (
	"encoding/binary"
	"errors"
	"fmt"

	"kvasird/settle"
)

// Format is how a wallet wraps the text that it signs.
type Format uint8

// The formats. What is signed, by format, for one signer:
//
//	OffchainV0  prefix, 0, domain (32 bytes: the network id), 1 (UTF-8), 1 (signers),
//	            wallet (32 bytes), length of the text (2 bytes, little endian), text
//	OffchainV1  prefix, 1, 1 (signers), wallet (32 bytes), text
//	Raw         text
//
// The prefix is "\xffsolana offchain", 16 bytes. Raw cannot be taken for a transaction: those begin
// with the number of signatures and the number of signers that only read, which is smaller; a
// text that begins with "kv" has it greater.
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
	utf8Format     = 1    // of an OffchainV0: text that a hardware wallet takes
	maxText        = 1147 // bytes: an OffchainV0 of 1232, the most that a hardware wallet takes
)

// Errors of formats.
var (
	ErrFormat = errors.New("no such format of a signed message")
	ErrLong   = errors.New("the text is longer than a hardware wallet signs")
)

// Wrap is the bytes that a wallet signs for a text, which begins with "kv", in a format.
// Errors: ErrFormat, ErrLong.
func Wrap(domain settle.Hash, wallet settle.Wallet, f Format, text string) ([]byte, error) {
	if len(text) > maxText {
		return nil, fmt.Errorf("govern: %w: %d bytes, at most %d", ErrLong, len(text), maxText)
	}
	var b []byte
	switch f {
	case OffchainV0:
		b = append(b, offchainPrefix+"\x00"...)
		b = append(b, domain[:]...)
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
