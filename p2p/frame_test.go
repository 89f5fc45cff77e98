package p2p

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math"
	"strings"
	"testing"
	"testing/iotest"
)

// countWriter counts the calls of Write.
type countWriter struct {
	bytes.Buffer
	writes int
}

func (c *countWriter) Write(b []byte) (int, error) {
	c.writes++
	return c.Buffer.Write(b)
}

func TestFrameLiteralBytes(t *testing.T) {
	var w countWriter
	fw := NewFrameWriter(&w, 8)
	if err := fw.Write(Frame{Type: 2, Flags: 0x81, ID: 0x0102030405060708, Payload: []byte("abc")}); err != nil {
		t.Fatal(err)
	}
	want := []byte{3, 0, 0, 0, 2, 0x81, 0, 0, 8, 7, 6, 5, 4, 3, 2, 1, 'a', 'b', 'c'}
	if !bytes.Equal(w.Bytes(), want) {
		t.Errorf("bytes\n got %x\nwant %x", w.Bytes(), want)
	}
	if w.writes != 1 {
		t.Errorf("got %d writes, want 1", w.writes)
	}
}

func TestFrameRoundTrip(t *testing.T) {
	for _, size := range []int{0, 1, 15, 4096, frameStep - 1, frameStep, frameStep + 1, 3*frameStep + 7} {
		t.Run(fmt.Sprint(size), func(t *testing.T) {
			payload := bytes.Repeat([]byte{0xa5, 1, 2}, size/3+1)[:size]
			var b bytes.Buffer
			fw := NewFrameWriter(&b, size)
			for id := range uint64(3) {
				if err := fw.Write(Frame{Type: 1, ID: id, Payload: payload}); err != nil {
					t.Fatal(err)
				}
			}
			fr := NewFrameReader(iotest.HalfReader(&b), size)
			for id := range uint64(3) {
				got, err := fr.Next()
				if err != nil {
					t.Fatal(err)
				}
				if got.ID != id || got.Type != 1 || !bytes.Equal(got.Payload, payload) {
					t.Fatalf("frame %d differs: type %d, id %d, %d bytes", id, got.Type, got.ID, len(got.Payload))
				}
			}
			if _, err := fr.Next(); err != io.EOF {
				t.Errorf("at the end: got %v, want EOF", err)
			}
		})
	}
}

func TestFrameRefused(t *testing.T) {
	header := func(n string) string { return n + "\x01\x00\x00\x00\x01\x00\x00\x00\x00\x00\x00\x00" }
	tests := []struct {
		name, in string
		want     error
	}{
		{"empty", "", io.EOF},
		{"header cut", "\x01\x00\x00", io.ErrUnexpectedEOF},
		{"payload missing", header("\x04\x00\x00\x00"), io.ErrUnexpectedEOF},
		{"payload cut", header("\x04\x00\x00\x00") + "abc", io.ErrUnexpectedEOF},
		{"one too long", header("\x11\x00\x00\x00") + strings.Repeat("x", 17), ErrFrameTooLarge},
		{"claims 4 GB", header("\xff\xff\xff\xff"), ErrFrameTooLarge},
		{"reserved set", "\x00\x00\x00\x00\x01\x00\x01\x00\x01\x00\x00\x00\x00\x00\x00\x00", ErrFrame},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			_, err := NewFrameReader(strings.NewReader(tt.in), 16).Next()
			_, into := NewFrameReader(strings.NewReader(tt.in), 16).NextInto(make([]byte, 16))
			if !errors.Is(err, tt.want) || !errors.Is(into, tt.want) {
				t.Errorf("got %v and %v, want %v", err, into, tt.want)
			}
		})
	}
	for _, n := range []int{-1, 17, math.MaxInt} {
		if _, err := NewFrameWriter(io.Discard, 16).Payload(n); !errors.Is(err, ErrFrameTooLarge) {
			t.Errorf("writer, %d bytes: got %v, want ErrFrameTooLarge", n, err)
		}
	}
}

// A header that claims much and is followed by little must not cost much.
func TestFrameClaimCostsLittle(t *testing.T) {
	in := "\x00\x00\x00\x40" + strings.Repeat("\x00", 12) + "abc" // 1 GiB
	fr := NewFrameReader(strings.NewReader(in), math.MaxInt32)
	if _, err := fr.Next(); err != io.ErrUnexpectedEOF {
		t.Fatalf("got %v, want unexpected EOF", err)
	}
	if cap(fr.buf) > frameStep {
		t.Errorf("buffer of %d bytes for 3 received", cap(fr.buf))
	}
}

// A payload that fits is read in place, a longer one and the next are not affected.
func TestFrameInto(t *testing.T) {
	var b bytes.Buffer
	fw := NewFrameWriter(&b, 16)
	for _, s := range []string{"", "fits", "too long", "four"} {
		if err := fw.Write(Frame{Type: 1, Payload: []byte(s)}); err != nil {
			t.Fatal(err)
		}
	}
	fr := NewFrameReader(&b, 16)
	for _, want := range []string{"", "fits", "too long", "four"} {
		dst := []byte("....")
		f, err := fr.NextInto(dst)
		if err != nil || string(f.Payload) != want {
			t.Fatalf("%q, %v, want %q", f.Payload, err, want)
		}
		if fits := len(want) == len(dst); string(dst) == want != fits {
			t.Errorf("%q is in place: %q", want, dst)
		}
	}
}

func TestFrameAllocations(t *testing.T) {
	payload := make([]byte, 12<<10)
	fw := NewFrameWriter(io.Discard, len(payload))
	n := testing.AllocsPerRun(100, func() {
		if err := fw.Write(Frame{Type: 1, ID: 7, Payload: payload}); err != nil {
			t.Fatal(err)
		}
	})
	if n != 0 {
		t.Errorf("writing allocates %v times per frame", n)
	}
	var b bytes.Buffer
	if err := NewFrameWriter(&b, len(payload)).Write(Frame{Payload: payload}); err != nil {
		t.Fatal(err)
	}
	r := bytes.NewReader(b.Bytes())
	fr := NewFrameReader(r, len(payload))
	n = testing.AllocsPerRun(100, func() {
		r.Reset(b.Bytes())
		if _, err := fr.Next(); err != nil {
			t.Fatal(err)
		}
	})
	if n != 0 {
		t.Errorf("reading allocates %v times per frame", n)
	}
}

func FuzzFrame(f *testing.F) {
	f.Add([]byte{})
	f.Add([]byte{3, 0, 0, 0, 2, 0x81, 0, 0, 8, 7, 6, 5, 4, 3, 2, 1, 'a', 'b', 'c'})
	f.Add(bytes.Repeat([]byte{0xff}, 16))
	f.Fuzz(func(t *testing.T, in []byte) {
		const limit = 64
		var out bytes.Buffer
		fr, fw := NewFrameReader(bytes.NewReader(in), limit), NewFrameWriter(&out, limit)
		for {
			frame, err := fr.Next()
			if err != nil {
				break
			}
			if err := fw.Write(frame); err != nil {
				t.Fatalf("a frame that was read cannot be written: %v", err)
			}
		}
		if !bytes.HasPrefix(in, out.Bytes()) {
			t.Errorf("frames read do not write back: %x from %x", out.Bytes(), in)
		}
	})
}
