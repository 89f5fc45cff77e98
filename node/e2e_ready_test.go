//go:build cgo && linux

package node

import (
	"io"
	"net/http"
	"strings"
	"syscall"
	"testing"
	"time"

	"kvasird/node/api"
)

// readyz asks the backbone's gateway whether it is ready.
func (s *swarm) readyz() (status int, body string) {
	s.t.Helper()
	resp, err := http.Get("http://" + s.http + "/readyz")
	if err != nil {
		s.t.Fatal(err)
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	if err != nil {
		s.t.Fatal(err)
	}
	return resp.StatusCode, string(data)
}

// awaitReadyz waits until the gateway answers so, and returns its words.
func (s *swarm) awaitReadyz(status int) string {
	s.t.Helper()
	for end := time.Now().Add(30 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		got, body := s.readyz()
		if got == status {
			return body
		}
		if time.Now().After(end) {
			s.t.Fatalf("status %d, want %d: %s", got, status, body)
		}
	}
}

// TestReadyFollowsCoverage: a backbone that lost a worker which nobody replaces says so
// though nobody asks it anything, names what is missing, and is ready again with it.
func TestReadyFollowsCoverage(t *testing.T) {
	s := newSwarm(t)
	s.worker("w1", "--slice", "0:4/0:16")
	only := s.worker("w2", "--slice", "0:4/16:32")
	s.run("--wait", "1")
	if status, body := s.readyz(); status != http.StatusOK {
		t.Fatalf("status %d: %s", status, body)
	}
	for _, sig := range []syscall.Signal{syscall.SIGKILL, syscall.SIGSTOP} {
		only.cmd.Process.Signal(sig)
		if body := s.awaitReadyz(http.StatusServiceUnavailable); !strings.Contains(body, "no worker for experts 16-31 of layers 0-3") {
			t.Errorf("%v: %s", sig, body)
		}
		if st, err := s.backbone.client().Status(s.ctx); err != nil || st.State != api.StateBlocked || !strings.Contains(st.Reason, "experts 16-31") {
			t.Errorf("%v: status %v, %+v", sig, err, st)
		}
		if sig == syscall.SIGSTOP {
			only.cmd.Process.Signal(syscall.SIGCONT)
		} else {
			<-only.exited
			only = s.worker("w2", "--slice", "0:4/16:32")
		}
		s.awaitReadyz(http.StatusOK)
		s.sameAsAlone(questions[0], nil)
	}
}
