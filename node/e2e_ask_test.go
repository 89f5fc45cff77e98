//go:build cgo && linux

package node

import (
	"bytes"
	"encoding/json"
	"errors"
	"net/http"
	"strings"
	"syscall"
	"testing"
	"time"

	"kvasird/node/api"
)

// TestAskEnds: a question over the control socket ends when its time is up, as a request
// over HTTP does, and leaves the node free.
func TestAskEnds(t *testing.T) {
	s := newSwarm(t)
	w := s.worker("w1")
	s.run("--wait", "60", "--deadline", "2")
	w.cmd.Process.Signal(syscall.SIGSTOP)
	began := time.Now()
	var said *api.Error
	_, err := s.backbone.client().Ask(s.ctx, api.AskRequest{Prompt: "2 plus 2"}, func(api.AskEvent) error { return nil })
	if took := time.Since(began); !errors.As(err, &said) || said.Code != api.CodeTooSlow || !strings.Contains(said.Message, "longer than 2s") || took < 2*time.Second || took > 10*time.Second {
		t.Errorf("after %v: %v", took, err)
	}
	w.cmd.Process.Signal(syscall.SIGCONT)
	if _, err := s.backbone.await(s.ctx, func(st *api.Status) bool {
		return st.State == api.StateServing && st.Tokens.Running+st.Tokens.Waiting == 0
	}); err != nil {
		t.Fatal(err)
	}
	s.sameAsAlone(questions[0], nil)
}

// TestAskTakesTurns: over the control socket and over HTTP it is the same client that
// asks, so the last place in the queue is not for it.
func TestAskTakesTurns(t *testing.T) {
	s := newSwarm(t)
	s.runShipped("--context", "65536", "--sequences", "1")
	var group []func()
	defer func() {
		for _, hangUp := range group {
			hangUp()
		}
	}()
	req := long(sumQuestion)
	req["model"], req["stream"], req["max_tokens"] = shippedModel, true, 1<<20
	data, err := json.Marshal(req)
	if err != nil {
		t.Fatal(err)
	}
	for range 4 { // one runs, three wait
		resp, err := http.Post("http://"+s.http+"/v1/chat/completions", "application/json", bytes.NewReader(data))
		if err != nil {
			t.Fatal(err)
		}
		group = append(group, func() { resp.Body.Close() })
	}
	var said *api.Error
	_, err = s.backbone.client().Ask(s.ctx, api.AskRequest{Prompt: "2 plus 2", MaxTokens: 1}, func(api.AskEvent) error { return nil })
	if !errors.As(err, &said) || said.Code != api.CodeBusy || !strings.Contains(said.Message, "the last place is for others") {
		t.Errorf("asked with a full queue: %v", err)
	}
}
