package carry

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"kvasird/ggml/gguf"
	"kvasird/node/gateway"
	"kvasird/p2p"
)

// lengths is an Answerer and Embedder whose vectors are an input's length and first token.
type lengths struct {
	took  time.Duration
	fail  error
	owner string
}

func (e *lengths) Context() int { return 16 }

func (e *lengths) Start(context.Context, gateway.Request, gateway.Extra) (Tokens, error) {
	return nil, errors.New("no text")
}

func (e *lengths) Embed(ctx context.Context, owner string, inputs [][]int32) (out [][]float32, err error) {
	e.owner = owner
	select {
	case <-time.After(e.took):
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	for _, input := range inputs {
		out = append(out, []float32{float32(len(input)), float32(input[0])})
	}
	return out, e.fail
}

// embedding has the servers of a world embed.
func (w *world) embedding(e *lengths) {
	for name := range w.servers {
		w.servers[name] = NewServer(ServerConfig{Find: func(gguf.ModelID) (Answerer, error) { return e, nil }, Admit: func(string) error { return nil }, Logger: quiet})
	}
	for i := range w.targets {
		w.targets[i].Context = 16
	}
}

func TestEmbed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, e := newWorld(t, "a"), &lengths{took: time.Minute} // which is longer than silence
		w.embedding(e)
		var inputs [][]int32
		for n := range int32(300) {
			inputs = append(inputs, slices.Repeat([]int32{n}, int(1+n%16)))
		}
		got, err := w.client.Embed(t.Context(), inputs)
		if err != nil || len(got) != len(inputs) || e.owner != "entry" {
			t.Fatalf("%d vectors for %q, %v", len(got), e.owner, err)
		}
		rows := 0
		for i, v := range got {
			if !slices.Equal(v, []float32{float32(len(inputs[i])), float32(i)}) {
				t.Errorf("vector %d is %v", i, v)
			}
			rows += len(inputs[i])
		}
		w.took("a", rows)
		w.free(0)
	})
}

func TestEmbedRefuses(t *testing.T) {
	one := [][]int32{{1}}
	var long *LongError
	var busy *BusyError
	var refused *RefusedError
	for _, tt := range []struct {
		name   string
		fail   error
		inputs [][]int32
		want   func(error) bool
	}{
		{"no input", nil, nil, func(err error) bool { return strings.Contains(err.Error(), "no input") }},
		{"an empty input", nil, [][]int32{{1}, {}}, func(err error) bool { return strings.Contains(err.Error(), "input 1 of 0") }},
		{"a long input", nil, [][]int32{make([]int32, 17)}, func(err error) bool { return errors.As(err, &long) && long.Limit == 16 }},
		{"much", nil, slices.Repeat([][]int32{make([]int32, 16)}, MaxInputTokens/16+1), func(err error) bool { return errors.As(err, &long) && long.Limit == MaxInputTokens }},
		{"many", nil, slices.Repeat(one, MaxInputs+1), func(err error) bool { return strings.Contains(err.Error(), "2049 inputs") }},
		{"busy", fullError{errors.New("the queue is full")}, one, func(err error) bool { return errors.As(err, &busy) && busy.Retry == 3*time.Second }},
		{"failed", errors.New("the machine is on fire"), one, func(err error) bool { return errors.As(err, &refused) && refused.Code == CodeFailed }},
	} {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t, "a")
			w.embedding(&lengths{fail: tt.fail})
			if _, err := w.client.Embed(t.Context(), tt.inputs); err == nil || !tt.want(err) {
				t.Errorf("%s: %v", tt.name, err)
			}
			w.free(0)
		})
	}
	synctest.Test(t, func(t *testing.T) { // who makes text is not asked twice, who is not reached is left
		w := newWorld(t, "a", "b")
		if _, err := w.client.Embed(t.Context(), one); !errors.As(err, &refused) || refused.Code != CodeNotReady || !strings.Contains(err.Error(), "no embeddings") {
			t.Errorf("an engine of text: %v", err)
		}
		w.embedding(&lengths{})
		w.down["a"] = true
		if v, err := w.client.Embed(t.Context(), one); err != nil || len(v) != 1 {
			t.Errorf("with one that is not reached: %v, %v", v, err)
		}
		w.free(0)
	})
}

// TestEmbedLeaves: a client that leaves ends what is computed for it.
func TestEmbedLeaves(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "a")
		w.embedding(&lengths{took: time.Hour})
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if _, err := w.client.Embed(ctx, [][]int32{{1}}); !errors.Is(err, context.DeadlineExceeded) {
			t.Error(err)
		}
		w.free(time.Second)
		if s := w.servers["a"].Stats(); s.Gone != 1 {
			t.Errorf("%+v", s)
		}
	})
}

// TestHostileEmbedder has one server for every reason to drop it; another one answers.
func TestHostileEmbedder(t *testing.T) {
	begun, end := p2p.Frame{Type: frameBegun}, p2p.Frame{Type: frameEnd, Payload: putEnd("stop")}
	vector := func(v ...float32) p2p.Frame { return p2p.Frame{Type: frameVector, Payload: putVector(nil, v)} }
	for _, tt := range []struct {
		name string
		sent []byte
		want string
	}{
		{"before it began", frames(vector(1)), "type 10"},
		{"begins twice", frames(begun, begun), "type 4"},
		{"too many", frames(begun, vector(1), vector(1), vector(1)), "after 2 of 2"},
		{"too few", frames(begun, vector(1), end), "after 1 of 2"},
		{"of two sizes", frames(begun, vector(1), vector(1, 2)), "2 values beside one of 1"},
		{"empty", frames(begun, vector()), "vector of 0 bytes"},
		{"no number", frames(begun, vector(1, float32(math.NaN()))), "value 1 of a vector is NaN"},
		{"infinite", frames(begun, vector(float32(math.Inf(-1)))), "-Inf"},
		{"half a value", frames(begun, p2p.Frame{Type: frameVector, Payload: []byte{0, 0, 0, 0, 1}}), "5 bytes"},
		{"too wide", []byte{1, 0, 4, 0, frameVector, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}, "frame too large"},
		{"tokens", frames(begun, p2p.Frame{Type: frameTokens, Payload: putAnswer(nil, 0, 1)}), "type 6"},
		{"malformed end", frames(begun, vector(1), vector(2), p2p.Frame{Type: frameEnd}), "end frame"},
		{"malformed refusal", frames(p2p.Frame{Type: frameRefused}), "refusal of 0"},
	} {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t, "a", "b")
			w.embedding(&lengths{})
			w.serve["a"] = func(c Conn) {
				go io.Copy(io.Discard, c)
				c.Write(tt.sent)
				time.Sleep(time.Second)
			}
			got, err := w.client.Embed(t.Context(), [][]int32{{5}, {6, 6}})
			if err != nil || fmt.Sprint(got) != "[[1 5] [2 6]]" {
				t.Errorf("%s: %v, %v", tt.name, got, err)
			}
			if len(w.faults) != 1 || !strings.Contains(w.faults[0].Error(), tt.want) {
				t.Errorf("%s: faults %v, want %q", tt.name, w.faults, tt.want)
			}
			w.free(time.Minute)
		})
	}
}
