package meter

import (
	"context"
	"encoding/hex"
	"net"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	"kvasird/p2p"
	"kvasird/settle"
)

// town is nodes that show each other passes.
type town struct {
	t      *testing.T
	till   *till
	meters map[string]*Meter
	rows   map[string]func(string, int) error // what each computes for whom, without a window

	mu    sync.Mutex // guards dials
	dials []string   // "from to"
}

// road is a node's way to the others.
type road struct {
	*town
	from string
}

func (r road) Dial(_ context.Context, peerID string) (Conn, error) {
	near, far := net.Pipe()
	for name, m := range r.meters {
		if peerOf(name) == peerID {
			r.mu.Lock()
			r.dials = append(r.dials, r.from+" "+name)
			r.mu.Unlock()
			go func() {
				defer far.Close()
				m.Serve(peerOf(r.from), far)
			}()
		}
	}
	return near, nil
}

func newTown(t *testing.T, workers map[string][]string, names ...string) *town {
	t.Helper()
	d, _ := newTill(t)
	w := &town{t: t, till: d, meters: map[string]*Meter{}, rows: map[string]func(string, int) error{}}
	for _, name := range names {
		g, err := NewGrants(GrantsConfig{Network: testNetwork, Self: node(name), Settlement: node("settlement"), Params: settle.DefaultParams(),
			Credits: d.credits, Now: func() time.Time { return d.now }})
		if err != nil {
			t.Fatal(err)
		}
		w.rows[name] = g.Window(testModel(), wholeModel, true, false)
		w.meters[name], err = New(Config{Signer: newTestSigner(t, name, newMemory()), Dialer: road{w, name}, Grants: g, Wait: time.Second,
			Now: func() time.Time { return d.now }, Workers: func(string) (peers []string) {
				for _, to := range workers[name] {
					peers = append(peers, peerOf(to))
				}
				return peers
			}})
		if err != nil {
			t.Fatal(err)
		}
	}
	return w
}

// TestPassesAreShown: an entry shows its pass to who computes, which shows it to its workers, and
// no further; each computes for who showed it.
func TestPassesAreShown(t *testing.T) {
	w := newTown(t, map[string][]string{"carrier": {"w1", "w2"}, "w1": {"far"}}, "entry", "carrier", "w1", "w2", "far", "late")
	_, record := w.till.pass("entry", 1, 100)
	ctx, end := context.WithCancel(t.Context())
	w.meters["entry"].Show(ctx, record, []string{peerOf("carrier")}, true)
	for _, to := range [][2]string{{"entry", "carrier"}, {"carrier", "w1"}, {"carrier", "w2"}} {
		if n := takes(t, w.rows[to[1]], to[0]); n != 150 {
			t.Errorf("%s computes %d rows for %s", to[1], n, to[0])
		}
	}
	if n := takes(t, w.rows["far"], "w1") + takes(t, w.rows["w1"], "entry"); n != 0 {
		t.Errorf("%d rows are computed where nothing was shown", n)
	}
	// who comes later, or forgot, is shown what runs when it asks
	for _, from := range []string{"entry", "carrier"} {
		w.meters[from].ShowMore("model", peerOf("late"))
		for i := 0; w.rows["late"](peerOf(from), 1) != nil; i++ {
			if i > 1000 {
				t.Fatalf("%s shows nothing more", from)
			}
			time.Sleep(time.Millisecond)
		}
	}
	end()
	for i := 0; len(w.meters["entry"].running.begin("model", peerOf("w1"), w.till.now)) > 0; i++ {
		if w.meters["entry"].running.done(peerOf("w1")); i > 1000 {
			t.Fatal("what has ended is shown")
		}
		time.Sleep(time.Millisecond)
	}
}

// TestStalledPeersHoldUpNobody: of peers that take no pass an answer waits a moment, and only once;
// others are shown it meanwhile, and nothing is left when the meter is closed.
func TestStalledPeersHoldUpNobody(t *testing.T) {
	w := newTown(t, nil, "entry", "worker")
	m := w.meters["entry"]
	var peers []string
	for i := range askedAtOnce {
		peers = append(peers, peerOf("stalled "+string(rune('a'+i)))) // nobody reads what they are sent
	}
	peers = append(peers, peerOf("worker"))
	shows := func(request int) time.Duration {
		_, record := w.till.pass("entry", request, 100)
		began := time.Now()
		m.Show(t.Context(), record, peers, false)
		return time.Since(began)
	}
	if took := shows(1); took > showTime/2 {
		t.Errorf("the first answer waits %v", took)
	}
	shown := func(rows int) {
		t.Helper()
		for began := time.Now(); rows > 0; rows -= takes(t, w.rows["worker"], "entry") {
			if time.Since(began) > showTime/2 {
				t.Fatalf("the other one is not shown it: it computes %d rows less", rows)
			}
			time.Sleep(time.Millisecond)
		}
	}
	shown(150)
	for began := time.Now(); len(m.running.lateOnes(time.Now())) < askedAtOnce && time.Since(began) < showTime/2; {
		time.Sleep(time.Millisecond)
	}
	took := time.Duration(0)
	for request := range 2 * mostAtPeer {
		took += shows(2 + request)
	}
	if took > 2*mostAtPeer*showWait/2 {
		t.Errorf("others wait %v together", took)
	}
	shown(2 * mostAtPeer * 150)
	m.running.mu.Lock()
	for peer, n := range m.running.at {
		if n > mostAtPeer {
			t.Errorf("%s is shown %d at a time", peer, n)
		}
	}
	m.running.mu.Unlock()
	began := time.Now()
	if err := m.Close(); err != nil || time.Since(began) > showTime/2 || len(m.running.at) > 0 {
		t.Errorf("%v after %v, %d peers are still shown passes", err, time.Since(began), len(m.running.at))
	}
	if shows(100); len(m.running.at) > 0 {
		t.Error("after its end it shows passes")
	}
}

// TestShownOnOnce: a carrier shows a pass to its workers once, however often an entry shows it, and so
// many of an entry in a minute at most.
func TestShownOnOnce(t *testing.T) {
	w := newTown(t, map[string][]string{"carrier": {"w1"}}, "entry", "carrier", "w1")
	shows := func(from, count int) (err error) {
		var s show
		for i := range count {
			p, record := w.till.pass("entry", from+i, 100)
			s.Passes = append(s.Passes, lentPass{record, p.Lend(keyOf("entry"), node("carrier"))})
		}
		return w.meters["carrier"].take(peerOf("entry"), s)
	}
	dials := func() int {
		w.mu.Lock()
		defer w.mu.Unlock()
		return len(w.dials)
	}
	for range 3 {
		if err := shows(0, 2); err != nil || dials() != 1 {
			t.Errorf("%v, shown on %d times", err, dials())
		}
	}
	w.meters["carrier"].running.countOn(node("entry"), w.till.now, mostShownOn-3)
	if err := shows(2, 1); err != nil || dials() != 2 {
		t.Errorf("the last of a minute: %v, shown on %d times", err, dials())
	}
	before := dials()
	if err := shows(mostShownOn, 2); err == nil || !strings.Contains(err.Error(), "show the others later") || dials() != before {
		t.Errorf("too many: %v, shown on %d times more", err, dials()-before)
	}
	w.till.now = w.till.now.Add(shownOnIn)
	if err := shows(mostShownOn, 2); err != nil || dials() != before+1 {
		t.Errorf("a minute later: %v", err)
	}
}

// TestShowBytes: the frame has one encoding.
func TestShowBytes(t *testing.T) {
	s := show{Version: version, Passes: []lentPass{{[]byte{7}, settle.Signature{8}}}}
	want := "a2" + "0103" + "0281" + "a2" + "014107" + "025840" + "08" + strings.Repeat("00", 63)
	got := encodeAsk(s)
	if hex.EncodeToString(got) != want {
		t.Errorf("got  %x\nwant %s", got, want)
	}
	if back, err := decodeShow(got); err != nil || !reflect.DeepEqual(back, s) {
		t.Errorf("%+v, %v", back, err)
	}
}

func TestShowRefused(t *testing.T) {
	w := newTown(t, nil, "worker", "entry")
	p, record := w.till.pass("entry", 1, 100)
	lent := p.Lend(keyOf("entry"), node("worker"))
	good := show{Version: version, Passes: []lentPass{{record, lent}}}
	many := show{Version: version, Passes: make([]lentPass, mostLent+1)}
	for name, tt := range map[string]struct {
		by      string
		payload []byte
		flags   uint8
		want    string
	}{
		"version":        {"entry", encodeAsk(show{Version: 2, Passes: good.Passes}), 0, "version 2"},
		"nothing":        {"entry", encodeAsk(show{Version: version}), 0, "0 passes"},
		"many":           {"entry", encodeAsk(many), 0, "65 passes"},
		"trailing bytes": {"entry", append(encodeAsk(good), 0), 0, "show"},
		"flags":          {"entry", encodeAsk(good), 1, "flags 1"},
		"not its own":    {"stranger", encodeAsk(good), 0, "pass 0: the pass of"},
		"no pass":        {"entry", encodeAsk(show{Version: version, Passes: []lentPass{{nil, lent}}}), 0, "not well formed"},
		"good":           {"entry", encodeAsk(good), 0, ""},
	} {
		near, far := net.Pipe()
		go func() {
			defer far.Close()
			w.meters["worker"].Serve(peerOf(tt.by), far)
		}()
		if err := p2p.NewFrameWriter(near, maxAsk).Write(p2p.Frame{Type: frameShow, Flags: tt.flags, Payload: tt.payload}); err != nil {
			t.Fatal(err)
		}
		f, err := p2p.NewFrameReader(near, maxText).Next()
		if err != nil || (f.Type == frameShown) != (tt.want == "") || !strings.Contains(string(f.Payload), tt.want) {
			t.Errorf("%s: type %d, %q, %v", name, f.Type, f.Payload, err)
		}
		near.Close()
	}
}

func FuzzShow(f *testing.F) {
	f.Add(encodeAsk(show{Version: version, Passes: []lentPass{{[]byte{7}, settle.Signature{8}}}}))
	f.Fuzz(func(t *testing.T, b []byte) {
		s, err := decodeShow(b)
		if err == nil && string(encodeAsk(s)) != string(b) {
			t.Errorf("%x has another encoding", b)
		}
	})
}
