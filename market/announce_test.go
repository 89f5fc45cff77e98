package market

import (
	"bytes"
	"encoding/hex"
	"errors"
	"reflect"
	"strings"
	"testing"
	"time"

	"kvasird/ggml/gguf"
)

// sample uses every field.
func sample() *Announcement {
	return &Announcement{
		Capacity: Capacity{RowsPerSecond: 1000, FreeDisk: 1 << 33, FreeMemory: 1 << 32},
		Models: []ModelNews{{
			ID: modelA, Name: "tiny", Shape: odd, Full: true, Backbone: true,
			Holdings: []Holding{
				{Slice: slice(1, 3, 0, 4), State: Serving},
				{Slice: slice(1, 2, 4, 8), State: Claimed, Lease: time.Minute},
				{Slice: slice(2, 3, 4, 8), State: Loading, Lease: 10 * time.Minute},
				{Slice: slice(4, 5, 0, 8), State: Leaving},
			},
			Demand: []LayerDemand{{Layer: 1, Pairs: 4096, Hot: []HotExpert{{2, 5000}, {5, 2000}}}, {Layer: 4, Pairs: 7}},
		}, {ID: modelB, Shape: oneLayer, Full: true}},
	}
}

// TestLiteralBytes holds the wire to what was published.
func TestLiteralBytes(t *testing.T) {
	id := func(first string) string { return "015820" + first + strings.Repeat("00", 31) }
	for _, tt := range []struct {
		name string
		a    *Announcement
		hex  string
	}{
		{"nothing", &Announcement{}, "a10101"},
		{"away", &Announcement{Away: true}, "a2" + "0101" + "02f5"},
		{"all", sample(), "a3" + "0101" + "03" + "83" + "1903e8" + "1b0000000200000000" + "1b0000000100000000" + "04" + "82" +
			"a6" + id("0a") + "02" + "6474696e79" + "03" + "830608" + "8401030405" + "0403" +
			"05" + "84" + "86010300040300" + "8601020408" + "01183c" + "8602030408" + "02190258" + "86040500080400" +
			"06" + "82" + "83" + "01" + "191000" + "84" + "02191388" + "051907d0" + "83" + "04" + "07" + "80" +
			"a3" + id("0b") + "03" + "83" + "01190100" + "820001" + "0401"},
	} {
		got := encode(t, tt.a)
		if hex.EncodeToString(got) != tt.hex {
			t.Errorf("%s:\n got %x\nwant %s", tt.name, got, tt.hex)
		}
		back, err := Decode(got)
		if err != nil || !reflect.DeepEqual(back, tt.a) {
			t.Errorf("%s: read back %+v, %v", tt.name, back, err)
		}
	}
}

func TestLargestFits(t *testing.T) {
	m := ModelNews{ID: modelA, Name: strings.Repeat("n", maxName), Shape: big, Backbone: true}
	for i := range MaxHoldings {
		l, e := i%49, i/49*18
		m.Holdings = append(m.Holdings, Holding{slice(l, l+1, e, e+17), Loading, MaxLease})
	}
	for l := range 49 {
		d := LayerDemand{Layer: l, Pairs: maxPairs}
		for e := range maxHotAll / 49 {
			d.Hot = append(d.Hot, HotExpert{255 - maxHotAll/49 + e, 700})
		}
		m.Demand = append(m.Demand, d)
	}
	if b := encode(t, &Announcement{Models: []ModelNews{m}}); len(b) > MaxBody {
		t.Errorf("%d bytes", len(b))
	} else {
		t.Logf("%d holdings, %d hot experts: %d bytes", len(m.Holdings), 49*len(m.Demand[0].Hot), len(b))
	}
}

// TestRefusedContent has one announcement for every rule; both Encode and Decode apply it.
func TestRefusedContent(t *testing.T) {
	first := func(f func(*ModelNews)) func(*Announcement) {
		return func(a *Announcement) { f(&a.Models[0]) }
	}
	held := func(h ...Holding) func(*Announcement) { return first(func(m *ModelNews) { m.Holdings = h }) }
	demand := func(d ...LayerDemand) func(*Announcement) { return first(func(m *ModelNews) { m.Demand = d }) }
	shape := func(s Shape) func(*Announcement) {
		return first(func(m *ModelNews) { m.Shape, m.Holdings, m.Demand = s, nil, nil })
	}
	r := func(b, e int) gguf.Range { return gguf.Range{Begin: b, End: e} }
	var crowd []Holding
	for i := range MaxHoldings + 1 {
		crowd = append(crowd, Holding{Slice: slice(1, 2, i%8, i%8+1), State: Serving})
	}
	for _, tt := range []struct {
		name   string
		change func(*Announcement)
		want   Reason
	}{
		{"away with models", func(a *Announcement) { a.Away = true }, AwayHolds},
		{"away with capacity", func(a *Announcement) { a.Away, a.Models = true, nil }, AwayHolds},
		{"many models", func(a *Announcement) { a.Models = make([]ModelNews, MaxModels+1) }, TooMany},
		{"many holdings", held(crowd...), TooMany},
		{"many hot experts", demand(LayerDemand{Layer: 1, Pairs: 9, Hot: make([]HotExpert, MaxHot+1)}), TooMany},
		{"many hot experts in all", func(a *Announcement) {
			m := ModelNews{ID: modelA, Shape: big}
			for l := range 49 {
				m.Demand = append(m.Demand, LayerDemand{Layer: l, Hot: make([]HotExpert, MaxHot)})
			}
			a.Models = []ModelNews{m}
		}, TooMany},
		{"capacity of a planet", func(a *Announcement) { a.Capacity.FreeDisk = 1 << 60 }, BadHint},
		{"a model twice", func(a *Announcement) { a.Models[1].ID = modelA }, Overlap},
		{"long name", first(func(m *ModelNews) { m.Name = strings.Repeat("x", maxName+1) }), BadName},
		{"control bytes", first(func(m *ModelNews) { m.Name = "\x1b[2J" }), BadName},
		{"no layers", shape(Shape{0, 8, []gguf.Range{r(0, 1)}}), BadShape},
		{"negative experts", shape(Shape{4, -8, []gguf.Range{r(0, 1)}}), BadShape},
		{"too many cells", shape(Shape{1024, 4096, []gguf.Range{r(0, 1)}}), BadShape},
		{"no MoE layer", shape(Shape{4, 8, nil}), BadShape},
		{"MoE layer beyond", shape(Shape{4, 8, []gguf.Range{r(3, 5)}}), BadShape},
		{"MoE layers without gap", shape(Shape{4, 8, []gguf.Range{r(0, 1), r(1, 2)}}), BadShape},
		{"MoE layers backwards", shape(Shape{4, 8, []gguf.Range{r(2, 3), r(0, 1)}}), BadShape},
		{"layer that does not exist", held(Holding{Slice: slice(4, 7, 0, 1), State: Serving}), NoSuch},
		{"layer without experts", held(Holding{Slice: slice(2, 5, 0, 1), State: Serving}), NoSuch},
		{"negative layer", held(Holding{Slice: slice(-1, 2, 0, 1), State: Serving}), NoSuch},
		{"expert that does not exist", held(Holding{Slice: slice(1, 2, 7, 9), State: Serving}), NoSuch},
		{"negative expert", held(Holding{Slice: slice(1, 2, -1, 1), State: Serving}), NoSuch},
		{"empty range", held(Holding{Slice: slice(1, 2, 3, 3), State: Serving}), NoSuch},
		{"overlap", held(Holding{Slice: slice(1, 3, 0, 4), State: Serving}, Holding{Slice: slice(2, 3, 3, 5), State: Leaving}), Overlap},
		{"no state", held(Holding{Slice: slice(1, 2, 0, 1)}), BadState},
		{"unknown state", held(Holding{Slice: slice(1, 2, 0, 1), State: 5}), BadState},
		{"lease has run out", held(Holding{Slice: slice(1, 2, 0, 1), State: Claimed}), BadLease},
		{"lease too long", held(Holding{slice(1, 2, 0, 1), Loading, MaxLease + time.Second}), BadLease},
		{"lease of what is served", held(Holding{slice(1, 2, 0, 1), Serving, time.Second}), BadLease},
		{"demand of no layer", demand(LayerDemand{Layer: 3, Pairs: 1}), NoSuch},
		{"demand of negative layer", demand(LayerDemand{Layer: -1, Pairs: 1}), NoSuch},
		{"demand backwards", demand(LayerDemand{Layer: 2}, LayerDemand{Layer: 1}), BadDemand},
		{"demand of a galaxy", demand(LayerDemand{Layer: 1, Pairs: 1 << 60}), BadDemand},
		{"hot expert that does not exist", demand(LayerDemand{Layer: 1, Hot: []HotExpert{{8, 1}}}), NoSuch},
		{"hot experts backwards", demand(LayerDemand{Layer: 1, Hot: []HotExpert{{2, 1}, {1, 1}}}), BadDemand},
		{"share of nothing", demand(LayerDemand{Layer: 1, Hot: []HotExpert{{2, 0}}}), BadDemand},
		{"negative share", demand(LayerDemand{Layer: 1, Hot: []HotExpert{{2, -1}}}), BadDemand},
		{"shares above all", demand(LayerDemand{Layer: 1, Hot: []HotExpert{{2, 6000}, {3, 6000}}}), BadDemand},
	} {
		a := sample()
		tt.change(a)
		checkReason(t, tt.name+", encoded", a.check(), tt.want)
		if a.Away { // the wire form leaves nothing out
			a.Models = sample().Models
		}
		checkReason(t, tt.name+", decoded", decodeUnchecked(t, a), tt.want)
	}
	broken := sample()
	broken.Models[0].Holdings[1].Lease += time.Millisecond
	_, err := broken.Encode()
	checkReason(t, "lease in milliseconds", err, BadLease)
}

func checkReason(t *testing.T, name string, err error, want Reason) {
	t.Helper()
	var r *RefusedError
	if !errors.As(err, &r) || r.Reason != want {
		t.Errorf("%s: %v, want %q", name, err, want)
	} else if !r.AuthorsFault() {
		t.Errorf("%s is not the author's fault", name)
	}
}

// decodeUnchecked decodes what Encode would refuse to write.
func decodeUnchecked(t *testing.T, a *Announcement) error {
	t.Helper()
	w := wireAnnouncement{Version: wireVersion, Away: a.Away,
		Capacity: &wireCapacity{Rows: a.Capacity.RowsPerSecond, Disk: a.Capacity.FreeDisk, Memory: a.Capacity.FreeMemory}}
	for i := range a.Models {
		w.Models = append(w.Models, a.Models[i].wire())
	}
	b, err := encMode.Marshal(w)
	if err != nil {
		t.Fatal(err)
	}
	_, err = Decode(b)
	return err
}

// TestRefusedBytes has bytes that are no announcement.
func TestRefusedBytes(t *testing.T) {
	good := encode(t, sample())
	swap := func(old, new string) []byte {
		o, _ := hex.DecodeString(old)
		n, _ := hex.DecodeString(new)
		if bytes.Count(good, o) != 1 {
			t.Fatalf("%s is %d times in the sample", old, bytes.Count(good, o))
		}
		return bytes.Replace(good, o, n, 1)
	}
	raw := func(s string) []byte { b, _ := hex.DecodeString(s); return b }
	for _, tt := range []struct {
		name string
		body []byte
		want Reason
	}{
		{"empty", nil, Malformed},
		{"cut short", good[:len(good)-1], Malformed},
		{"trailing byte", append(bytes.Clone(good), 0), Malformed},
		{"too large", make([]byte, MaxBody+1), Oversized},
		{"version 2", raw("a10102"), Malformed},
		{"no version", raw("a0"), Malformed},
		{"not a map", raw("8101"), Malformed},
		{"unknown key", raw("a201010901"), Malformed},
		{"key twice", raw("a201010101"), Malformed},
		{"keys not in order", raw("a202f50101"), Malformed},
		{"away that is false", raw("a2010102f4"), Malformed},
		{"long form of a number", raw("a1011801"), Malformed},
		{"map of unknown length", raw("bf0101ff"), Malformed},
		{"tag", raw("a101c101"), Malformed},
		{"float", raw("a101f93c00"), Malformed},
		{"id of 31 bytes", swap("0158200a00", "01581f0a"), Malformed},
		{"unknown flag", swap("04030584", "040b0584"), Malformed},
		{"bounds not in pairs", swap("8401030405", "83010304"), BadShape},
		{"hot experts not in pairs", swap("8402191388051907d0", "830219138805"), Malformed},
		{"holding of five", swap("86010300040300", "850103000403"), Malformed},
		{"lease beyond 32 bits", swap("01183c", "011b0000000100000000"), Malformed},
	} {
		_, err := Decode(tt.body)
		checkReason(t, tt.name, err, tt.want)
	}
}

func FuzzDecode(f *testing.F) {
	for _, a := range []*Announcement{{}, {Away: true}, sample(), ringSample(), serviceSample(), machineSample()} {
		b, err := a.Encode()
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		a, err := Decode(b)
		if err != nil {
			return
		}
		if again, err := a.Encode(); err != nil || !bytes.Equal(again, b) {
			t.Fatalf("%x is read, and written as %x, %v", b, again, err)
		}
		x := newTable(t, Policy{}, modelA, odd)
		if _, err := x.Update(Record{"peer", 1, t0, time.Minute, b}, t0); err != nil {
			return
		}
		for _, id := range x.Models(t0) {
			c := coverage(t, x, id, t0)
			if c.Covered > c.Cells || c.AtTarget > c.Covered {
				t.Fatalf("coverage %+v", c)
			}
		}
	})
}
