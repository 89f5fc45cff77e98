//go:build cgo && linux

package node

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net/http"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"kvasird/node/api"
)

// newCarried is a network of a node that runs the whole shipped model and one that has
// nothing of it and answers clients; n.http is that one's.
func newCarried(t *testing.T, opts NewNetwork, args ...string) (n *network, at string, entry *child) {
	t.Helper()
	n, at = newJoining(t, opts, append([]string{"--experts", "here"}, args...)...)
	n.sees(n.backbone, serving)
	entry = n.entry("entry", at)
	n.isReady(entry)
	return n, at, entry
}

// entry starts a node that has clients alone.
func (n *network) entry(name, at string, args ...string) *child {
	n.t.Helper()
	c := n.join(name, append([]string{"--role", "entry", "--peer", at}, args...)...)
	n.http = n.sees(c, func(st *api.Status) bool { return st.HTTP != "" }).HTTP
	return c
}

// endless asks for an answer of so many tokens.
func endless(question string, tokens int) map[string]any {
	req := long(question)
	req["max_tokens"] = tokens
	return req
}

// hangUp asks for a stream, reads a little of it, and closes the connection.
func (n *network) hangUp(req map[string]any) {
	n.t.Helper()
	ctx, cancel := context.WithCancel(n.ctx)
	defer cancel()
	resp := n.post(ctx, req)
	defer resp.Body.Close()
	if _, err := io.ReadFull(resp.Body, make([]byte, 512)); err != nil {
		n.t.Fatal(err)
	}
}

// post sends a chat request.
func (n *network) post(ctx context.Context, req map[string]any) *http.Response {
	n.t.Helper()
	req["stream"] = true
	data, err := json.Marshal(req)
	if err != nil {
		n.t.Fatal(err)
	}
	post, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+n.http+"/v1/chat/completions", bytes.NewReader(data))
	if err != nil {
		n.t.Fatal(err)
	}
	resp, err := http.DefaultClient.Do(post)
	if err != nil {
		n.t.Fatal(err)
	}
	return resp
}

// TestCarried: a node without weights answers as the one that has them does; a client that
// leaves frees the place there; and when all are taken it says so.
func TestCarried(t *testing.T) {
	n, _, entry := newCarried(t, NewNetwork{Replicas: 1}, "--sequences", "1", "--context", "2048")
	for i, q := range questions {
		on := func(int) {}
		if i%2 == 0 {
			on = nil
		}
		status, got, body := n.chat(long(q), on)
		if want := reference().answer(t, q, true); status != http.StatusOK || got != want {
			t.Errorf("%s\nstatus %d: %s\n got %q\nwant %q", q, status, body, got, want)
		}
	}
	if _, _, err := askTokens(n.ctx, entry.client(), api.AskRequest{Prompt: questions[0], MaxTokens: 64}, io.Discard); err != nil {
		t.Error(err)
	}
	before := n.sees(n.backbone, func(st *api.Status) bool { return st.Carried.Running == 0 })
	if c := before.Carried; c.Answered != uint64(len(questions)+1) || c.Gone != 0 {
		t.Errorf("the node with the model counts %+v", c)
	}

	n.hangUp(endless(questions[0], 2000))
	left := time.Now()
	st := n.sees(n.backbone, func(st *api.Status) bool { return st.Carried.Gone == 1 && st.Tokens.Running == 0 })
	took, drawn := time.Since(left), st.Tokens.Generated-before.Tokens.Generated
	t.Logf("the place was free after %v and %d of 2000 tokens", took.Round(time.Millisecond), drawn)
	if took > time.Second || drawn >= 1900 {
		t.Errorf("the place was free after %v and %d tokens", took, drawn)
	}

	var group sync.WaitGroup
	var mu sync.Mutex // guards seen
	seen := map[int]int{}
	for range 12 { // one runs and three of the same owner wait
		group.Go(func() {
			resp := n.post(n.ctx, endless(questions[1], 500))
			defer resp.Body.Close()
			body, _ := io.ReadAll(resp.Body)
			if resp.StatusCode == http.StatusTooManyRequests && resp.Header.Get("Retry-After") == "" ||
				resp.StatusCode == http.StatusOK && !strings.HasSuffix(strings.TrimSpace(string(body)), "[DONE]") {
				t.Errorf("status %d, header %v: %s", resp.StatusCode, resp.Header, body)
			}
			mu.Lock()
			defer mu.Unlock()
			seen[resp.StatusCode]++
		})
	}
	group.Wait()
	if seen[http.StatusOK] < 4 || seen[http.StatusTooManyRequests] == 0 || seen[http.StatusOK]+seen[http.StatusTooManyRequests] != 12 {
		t.Errorf("answers by status: %v", seen)
	}
	too := endless(strings.Repeat("word ", 3000), 10)
	if status, _, body := n.chat(too, nil); status != http.StatusBadRequest || !strings.Contains(body, "2048") {
		t.Errorf("a prompt that does not fit: %d %s", status, body)
	}
}

// TestCarriedServersLost: what a node that is killed had not begun to answer another answers; what
// it had begun ends with an error; and without any it says that.
func TestCarriedServersLost(t *testing.T) {
	n, at, entry := newCarried(t, NewNetwork{Replicas: 1})
	other := n.join("other", "--model", n.whole, "--experts", "here", "--peer", at)
	second := n.sees(other, serving).PeerID
	n.sees(entry, func(st *api.Status) bool { return about(st, second).State == api.PeerConnected })
	time.Sleep(3 * time.Second) // what it offers is told

	n.sameAsAlone(questions[0], nil)
	preferred, left := n.backbone, other
	if n.sees(other, serving).Carried.Answered > 0 {
		preferred, left = other, n.backbone
	}
	id := n.sees(preferred, serving).PeerID
	preferred.cmd.Process.Signal(syscall.SIGSTOP)
	time.AfterFunc(500*time.Millisecond, func() { preferred.cmd.Process.Kill() })
	n.sameAsAlone(questions[1], nil)
	if err := says(entry.said(), "a node did not answer", id); err != nil {
		t.Errorf("the lost node was asked for nothing: %v", err)
	}
	if c := n.sees(left, serving).Carried; c.Answered != 1 {
		t.Errorf("the other node counts %+v", c)
	}

	_, text, failure := n.chat(endless(questions[0], 1500), func(piece int) {
		if piece == 5 {
			left.cmd.Process.Kill()
		}
	})
	if text == "" || !strings.Contains(failure, "is gone") {
		t.Errorf("after %q the stream ended with %q", text, failure)
	}
	deadline := time.Now().Add(20 * time.Second)
	for {
		status, _, body := n.chat(long(questions[0]), nil)
		if status == http.StatusServiceUnavailable && n.readyz() != nil {
			t.Logf("without any: %s", body)
			break
		}
		if status == http.StatusOK || time.Now().After(deadline) {
			t.Fatalf("without any: %d %s, ready %v", status, body, n.readyz())
		}
		time.Sleep(200 * time.Millisecond)
	}
}

// TestCarriedRights: who may help and not infer is told so, and how to get the right.
func TestCarriedRights(t *testing.T) {
	n, at := newJoining(t, NewNetwork{Replicas: 1, Admission: "invitation"}, "--experts", "here")
	n.sees(n.backbone, serving)
	var ticket bytes.Buffer
	if err := Invite(NewTicket{File: n.file}, &ticket, io.Discard); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(n.file)
	if err != nil {
		t.Fatal(err)
	}
	n.file = n.write("friends.toml", text)
	guest := n.entry("guest", at, "--ticket", strings.TrimSpace(ticket.String()))
	n.isReady(guest)
	id := n.sees(guest, func(*api.Status) bool { return true }).PeerID
	status, _, body := n.chat(long(questions[0]), nil)
	if err := says(body, "rights", "kvasir network invite --for "+id+" --infer"); status != http.StatusServiceUnavailable || err != nil {
		t.Errorf("status %d: %v", status, err)
	}
	if st := n.sees(n.backbone, serving); st.Carried.Refused["rights"] != 1 || st.Carried.Answered != 0 {
		t.Errorf("the node with the model counts %+v", st.Carried)
	}
}
