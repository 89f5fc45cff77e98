//go:build sdk && cgo && linux

package node

import (
	"bytes"
	"encoding/json"
	"net/http"
	"strings"
	"testing"
	"time"

	"kvasird/node/api"
)

// The judges of the gateway are the official clients (`make test-sdk`): those in Go
// here, those in JavaScript in testdata/sdk. All of them talk to a daemon that runs
// the shipped model.

// runSDKDaemon starts a node that computes all of the shipped model itself.
func runSDKDaemon(t *testing.T, args ...string) *swarm {
	t.Helper()
	s := newSwarm(t)
	s.runShipped(args...)
	return s
}

// narrow is a daemon that is easily full: one answer runs, few wait.
var narrow = []string{"--context", "65536", "--sequences", "1"}

// fill takes all places of a narrow daemon with answers that do not end; free gives
// them back.
func (s *swarm) fill() (free func()) {
	s.t.Helper()
	req := long(sumQuestion)
	req["model"], req["stream"], req["max_tokens"] = shippedModel, true, 1<<20
	data, err := json.Marshal(req)
	if err != nil {
		s.t.Fatal(err)
	}
	var open []*http.Response
	for full := false; !full; {
		resp, err := http.Post("http://"+s.http+"/v1/chat/completions", "application/json", bytes.NewReader(data))
		if err != nil {
			s.t.Fatal(err)
		}
		open = append(open, resp)
		full = resp.StatusCode == http.StatusTooManyRequests
		if !full && resp.StatusCode != http.StatusOK || full && len(open) < 3 || len(open) > 64 {
			s.t.Fatalf("status %d of the stream that fills place %d", resp.StatusCode, len(open))
		}
	}
	return func() {
		for _, resp := range open {
			resp.Body.Close()
		}
	}
}

// idle waits until nothing is answered any more.
func (s *swarm) idle(within time.Duration) {
	s.t.Helper()
	began := time.Now()
	if _, err := s.backbone.await(s.ctx, func(st *api.Status) bool {
		return st.Tokens != nil && st.Tokens.Running == 0 && st.Tokens.Waiting == 0
	}); err != nil {
		s.t.Fatal(err)
	}
	if took := time.Since(began); took > within {
		s.t.Errorf("answers that nobody reads ran for %v more", took)
	}
}

// tooLong is a prompt that no context of these tests holds.
func tooLong() string { return strings.Repeat("What is 6 plus 7? ", 20_000) }

// tooLarge is a text that makes a body larger than the gateway takes.
func tooLarge() string { return strings.Repeat("x", 33<<20) }

// sumSchema has one value only, so that an answer under it can be compared.
var sumSchema = map[string]any{
	"type":       "object",
	"properties": map[string]any{"sum": map[string]any{"type": "integer", "enum": []any{13}}, "of": map[string]any{"const": "6 plus 7"}},
	"required":   []string{"sum", "of"}, "additionalProperties": false,
}

// sameJSON compares JSON texts by what they say.
func sameJSON(a, b string) bool {
	var x, y any
	if json.Unmarshal([]byte(a), &x) != nil || json.Unmarshal([]byte(b), &y) != nil {
		return false
	}
	p, _ := json.Marshal(x)
	q, _ := json.Marshal(y)
	return bytes.Equal(p, q)
}

const sumArguments = `{"sum":13,"of":"6 plus 7"}`
