package fetch

import (
	"bytes"
	"encoding/binary"
	"errors"
	"math"
	"slices"
	"strings"
	"testing"
)

func uvarints(head uint64, vs ...uint64) []byte {
	b := binary.LittleEndian.AppendUint64(nil, head)
	for _, v := range vs {
		b = binary.AppendUvarint(b, v)
	}
	return b
}

func TestWireBytes(t *testing.T) {
	tests := []struct {
		name string
		got  []byte
		want []byte
	}{
		{"want", encodeWant([32]byte{7}), append([]byte{1, 0, 0, 0, 7}, make([]byte, 31)...)},
		{"manifest", encodeManifest([]File{{[32]byte{9}, 0x0102}}), slices.Concat([]byte{9}, make([]byte, 31), []byte{2, 1, 0, 0, 0, 0, 0, 0})},
		{"ask", ask{1, 2, 3}.append(nil), []byte{1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0}},
		{"held", encodeHeld([]Span{{Group, 2 * Group}, {200 * Group, 100}}, 200*Group+100, 0), []byte{0, 0, 0, 0, 0, 0, 0, 0, 1, 2, 0xc5, 1, 1}},
		{"error", refusal{codeBusy, "no"}.encode(), []byte{5, 0, 0, 0, 'n', 'o'}},
		{"error, too long", refusal{codeBusy, strings.Repeat("x", maxText-1) + "é"}.encode(), slices.Concat([]byte{5, 0, 0, 0}, bytes.Repeat([]byte("x"), maxText-1))},
	}
	for _, tt := range tests {
		if !bytes.Equal(tt.got, tt.want) {
			t.Errorf("%s: %x, want %x", tt.name, tt.got, tt.want)
		}
	}
}

func TestDecodeRefused(t *testing.T) {
	size := int64(10*Group + 1) // 11 groups
	many := make([]uint64, 2*(maxHeldSpans+1))
	for i := range many {
		many[i] = 1
	}
	file := func(size uint64) []byte { return binary.LittleEndian.AppendUint64(make([]byte, 32), size) }
	held := func(b []byte, from uint64) error { _, _, err := decodeHeld(b, size, from); return err }
	manifest := func(b []byte) error { _, err := decodeManifest(b); return err }
	want := func(b []byte) error { _, err := decodeWant(b); return err }
	asked := func(typ uint8, a ask) error { _, err := decodeAsk(typ, a.append(nil)); return err }
	wrong := func(b []byte) error { _, err := decodeRefusal(b); return err }
	_, shortAsk := decodeAsk(frameAskData, make([]byte, askSize-1))
	tests := []struct {
		name string
		err  error
	}{
		{"want: empty", want(nil)},
		{"want: short", want(encodeWant([32]byte{})[:35])},
		{"want: trailing", want(append(encodeWant([32]byte{}), 0))},
		{"manifest: empty", manifest(nil)},
		{"manifest: cut off", manifest(file(1)[:39])},
		{"manifest: too many files", manifest(bytes.Repeat(file(1), maxFiles+1))},
		{"manifest: empty file", manifest(file(0))},
		{"manifest: huge file", manifest(file(maxFileSize + 1))},
		{"ask: size", shortAsk},
		{"ask held: length", asked(frameAskHeld, ask{length: 1})},
		{"ask data: nothing", asked(frameAskData, ask{})},
		{"ask data: too much", asked(frameAskData, ask{length: MaxRange + 1})},
		{"ask tree: too much", asked(frameAskTree, ask{length: MaxRange + 1})},
		{"ask data: within a group", asked(frameAskData, ask{length: 1, off: 1})},
		{"ask tree: offset", asked(frameAskTree, ask{length: 1, off: maxFileSize + 1})},
		{"held: short", held(make([]byte, 7), 0)},
		{"held: next beyond the file", held(uvarints(12), 0)},
		{"held: next does not advance", held(uvarints(5), 5)},
		{"held: span cut off", held(uvarints(0, 1), 0)},
		{"held: padded number", held(append(uvarints(0, 1), 0x81, 0), 0)},
		{"held: number beyond 64 bits", held(append(uvarints(0, 1), bytes.Repeat([]byte{0xff}, 10)...), 0)},
		{"held: empty span", held(uvarints(0, 1, 0), 0)},
		{"held: spans touch", held(uvarints(0, 1, 1, 0, 1), 0)},
		{"held: too many spans", held(uvarints(0, many...), 0)},
		{"held: beyond the file", held(uvarints(0, 11, 1), 0)},
		{"held: longer than the file", held(uvarints(0, 0, 12), 0)},
		{"held: overflow", held(uvarints(0, 1, math.MaxUint64), 0)},
		{"held: beyond next", held(uvarints(5, 0, 6), 0)},
		{"held: from beyond the file", held(uvarints(0, 0, 1), 12)},
		{"error: short", wrong([]byte{1, 0, 0})},
		{"error: long", wrong(append([]byte{1, 0, 0, 0}, make([]byte, maxText+1)...))},
		{"error: reserved", wrong([]byte{1, 0, 1, 0})},
		{"error: code 0", wrong([]byte{0, 0, 0, 0})},
		{"error: unknown code", wrong([]byte{8, 0, 0, 0})},
		{"error: not UTF-8", wrong([]byte{1, 0, 0, 0, 0xff})},
	}
	for _, tt := range tests {
		if !errors.Is(tt.err, ErrMalformed) {
			t.Errorf("%s: %v", tt.name, tt.err)
		}
	}
	if _, err := decodeWant(make([]byte, wantSize)); !errors.Is(err, errVersion) {
		t.Errorf("want of version 0: %v", err)
	}
}

// A list of what is held goes through in pages.
func TestHeldPages(t *testing.T) {
	size := int64(5*maxHeldSpans*Group + 77)
	var held []Span
	for g := int64(1); g*Group < size; g += 2 {
		held = append(held, Span{g * Group, min(Group, size-g*Group)})
	}
	var got []Span
	pages := 0
	for from := uint64(0); ; pages++ {
		b := encodeHeld(held, size, from)
		if len(b) > maxSharedPiece {
			t.Fatalf("page of %d bytes", len(b))
		}
		page, next, err := decodeHeld(b, size, from)
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, page...)
		if next == 0 {
			break
		}
		from = next
	}
	if !slices.Equal(got, held) || pages != 2 {
		t.Errorf("%d spans of %d after %d more pages", len(got), len(held), pages)
	}
	// Groups that are held in part are not held.
	if _, err := decodeOne(encodeHeld([]Span{{1, 3 * Group}}, size, 0), size); err != nil {
		t.Error(err)
	}
	if got, _ := decodeOne(encodeHeld([]Span{{1, 3 * Group}}, size, 0), size); !slices.Equal(got, []Span{{Group, 2 * Group}}) {
		t.Errorf("held in part: %v", got)
	}
}

func decodeOne(b []byte, size int64) ([]Span, error) {
	spans, _, err := decodeHeld(b, size, 0)
	return spans, err
}

func FuzzWant(f *testing.F) {
	f.Add(encodeWant([32]byte{1, 2}))
	f.Fuzz(func(t *testing.T, b []byte) {
		if m, err := decodeWant(b); err == nil && !bytes.Equal(encodeWant(m), b) {
			t.Errorf("%x has another encoding", b)
		}
	})
}

func FuzzManifest(f *testing.F) {
	f.Add(encodeManifest([]File{{Size: 5}, {Size: maxFileSize}}))
	f.Fuzz(func(t *testing.T, b []byte) {
		if files, err := decodeManifest(b); err == nil && !bytes.Equal(encodeManifest(files), b) {
			t.Errorf("%x has another encoding", b)
		}
	})
}

func FuzzAsk(f *testing.F) {
	f.Add(frameAskData, ask{1, 2, Group}.append(nil))
	f.Fuzz(func(t *testing.T, typ uint8, b []byte) {
		if a, err := decodeAsk(typ, b); err == nil && !bytes.Equal(a.append(nil), b) {
			t.Errorf("%x has another encoding", b)
		}
	})
}

func FuzzHeld(f *testing.F) {
	f.Add(encodeHeld([]Span{{0, Group}, {3 * Group, 2 * Group}}, 6*Group, 0), int64(6*Group), uint64(0))
	f.Add(uvarints(9, 1, 1), int64(20*Group), uint64(3))
	f.Fuzz(func(t *testing.T, b []byte, size int64, from uint64) {
		if size < 1 || size > maxFileSize {
			return
		}
		spans, next, err := decodeHeld(b, size, from)
		if err != nil {
			return
		}
		last := int64(-1)
		for _, s := range spans {
			if s.Off <= last || s.Len <= 0 || s.End() > size || s.Off%Group != 0 || s.End()%Group != 0 && s.End() != size {
				t.Fatalf("%v of a file of %d bytes after %d", s, size, last)
			}
			last = s.End()
		}
		if next == 0 && from < groupsOf(size) && !bytes.Equal(encodeHeld(spans, size, from), b) {
			t.Errorf("%x has another encoding", b)
		}
	})
}

func FuzzRefusal(f *testing.F) {
	f.Add(refusal{codeBusy, "text"}.encode())
	f.Fuzz(func(t *testing.T, b []byte) {
		if r, err := decodeRefusal(b); err == nil && !bytes.Equal(r.encode(), b) {
			t.Errorf("%x has another encoding", b)
		}
	})
}
