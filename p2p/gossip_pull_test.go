package p2p

import (
	"bytes"
	"io"
	"testing"
	"time"
)

func TestHostileAsker(t *testing.T) {
	want := append([]byte{byte(len(testTopic))}, testTopic...)
	tests := []struct {
		name  string
		frame Frame
		fault Fault
		times int
	}{
		{"wrong type", Frame{Type: 9, Payload: want}, Malformed, 1},
		{"no topic", Frame{Type: pullWant}, Malformed, 1},
		{"topic is cut", Frame{Type: pullWant, Payload: want[:3]}, Malformed, 1},
		{"topic is no name", Frame{Type: pullWant, Payload: []byte("\x01/")}, Malformed, 1},
		{"list is cut", Frame{Type: pullWant, Payload: append(bytes.Clone(want), 1, 2, 3)}, Malformed, 1},
		{"list is too long", Frame{Type: pullWant, Payload: make([]byte, maxPullWant+1)}, Malformed, 1},
		{"too often", Frame{Type: pullWant, Payload: want}, Flood, 4 * maxTopics},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			x := newTarget(t)
			for range tt.times {
				c, err := x.mallory.OpenStream(t.Context(), x.a.ID(), pullProtocol)
				if err != nil {
					break // cut off
				}
				c.SetDeadline(time.Now().Add(patience))
				NewFrameWriter(c, maxPullWant+1).Write(tt.frame)
				io.Copy(io.Discard, c)
				c.Close()
			}
			eventually(t, "it costs standing", func() bool {
				st := x.a.Standing(x.mallory.ID())
				return st.Score > 0 && st.Last == tt.fault
			})
			x.served(t)
		})
	}
}

func TestHostileAnswerer(t *testing.T) {
	other, err := NewIdentity()
	if err != nil {
		t.Fatal(err)
	}
	tests := []struct {
		name   string
		fault  Fault
		answer func(w *FrameWriter, c Conn)
	}{
		{"garbage", Malformed, func(_ *FrameWriter, c Conn) { c.Write(bytes.Repeat([]byte{0xff}, 100)) }},
		{"unknown frame", Malformed, func(w *FrameWriter, _ Conn) { w.Write(Frame{Type: 9}) }},
		{"oversized frame", Malformed, func(w *FrameWriter, _ Conn) {
			w.Write(Frame{Type: pullEnvelope, Payload: make([]byte, maxPullEnvelope+1)})
		}},
		{"malformed envelope", Malformed, func(w *FrameWriter, _ Conn) { w.Write(Frame{Type: pullEnvelope, Payload: unrenewed([]byte("x"))}) }},
		{"forged envelope", Forged, func(w *FrameWriter, _ Conn) {
			raw := sealFor(t, other, "forged", nil)
			raw[len(raw)-1] ^= 1
			w.Write(Frame{Type: pullEnvelope, Payload: unrenewed(raw)})
		}},
		{"endless", Flood, func(w *FrameWriter, _ Conn) {
			raw := sealFor(t, other, "endless", nil)
			for w.Write(Frame{Type: pullEnvelope, Payload: unrenewed(raw)}) == nil {
			}
		}},
		{"silent", Unresponsive, func(_ *FrameWriter, c Conn) { io.Copy(io.Discard, c) }},
		{"slow", Unresponsive, func(_ *FrameWriter, c Conn) {
			for {
				if _, err := c.Write([]byte{0}); err != nil {
					return
				}
				time.Sleep(100 * time.Millisecond)
			}
		}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			a, ta, heard := startGossip(t, nil)
			a.gossip.pullTimeout = time.Second
			mallory := startHost(t, nil)
			if err := mallory.HandleStream(pullProtocol, func(_ *Peer, c Conn) {
				NewFrameReader(c, maxPullWant).Next()
				tt.answer(NewFrameWriter(c, 2*maxPullEnvelope), c)
			}); err != nil {
				t.Fatal(err)
			}
			hello(t, a, mallory)
			// Being ready has it pulled from.
			eventually(t, "it costs standing", func() bool {
				st := a.Standing(mallory.ID())
				return st.Score > 0 && st.Last == tt.fault
			})
			honest, th, _ := startGossip(t, nil)
			hello(t, honest, a)
			if err := th.Publish([]byte("honest"), time.Minute); err != nil {
				t.Fatal(err)
			}
			eventually(t, "honest peers are heard", func() bool { return heard.heard("honest") })
			if n := len(ta.Latest()); n > 2 {
				t.Errorf("%d authors", n)
			}
		})
	}
}

func FuzzPullWant(f *testing.F) {
	f.Add(append([]byte{byte(len(testTopic))}, testTopic...))
	f.Add(append(append([]byte{1}, 'a'), make([]byte, 2*pullHave)...))
	f.Fuzz(func(t *testing.T, b []byte) {
		topic, have, err := parseWant(b)
		if err == nil && (!topicPattern.MatchString(topic) || len(have) > len(b)/pullHave) {
			t.Errorf("%q and %d entries of %d bytes", topic, len(have), len(b))
		}
	})
}

// unrenewed is the payload that shows an envelope without a renewal.
func unrenewed(raw []byte) []byte { return append(renewal{}.append(nil), raw...) }
