package carry

import (
	"errors"
	"slices"
	"testing"
	"testing/synctest"

	"kvasird/node/gateway"
	"kvasird/p2p"
)

// TestWishesTravel: what a request asks for beside comes to the engine, and log-probabilities come
// back with each token.
func TestWishesTravel(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "a")
		a, err := w.client.Start(t.Context(), request(600), sampleExtra())
		if err != nil {
			t.Fatal(err)
		}
		for n := range int32(600) { // more than the window
			if token, err := a.Next(t.Context()); err != nil || token != 10+n {
				t.Fatalf("token %d is %d, %v", n, token, err)
			}
			of, top := a.Prob()
			want := []gateway.TokenProb{{ID: 10 + n, Logprob: -float32(10 + n)}, {ID: 11 + n, Logprob: -float32(11 + n)}}
			if of.ID != 10+n || of.Logprob != -float32(10+n) || len(top) != 2 || !slices.EqualFunc(top, want, sameProb) {
				t.Fatalf("token %d: %+v beside %+v", n, of, top)
			}
		}
		if n, err := w.rest(t.Context(), a, 600); n != 600 || err != nil {
			t.Errorf("%d tokens, %v", n, err)
		}
		w.free(0)
	})
}

func sameProb(a, b gateway.TokenProb) bool { return a.ID == b.ID && a.Logprob == b.Logprob }

// oldServer refuses what it does not know, as version 1 did.
func oldServer(c Conn) (asked p2p.Frame) {
	asked, _ = p2p.NewFrameReader(c, maxAsk).Next()
	r := refusal{code: CodeProtocol, text: "cbor: found unknown field"}
	p2p.NewFrameWriter(c, maxAnswer).Write(p2p.Frame{Type: frameRefused, Payload: putRefusal(nil, &r)})
	return asked
}

// TestServersThatLack: what a server cannot serve another one is asked for; where none can, the
// client is told what is lacking, and nobody is blamed.
func TestServersThatLack(t *testing.T) {
	for _, tt := range []struct {
		name  string
		make  func(w *world)
		want  gateway.Abilities
		other bool
	}{
		{"an engine", func(w *world) { w.engines["a"].lacks.Logprobs = true }, gateway.Abilities{Logprobs: true}, false},
		{"an old server", func(w *world) { w.serve["a"] = func(c Conn) { oldServer(c) } }, gateway.Abilities{Grammar: true, Special: true, Logprobs: true}, false},
		{"another engine does not", func(w *world) { w.engines["a"].lacks.Grammar = true }, gateway.Abilities{}, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				names := []string{"a"}
				if tt.other {
					names = append(names, "b")
				}
				w := newWorld(t, names...)
				tt.make(w)
				a, err := w.client.Start(t.Context(), request(3), sampleExtra())
				if tt.other {
					if err != nil {
						t.Fatal(err)
					}
					if n, err := w.rest(t.Context(), a, 0); n != 3 || err != nil || w.calls("a") != 1 {
						t.Errorf("%d tokens, %v, %d calls of the first", n, err, w.calls("a"))
					}
				} else {
					var lacking *LacksError
					if !errors.As(err, &lacking) || lacking.Lacks() != tt.want || w.calls("a") != 1 {
						t.Errorf("%v after %d calls, want one that lacks %+v", err, w.calls("a"), tt.want)
					}
				}
				if len(w.faults) > 0 {
					t.Errorf("blamed: %v", w.faults)
				}
				w.free(0)
			})
		})
	}
}

// TestPlainAsksAreOld: a request without wishes is one that every server knows, and one that broke
// the protocol otherwise is not taken for one that lacks something.
func TestPlainAsksAreOld(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "a")
		w.serve["a"] = func(c Conn) {
			if a, err := decodeAsk(oldServer(c).Payload); err != nil || a.Version != plainVersion {
				t.Errorf("%+v, %v", a, err)
			}
		}
		_, err := w.client.Start(t.Context(), request(3), gateway.Extra{})
		var refused *RefusedError
		var lacking *LacksError
		if !errors.As(err, &refused) || refused.Code != CodeProtocol || errors.As(err, &lacking) {
			t.Errorf("%v", err)
		}
	})
}
