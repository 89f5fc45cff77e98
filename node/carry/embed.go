package carry

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"time"

	"kvasird/p2p"
)

const (
	// MaxInputs bounds the inputs of a request for embeddings, MaxInputTokens their tokens
	// together.
	MaxInputs      = 2048
	MaxInputTokens = 1 << 18
	maxWidth       = 1 << 16 // values of a vector
)

// Embedder is an Answerer whose model makes embeddings, and no text. Errors have the methods that
// gateway.Engine names.
type Embedder interface {
	// Embed returns one vector for each input, in their order.
	Embed(ctx context.Context, owner string, inputs [][]int32) ([][]float32, error)
}

// split cuts the tokens of a request into its inputs.
func (a *ask) split(tokens []int32) (inputs [][]int32) {
	for _, n := range a.Inputs {
		inputs = append(inputs, tokens[:n])
		tokens = tokens[n:]
	}
	return inputs
}

// embed sends the vectors of some inputs.
func (l *answering) embed(ctx context.Context, from Embedder, owner string, inputs [][]int32) error {
	if err := l.send(frameBegun, nil); err != nil {
		return err
	}
	type made struct {
		vectors [][]float32
		err     error
	}
	ready := make(chan made, 1)
	go func() {
		vectors, err := from.Embed(ctx, owner, inputs)
		ready <- made{vectors, err}
	}()
	tick := time.NewTicker(wordEvery)
	defer tick.Stop()
	var m made
	for waiting := true; waiting; {
		select {
		case m = <-ready:
			waiting = false
		case <-tick.C:
			if err := l.send(frameWait, nil); err != nil {
				return err
			}
		}
	}
	if m.err != nil {
		return m.err
	}
	for _, v := range m.vectors {
		if err := l.send(frameVector, putVector(nil, v)); err != nil {
			return err
		}
	}
	return l.send(frameEnd, putEnd(finishes[1]))
}

func putVector(dst []byte, v []float32) []byte {
	for _, x := range v {
		dst = binary.LittleEndian.AppendUint32(dst, math.Float32bits(x))
	}
	return dst
}

func decodeVector(payload []byte) ([]float32, error) {
	if len(payload) == 0 || len(payload)%4 != 0 || len(payload) > 4*maxWidth {
		return nil, fmt.Errorf("vector of %d bytes, want a multiple of 4 up to %d", len(payload), 4*maxWidth)
	}
	v := make([]float32, len(payload)/4)
	for i := range v {
		v[i] = math.Float32frombits(binary.LittleEndian.Uint32(payload[4*i:]))
		if x := float64(v[i]); math.IsNaN(x) || math.IsInf(x, 0) {
			return nil, fmt.Errorf("value %d of a vector is %v", i, x)
		}
	}
	return v, nil
}

// Embed has another node make the vectors of some inputs. Errors: those of Start.
func (c *Client) Embed(ctx context.Context, inputs [][]int32) ([][]float32, error) {
	if len(inputs) == 0 {
		return nil, errors.New("there is no input")
	}
	a := ask{Version: embedVersion, Model: c.cfg.Model[:]}
	var tokens []int32
	longest := 0
	for _, input := range inputs {
		a.Inputs = append(a.Inputs, len(input))
		tokens = append(tokens, input...)
		longest = max(longest, len(input))
	}
	a.Prompt = len(tokens)
	if a.Prompt > MaxInputTokens {
		return nil, &LongError{a.Prompt, MaxInputTokens, true}
	}
	payload, err := a.encode()
	if err != nil {
		return nil, err
	}
	var vectors [][]float32
	err = c.attempt(ctx, longest, 0, 1, func(t Target) error {
		e := &embedding{ask: payload, tokens: tokens, want: len(inputs)}
		err := c.reach(ctx, t, e.write, func(conn Conn) error { return e.receive(conn, t) })
		vectors = e.vectors
		if err == nil && c.cfg.Served != nil {
			c.cfg.Served(t.Peer, len(tokens))
		}
		return err
	}, func() bool { return false })
	return vectors, err
}

// embedding is a request for embeddings at one server.
type embedding struct {
	ask     []byte
	tokens  []int32
	want    int // vectors
	begun   bool
	vectors [][]float32
}

// write sends the request, and that its client is there. When that fails, reading tells why.
func (e *embedding) write(c Conn, ended <-chan struct{}) {
	out := p2p.NewFrameWriter(c, max(maxAsk, 4*len(e.tokens)))
	err := send(c, out, frameAsk, e.ask)
	if err == nil {
		err = send(c, out, framePrompt, p2p.AppendInts(nil, e.tokens))
	}
	tick := time.NewTicker(wordEvery)
	defer tick.Stop()
	for err == nil {
		select {
		case <-tick.C:
		case <-ended:
			return
		}
		err = send(c, out, frameTaken, make([]byte, 4))
	}
}

func (e *embedding) receive(c Conn, t Target) error {
	return readFrames(c, t, 4*maxWidth, func(f p2p.Frame) (over bool, err error) {
		switch {
		case f.Type == frameRefused:
			r, err := decodeRefusal(f.Payload)
			if err != nil {
				return false, broke("node %s: %w", t.Peer, err)
			}
			err = errorOf(t.Peer, r)
			if long, ok := err.(*LongError); ok {
				long.Input = true
			}
			return false, err
		case f.Type == frameBegun && len(f.Payload) == 0 && !e.begun:
			e.begun = true
			return false, nil
		case f.Type == frameWait && len(f.Payload) == 0:
			return false, nil
		case f.Type == frameVector && e.begun && len(e.vectors) < e.want:
			v, err := decodeVector(f.Payload)
			if err == nil && len(e.vectors) > 0 && len(v) != len(e.vectors[0]) {
				err = fmt.Errorf("a vector of %d values beside one of %d", len(v), len(e.vectors[0]))
			}
			if err != nil {
				return false, broke("node %s: %w", t.Peer, err)
			}
			e.vectors = append(e.vectors, v)
			return false, nil
		case f.Type == frameEnd && len(e.vectors) == e.want:
			if _, err := decodeEnd(f.Payload); err != nil {
				return false, broke("node %s: %w", t.Peer, err)
			}
			return true, nil
		}
		return false, broke("node %s: frame of type %d with %d bytes after %d of %d vectors", t.Peer, f.Type, len(f.Payload), len(e.vectors), e.want)
	})
}
