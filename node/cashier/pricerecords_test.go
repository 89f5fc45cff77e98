package cashier

import (
	"bytes"
	"slices"
	"testing"

	"kvasird/settle"
)

func TestPriceRecords(t *testing.T) {
	b := newBooks(t)
	model, next := settle.Hash{7}, settle.Hash{8} // of keys beside each other
	var want [][]byte
	for _, epoch := range []uint64{0, 1, 5, 1 << 40} {
		if err := b.keepPrice(next, epoch, []byte{9}, 0); err != nil {
			t.Fatal(err)
		}
		record := []byte{1, byte(epoch)}
		if err := b.keepPrice(model, epoch, record, 0); err != nil {
			t.Fatal(err)
		}
		want = append(want, record)
	}
	for _, tt := range []struct {
		after uint64
		most  int
		want  [][]byte
	}{{0, 9, want[1:]}, {1, 1, want[2:3]}, {4, 9, want[2:]}, {5, 9, want[3:]}, {1 << 40, 9, nil}, {0, 0, nil}} {
		got, err := b.PriceRecords(model, tt.after, tt.most)
		if err != nil || !slices.EqualFunc(got, tt.want, bytes.Equal) {
			t.Errorf("after %d, %d at most: %x, %v, want %x", tt.after, tt.most, got, err, tt.want)
		}
	}
	if got, err := b.PriceRecords(settle.Hash{9}, 0, 9); err != nil || len(got) != 0 {
		t.Errorf("of another model: %x, %v", got, err)
	}
}
