//go:build cgo && linux

package node

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"strings"
	"testing"
)

// turnTools are what an agent sends with every turn.
const turnTools = `[{"type":"function","function":{"name":"weather","description":"The weather of a city on a day.",
	"parameters":{"type":"object","properties":{"city":{"type":"string"},"day":{"type":"string"}},"required":["city"]}}},
	{"type":"function","function":{"name":"clock","description":"The time of day in a city.",
	"parameters":{"type":"object","properties":{"city":{"type":"string"}},"required":["city"]}}}]`

// turnAnswer is what of an answer counts here.
type turnAnswer struct {
	Choices []struct{ Message struct{ Content string } }
	Usage   struct {
		Prompt     int `json:"prompt_tokens"`
		Completion int `json:"completion_tokens"`
		Details    struct {
			Cached int `json:"cached_tokens"`
		} `json:"prompt_tokens_details"`
	}
}

// postFrom posts a request from an address of its own, which is another owner's.
func (s *swarm) postFrom(from, path string, body, answer any) {
	s.t.Helper()
	data, err := json.Marshal(body)
	if err != nil {
		s.t.Fatal(err)
	}
	dialer := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}
	transport := &http.Transport{DialContext: dialer.DialContext}
	defer transport.CloseIdleConnections()
	req, err := http.NewRequestWithContext(s.ctx, http.MethodPost, "http://"+s.http+path, bytes.NewReader(data))
	if err != nil {
		s.t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := (&http.Client{Transport: transport}).Do(req)
	if err != nil {
		s.t.Fatal(err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		var text bytes.Buffer
		text.ReadFrom(resp.Body)
		s.t.Fatalf("%s: status %d: %s", path, resp.StatusCode, text.String())
	}
	if err := json.NewDecoder(resp.Body).Decode(answer); err != nil {
		s.t.Fatal(err)
	}
}

// TestTurnsAreCached: in a conversation of ten turns with tools each turn pays for
// what is new, and is answered as one that nobody asked before.
func TestTurnsAreCached(t *testing.T) {
	s := newSwarm(t)
	s.runShipped("--context", "4096", "--sequences", "2")
	var turns []map[string]string
	say := func(role, text string) { turns = append(turns, map[string]string{"role": role, "content": text}) }
	req := map[string]any{"model": "kvasir-tiny-q4_k_m", "temperature": 0, "max_tokens": 16, "tools": json.RawMessage(turnTools)}
	before, equal := 0, 0
	for turn := range 10 {
		say("user", questions[turn%len(questions)])
		req["messages"] = turns
		var a, fresh turnAnswer
		s.postFrom("127.0.0.1", "/v1/chat/completions", req, &a)
		s.postFrom(fmt.Sprintf("127.0.1.%d", turn+1), "/v1/chat/completions", req, &fresh)
		if len(a.Choices) != 1 || len(fresh.Choices) != 1 {
			t.Fatalf("turn %d: %+v, %+v", turn+1, a, fresh)
		}
		u, answer := a.Usage, a.Choices[0].Message.Content
		t.Logf("turn %d: %d tokens, %d of them cached, %d to read", turn+1, u.Prompt, u.Details.Cached, u.Prompt-u.Details.Cached)
		if u.Details.Cached < before-8 || turn == 0 && u.Details.Cached != 0 || turn > 0 && u.Prompt-u.Details.Cached > 60 {
			t.Errorf("turn %d: %d of %d tokens cached, want the %d of the last prompt and more", turn+1, u.Details.Cached, u.Prompt, before)
		}
		if fresh.Usage.Details.Cached != 0 || fresh.Usage.Prompt != u.Prompt {
			t.Errorf("turn %d of another client: %+v, want nothing cached of %d tokens", turn+1, fresh.Usage, u.Prompt)
		}
		if answer == fresh.Choices[0].Message.Content {
			equal++
		} else {
			t.Logf("turn %d: %q, and %q without the cache", turn+1, answer, fresh.Choices[0].Message.Content)
		}
		before = u.Prompt
		say("assistant", answer)
	}
	if equal < 8 { // where the model is not sure the rounding decides
		t.Errorf("%d of 10 answers are those without the cache", equal)
	}
	message := map[string]any{"model": req["model"], "max_tokens": 4, "messages": turns[:len(turns)-1], "temperature": 0}
	for _, cached := range []bool{false, true} {
		var m struct {
			Usage struct {
				Input  int `json:"input_tokens"`
				Cached int `json:"cache_read_input_tokens"`
			}
		}
		s.postFrom("127.0.2.1", "/v1/messages", message, &m)
		if got := m.Usage.Cached > 0; got != cached || cached && m.Usage.Input != 1 {
			t.Errorf("message asked again %v: %+v", cached, m.Usage)
		}
	}
}

// TestDeadline: a request that takes too long ends with an event that says so.
func TestDeadline(t *testing.T) {
	s := newSwarm(t)
	s.runShipped("--context", "16384", "--sequences", "1", "--deadline", "1")
	req := long(questions[0])
	req["model"], req["max_tokens"] = "kvasir-tiny-q4_k_m", 16000
	n := 0
	status, text, failure := s.chat(req, func(int) { n++ })
	if status != http.StatusOK || n == 0 || text == "" || !strings.Contains(failure, "took longer than 1s") {
		t.Errorf("status %d after %d pieces: %q", status, n, failure)
	}
}
