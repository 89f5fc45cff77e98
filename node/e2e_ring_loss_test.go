//go:build cgo && linux

package node

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"slices"
	"sync"
	"testing"
	"time"

	"kvasird/node/api"
)

// blown is a network with a node that has the whole shipped model, stages that have
// room for a part of it, and an entry that answers by them alone.
type blown struct {
	*network
	at     string // where the source listens
	id     string // of the model
	stages []*blownStage
}

type blownStage struct {
	*child
	memory string
	addr   string        // IP address that it listens at
	window api.LayerSpan // that it served when hold looked
}

const blownSequences = 12

func newBlown(t *testing.T, bound time.Duration, replicas int, memory ...string) *blown {
	t.Helper()
	n := newNetwork(t, NewNetwork{Replicas: replicas})
	ctx, cancel := context.WithTimeout(context.Background(), bound)
	t.Cleanup(cancel)
	n.ctx = ctx
	st := n.sees(n.join("source", "--model", n.whole, "--role", "worker"), serving) // which answers nobody
	r := &blown{network: n, at: localAddr(st), id: st.Model.ID}
	for i, m := range memory {
		r.stages = append(r.stages, &blownStage{memory: m, addr: fmt.Sprintf("127.0.0.%d", 11+i)})
		r.begin(i)
	}
	r.backbone = n.start("entry", append(r.room(), "--listen", "/ip4/127.0.0.10/tcp/0", "--http", "127.0.0.1:0", "--role", "entry")...)
	n.http = n.sees(r.backbone, func(st *api.Status) bool { return st.HTTP != "" }).HTTP
	return r
}

func (r *blown) room() []string {
	return []string{"--network", r.file, "--peer", r.at, "--context", fmt.Sprint(blownSequences * 170), "--sequences", fmt.Sprint(blownSequences)}
}

// begin starts stage i, or starts it again with what it had.
func (r *blown) begin(i int) {
	r.t.Helper()
	s := r.stages[i]
	s.child = r.start(fmt.Sprint("s", i), append(r.room(), "--listen", "/ip4/"+s.addr+"/tcp/0", "--http", Off, "--model", r.id, "--role", "stage", "--memory", s.memory)...)
}

// hold waits until every stage serves a window, the entry counts so many chains, and
// a canary went round.
func (r *blown) hold(chains int) {
	r.t.Helper()
	for _, s := range r.stages {
		st := r.sees(s.child, func(st *api.Status) bool {
			return st.Volunteer != nil && len(st.Volunteer.Windows) == 1 && st.Volunteer.Windows[0].State == api.PartServing
		})
		s.window = st.Volunteer.Windows[0].Layers
	}
	for {
		maps, err := r.backbone.client().Coverage(r.ctx)
		if err == nil && len(maps) == 1 && maps[0].Ring != nil && maps[0].Ring.Chains >= chains {
			break
		}
		select {
		case <-r.ctx.Done():
			r.t.Fatalf("the entry does not count %d chains: %+v, %v", chains, maps, err)
		case <-time.After(50 * time.Millisecond):
		}
	}
	r.isReady(r.backbone)
}

// taken is how many sequences of a stage are in use, -1 if it does not say.
func (s *blownStage) taken(ctx context.Context) int {
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	st, err := s.client().Status(ctx)
	if err != nil || st.Volunteer == nil || len(st.Volunteer.Windows) != 1 {
		return -1
	}
	return st.Volunteer.Windows[0].Sequences - st.Volunteer.Windows[0].Free
}

// freed waits until no sequence is taken on stages that run, and returns how long
// that took.
func (r *blown) freed() time.Duration {
	r.t.Helper()
	began := time.Now()
	for i, s := range r.stages {
		for n := s.taken(r.ctx); n != 0; n = s.taken(r.ctx) {
			select {
			case <-s.exited:
				n = 0
			default:
			}
			if n == 0 {
				break
			}
			if time.Since(began) > 30*time.Second {
				r.t.Fatalf("%d sequences of stage %d are still taken", n, i)
			}
			time.Sleep(10 * time.Millisecond)
		}
	}
	return time.Since(began)
}

// busier is the stage of a window that has more sequences taken now.
func (r *blown) busier(w api.LayerSpan) (at int) {
	most := -2
	for i, s := range r.stages {
		if n := s.taken(r.ctx); s.window == w && n > most {
			at, most = i, n
		}
	}
	return at
}

// askers are clients that ask without a pause, each for one answer after the other.
type askers struct {
	loops sync.WaitGroup
	stop  chan struct{}

	mu      sync.Mutex    // guards the rest
	answers []int         // of each client
	gap     time.Duration // the longest without a token
}

// sureQuestions have answers of which the shipped model is sure, so that they are the
// same in whatever batches they are computed.
var sureQuestions = append([]string{"What is the capital of France?", "What is the capital of Egypt?", "What is 3 plus 4?"}, questions...)

func (r *blown) asking(clients int) *askers {
	for _, q := range sureQuestions {
		reference().answer(r.t, q, false)
	}
	a := &askers{stop: make(chan struct{}), answers: make([]int, clients)}
	for i := range clients {
		a.loops.Go(func() {
			for k := i; ; k++ {
				select {
				case <-a.stop:
					return
				default:
				}
				r.one(a, i, sureQuestions[k%len(sureQuestions)])
			}
		})
	}
	return a
}

// one asks for client i.
func (r *blown) one(a *askers, i int, question string) {
	req := long(question)
	delete(req, "logit_bias")
	last, gap := time.Now(), time.Duration(0)
	status, got, body := r.chat(req, func(int) {
		gap = max(gap, time.Since(last))
		last = time.Now()
	})
	gap = max(gap, time.Since(last))
	want := reference().answer(r.t, question, false)
	a.mu.Lock()
	defer a.mu.Unlock()
	a.answers[i]++
	a.gap = max(a.gap, gap)
	if status != http.StatusOK || got != want || body != "" {
		r.t.Errorf("%s\nstatus %d after %v, error %q\n got %q\nwant %q", question, status, gap.Round(time.Millisecond), body, got, want)
	}
}

// through waits until every client has had two more answers: then each had one that
// was begun after the call. It returns how many all have had, and the longest time
// without a token since it was called last.
func (a *askers) through(r *blown) (answers int, gap time.Duration) {
	r.t.Helper()
	a.mu.Lock()
	before := slices.Clone(a.answers)
	a.mu.Unlock()
	for i := range before {
		for {
			a.mu.Lock()
			now := a.answers[i]
			a.mu.Unlock()
			if now >= before[i]+2 {
				break
			}
			if r.ctx.Err() != nil {
				r.t.Fatalf("client %d gets no more answers", i)
			}
			time.Sleep(5 * time.Millisecond)
		}
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, n := range a.answers {
		answers += n
	}
	gap, a.gap = a.gap, 0
	return answers, gap
}

func (a *askers) end() {
	close(a.stop)
	a.loops.Wait()
}

// gone asks for a long answer and goes away after a few pieces of it.
func (r *blown) gone() {
	r.t.Helper()
	ctx, cancel := context.WithCancel(r.ctx)
	defer cancel()
	ask := long(questions[0])
	ask["stream"], ask["max_tokens"] = true, 120
	data, err := json.Marshal(ask)
	if err != nil {
		r.t.Fatal(err)
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+r.http+"/v1/chat/completions", bytes.NewReader(data))
	if err != nil {
		r.t.Fatal(err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		r.t.Fatal(err)
	}
	defer resp.Body.Close()
	if _, err := io.ReadFull(resp.Body, make([]byte, 600)); err != nil || resp.StatusCode != http.StatusOK {
		r.t.Errorf("status %d, %v", resp.StatusCode, err)
	}
}

// cancelled asks by the control socket and cancels after a few tokens.
func (r *blown) cancelled() {
	r.t.Helper()
	enough := errors.New("enough")
	n := 0
	_, err := r.backbone.client().Ask(r.ctx, api.AskRequest{Prompt: questions[1], MaxTokens: 120}, func(ev api.AskEvent) error {
		if n++; n > 3 {
			return enough
		}
		return nil
	})
	if !errors.Is(err, enough) {
		r.t.Errorf("cancelled after %d events: %v", n, err)
	}
}

// TestRingLosesStages: a client that leaves frees every stage; a stage that is killed
// under answers is replaced; one that cannot be replaced is an error that says so, and
// the ring answers again when it is back.
func TestRingLosesStages(t *testing.T) {
	r := newBlown(t, joinTime, 2, "21MB", "21MB", "21MB", "21MB")
	began := time.Now()
	r.hold(2)
	t.Logf("two rings of two after %v", time.Since(began).Round(100*time.Millisecond))
	r.sameSureAnswer(questions[0])
	for name, leave := range map[string]func(){"disconnect": r.gone, "cancel": r.cancelled} {
		leave()
		leave()
		t.Logf("%s: all sequences free %v later", name, r.freed().Round(time.Millisecond))
	}

	a := r.asking(4)
	a.through(r)
	kill := func(i int) { r.stages[i].cmd.Process.Kill(); <-r.stages[i].exited }
	first := r.busier(r.stages[rand.IntN(len(r.stages))].window)
	window := r.stages[first].window
	kill(first)
	answers, gap := a.through(r)
	a.end()
	t.Logf("killed layers %v: %d answers, the longest gap %v", window, answers, gap.Round(time.Millisecond))

	r.freed()
	r.stages[first].window = api.LayerSpan{} // of no one
	other := r.busier(window)
	status, text, failure := r.chat(long(questions[0]), func(n int) {
		if n == 5 {
			kill(other)
		}
	})
	layers := fmt.Sprintf("layers %d:%d", window.Begin, window.End)
	if status != http.StatusOK || text == "" || says(failure, layers, "no replacement") != nil {
		t.Errorf("status %d, %q, the stream ended with %q, want the layers that are missing", status, text, failure)
	}
	t.Logf("without a replacement: %s; all sequences free %v later", failure, r.freed().Round(time.Millisecond))
	began = time.Now()
	status, _, body := r.chat(long(questions[0]), nil)
	if status != http.StatusServiceUnavailable || says(body, layers) != nil || time.Since(began) > 20*time.Second {
		t.Errorf("status %d after %v, want 503 and the layers: %s", status, time.Since(began), body)
	}
	for r.readyz() == nil {
		if r.ctx.Err() != nil {
			t.Fatal("the entry says that it is ready, without a stage")
		}
		time.Sleep(20 * time.Millisecond)
	}
	began = time.Now()
	r.begin(other)
	r.isReady(r.backbone)
	r.sameSureAnswer(questions[1])
	t.Logf("answers again %v after the stage was started", time.Since(began).Round(100*time.Millisecond))
	r.freed()
}
