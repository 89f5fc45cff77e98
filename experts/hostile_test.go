package experts

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"kvasird/p2p"
)

// script is the other end of a session, written by hand.
type script struct {
	t    *testing.T
	conn net.Conn
	r    *p2p.FrameReader
	w    *p2p.FrameWriter
}

func newScript(t *testing.T, conn net.Conn) *script {
	conn.SetDeadline(time.Now().Add(patient))
	return &script{t, conn, p2p.NewFrameReader(conn, MaxFrame), p2p.NewFrameWriter(conn, MaxFrame)}
}

// send writes a frame; the peer may be gone already.
func (s *script) send(typ uint8, id uint64, payload []byte) {
	s.w.Write(p2p.Frame{Type: typ, ID: id, Payload: payload})
}

// expect reads a frame of a type, passing over heartbeats.
func (s *script) expect(typ uint8) (p2p.Frame, error) {
	for {
		f, err := s.r.Next()
		if err != nil || f.Type == typ {
			return f, err
		}
		if f.Type != framePing {
			return f, fmt.Errorf("frame of type %d, want %d", f.Type, typ)
		}
	}
}

func (s *script) must(typ uint8) p2p.Frame {
	s.t.Helper()
	f, err := s.expect(typ)
	if err != nil {
		s.t.Fatal(err)
	}
	return f
}

// client opens a session to a worker up to and including its first program.
func client(t *testing.T, w *swarm, id string) *script {
	t.Helper()
	s := greeted(t, w, id)
	s.send(frameProgram, 1, putProgram(nil, 0, 0, programFor(testWidth, testHidden)))
	s.must(frameResult)
	return s
}

func greeted(t *testing.T, w *swarm, id string) *script {
	t.Helper()
	conn, err := w.Dial(t.Context(), id)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	s := newScript(t, conn)
	s.must(frameOffer)
	s.send(frameWant, 0, encodeControl(want{wireVersion, testModel, F32}))
	return s
}

// smallCall is a call of program 0 with one row for some experts.
func smallCall(experts ...int32) []byte {
	b := make([]byte, callSize(F32, 1, len(experts), testWidth, false))
	copy(layCall(b, callFrame{deadline: 10_000, precision: F32, rows: 1, width: testWidth}, len(experts)).expert, experts)
	return b
}

// TestWorkerRefusals sends a worker what it must refuse, and sees that it still serves others.
func TestWorkerRefusals(t *testing.T) {
	w := newSwarm(t)
	p := w.start("a", newFFN(testWidth, testHidden, layerSlice(0, 8)), func(c *WorkerConfig) { c.MaxPairs = 4 })
	wide := make([]byte, callSize(F32, 1, 1, testWidth+1, false))
	layCall(wide, callFrame{deadline: 100, precision: F32, rows: 1, width: testWidth + 1}, 1)
	unset := smallCall(0)
	binary.LittleEndian.PutUint32(unset, 9)
	program := programFor(testWidth, testHidden)
	tests := []struct {
		name    string
		typ     uint8
		payload []byte
		code    Code // of the answer
		text    string
		ends    bool // the session
	}{
		{"expert outside the slices", frameCall, smallCall(0, 8), CodeExpert, "expert 8 of layer 0", false},
		{"program not given", frameCall, unset, CodeProgram, "program 9", false},
		{"width that does not fit", frameCall, wide, CodeProgram, "takes 32", false},
		{"layer outside the slices", frameProgram, putProgram(nil, 1, 7, program), CodeExpert, "layer 7", false},
		{"program that does not fit", frameProgram, putProgram(nil, 1, 0, []byte("no")), CodeProgram, "does not fit", false},
		{"program number twice", frameProgram, putProgram(nil, 0, 0, program), CodeProtocol, "set already", true},
		{"more pairs than offered", frameCall, smallCall(0, 1, 2, 3, 4), CodeProtocol, "5 pairs", true},
		{"garbled call", frameCall, []byte("garbage"), CodeProtocol, "7 bytes", true},
		{"ping with a payload", framePing, []byte{1}, CodeProtocol, "payload", true},
		{"cancel with a payload", frameCancel, []byte{1}, CodeProtocol, "payload", true},
		{"frame of the other side", frameReply, nil, CodeProtocol, "type 6", true},
		{"unknown frame", 77, nil, CodeProtocol, "type 77", true},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			s := client(t, w, "a")
			s.send(test.typ, 2, test.payload)
			e, err := decodeError(s.must(frameError).Payload)
			if err != nil || e.Code != test.code || !strings.Contains(e.Text, test.text) {
				t.Errorf("got %v, %v, want code %v with %q", e, err, test.code, test.text)
			}
			if test.ends {
				if _, err := s.r.Next(); err == nil {
					t.Error("the session goes on")
				}
				if err := <-p.errs; !errors.Is(err, ErrProtocol) {
					t.Errorf("Serve returned %v, want ErrProtocol", err)
				}
				return
			}
			s.send(frameCall, 3, smallCall(0))
			if f := s.must(frameReply); f.ID != 3 || len(f.Payload) != 4*testWidth {
				t.Errorf("got a reply to %d of %d bytes", f.ID, len(f.Payload))
			}
			s.conn.Close()
			<-p.errs
		})
	}
}

// TestWorkerRawBytes sends bytes that are no frames.
func TestWorkerRawBytes(t *testing.T) {
	header := func(length uint32, typ, flags uint8, reserved uint16) []byte {
		b := binary.LittleEndian.AppendUint32(nil, length)
		b = binary.LittleEndian.AppendUint16(append(b, typ, flags), reserved)
		return binary.LittleEndian.AppendUint64(b, 2)
	}
	tests := []struct {
		name  string
		bytes []byte
		text  string
	}{
		{"claims 4 GB", header(math.MaxUint32, frameCall, 0, 0), "too large"},
		{"one byte too long", header(MaxFrame+1, frameCall, 0, 0), "too large"},
		{"flags", header(0, framePing, 1, 0), "flags"},
		{"reserved field", header(0, framePing, 0, 1), "reserved"},
	}
	w := newSwarm(t)
	p := w.start("a", newFFN(testWidth, testHidden, layerSlice(0, 8)), nil)
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			s := client(t, w, "a")
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			s.conn.Write(test.bytes)
			e, err := decodeError(s.must(frameError).Payload)
			runtime.ReadMemStats(&after)
			if err != nil || e.Code != CodeProtocol || !strings.Contains(e.Text, test.text) {
				t.Errorf("got %v, %v", e, err)
			}
			if grown := after.TotalAlloc - before.TotalAlloc; grown > 4<<20 {
				t.Errorf("%d bytes allocated for it", grown)
			}
			if err := <-p.errs; !errors.Is(err, ErrProtocol) {
				t.Errorf("Serve returned %v", err)
			}
		})
	}
}

func TestWrongModel(t *testing.T) {
	w := newSwarm(t)
	p := w.start("a", newFFN(testWidth, testHidden, layerSlice(0, 8)), nil)
	d := w.dispatcher(func(c *Config) { c.Model = "blake3:other" })
	var wrong *WrongModelError
	if err := <-p.errs; !errors.As(err, &wrong) || wrong.Offered != testModel || wrong.Wanted != "blake3:other" {
		t.Errorf("worker: got %v", err)
	}
	waitFor(t, d, "both models named", func(p PeerStatus) bool {
		return strings.Contains(p.Trouble, string(testModel)) && strings.Contains(p.Trouble, "blake3:other")
	})
}

// TestProgramThatDoesNotFit is refused by the worker, and named in the dispatcher's error.
func TestProgramThatDoesNotFit(t *testing.T) {
	w := newSwarm(t)
	w.start("a", newFFN(testWidth, testHidden*2, layerSlice(0, testExperts)), nil)
	d := w.dispatcher(nil)
	waitFor(t, d, "connected", connected)
	err := d.Compute(t.Context(), testCall(0, 1, false))
	var missing *MissingError
	if !errors.As(err, &missing) || !strings.Contains(err.Error(), "does not fit") {
		t.Errorf("got %v", err)
	}
}

// lie is a worker that greets honestly and answers each call as it is told.
func (w *swarm) lie(id string, answer func(s *script, f p2p.Frame, pairs int)) {
	o := offer{wireVersion, testModel, []Slice{layerSlice(0, testExperts)}, 4096, 4096, 64, []Precision{F32}, serving}
	w.answering(id, o, func(s *script, f p2p.Frame) {
		switch f.Type {
		case frameProgram:
			s.send(frameResult, f.ID, putResult(nil, testWidth, testWidth))
		case frameCall:
			answer(s, f, int(binary.LittleEndian.Uint32(f.Payload[16:])))
		}
	})
}

// answering is a worker that greets with an offer, answers heartbeats, and all else as it is told.
func (w *swarm) answering(id string, o offer, answer func(s *script, f p2p.Frame)) {
	var wg sync.WaitGroup
	w.t.Cleanup(wg.Wait) // after the listener was closed
	w.listen(id, func(conn net.Conn) {
		defer conn.Close()
		s := newScript(w.t, conn)
		s.send(frameOffer, 0, encodeControl(o))
		for {
			f, err := s.r.Next()
			switch {
			case err != nil:
				return
			case f.Type == framePing:
				s.send(framePong, f.ID, nil)
			default:
				answer(s, f)
			}
		}
	}, &wg)
}

// TestLyingWorker has a replica for every lie: the answer is right, and the liar is not asked
// again soon. Without a replica the lie is an error that says what was wrong.
func TestLyingWorker(t *testing.T) {
	answerOf := func(pairs int) []byte { return make([]byte, 4*pairs*testWidth) }
	nan := func(v float64) func(s *script, f p2p.Frame, pairs int) {
		return func(s *script, f p2p.Frame, pairs int) {
			b := answerOf(pairs)
			float32s(b)[len(b)/4-3] = float32(v)
			s.send(frameReply, f.ID, b)
		}
	}
	tests := []struct {
		name   string
		answer func(s *script, f p2p.Frame, pairs int)
		text   string
	}{
		{"not a number", nan(math.NaN()), "not finite"},
		{"infinite", nan(math.Inf(-1)), "not finite"},
		{"short", func(s *script, f p2p.Frame, pairs int) { s.send(frameReply, f.ID, answerOf(pairs)[4:]) }, "bytes, want"},
		{"long", func(s *script, f p2p.Frame, pairs int) { s.send(frameReply, f.ID, answerOf(pairs+1)) }, "bytes, want"},
		{"unknown request", func(s *script, f p2p.Frame, pairs int) { s.send(frameReply, f.ID+1000, answerOf(pairs)) }, "answer to request"},
		{"request 0", func(s *script, f p2p.Frame, pairs int) { s.send(frameReply, 0, answerOf(pairs)) }, "answer to request"},
		{"unknown heartbeat", func(s *script, f p2p.Frame, _ int) { s.send(framePong, 1<<40, nil) }, "heartbeat"},
		{"unasked program", func(s *script, f p2p.Frame, _ int) { s.send(frameResult, f.ID, putResult(nil, 1, 1)) }, "did not ask"},
		{"garbled error", func(s *script, f p2p.Frame, _ int) { s.send(frameError, f.ID, []byte{1}) }, "error frame"},
		{"frame of the other side", func(s *script, f p2p.Frame, _ int) { s.send(frameCall, f.ID, nil) }, "type 5"},
		{"claims 4 GB", func(s *script, f p2p.Frame, _ int) { s.conn.Write([]byte(strings.Repeat("\xff", 16))) }, "reserved"},
		{"error for the session", func(s *script, _ p2p.Frame, _ int) { s.send(frameError, 0, putError(nil, CodeKernel, "on fire")) }, "on fire"},
		{"refuses", func(s *script, f p2p.Frame, _ int) { s.send(frameError, f.ID, putError(nil, CodeKernel, "tired")) }, "tired"},
		{"hangs up", func(s *script, f p2p.Frame, _ int) { s.conn.Close() }, "session ended"},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			w := newSwarm(t)
			var asked, after int
			var mu sync.Mutex
			w.lie("liar", func(s *script, f p2p.Frame, pairs int) {
				mu.Lock()
				asked++
				mu.Unlock()
				test.answer(s, f, pairs)
			})
			d := w.dispatcher(nil)
			waitFor(t, d, "connected", connected)
			call := testCall(0, 3, false)
			err := d.Compute(t.Context(), call)
			var missing *MissingError
			if !errors.As(err, &missing) || !strings.Contains(err.Error(), test.text) {
				t.Errorf("alone: got %v, want a MissingError with %q", err, test.text)
			}
			w.start("honest", newFFN(testWidth, testHidden, layerSlice(0, testExperts)), nil)
			d2 := w.dispatcher(nil)
			within(t, patient, "connected", func() bool {
				ps := d2.Peers()
				return ps[0].Connected && ps[1].Connected
			})
			want := alone(t, newFFN(testWidth, testHidden, layerSlice(0, testExperts)), call)
			mu.Lock()
			after = asked
			mu.Unlock()
			for range 20 {
				poison(call)
				if err := d2.Compute(t.Context(), call); err != nil {
					t.Fatal(err)
				}
				if diff := maxDiff(call.Out, want); diff != 0 {
					t.Fatalf("maximum difference %g", diff)
				}
			}
			mu.Lock()
			defer mu.Unlock()
			if asked-after > 3 {
				t.Errorf("the liar was asked %d times in 20 calls", asked-after)
			}
		})
	}
}

func TestGoroutinesLevel(t *testing.T) {
	before := runtime.NumGoroutine()
	w := newSwarm(t)
	a := w.start("a", newFFN(testWidth, testHidden, layerSlice(0, testExperts)), nil)
	b := w.start("b", newFFN(testWidth, testHidden, layerSlice(0, testExperts)), nil)
	d := w.dispatcher(nil)
	d.AddPeer("nowhere")
	within(t, patient, "connected", func() bool { ps := d.Peers(); return ps[0].Connected && ps[1].Connected })
	if err := d.Compute(t.Context(), testCall(0, 3, false)); err != nil {
		t.Fatal(err)
	}
	d.RemovePeer("nowhere")
	if n := len(d.Peers()); n != 2 {
		t.Errorf("%d peers after RemovePeer", n)
	}
	d.Close()
	d.Close()
	if err := d.Compute(t.Context(), testCall(0, 3, false)); err == nil {
		t.Error("a closed dispatcher computes")
	}
	a.kill()
	b.kill()
	within(t, patient, "goroutines end", func() bool { return runtime.NumGoroutine() <= before })
}

func TestConfigRefusals(t *testing.T) {
	kernel := newFFN(1, 1, layerSlice(0, 1))
	dial := newSwarm(t)
	for _, cfg := range []WorkerConfig{
		{Model: "m", Slices: kernel.slices},
		{Kernel: kernel, Slices: kernel.slices},
		{Model: "m", Kernel: kernel, Slices: []Slice{layerSlice(0, 2), layerSlice(1, 3)}},
		{Model: "m", Kernel: kernel, Slices: []Slice{{}}},
		{Model: "m", Kernel: kernel, Slices: kernel.slices, MaxRows: -1},
	} {
		if w, err := NewWorker(cfg); err == nil {
			w.Close()
			t.Errorf("accepted %+v", cfg)
		}
	}
	for _, cfg := range []Config{
		{Model: "m"},
		{Dialer: dial},
		{Model: "m", Dialer: dial, Local: &Local{}},
		{Model: "m", Dialer: dial, MaxDeadline: time.Millisecond},
	} {
		if d, err := NewDispatcher(cfg); err == nil {
			d.Close()
			t.Errorf("accepted %+v", cfg)
		}
	}
}

func TestCallRefusals(t *testing.T) {
	w := newSwarm(t)
	d := w.dispatcher(nil)
	for name, change := range map[string]func(*Call){
		"layer":          func(c *Call) { c.Layer = -1 },
		"program":        func(c *Call) { c.Program = nil },
		"long program":   func(c *Call) { c.Program = make([]byte, MaxProgram+1) },
		"row width":      func(c *Call) { c.RowWidth = 0 },
		"out width":      func(c *Call) { c.OutWidth = MaxWidth + 1 },
		"used":           func(c *Call) { c.Used = 0 },
		"pairs":          func(c *Call) { c.IDs = c.IDs[1:] },
		"rows per token": func(c *Call) { c.RowsPerToken = 2 },
		"rows":           func(c *Call) { c.Rows = c.Rows[1:] },
		"out":            func(c *Call) { c.Out = c.Out[1:] },
		"expert":         func(c *Call) { c.IDs[0] = -1 },
	} {
		call := testCall(0, 2, false)
		change(call)
		var missing *MissingError
		if err := d.Compute(t.Context(), call); err == nil || errors.As(err, &missing) {
			t.Errorf("%s: got %v", name, err)
		}
	}
	if err := d.Compute(t.Context(), &Call{Program: []byte{1}, RowWidth: 1, OutWidth: 1, Used: 1, RowsPerToken: 1}); err != nil {
		t.Errorf("a call without tokens: %v", err)
	}
}

// FuzzSession feeds bytes to a worker session and to a dispatcher session after the greeting.
func FuzzSession(f *testing.F) {
	frame := func(typ uint8, id uint64, payload []byte) []byte {
		var b strings.Builder
		w := p2p.NewFrameWriter(&b, MaxFrame)
		if err := w.Write(p2p.Frame{Type: typ, ID: id, Payload: payload}); err != nil {
			f.Fatal(err)
		}
		return []byte(b.String())
	}
	program := frame(frameProgram, 1, putProgram(nil, 0, 0, programFor(testWidth, testHidden)))
	f.Add(append(program, frame(frameCall, 2, smallCall(1, 2))...))
	f.Add(frame(frameReply, 1, make([]byte, 4*testWidth)))
	f.Add(frame(framePong, 1, nil))
	f.Add(frame(frameError, 1, putError(nil, CodeBusy, "x")))
	f.Add(frame(frameTaken, 0, []byte{1}))
	f.Add(frame(frameOffer, 1, encodeControl(offer{
		Version: wireVersion, Model: testModel, Slices: []Slice{layerSlice(2, 4)}, MaxRows: 9, MaxPairs: 9, Queue: 1, Precisions: []Precision{F32},
	})))
	kernel := newFFN(testWidth, testHidden, layerSlice(0, 8))
	worker, err := NewWorker(WorkerConfig{Model: testModel, Kernel: kernel, Slices: kernel.slices})
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() { worker.Close() })
	d, err := NewDispatcher(Config{Model: testModel, Dialer: staticDialer{}})
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() { d.Close() })
	// feed writes to one end of a pipe what the function under test reads at the other.
	feed := func(b []byte, test func(net.Conn)) {
		here, there := net.Pipe()
		var wg sync.WaitGroup
		wg.Go(func() { io.Copy(io.Discard, there) })
		wg.Go(func() { there.Write(b); there.Close() })
		test(here)
		here.Close()
		wg.Wait()
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		hello := frame(frameWant, 0, encodeControl(want{wireVersion, testModel, F32}))
		feed(append(hello, b...), func(c net.Conn) { worker.Serve(context.Background(), c) })
		feed(b, func(c net.Conn) {
			s := newSession(d, "fuzz", &tally{}, c)
			s.startWriter(nil)
			s.offer = offer{Model: testModel, Queue: 1, MaxRows: 9, MaxPairs: 9, Slices: []Slice{layerSlice(0, 8)}}
			s.ping(time.Now())
			s.abandon(s.refuse(s.read()))
			s.stopWriter()
		})
	})
}
