package market

import (
	"testing"
	"time"

	"kvasird/ggml/gguf"
)

// What the tests build on.

var (
	t0     = time.Date(2026, 5, 1, 12, 0, 0, 0, time.UTC)
	modelA = gguf.ModelID{0xa}
	modelB = gguf.ModelID{0xb}
	// oneLayer is the model of the fixed example, big that of the 122B model.
	oneLayer = Shape{Layers: 1, Experts: 256, MoE: []gguf.Range{{Begin: 0, End: 1}}}
	big      = Shape{Layers: 49, Experts: 256, MoE: []gguf.Range{{Begin: 0, End: 49}}}
	// odd has experts in layers 1, 2 and 4 of 6.
	odd = Shape{Layers: 6, Experts: 8, MoE: []gguf.Range{{Begin: 1, End: 3}, {Begin: 4, End: 5}}}
)

func slice(l0, l1, e0, e1 int) gguf.Slice {
	return gguf.Slice{Layers: gguf.Range{Begin: l0, End: l1}, Experts: gguf.Range{Begin: e0, End: e1}}
}

func serving(s ...gguf.Slice) []Holding {
	var list []Holding
	for _, x := range s {
		list = append(list, Holding{Slice: x, State: Serving})
	}
	return list
}

func newTable(t testing.TB, p Policy, id gguf.ModelID, s Shape) *Table {
	t.Helper()
	x, err := NewTable(p)
	if err == nil {
		err = x.SetShape(id, s)
	}
	if err != nil {
		t.Fatal(err)
	}
	return x
}

func encode(t testing.TB, a *Announcement) []byte {
	t.Helper()
	b, err := a.Encode()
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// tell puts a record into the table and says whether it was new.
func tell(t testing.TB, x *Table, from string, seq uint64, at time.Time, m ...ModelNews) bool {
	t.Helper()
	ok, err := x.Update(Record{from, seq, at, 90 * time.Second, encode(t, &Announcement{Models: m})}, at)
	if err != nil {
		t.Fatal(err)
	}
	return ok
}

func coverage(t testing.TB, x *Table, id gguf.ModelID, now time.Time) Coverage {
	t.Helper()
	c, ok := x.Coverage(id, now)
	if !ok {
		t.Fatalf("no coverage of %v", id)
	}
	return c
}

// sized has experts of one size.
func sized(bytes int64) Sizes { return func(gguf.ModelID, int) int64 { return bytes } }
