//go:build load && cgo && linux

package node

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"kvasird/node/api"
)

const (
	loadClients  = 200
	loadRequests = 10 // of each client
	loadTries    = 300
	placesOfHTTP = 128 // gateway.maxRequests
)

// countVariable names the file that a daemon writes the number of its goroutines
// into when it gets SIGUSR1.
const countVariable = "KVASIR_TEST_GOROUTINES"

func init() {
	path := os.Getenv(countVariable)
	if path == "" {
		return
	}
	asked := make(chan os.Signal, 1)
	signal.Notify(asked, syscall.SIGUSR1)
	go func() {
		for range asked {
			if os.WriteFile(path+".part", []byte(strconv.Itoa(runtime.NumGoroutine())), 0o600) == nil {
				os.Rename(path+".part", path)
			}
		}
	}()
}

// goroutines asks a daemon how many it has.
func (s *swarm) goroutines(path string) int {
	s.t.Helper()
	os.Remove(path)
	s.backbone.cmd.Process.Signal(syscall.SIGUSR1)
	var n int
	eventually(s.t, func() error {
		text, err := os.ReadFile(path)
		if err == nil {
			n, err = strconv.Atoi(string(text))
		}
		return err
	})
	return n
}

// manyClients is what many clients do to one daemon, and what came of it.
type manyClients struct {
	*swarm
	client  *http.Client
	answers map[string]string // by question

	mu     sync.Mutex // guards what follows
	kinds  map[string]int
	busy   int // answers 429
	firsts []time.Duration
	gaps   []time.Duration
	wrong  []error
}

// TestLoad: with many more clients than places, of which some are slow, hang up or
// send nonsense, no answer is wrong, every overload is a 429, and nothing is left.
func TestLoad(t *testing.T) {
	s := newSwarm(t)
	var cancel context.CancelFunc
	s.ctx, cancel = context.WithTimeout(t.Context(), 8*time.Minute)
	defer cancel()
	count := filepath.Join(s.dir, "goroutines")
	t.Setenv(countVariable, count)
	s.runShipped("--sequences", "8", "--context", "8192")
	l := &manyClients{swarm: s, answers: map[string]string{}, client: &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: loadClients}}}
	for _, q := range []string{sumQuestion, "What is the capital of Japan?", "What is the capital of France?", "What is 2 plus 3?", "What sound does a cow make?"} {
		l.answers[q] = reference().answer(t, q, false)
	}
	l.run(1) // the room that load takes once
	l.quiet()
	before, goroutines := s.backbone.usage(t), s.goroutines(count)
	began := time.Now()
	l.run(loadRequests)
	took := time.Since(began)
	l.report(took)
	l.quiet()
	s.backbone.level(t, before)
	eventually(t, func() error {
		if n := s.goroutines(count); n > goroutines+4 {
			return fmt.Errorf("%d goroutines before, %d after", goroutines, n)
		}
		return nil
	})
	l.allPlaces()
}

// run has all clients send their requests, each one after the other.
func (l *manyClients) run(requests int) {
	l.kinds, l.busy, l.firsts, l.gaps = map[string]int{}, 0, nil, nil
	var group sync.WaitGroup
	for c := range loadClients {
		group.Go(func() {
			random := rand.New(rand.NewPCG(uint64(c), 1))
			for i := range requests {
				l.one(random, c+i)
			}
		})
	}
	group.Wait()
	if len(l.wrong) > 0 {
		l.t.Errorf("%d went wrong, first: %v", len(l.wrong), errors.Join(l.wrong[:min(len(l.wrong), 5)]...))
		l.wrong = nil
	}
}

// one sends the n-th kind of request until it is let in.
func (l *manyClients) one(random *rand.Rand, n int) {
	kinds := []struct {
		name string
		send func(*rand.Rand) error
	}{
		{"whole", l.whole}, {"streamed", l.streamed}, {"whole", l.whole}, {"streamed", l.streamed}, {"slow reader", l.slowReader},
		{"whole", l.whole}, {"slow sender", l.slowSender}, {"hung up", l.hungUp}, {"malformed", l.malformed}, {"streamed", l.streamed},
	}
	k := kinds[n%len(kinds)]
	err := errBusy
	for try := 0; errors.Is(err, errBusy) && try < loadTries; try++ {
		if err = k.send(random); errors.Is(err, errBusy) {
			l.mu.Lock()
			l.busy++
			l.mu.Unlock()
			time.Sleep(time.Second + time.Duration(random.IntN(200))*time.Millisecond) // what Retry-After says, and apart
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.kinds[k.name]++
	if err != nil {
		l.wrong = append(l.wrong, fmt.Errorf("%s: %w", k.name, err))
	}
}

// errBusy is a 429 as it must be.
var errBusy = errors.New("all places are taken")

// begin sends a body. A 429 that says when to come back is errBusy, and anything but
// 200 wrong.
func (l *manyClients) begin(ctx context.Context, body io.Reader, size int) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+l.http+"/v1/chat/completions", body)
	if err != nil {
		return nil, err
	}
	req.ContentLength = int64(size)
	resp, err := l.client.Do(req)
	if err != nil {
		return nil, err
	}
	if resp.StatusCode == http.StatusOK {
		return resp, nil
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		return nil, err
	}
	after, _ := strconv.Atoi(resp.Header.Get("Retry-After"))
	if resp.StatusCode == http.StatusTooManyRequests && after >= 1 && after <= 60 && strings.Contains(string(text), `"rate_limit_error"`) {
		return nil, errBusy
	}
	return nil, fmt.Errorf("%d, Retry-After %q: %.200s", resp.StatusCode, resp.Header.Get("Retry-After"), text)
}

// question is one of those that the model knows, as a request's body.
func (l *manyClients) question(random *rand.Rand, stream bool) (body []byte, answer string) {
	questions := make([]string, 0, len(l.answers))
	for q := range l.answers {
		questions = append(questions, q)
	}
	q := questions[random.IntN(len(questions))]
	body, err := json.Marshal(map[string]any{"model": shippedModel, "temperature": 0, "max_tokens": 64, "stream": stream, "messages": []map[string]string{{"role": "user", "content": q}}})
	if err != nil {
		panic(err)
	}
	return body, l.answers[q]
}

func (l *manyClients) whole(random *rand.Rand) error {
	body, answer := l.question(random, false)
	return l.readWhole(bytes.NewReader(body), len(body), answer)
}

func (l *manyClients) readWhole(body io.Reader, size int, answer string) error {
	resp, err := l.begin(l.ctx, body, size)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	var got struct {
		Choices []struct{ Message struct{ Content string } }
	}
	if err := json.NewDecoder(resp.Body).Decode(&got); err != nil {
		return err
	}
	if len(got.Choices) != 1 || got.Choices[0].Message.Content != answer {
		return fmt.Errorf("got %+v, want %q", got.Choices, answer)
	}
	return nil
}

// slowSender sends its body in pieces.
func (l *manyClients) slowSender(random *rand.Rand) error {
	body, answer := l.question(random, false)
	return l.readWhole(&slowly{body: body, pause: 100 * time.Millisecond}, len(body), answer)
}

type slowly struct {
	body  []byte
	pause time.Duration
}

func (r *slowly) Read(b []byte) (int, error) {
	if len(r.body) == 0 {
		return 0, io.EOF
	}
	time.Sleep(r.pause)
	n := copy(b[:min(len(b), 40)], r.body)
	r.body = r.body[n:]
	return n, nil
}

func (l *manyClients) streamed(random *rand.Rand) error { return l.readStream(random, 0) }

func (l *manyClients) slowReader(random *rand.Rand) error {
	return l.readStream(random, 100*time.Millisecond)
}

// readStream pauses after each piece; without a pause, it measures.
func (l *manyClients) readStream(random *rand.Rand, pause time.Duration) error {
	body, answer := l.question(random, true)
	began := time.Now()
	resp, err := l.begin(l.ctx, bytes.NewReader(body), len(body))
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	var times []time.Duration
	_, got, failure := l.swarm.stream(resp.Body, func(int) {
		times = append(times, time.Since(began))
		time.Sleep(pause)
	})
	if got != answer || failure != "" {
		return fmt.Errorf("got %q, error %q, want %q", got, failure, answer)
	}
	if pause > 0 {
		return nil
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.firsts = append(l.firsts, times[0])
	for i := range times[1:] {
		l.gaps = append(l.gaps, times[i+1]-times[i])
	}
	return nil
}

// hungUp goes away in the middle of its body, while it waits, or in the middle of the
// answer.
func (l *manyClients) hungUp(random *rand.Rand) error {
	body, _ := l.question(random, true)
	ctx, cancel := context.WithCancel(l.ctx)
	defer cancel()
	switch random.IntN(3) {
	case 0:
		c, err := net.Dial("tcp", l.http)
		if err != nil {
			return err
		}
		fmt.Fprintf(c, "POST /v1/chat/completions HTTP/1.1\r\nHost: %s\r\nContent-Length: %d\r\n\r\n%s", l.http, len(body), body[:len(body)/2])
		return c.Close()
	case 1:
		timer := time.AfterFunc(time.Duration(random.IntN(50))*time.Millisecond, cancel)
		defer timer.Stop()
	}
	resp, err := l.begin(ctx, bytes.NewReader(body), len(body))
	if ctx.Err() != nil && l.ctx.Err() == nil {
		return nil
	}
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	lines := bufio.NewScanner(resp.Body)
	for n := 0; n < 6 && lines.Scan(); n++ {
	}
	return nil
}

// malformed sends nonsense, which must be told from an overload.
func (l *manyClients) malformed(random *rand.Rand) error {
	body := noRequests[random.IntN(len(noRequests))]
	_, err := l.begin(l.ctx, strings.NewReader(body), len(body))
	if err == nil {
		return fmt.Errorf("%.100q is answered", body)
	}
	if strings.HasPrefix(err.Error(), "400, ") {
		return nil
	}
	return err
}

// quiet waits until nothing runs and no connection is kept.
func (l *manyClients) quiet() {
	l.t.Helper()
	l.client.CloseIdleConnections()
	http.DefaultClient.CloseIdleConnections()
	if _, err := l.backbone.await(l.ctx, func(st *api.Status) bool {
		return st.Tokens != nil && st.Tokens.Running == 0 && st.Tokens.Waiting == 0
	}); err != nil {
		l.t.Fatal(err)
	}
}

// allPlaces wants each place of the door to be free: all but one are taken by
// bodies that do not come, and the last one still answers.
func (l *manyClients) allPlaces() {
	l.t.Helper()
	for range placesOfHTTP - 1 {
		c, err := net.Dial("tcp", l.http)
		if err != nil {
			l.t.Fatal(err)
		}
		defer c.Close()
		fmt.Fprintf(c, "POST /v1/chat/completions HTTP/1.1\r\nHost: %s\r\nContent-Length: 100\r\n\r\n{", l.http)
	}
	time.Sleep(time.Second) // for them to be let in
	l.knowsSums()
	c, err := net.Dial("tcp", l.http)
	if err != nil {
		l.t.Fatal(err)
	}
	defer c.Close()
	fmt.Fprintf(c, "POST /v1/chat/completions HTTP/1.1\r\nHost: %s\r\nContent-Length: 100\r\n\r\n{", l.http)
	time.Sleep(200 * time.Millisecond)
	if status, body := l.post("/v1/chat/completions", "{}"); status != http.StatusTooManyRequests {
		l.t.Errorf("with no place left: %d %s", status, body)
	}
}

func (l *manyClients) report(took time.Duration) {
	total := 0
	for _, n := range l.kinds {
		total += n
	}
	if total != loadClients*loadRequests {
		l.t.Errorf("%d requests ended", total)
	}
	l.t.Logf("%d requests of %d clients in %v: %v; %d times a 429 before", total, loadClients, took.Round(time.Millisecond), l.kinds, l.busy)
	for name, list := range map[string][]time.Duration{"time to first token": l.firsts, "time between tokens": l.gaps} {
		if len(list) == 0 {
			l.t.Errorf("no %s was measured", name)
			continue
		}
		slices.Sort(list)
		l.t.Logf("%s: p50 %v, p99 %v (%d)", name, list[len(list)/2], list[len(list)*99/100], len(list))
	}
	if l.busy == 0 {
		l.t.Error("the daemon was never full")
	}
}
