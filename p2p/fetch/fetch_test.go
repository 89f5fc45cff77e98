package fetch

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

const mib = 1 << 20

// Times in this file are those of a bubble: exact, and nobody waits for them.

func TestFetch(t *testing.T) {
	m := makeModel(1, 9*mib+12345, 3, 2*mib)
	tests := []struct {
		name  string
		spans map[int][]Span
		bytes int64 // that the sink holds then
		trees int
	}{
		{"everything", nil, 11*mib + 12345 + 3, 3},
		{"ranges, widened to groups", map[int][]Span{0: {{100, 1}, {5 * Group, Group + 1}}, 2: {{2*mib - 1, 1}}}, 4 * Group, 2},
		{"the end", map[int][]Span{0: {{9*mib + 12344, 1 << 40}}, 1: {{-5, 10}}}, 12345 + 3, 2},
		{"a tree alone", map[int][]Span{2: nil}, 0, 1},
		{"nothing", map[int][]Span{}, 0, 0},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				sink := newJudge(t, m)
				var last Progress
				err := NewClient(ClientConfig{}).Fetch(t.Context(), Request{
					Model: m.id, Sink: sink, Spans: tt.spans, Sources: these(honest("a", ServerConfig{Library: m})),
					Progress: func(p Progress) { last = p },
				})
				if err != nil {
					t.Fatal(err)
				}
				sink.check(tt.spans)
				trees := 0
				for i := range m.files {
					if sink.HasTree(i) {
						trees++
					}
				}
				if got := sink.bytes(); got != tt.bytes || trees != tt.trees || sink.again != 0 {
					t.Errorf("%d bytes and %d trees, want %d and %d; %d twice", got, trees, tt.bytes, tt.trees, sink.again)
				}
				if last.Done != tt.bytes || last.Total != tt.bytes || last.Left != 0 {
					t.Errorf("last progress %+v", last)
				}
			})
		})
	}
	t.Run("no such file", func(t *testing.T) {
		err := NewClient(ClientConfig{}).Fetch(t.Context(), Request{Model: m.id, Sink: newJudge(t, m), Spans: map[int][]Span{3: nil}})
		if err == nil || !strings.Contains(err.Error(), "no file 3") {
			t.Error(err)
		}
	})
}

func TestManifest(t *testing.T) {
	m, other := makeModel(1, mib, 5), makeModel(2, mib)
	synctest.Test(t, func(t *testing.T) {
		var said blames
		c := NewClient(ClientConfig{VerifyManifest: verifyManifest, Blame: said.add})
		files, err := c.Manifest(t.Context(), honest("a", ServerConfig{Library: m}), m.id)
		if err != nil || !slices.Equal(files, m.files) {
			t.Errorf("%v, %v", files, err)
		}
		var no refusal
		if _, err := c.Manifest(t.Context(), honest("b", ServerConfig{Library: other}), m.id); !errors.As(err, &no) || no.code != codeNoModel {
			t.Errorf("of a source without the model: %v", err)
		}
		var bad *BadSourceError
		if _, err := c.Manifest(t.Context(), honest("c", ServerConfig{Library: always{other}}), m.id); !errors.As(err, &bad) || bad.Fault != FaultModel {
			t.Errorf("of another model: %v", err)
		}
		if got := said.of("c"); !slices.Equal(got, []Fault{FaultModel}) {
			t.Errorf("blamed for %v", got)
		}
		synctest.Wait()
	})
	if _, err := NewClient(ClientConfig{}).Manifest(t.Context(), nil, m.id); err == nil {
		t.Error("a manifest that nobody verifies")
	}
}

// always serves one model under every id.
type always struct{ m *model }

func (a always) Shelf([32]byte) Shelf { return a.m.full() }

func TestNoSource(t *testing.T) {
	m := makeModel(1, 3*mib)
	synctest.Test(t, func(t *testing.T) {
		down := honest("down", ServerConfig{Library: m})
		down.setDown(true)
		half := newJudge(t, m)
		half.trees[0] = m.trees[0]
		if err := half.WriteGroups(0, 0, m.data[0][:mib]); err != nil {
			t.Fatal(err)
		}
		sink := newJudge(t, m)
		err := NewClient(ClientConfig{}).Fetch(t.Context(), Request{Model: m.id, Sink: sink, Sources: these(
			down,
			honest("liar", ServerConfig{Library: wrongShelf{m.full(), true, false}}),
			honest("elsewhere", ServerConfig{Library: makeModel(2, mib)}),
			honest("half", ServerConfig{Library: shelfOf{half}}),
		)})
		var none *NoSourceError
		var bad *BadSourceError
		if !errors.As(err, &none) || !errors.As(err, &bad) || none.Missing != 2*mib || len(none.Sources) != 4 {
			t.Fatalf("got %v", err)
		}
		for _, want := range []string{"2097152 bytes missing", "down: connection refused", "liar: wrong data", "elsewhere: refused", "half: holds nothing"} {
			if !strings.Contains(err.Error(), want) {
				t.Errorf("no %q in %q", want, err)
			}
		}
		if down.opens != maxTries {
			t.Errorf("tried %d times, want %d", down.opens, maxTries)
		}
		if sink.bytes() != mib {
			t.Errorf("%d bytes held, want %d", sink.bytes(), mib)
		}
	})
	err := NewClient(ClientConfig{}).Fetch(t.Context(), Request{Model: m.id, Sink: newJudge(t, m), Sources: these()})
	if err == nil || !strings.Contains(err.Error(), "no source is known") {
		t.Errorf("without sources: %v", err)
	}
}

// shelfOf serves what a sink has.
type shelfOf struct{ s Shelf }

func (l shelfOf) Shelf([32]byte) Shelf { return l.s }

// All sources die; the fetch waits; one returns.
func TestReturn(t *testing.T) {
	m := makeModel(1, 8*mib)
	synctest.Test(t, func(t *testing.T) {
		a, b := honest("a", ServerConfig{Library: m, Rate: mib}), honest("b", ServerConfig{Library: m, Rate: mib})
		sink := newJudge(t, m)
		go func() {
			time.Sleep(2 * time.Second)
			a.setDown(true)
			b.setDown(true)
			time.Sleep(time.Minute)
			if n := sink.bytes(); n < 2*mib || n > 6*mib {
				t.Errorf("%d bytes held when all sources were gone", n)
			}
			b.setDown(false)
		}()
		err := NewClient(ClientConfig{}).Fetch(t.Context(), Request{Model: m.id, Sink: sink, Sources: these(a, b), Wait: true})
		if err != nil {
			t.Fatal(err)
		}
		sink.check(nil)
		if sink.again > 0 {
			t.Errorf("%d bytes were stored twice", sink.again)
		}
	})
}

// A source that appears shares the load and takes work over from a slow one.
func TestNewcomer(t *testing.T) {
	m := makeModel(1, 16*mib)
	synctest.Test(t, func(t *testing.T) {
		slow, fast := NewServer(ServerConfig{Library: m, Rate: 64 << 10}), NewServer(ServerConfig{Library: m, Rate: 2 * mib})
		sources := []Source{serving("slow", slow)}
		start := time.Now()
		sink := newJudge(t, m)
		var said blames
		err := NewClient(ClientConfig{Blame: said.add}).Fetch(t.Context(), Request{Model: m.id, Sink: sink, Sources: func() []Source {
			if time.Since(start) > 5*time.Second && len(sources) == 1 {
				sources = append(sources, serving("fast", fast))
			}
			return sources
		}})
		if err != nil {
			t.Fatal(err)
		}
		sink.check(nil)
		if took := time.Since(start); took > 16*time.Second { // 5 s, then 8 s by the fast one alone
			t.Errorf("took %v", took)
		}
		if n := slow.Stats().Bytes; n < Group {
			t.Errorf("%d bytes from the slow source", n)
		}
	})
}

func serving(id string, srv *Server) *pipeSource {
	return &pipeSource{id: id, serve: func(ctx context.Context, c *pipeConn) { srv.Serve(ctx, c) }}
}

func TestShare(t *testing.T) {
	m := makeModel(1, 48*mib)
	synctest.Test(t, func(t *testing.T) {
		var servers []*Server
		var sources []Source
		for _, id := range []string{"a", "b", "c"} {
			srv := NewServer(ServerConfig{Library: m, Rate: 4 * mib})
			servers, sources = append(servers, srv), append(sources, serving(id, srv))
		}
		sink := newJudge(t, m)
		start := time.Now()
		most := 0
		err := NewClient(ClientConfig{}).Fetch(t.Context(), Request{Model: m.id, Sink: sink, Sources: these(sources...),
			Progress: func(p Progress) { most = max(most, len(p.Sources)) }})
		if err != nil {
			t.Fatal(err)
		}
		sink.check(nil)
		if took := time.Since(start); took > 6*time.Second { // 4 s
			t.Errorf("took %v", took)
		}
		for i, srv := range servers {
			if n := srv.Stats().Bytes; n < 12*mib || n > 20*mib {
				t.Errorf("source %d gave %d bytes of 48 MiB", i, n)
			}
		}
		if most != 3 {
			t.Errorf("%d sources at a time", most)
		}
	})
}

// More sources than are used at a time: the bad ones make room.
func TestManySources(t *testing.T) {
	m := makeModel(1, 4*mib)
	synctest.Test(t, func(t *testing.T) {
		var sources []Source
		for _, id := range []string{"a", "b", "c", "d", "e"} {
			sources = append(sources, honest(id, ServerConfig{Library: wrongShelf{m.full(), true, true}}))
		}
		sources = append(sources, honest("good", ServerConfig{Library: m}))
		sink := newJudge(t, m)
		var most int
		err := NewClient(ClientConfig{Sources: 2}).Fetch(t.Context(), Request{Model: m.id, Sink: sink, Sources: these(sources...),
			Progress: func(p Progress) { most = max(most, len(p.Sources)) }})
		if err != nil {
			t.Fatal(err)
		}
		sink.check(nil)
		if most > 2 {
			t.Errorf("%d sources at a time, want 2", most)
		}
	})
}

// What is interrupted resumes, and nothing is downloaded twice.
func TestResume(t *testing.T) {
	m := makeModel(1, 16*mib)
	synctest.Test(t, func(t *testing.T) {
		srv := NewServer(ServerConfig{Library: m, Rate: 4 * mib})
		sink := newJudge(t, m)
		c := NewClient(ClientConfig{})
		ctx, cancel := context.WithCancel(t.Context())
		sink.wrote = func() {
			if sum(sink.held[0]) >= 6*mib {
				cancel()
			}
		}
		req := Request{Model: m.id, Sink: sink, Sources: these(serving("a", srv))}
		if err := c.Fetch(ctx, req); !errors.Is(err, context.Canceled) {
			t.Fatalf("interrupted: %v", err)
		}
		sink.wrote = nil
		held := sink.bytes()
		before := srv.Stats().Bytes
		if held < 6*mib || held > 12*mib {
			t.Fatalf("%d bytes held after the interruption", held)
		}
		if err := c.Fetch(t.Context(), req); err != nil {
			t.Fatal(err)
		}
		sink.check(nil)
		if got := srv.Stats().Bytes - before; got != 16*mib-held || sink.again != 0 {
			t.Errorf("%d bytes were sent for %d missing; %d stored twice", got, 16*mib-held, sink.again)
		}
	})
}

// The whole groups of a range that breaks off are kept.
func TestBrokenOff(t *testing.T) {
	m := makeModel(1, 8*mib)
	synctest.Test(t, func(t *testing.T) {
		sink := newJudge(t, m)
		src := closing(m, 5) // within the second MiB asked for, or the first
		err := NewClient(ClientConfig{}).Fetch(t.Context(), Request{Model: m.id, Sink: sink, Sources: these(src)})
		var none *NoSourceError
		if !errors.As(err, &none) || none.Missing != 8*mib-sink.bytes() {
			t.Fatal(err)
		}
		if got := sink.bytes(); got == 0 || got%mib == 0 {
			t.Errorf("%d bytes held, want some groups of a range", got)
		}
	})
}

// A fault of this machine ends the fetch with that error, and blames nobody.
func TestLocalFault(t *testing.T) {
	m := makeModel(1, 8*mib)
	synctest.Test(t, func(t *testing.T) {
		full := errors.New("disk full")
		sink := newJudge(t, m)
		sink.wrote = func() {
			if sum(sink.held[0]) >= 2*mib {
				sink.refuse = full
			}
		}
		var said blames
		err := NewClient(ClientConfig{Blame: said.add}).Fetch(t.Context(), Request{
			Model: m.id, Sink: sink, Sources: these(honest("a", ServerConfig{Library: m})), Wait: true,
		})
		if !errors.Is(err, full) || len(said.all) > 0 {
			t.Errorf("%v; blamed: %v", err, said.all)
		}
		sink.refuse, sink.wrote = nil, nil
		if err := NewClient(ClientConfig{}).Fetch(t.Context(), Request{Model: m.id, Sink: sink, Sources: these(honest("a", ServerConfig{Library: m}))}); err != nil {
			t.Fatal(err)
		}
		sink.check(nil)
	})
}

// Sources that have different parts make a whole, and one that is itself downloading is
// asked again.
func TestParts(t *testing.T) {
	m := makeModel(1, 8*mib)
	synctest.Test(t, func(t *testing.T) {
		left, right := newJudge(t, m), newJudge(t, m)
		left.trees[0], right.trees[0] = m.trees[0], m.trees[0]
		for _, err := range []error{
			left.WriteGroups(0, 0, m.data[0][:3*mib]), right.WriteGroups(0, 2*mib, m.data[0][2*mib:5*mib]),
		} {
			if err != nil {
				t.Fatal(err)
			}
		}
		go func() {
			time.Sleep(time.Second)
			if err := right.WriteGroups(0, 5*mib, m.data[0][5*mib:]); err != nil {
				t.Error(err)
			}
		}()
		sink := newJudge(t, m)
		err := NewClient(ClientConfig{}).Fetch(t.Context(), Request{Model: m.id, Sink: sink, Sources: these(
			honest("left", ServerConfig{Library: shelfOf{left}}), honest("right", ServerConfig{Library: shelfOf{right}}),
		)})
		if err != nil {
			t.Fatal(err)
		}
		sink.check(nil)
	})
}

// evicting says that it holds all but drops a part before it is asked for it.
type evicting struct {
	*wholeShelf
	gone atomic.Bool
}

func (s *evicting) Shelf([32]byte) Shelf { return s }
func (s *evicting) Held(file int) []Span {
	if s.gone.Load() {
		return []Span{{0, 2 * mib}}
	}
	return s.wholeShelf.Held(file)
}

func (s *evicting) ReadAt(file int, p []byte, off int64) (int, error) {
	if off+int64(len(p)) > 2*mib {
		s.gone.Store(true)
		return 0, errors.New("gone")
	}
	return s.wholeShelf.ReadAt(file, p, off)
}

// A source that dropped what it had is not a liar.
func TestEvicted(t *testing.T) {
	m := makeModel(1, 8*mib)
	synctest.Test(t, func(t *testing.T) {
		var said blames
		sink := newJudge(t, m)
		sources := []Source{honest("evicting", ServerConfig{Library: &evicting{wholeShelf: m.full()}})}
		start := time.Now()
		err := NewClient(ClientConfig{Blame: said.add}).Fetch(t.Context(), Request{Model: m.id, Sink: sink, Sources: func() []Source {
			if time.Since(start) > time.Second && len(sources) == 1 {
				sources = append(sources, honest("good", ServerConfig{Library: m}))
			}
			return sources
		}})
		if err != nil || len(said.all) > 0 {
			t.Errorf("%v; blamed: %v", err, said.all)
		}
		sink.check(nil)
	})
}

func TestDownloadLimit(t *testing.T) {
	m := makeModel(1, 20*mib)
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		sink := newJudge(t, m)
		var seen []Progress
		err := NewClient(ClientConfig{Rate: 2 * mib}).Fetch(t.Context(), Request{Model: m.id, Sink: sink,
			Sources:  these(honest("a", ServerConfig{Library: m}), honest("b", ServerConfig{Library: m})),
			Progress: func(p Progress) { seen = append(seen, p) }})
		if err != nil {
			t.Fatal(err)
		}
		if took := time.Since(start); took < 9*time.Second || took > 11*time.Second {
			t.Errorf("20 MiB at 2 MiB/s took %v", took)
		}
		mid := seen[len(seen)/2]
		if mid.Rate < 1.5*mib || mid.Rate > 2.5*mib || mid.Left < 3*time.Second || mid.Left > 7*time.Second {
			t.Errorf("progress half-way: %+v", mid)
		}
	})
}

// What another source did meanwhile is cancelled, so that a slow one goes on with the rest.
func TestCancelled(t *testing.T) {
	m := makeModel(1, 2*mib)
	synctest.Test(t, func(t *testing.T) {
		half := newJudge(t, m)
		half.trees[0] = m.trees[0]
		if err := half.WriteGroups(0, 0, m.data[0][:mib]); err != nil {
			t.Fatal(err)
		}
		slow := NewServer(ServerConfig{Library: m, Rate: 64 << 10})
		sources := []Source{serving("slow", slow)}
		start := time.Now()
		sink := newJudge(t, m)
		err := NewClient(ClientConfig{}).Fetch(t.Context(), Request{Model: m.id, Sink: sink, Sources: func() []Source {
			if time.Since(start) > time.Second && len(sources) == 1 {
				sources = append(sources, honest("fast", ServerConfig{Library: shelfOf{half}}))
			}
			return sources
		}})
		if err != nil {
			t.Fatal(err)
		}
		sink.check(nil)
		if n := slow.Stats().Bytes; n > mib+mib/4 {
			t.Errorf("the slow source sent %d bytes, though the first MiB was cancelled after a second", n)
		}
	})
}

// A limit does not turn a deadline into a fault of the sources.
func TestDeadline(t *testing.T) {
	m := makeModel(1, 8*mib)
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		err := NewClient(ClientConfig{Rate: Group}).Fetch(ctx, Request{
			Model: m.id, Sink: newJudge(t, m), Sources: these(honest("a", ServerConfig{Library: m})),
		})
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Error(err)
		}
	})
}

// One trickler among fast sources is dropped for that, far above the floor.
func TestFarBelow(t *testing.T) {
	m := makeModel(1, 30*mib)
	synctest.Test(t, func(t *testing.T) {
		var said blames
		sink := newJudge(t, m)
		err := NewClient(ClientConfig{Blame: said.add}).Fetch(t.Context(), Request{Model: m.id, Sink: sink, Sources: these(
			honest("slow", ServerConfig{Library: m, Rate: 8 << 10}), honest("fast", ServerConfig{Library: m, Rate: mib}),
		)})
		if err != nil {
			t.Fatal(err)
		}
		if got := said.of("slow"); len(got) == 0 || got[0] != FaultSlow {
			t.Errorf("blamed for %v", got)
		}
		sink.check(nil)
	})
}
