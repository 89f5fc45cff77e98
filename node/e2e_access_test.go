//go:build cgo && linux

package node

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"kvasird/node/api"
)

// door is a daemon with the shipped model, and its HTTP API.
type door struct {
	*swarm
	config string
}

func newDoor(t *testing.T, gateway string) *door {
	t.Helper()
	s := newSwarm(t)
	d := &door{s, filepath.Join(s.dir, "gateway.toml")}
	if err := os.WriteFile(d.config, []byte("[gateway]\n"+gateway), 0o600); err != nil {
		t.Fatal(err)
	}
	return d
}

// begin starts the daemon, or starts it again.
func (d *door) begin(args ...string) *api.Status {
	d.t.Helper()
	d.backbone = d.start("node", append([]string{"--config", d.config, "--listen", "/ip4/127.0.0.1/tcp/0", "--http", "127.0.0.1:0"}, args...)...)
	st, err := d.backbone.await(d.ctx, serving)
	if err != nil {
		d.t.Fatal(err)
	}
	d.http = st.HTTP
	return st
}

// send makes a request and returns its status, headers and body as JSON.
func (d *door) send(method, path, body string, headers ...string) (int, http.Header, map[string]any) {
	d.t.Helper()
	req, err := http.NewRequestWithContext(d.ctx, method, "http://"+d.http+path, strings.NewReader(body))
	if err != nil {
		d.t.Fatal(err)
	}
	for i := 0; i < len(headers); i += 2 {
		if req.Header.Set(headers[i], headers[i+1]); headers[i] == "Host" {
			req.Host = headers[i+1]
		}
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		d.t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		d.t.Fatal(err)
	}
	var v map[string]any
	json.Unmarshal(text, &v)
	return resp.StatusCode, resp.Header, v
}

// want is send for those who want a status.
func (d *door) want(status int, method, path, body string, headers ...string) map[string]any {
	d.t.Helper()
	got, _, v := d.send(method, path, body, headers...)
	if got != status {
		d.t.Errorf("%s %s %s: status %d, want %d: %v", method, path, headers, got, status, v)
	}
	return v
}

func bearer(key string) []string { return []string{"Authorization", "Bearer " + key} }

func (d *door) addKey(req api.NewKey) api.CreatedKey {
	d.t.Helper()
	made, err := d.backbone.client().AddKey(d.ctx, req)
	if err != nil {
		d.t.Fatal(err)
	}
	return made
}

func chatBody(model string) string {
	return fmt.Sprintf(`{"model": %q, "max_tokens": 2, "messages": [{"role": "user", "content": "Hi"}]}`, model)
}

// TestKeysOfDaemon: keys are made and revoked through the control socket, and hold at
// once and after a restart.
func TestKeysOfDaemon(t *testing.T) {
	d := newDoor(t, "require_key = true\norigins = [\"https://chat.example\"]\nhosts = [\"box.example\"]\n")
	if st := d.begin(); !strings.Contains(st.HTTPAccess, "kvasir keys add NAME") {
		t.Errorf("access %q", st.HTTPAccess)
	}
	const models = "/v1/models"
	d.want(401, "GET", models, "")
	d.want(200, "GET", "/healthz", "")
	a, b := d.addKey(api.NewKey{Name: "a"}), d.addKey(api.NewKey{Name: "b"})
	if !strings.Contains(a.Note, d.http) {
		t.Errorf("note %q", a.Note)
	}
	d.want(200, "GET", models, "", bearer(a.Secret)...)
	d.want(200, "GET", models, "", "x-api-key", b.Secret)
	d.want(401, "GET", models, "")
	d.want(401, "GET", models, "", bearer(a.Secret+"x")...)
	d.want(401, "GET", models, "", bearer(a.Secret[:len(a.Secret)-1])...)

	d.want(204, "OPTIONS", models, "", "Origin", "https://chat.example", "Access-Control-Request-Method", "POST")
	_, h, _ := d.send("GET", models, "", append(bearer(a.Secret), "Origin", "https://chat.example")...)
	if h.Get("Access-Control-Allow-Origin") != "https://chat.example" {
		t.Errorf("headers %v", h)
	}
	d.want(403, "OPTIONS", models, "", "Origin", "https://other.example", "Access-Control-Request-Method", "POST")
	d.want(200, "GET", models, "", append(bearer(a.Secret), "Host", "box.example:80")...)
	d.want(403, "GET", models, "", append(bearer(a.Secret), "Host", "fox.example")...)

	d.checkLimits()
	d.checkList(a.Secret, b.Secret)
	if revoked, err := d.backbone.client().RevokeKey(d.ctx, "a"); err != nil || revoked.Left != 3 {
		t.Errorf("%+v, %v", revoked, err)
	}
	d.want(401, "GET", models, "", bearer(a.Secret)...)
	d.want(200, "GET", models, "", bearer(b.Secret)...)
	if err := d.backbone.stop(); err != nil {
		t.Fatal(err)
	}
	if st := d.begin(); !strings.Contains(st.HTTPAccess, "with one of 3 keys") {
		t.Errorf("access %q", st.HTTPAccess)
	}
	d.want(401, "GET", models, "", bearer(a.Secret)...)
	d.want(200, "GET", models, "", bearer(b.Secret)...)
}

// checkLimits has each limit reached.
func (d *door) checkLimits() {
	d.t.Helper()
	requests := d.addKey(api.NewKey{Name: "requests", KeyLimits: api.KeyLimits{RequestsPerMinute: 1}}).Secret
	tokens := d.addKey(api.NewKey{Name: "tokens", KeyLimits: api.KeyLimits{TokensPerMinute: 5}}).Secret
	one := d.addKey(api.NewKey{Name: "one", KeyLimits: api.KeyLimits{Concurrent: 1}}).Secret
	model := "kvasir-tiny-q4_k_m"
	d.want(200, "POST", "/v1/chat/completions", chatBody(model), bearer(requests)...)
	d.want(200, "POST", "/v1/chat/completions", chatBody(model), bearer(tokens)...)
	req, err := http.NewRequestWithContext(d.ctx, "POST", "http://"+d.http+"/v1/chat/completions", strings.NewReader(
		`{"model": "kvasir-tiny-q4_k_m", "stream": true, "max_tokens": 1500, "logit_bias": `+endBiasJSON()+`, "messages": [{"role": "user", "content": "Hi"}]}`))
	if err != nil {
		d.t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+one)
	ctx, cancel := context.WithCancel(d.ctx)
	defer cancel()
	running, err := http.DefaultClient.Do(req.WithContext(ctx))
	if err != nil || running.StatusCode != 200 {
		d.t.Fatalf("%v, %v", running, err)
	}
	defer running.Body.Close()
	for name, key := range map[string]string{"1 requests a minute": requests, "5 tokens a minute": tokens, "1 requests at once": one} {
		status, h, v := d.send("POST", "/v1/chat/completions", chatBody(model), bearer(key)...)
		if status != 429 || h.Get("Retry-After") == "" || !strings.Contains(fmt.Sprint(v), name) {
			d.t.Errorf("%s: status %d, retry after %q: %v", name, status, h.Get("Retry-After"), v)
		}
	}
	if _, err := d.backbone.client().RevokeKey(d.ctx, "one"); err != nil {
		d.t.Error(err)
	}
}

func endBiasJSON() string {
	text, _ := json.Marshal(endBias())
	return string(text)
}

// checkList looks for keys and their hashes in all that lists them.
func (d *door) checkList(secrets ...string) {
	d.t.Helper()
	socket := http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", filepath.Join(d.backbone.dir, api.SocketName))
	}}}
	resp, err := socket.Get("http://kvasird" + api.PathKeys)
	if err != nil {
		d.t.Fatal(err)
	}
	defer resp.Body.Close()
	list, err := io.ReadAll(resp.Body)
	if err != nil || !strings.Contains(string(list), `"name":"requests","requests_per_minute":1`) {
		d.t.Errorf("%s, %v", list, err)
	}
	file, err := os.ReadFile(filepath.Join(d.backbone.dir, keysName))
	if err != nil {
		d.t.Fatal(err)
	}
	for _, k := range secrets {
		if strings.Contains(string(file)+d.backbone.lastWords(), k[len(secretPrefix):]) {
			d.t.Error("a key is in the file or the log")
		}
	}
	var kept keysFile
	if err := json.Unmarshal(file, &kept); err != nil {
		d.t.Fatal(err)
	}
	for _, k := range kept.Keys {
		if strings.Contains(string(list), k.Hash) {
			d.t.Errorf("the list has the hash of %s", k.Name)
		}
	}
}

// TestNamesOfModels: a model answers by its name, aliases, and the beginning of its id.
func TestNamesOfModels(t *testing.T) {
	d := newDoor(t, "aliases = {\"gpt-4o\" = \"kvasir-tiny-q4_k_m\", \"claude-*\" = \"kvasir-tiny-q4_k_m\", \"o3\" = \"larger\"}\n")
	st := d.begin()
	if words := d.backbone.lastWords(); !strings.Contains(words, "o3") {
		t.Errorf("nothing is said of the alias o3: %s", words)
	}
	for _, name := range []string{"kvasir-tiny-q4_k_m", "gpt-4o", "claude-sonnet-4-5", st.Model.ID, st.Model.ID[:8]} {
		if v := d.want(200, "POST", "/v1/chat/completions", chatBody(name)); v["model"] != "kvasir-tiny-q4_k_m" {
			t.Errorf("%s: %v", name, v)
		}
	}
	for _, name := range []string{"gpt-4", "o3", st.Model.ID[:7], "claude"} {
		d.want(404, "POST", "/v1/chat/completions", chatBody(name))
	}
	if !strings.Contains(st.HTTPAccess, "without a key") {
		t.Errorf("access %q", st.HTTPAccess)
	}
	if made := d.addKey(api.NewKey{Name: "a"}); !strings.Contains(made.Note, "require_key") {
		t.Errorf("note %q", made.Note)
	}
	d.want(200, "GET", "/v1/models", "", bearer("whatever a client must send")...)
}

// TestExposedDoor: beyond loopback the HTTP API opens with the first key. The name
// is loopback, but not one that is known to be.
func TestExposedDoor(t *testing.T) {
	d := newDoor(t, "")
	st := d.begin("--http", "LOCALHOST:0")
	if st.HTTP != "" || !strings.Contains(st.HTTPAccess, "LOCALHOST:0 can be reached from other machines, and there is no key: run `kvasir keys add NAME`") {
		t.Fatalf("HTTP %q, %q", st.HTTP, st.HTTPAccess)
	}
	made := d.addKey(api.NewKey{Name: "a"})
	key := made.Secret
	st, err := d.backbone.client().Status(d.ctx)
	if err != nil || st.HTTP == "" || !strings.Contains(st.HTTPAccess, "other machines too, with one of 1 keys") {
		t.Fatalf("HTTP %q, %q, %v; %s", st.HTTP, st.HTTPAccess, err, made.Note)
	}
	d.http = st.HTTP
	d.want(401, "GET", "/v1/models", "")
	d.want(200, "GET", "/v1/models", "", bearer(key)...)
	if _, err := d.backbone.client().RevokeKey(d.ctx, "a"); err != nil {
		t.Fatal(err)
	}
	d.want(401, "GET", "/v1/models", "", bearer(key)...)
	if err := d.backbone.stop(); err != nil {
		t.Fatal(err)
	}
}

// TestResponsesStay: stored responses are gone on from after a restart and after a
// kill, by the key that made them.
func TestResponsesStay(t *testing.T) {
	d := newDoor(t, "require_key = true\n")
	d.begin()
	mine, other := bearer(d.addKey(api.NewKey{Name: "mine"}).Secret), bearer(d.addKey(api.NewKey{Name: "other"}).Secret)
	ask := func(previous string) string {
		body := `{"model": "kvasir-tiny-q4_k_m", "max_output_tokens": 8, "temperature": 0, "input": "What is the capital of Japan?"` + previous + `}`
		v := d.want(200, "POST", "/v1/responses", body, mine...)
		if v["store"] != true {
			t.Errorf("%v was not stored", v["id"])
		}
		return fmt.Sprint(v["id"])
	}
	first := ask("")
	last := first
	for _, end := range []func(){
		func() {
			if err := d.backbone.stop(); err != nil {
				t.Fatal(err)
			}
		},
		func() {
			d.backbone.cmd.Process.Signal(syscall.SIGKILL)
			<-d.backbone.exited
			d.backbone.err = nil
		},
	} {
		end()
		d.begin()
		before := d.want(200, "GET", "/v1/responses/"+last, "", mine...)
		last = ask(`, "previous_response_id": "` + last + `"`)
		after := d.want(200, "GET", "/v1/responses/"+last, "", mine...)
		if inputTokens(after) <= inputTokens(before) {
			t.Errorf("%v tokens after %v: the conversation was not gone on from", after["usage"], before["usage"])
		}
		d.want(404, "GET", "/v1/responses/"+last, "", other...)
	}
	d.want(200, "DELETE", "/v1/responses/"+first, "", mine...)
	d.want(404, "GET", "/v1/responses/"+first, "", mine...)
	d.want(404, "POST", "/v1/responses", `{"model": "kvasir-tiny-q4_k_m", "input": "x", "previous_response_id": "`+first+`"}`, mine...)
}

func inputTokens(v map[string]any) float64 {
	usage, _ := v["usage"].(map[string]any)
	n, _ := usage["input_tokens"].(float64)
	return n
}
