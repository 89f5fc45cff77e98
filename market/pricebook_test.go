package market

import (
	"bytes"
	"encoding/binary"
	"errors"
	"slices"
	"testing"

	"kvasird/ggml/gguf"
	"kvasird/settle"
)

// chainOf signs so many records that follow each other, from epoch 0 on, of a model.
func chainOf(t testing.TB, model gguf.ModelID, n int) (records [][]byte, last *PriceRecord) {
	t.Helper()
	last = firstPrice()
	last.Model = model
	records = [][]byte{sign(t, last)}
	for e := range n - 1 {
		last = last.after(t, uint64(e+1), busy)
		records = append(records, sign(t, last))
	}
	return records, last
}

func take(t testing.TB, b *PriceBook, records ...[]byte) {
	t.Helper()
	for i, r := range records {
		if err := b.Check(r); err != nil {
			t.Fatalf("record %d: checked: %v", i, err)
		}
		if news, err := b.Take(r); err != nil || !news {
			t.Fatalf("record %d: news %v, %v", i, news, err)
		}
	}
}

// refuses has the book refuse a record and stay as it is.
func refuses(t testing.TB, b *PriceBook, record []byte, want error) {
	t.Helper()
	before := b.Records()
	if err := b.Check(record); !errors.Is(err, want) {
		t.Errorf("checked: %v, want %v", err, want)
	}
	if news, err := b.Take(record); news || !errors.Is(err, want) {
		t.Errorf("news %v, %v, want %v", news, err, want)
	}
	if !slices.EqualFunc(before, b.Records(), bytes.Equal) {
		t.Error("what is refused changed the book")
	}
}

func TestPriceBook(t *testing.T) {
	one, other := gguf.ModelID{1}, gguf.ModelID{9}
	list, last := chainOf(t, one, 6)
	its, _ := chainOf(t, other, 2)
	b := NewPriceBook(priceNet, publisher)
	if _, _, err := b.Price(one); !errors.Is(err, ErrNoPrice) {
		t.Errorf("before the first: %v", err)
	}
	take(t, b, its[0], list[0], list[1])
	if news, err := b.Take(list[1]); news || err != nil {
		t.Errorf("the last once more: news %v, %v", news, err)
	}
	refuses(t, b, list[0], ErrPriceOld)
	refuses(t, b, list[4], ErrPriceGap)
	refuses(t, b, list[3], ErrPriceGap)
	if got := b.Behind(); len(got) != 1 || got[one] != 1 {
		t.Errorf("behind: %v, want model 1 after epoch 1", got)
	}
	take(t, b, list[2], list[3])
	if got := b.Behind(); len(got) != 1 {
		t.Errorf("behind: %v, though epoch 4 is known", got)
	}
	take(t, b, list[4], list[5])
	if got := b.Behind(); len(got) != 0 {
		t.Errorf("behind: %v, though nothing is missing", got)
	}
	want, _ := last.Hash()
	if got, hash, err := b.Price(one); err != nil || hash != want || *got != *last {
		t.Errorf("price %+v, %v, %v", got, hash, err)
	}
	if got := b.Models(); !slices.Equal(got, []gguf.ModelID{one, other}) {
		t.Errorf("models %v", got)
	}
	if got := b.Newest(); !slices.EqualFunc(got, [][]byte{list[5], its[0]}, bytes.Equal) {
		t.Errorf("%d newest records, or others", len(got))
	}
	for _, tt := range []struct {
		after uint64
		most  int
		want  [][]byte
	}{{0, 2, list[1:3]}, {3, 9, list[4:]}, {5, 9, nil}, {99, 9, nil}} {
		if got := b.After(one, tt.after, tt.most); !slices.EqualFunc(got, tt.want, bytes.Equal) {
			t.Errorf("after %d: %d records, want %d", tt.after, len(got), len(tt.want))
		}
	}
	again := NewPriceBook(priceNet, publisher)
	take(t, again, b.Records()...)
	if !slices.EqualFunc(again.Records(), b.Records(), bytes.Equal) {
		t.Error("the records make another book")
	}
}

// TestPriceBookKeepsForks has two records of one place, an older one too, end the model: for good,
// and after a restart as well.
func TestPriceBookKeepsForks(t *testing.T) {
	list, _ := chainOf(t, priceModel, 4)
	twin := func(e int) []byte {
		p, err := ParsePriceRecord(list[e], publisher)
		if err != nil {
			t.Fatal(err)
		}
		p.Issued++
		return sign(t, p)
	}
	for name, fork := range map[string][]byte{"of the last": twin(3), "of one before": twin(1), "of the first": twin(0)} {
		t.Run(name, func(t *testing.T) {
			b := NewPriceBook(priceNet, publisher)
			take(t, b, list...)
			if err := b.Check(fork); !errors.Is(err, ErrPriceFork) && !errors.Is(err, ErrPriceOld) {
				t.Errorf("checked: %v", err)
			}
			if _, _, err := b.Price(priceModel); err != nil {
				t.Fatalf("a check changed the book: %v", err)
			}
			if news, err := b.Take(fork); !news || !errors.Is(err, ErrPriceFork) {
				t.Fatalf("news %v, %v", news, err)
			}
			refuses(t, b, fork, ErrPriceFork)
			refuses(t, b, list[3], ErrPriceFork)
			again := NewPriceBook(priceNet, publisher)
			for _, r := range b.Records() {
				again.Take(r)
			}
			heard := NewPriceBook(priceNet, publisher)
			take(t, heard, list...)
			for _, r := range b.Newest() {
				heard.Take(r)
			}
			for name, b := range map[string]*PriceBook{"the book": b, "one made again": again, "one that was told": heard} {
				if _, _, err := b.Price(priceModel); !errors.Is(err, ErrPriceFork) {
					t.Errorf("%s: the price is %v, want a fork", name, err)
				}
			}
		})
	}
}

func TestPriceBookBounds(t *testing.T) {
	b := NewPriceBook(priceNet, publisher)
	list, _ := chainOf(t, gguf.ModelID{}, KeptPrices+3)
	take(t, b, list...)
	if got := b.Records(); !slices.EqualFunc(got, list[3:], bytes.Equal) {
		t.Errorf("%d records are kept, want the newest %d", len(got), KeptPrices)
	}
	if got := b.After(gguf.ModelID{}, 0, 1); len(got) != 1 || !bytes.Equal(got[0], list[3]) {
		t.Error("after epoch 0: not the oldest that is kept")
	}
	for i := range MaxPriced {
		first := firstPrice()
		binary.BigEndian.PutUint32(first.Model[:], uint32(i+1))
		if i == MaxPriced-1 {
			refuses(t, b, sign(t, first), ErrManyPrices)
			break
		}
		take(t, b, sign(t, first))
	}
	strange := firstPrice()
	strange.Network = settle.Hash{2}
	refuses(t, b, sign(t, strange), ErrPriceNetwork)
	refuses(t, b, list[0][1:], ErrPriceSignature)
	refuses(t, b, nil, ErrPriceFormat)
}
