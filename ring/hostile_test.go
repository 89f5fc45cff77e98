package ring

import (
	"context"
	"fmt"
	"math"
	"net"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"kvasird/ggml/gguf"
	"kvasird/p2p"
)

// script is a predecessor of a stage, written by hand.
type script struct {
	t    *testing.T
	conn net.Conn
	r    *p2p.FrameReader
	w    *p2p.FrameWriter
}

// dial opens a connection to a node of the fleet.
func (f *fleet) dial(t *testing.T, to string) *script {
	t.Helper()
	conn, err := f.dialer("entry").Dial(t.Context(), to)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	conn.SetDeadline(time.Now().Add(patient))
	return &script{t, conn, p2p.NewFrameReader(conn, MaxFrame), p2p.NewFrameWriter(conn, MaxFrame)}
}

// send writes a frame; the stage may be gone already.
func (s *script) send(typ uint8, id uint64, payload []byte) {
	s.w.Write(p2p.Frame{Type: typ, ID: id, Payload: payload})
}

// expect reads a frame of a type, passing over others that may come between.
func (s *script) expect(typ uint8) p2p.Frame {
	s.t.Helper()
	for {
		f, err := s.r.Next()
		if err != nil {
			s.t.Fatalf("no frame of type %d: %v", typ, err)
		}
		if f.Type == typ {
			return f
		}
		if f.Type == frameError {
			r, _ := decodeReport(f.Payload)
			s.t.Fatalf("error %v: %s, want a frame of type %d", r.code, r.text, typ)
		}
	}
}

// refused reads an error.
func (s *script) refused(code Code, text string) {
	s.t.Helper()
	for {
		f, err := s.r.Next()
		if err != nil {
			s.t.Fatalf("no error: %v, want %v: %s", err, code, text)
		}
		if f.Type != frameError {
			continue
		}
		r, err := decodeReport(f.Payload)
		if r.code == CodeLost && code != CodeLost {
			continue // of a successor that is not there
		}
		if err != nil || r.code != code || !strings.Contains(r.text, text) {
			s.t.Errorf("got %v: %s, want %v: %s", r.code, r.text, code, text)
		}
		return
	}
}

func goodHello(layers gguf.Range) hello {
	return hello{Version: wireVersion, Model: testModel, Total: testLayers, Begin: layers.Begin, End: layers.End, Width: testWidth, Precision: F32}
}

func (s *script) greet(layers gguf.Range) {
	s.t.Helper()
	s.send(frameHello, 0, encodeControl(goodHello(layers)))
	s.expect(frameWelcome)
}

// openMiddle opens a session on the middle stage of three, as its predecessor.
func (s *script) openMiddle(chain Chain, change ...func(*opening)) opening {
	o := opening{Epoch: 2, Key: make([]byte, keySize), Hop: 1, Prompt: 5, Most: 20, Known: 5, Entry: "entry"}
	o.setChain(chain)
	for _, c := range change {
		c(&o)
	}
	s.send(frameOpen, 77, encodeControl(o))
	return o
}

// someRows is a ROWS frame of a session.
func someRows(g segment, change ...func(f *rowsFrame)) []byte {
	b := make([]byte, rowsSize(1, g.n, testWidth, F32))
	f := layRows(b, 1, g.n, testWidth, F32)
	f.setSegment(0, g)
	clear(f.rows)
	for i := range g.n {
		f.tokens[i], f.flags[i] = 1, 0
	}
	for _, c := range change {
		c(&f)
	}
	return b
}

// The ring of three whose middle stage is attacked, and a chain through it to nobody.
var (
	hostileChain  = Chain{{"s0", windows(3)[0]}, {"s1", windows(3)[1]}, {"s2", windows(3)[2]}}
	hostileMiddle = hostileChain[1].Layers
	hostileLone   = Chain{hostileChain[0], hostileChain[1], {"elsewhere", hostileChain[2].Layers}}
)

// changedHello is a hello for the middle stage, but for a change.
func changedHello(fn func(h *hello)) []byte {
	h := goodHello(hostileMiddle)
	fn(&h)
	return encodeControl(h)
}

var hostileFrames = []struct {
	name string
	code Code
	text string
	do   func(s *script)
}{
	{"another model", CodeModel, "the model here is", func(s *script) { s.send(frameHello, 0, changedHello(func(h *hello) { h.Model = "other" })) }},
	{"another pack", CodeModel, "runtime pack", func(s *script) { s.send(frameHello, 0, changedHello(func(h *hello) { h.Pack = "other" })) }},
	{"another window", CodeModel, "this stage has layers 4:8 of 12, not 4:7", func(s *script) { s.send(frameHello, 0, changedHello(func(h *hello) { h.End = 7 })) }},
	{"another width", CodeModel, "rows here have 8", func(s *script) { s.send(frameHello, 0, changedHello(func(h *hello) { h.Width = 9 })) }},
	{"no hello", CodeProtocol, "want a hello", func(s *script) { s.send(framePing, 0, nil) }},
	{"hello that is none", CodeProtocol, "hello", func(s *script) { s.send(frameHello, 0, []byte("x")) }},
	{"4 GB claimed", CodeProtocol, "frame too large", func(s *script) {
		s.conn.Write([]byte{0xff, 0xff, 0xff, 0xff, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0})
	}},
	{"flags", CodeProtocol, "with flags", func(s *script) { s.greet(hostileMiddle); s.w.Write(p2p.Frame{Type: framePing, Flags: 1}) }},
	{"4 GB claimed later", CodeProtocol, "frame too large", func(s *script) {
		s.greet(hostileMiddle)
		s.conn.Write([]byte{0xff, 0xff, 0xff, 0xff, frameRows, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0})
	}},
	{"unknown frame", CodeProtocol, "frame of type 99", func(s *script) { s.greet(hostileMiddle); s.send(99, 0, nil) }},
	{"a successor's frame", CodeProtocol, "frame of type 4", func(s *script) { s.greet(hostileMiddle); s.send(frameResume, 1, putResume(nil, resume{})) }},
	{"ping with a payload", CodeProtocol, "ping", func(s *script) { s.greet(hostileMiddle); s.send(framePing, 1, []byte{1}) }},
	{"open that is none", CodeProtocol, "open", func(s *script) { s.greet(hostileMiddle); s.send(frameOpen, 1, []byte{1}) }},
	{"overlapping windows", CodeProtocol, "overlap", func(s *script) {
		s.greet(hostileMiddle)
		s.openMiddle(Chain{hostileChain[0], {"s1", hostileMiddle}, {"s2", gguf.Range{Begin: 7, End: 12}}})
	}},
	{"missing window", CodeProtocol, "nobody has layers 8:9", func(s *script) {
		s.greet(hostileMiddle)
		s.openMiddle(Chain{hostileChain[0], {"s1", hostileMiddle}, {"s2", gguf.Range{Begin: 9, End: 12}}})
	}},
	{"loop", CodeProtocol, "twice", func(s *script) {
		s.greet(hostileMiddle)
		s.openMiddle(Chain{hostileChain[0], {"s1", hostileMiddle}, {"s0", hostileChain[2].Layers}})
	}},
	{"chain that ends early", CodeModel, "the chain has 8 layers", func(s *script) { s.greet(hostileMiddle); s.openMiddle(Chain{hostileChain[0], {"s1", hostileMiddle}}) }},
	{"not this stage", CodeModel, "this is peer s1", func(s *script) { s.greet(hostileMiddle); s.openMiddle(hostileChain, func(o *opening) { o.Hop = 2 }) }},
	{"ring of no session", CodeModel, "this is peer s1", func(s *script) { s.greet(hostileMiddle); s.openMiddle(hostileChain, func(o *opening) { o.Hop = 3 }) }},
	{"too long", CodeLimit, "a session holds 512", func(s *script) {
		s.greet(hostileMiddle)
		s.openMiddle(hostileChain, func(o *opening) { o.Most = 1000 })
	}},
	{"too many sessions", CodeBusy, "sequences are in use", func(s *script) {
		s.greet(hostileMiddle)
		for id := range uint64(4) {
			o := opening{Epoch: 1, Key: make([]byte, keySize), Hop: 1, Prompt: 1, Most: 1, Known: 1, Entry: "entry"}
			o.setChain(hostileLone)
			s.send(frameOpen, 1000+id, encodeControl(o))
		}
	}},
	{"too much memory", CodeBusy, "bytes for rows", func(s *script) {
		s.greet(hostileMiddle)
		for id := range uint64(4) {
			o := opening{Epoch: 1, Key: make([]byte, keySize), Hop: 1, Prompt: 500, Most: 12, Known: 500, Entry: "entry"}
			o.setChain(hostileLone)
			s.send(frameOpen, 2000+id, encodeControl(o))
		}
	}},
	{"another key", CodeRights, "another key", func(s *script) {
		s.greet(hostileMiddle)
		s.openMiddle(hostileLone)
		s.openMiddle(hostileLone, func(o *opening) { o.Epoch, o.Key[0] = 3, 1 })
	}},
	{"an old epoch", CodeStale, "epoch 1, it is 2", func(s *script) {
		s.greet(hostileMiddle)
		s.openMiddle(hostileLone)
		s.openMiddle(hostileLone, func(o *opening) { o.Epoch = 1 })
	}},
	{"other lengths", CodeRequest, "other windows or lengths", func(s *script) {
		s.greet(hostileMiddle)
		s.openMiddle(hostileLone)
		s.openMiddle(hostileLone, func(o *opening) { o.Epoch, o.Most = 3, 21 })
	}},
	{"rows that are none", CodeProtocol, "rows frame", func(s *script) { s.greet(hostileMiddle); s.send(frameRows, 0, []byte{1}) }},
	{"rows of an unknown session", CodeUnknown, "not open", func(s *script) { s.greet(hostileMiddle); s.send(frameRows, 0, someRows(segment{55, 1, 0, 1})) }},
	{"rows out of order", CodeProtocol, "rows at position 1, the next one is 0", func(s *script) {
		s.greet(hostileMiddle)
		s.openMiddle(hostileLone)
		s.send(frameRows, 0, someRows(segment{77, 2, 1, 1}))
	}},
	{"rows beyond the session", CodeProtocol, "the session ends at 25", func(s *script) {
		s.greet(hostileMiddle)
		s.openMiddle(hostileLone)
		s.send(frameRows, 0, someRows(segment{77, 2, 0, 26}))
	}},
	{"rows of a later epoch", CodeProtocol, "rows of epoch 3", func(s *script) {
		s.greet(hostileMiddle)
		s.openMiddle(hostileLone)
		s.send(frameRows, 0, someRows(segment{77, 3, 0, 1}))
	}},
	{"NaN", CodeRows, "position 1 has elements", func(s *script) {
		s.greet(hostileMiddle)
		s.openMiddle(hostileLone)
		s.send(frameRows, 0, someRows(segment{77, 2, 0, 2}, func(f *rowsFrame) { float32s(f.row(1))[3] = float32(math.NaN()) }))
	}},
	{"infinity", CodeRows, "position 0 has elements", func(s *script) {
		s.greet(hostileMiddle)
		s.openMiddle(hostileLone)
		s.send(frameRows, 0, someRows(segment{77, 2, 0, 2}, func(f *rowsFrame) { float32s(f.row(0))[0] = float32(math.Inf(-1)) }))
	}},
	{"a draft of nothing", CodeProtocol, "follow nothing", func(s *script) {
		s.greet(hostileMiddle)
		s.openMiddle(hostileLone)
		s.send(frameRows, 0, someRows(segment{77, 2, 0, 2}, func(f *rowsFrame) { f.flags[0] = rowDraft }))
	}},
	{"too many drafts", CodeProtocol, "17 drafts", func(s *script) {
		s.greet(hostileMiddle)
		s.openMiddle(hostileLone)
		s.send(frameRows, 0, someRows(segment{77, 2, 0, 20}, func(f *rowsFrame) {
			for i := range f.flags[1:] {
				f.flags[i+1] = rowDraft
			}
		}))
	}},
	{"tokens for a middle stage", CodeUnknown, "tokens for a session", func(s *script) {
		s.greet(hostileMiddle)
		s.openMiddle(hostileLone)
		s.send(frameTokens, 77, putTokens(nil, tokens{2, 0, running, []int32{1}, nil}))
	}},
	{"a successor that is not there", CodeLost, "no way from s1 to elsewhere", func(s *script) { s.greet(hostileMiddle); s.openMiddle(hostileLone) }},
}

// Whatever a peer sends to the middle stage, it is refused with a reason and the ring lives.
func TestHostilePredecessor(t *testing.T) {
	for _, tt := range hostileFrames {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newFleet(t)
				f.ring(3, func(c *StageConfig, d *double) { c.Sequences, c.MemoryBytes = 3, 45_000 })
				e := f.entry()
				s := f.dial(t, "s1")
				tt.do(s)
				s.refused(tt.code, tt.text)
				s.conn.Close()
				f.free()
				if err := ask(t, e, hostileChain, Request{Tokens: []int32{1, 2, 3}, MaxTokens: 5}, nil); err != nil {
					t.Errorf("the ring is dead: %v", err)
				}
				f.close(e)
			})
		})
	}
}

// A predecessor that sends more rows than it was allowed to is refused.
func TestHostileCredit(t *testing.T) {
	synctest.Test(t, hostileCredit)
}

func hostileCredit(t *testing.T) {
	f := newFleet(t)
	hold := make(chan struct{})
	chain := f.ring(3, func(c *StageConfig, d *double) {
		d.fault = func(*Batch) error { <-hold; return nil }
	})
	s := f.dial(t, "s1")
	s.greet(chain[1].Layers)
	s.openMiddle(Chain{chain[0], chain[1], {"elsewhere", chain[2].Layers}}, func(o *opening) { o.Most = 300 })
	r, err := decodeResume(s.expect(frameResume).Payload)
	if err != nil {
		t.Fatal(err)
	}
	// One Decode takes some of them and waits.
	s.send(frameRows, 0, someRows(segment{77, 2, 0, r.credit}))
	s.send(frameRows, 0, someRows(segment{77, 2, r.credit, r.credit}))
	s.send(frameRows, 0, someRows(segment{77, 2, 2 * r.credit, r.credit}))
	s.refused(CodeProtocol, "rows wait, at most")
	s.conn.Close()
	close(hold)
	f.free()
	f.close()
}

// What a last or first stage sends to an entry, or a stage to its predecessor, is judged too: the
// session ends or is repaired, nothing hangs.
func TestHostileSuccessor(t *testing.T) {
	for _, tt := range []struct {
		name, want string
		answer     func(s *script, id uint64, o *opening)
	}{
		{"tokens with a gap", "tokens at 9", func(s *script, id uint64, o *opening) {
			s.send(frameTokens, id, putTokens(nil, tokens{o.Epoch, 9, running, []int32{1}, nil}))
		}},
		{"too many tokens", "of 13", func(s *script, id uint64, o *opening) {
			s.send(frameTokens, id, putTokens(nil, tokens{o.Epoch, 3, running, make([]int32, 11), nil}))
		}},
		{"log-probabilities that were not asked for", "log-probabilities: true, asked for: false", func(s *script, id uint64, o *opening) {
			s.send(frameTokens, id, putTokens(nil, tokens{o.Epoch, 3, running, []int32{1}, make([]Prob, 1)}))
		}},
		{"rows for an entry", "frame of type 5", func(s *script, id uint64, o *opening) { s.send(frameRows, 0, someRows(segment{id, 1, 0, 1})) }},
		{"resume that is none", "resume of", func(s *script, id uint64, o *opening) { s.send(frameResume, id, []byte{1}) }},
		{"ready that is none", "ready frame", func(s *script, id uint64, o *opening) { s.send(frameReady, id, nil) }},
		{"error of a stage that is not", "malformed", func(s *script, id uint64, o *opening) {
			s.send(frameError, id, putReport(nil, report{o.Epoch, CodeLost, MaxHops + 1, ""}))
		}},
		{"4 GB claimed", "frame too large", func(s *script, id uint64, o *opening) {
			s.conn.Write([]byte{0xff, 0xff, 0xff, 0xff, frameTokens, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0})
		}},
		{"link error", "busy: go away", func(s *script, id uint64, o *opening) {
			s.send(frameError, 0, putReport(nil, report{code: CodeBusy, text: "go away"}))
		}},
		{"hangs up", "lost", func(s *script, id uint64, o *opening) { s.conn.Close() }},
		{"never closes the ring", "did not close in time", func(s *script, id uint64, o *opening) {}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { hostileSuccessor(t, tt.want, tt.answer) })
		})
	}
}

func hostileSuccessor(t *testing.T, want string, answer func(s *script, id uint64, o *opening)) {
	near, far := net.Pipe()
	s := &script{t, far, p2p.NewFrameReader(far, MaxFrame), p2p.NewFrameWriter(far, MaxFrame)}
	done := make(chan struct{})
	go func() {
		defer close(done)
		if _, err := s.r.Next(); err != nil {
			return
		}
		s.send(frameWelcome, 0, encodeControl(welcome{wireVersion, testWidth}))
		for {
			f, err := s.r.Next()
			if err != nil {
				return
			}
			if f.Type == framePing {
				s.send(framePong, f.ID, nil)
			}
			if f.Type == frameOpen {
				o, err := decodeOpening(f.Payload)
				if err != nil {
					t.Error(err)
				}
				answer(s, f.ID, &o)
			}
		}
	}()
	e, err := NewEntry(EntryConfig{Model: testModel, Total: testLayers,
		Dialer: dialFunc(func(context.Context, string) (net.Conn, error) { return near, nil })})
	if err != nil {
		t.Fatal(err)
	}
	chain := Chain{{"a", gguf.Range{Begin: 0, End: testLayers}}}
	ctx, cancel := context.WithTimeout(t.Context(), patient)
	defer cancel()
	_, err = e.Open(ctx, chain, Request{Tokens: []int32{1, 2, 3}, MaxTokens: 10}, nil)
	if err == nil || ctx.Err() != nil || !strings.Contains(err.Error(), want) {
		t.Errorf("got %v, want %q", err, want)
	}
	e.Close()
	far.Close()
	<-done
}

// A peer that claims much, or opens and never greets, costs little and is let go.
func TestHostileSilence(t *testing.T) {
	synctest.Test(t, hostileSilence)
}

func hostileSilence(t *testing.T) {
	f := newFleet(t)
	chain := f.ring(1)
	silent, greeted := f.dial(t, "s0"), f.dial(t, "s0")
	greeted.greet(chain[0].Layers)
	for _, s := range []*script{silent, greeted} {
		for {
			if _, err := s.r.Next(); err != nil {
				if quiet(err) {
					break
				}
				t.Fatalf("the link of a silent peer is still open: %v", err)
			}
		}
	}
	f.close()
}

// Rights are asked for each link, and the reason is told.
func TestAdmit(t *testing.T) {
	f := newFleet(t)
	chain := f.ring(2, func(c *StageConfig, d *double) {
		if c.Layers.Begin > 0 {
			c.Admit = func(peer string) error { return fmt.Errorf("%s is banned", peer) }
		}
	})
	e := f.entry()
	err := ask(t, e, chain, Request{Tokens: []int32{1}, MaxTokens: 3}, nil)
	wantError(t, err, 1, CodeRights, "s0 is banned")
	f.free()
	f.close(e)
}

// An entry that sends log-probabilities, which only stages draw, is refused by the first stage.
func TestHostileEntry(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t)
		chain := f.ring(2)
		s := f.dial(t, chain[0].Peer)
		s.greet(chain[0].Layers)
		o := opening{Epoch: 1, Key: make([]byte, keySize), Prompt: 2, Most: 3, Known: 2, Sampling: Sampling{Logprobs: true}}
		o.setChain(chain)
		s.send(frameOpen, 77, encodeControl(o))
		s.expect(frameResume)
		s.send(frameTokens, 77, putTokens(nil, tokens{1, 0, running, []int32{1, 2}, make([]Prob, 2)}))
		s.refused(CodeProtocol, "log-probabilities: true, asked for: false")
		s.conn.Close()
		f.free()
		f.close()
	})
}
