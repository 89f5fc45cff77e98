package carry

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"kvasird/ggml/gguf"
	"kvasird/node/gateway"
	"kvasird/p2p"
)

// frames are frames as they travel.
func frames(list ...p2p.Frame) []byte {
	var b bytes.Buffer
	w := p2p.NewFrameWriter(&b, 1<<23)
	for _, f := range list {
		w.Write(f)
	}
	return b.Bytes()
}

func askFrame(t testing.TB, change func(*ask)) p2p.Frame {
	r, x := sampleRequest(), sampleExtra()
	a := askOf(modelA, &r, &x)
	if change != nil {
		change(&a)
	}
	return p2p.Frame{Type: frameAsk, Payload: encodeControl(a)}
}

func tokenFrame(typ uint8, list ...int32) p2p.Frame {
	return p2p.Frame{Type: typ, Payload: p2p.AppendInts(nil, list)}
}

// TestHostileClient has one client for every reason to refuse.
func TestHostileClient(t *testing.T) {
	prompt := tokenFrame(framePrompt, 1, 2, 3)
	good := askFrame(t, nil)
	for _, tt := range []struct {
		name string
		sent []byte
		code Code
		want string
	}{
		{"another model", frames(askFrame(t, func(a *ask) { a.Model = make([]byte, 32) }), prompt), CodeNotReady, "another model"},
		{"a prompt that does not fit is not read", frames(askFrame(t, func(a *ask) { a.Prompt = 2048 })), CodeLong, ""},
		{"not an ask", frames(prompt), CodeProtocol, "type 2, want 1"},
		{"an ask too large", []byte{1, 0x80, 0x10, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}, CodeProtocol, "frame too large"},
		{"an ask that is malformed", frames(p2p.Frame{Type: frameAsk, Payload: []byte{0xa0}}), CodeProtocol, "deterministic encoding"},
		{"flags", frames(p2p.Frame{Type: frameAsk, Flags: 1, Payload: good.Payload}), CodeProtocol, "flags 0x1"},
		{"an id", frames(p2p.Frame{Type: frameAsk, ID: 1, Payload: good.Payload}), CodeProtocol, "id 1"},
		{"a reserved field", append([]byte{0, 0, 0, 0, 1, 0, 1, 0}, make([]byte, 8)...), CodeProtocol, "reserved"},
		{"no prompt", frames(good, tokenFrame(frameTaken, 0)), CodeProtocol, "type 3, want 2"},
		{"more prompt than was told", frames(good, tokenFrame(framePrompt, 1, 2, 3, 4)), CodeProtocol, "frame too large"},
		{"less prompt than was told", frames(good, tokenFrame(framePrompt, 1, 2)), CodeProtocol, "3 were told"},
		{"a negative token", frames(good, tokenFrame(framePrompt, 1, -2, 3)), CodeProtocol, "token 1 is -2"},
		{"half a taken", frames(good, prompt, p2p.Frame{Type: frameTaken, Payload: []byte{0}}), CodeProtocol, "1 bytes, want 4"},
		{"not a taken", frames(good, prompt, prompt), CodeProtocol, "frame too large"},
		{"a second ask", frames(good, prompt, p2p.Frame{Type: frameAsk}), CodeProtocol, "type 1, want 3"},
		{"read before it was sent", frames(good, prompt, tokenFrame(frameTaken, 1)), CodeProtocol, "1 tokens were read, 0 were sent"},
		{"read less than before", frames(good, prompt, tokenFrame(frameTaken, 0), tokenFrame(frameTaken, -1), tokenFrame(frameTaken, 0)), CodeProtocol, "were read"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, "a")
				w.engines["a"].first = 20 * time.Second
				near, far := net.Pipe()
				done := make(chan error, 1)
				go func() { done <- w.servers["a"].Serve("x", far) }()
				go near.Write(tt.sent)
				got := lastRefusal(near)
				if got == nil || got.code != tt.code || !strings.Contains(got.text, tt.want) {
					t.Errorf("%+v, want %v with %q", got, tt.code, tt.want)
				}
				near.Close()
				if err := <-done; (err != nil) != (tt.code == CodeProtocol) {
					t.Errorf("told: %v", err)
				}
				if n := w.servers["a"].Stats().Refused[tt.code]; n != 1 {
					t.Errorf("counted %d times", n)
				}
				w.free(0)
			})
		})
	}
}

// lastRefusal reads what a server sends until it refuses.
func lastRefusal(c Conn) *refusal {
	in := p2p.NewFrameReader(c, maxAnswer)
	for {
		f, err := in.Next()
		if err != nil {
			return nil
		}
		if f.Type == frameRefused {
			r, _ := decodeRefusal(f.Payload)
			return r
		}
	}
}

// TestHostileServer has one server for every reason to drop it. Before the first token another
// answers.
func TestHostileServer(t *testing.T) {
	begun, end := p2p.Frame{Type: frameBegun}, p2p.Frame{Type: frameEnd, Payload: putEnd("stop")}
	tokens := func(list ...int32) p2p.Frame {
		return p2p.Frame{Type: frameTokens, Payload: putAnswer(nil, 0, list...)}
	}
	flood := []p2p.Frame{begun}
	for i := range int32(Window + 1) {
		flood = append(flood, tokens(10+i))
	}
	maybe := func(top ...gateway.TokenProb) p2p.Frame {
		return p2p.Frame{Type: frameLikely, Payload: putLikely(nil, &likely{0, gateway.TokenProb{ID: 10}, top})}
	}
	for _, tt := range []struct {
		name  string
		sent  []byte
		want  string // of the fault
		late  bool   // after tokens; else another answered
		extra gateway.Extra
	}{
		{"log-probabilities that were not asked for", frames(begun, maybe()), "type 9", false, wishes(false)},
		{"tokens without log-probabilities", frames(begun, tokens(10)), "type 6", false, wishes(true)},
		{"more beside than was asked for", frames(begun, maybe(make([]gateway.TokenProb, 2)...)), "beside 2 others, 1 were", false, wishes(true)},
		{"another beyond the vocabulary", frames(begun, maybe(gateway.TokenProb{ID: 1 << 20})), "vocabulary has 1048576", false, wishes(true)},
		{"malformed likely", frames(begun, maybe(), p2p.Frame{Type: frameLikely}), "likely frame of 0", true, wishes(true)},

		{"tokens before it took the request", frames(tokens(10)), "type 6", false, wishes(false)},
		{"the end before tokens", frames(begun, end), "type 7", false, wishes(false)},
		{"begins twice", frames(begun, begun), "type 4", false, wishes(false)},
		{"begins with something", frames(p2p.Frame{Type: frameBegun, Payload: []byte{1}}), "type 4 with 1", false, wishes(false)},
		{"waits for something", frames(begun, p2p.Frame{Type: frameWait, Payload: []byte{1}}), "type 5 with 1", false, wishes(false)},
		{"unknown frame", frames(p2p.Frame{Type: 99}), "type 99", false, wishes(false)},
		{"flags", frames(p2p.Frame{Type: frameBegun, Flags: 2}), "flags 0x2", false, wishes(false)},
		{"a frame too large", []byte{0, 0, 1, 0, 6, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}, "frame too large", false, wishes(false)},
		{"a token beyond the vocabulary", frames(begun, tokens(1<<20)), "vocabulary has 1048576", false, wishes(false)},
		{"a prompt that was cached twice", frames(begun, p2p.Frame{Type: frameTokens, Payload: putAnswer(nil, 4, 10)}), "a prompt of 3", false, wishes(false)},
		{"malformed refusal", frames(p2p.Frame{Type: frameRefused}), "refusal of 0", false, wishes(false)},
		{"malformed tokens", frames(begun, tokens(10), p2p.Frame{Type: frameTokens}), "0 bytes", true, wishes(false)},
		{"malformed end", frames(begun, tokens(10), p2p.Frame{Type: frameEnd}), "end frame", true, wishes(false)},
		{"more than was asked for", frames(begun, tokens(10, 11), tokens(12, 13)), "at most 3", true, wishes(false)},
		{"more than the window", frames(flood...), "257 tokens beyond", true, wishes(false)},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, "a", "b")
				w.serve["a"] = func(c Conn) {
					go io.Copy(io.Discard, c)
					c.Write(tt.sent)
					time.Sleep(time.Second)
				}
				most := 3
				if strings.Contains(tt.name, "window") {
					most = 0
				}
				n := 0
				a, err := w.client.Start(t.Context(), request(most), tt.extra)
				if err == nil && tt.late {
					time.Sleep(time.Millisecond) // nothing is read meanwhile
				}
				if err == nil {
					n, err = w.rest(t.Context(), a, 0)
				}
				if tt.late != (err != nil) || !tt.late && n != 3 {
					t.Errorf("%d tokens, %v", n, err)
				}
				if len(w.faults) != 1 || !strings.Contains(w.faults[0].Error(), tt.want) {
					t.Errorf("faults %v, want %q", w.faults, tt.want)
				}
				time.Sleep(time.Minute)
			})
		})
	}
}

// TestEndlessAnswer: where no bound was asked for, the context that a server announced is one.
func TestEndlessAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "a")
		w.serve["a"] = func(c Conn) {
			go io.Copy(io.Discard, c)
			out := p2p.NewFrameWriter(c, maxAnswer)
			err := send(c, out, frameBegun, nil)
			for n := int32(10); err == nil; n++ {
				err = send(c, out, frameTokens, putAnswer(nil, 0, n))
				time.Sleep(time.Millisecond)
			}
		}
		a, err := w.client.Start(t.Context(), request(0), gateway.Extra{})
		if err != nil {
			t.Fatal(err)
		}
		if n, err := w.rest(t.Context(), a, 0); n != 2045 || err == nil || len(w.faults) != 1 || !strings.Contains(w.faults[0].Error(), "at most 2045") {
			t.Errorf("%d tokens, %v, faults %v", n, err, w.faults)
		}
		time.Sleep(time.Second)
	})
}

// FuzzServe feeds a server what a client may send.
func FuzzServe(f *testing.F) {
	good := frames(askFrame(f, nil), tokenFrame(framePrompt, 1, 2, 3))
	f.Add(good)
	f.Add(append(bytes.Clone(good), frames(tokenFrame(frameTaken, 2))...))
	f.Add(frames(askFrame(f, func(a *ask) { embedAsk(a, 1, 2) }), tokenFrame(framePrompt, 1, 2, 3)))
	f.Fuzz(func(t *testing.T, b []byte) {
		e := &counting{slots: 1, context: 64}
		s := NewServer(ServerConfig{
			Find:  func(gguf.ModelID) (Answerer, error) { return textAndVectors{e}, nil },
			Admit: func(string) error { return nil }, Logger: quiet,
		})
		near, far := net.Pipe()
		go io.Copy(io.Discard, near)
		go func() { near.Write(b); near.Close() }()
		s.Serve("x", far)
		for range 100 {
			if e.busy() == 0 {
				break
			}
			time.Sleep(time.Millisecond)
		}
		if st := s.Stats(); st.Running != 0 || e.busy() != 0 {
			t.Fatalf("%+v, %d in the engine", st, e.busy())
		}
	})
}

// textAndVectors makes both.
type textAndVectors struct{ *counting }

func (textAndVectors) Embed(ctx context.Context, owner string, inputs [][]int32) ([][]float32, error) {
	return (&lengths{}).Embed(ctx, owner, inputs)
}

// wishes are log-probabilities beside one other, or nothing.
func wishes(logprobs bool) gateway.Extra {
	if logprobs {
		return gateway.Extra{Logprobs: true, Top: 1}
	}
	return gateway.Extra{}
}

// FuzzAnswer feeds a client what a server may send.
func FuzzAnswer(f *testing.F) {
	f.Add(frames(p2p.Frame{Type: frameBegun}, p2p.Frame{Type: frameTokens, Payload: putAnswer(nil, 1, 5)}, p2p.Frame{Type: frameEnd, Payload: putEnd("stop")}), false)
	f.Add(frames(p2p.Frame{Type: frameBegun}, p2p.Frame{Type: frameLikely, Payload: putLikely(nil, &likely{top: make([]gateway.TokenProb, 1)})}), true)
	f.Add(frames(p2p.Frame{Type: frameRefused, Payload: putRefusal(nil, &refusal{code: CodeBusy, text: "x"})}), false)
	vector := p2p.Frame{Type: frameVector, Payload: putVector(nil, []float32{1, 2})}
	f.Add(frames(p2p.Frame{Type: frameBegun}, vector, vector, p2p.Frame{Type: frameEnd, Payload: putEnd("stop")}), false)
	f.Fuzz(func(t *testing.T, b []byte, logprobs bool) {
		c := NewClient(ClientConfig{
			Model: modelA, Vocab: 100, Logger: quiet, Fault: func(string, error) {},
			Targets: func() []Target { return []Target{{Peer: "a", Context: 64}} },
			Dial: func(context.Context, string) (Conn, error) {
				near, far := net.Pipe()
				go io.Copy(io.Discard, far)
				go func() { far.Write(b); far.Close() }()
				return near, nil
			},
		})
		a, err := c.Start(t.Context(), gateway.Request{Prompt: []int32{1, 2}, MaxTokens: 8}, wishes(logprobs))
		for n := 0; err == nil; n++ {
			var token int32
			if token, err = a.Next(t.Context()); err == nil && (token < 0 || token >= 100 || n >= 8) {
				t.Fatalf("token %d is %d", n, token)
			}
		}
		if errors.Is(err, io.EOF) && a != nil && a.Finish() == "" {
			t.Fatal("complete without a reason")
		}
		if vectors, err := c.Embed(t.Context(), [][]int32{{1}, {2}}); err == nil && (len(vectors) != 2 || len(vectors[0]) == 0 || len(vectors[0]) != len(vectors[1])) {
			t.Fatalf("vectors %v", vectors)
		}
	})
}
