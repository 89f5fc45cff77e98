package govern

import (
	"bytes"
	"encoding/hex"
	"errors"
	"reflect"
	"strings"
	"testing"

	"kvasird/settle"
)

func sampleRecord() *Record {
	p := sample()
	return &Record{Moment: Moment{5, 6, 4}, Step: 7, Proposal: p, Signatures: []Signature{{Wallet: settle.Wallet{1}, Format: Raw, Bytes: settle.Signature{2}}}}
}

func TestRecordBytes(t *testing.T) {
	zeros := strings.Repeat("00", 31)
	for want, r := range map[string]*Record{
		"a7" + "0101" + "0205" + "0306" + "0404" + "0507" +
			"06" + "a6" + "015820aa" + zeros + "02582000" + zeros + "0303" + "041901f4" + "051a6b49d200" + "0681" + "83" + "63666565" + "1a000249f0" + "1a00030d40" +
			"07" + "81" + "83" + "582001" + zeros + "03" + "584002" + zeros + "00" + zeros: sampleRecord(),
		"a2" + "0101" + "0209": {Moment: Moment{At: 9}},
	} {
		got, err := r.encode()
		if err != nil || hex.EncodeToString(got) != want {
			t.Errorf("%x, %v\nwant %s", got, err, want)
		}
		back, err := ParseRecord(got)
		if err != nil || !reflect.DeepEqual(back, r) {
			t.Errorf("read back %+v, %v", back, err)
		}
	}
}

func TestRecordsThatAreRefused(t *testing.T) {
	good, err := sampleRecord().encode()
	if err != nil {
		t.Fatal(err)
	}
	zeros := strings.Repeat("00", 31)
	swap := func(old, by string) []byte {
		t.Helper()
		o, _ := hex.DecodeString(old)
		n, _ := hex.DecodeString(by)
		if bytes.Count(good, o) != 1 {
			t.Fatalf("%s is in %x %d times", old, good, bytes.Count(good, o))
		}
		return bytes.Replace(good, o, n, 1)
	}
	for name, b := range map[string][]byte{
		"nothing":             {},
		"too long":            make([]byte, MaxRecord+1),
		"no map":              {1},
		"trailing bytes":      append(bytes.Clone(good), 0),
		"another version":     swap("a70101", "a70102"),
		"an unknown key":      swap("a70101", "a801010800"),
		"a key twice":         swap("a70101", "a801010101"),
		"a longer integer":    swap("a70101", "a7011801"),
		"a negative time":     swap("0205", "0220"),
		"a float":             swap("0205", "02f94500"),
		"no step":             swap("a70101020503060404"+"0507", "a60101020503060404"),
		"a short network":     swap("015820aa"+zeros, "01581f"+zeros),
		"a short cluster":     swap("0258200000"+zeros[2:], "02581f"+zeros),
		"a short wallet":      swap("582001"+zeros+"03", "581f"+zeros+"03"),
		"a short signature":   swap("584002", "583f")[:len(good)-1],
		"no signature":        append(swap("a70101", "a60101")[:len(good)-1-2-2-33-66+2], []byte{}...),
		"a format of text":    swap("582001"+zeros+"03", "582001"+zeros+"6103"),
		"a long number":       swap("0507", "05c24107"),
		"an endless list":     swap("0681"+"83", "069f"+"83"),
		"a change of two":     swap("83"+"63666565"+"1a000249f0", "82"+"63666565"),
		"a list of thousands": append(bytes.Clone(good[:bytes.Index(good, []byte{0x06, 0x81, 0x83})+1]), 0x99, 0xff, 0xff),
	} {
		if r, err := ParseRecord(b); !errors.Is(err, ErrRecord) || r != nil {
			t.Errorf("%s: %+v, %v", name, r, err)
		}
	}
	many := sampleRecord()
	for range MaxWallets {
		many.Signatures = append(many.Signatures, many.Signatures[0])
	}
	b, err := many.encode()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := ParseRecord(b); !errors.Is(err, ErrRecord) {
		t.Errorf("too many signatures: %v", err)
	}
}

func FuzzParseRecord(f *testing.F) {
	good, _ := sampleRecord().encode()
	f.Add(good)
	f.Add([]byte{0xa2, 1, 1, 2, 9})
	f.Fuzz(func(t *testing.T, b []byte) {
		r, err := ParseRecord(b)
		if err != nil {
			if !errors.Is(err, ErrRecord) {
				t.Errorf("%x: %v", b, err)
			}
			return
		}
		if again, err := r.encode(); err != nil || !bytes.Equal(again, b) {
			t.Errorf("%x is written as %x, %v", b, again, err)
		}
	})
}

func TestProposalBytes(t *testing.T) {
	b, err := sample().Encode()
	if err != nil {
		t.Fatal(err)
	}
	if back, err := ParseProposal(b); err != nil || !reflect.DeepEqual(back, sample()) {
		t.Errorf("read back %+v, %v", back, err)
	}
	w := sample()
	w.Changes, w.Withdrawal = nil, Withdrawal{settle.Wallet{5}, 1500}
	paid := must(w.Encode())
	tail := append([]byte{0x07, 0x82, 0x58, 0x20, 0x05}, append(make([]byte, 31), 0x19, 0x05, 0xdc)...)
	if !bytes.Equal(paid, append(bytes.Clone(b[:bytes.Index(b, []byte{0x06, 0x81})]), tail...)) {
		t.Errorf("a withdrawal is written as %x", paid)
	}
	if back, err := ParseProposal(paid); err != nil || !reflect.DeepEqual(back, w) {
		t.Errorf("read back %+v, %v", back, err)
	}
	for name, bad := range map[string][]byte{
		"no withdrawal":         append(bytes.Clone(paid[:len(paid)-len(tail)]), append([]byte{0x07, 0x82, 0x58, 0x20}, make([]byte, 33)...)...),
		"a short account":       append(bytes.Clone(paid[:len(paid)-len(tail)]), append([]byte{0x07, 0x82, 0x58, 0x1f}, make([]byte, 32)...)...),
		"no changes":            append(bytes.Clone(paid[:len(paid)-len(tail)]), 0x06, 0x80),
		"nothing":               {},
		"too long":              make([]byte, MaxRecord+1),
		"no map":                {1},
		"trailing bytes":        append(bytes.Clone(b), 0),
		"an unknown key":        append([]byte{0xa7}, append(bytes.Clone(b[1:]), 0x08, 0x00)...),
		"a longer number":       bytes.Replace(b, []byte{0x03, 0x03, 0x04}, []byte{0x03, 0x18, 0x03, 0x04}, 1),
		"a short network":       bytes.Replace(b, append([]byte{0x58, 0x20}, make([]byte, 32)...), append([]byte{0x58, 0x1f}, make([]byte, 31)...), 1),
		"a record in its place": must(sampleRecord().encode()),
	} {
		if p, err := ParseProposal(bad); !errors.Is(err, ErrRecord) {
			t.Errorf("%s: %+v, %v", name, p, err)
		}
	}
}

func must(b []byte, err error) []byte {
	if err != nil {
		panic(err)
	}
	return b
}

func FuzzParseProposal(f *testing.F) {
	f.Add(must(sample().Encode()))
	w := sample()
	w.Changes, w.Withdrawal = nil, Withdrawal{settle.Wallet{5}, 1500}
	f.Add(must(w.Encode()))
	f.Fuzz(func(t *testing.T, b []byte) {
		p, err := ParseProposal(b)
		if err != nil {
			return
		}
		if again, err := p.Encode(); err != nil || !bytes.Equal(again, b) {
			t.Errorf("%x is read and written as %x, %v", b, again, err)
		}
	})
}
