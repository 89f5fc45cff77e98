package fetch

import (
	"context"
	"encoding/binary"
	"net"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// wrongShelf serves wrong bytes here and there.
type wrongShelf struct {
	*wholeShelf
	data, tree bool
}

func (s wrongShelf) Shelf([32]byte) Shelf { return s }

func (s wrongShelf) ReadAt(file int, p []byte, off int64) (int, error) {
	n, err := s.wholeShelf.ReadAt(file, p, off)
	if s.data && off >= Group {
		p[n/2] ^= 1
	}
	return n, err
}

func (s wrongShelf) ReadTree(file int, p []byte, off int64) (int, error) {
	n, err := s.wholeShelf.ReadTree(file, p, off)
	if s.tree {
		p[n-1] ^= 1
	}
	return n, err
}

// piecesFrom applies change to the pieces from the nth on.
func piecesFrom(n int64, change func(frame []byte) []byte) func([]byte) []byte {
	var seen atomic.Int64
	return func(b []byte) []byte {
		if b[4] == framePiece && seen.Add(1) >= n {
			return change(b)
		}
		return b
	}
}

func idOf(frame []byte) uint64 { return binary.LittleEndian.Uint64(frame[8:]) }

// badSources is one source for each fault. After the fault is known, an honest source comes.
func badSources(m *model) map[string]struct {
	src   *pipeSource
	fault Fault
} {
	other := makeModel(9, 9*mib, mib)
	type bad = struct {
		src   *pipeSource
		fault Fault
	}
	tamper := func(change func([]byte) []byte) *pipeSource { return tampering("bad", m, change) }
	reply := func(typ uint8, f func(b []byte) []byte) *pipeSource {
		return tamper(func(b []byte) []byte {
			if b[4] == typ {
				return f(b)
			}
			return b
		})
	}
	return map[string]bad{
		"wrong data":    {honest("bad", ServerConfig{Library: wrongShelf{m.full(), true, false}}), FaultData},
		"wrong tree":    {honest("bad", ServerConfig{Library: wrongShelf{m.full(), false, true}}), FaultTree},
		"another model": {honest("bad", ServerConfig{Library: always{other}}), FaultModel},
		"held, refused": {tamper(piecesFrom(8, func(b []byte) []byte {
			return frame(frameError, 0, idOf(b), refusal{codeNotHeld, "no"}.encode())
		})), FaultHeld},
		"held of another file": {reply(frameHeld, func(b []byte) []byte {
			return frame(frameHeld, 0, idOf(b), encodeHeld([]Span{{0, 1 << 40}}, 1<<40, 0))
		}), FaultProtocol},
		"range ends early": {tamper(piecesFrom(8, func(b []byte) []byte {
			return frame(framePiece, flagLast, idOf(b), b[16:17])
		})), FaultTruncated},
		"range left for the next": {tamper(piecesFrom(8, func(b []byte) []byte {
			binary.LittleEndian.PutUint64(b[8:], idOf(b)+1)
			return b
		})), FaultTruncated},
		"piece without end": {tamper(piecesFrom(4, func(b []byte) []byte { b[5] = 0; return b })), FaultProtocol},
		"unknown flags":     {tamper(piecesFrom(4, func(b []byte) []byte { b[5] = 2; return b })), FaultProtocol},
		"empty piece":       {tamper(piecesFrom(4, func(b []byte) []byte { return frame(framePiece, 0, idOf(b), nil) })), FaultProtocol},
		"more than asked": {tamper(piecesFrom(1, func(b []byte) []byte {
			return frame(framePiece, 0, idOf(b), make([]byte, maxPiece))
		})), FaultProtocol},
		"piece of nothing asked": {tamper(piecesFrom(4, func(b []byte) []byte {
			return frame(framePiece, 0, 1<<40, b[16:])
		})), FaultProtocol},
		"oversize frame": {tamper(piecesFrom(4, func(b []byte) []byte {
			binary.LittleEndian.PutUint32(b, maxPiece+1)
			return b
		})), FaultProtocol},
		"malformed frame":    {tamper(piecesFrom(4, func(b []byte) []byte { b[6] = 1; return b })), FaultProtocol},
		"malformed manifest": {reply(frameManifest, func(b []byte) []byte { return frame(frameManifest, 0, 0, b[16:20]) }), FaultProtocol},
		"malformed held":     {reply(frameHeld, func(b []byte) []byte { return frame(frameHeld, 0, idOf(b), b[16:20]) }), FaultProtocol},
		"malformed error": {tamper(piecesFrom(4, func(b []byte) []byte {
			return frame(frameError, 0, idOf(b), nil)
		})), FaultProtocol},
		"malformed farewell": {tamper(piecesFrom(4, func(b []byte) []byte { return frame(frameError, 0, 0, nil) })), FaultProtocol},
		"cancels by itself": {tamper(piecesFrom(4, func(b []byte) []byte {
			return frame(frameError, 0, idOf(b), refusal{codeCancelled, ""}.encode())
		})), FaultProtocol},
		"unknown frame": {tamper(piecesFrom(4, func(b []byte) []byte { b[4] = 77; return b })), FaultProtocol},
		"no hello":      {reply(frameManifest, func([]byte) []byte { return nil }), 0},
		"no list":       {reply(frameHeld, func([]byte) []byte { return nil }), FaultStalled},
		"no answer":     {tamper(piecesFrom(4, func([]byte) []byte { return nil })), FaultStalled},
		"trickles":      {honest("bad", ServerConfig{Library: m, Rate: 1 << 10}), FaultSlow},
		"does not read": {&pipeSource{id: "bad", serve: func(_ context.Context, c *pipeConn) {
			for c.SetDeadline(time.Time{}) == nil {
				time.Sleep(time.Second)
			}
		}}, 0},
		"ends mid-way":     {tamper(piecesFrom(4, func(b []byte) []byte { return b[:100] })), FaultStalled},
		"closes mid-frame": {closing(m, 4), 0},
	}
}

// closing breaks the connection off within its nth piece.
func closing(m *model, n int64) *pipeSource {
	srv := NewServer(ServerConfig{Library: m})
	return &pipeSource{id: "bad", serve: func(ctx context.Context, c *pipeConn) {
		cut := piecesFrom(n, func(b []byte) []byte { return nil })
		c.write = func(nc net.Conn, b []byte) (int, error) {
			if cut(b) == nil {
				nc.Write(b[:len(b)/2])
				nc.Close()
			}
			return nc.Write(b)
		}
		srv.Serve(ctx, c)
	}}
}

// A bad source is found out, what it had right stays, and others complete the download.
func TestBadSources(t *testing.T) {
	m := makeModel(1, 9*mib, mib)
	for name := range badSources(m) {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				tt := badSources(m)[name]
				defer tt.src.wg.Wait()
				sink := newJudge(t, m)
				var said blames
				good := honest("good", ServerConfig{Library: m})
				start := time.Now()
				err := NewClient(ClientConfig{Blame: said.add}).Fetch(t.Context(), Request{
					Model: m.id, Sink: sink, Wait: true,
					Sources: func() []Source {
						if tt.fault != 0 && len(said.of("bad")) == 0 || time.Since(start) < 2*time.Second {
							return []Source{tt.src}
						}
						return []Source{tt.src, good}
					},
				})
				if err != nil {
					t.Fatal(err)
				}
				sink.check(nil)
				if sink.again > 0 {
					t.Errorf("%d bytes were stored twice", sink.again)
				}
				var want []Fault
				if tt.fault != 0 {
					want = []Fault{tt.fault}
				}
				if got := said.of("bad"); !slices.Equal(got, want) {
					t.Errorf("blamed for %v, want %v: %v", got, want, said.all)
				}
				if got := said.of("good"); got != nil {
					t.Errorf("the good source is blamed for %v", got)
				}
			})
		})
	}
}

// With a bad source beside a good one from the start nothing waits for the bad one's end.
func TestBadBesideGood(t *testing.T) {
	m := makeModel(1, 9*mib, mib)
	for name := range badSources(m) {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				bad := badSources(m)[name].src
				defer bad.wg.Wait()
				sink := newJudge(t, m)
				var said blames
				start := time.Now()
				err := NewClient(ClientConfig{Blame: said.add}).Fetch(t.Context(), Request{
					Model: m.id, Sink: sink,
					Sources: these(bad, honest("good", ServerConfig{Library: m, Rate: 4 * mib})),
				})
				if err != nil {
					t.Fatal(err)
				}
				sink.check(nil)
				if took := time.Since(start); took > 15*time.Second { // 2.5 s by the good one alone
					t.Errorf("took %v", took)
				}
				if got := said.of("good"); got != nil {
					t.Errorf("the good source is blamed for %v", got)
				}
			})
		})
	}
}
