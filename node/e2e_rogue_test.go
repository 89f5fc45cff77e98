//go:build cgo && linux

package node

import (
	"bytes"
	"encoding/binary"
	"io"
	"math"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"kvasird/p2p"
)

// rogue pretends to hold every expert of the shipped model.
type rogue struct {
	t      *testing.T
	model  string
	answer func(id uint64, pairs int) []byte // what it sends for a call
	calls  atomic.Int32
	once   sync.Once
	asked  chan struct{} // closed when it took the programs of all layers
}

const tinyWidth, tinyLayers = 256, 4

// serve is the worker's side of the protocol, up to what it sends for calls.
func (r *rogue) serve(_ *p2p.Peer, c p2p.Conn) {
	if _, err := io.ReadFull(c, make([]byte, 32)); err != nil {
		return
	}
	offer := record(r.t, map[int]any{1: 4, 2: r.model, 3: [][]int{{0, tinyLayers, 0, 32}}, 4: 4096, 5: 4096, 6: 64, 7: []byte{1}, 8: 0})
	c.Write(frame(typeOffer, 0, len(offer), offer))
	widths := binary.LittleEndian.AppendUint32(binary.LittleEndian.AppendUint32(nil, tinyWidth), tinyWidth)
	programs := 0
	for frames := p2p.NewFrameReader(c, 16<<20); ; {
		f, err := frames.Next()
		if err != nil {
			return
		}
		switch f.Type {
		case typeProgram:
			c.Write(frame(typeResult, f.ID, len(widths), widths))
			if programs++; programs == tinyLayers {
				r.once.Do(func() { close(r.asked) })
			}
		case typePing:
			c.Write(frame(typePong, f.ID, 0, nil))
		case typeCall:
			r.calls.Add(1)
			c.Write(r.answer(f.ID, int(binary.LittleEndian.Uint32(f.Payload[16:]))))
		}
	}
}

// wrongAnswers are what no honest worker sends for a call. The last two cost the
// backbone a deadline each time.
var wrongAnswers = []struct {
	name   string
	answer func(id uint64, pairs int) []byte
}{
	{"not finite", func(id uint64, pairs int) []byte {
		rows := bytes.Repeat([]byte{0, 0, 0xc0, 0x7f}, pairs*tinyWidth)
		return frame(typeReply, id, len(rows), rows)
	}},
	{"too short", func(id uint64, pairs int) []byte { return frame(typeReply, id, 4, make([]byte, 4)) }},
	{"for another call", func(id uint64, pairs int) []byte { return frame(typeReply, id+1000, 4, make([]byte, 4)) }},
	{"4 GB", func(id uint64, pairs int) []byte { return frame(typeReply, id, math.MaxUint32, nil) }},
	{"garbage", func(uint64, int) []byte { return bytes.Repeat([]byte("garbage "), 64) }},
	{"malformed error", func(id uint64, pairs int) []byte { return frame(typeError, id, 2, []byte{0, 0}) }},
	{"refusal", func(id uint64, pairs int) []byte { return frame(typeError, id, 6, []byte{2, 0, 0, 0, 'n', 'o'}) }},
	{"nothing", func(uint64, int) []byte { return nil }},
	{"half a frame", func(id uint64, pairs int) []byte { return frame(typeReply, id, 4*tinyWidth*pairs, make([]byte, 8)) }},
}

func TestHostileWorker(t *testing.T) {
	s := newSwarm(t)
	w := s.worker("w1")
	s.run()
	st, err := s.backbone.client().Status(s.ctx)
	if err != nil {
		t.Fatal(err)
	}
	right := reference().answer(t, questions[0], true)
	calls := map[string]int32{}
	round := func(i int) {
		wrong := wrongAnswers[i]
		r := &rogue{t: t, model: modelID(t, w), answer: wrong.answer, asked: make(chan struct{})}
		h := s.stranger(func(c *p2p.Config) { c.Capabilities.Models = []string{r.model} }, r.serve)
		defer h.Close()
		if _, err := s.meet(h, localAddr(st)); err != nil {
			t.Fatal(err)
		}
		select {
		case <-r.asked:
		case <-time.After(10 * time.Second):
			t.Fatalf("%s: the backbone gave it no programs", wrong.name)
		}
		// The first answer may come from the honest worker alone: to be asked, the
		// rogue needs a share of the calls, or a canary that finds it.
		for try := 0; try == 0 || try < 10 && calls[wrong.name]+r.calls.Load() == 0; try++ {
			status, got, body := s.chat(long(questions[0]), func(int) {})
			if status != http.StatusOK || got != right || body != "" {
				t.Errorf("%s: status %d, error %q\n got %q\nwant %q", wrong.name, status, body, got, right)
			}
		}
		calls[wrong.name] += r.calls.Load()
	}
	for i := range len(wrongAnswers) {
		round(i)
	}
	before := s.backbone.usage(t)
	for i := range 50 {
		round(i % (len(wrongAnswers) - 2))
	}
	s.backbone.level(t, before)
	t.Log(calls)
	for _, wrong := range wrongAnswers {
		if calls[wrong.name] == 0 {
			t.Errorf("%s: it was never asked", wrong.name)
		}
	}
}
