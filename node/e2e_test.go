//go:build cgo && linux

package node

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"kvasird/ggml"
	"kvasird/ggml/gguf"
	"kvasird/ggml/tiny"
	"kvasird/node/api"
	"kvasird/node/engine"
)

// The test binary is also the daemon: startChild runs it again.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && (os.Args[1] == "run" || os.Args[1] == "probe" || os.Args[1] == "demo") {
		if err := childMain(os.Args[1], os.Args[2:]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

func childMain(command string, args []string) error {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	switch command {
	case "probe":
		return ServeProbe(os.Stdin, os.Stdout)
	case "demo":
		return Demo(ctx, os.Stdout)
	}
	set := flag.NewFlagSet("run", flag.ContinueOnError)
	load := ConfigFlags(set)
	if err := set.Parse(args); err != nil {
		return err
	}
	cfg, err := load()
	if err != nil {
		return err
	}
	log, err := OpenLog(cfg.Log, os.Stderr)
	if err != nil {
		return err
	}
	defer log.Close()
	return Run(ctx, cfg, log.Logger, func(*Node) {})
}

// swarm is a backbone without experts and its workers, all processes.
type swarm struct {
	t        *testing.T
	ctx      context.Context
	dir      string
	whole    string // the full model file
	family   family
	workers  []*child
	addrs    []string
	backbone *child
	http     string
}

func newSwarm(t *testing.T) *swarm {
	t.Helper()
	// socket paths are short, so not t.TempDir
	dir, err := os.MkdirTemp("", "kv-e2e-")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	s := &swarm{t: t, ctx: ctx, dir: dir}
	t.Cleanup(func() {
		for _, c := range s.family.list {
			c.cmd.Process.Signal(syscall.SIGCONT)
			c.cmd.Process.Signal(syscall.SIGTERM)
		}
		s.family.stop()
		cancel()
		os.RemoveAll(dir)
		if t.Failed() {
			for _, c := range s.family.list {
				t.Logf("last words of %s:\n%s", c.name, c.lastWords())
			}
		}
	})
	if s.whole, err = tiny.Write(dir); err != nil {
		t.Fatal(err)
	}
	return s
}

// worker starts a worker for these slices at a port of its own choice, or, when
// it ran before under that name, at the same port with the same identity.
func (s *swarm) worker(name string, args ...string) *child {
	s.t.Helper()
	listen := "/ip4/127.0.0.1/tcp/0"
	for i, c := range s.workers {
		if c.name == name {
			listen, _, _ = strings.Cut(s.addrs[i], "/p2p/")
		}
	}
	c := s.start(name, append([]string{"--model", s.whole, "--role", "worker", "--listen", listen, "--http", Off}, args...)...)
	st, err := c.await(s.ctx, serving)
	if err != nil {
		s.t.Fatal(err)
	}
	s.workers, s.addrs = append(s.workers, c), append(s.addrs, localAddr(st))
	return c
}

func (s *swarm) start(name string, args ...string) *child {
	s.t.Helper()
	c, err := s.family.start(s.dir, name, append([]string{"--drafts", Off, "--threads", "1"}, args...)...) // sums as in a model alone
	if err != nil {
		s.t.Fatal(err)
	}
	return c
}

// run starts the backbone and waits until it is ready.
func (s *swarm) run(args ...string) {
	s.t.Helper()
	m, err := gguf.OpenModel(s.whole)
	if err != nil {
		s.t.Fatal(err)
	}
	defer m.Close()
	sparse := filepath.Join(s.dir, "backbone.gguf")
	if err := gguf.WriteBackbone(s.ctx, sparse, m); err != nil {
		s.t.Fatal(err)
	}
	args = append([]string{"--model", sparse, "--listen", "/ip4/127.0.0.1/tcp/0", "--http", "127.0.0.1:0"}, args...)
	for _, a := range s.addrs {
		args = append(args, "--peer", a)
	}
	s.backbone = s.start("backbone", args...)
	st, err := s.backbone.await(s.ctx, serving)
	if err != nil {
		s.t.Fatal(err)
	}
	s.http = st.HTTP
}

// long asks for 64 tokens whatever the model would end.
func long(question string) map[string]any {
	return map[string]any{
		"model": "backbone", "max_tokens": 64, "temperature": 0,
		"messages":   []map[string]string{{"role": "user", "content": question}},
		"logit_bias": endBias(),
	}
}

// endBias keeps the shipped model from ending its answer.
var endBias = sync.OnceValue(func() map[string]float64 {
	bias := map[string]float64{}
	for _, t := range reference().ends {
		bias[fmt.Sprint(t)] = -100
	}
	return bias
})

// chat posts a request and returns the status, the text, and the body when it
// is not 200. on is called at every piece of a stream.
func (s *swarm) chat(req map[string]any, on func(n int)) (status int, text string, body string) {
	s.t.Helper()
	req["stream"] = on != nil
	data, err := json.Marshal(req)
	if err != nil {
		s.t.Fatal(err)
	}
	post, err := http.NewRequestWithContext(s.ctx, http.MethodPost, "http://"+s.http+"/v1/chat/completions", bytes.NewReader(data))
	if err != nil {
		s.t.Fatal(err)
	}
	resp, err := http.DefaultClient.Do(post)
	if err != nil {
		s.t.Fatal(err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK || on == nil {
		data, _ := io.ReadAll(resp.Body)
		var whole struct {
			Choices []struct{ Message struct{ Content string } }
		}
		if json.Unmarshal(data, &whole) == nil && len(whole.Choices) == 1 {
			text = whole.Choices[0].Message.Content
		}
		return resp.StatusCode, text, string(data)
	}
	return s.stream(resp.Body, on)
}

func (s *swarm) stream(r io.Reader, on func(n int)) (status int, text string, body string) {
	lines := bufio.NewScanner(r)
	for n := 0; lines.Scan(); {
		data, ok := strings.CutPrefix(lines.Text(), "data: ")
		if !ok {
			continue
		}
		var ev struct {
			Choices []struct{ Delta struct{ Content string } }
			Error   *struct{ Message string }
		}
		if data == "[DONE]" {
			return http.StatusOK, text, body
		}
		if err := json.Unmarshal([]byte(data), &ev); err != nil {
			s.t.Fatalf("event %q: %v", data, err)
		}
		if ev.Error != nil {
			body = ev.Error.Message
		}
		if len(ev.Choices) > 0 && ev.Choices[0].Delta.Content != "" {
			text += ev.Choices[0].Delta.Content
			n++
			on(n)
		}
	}
	return http.StatusOK, text, body
}

// aloneModel is the shipped model in this process, the reference of all tests.
type aloneModel struct {
	model *ggml.Model
	eng   *engine.Engine
	ends  []int32

	mu   sync.Mutex // guards said, and is held for each answer: beside others sums round differently
	said map[asking]string
}

type asking struct {
	question string
	endless  bool
}

var reference = sync.OnceValue(func() *aloneModel {
	rt, err := ggml.Open(ggml.Config{})
	if err != nil {
		panic(err)
	}
	dir, err := os.MkdirTemp("", "kv-alone-")
	if err != nil {
		panic(err)
	}
	defer os.RemoveAll(dir)
	path, err := tiny.Write(dir)
	if err != nil {
		panic(err)
	}
	a := &aloneModel{said: map[asking]string{}}
	if a.model, err = rt.LoadModel(ggml.ModelConfig{Path: path}); err != nil {
		panic(err)
	}
	if a.eng, err = engine.Open(engine.Config{Model: a.model, Context: 1024, Threads: 1}); err != nil {
		panic(err)
	}
	for t := range a.model.VocabSize() {
		if a.model.IsEOG(ggml.Token(t)) {
			a.ends = append(a.ends, int32(t))
		}
	}
	return a
})

// answer is what the model alone answers to a question, greedy: 64 tokens when it
// is not allowed to end, else at most as many.
func (a *aloneModel) answer(t *testing.T, question string, endless bool) string {
	t.Helper()
	a.mu.Lock()
	defer a.mu.Unlock()
	if text, ok := a.said[asking{question, endless}]; ok {
		return text
	}
	prompt, err := a.eng.Tokenize("<|im_start|>user\n" + question + "<|im_end|>\n<|im_start|>assistant\n")
	if err != nil {
		t.Fatal(err)
	}
	bias := map[int32]float32{}
	for _, e := range a.ends {
		if endless {
			bias[e] = -100
		}
	}
	g, err := a.eng.Start(context.Background(), engine.Request{Prompt: prompt, MaxTokens: 64, TopP: 1, RepeatPenalty: 1, LogitBias: bias})
	if err != nil {
		t.Fatal(err)
	}
	var text []byte
	for {
		piece, err := g.Next(context.Background())
		if err == io.EOF {
			a.said[asking{question, endless}] = string(text)
			return string(text)
		}
		if err != nil {
			t.Fatal(err)
		}
		text = append(text, piece...)
	}
}

// sameAsAlone asks the swarm and compares with the model alone.
func (s *swarm) sameAsAlone(question string, on func(n int)) {
	s.t.Helper()
	if on == nil {
		on = func(int) {}
	}
	status, got, body := s.chat(long(question), on)
	want := reference().answer(s.t, question, true)
	if status != http.StatusOK || got != want || body != "" {
		s.t.Errorf("%s\nstatus %d, error %q\n got %q\nwant %q", question, status, body, got, want)
	}
}

// sameSureAnswer is sameAsAlone for answers that the model ends, of which it is sure:
// drafts, repairs and other sequences in a batch round sums differently, and where the
// model is not sure that decides.
func (s *swarm) sameSureAnswer(question string) {
	s.t.Helper()
	req := long(question)
	delete(req, "logit_bias")
	status, got, body := s.chat(req, nil)
	if want := reference().answer(s.t, question, false); status != http.StatusOK || got != want {
		s.t.Errorf("%s\nstatus %d: %s\n got %q\nwant %q", question, status, body, got, want)
	}
}

var questions = []string{"What does a worker hold?", "What is 6 plus 7?", "What is the capital of Japan?", "What sound does a cow make?"}

func TestSwarmEqualsAlone(t *testing.T) {
	s := newSwarm(t)
	s.worker("w1", "--slice", "0:4/0:13")
	s.worker("w2", "--slice", "0:2/13:32")
	s.worker("w3", "--slice", "2:4/13:32")
	s.run()
	for _, q := range questions {
		s.sameAsAlone(q, nil)
	}
	// Together, so that rows of several sequences travel in one call. In a batch
	// llama.cpp's own sums round differently, with workers or without, so these are
	// answers of which the model is sure.
	var group sync.WaitGroup
	for _, q := range questions {
		group.Go(func() { s.sameSureAnswer(q) })
	}
	group.Wait()
}

func TestKilledWorkerWithReplica(t *testing.T) {
	for _, sig := range []syscall.Signal{syscall.SIGKILL, syscall.SIGSTOP} {
		t.Run(sig.String(), func(t *testing.T) {
			s := newSwarm(t)
			a := s.worker("w1")
			b := s.worker("w2")
			s.run()
			// whichever of the two serves: both in turn, the first one back before
			s.sameAsAlone(questions[0], func(n int) {
				if n == 5 {
					a.cmd.Process.Signal(sig)
				}
			})
			s.sameAsAlone(questions[1], nil)
			if sig == syscall.SIGSTOP {
				a.cmd.Process.Signal(syscall.SIGCONT)
			} else {
				<-a.exited
				s.worker("w1")
			}
			s.awaitCoverage(2)
			s.sameAsAlone(questions[2], func(n int) {
				if n == 5 {
					b.cmd.Process.Signal(sig)
				}
			})
			s.sameAsAlone(questions[3], nil)
		})
	}
}

// awaitCoverage waits until every expert has n replicas that are trusted.
func (s *swarm) awaitCoverage(n int) {
	s.t.Helper()
	_, err := s.backbone.await(s.ctx, func(st *api.Status) bool {
		for _, p := range st.Peers {
			if p.Reason != "" {
				return false
			}
		}
		for _, c := range st.Coverage {
			if c.MinReplicas < n {
				return false
			}
		}
		return len(st.Coverage) > 0
	})
	if err != nil {
		s.t.Fatal(err)
	}
}

func TestKilledWorkerWithoutReplica(t *testing.T) {
	t.Parallel()
	for _, sig := range []syscall.Signal{syscall.SIGKILL, syscall.SIGSTOP} {
		t.Run(sig.String(), func(t *testing.T) {
			t.Parallel()
			s := newSwarm(t)
			s.worker("w1", "--slice", "0:4/0:16")
			only := s.worker("w2", "--slice", "0:4/16:32")
			s.run("--wait", "1")
			_, _, failure := s.chat(long(questions[0]), func(n int) {
				if n == 5 {
					only.cmd.Process.Signal(sig)
				}
			})
			if !strings.Contains(failure, "no worker for experts") {
				t.Errorf("the stream ended with %q, want the missing experts", failure)
			}
			start := time.Now()
			status, _, body := s.chat(long(questions[1]), nil)
			if took := time.Since(start); status != http.StatusServiceUnavailable || !strings.Contains(body, "no worker for experts") || took > 15*time.Second {
				t.Errorf("status %d after %v, want 503 with the missing experts: %s", status, took, body)
			}
			if sig == syscall.SIGSTOP {
				time.Sleep(10*time.Second - min(10*time.Second, time.Since(start)))
				only.cmd.Process.Signal(syscall.SIGCONT)
			} else {
				<-only.exited
				s.worker("w2", "--slice", "0:4/16:32")
			}
			if _, err := s.backbone.await(s.ctx, serving); err != nil {
				t.Fatal(err)
			}
			s.sameAsAlone(questions[2], nil)
		})
	}
}
