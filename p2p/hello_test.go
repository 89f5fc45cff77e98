package p2p

import (
	"bytes"
	"encoding/hex"
	"strings"
	"testing"

	"github.com/libp2p/go-libp2p/core/peer"
)

// testID is the peer id of an ed25519 key of 32 bytes 0x01.
func testID(t testing.TB) peer.ID {
	t.Helper()
	raw := append([]byte{0x00, 0x24, 0x08, 0x01, 0x12, 0x20}, bytes.Repeat([]byte{1}, 32)...)
	id, err := peer.IDFromBytes(raw)
	if err != nil {
		t.Fatal(err)
	}
	return id
}

func testHello(t testing.TB) Hello {
	t.Helper()
	return Hello{
		Version: 1, ID: testID(t), Agent: "a", Network: "n", Pack: "p", Protocols: []string{"e/1"},
		Backends: []Backend{{"CPU", "d", "f32"}}, Models: []string{"m"}, LanePort: 258,
	}
}

func unhex(t testing.TB, s string) []byte {
	t.Helper()
	b, err := hex.DecodeString(strings.ReplaceAll(s, " ", ""))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

var (
	idHex    = "5826 0024 0801 1220" + strings.Repeat(" 01", 32)
	helloHex = "a9 01 01 02" + idHex + "03 6161 04 616e 05 6170 06 81 63652f31" +
		"07 81 a3 01 63435055 02 6164 03 63663332 08 81 616d 09 190102"
)

func TestHelloLiteralBytes(t *testing.T) {
	want := testHello(t)
	got, err := encodeHello(want)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, unhex(t, helloHex)) {
		t.Errorf("bytes\n got %x\nwant %x", got, unhex(t, helloHex))
	}
	back, err := decodeHello(got)
	if err != nil {
		t.Fatal(err)
	}
	again, err := encodeHello(back)
	if err != nil || !bytes.Equal(again, got) {
		t.Errorf("decoded record encodes to %x (%v)", again, err)
	}
}

func TestVerdictLiteralBytes(t *testing.T) {
	tests := []struct {
		v    verdict
		want string
	}{
		{verdict{}, "a0"},
		{verdict{"network", "a", "b"}, "a3 01 676e6574776f726b 02 6161 03 6162"},
	}
	for _, tt := range tests {
		got, err := encodeVerdict(tt.v)
		if err != nil || !bytes.Equal(got, unhex(t, tt.want)) {
			t.Errorf("%+v: got %x (%v), want %s", tt.v, got, err, tt.want)
		}
		if back, err := decodeVerdict(got); err != nil || back != tt.v {
			t.Errorf("%x: got %+v (%v)", got, back, err)
		}
	}
}

func TestHelloOfALaterVersion(t *testing.T) {
	// An unknown key, 24, with a map in it.
	b := unhex(t, "aa"+strings.TrimPrefix(helloHex, "a9")+"1818 a1 01 02")
	if h, err := decodeHello(b); err != nil || h.LanePort != 258 {
		t.Errorf("got %+v, %v", h, err)
	}
	// What a network by invitation adds.
	h, err := decodeHello(unhex(t, "ab"+strings.TrimPrefix(helloHex, "a9")+"0a 42 0102 0b 07"))
	if err != nil || !bytes.Equal(h.Ticket, []byte{1, 2}) || h.Revocations != 7 {
		t.Errorf("got %+v, %v", h, err)
	}
	if h, err := decodeHello(unhex(t, "aa"+strings.TrimPrefix(helloHex, "a9")+"0d f5")); err != nil || !h.Heartbeats {
		t.Errorf("got %+v, %v", h, err)
	}
	// Nothing but a version and an id is a record too: it is judged, not malformed.
	if h, err := decodeHello(unhex(t, "a2 01 02 02"+idHex)); err != nil || h.Version != 2 {
		t.Errorf("got %+v, %v", h, err)
	}
}

func TestHelloMalformed(t *testing.T) {
	long := hex.EncodeToString(bytes.Repeat([]byte("x"), maxText+1))
	withID := "a2 02" + idHex
	tests := []struct{ name, in, want string }{
		{"empty", "", "EOF"},
		{"not a map", "01", "cannot unmarshal"},
		{"cut", "a9 01 01", "EOF"},
		{"trailing byte", helloHex + "00", "extraneous"},
		{"duplicate key", "a2 01 01 01 01", "duplicate"},
		{"indefinite map", "bf 01 01 ff", "indefinite"},
		{"indefinite text", "a1 03 7f 6161 ff", "indefinite"},
		{"tag", "a1 01 c1 01", "tag"},
		{"wrong type", "a1 01 6161", "cannot unmarshal"},
		{"negative version", "a1 01 20", "cannot unmarshal"},
		{"version past 32 bits", "a1 01 1b 0000000100000000", "cannot unmarshal"},
		{"port past 16 bits", "a1 09 1a 00010000", "cannot unmarshal"},
		{"no peer id", "a1 01 01", "peer id of 0"},
		{"bad peer id", "a1 02 43 010203", "length"},
		{"peer id as text", "a1 02 63 303030", "peer id"},
		{"long peer id", "a1 02 58 43 00 41" + strings.Repeat("01", 65), "peer id of 67"},
		{"invalid UTF-8", "a1 03 61 ff", "UTF-8"},
		{"escape sequence", withID + "03 62 1b5b", "printable"},
		{"long text", withID + "03 7881" + long, "at most 128"},
		{"long model id", withID + "08 81 7881" + long, "at most 128"},
		{"protocol without version", withID + "06 81 6165", "name/version"},
		{"too many protocols", withID + "06 98 21" + strings.Repeat("63652f31", maxProtocols+1), "33 protocols"},
		{"too many backends", withID + "07 91" + strings.Repeat("a0", maxBackends+1), "17 backends"},
		{"too many models", "a1 08 98 41" + strings.Repeat("616d", maxModels+1), "max"},
		{"list claims 2^32 items", "a1 08 9a ffffffff 616d", "max"},
		{"text claims 2^32 bytes", "a1 03 7a ffffffff 61", "EOF"},
		{"ticket as text", "a1 0a 6161", "cannot unmarshal"},
		{"long ticket", withID + "0a 590201" + strings.Repeat("00", maxTicket+1), "ticket of 513"},
		{"revocations as text", "a1 0b 6161", "cannot unmarshal"},
		{"nested deeply", "a1 0a" + strings.Repeat("81", 64) + "01", "nested"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			_, err := decodeHello(unhex(t, tt.in))
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("got %v, want an error with %q", err, tt.want)
			}
		})
	}
}

func TestVerdictMalformed(t *testing.T) {
	for _, in := range []string{"", "a1 02 6161", "a1 01 62 1b5b", "a1 01 01", "a000"} {
		if v, err := decodeVerdict(unhex(t, in)); err == nil {
			t.Errorf("%s accepted: %+v", in, v)
		}
	}
}

func TestPreface(t *testing.T) {
	want := preface{"n", "e/1"}
	b, err := encMode.Marshal(want)
	if err != nil || !bytes.Equal(b, unhex(t, "a2 01 616e 02 63652f31")) {
		t.Fatalf("bytes %x (%v)", b, err)
	}
	if got, err := decodePreface(b); err != nil || got != want {
		t.Errorf("got %+v, %v", got, err)
	}
	for _, in := range []string{"", "a1 01 616e", "a2 01 62 1b5b 02 63652f31", "a2 01 616e 02 6165", "a2 01 616e 01 616e"} {
		if p, err := decodePreface(unhex(t, in)); err == nil {
			t.Errorf("%s accepted: %+v", in, p)
		}
	}
}

func TestJudge(t *testing.T) {
	tests := []struct {
		name   string
		change func(*Hello)
		want   verdict
	}{
		{"same", func(*Hello) {}, verdict{}},
		{"other backends", func(h *Hello) { h.Backends = []Backend{{"Vulkan", "v", "f16"}} }, verdict{}},
		{"other models", func(h *Hello) { h.Models = nil }, verdict{}},
		{"other agent", func(h *Hello) { h.Agent = "other" }, verdict{}},
		{"no lanes", func(h *Hello) { h.LanePort = 0 }, verdict{}},
		{"other protocols", func(h *Hello) { h.Protocols = []string{"ring/3"} }, verdict{}},
		{"a common version", func(h *Hello) { h.Protocols = []string{"e/2", "e/1"} }, verdict{}},
		{"version", func(h *Hello) { h.Version = 2 }, verdict{"hello version", "1", "2"}},
		{"identity", func(h *Hello) { h.ID = "" }, verdict{"identity", testID(t).String(), ""}},
		{"network", func(h *Hello) { h.Network = "x" }, verdict{"network", "n", "x"}},
		{"pack", func(h *Hello) { h.Pack = "x" }, verdict{"runtime pack", "p", "x"}},
		{"no common version", func(h *Hello) { h.Protocols = []string{"e/2"} }, verdict{"protocol e", "1", "2"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			theirs := testHello(t)
			tt.change(&theirs)
			if got := judge(testHello(t), theirs, testID(t)); got != tt.want {
				t.Errorf("got %+v, want %+v", got, tt.want)
			}
		})
	}
}

func FuzzHello(f *testing.F) {
	f.Add(unhex(f, helloHex))
	f.Add(unhex(f, "a3 01 676e6574776f726b 02 6161 03 6162"))
	f.Add(unhex(f, "a2 01 616e 02 63652f31"))
	f.Fuzz(func(t *testing.T, in []byte) {
		if len(in) > maxHello {
			return // the frame reader refuses it
		}
		if h, err := decodeHello(in); err == nil {
			b, err := encodeHello(h)
			if err != nil {
				t.Fatalf("%+v was read and can not be written: %v", h, err)
			}
			if v := judge(h, h, h.ID); v != (verdict{}) {
				t.Fatalf("refuses itself: %+v", v)
			}
			if _, err := decodeHello(b); err != nil {
				t.Fatal(err)
			}
		}
		if v, err := decodeVerdict(in); err == nil {
			if _, err := encodeVerdict(v); err != nil {
				t.Fatal(err)
			}
		}
		if p, err := decodePreface(in); err == nil && !protocolPattern.MatchString(p.Protocol) {
			t.Fatalf("protocol %q", p.Protocol)
		}
	})
}
