package fetch

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"kvasird/p2p"

	"github.com/libp2p/go-libp2p/core/peer"
)

// visit is a session with a server, frame by frame.
type visit struct {
	t    *testing.T
	conn net.Conn
	r    *p2p.FrameReader
	err  error // of Serve
	done chan struct{}
}

func visitAs(t *testing.T, srv *Server, who string, lane bool) *visit {
	near, far := net.Pipe()
	v := &visit{t: t, conn: near, r: p2p.NewFrameReader(near, maxPiece), done: make(chan struct{})}
	go func() {
		v.err = srv.Serve(context.Background(), &pipeConn{Conn: far, remote: peer.ID(who), lane: lane})
		close(v.done)
	}()
	return v
}

func (v *visit) send(b []byte) {
	v.t.Helper()
	v.conn.SetDeadline(time.Now().Add(time.Hour))
	if _, err := v.conn.Write(b); err != nil {
		v.t.Fatal(err)
	}
}

func (v *visit) want(typ uint8, id uint64) []byte {
	v.t.Helper()
	f, err := v.r.Next()
	if err != nil {
		v.t.Fatal(err)
	}
	if f.Type != typ || f.ID != id {
		v.t.Fatalf("frame of type %d for %d (%q), want %d for %d", f.Type, f.ID, f.Payload, typ, id)
	}
	return f.Payload
}

func (v *visit) wantError(id uint64, c code) {
	v.t.Helper()
	r, err := decodeRefusal(v.want(frameError, id))
	if err != nil || r.code != c {
		v.t.Fatalf("refused with %d %q, %v, want code %d", r.code, r.text, err, c)
	}
}

// begin says hello.
func (v *visit) begin(m *model) {
	v.t.Helper()
	v.send(frame(frameWant, 0, 0, encodeWant(m.id)))
	v.want(frameManifest, 0)
}

func (v *visit) end() error {
	v.conn.Close()
	<-v.done
	return v.err
}

func askFrame(typ uint8, id uint64, a ask) []byte { return frame(typ, 0, id, a.append(nil)) }

// What breaks the protocol ends the session with a reason; it is counted, and the requester
// is to blame.
func TestServerEnds(t *testing.T) {
	m := makeModel(1, 3*mib)
	good := ask{length: Group}
	tests := []struct {
		name   string
		hello  bool
		frames [][]byte
		code   code // 0: just ends
		reason string
		blame  bool
	}{
		{"hello is another frame", false, [][]byte{askFrame(frameAskData, 1, good)}, codeMalformed, RefusedMalformed, true},
		{"hello with an id", false, [][]byte{frame(frameWant, 0, 1, encodeWant(m.id))}, codeMalformed, RefusedMalformed, true},
		{"hello with flags", false, [][]byte{frame(frameWant, 1, 0, encodeWant(m.id))}, codeMalformed, RefusedMalformed, true},
		{"short hello", false, [][]byte{frame(frameWant, 0, 0, encodeWant(m.id)[:20])}, codeMalformed, RefusedMalformed, true},
		{"unknown version", false, [][]byte{frame(frameWant, 0, 0, make([]byte, wantSize))}, codeVersion, RefusedVersion, false},
		{"unknown model", false, [][]byte{frame(frameWant, 0, 0, encodeWant([32]byte{}))}, codeNoModel, RefusedModel, false},
		{"oversize hello", false, [][]byte{frame(frameWant, 0, 0, make([]byte, maxAsk+1))[:p2p.FrameHeader]}, 0, RefusedMalformed, true},
		{"second hello", true, [][]byte{frame(frameWant, 0, 0, encodeWant(m.id))}, codeMalformed, RefusedMalformed, true},
		{"frame of a server", true, [][]byte{frame(framePiece, 0, 1, nil)}, codeMalformed, RefusedMalformed, true},
		{"flags", true, [][]byte{frame(frameAskData, 1, 1, good.append(nil))}, codeMalformed, RefusedMalformed, true},
		{"cancel with a payload", true, [][]byte{frame(frameCancel, 0, 1, []byte{1})}, codeMalformed, RefusedMalformed, true},
		{"malformed request", true, [][]byte{askFrame(frameAskData, 1, ask{})}, codeMalformed, RefusedMalformed, true},
		{"request id 0", true, [][]byte{askFrame(frameAskData, 0, good)}, codeMalformed, RefusedMalformed, true},
		{"request id in use", true, [][]byte{askFrame(frameAskData, 1, good), askFrame(frameAskData, 1, good)}, codeMalformed, RefusedMalformed, true},
		{"requests in flight", true, [][]byte{askFrame(frameAskData, 1, good), askFrame(frameAskData, 2, good), askFrame(frameAskData, 3, good)}, codeMalformed, RefusedRequests, true},
		{"oversize frame", true, [][]byte{frame(frameAskData, 0, 1, make([]byte, maxAsk+1))[:p2p.FrameHeader]}, 0, RefusedMalformed, true},
		{"malformed frame", true, [][]byte{{0, 0, 0, 0, frameCancel, 0, 1, 0, 1, 0, 0, 0, 0, 0, 0, 0}}, 0, RefusedMalformed, true},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				srv := NewServer(ServerConfig{Library: m, Requests: 2})
				v := visitAs(t, srv, "a", true)
				if tt.hello {
					v.begin(m)
				}
				for _, f := range tt.frames {
					v.send(f)
				}
				synctest.Wait() // the server looks at the last frame before an answer leaves
				for {
					f, err := v.r.Next()
					if err != nil {
						if tt.code != 0 {
							t.Fatalf("no reason: %v", err)
						}
						break
					}
					if f.Type == frameError && f.ID == 0 {
						if r, err := decodeRefusal(f.Payload); err != nil || r.code != tt.code {
							t.Errorf("refused with %v, %v, want code %d", r, err, tt.code)
						}
						break
					}
				}
				err := v.end()
				if err == nil || errors.Is(err, ErrMalformed) != tt.blame {
					t.Errorf("ended with %v, to blame: %v", err, tt.blame)
				}
				if got := srv.Stats(); got.Refused[tt.reason] != 1 || got.Sessions != 0 {
					t.Errorf("stats %+v, want one %q", got, tt.reason)
				}
			})
		})
	}
}

// What can not be given is refused, and the session goes on.
func TestServerRefuses(t *testing.T) {
	m := makeModel(1, 3*mib+5)
	part := newJudge(t, m)
	if err := part.SetTree(0, m.trees[0]); err != nil {
		t.Fatal(err)
	}
	if err := part.WriteGroups(0, 0, m.data[0][:mib]); err != nil {
		t.Fatal(err)
	}
	broken := &brokenShelf{m.full()}
	tree := uint64(len(m.trees[0]))
	tests := []struct {
		name  string
		shelf Shelf
		typ   uint8
		ask   ask
		code  code
	}{
		{"data of no file", m.full(), frameAskData, ask{1, Group, 0}, codeNotHeld},
		{"tree of no file", m.full(), frameAskTree, ask{1, Group, 0}, codeNotHeld},
		{"held of no file", m.full(), frameAskHeld, ask{file: 1}, codeNotHeld},
		{"held beyond the file", m.full(), frameAskHeld, ask{off: 13}, codeNotHeld},
		{"data beyond the file", m.full(), frameAskData, ask{0, Group, 12 * Group}, codeNotHeld},
		{"data behind the file", m.full(), frameAskData, ask{0, Group, 13 * Group}, codeNotHeld},
		{"data to within a group", m.full(), frameAskData, ask{0, Group + 1, 0}, codeNotHeld},
		{"tree beyond its end", m.full(), frameAskTree, ask{0, 2, tree - 1}, codeNotHeld},
		{"tree behind its end", m.full(), frameAskTree, ask{0, 1, tree}, codeNotHeld},
		{"data not held", part, frameAskData, ask{0, Group, mib}, codeNotHeld},
		{"data held in part", part, frameAskData, ask{0, 2 * mib, 0}, codeNotHeld},
		{"data not readable", broken, frameAskData, ask{0, Group, 0}, codeInternal},
		{"tree not readable", broken, frameAskTree, ask{0, 8, 0}, codeNotHeld},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				srv := NewServer(ServerConfig{Library: shelfOf{tt.shelf}})
				v := visitAs(t, srv, "a", true)
				v.begin(m)
				v.send(askFrame(tt.typ, 7, tt.ask))
				var refused code
				for refused == 0 {
					f, err := v.r.Next()
					if err != nil || f.ID != 7 {
						t.Fatalf("%+v, %v", f, err)
					}
					if f.Type == frameError {
						no, _ := decodeRefusal(f.Payload)
						refused = no.code
					} else if f.Type != framePiece || f.Flags == flagLast {
						t.Fatalf("answered by %+v", f)
					}
				}
				if refused != tt.code {
					t.Errorf("code %d, want %d", refused, tt.code)
				}
				v.send(askFrame(frameAskHeld, 8, ask{}))
				v.want(frameHeld, 8)
				if err := v.end(); err != nil {
					t.Errorf("ended with %v", err)
				}
				if got := srv.Stats().Refused; got[RefusedNotHeld]+got[RefusedUnreadable] != 1 {
					t.Errorf("refused %v", got)
				}
			})
		})
	}
}

// brokenShelf can not be read.
type brokenShelf struct{ *wholeShelf }

func (s *brokenShelf) ReadAt(int, []byte, int64) (int, error)   { return 0, io.ErrNoProgress }
func (s *brokenShelf) ReadTree(int, []byte, int64) (int, error) { return 0, io.ErrNoProgress }

func TestServerSessions(t *testing.T) {
	m := makeModel(1, mib)
	synctest.Test(t, func(t *testing.T) {
		srv := NewServer(ServerConfig{Library: m, Sessions: 3, SessionsPerPeer: 2})
		a1, a2 := visitAs(t, srv, "a", true), visitAs(t, srv, "a", true)
		a1.begin(m)
		a2.begin(m)
		refused := func(who string) *visit {
			v := visitAs(t, srv, who, true)
			v.send(frame(frameWant, 0, 0, encodeWant(m.id)))
			v.wantError(0, codeBusy)
			<-v.done
			return v
		}
		refused("a")
		b := visitAs(t, srv, "b", true)
		b.begin(m)
		refused("c")
		// Those that say nothing are not more than as many again.
		var silent []*visit
		for range 3 {
			silent = append(silent, visitAs(t, srv, "d", true))
		}
		synctest.Wait()
		last := visitAs(t, srv, "d", true)
		<-last.done
		if got := srv.Stats(); got.Refused[RefusedPeer] != 1 || got.Refused[RefusedSessions] != 2 || got.Sessions != 3 {
			t.Errorf("stats %+v", got)
		}
		for _, v := range append(silent, last, a1, a2, b) {
			v.end()
		}
		a3 := visitAs(t, srv, "a", true)
		a3.begin(m)
		a3.end()
	})
}

func TestServerDeadlines(t *testing.T) {
	m := makeModel(1, 8*mib)
	tests := []struct {
		name   string
		talk   func(v *visit)
		reason string
		within time.Duration
	}{
		{"no hello", func(v *visit) {}, "", 10 * time.Second},
		{"half a hello", func(v *visit) { v.send(frame(frameWant, 0, 0, encodeWant(m.id))[:20]) }, "", 10 * time.Second},
		{"no request", func(v *visit) { v.begin(m) }, "", 2 * time.Minute},
		{"no second request", func(v *visit) {
			v.begin(m)
			v.send(askFrame(frameAskHeld, 1, ask{}))
			v.want(frameHeld, 1)
		}, "", 2 * time.Minute},
		{"half a request", func(v *visit) {
			v.begin(m)
			v.send(askFrame(frameAskHeld, 1, ask{})[:20])
		}, "", 2 * time.Minute},
		{"does not read", func(v *visit) {
			v.begin(m)
			v.send(askFrame(frameAskData, 1, ask{0, MaxRange, 0}))
			v.want(framePiece, 1)
		}, RefusedSlow, 30 * time.Second},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				srv := NewServer(ServerConfig{Library: m})
				v := visitAs(t, srv, "a", true)
				start := time.Now()
				tt.talk(v)
				<-v.done
				if took := time.Since(start); took != tt.within {
					t.Errorf("ended after %v, want %v", took, tt.within)
				}
				if v.err == nil || tt.reason != "" && srv.Stats().Refused[tt.reason] != 1 {
					t.Errorf("ended with %v, %+v", v.err, srv.Stats())
				}
			})
		})
	}
}

// Pieces grow to what the connection is for.
func TestServerPieces(t *testing.T) {
	m := makeModel(1, MaxRange)
	for lane, most := range map[bool]int{true: maxPiece, false: maxSharedPiece} {
		synctest.Test(t, func(t *testing.T) {
			v := visitAs(t, NewServer(ServerConfig{Library: m}), "a", lane)
			v.begin(m)
			v.send(askFrame(frameAskData, 1, ask{0, MaxRange, 0}))
			var data []byte
			longest := 0
			for len(data) < MaxRange {
				piece := v.want(framePiece, 1)
				data, longest = append(data, piece...), max(longest, len(piece))
			}
			if longest != most || !bytes.Equal(data, m.data[0]) {
				t.Errorf("lane %v: pieces of up to %d bytes, want %d", lane, longest, most)
			}
			v.end()
		})
	}
}

func TestServerCancel(t *testing.T) {
	m := makeModel(1, 8*mib)
	synctest.Test(t, func(t *testing.T) {
		srv := NewServer(ServerConfig{Library: m})
		v := visitAs(t, srv, "a", true)
		v.begin(m)
		v.send(askFrame(frameAskData, 1, ask{0, MaxRange, 0}))
		v.send(askFrame(frameAskData, 2, ask{0, Group, 0}))
		v.send(frame(frameCancel, 0, 99, nil))
		v.want(framePiece, 1)
		v.send(frame(frameCancel, 0, 1, nil))
		pieces := 0
		for {
			f, err := v.r.Next()
			if err != nil {
				t.Fatal(err)
			}
			if f.Type == frameError {
				break
			}
			pieces++
		}
		if pieces > 1 {
			t.Errorf("%d pieces after the cancel", pieces)
		}
		for got := 0; got < Group; {
			got += len(v.want(framePiece, 2))
		}
		if err := v.end(); err != nil {
			t.Error(err)
		}
	})
}

// A context that ends, ends the session.
func TestServerContext(t *testing.T) {
	m := makeModel(1, mib)
	synctest.Test(t, func(t *testing.T) {
		srv := NewServer(ServerConfig{Library: m, Rate: 1})
		near, far := net.Pipe()
		defer near.Close()
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() {
			srv.Serve(ctx, &pipeConn{Conn: far, lane: true})
			close(done)
		}()
		near.Write(frame(frameWant, 0, 0, encodeWant(m.id)))
		p2p.NewFrameReader(near, maxPiece).Next()
		near.Write(askFrame(frameAskData, 1, ask{0, Group, 0})) // an hour's worth
		cancel()
		<-done
	})
}

// load asks for a file again and again and returns the bytes that it got.
func load(m *model, conn net.Conn, got *atomic.Int64) {
	r := p2p.NewFrameReader(conn, maxPiece)
	if _, err := conn.Write(frame(frameWant, 0, 0, encodeWant(m.id))); err != nil {
		return
	}
	if _, err := r.Next(); err != nil {
		return
	}
	for id := uint64(1); ; id++ {
		if _, err := conn.Write(askFrame(frameAskData, id, ask{0, MaxRange, 0})); err != nil {
			return
		}
		for {
			f, err := r.Next()
			if err != nil {
				return
			}
			got.Add(int64(len(f.Payload)))
			if f.Flags == flagLast {
				break
			}
		}
	}
}

func TestServerRate(t *testing.T) {
	m := makeModel(1, 4*mib)
	tests := []struct {
		name      string
		rate      int64
		busy      bool
		streams   bool
		low, high int64 // bytes/s of all
	}{
		{"limit", 4 * mib, false, false, 39 * mib / 10, 42 * mib / 10},
		{"limit, streams", 4 * mib, false, true, 39 * mib / 10, 42 * mib / 10},
		{"limit, busy", 4 * mib, true, false, 49 * mib / 100, 53 * mib / 100},
		{"no limit, busy from the start", 0, true, false, 98 * mib / 100, 105 * mib / 100},
		{"small limit", 64 << 10, false, false, 60 << 10, 68 << 10},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				srv := NewServer(ServerConfig{Library: m, Rate: tt.rate, Busy: func() bool { return tt.busy }})
				var got [3]atomic.Int64
				var conns []net.Conn
				var wg sync.WaitGroup
				for i := range got {
					near, far := net.Pipe()
					conns = append(conns, near)
					c := &pipeConn{Conn: far, remote: peer.ID(fmt.Sprint(i)), lane: !tt.streams}
					wg.Go(func() { srv.Serve(context.Background(), c) })
					wg.Go(func() { load(m, near, &got[i]) })
				}
				const span = 30
				time.Sleep(span * time.Second)
				for _, c := range conns {
					c.Close()
				}
				wg.Wait()
				var all int64
				for i := range got {
					all += got[i].Load()
				}
				if all < tt.low*span || all > tt.high*span {
					t.Errorf("%d bytes/s, want %d to %d", all/span, tt.low, tt.high)
				}
				for i := range got {
					if n := got[i].Load(); n < all/4 || n > all/2 {
						t.Errorf("session %d got %d of %d bytes", i, n, all)
					}
				}
				if st := srv.Stats(); st.Bytes < all || len(st.Peers) != 3 {
					t.Errorf("%d bytes arrived, stats %+v", all, st)
				}
			})
		})
	}
}

func TestNoLibrary(t *testing.T) {
	defer func() {
		if recover() == nil {
			t.Error("a server without a library")
		}
	}()
	NewServer(ServerConfig{})
}
