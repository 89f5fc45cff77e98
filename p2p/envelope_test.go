package p2p

import (
	"bytes"
	"crypto/ed25519"
	"encoding/hex"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/libp2p/go-libp2p/core/crypto"
)

// seedIdentity is the identity of the ed25519 seed of 32 times b.
func seedIdentity(t testing.TB, b byte) Identity {
	t.Helper()
	key, err := crypto.UnmarshalEd25519PrivateKey(ed25519.NewKeyFromSeed(bytes.Repeat([]byte{b}, 32)))
	if err != nil {
		t.Fatal(err)
	}
	id, err := identityOf(key)
	if err != nil {
		t.Fatal(err)
	}
	return id
}

var envelopeTime = time.UnixMilli(1_800_000_000_000)

func testEnvelope(t testing.TB) Envelope {
	t.Helper()
	return Envelope{
		Topic: "coverage", From: seedIdentity(t, 1).ID(), Seq: uint64(envelopeTime.UnixMicro()),
		Issued: envelopeTime, Validity: time.Minute, Body: []byte("body"),
	}
}

const (
	authorHex = "5826 0024 0801 1220 8a88e3dd7409f195fd52db2d3cba5d72ca6709bf1d94121bf3748801b40f6f5c"
	recordHex = "a6 01 68636f766572616765 02" + authorHex +
		"03 1b 00066517289880 00 04 1b 000001a3185c5000 05 19ea60 06 44626f6479"
)

func TestEnvelopeLiteralBytes(t *testing.T) {
	id, e := seedIdentity(t, 1), testEnvelope(t)
	got, err := id.Seal("testnet", e)
	if err != nil {
		t.Fatal(err)
	}
	record := unhex(t, recordHex)
	if !bytes.Equal(got[:len(got)-64], record) {
		t.Errorf("record\n got %x\nwant %x", got[:len(got)-64], record)
	}
	seed := ed25519.NewKeyFromSeed(bytes.Repeat([]byte{1}, 32))
	sig := ed25519.Sign(seed, append([]byte("kvasir envelope 1\x00testnet\x00"), record...))
	if !bytes.Equal(got[len(got)-64:], sig) {
		t.Errorf("signature %x, want %x", got[len(got)-64:], sig)
	}
	back, err := OpenEnvelope("testnet", got, envelopeTime)
	if err != nil {
		t.Fatal(err)
	}
	if back.Topic != e.Topic || back.From != e.From || back.Seq != e.Seq || !back.Issued.Equal(e.Issued) ||
		back.Validity != e.Validity || !bytes.Equal(back.Body, e.Body) {
		t.Errorf("opened %+v, want %+v", back, e)
	}
}

func TestSealRefused(t *testing.T) {
	tests := []struct {
		name   string
		change func(*Envelope)
		want   error
	}{
		{"topic", func(e *Envelope) { e.Topic = "Coverage" }, ErrEnvelope},
		{"long topic", func(e *Envelope) { e.Topic = strings.Repeat("a", 33) }, ErrEnvelope},
		{"no time", func(e *Envelope) { e.Issued = time.Time{} }, ErrEnvelope},
		{"no validity", func(e *Envelope) { e.Validity = 0 }, ErrOversized},
		{"validity", func(e *Envelope) { e.Validity = time.Hour + time.Millisecond }, ErrOversized},
		{"body", func(e *Envelope) { e.Body = make([]byte, MaxBody+1) }, ErrOversized},
		{"author", func(e *Envelope) { e.From = seedIdentity(t, 2).ID() }, nil},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			e := testEnvelope(t)
			tt.change(&e)
			if _, err := seedIdentity(t, 1).Seal("testnet", e); err == nil || tt.want != nil && !errors.Is(err, tt.want) {
				t.Errorf("got %v, want %v", err, tt.want)
			}
		})
	}
}

// signRecord makes an envelope of any bytes, signed by seed 1.
func signRecord(network string, record []byte) []byte {
	seed := ed25519.NewKeyFromSeed(bytes.Repeat([]byte{1}, 32))
	return append(bytes.Clone(record), ed25519.Sign(seed, envelopeMessage(network, record))...)
}

func TestEnvelopeRefused(t *testing.T) {
	replace := func(old, new string) string {
		r := strings.ReplaceAll(recordHex, " ", "")
		old, new = strings.ReplaceAll(old, " ", ""), strings.ReplaceAll(new, " ", "")
		if strings.Count(r, old) != 1 {
			t.Fatalf("%s is in the record %d times", old, strings.Count(r, old))
		}
		return strings.Replace(r, old, new, 1)
	}
	body := "06 44626f6479"
	tests := []struct {
		name, record string
		want         error
	}{
		{"empty map", "a0", ErrEnvelope},
		{"not a map", "01", ErrEnvelope},
		{"cut", "a6 01", ErrEnvelope},
		{"trailing byte", recordHex + "00", ErrEnvelope},
		{"duplicate key", replace(body, "05 19ea60"), ErrEnvelope},
		{"unknown key", "a7" + recordHex[2:] + "07 01", ErrEnvelope},
		{"missing key", "a5" + replace(body, "")[2:], ErrEnvelope},
		{"keys out of order", "a6 02" + authorHex + "01 68636f766572616765" + recordHex[strings.Index(recordHex, "03 1b"):], ErrEnvelope},
		{"indefinite map", "bf" + recordHex[2:] + "ff", ErrEnvelope},
		{"indefinite body", replace(body, "06 5f 44626f6479 ff"), ErrEnvelope},
		{"tag", replace(body, "06 c2 44626f6479"), ErrEnvelope},
		{"float", replace("05 19ea60", "05 fa476a6000"), ErrEnvelope},
		{"long form of a number", replace("05 19ea60", "05 1a0000ea60"), ErrEnvelope},
		{"null body", replace(body, "06 f6"), ErrEnvelope},
		{"negative number", replace("05 19ea60", "05 39ea60"), ErrEnvelope},
		{"topic in capitals", replace("68636f766572616765", "68434f564552414745"), ErrEnvelope},
		{"empty topic", replace("68636f766572616765", "60"), ErrEnvelope},
		{"long topic", replace("68636f766572616765", "7821"+strings.Repeat("61", 33)), ErrEnvelope},
		{"author is no peer id", replace(authorHex, "43010203"), ErrEnvelope},
		{"author without a key in its id", replace(authorHex, "5822 1220"+strings.Repeat("05", 32)), ErrEnvelope},
		{"author with a secp256k1 key", replace(authorHex, "5827 0025 0802 1221 02"+"79be667ef9dcbbac55a06295ce870b07029bfcdb2dce28d959f2815b16f81798"), ErrEnvelope},
		{"author with a second id for its key", replace(authorHex, "5828 0026 "+strings.ReplaceAll(authorHex, " ", "")[8:]+"1a00"), ErrEnvelope},
		{"issued at zero", replace("04 1b 000001a3185c5000", "04 00"), ErrEnvelope},
		{"issued past all years", replace("04 1b 000001a3185c5000", "04 1b ffffffffffffffff"), ErrOversized},
		{"validity zero", replace("05 19ea60", "05 00"), ErrOversized},
		{"validity over an hour", replace("05 19ea60", "05 1a0036ee81"), ErrOversized},
		{"validity overflows", replace("05 19ea60", "05 1b ffffffffffffffff"), ErrOversized},
		{"body", replace(body, "06 594001"+strings.Repeat("00", MaxBody+1)), ErrOversized},
		{"issued 61 s ahead", replace("04 1b 000001a3185c5000", "04 1b 000001a3185d3e48"), ErrFuture},
		{"sequence number far ahead", replace("03 1b 00066517289880 00", "03 1b ffffffffffffffff"), ErrFuture},
		{"just over", replace("04 1b 000001a3185c5000", "04 1b 000001a3185b65a0"), ErrExpired},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			raw := signRecord("testnet", unhex(t, tt.record))
			if _, err := OpenEnvelope("testnet", raw, envelopeTime); !errors.Is(err, tt.want) {
				t.Errorf("got %v, want %v", err, tt.want)
			}
		})
	}
}

func TestEnvelopeForged(t *testing.T) {
	record := unhex(t, recordHex)
	good := signRecord("testnet", record)
	flipped := bytes.Clone(good)
	flipped[len(record)-1] ^= 1 // in the body
	badSig := bytes.Clone(good)
	badSig[len(badSig)-1] ^= 1
	bare := append(bytes.Clone(record), ed25519.Sign(ed25519.NewKeyFromSeed(bytes.Repeat([]byte{1}, 32)), record)...)
	tests := []struct {
		name string
		raw  []byte
		want error
	}{
		{"good", good, nil},
		{"body changed", flipped, ErrForged},
		{"signature changed", badSig, ErrForged},
		{"other network", signRecord("othernet", record), ErrForged},
		{"signed without domain", bare, ErrForged},
		{"signature missing", record, ErrEnvelope},
		{"less than a signature", good[:63], ErrEnvelope},
		{"nothing", nil, ErrEnvelope},
		{"too long", make([]byte, maxEnvelope+1), ErrOversized},
	}
	for _, tt := range tests {
		if _, err := OpenEnvelope("testnet", tt.raw, envelopeTime); !errors.Is(err, tt.want) {
			t.Errorf("%s: got %v, want %v", tt.name, err, tt.want)
		}
	}
}

func TestEnvelopeTimes(t *testing.T) {
	raw := signRecord("testnet", unhex(t, recordHex))
	tests := []struct {
		at   time.Duration
		want error
	}{
		{-time.Minute - time.Millisecond, ErrFuture},
		{-time.Minute, nil},
		{time.Minute - time.Millisecond, nil},
		{time.Minute, ErrExpired},
	}
	for _, tt := range tests {
		if _, err := OpenEnvelope("testnet", raw, envelopeTime.Add(tt.at)); !errors.Is(err, tt.want) {
			t.Errorf("read at %v: got %v, want %v", tt.at, err, tt.want)
		}
	}
}

// The largest envelope fits the limit that is checked before it is decoded.
func TestEnvelopeLimitsFit(t *testing.T) {
	e := testEnvelope(t)
	e.Topic, e.Body, e.Validity = strings.Repeat("a", 32), make([]byte, MaxBody), MaxValidity
	raw, err := seedIdentity(t, 1).Seal(strings.Repeat("n", 64), e)
	if err != nil || len(raw) > maxEnvelope {
		t.Errorf("%d bytes (%v), at most %d", len(raw), err, maxEnvelope)
	}
}

// Whatever opens seals to the same bytes: nobody can make a second form of an envelope.
func FuzzEnvelope(f *testing.F) {
	record, _ := hex.DecodeString(strings.ReplaceAll(recordHex, " ", ""))
	f.Add(signRecord("testnet", record))
	f.Add([]byte{0xa0})
	f.Add(make([]byte, 100))
	kept, _ := hex.DecodeString("a8" + strings.TrimPrefix(hex.EncodeToString(record), "a6") +
		"0750" + strings.Repeat("11", renewalBytes) + "0819ea60")
	f.Add(signRecord("testnet", kept))
	id := seedIdentity(f, 1)
	f.Fuzz(func(t *testing.T, raw []byte) {
		e, err := parseEnvelope(raw)
		if err != nil {
			return
		}
		e.From = id.ID()
		again, err := id.Seal("testnet", e)
		if err != nil {
			t.Fatalf("opened but can not be sealed: %v", err)
		}
		if len(again) != len(raw) {
			t.Fatalf("%d bytes sealed, %d opened", len(again), len(raw))
		}
		if back, err := parseEnvelope(again); err != nil || !bytes.Equal(back.Body, e.Body) || back.Seq != e.Seq {
			t.Fatalf("sealed but can not be opened: %v", err)
		}
	})
}
