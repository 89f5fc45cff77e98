package govern

import (
	"bytes"
	"crypto/ed25519"
	"encoding/hex"
	"errors"
	"strings"
	"testing"

	"kvasird/settle"
)

func sample() *Proposal {
	return &Proposal{Network: settle.Hash{0xaa}, Cluster: settle.Key{}, Sequence: 3, Epoch: 500, Expires: 1_800_000_000,
		Changes: []Change{{"fee", 150_000, 200_000}}}
}

const sampleText = `kvasir governance v1
network: aa00000000000000000000000000000000000000000000000000000000000000
cluster: 11111111111111111111111111111111
proposal: 3
fee: 150000 -> 200000
from epoch: 500
sign before: 1800000000
wallet: AKnL4NNf3DGWZJS6cPknBuEGnVsV4A4m5tgebLHaRSZ9
choice: approve
`

func TestMessageBytes(t *testing.T) {
	w := wallet(1)
	key, text := hex.EncodeToString(w[:]), hex.EncodeToString([]byte(sampleText))
	prefix := "ff" + hex.EncodeToString([]byte("solana offchain"))
	for f, want := range map[Format]string{
		OffchainV0: prefix + "00" + "aa" + strings.Repeat("00", 31) + "01" + "01" + key + "1801" + text,
		OffchainV1: prefix + "01" + "01" + key + text,
		Raw:        text,
	} {
		got, err := sample().Message(w, f)
		if err != nil || hex.EncodeToString(got) != want {
			t.Errorf("%s: %x, %v\nwant %s", f, got, err, want)
		}
		if back, err := ParseFormat(f.String()); back != f || err != nil {
			t.Errorf("%s is read as %s, %v", f, back, err)
		}
	}
	for _, bad := range []string{"", "V0", "v2", "unknown"} {
		if _, err := ParseFormat(bad); !errors.Is(err, ErrFormat) {
			t.Errorf("%q: %v", bad, err)
		}
	}
}

// What begins like this no reader takes for a transaction: a version has the top bit set, and of
// the others more signers would only read than there are.
func TestTextIsNoTransaction(t *testing.T) {
	text := sample().Text(wallet(1))
	if text[0]&0x80 != 0 || text[1] < text[0] || !strings.HasPrefix(text, firstLine) {
		t.Errorf("the text begins %q", text[:8])
	}
}

func TestATextThatIsTooLong(t *testing.T) {
	p := sample()
	for range MaxChanges {
		p.Changes = append(p.Changes, Change{strings.Repeat("n", 40), 1 << 62, 1 << 63})
	}
	if _, err := p.Message(wallet(1), Raw); !errors.Is(err, ErrProposal) {
		t.Errorf("got %v", err)
	}
	p = sample()
	for _, f := range settle.Fields()[:16] { // half of all at once, with the longest numbers
		p.Changes = append(p.Changes, Change{f.Name, 1 << 40, 1 << 40})
	}
	if m, err := p.Message(wallet(1), OffchainV0); err != nil || len(m) > 1232 {
		t.Errorf("%d bytes, %v", len(m), err)
	}
}

func TestVerify(t *testing.T) {
	for _, f := range []Format{OffchainV0, OffchainV1, Raw} {
		if err := sample().Verify(sign(t, sample(), 1, f)); err != nil {
			t.Errorf("%s: %v", f, err)
		}
	}
}

// A key that anybody can sign for is refused, whatever it signs.
func TestKeysThatAnybodySignsFor(t *testing.T) {
	identity, forged := settle.Wallet{1}, settle.Signature{1}
	m, _ := sample().Message(identity, Raw)
	if !ed25519.Verify(identity[:], m, forged[:]) {
		t.Fatal("the library refuses it by itself: the check may go")
	}
	if err := sample().Verify(Signature{identity, Raw, m, forged}); !errors.Is(err, settle.ErrWeakKey) {
		t.Errorf("got %v", err)
	}
}

// No change of one byte of a signature, its wallet or its text is taken.
func FuzzVerifyMalleability(f *testing.F) {
	f.Add(uint8(1), uint16(0), uint8(1))
	f.Add(uint8(3), uint16(63), uint8(0x80))
	f.Fuzz(func(t *testing.T, format uint8, at uint16, flip uint8) {
		s := sign(t, sample(), 1, Format(1+format%3))
		if flip == 0 {
			return
		}
		all := bytes.Join([][]byte{s.Wallet[:], s.Bytes[:], s.Signed}, nil)
		all[int(at)%len(all)] ^= flip
		copy(s.Wallet[:], all)
		copy(s.Bytes[:], all[32:])
		s.Signed = all[96:]
		if err := sample().Verify(s); err == nil {
			t.Errorf("byte %d changed by %#x is taken", int(at)%len(all), flip)
		}
	})
}
