//go:build cgo && linux

package node

import (
	"bytes"
	"context"
	"io"
	"slices"
	"testing"
	"time"

	"kvasird/ggml"
	"kvasird/ggml/gguf"
	"kvasird/ggml/tiny"
	"kvasird/node/engine"
)

// What is written to a line arrives whole, in order, after half its round trip, and
// however much is written, after no more.
func TestDelayLine(t *testing.T) {
	const rtt, writes = 100 * time.Millisecond, 2000
	near, far, err := delayedPair(rtt)
	if err != nil {
		t.Fatal(err)
	}
	defer far.Close()
	defer near.Close()
	near.SetReadDeadline(time.Now().Add(time.Minute))
	far.SetReadDeadline(time.Now().Add(time.Minute))
	start := time.Now()
	var want []byte
	for i := range writes {
		b := []byte{byte(i), byte(i >> 8)}
		want = append(want, b...)
		if _, err := near.Write(b); err != nil {
			t.Fatal(err)
		}
		b[0]++ // the line keeps a copy
	}
	got := make([]byte, len(want))
	if _, err := io.ReadFull(far, got); err != nil || !bytes.Equal(got, want) {
		t.Fatalf("read %d bytes, %v; they are others than were written", len(got), err)
	}
	if took := time.Since(start); took < rtt/2 || took > writes*rtt/2/4 {
		t.Errorf("%d writes arrived after %v, want %v and little more", writes, took, rtt/2)
	}
	measured, err := measureLine(rtt)
	if err != nil || measured < rtt {
		t.Errorf("a round trip of %v was measured as %v, %v", rtt, measured, err)
	}
}

// The end of a line ends reads of both ends, and writes.
func TestDelayLineCloses(t *testing.T) {
	near, far, err := delayedPair(time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	near.SetDeadline(time.Now().Add(time.Minute))
	if _, err := far.Write([]byte("never arrives")); err != nil {
		t.Fatal(err)
	}
	time.Sleep(10 * time.Millisecond) // it is on its way now
	began := time.Now()
	done := make(chan error)
	go func() {
		_, err := near.Read(make([]byte, 1))
		done <- err
	}()
	near.Close()
	if err := <-done; err == nil {
		t.Error("a read went on after Close")
	}
	if _, err := near.Write([]byte{1}); err == nil {
		t.Error("a write was taken after Close")
	}
	far.Close()
	if took := time.Since(began); took > 20*time.Second {
		t.Errorf("both ends were closed after %v", took)
	}
}

func TestRepeats(t *testing.T) {
	for _, c := range []struct {
		prompt, answer []int32
		want           float64
	}{
		{[]int32{1, 2, 3}, []int32{4, 5, 6, 7}, 0},
		{[]int32{1, 2, 3, 1, 2}, []int32{3, 1, 2, 3}, 1},
		{[]int32{1, 2, 3, 1, 2}, []int32{4, 9}, 0},
		{[]int32{1, 2, 3, 1, 2}, []int32{3, 8}, 0.5},
	} {
		if got := repeats(c.prompt, c.answer); got != c.want {
			t.Errorf("repeats(%v, %v) = %v, want %v", c.prompt, c.answer, got, c.want)
		}
	}
}

// What rounding may choose is accepted; the answer to another prompt and one in the wrong
// order are not.
func TestBenchChecksAnswers(t *testing.T) {
	rt, err := ggml.Open(ggml.Config{})
	if err != nil {
		t.Fatal(err)
	}
	path, err := tiny.Write(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	file, err := gguf.OpenModel(path)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	c, err := openCompute(context.Background(), rt, path, file, gguf.Range{End: file.Layers()}, nil, stageSize{rttStreams * rttContext, rttStreams, rttBatch, 1})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	w := &wholeModel{c}
	var texts []*rttText
	for _, prompt := range rttPrompts[:rttStreams] {
		tokens, err := engine.Tokenize(c.model, prompt)
		if err != nil {
			t.Fatal(err)
		}
		texts = append(texts, &rttText{prompt: tokens, sampling: noEnd(c.model)})
	}
	together, _, err := w.run(context.Background(), texts, rttTokens)
	if err != nil {
		t.Fatal(err)
	}
	for i, text := range texts {
		own := together[i]
		if err := w.check(context.Background(), text, own); err != nil {
			t.Errorf("%q, beside others: %v", rttPrompts[i], err)
		}
		for what, wrong := range map[string][]int32{
			"the answer to another prompt": together[(i+1)%len(texts)], "reversed": reversed(own),
		} {
			if err := w.check(context.Background(), text, wrong); err == nil {
				t.Errorf("%q: %s was accepted", rttPrompts[i], what)
			}
		}
	}
}

func reversed(list []int32) []int32 {
	r := slices.Clone(list)
	slices.Reverse(r)
	return r
}
