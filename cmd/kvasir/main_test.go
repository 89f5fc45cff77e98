package main

import (
	"bytes"
	"context"
	"encoding/json"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"kvasird/node/api"
)

// kvasir runs a command line.
func kvasir(t *testing.T, stdin string, args ...string) (status int, out, errs string) {
	t.Helper()
	var o, e bytes.Buffer
	status = run(t.Context(), console{strings.NewReader(stdin), &o, &e}, args)
	return status, o.String(), e.String()
}

// daemon answers at a control socket in a new data folder, which it returns.
func daemon(t *testing.T, h http.HandlerFunc) (data string) {
	t.Helper()
	data = t.TempDir()
	l, err := net.Listen("unix", filepath.Join(data, api.SocketName))
	if err != nil {
		t.Fatal(err)
	}
	srv := &http.Server{Handler: h, ReadHeaderTimeout: time.Second}
	done := make(chan struct{})
	go func() { defer close(done); srv.Serve(l) }()
	t.Cleanup(func() { srv.Close(); <-done })
	return data
}

// TestUsage: wrong command lines end with 2, say what is wrong and where help is.
func TestUsage(t *testing.T) {
	tests := []struct {
		args []string
		want string
	}{
		{[]string{"statsu"}, "unknown command \"statsu\": did you mean \"status\"? See `kvasir help`"},
		{[]string{"xxxxxx"}, "unknown command \"xxxxxx\". See `kvasir help`"},
		{[]string{"gguf", "inspekt"}, "did you mean \"inspect\"? See `kvasir gguf help`"},
		{[]string{"help", "nothing"}, "unknown command \"nothing\""},
		{[]string{"status", "--jsn"}, "not defined: -jsn. See `kvasir status --help`"},
		{[]string{"status", "now"}, "takes no argument, got \"now\""},
		{[]string{"version", "x"}, "takes no argument, got \"x\""},
		{[]string{"ask"}, "what is the question?"},
		{[]string{"ask", "--max-tokens", "many", "x"}, "invalid value \"many\""},
		{[]string{"gguf", "inspect"}, "takes one FILE, got 0"},
		{[]string{"gguf", "inspect", "a", "b"}, "takes one FILE, got 2"},
		{[]string{"gguf", "slice", "--layers", "4:0", "a"}, "4:0"},
	}
	for _, tt := range tests {
		status, out, errs := kvasir(t, "", tt.args...)
		if status != exitUsage || out != "" || !strings.Contains(errs, tt.want) || strings.Contains(errs, errUsage.Error()) {
			t.Errorf("%v: status %d, out %q, err %q, want 2 and %q", tt.args, status, out, errs, tt.want)
		}
	}
}

func TestHelp(t *testing.T) {
	tests := []struct {
		args []string
		want string
	}{
		{nil, "Usage: kvasir COMMAND"},
		{[]string{"help"}, "gguf "},
		{[]string{"--help"}, "doctor "},
		{[]string{"gguf"}, "Usage: kvasir gguf COMMAND"},
		{[]string{"gguf", "-h"}, "backbone "},
		{[]string{"help", "gguf"}, "stage "},
		{[]string{"help", "gguf", "slice"}, "Usage: kvasir gguf slice --layers A:B"},
		{[]string{"help", "ask"}, "-max-tokens tokens"},
		{[]string{"ask", "--help"}, "Usage: kvasir ask"},
		{[]string{"version", "-h"}, "Print the version."},
	}
	for _, tt := range tests {
		status, out, errs := kvasir(t, "", tt.args...)
		if status != exitOK || errs != "" || !strings.Contains(out, tt.want) {
			t.Errorf("%v: status %d, out %q, err %q, want 0 and %q", tt.args, status, out, errs, tt.want)
		}
	}
}

func TestVersion(t *testing.T) {
	if status, out, _ := kvasir(t, "", "version"); status != exitOK || !strings.HasPrefix(out, "kvasir ") {
		t.Errorf("status %d, %q", status, out)
	}
}

func TestNoDaemon(t *testing.T) {
	dir := t.TempDir()
	for _, args := range [][]string{{"status", "--data", dir}, {"ask", "--socket", filepath.Join(dir, api.SocketName), "x"}} {
		status, out, errs := kvasir(t, "", args...)
		want := "kvasir: cannot reach the daemon at " + filepath.Join(dir, api.SocketName) + ": is `kvasird run` started?\n"
		if status != exitFail || out != "" || errs != want {
			t.Errorf("%v: status %d, out %q, err %q, want %q", args, status, out, errs, want)
		}
	}
}

func TestStatus(t *testing.T) {
	st := &api.Status{
		PeerID: "12D3KooWabcdefgh", Version: "v1", RuntimePack: "pack", Network: "home", Roles: []string{"backbone", "entry"},
		State: api.StateBlocked, Reason: "no worker for layer 1", UptimeSec: 61, Listen: []string{"/ip4/127.0.0.1/tcp/1", "/ip4/127.0.0.1/udp/1"},
		HTTP: "127.0.0.1:19000", HTTPAccess: "with a key", Threads: 2,
		Model:    &api.Model{Name: "m", ID: "ff", Arch: "qwen3moe", Layers: 4, MoELayers: 3, Experts: 32, Used: 4},
		Coverage: []api.Coverage{{Layer: 1, Experts: 32, Held: 16, Missing: "16:32"}, {Layer: 2, Experts: 32, Held: 32, MinReplicas: 2}},
		Rows:     []api.Rows{{Layer: 1, Rows: 5}},
		Peers: []api.Peer{
			{ID: "12D3KooWworker01", State: api.PeerConnected, RTTMicro: 340, Slices: []api.Slice{{LayerEnd: 4, ExpertEnd: 16}},
				Rows: []api.Rows{{Layer: 1, Rows: 70}, {Layer: 2, Rows: 80}}, Failed: 3},
			{ID: "12D3KooWworker02", State: api.PeerRefused, Reason: "other runtime pack \x1b[2J"},
		},
		Tokens:  &api.Tokens{Prompt: 9, Generated: 120, Drafted: 80, Accepted: 44, PerSecond: 81.25, Running: 1},
		Carried: &api.Carried{Running: 1, Answered: 7, Refused: map[string]uint64{"rights": 2, "busy": 3}},
	}
	data := daemon(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != api.PathStatus {
			w.WriteHeader(http.StatusNotFound)
		}
		json.NewEncoder(w).Encode(st)
	})
	status, out, errs := kvasir(t, "", "status", "--data", data)
	if status != exitOK || errs != "" {
		t.Fatalf("status %d, err %q", status, errs)
	}
	for _, want := range []string{
		"…abcdefgh is blocked as backbone, entry, up 1m1s.\nno worker for layer 1\n",
		"m (qwen3moe), 4 layers, 3 of them with 32 experts, 4 used per token",
		"nobody holds layer 1 experts 16:32\n",
		"HTTP      127.0.0.1:19000, with a key\n",
		"120 generated, 9 of prompts; 81.2 tokens/s now; 1 running, 0 waiting",
		"Drafts    44 of 80 accepted\n",
		"7 answered for other nodes, 1 running; 3 refused: busy; 2 refused: rights",
		"…worker01  connected  0s   0.34 ms  layers 0:4 experts 0:16  150   3",
		"…worker02 refused: other runtime pack \ufffd[2J\n",
		"LAYER  HERE  …worker01\n", "      1     5         70\n", "      2     0         80\n",
	} {
		if !strings.Contains(out, want) {
			t.Errorf("%s\ndoes not contain %q", out, want)
		}
	}
	status, out, _ = kvasir(t, "", "status", "--data", data, "--json")
	var back api.Status
	if err := json.Unmarshal([]byte(out), &back); err != nil || status != exitOK || back.Reason != st.Reason || len(back.Peers) != 2 {
		t.Errorf("--json: status %d, %v: %s", status, err, out)
	}
}

func TestCoverageText(t *testing.T) {
	missing := func(n int) (list []api.Coverage) {
		for i := range n {
			list = append(list, api.Coverage{Layer: i, Missing: "0:1"})
		}
		return list
	}
	tests := []struct {
		list []api.Coverage
		want string
	}{
		{[]api.Coverage{{MinReplicas: 3}, {MinReplicas: 2}}, "all experts of 2 layers are held, the rarest by 2"},
		{missing(1), "nobody holds layer 0 experts 0:1"},
		{missing(6), "nobody holds layer 0 experts 0:1; layer 1 experts 0:1; layer 2 experts 0:1; layer 3 experts 0:1 and of 2 more layers"},
	}
	for _, tt := range tests {
		if got := coverageText(tt.list); got != tt.want {
			t.Errorf("got %q, want %q", got, tt.want)
		}
	}
}

func TestAsk(t *testing.T) {
	var got api.AskRequest
	data := daemon(t, func(w http.ResponseWriter, r *http.Request) {
		if err := json.NewDecoder(r.Body).Decode(&got); err != nil {
			t.Error(err)
		}
		enc := json.NewEncoder(w)
		enc.Encode(api.AskEvent{})
		enc.Encode(api.AskEvent{Note: "waiting for layer 2"})
		enc.Encode(api.AskEvent{Text: " Par"})
		if got.Prompt == "fail" {
			enc.Encode(api.AskEvent{Error: &api.Error{Code: api.CodeCoverage, Message: "layer 2, experts 16:32: no worker"}})
			return
		}
		enc.Encode(api.AskEvent{Text: "is\x1b."})
		enc.Encode(api.AskEvent{Done: &api.AskDone{Finish: "stop", PromptTokens: 5, Tokens: 3, FirstTokenSec: 0.5, Seconds: 1}})
	})
	tests := []struct {
		name      string
		stdin     string
		args      []string
		status    int
		out, errs string
		request   api.AskRequest
	}{
		{"plain", "", []string{"The capital of France is"}, exitOK, " Paris\ufffd.\n", "(waiting for layer 2)\n", api.AskRequest{Prompt: "The capital of France is"}},
		{"flags after the words", "", []string{"a", "--raw", "b", "--seed", "7", "--temperature", "0.5", "--top-p", "0.9", "--max-tokens", "3"}, exitOK, " Paris\ufffd.\n", "(waiting for layer 2)\n",
			api.AskRequest{Prompt: "a b", Raw: true, Seed: 7, Temperature: 0.5, TopP: 0.9, MaxTokens: 3}},
		{"after --", "", []string{"--system", "s", "--", "--raw"}, exitOK, " Paris\ufffd.\n", "(waiting for layer 2)\n", api.AskRequest{Prompt: "--raw", System: "s"}},
		{"stdin", "from stdin\n", []string{"-"}, exitOK, " Paris\ufffd.\n", "(waiting for layer 2)\n", api.AskRequest{Prompt: "from stdin\n"}},
		{"stats", "", []string{"x", "--stats"}, exitOK, " Paris\ufffd.\n",
			"(waiting for layer 2)\n3 tokens, 4.0 tokens/s, first token after 0.500 s; prompt 5 tokens; ended by stop\n", api.AskRequest{Prompt: "x"}},
		{"fails half-way", "", []string{"fail"}, exitFail, " Par\n", "(waiting for layer 2)\nkvasir: layer 2, experts 16:32: no worker\n", api.AskRequest{Prompt: "fail"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got = api.AskRequest{}
			status, out, errs := kvasir(t, tt.stdin, append([]string{"ask", "--data", data}, tt.args...)...)
			if status != tt.status || out != tt.out || errs != tt.errs {
				t.Errorf("status %d, out %q, err %q, want %d, %q, %q", status, out, errs, tt.status, tt.out, tt.errs)
			}
			want, _ := json.Marshal(tt.request)
			if sent, _ := json.Marshal(got); string(sent) != string(want) {
				t.Errorf("sent %s, want %s", sent, want)
			}
		})
	}
	if status, _, errs := kvasir(t, strings.Repeat("a", api.MaxRequest+1), "ask", "--data", data, "-"); status != exitFail || !strings.Contains(errs, "longer than") {
		t.Errorf("a huge question: status %d, %q", status, errs)
	}
}

func TestAskStops(t *testing.T) {
	began := make(chan struct{})
	data := daemon(t, func(w http.ResponseWriter, r *http.Request) {
		close(began)
		<-r.Context().Done()
	})
	ctx, cancel := context.WithCancel(t.Context())
	go func() { <-began; cancel() }()
	var out, errs bytes.Buffer
	status := run(ctx, console{strings.NewReader(""), &out, &errs}, []string{"ask", "--data", data, "x"})
	if status != exitFail || errs.String() != "kvasir: stopped\n" {
		t.Errorf("status %d, err %q", status, errs.String())
	}
}

// TestSibling runs a kvasird that is a script: its output, flags and exit
// status pass through.
func TestSibling(t *testing.T) {
	bin := t.TempDir()
	script := "#!/bin/sh\necho \"got $*\"\ncat\nexit $3\n"
	if err := os.WriteFile(filepath.Join(bin, "kvasird"), []byte(script), 0o700); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", bin+":/usr/bin:/bin")
	tests := []struct {
		args   []string
		status int
		out    string
		errs   string
	}{
		{[]string{"bench", "--rounds", "0"}, exitOK, "got bench --rounds 0\nin", ""},
		{[]string{"doctor", "--x", "1"}, exitFail, "got doctor --x 1\nin", ""},
		{[]string{"network", "create", "0"}, exitOK, "got network create 0\nin", ""},
		{[]string{"run", "--network", "0"}, exitOK, "got run --network 0\nin", ""},
		{[]string{"doctor", "--x", "2"}, exitUsage, "got doctor --x 2\nin", ""},
	}
	for _, tt := range tests {
		status, out, errs := kvasir(t, "in", tt.args...)
		if status != tt.status || out != tt.out || errs != tt.errs {
			t.Errorf("%v: status %d, out %q, err %q, want %+v", tt.args, status, out, errs, tt)
		}
	}
	t.Setenv("PATH", t.TempDir())
	if status, _, errs := kvasir(t, "", "bench"); status != exitFail || !strings.Contains(errs, "build it with make build") {
		t.Errorf("without kvasird: status %d, err %q", status, errs)
	}
}
