//go:build cgo && linux

package node

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"kvasird/ggml/gguf"
	"kvasird/node/api"
)

// openStream posts an endless question and returns the answer's stream once it runs.
func (s *swarm) openStream() (*http.Response, *bufio.Scanner) {
	s.t.Helper()
	req := long(questions[0])
	req["stream"], req["max_tokens"] = true, 1<<20
	data, err := json.Marshal(req)
	if err != nil {
		s.t.Fatal(err)
	}
	resp, err := http.Post("http://"+s.http+"/v1/chat/completions", "application/json", bytes.NewReader(data))
	if err != nil {
		s.t.Fatal(err)
	}
	lines := bufio.NewScanner(resp.Body)
	for n := 0; n < 20; n++ {
		if !lines.Scan() {
			s.t.Fatalf("the stream ends early: %v", lines.Err())
		}
	}
	return resp, lines
}

// roomy is room for an answer of minutes.
var roomy = []string{"--context", "131072", "--sequences", "2"}

// TestEndOfBackbone ends a backbone in the middle of answers: while they flow, and
// while they wait for a worker that is frozen.
func TestEndOfBackbone(t *testing.T) {
	s := newSwarm(t)
	w := s.worker("w1")
	for sig, frozen := range map[syscall.Signal]bool{syscall.SIGTERM: false, syscall.SIGINT: true} {
		s.run(append(roomy, "--wait", "60")...)
		resp, lines := s.openStream()
		defer resp.Body.Close()
		asked := make(chan error, 1)
		if frozen {
			w.cmd.Process.Signal(syscall.SIGSTOP)
			started := make(chan struct{}, 1)
			go func() {
				_, err := s.backbone.client().Ask(s.ctx, api.AskRequest{Prompt: "2 plus 2"}, func(api.AskEvent) error {
					select {
					case started <- struct{}{}:
					default:
					}
					return nil
				})
				asked <- err
			}()
			<-started
		}
		s.backbone.cmd.Process.Signal(sig)
		awaitEnd(t, s.backbone, 0)
		var text strings.Builder
		for lines.Scan() {
			fmt.Fprintln(&text, lines.Text())
		}
		if err := says(text.String(), `"error"`, "stopping", "data: [DONE]"); err != nil || lines.Err() != nil {
			t.Errorf("%v: the stream ends with %v: %v", sig, lines.Err(), err)
		}
		if !frozen {
			continue
		}
		var said *api.Error
		if err := <-asked; !errors.As(err, &said) || said.Code != api.CodeNotReady || !strings.Contains(said.Message, "stopping") {
			t.Errorf("%v: kvasir ask ends with %v", sig, err)
		}
		w.cmd.Process.Signal(syscall.SIGCONT)
	}
}

// TestEndOfWorker ends a worker in the middle of an answer: its replica goes on.
func TestEndOfWorker(t *testing.T) {
	s := newSwarm(t)
	a, b := s.worker("w1"), s.worker("w2")
	s.run()
	s.sameAsAlone(questions[0], func(n int) {
		if n == 5 {
			a.cmd.Process.Signal(syscall.SIGTERM)
		}
	})
	awaitEnd(t, a, 0)
	s.worker("w1")
	s.awaitCoverage(2)
	s.sameAsAlone(questions[1], func(n int) {
		if n == 5 {
			b.cmd.Process.Signal(syscall.SIGINT)
		}
	})
	awaitEnd(t, b, 0)
}

// TestTaken has daemons want what another one has.
func TestTaken(t *testing.T) {
	s := newSwarm(t)
	s.worker("w1")
	s.run()
	address, _, _ := strings.Cut(s.addrs[0], "/p2p/")
	_, port, err := net.SplitHostPort(s.http)
	if err != nil {
		t.Fatal(err)
	}
	file := s.write("file", nil)
	worker := []string{"--model", s.whole, "--role", "worker", "--http", Off}
	tests := []struct {
		name string
		say  []string
		args []string
	}{
		{"peers", []string{address, "is another program using the port?"}, append(worker, "--listen", address)},
		{"lane", []string{"listen for lanes on " + s.http}, append(worker, "--listen", "/ip4/127.0.0.1/tcp/0", "--lane", s.http)},
		{"http", []string{"127.0.0.1:" + port, "in use"}, []string{"--model", s.whole, "--listen", "/ip4/127.0.0.1/tcp/0", "--http", s.http}},
		{"living socket", []string{"another kvasird answers at"}, append(worker, "--listen", "/ip4/127.0.0.1/tcp/0", "--control", filepath.Join(s.workers[0].dir, api.SocketName))},
		{"file for a socket", []string{file, "is no socket"}, append(worker, "--listen", "/ip4/127.0.0.1/tcp/0", "--control", file)},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) { s.refused(t, "second", test.say, test.args...) })
	}
	t.Run("data folder", func(t *testing.T) {
		c, err := startChild(s.dir, "w1", append(loopback, "--model", s.whole, "--role", "worker")...)
		if err != nil {
			t.Fatal(err)
		}
		<-c.exited
		if err := says(c.lastWords(), c.dir, "is in use by another kvasird"); err != nil || c.cmd.ProcessState.ExitCode() != 1 {
			t.Errorf("%v: %v", c.cmd.ProcessState, err)
		}
	})
	s.sameAsAlone(questions[0], nil)
}

// TestDemoInterrupted ends a demo early: in its start, or with its answers.
func TestDemoInterrupted(t *testing.T) {
	for _, after := range []time.Duration{300 * time.Millisecond, time.Second, 2 * time.Second} {
		t.Run(after.String(), func(t *testing.T) {
			dir, err := os.MkdirTemp("", "kv-demo-")
			if err != nil {
				t.Fatal(err)
			}
			defer os.RemoveAll(dir)
			var words bytes.Buffer
			ctx, cancel := context.WithTimeout(t.Context(), 40*time.Second)
			defer cancel()
			demo := exec.CommandContext(ctx, os.Args[0], "demo")
			demo.Env = append(os.Environ(), "TMPDIR="+dir)
			demo.Stdout, demo.Stderr = &words, &words
			if err := demo.Start(); err != nil {
				t.Fatal(err)
			}
			time.Sleep(after)
			demo.Process.Signal(os.Interrupt)
			began := time.Now()
			demo.Wait()
			if took := time.Since(began); took > 10*time.Second {
				t.Errorf("it took %v to end\n%s", took, words.String())
			}
			t.Logf("%v\n%s", demo.ProcessState, words.String())
			for _, p := range processes(t) {
				if strings.Contains(p.line, dir) {
					t.Errorf("left process %d: %q", p.pid, p.line)
				}
			}
			if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
				t.Errorf("left %v, %v", left, err)
			}
		})
	}
}

// get returns the status and body of a request with these headers.
func (s *swarm) get(path string, headers ...string) (int, string) {
	s.t.Helper()
	req, err := http.NewRequestWithContext(s.ctx, http.MethodGet, "http://"+s.http+path, nil)
	if err != nil {
		s.t.Fatal(err)
	}
	for i := 0; i < len(headers); i += 2 {
		if req.Header.Set(headers[i], headers[i+1]); headers[i] == "Host" {
			req.Host = headers[i+1]
		}
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		s.t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		s.t.Fatal(err)
	}
	return resp.StatusCode, string(body)
}

func TestHTTPOfDaemon(t *testing.T) {
	s := newSwarm(t)
	s.worker("w1", "--slice", "0:4/0:16")
	m, err := gguf.OpenModel(s.whole)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	sparse := filepath.Join(s.dir, "backbone.gguf")
	if err := gguf.WriteBackbone(s.ctx, sparse, m); err != nil {
		t.Fatal(err)
	}
	s.backbone = s.start("backbone", append(roomy, "--model", sparse, "--listen", "/ip4/127.0.0.1/tcp/0", "--http", "127.0.0.1:0", "--peer", s.addrs[0], "--wait", "1")...)
	st, err := s.backbone.await(s.ctx, func(st *api.Status) bool { return strings.Contains(st.Reason, "no worker for experts") })
	if err != nil {
		t.Fatal(err)
	}
	s.http = st.HTTP
	for _, test := range []struct {
		path    string
		headers []string
		status  int
		say     string
	}{
		{"/readyz", nil, http.StatusServiceUnavailable, "no worker for experts"},
		{"/healthz", nil, http.StatusOK, ""},
		{"/v1/models", []string{"Host", "evil.example"}, http.StatusForbidden, "evil.example"},
		{"/v1/models", []string{"Host", "evil.example:80"}, http.StatusForbidden, "evil.example"},
		{"/v1/models", []string{"Origin", "https://evil.example"}, http.StatusForbidden, "evil.example"},
		{"/v1/models", []string{"Origin", "null"}, http.StatusForbidden, "null"},
		{"/v1/models", []string{"Origin", "http://localhost:3000"}, http.StatusOK, "backbone"},
	} {
		if status, body := s.get(test.path, test.headers...); status != test.status || !strings.Contains(body, test.say) {
			t.Errorf("%s %v: status %d, want %d: %s", test.path, test.headers, status, test.status, body)
		}
	}

	// the other half joins by itself
	s.worker("w2", "--slice", "0:4/16:32", "--peer", localAddr(st))
	eventually(t, func() error {
		if status, body := s.get("/readyz"); status != http.StatusOK {
			return fmt.Errorf("/readyz: status %d: %s", status, body)
		}
		return nil
	})
	s.sameAsAlone(questions[0], nil)

	resp, _ := s.openStream()
	resp.Body.Close() // the client goes away
	began := time.Now()
	if _, err := s.backbone.await(s.ctx, func(st *api.Status) bool { return st.Tokens != nil && st.Tokens.Running == 0 }); err != nil {
		t.Fatal(err)
	}
	if took := time.Since(began); took > 10*time.Second {
		t.Errorf("its sequence was busy for %v more", took)
	}
}
