//go:build cgo && linux

package node

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/fxamacker/cbor/v2"
	"github.com/libp2p/go-libp2p/core/peer"

	"kvasird/ggml"
	"kvasird/ggml/gguf"
	"kvasird/node/api"
	"kvasird/p2p"
)

// Frame types of experts/1, as experts/wire.go documents them.
const (
	typeOffer   = 1
	typeWant    = 2
	typeProgram = 3
	typeResult  = 4
	typeCall    = 5
	typeReply   = 6
	typeError   = 7
	typePing    = 9
	typePong    = 10
)

// stranger is a host in this process that the daemons admit unless change spoils it.
func (s *swarm) stranger(change func(*p2p.Config), serve p2p.Handler) *p2p.Host {
	s.t.Helper()
	rt, err := ggml.Open(ggml.Config{})
	if err != nil {
		s.t.Fatal(err)
	}
	identity, err := p2p.NewIdentity()
	if err != nil {
		s.t.Fatal(err)
	}
	cfg := p2p.Config{
		Identity: identity, Network: "kvasir", Pack: Pack(rt), Agent: "stranger", Protocols: []string{expertsProtocol},
		Listen: []string{"/ip4/127.0.0.1/tcp/0"},
	}
	if change != nil {
		change(&cfg)
	}
	h, err := p2p.New(cfg)
	if err == nil && serve != nil {
		err = h.HandleStream(expertsProtocol, serve)
	}
	if err == nil {
		err = h.Start()
	}
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { h.Close() })
	return h
}

// meet has the stranger pass the gate of a daemon.
func (s *swarm) meet(h *p2p.Host, addr string) (peer.ID, error) {
	s.t.Helper()
	ai, err := p2p.ParsePeer(addr)
	if err != nil {
		s.t.Fatal(err)
	}
	_, err = h.Hello(s.ctx, ai)
	return ai.ID, err
}

// notes is a log that can be read while it is written.
type notes struct {
	mu   sync.Mutex // guards text
	text bytes.Buffer
}

func (n *notes) Write(b []byte) (int, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.text.Write(b)
}

func (n *notes) String() string {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.text.String()
}

func TestPeerOfAnotherKind(t *testing.T) {
	tests := []struct {
		field, value string
		change       func(*p2p.Config)
	}{
		{"runtime pack", "llama.cpp v9", func(c *p2p.Config) { c.Pack = "llama.cpp v9" }},
		{"network", "elsewhere", func(c *p2p.Config) { c.Network = "elsewhere" }},
	}
	s := newSwarm(t)
	w := s.worker("w1")
	args := []string{}
	var dialled []*p2p.Host
	said := make([]notes, len(tests))
	for i, test := range tests {
		h := s.stranger(func(c *p2p.Config) {
			test.change(c)
			c.Logger = slog.New(slog.NewTextHandler(&said[i], nil))
		}, nil)
		dialled = append(dialled, h)
		args = append(args, "--peer", h.Addrs()[0])
	}
	s.run(args...)
	for i, test := range tests {
		t.Run(test.field, func(t *testing.T) {
			// the stranger dials the worker
			h := s.stranger(test.change, nil)
			_, err := s.meet(h, s.addrs[0])
			var refused *p2p.RefusedError
			if !errors.As(err, &refused) || refused.Field != test.field || !strings.Contains(err.Error(), test.value) {
				t.Errorf("the stranger is told %v, want a refusal for its %s", err, test.field)
			}
			eventually(t, func() error { return says(w.lastWords(), h.ID().String(), test.field, test.value) })

			// the backbone dials the stranger
			_, err = s.backbone.await(s.ctx, func(st *api.Status) bool {
				for _, p := range st.Peers {
					if p.ID == dialled[i].ID().String() && p.State == api.PeerRefused {
						return says(p.Reason, test.field, test.value) == nil
					}
				}
				return false
			})
			if err != nil {
				t.Errorf("the backbone's status does not say why: %v", err)
			}
			eventually(t, func() error { return says(said[i].String(), test.field, test.value) })
		})
	}
	s.sameAsAlone(questions[0], nil)
}

func says(text string, words ...string) error {
	for _, w := range words {
		if !strings.Contains(text, w) {
			return fmt.Errorf("%q is not in:\n%s", w, text)
		}
	}
	return nil
}

// eventually wants check to be nil within 10 s.
func eventually(t *testing.T, check func() error) {
	t.Helper()
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		err := check()
		if err == nil {
			return
		}
		if time.Now().After(end) {
			t.Error(err)
			return
		}
	}
}

// usage is what a daemon takes of its machine.
type usage struct{ rss, files, threads int }

func (c *child) usage(t *testing.T) (u usage) {
	t.Helper()
	proc := fmt.Sprintf("/proc/%d/", c.cmd.Process.Pid)
	text, err := os.ReadFile(proc + "status")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(text), "VmRSS:")
	u.rss, _ = strconv.Atoi(strings.Fields(rest)[0])
	for folder, n := range map[string]*int{"fd": &u.files, "task": &u.threads} {
		list, err := os.ReadDir(filepath.Join(proc, folder))
		if err != nil {
			t.Fatal(err)
		}
		*n = len(list)
	}
	return u
}

// level wants a daemon to come back to what it took before.
func (c *child) level(t *testing.T, before usage) {
	t.Helper()
	eventually(t, func() error {
		now := c.usage(t)
		if now.files > before.files+2 || now.threads > before.threads+8 || now.rss > before.rss+32<<10+raceMemory {
			return fmt.Errorf("%s took %+v before (KiB, files, threads) and %+v after", c.name, before, now)
		}
		return nil
	})
	t.Logf("%s: %+v before, %+v after", c.name, before, c.usage(t))
}

// frame is a frame's bytes, whose header claims length bytes of payload.
func frame(typ uint8, id uint64, length int, payload []byte) []byte {
	b := binary.LittleEndian.AppendUint32(nil, uint32(length))
	b = append(b, typ, 0, 0, 0)
	b = binary.LittleEndian.AppendUint64(b, id)
	return append(b, payload...)
}

func record(t *testing.T, v any) []byte {
	t.Helper()
	mode, err := cbor.CoreDetEncOptions().EncMode()
	if err != nil {
		t.Fatal(err)
	}
	b, err := mode.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func want(t *testing.T, model string) []byte {
	b := record(t, map[int]any{1: 4, 2: model, 3: 1})
	return frame(typeWant, 0, len(b), b)
}

// bytesToWorkers are what no dispatcher sends. ends: the worker closes at once.
func bytesToWorkers(t *testing.T, model string) []struct {
	name  string
	bytes []byte
	ends  bool
} {
	hello := want(t, model)
	garbage := bytes.Repeat([]byte("garbage "), 64)
	program := append(make([]byte, 8), garbage[:64]...)
	call := make([]byte, 64)
	return []struct {
		name  string
		bytes []byte
		ends  bool
	}{
		{"garbage", garbage, true},
		{"4 GB", frame(typeWant, 0, math.MaxUint32, nil), true},
		{"another model", want(t, strings.Repeat("ab", 32)), true},
		{"garbage for a want", frame(typeWant, 0, 64, garbage[:64]), true},
		{"4 GB after the greeting", append(hello[:len(hello):len(hello)], frame(typeCall, 1, math.MaxUint32, nil)...), true},
		{"garbage for a call", append(hello[:len(hello):len(hello)], frame(typeCall, 1, 64, call)...), true},
		{"garbage for a program", append(hello[:len(hello):len(hello)], frame(typeProgram, 1, len(program), program)...), false},
		{"half a frame", append(hello[:len(hello):len(hello)], frame(typeCall, 1, 4<<20, call)...), false},
		{"half a greeting", hello[:20], false},
		{"nothing", nil, false},
	}
}

func TestHostilePeerOfWorker(t *testing.T) {
	t.Parallel()
	s := newSwarm(t)
	w := s.worker("w1")
	s.worker("w2")
	s.run()
	model := modelID(t, w)
	h := s.stranger(nil, nil)
	id, err := s.meet(h, s.addrs[0])
	if err != nil {
		t.Fatal(err)
	}
	silent := s.open(h, id, 0) // says nothing until the worker has enough
	attack := func(rounds int) {
		for range rounds {
			for i, a := range bytesToWorkers(t, model) {
				c := s.open(h, id, i)
				c.SetDeadline(time.Now().Add(5 * time.Second))
				c.Write(a.bytes)
				if a.ends {
					if _, err := io.Copy(io.Discard, c); errors.Is(err, os.ErrDeadlineExceeded) {
						t.Errorf("%s: the worker does not end it", a.name)
					}
				}
				c.Close()
			}
		}
	}
	attack(5)
	before := w.usage(t)
	attack(50)
	s.sameAsAlone(questions[0], nil)
	w.level(t, before)
	silent.SetDeadline(time.Now().Add(20 * time.Second))
	if _, err := io.Copy(io.Discard, silent); errors.Is(err, os.ErrDeadlineExceeded) {
		t.Error("the worker waits for ever for a greeting")
	}
}

// open opens a lane, or for odd n a stream.
func (s *swarm) open(h *p2p.Host, id peer.ID, n int) p2p.Conn {
	s.t.Helper()
	open := h.OpenLane
	if n%2 == 1 {
		open = h.OpenStream
	}
	c, err := open(s.ctx, id, expertsProtocol)
	if err != nil {
		s.t.Fatal(err)
	}
	model := s.model()
	c.Write(model[:])
	return c
}

// model is the id of the shipped model.
func (s *swarm) model() gguf.ModelID {
	s.t.Helper()
	m, err := gguf.OpenModel(s.whole)
	if err != nil {
		s.t.Fatal(err)
	}
	defer m.Close()
	id, err := m.ID(s.ctx)
	if err != nil {
		s.t.Fatal(err)
	}
	return id
}

// TestFloodOfSessions has one peer open all it can: others still get in.
func TestFloodOfSessions(t *testing.T) {
	s := newSwarm(t)
	w := s.worker("w1")
	model := modelID(t, w)
	h := s.stranger(nil, nil)
	id, err := s.meet(h, s.addrs[0])
	if err != nil {
		t.Fatal(err)
	}
	before := w.usage(t)
	var held []p2p.Conn
	for i := range 400 {
		open := h.OpenStream
		if i < 20 {
			open = h.OpenLane
		}
		c, err := open(s.ctx, id, expertsProtocol)
		if err != nil {
			break
		}
		c.SetDeadline(time.Now().Add(5 * time.Second))
		if _, err := c.Write(want(t, model)); err == nil {
			held = append(held, c)
		}
	}
	if len(held) < 100 {
		t.Fatalf("only %d sessions are held", len(held))
	}
	began := time.Now()
	s.run() // the backbone joins now
	if took := time.Since(began); took > 10*time.Second {
		t.Errorf("the backbone had to wait %v", took)
	}
	s.sameAsAlone(questions[0], nil)
	for _, c := range held {
		c.Close()
	}
	w.level(t, before)
}

// TestBadPrograms gives a worker programs that it must not run, and more than it may.
func TestBadPrograms(t *testing.T) {
	s := newSwarm(t)
	w := s.worker("w1")
	h := s.stranger(nil, nil)
	id, err := s.meet(h, s.addrs[0])
	if err != nil {
		t.Fatal(err)
	}
	m, err := gguf.OpenModel(s.whole)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	up, _ := m.Tensor("blk.0.ffn_up_exps.weight")
	in, out := uint32(up.Shape[0]), uint32(up.Shape[1])
	mul := func(weight string, in, out uint32) ggml.Program {
		return ggml.Program{Version: 1, RowWidth: in, Ops: []ggml.Op{{Code: ggml.OpMatMul, Weight: weight, Width: out}}}
	}
	tests := []struct {
		name    string
		layer   uint32
		program ggml.Program
		say     string // "": it is taken
	}{
		{"operation outside of the set", 0, ggml.Program{Version: 1, RowWidth: in, Ops: []ggml.Op{{Code: 99, Width: in}}}, "code 99 is not in the set"},
		{"rows too narrow", 0, mul("ffn_up_exps.weight", in/2, out), fmt.Sprintf("takes rows of %d, given %d", in, in/2)},
		{"output too wide", 0, mul("ffn_up_exps.weight", in, out+1), fmt.Sprintf("gives %d, the program says %d", out, out+1)},
		{"weight that is not there", 0, mul("attn_q.weight", in, in), "attn_q.weight"},
		{"no operation", 0, ggml.Program{Version: 1, RowWidth: in}, "0 operations"},
		{"another version", 0, ggml.Program{Version: 7, RowWidth: in, Ops: mul("ffn_up_exps.weight", in, out).Ops}, "version 7"},
		{"layer that is not there", 99, mul("ffn_up_exps.weight", in, out), "layer 99"},
		{"good", 0, mul("ffn_up_exps.weight", in, out), ""},
	}
	c := s.open(h, id, 0)
	defer c.Close()
	c.SetDeadline(time.Now().Add(20 * time.Second))
	c.Write(want(t, modelID(t, w)))
	frames := p2p.NewFrameReader(c, 1<<20)
	if f, err := frames.Next(); err != nil || f.Type != typeOffer {
		t.Fatalf("got %+v, %v, want an offer", f, err)
	}
	number := uint32(0)
	give := func(name string, layer uint32, program ggml.Program) p2p.Frame {
		encoded, err := program.Marshal()
		if err != nil {
			t.Fatal(err)
		}
		payload := binary.LittleEndian.AppendUint32(nil, number)
		payload = append(binary.LittleEndian.AppendUint32(payload, layer), encoded...)
		number++
		c.Write(frame(typeProgram, uint64(number), len(payload), payload))
		f, err := frames.Next()
		if err != nil {
			t.Fatalf("%s: the session ended: %v", name, err)
		}
		return f
	}
	for _, test := range tests {
		f := give(test.name, test.layer, test.program)
		if test.say == "" && f.Type != typeResult {
			t.Errorf("%s: got frame %d %q, want a result", test.name, f.Type, f.Payload)
		}
		if test.say != "" && (f.Type != typeError || !strings.Contains(string(f.Payload), test.say)) {
			t.Errorf("%s: got frame %d %q, want an error with %q", test.name, f.Type, f.Payload, test.say)
		}
	}
	for i := range 20 { // good ones, too many of them
		p := mul("ffn_up_exps.weight", in, out)
		p.Ops = append(p.Ops, ggml.Op{Code: ggml.OpScale, A: 1, F: [2]uint32{math.Float32bits(float32(i + 2))}, Width: out})
		f := give("flood", 0, p)
		if i == 0 && f.Type != typeResult {
			t.Errorf("flood: got frame %d %q for the second good program, want a result", f.Type, f.Payload)
		}
		if i > 0 && (f.Type != typeError || !strings.Contains(string(f.Payload), "this peer uses 2 other programs")) {
			t.Errorf("flood: got frame %d %q for good program %d, want an error", f.Type, f.Payload, i+2)
		}
	}
	s.run() // the flooding session is still open
	s.sameAsAlone(questions[0], nil)
}
