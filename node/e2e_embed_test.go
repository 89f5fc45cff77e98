//go:build cgo && linux

package node

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net/http"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"kvasird/ggml"
	"kvasird/node/api"
)

// embedder is a random model of embeddings that knows letters: its file, and the model
// in this process, which the daemon's vectors are compared with.
type embedder struct {
	file, name string
	model      *ggml.Model
}

func newEmbedder(t *testing.T, dir, arch string) *embedder {
	t.Helper()
	tokens := []string{"[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"}
	for _, r := range "abcdefghijklmnopqrstuvwxyz0123456789.,?!" {
		tokens = append(tokens, "▁"+string(r), string(r))
	}
	rt, err := ggml.Open(ggml.Config{})
	if err != nil {
		t.Fatal(err)
	}
	e := &embedder{file: filepath.Join(dir, arch+".gguf"), name: arch}
	if err := rt.GenerateModel(e.file, ggml.GenerateConfig{Arch: arch, Vocab: len(tokens), Overrides: map[string]any{
		"tokenizer.ggml.model": "bert", "tokenizer.ggml.tokens": tokens,
		"tokenizer.ggml.padding_token_id": uint32(0), "tokenizer.ggml.unknown_token_id": uint32(1), "tokenizer.ggml.bos_token_id": uint32(2),
		"tokenizer.ggml.seperator_token_id": uint32(3), "tokenizer.ggml.mask_token_id": uint32(4),
	}}); err != nil {
		t.Fatal(err)
	}
	if e.model, err = rt.LoadModel(ggml.ModelConfig{Path: e.file}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { e.model.Close() })
	return e
}

// tokens splits a text as the daemon must.
func (e *embedder) tokens(t *testing.T, text string) []ggml.Token {
	t.Helper()
	tokens, err := e.model.Tokenize(text, true, false)
	if err != nil || len(tokens) < 3 || tokens[0] != 2 || tokens[len(tokens)-1] != 3 {
		t.Fatalf("%q is %v, %v", text, tokens, err)
	}
	return tokens
}

// vector is the embedding of tokens by the library alone, in a context of its own.
func (e *embedder) vector(t *testing.T, tokens []ggml.Token) []float64 {
	t.Helper()
	c, err := e.model.NewContext(ggml.ContextConfig{Tokens: 512, Embeddings: true})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	b := ggml.NewBatch(512)
	for pos, tok := range tokens {
		b.Add(tok, pos, 0, true)
	}
	if err := c.Decode(t.Context(), b); err != nil {
		t.Fatal(err)
	}
	var length float64
	for _, x := range c.Embedding(0) {
		length += float64(x) * float64(x)
	}
	var out []float64
	for _, x := range c.Embedding(0) {
		out = append(out, float64(x)/math.Sqrt(length))
	}
	return out
}

// rounding is how far a vector is from the library's at most: in a batch of its own, and
// beside others, where attention sums in other groups.
const (
	roundingAlone  = 1e-5
	roundingBeside = 5e-3
)

// sameVector checks a vector of length 1 against another one.
func sameVector(got, want []float64, rounding float64) error {
	if len(got) != len(want) || len(got) == 0 {
		return fmt.Errorf("%d values, want %d", len(got), len(want))
	}
	var diff, length float64
	for i := range got {
		diff, length = diff+(got[i]-want[i])*(got[i]-want[i]), length+got[i]*got[i]
	}
	if math.Sqrt(diff) > rounding || math.Abs(length-1) > 1e-5 {
		return fmt.Errorf("it is %g from the library's, its length² %g", math.Sqrt(diff), length)
	}
	return nil
}

// embedTexts are of several lengths.
var embedTexts = []string{"the capital of france is paris.", "a", "what is 6 plus 7?", strings.Repeat("cows say moo, ", 20)}

// serveEmbedder starts a daemon of an embedder, as of any model.
func (s *swarm) serveEmbedder(e *embedder, args ...string) {
	s.t.Helper()
	s.backbone = s.start("embedder", append([]string{"--model", e.file, "--listen", "/ip4/127.0.0.1/tcp/0", "--http", "127.0.0.1:0"}, args...)...)
	st, err := s.backbone.await(s.ctx, serving)
	if err != nil {
		s.t.Fatal(err)
	}
	s.http = st.HTTP
}

// postJSON sends a request and returns the status and the answer.
func (s *swarm) postJSON(path string, body any) (int, string) {
	s.t.Helper()
	data, err := json.Marshal(body)
	if err != nil {
		s.t.Fatal(err)
	}
	return s.post(path, string(data))
}

// embed asks for the embeddings of inputs.
func (s *swarm) embed(model string, input any) (vectors [][]float64, promptTokens int) {
	s.t.Helper()
	status, text := s.postJSON("/v1/embeddings", map[string]any{"model": model, "input": input})
	var out struct {
		Data  []struct{ Embedding []float64 }
		Usage struct {
			Prompt int `json:"prompt_tokens"`
		}
	}
	if err := json.Unmarshal([]byte(text), &out); err != nil || status != http.StatusOK {
		s.t.Fatalf("status %d, %v: %.300s", status, err, text)
	}
	for _, d := range out.Data {
		vectors = append(vectors, d.Embedding)
	}
	return vectors, out.Usage.Prompt
}

// TestEmbeddings: a model of embeddings is run and served as any other; its vectors are
// the library's.
func TestEmbeddings(t *testing.T) {
	s := newSwarm(t)
	e := newEmbedder(t, s.dir, "bert")
	s.serveEmbedder(e)
	vectors, used := s.embed(e.name, embedTexts)
	want := 0
	for i, text := range embedTexts {
		tokens := e.tokens(t, text)
		want += len(tokens)
		if err := sameVector(vectors[i], e.vector(t, tokens), roundingBeside); err != nil {
			t.Errorf("%q beside others: %v", text, err)
		}
		alone, _ := s.embed(e.name, text)
		if err := sameVector(alone[0], e.vector(t, tokens), roundingAlone); err != nil {
			t.Errorf("%q alone: %v", text, err)
		}
		byTokens, n := s.embed(e.name, tokens)
		if err := sameVector(byTokens[0], alone[0], roundingAlone); err != nil || n != len(tokens) {
			t.Errorf("%q as %d tokens, %d counted: %v", text, len(tokens), n, err)
		}
	}
	if used != want {
		t.Errorf("%d tokens used, want %d", used, want)
	}
	status, text := s.postJSON("/v1/embeddings", map[string]any{"model": e.name, "input": strings.Repeat("word ", 600)})
	if err := says(text, `"context_length_exceeded"`, `"input"`, "2402 tokens", "takes 512"); err != nil || status != http.StatusBadRequest {
		t.Errorf("too long: %d, %v", status, err)
	}
	status, text = s.postJSON("/v1/chat/completions", map[string]any{"model": e.name, "messages": []map[string]string{{"role": "user", "content": "hi"}}})
	if err := says(text, e.name, "no text", "/v1/embeddings"); err != nil || status != http.StatusBadRequest {
		t.Errorf("chat: %d, %v", status, err)
	}
	var said *api.Error
	if _, err := s.backbone.client().Ask(s.ctx, api.AskRequest{Prompt: "hi"}, func(api.AskEvent) error { return nil }); !errors.As(err, &said) || said.Code != api.CodeBadRequest || !strings.Contains(said.Message, "no text") {
		t.Errorf("kvasir ask: %v", err)
	}
	for _, path := range []string{"/readyz", "/v1/models/" + e.name} {
		if resp, err := http.Get("http://" + s.http + path); err != nil || resp.StatusCode != http.StatusOK {
			t.Errorf("%s: %v, %v", path, resp, err)
		}
	}
	st, err := s.backbone.client().Status(s.ctx)
	if err != nil || st.Tokens == nil || st.Tokens.Prompt < uint64(3*want) || st.Tokens.Running+st.Tokens.Waiting != 0 {
		t.Errorf("status %+v, %v", st.Tokens, err)
	}
	s.backbone.cmd.Process.Signal(syscall.SIGTERM)
	awaitEnd(t, s.backbone, 0)
}

// TestEmbeddingsHangUp: who hangs up costs nothing more, and an end of the daemon in the
// middle of much is told.
func TestEmbeddingsHangUp(t *testing.T) {
	s := newSwarm(t)
	e := newEmbedder(t, s.dir, "bert")
	s.serveEmbedder(e)
	many := make([]string, 2048)
	for i := range many {
		many[i] = fmt.Sprint("input ", i, strings.Repeat(" and more", 20))
	}
	data, err := json.Marshal(map[string]any{"model": e.name, "input": many})
	if err != nil {
		t.Fatal(err)
	}
	client := &http.Client{Timeout: 300 * time.Millisecond}
	if resp, err := client.Post("http://"+s.http+"/v1/embeddings", "application/json", bytes.NewReader(data)); err == nil {
		t.Fatalf("2,048 inputs took less than 300 ms: %s", resp.Status)
	}
	if _, err := s.backbone.await(s.ctx, func(st *api.Status) bool { return st.Tokens.Running+st.Tokens.Waiting == 0 }); err != nil {
		t.Fatal(err)
	}
	if v, _ := s.embed(e.name, "a"); len(v) != 1 {
		t.Errorf("afterwards: %d vectors", len(v))
	}
	ended := make(chan string, 1)
	go func() {
		status, text := s.postJSON("/v1/embeddings", map[string]any{"model": e.name, "input": many})
		ended <- fmt.Sprint(status, " ", text)
	}()
	if _, err := s.backbone.await(s.ctx, func(st *api.Status) bool { return st.Tokens.Running > 0 }); err != nil {
		t.Fatal(err)
	}
	s.backbone.cmd.Process.Signal(syscall.SIGTERM)
	if text := <-ended; !strings.HasPrefix(text, "200 ") && !strings.Contains(text, "stopping") {
		t.Errorf("the request at the end: %.300s", text)
	}
	awaitEnd(t, s.backbone, 0)
}

// TestEmbeddingsRefused: what cannot be is said when the daemon starts.
func TestEmbeddingsRefused(t *testing.T) {
	s := newSwarm(t)
	e := newEmbedder(t, s.dir, "nomic-bert-moe")
	rt, err := ggml.Open(ggml.Config{})
	if err != nil {
		t.Fatal(err)
	}
	ranker := filepath.Join(s.dir, "ranker.gguf")
	if err := rt.GenerateModel(ranker, ggml.GenerateConfig{Arch: "qwen3", Overrides: map[string]any{"pooling_type": uint32(4)}}); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		args []string
		says string
	}{
		{[]string{"--model", ranker}, "reranker"},
		{[]string{"--model", e.file, "--experts", "remote"}, "on one node"},
	} {
		c := s.start("refused", append(tt.args, "--listen", "/ip4/127.0.0.1/tcp/0", "--http", Off)...)
		<-c.exited
		if words := c.lastWords(); !strings.Contains(words, tt.says) {
			t.Errorf("%v: want %q:\n%s", tt.args, tt.says, words)
		}
	}
}

// TestEmbeddingsInNetwork: in a network too, such a model stays on its node: volunteers
// take nothing of it, other entries do not offer it, and a plan of it is possible.
func TestEmbeddingsInNetwork(t *testing.T) {
	n := newNetwork(t, NewNetwork{Replicas: 1, Admission: "open"})
	e := newEmbedder(t, n.dir, "nomic-bert-moe")
	n.backbone = n.join("backbone", "--model", e.file)
	n.http = n.sees(n.backbone, serving).HTTP
	volunteer := n.join("volunteer", "--memory", "64MB", "--disk", "1GB", "--peer", localAddr(n.sees(n.backbone, serving)))
	n.sees(volunteer, func(st *api.Status) bool {
		return serving(st) && len(st.Peers) == 1 && st.Peers[0].State == api.PeerConnected
	})
	tokens := e.tokens(t, embedTexts[0])
	vectors, _ := n.embed(e.name, embedTexts[0])
	if err := sameVector(vectors[0], e.vector(t, tokens), roundingAlone); err != nil {
		t.Error(err)
	}
	for _, model := range []string{e.file, e.name} {
		out, err := n.plans(n.backbone, PlanOptions{}, model)
		if err != nil || !strings.Contains(out, "embeddings") {
			t.Errorf("plan of %s: %v\n%s", model, err, out)
		}
	}
	time.Sleep(3 * time.Second) // a volunteer takes less to choose
	st := n.sees(volunteer, serving)
	if st.Volunteer == nil || len(st.Volunteer.Parts) != 0 {
		t.Errorf("the volunteer took %+v", st.Volunteer)
	}
	maps, err := n.backbone.client().Coverage(n.ctx)
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range maps {
		if len(m.Layers) != 0 {
			t.Errorf("experts of it are counted: %+v", m)
		}
	}
}

// TestEmbeddingsCarried: an entry without the model has the node that runs it make the
// vectors, and says the same of what it refuses.
func TestEmbeddingsCarried(t *testing.T) {
	t.Parallel()
	n := newNetwork(t, NewNetwork{Replicas: 1})
	e := newEmbedder(t, n.dir, "bert")
	n.whole = e.file
	at := n.begin()
	n.sees(n.backbone, serving)
	n.isReady(n.entry("entry", at))
	vectors, used := n.embed(e.name, embedTexts)
	want := 0
	for i, text := range embedTexts {
		tokens := e.tokens(t, text)
		want += len(tokens)
		if err := sameVector(vectors[i], e.vector(t, tokens), roundingBeside); err != nil {
			t.Errorf("%q: %v", text, err)
		}
	}
	if used != want {
		t.Errorf("%d tokens used, want %d", used, want)
	}
	status, text := n.postJSON("/v1/embeddings", map[string]any{"model": e.name, "input": strings.Repeat("word ", 600)})
	if err := says(text, `"context_length_exceeded"`, "2402 tokens", "take 512"); err != nil || status != http.StatusBadRequest {
		t.Errorf("too long: %d, %v", status, err)
	}
	status, text = n.postJSON("/v1/chat/completions", map[string]any{"model": e.name, "messages": []map[string]string{{"role": "user", "content": "hi"}}})
	if err := says(text, e.name, "no text", "/v1/embeddings"); err != nil || status != http.StatusBadRequest {
		t.Errorf("chat: %d, %v", status, err)
	}
}
