package node

import (
	"bytes"
	"encoding/hex"
	"errors"
	"io"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/libp2p/go-libp2p/core/peer"
	"golang.org/x/time/rate"

	"kvasird/market"
	"kvasird/p2p"
)

func TestPriceWireBytes(t *testing.T) {
	id := strings.Repeat("00", 31)
	for name, tt := range map[string]struct {
		got  []byte
		want string
	}{
		"an ask for all":        {encodePriceAsk(priceAsk{}), "a0"},
		"an ask for the second": {encodePriceAsk(priceAsk{After: 31}), "a102181f"},
		"an ask of a model":     {encodePriceAsk(priceAsk{append([]byte{3}, make([]byte, 31)...), 5}), "a201582003" + id + "0205"},
		"a list of nothing":     {encodePriceList(priceList{[][]byte{}}), "a10180"},
		"a list":                {encodePriceList(priceList{[][]byte{{1}, {2, 3}}}), "a1018241014202" + "03"},
	} {
		if got := hex.EncodeToString(tt.got); got != tt.want {
			t.Errorf("%s: got %s, want %s", name, got, tt.want)
		}
	}
	if id, after, all, err := readPriceAsk(encodePriceAsk(priceAsk{pricedModel[:], 5})); id != pricedModel || after != 5 || all || err != nil {
		t.Errorf("%v, after %d, all %v, %v", id, after, all, err)
	}
	if list, err := readPriceList(encodePriceList(priceList{[][]byte{{1}, {2, 3}}})); len(list) != 2 || err != nil {
		t.Errorf("%v, %v", list, err)
	}
}

func TestPriceWireRefuses(t *testing.T) {
	many := make([][]byte, maxPriceList+1)
	for name, payload := range map[string][]byte{
		"nothing":            {},
		"an array":           {0x80},
		"an unknown key":     {0xa1, 0x09, 0x01},
		"a short model":      {0xa1, 0x01, 0x41, 0x01},
		"a longer integer":   {0xa1, 0x02, 0x18, 0x01},
		"a zero":             {0xa1, 0x02, 0x00},
		"trailing bytes":     {0xa0, 0x00},
		"a negative number":  {0xa1, 0x02, 0x20},
		"a key twice":        {0xa2, 0x02, 0x01, 0x02, 0x01},
		"more than it takes": bytes.Repeat([]byte{0xa0}, maxPriceAsk+1),
	} {
		if _, _, _, err := readPriceAsk(payload); !errors.Is(err, errPriceWire) {
			t.Errorf("ask, %s: %v", name, err)
		}
	}
	for name, payload := range map[string][]byte{
		"nothing":             {},
		"an array":            {0x80},
		"no list":             {0xa1, 0x01, 0xf6},
		"a map of nothing":    {0xa0},
		"an unknown key":      {0xa2, 0x01, 0x80, 0x02, 0x01},
		"a text":              {0xa1, 0x01, 0x81, 0x61, 0x61},
		"an indefinite array": {0xa1, 0x01, 0x9f, 0xff},
		"trailing bytes":      {0xa1, 0x01, 0x80, 0x00},
		"a huge array":        {0xa1, 0x01, 0x9b, 0, 0, 0, 1, 0, 0, 0, 0},
		"too many":            encodePriceList(priceList{many}),
		"too large a record":  encodePriceList(priceList{[][]byte{make([]byte, market.MaxPriceRecord+1)}}),
		"too large":           make([]byte, p2p.MaxBody+1),
	} {
		if _, err := readPriceList(payload); !errors.Is(err, errPriceWire) {
			t.Errorf("list, %s: %v", name, err)
		}
	}
}

// A full list of the largest records fits an envelope.
func TestPriceListFitsAnEnvelope(t *testing.T) {
	full := make([][]byte, maxPriceList)
	for i := range full {
		full[i] = make([]byte, market.MaxPriceRecord)
	}
	if body := encodePriceList(priceList{full}); len(body) > p2p.MaxBody {
		t.Errorf("%d bytes, an envelope takes %d", len(body), p2p.MaxBody)
	} else if _, err := readPriceList(body); err != nil {
		t.Error(err)
	}
}

// TestPricesOfStrangers has what is not the publisher's refused before it is passed on.
func TestPricesOfStrangers(t *testing.T) {
	m, other := newMint(t), newMint(t)
	p := m.follow(filepath.Join(t.TempDir(), "a"), false, nil)
	good := m.next()
	network := *m.last
	network.Network[0] = 2
	envelope := func(m *mint, records ...[]byte) p2p.Envelope {
		return p2p.Envelope{Topic: market.PriceTopic, From: m.id.ID(), Body: encodePriceList(priceList{records})}
	}
	if err := p.check(envelope(m, good)); err != nil {
		t.Fatal(err)
	}
	for name, tt := range map[string]struct {
		e    p2p.Envelope
		want string
	}{
		"of another author":   {envelope(other, good), "told by"},
		"signed by another":   {envelope(m, good, other.next()), "record 1"},
		"of another network":  {envelope(m, m.sign(network)), "another network"},
		"not a list":          {p2p.Envelope{From: m.id.ID(), Body: []byte{1}}, "malformed"},
		"not a record at all": {envelope(m, []byte{1, 2, 3}), "not a price record"},
	} {
		if err := p.check(tt.e); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v, want %q", name, err, tt.want)
		}
	}
}

// TestPriceServerIsHostileProof sends a node what is no ask: it is blamed, and others are served.
func TestPriceServerIsHostileProof(t *testing.T) {
	m := newMint(t)
	p := m.follow(filepath.Join(t.TempDir(), "a"), false, nil)
	p.take([][]byte{m.next()})
	good := encodePriceAsk(priceAsk{})
	frame := func(f p2p.Frame) []byte {
		var b bytes.Buffer
		if err := p2p.NewFrameWriter(&b, 1<<20).Write(f); err != nil {
			t.Fatal(err)
		}
		return b.Bytes()
	}
	for name, tt := range map[string]struct {
		sent   []byte
		blamed bool
	}{
		"another type": {frame(p2p.Frame{Type: 9, Payload: good}), true},
		"flags":        {frame(p2p.Frame{Type: framePriceAsk, Flags: 1, Payload: good}), true},
		"too long":     {frame(p2p.Frame{Type: framePriceAsk, Payload: make([]byte, maxPriceAsk+1)}), true},
		"no ask":       {frame(p2p.Frame{Type: framePriceAsk, Payload: []byte{1}}), true},
		"half a frame": {[]byte{1, 0, 0}, false},
	} {
		t.Run(name, func(t *testing.T) {
			h := m.follow(filepath.Join(t.TempDir(), "b"), false, nil).host
			ai, err := p2p.ParsePeer(p.host.Addrs()[0])
			if err == nil {
				_, err = h.Hello(t.Context(), ai)
			}
			if err != nil {
				t.Fatal(err)
			}
			c, err := h.OpenStream(t.Context(), ai.ID, pricesProtocol)
			if err != nil {
				t.Fatal(err)
			}
			c.SetDeadline(time.Now().Add(30 * time.Second))
			if _, err := c.Write(tt.sent); err != nil {
				t.Fatal(err)
			}
			if tt.blamed {
				if _, err := io.ReadAll(c); err != nil && errors.Is(err, p2p.ErrFrame) {
					t.Fatal(err)
				}
			}
			c.Close()
			blamed := false
			for _, s := range p.host.Standings() {
				blamed = blamed || s.ID == h.ID() && s.Last == p2p.Malformed
			}
			if blamed != tt.blamed {
				t.Errorf("blamed %v, want %v", blamed, tt.blamed)
			}
			c, err = h.OpenStream(t.Context(), ai.ID, pricesProtocol)
			if err != nil {
				t.Fatal(err)
			}
			if list, err := askPrices(c, priceAsk{}); err != nil || len(list) != 1 {
				t.Errorf("a good ask after it: %d records, %v", len(list), err)
			}
		})
	}
}

// TestPriceAsksArePaced has a peer that asks on and on refused, and others not.
func TestPriceAsksArePaced(t *testing.T) {
	m := newMint(t)
	var a askPaces
	a.by = map[peer.ID]*rate.Limiter{}
	now := time.Now()
	for i := range priceAskBurst {
		if !a.allow(m.id.ID(), now) {
			t.Fatalf("ask %d is refused", i)
		}
	}
	if a.allow(m.id.ID(), now) {
		t.Error("one more is not")
	}
	if !a.allow("another", now) || !a.allow(m.id.ID(), now.Add(priceAskEvery)) {
		t.Error("another peer, or a later ask, is refused")
	}
	for i := range 2 * maxPriceAsker {
		a.allow(peer.ID(hex.EncodeToString([]byte{byte(i), byte(i >> 8)})), now)
	}
	if len(a.by) > maxPriceAsker {
		t.Errorf("%d peers are remembered", len(a.by))
	}
}

func FuzzPriceWire(f *testing.F) {
	f.Add(encodePriceAsk(priceAsk{pricedModel[:], 7}))
	f.Add(encodePriceList(priceList{[][]byte{{1}, {2, 3}}}))
	f.Fuzz(func(t *testing.T, b []byte) {
		if id, after, all, err := readPriceAsk(b); err == nil {
			a := priceAsk{After: after}
			if !all {
				a.Model = id[:]
			}
			if !bytes.Equal(encodePriceAsk(a), b) {
				t.Errorf("%x is read as another ask", b)
			}
		}
		if list, err := readPriceList(b); err == nil && !bytes.Equal(encodePriceList(priceList{list}), b) {
			t.Errorf("%x is read as another list", b)
		}
	})
}
