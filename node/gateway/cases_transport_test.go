package gateway

import (
	"bytes"
	"compress/gzip"
	"compress/zlib"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/klauspost/compress/zstd"
)

func TestCase01Keys(t *testing.T) {
	url, _ := serveCases(t, &scriptEngine{pieces: []string{"a"}}, func(c *Config) {
		c.Keys = NewKeyRing([]Key{{Name: "me", Hash: HashKey("sk-1")}}, time.Now)
	})
	for _, path := range []string{chatPath, messagesPath} {
		request := body(`"max_tokens":1`)
		for _, header := range [][]string{{"Authorization", "Bearer sk-1"}, {"authorization", "bearer  sk-1"}, {"X-Api-Key", "sk-1"}} {
			if status, _, text := send(t, url+path, request, header...); status != 200 {
				t.Errorf("%s with %v: %d %s", path, header, status, text)
			}
		}
		for _, header := range [][]string{nil, {"Authorization", "Bearer sk-2"}, {"X-Api-Key", ""}, {"Authorization", "sk-1"}} {
			status, _, text := send(t, url+path, request, header...)
			kind := map[string]string{chatPath: "invalid_request_error", messagesPath: "authentication_error"}[path]
			if got := at(object(t, text), "error", "type"); status != 401 || got != kind {
				t.Errorf("%s with %v: %d %s", path, header, status, text)
			}
		}
	}
	for _, path := range []string{"/healthz", "/readyz"} {
		if status, _, _ := send(t, url+path, ""); status != 200 {
			t.Errorf("%s: status %d", path, status)
		}
	}
}

func TestCase02Query(t *testing.T) {
	url, _ := serveCases(t, &scriptEngine{pieces: []string{"a"}}, nil)
	for _, path := range []string{"/v1/messages?beta=true", "/anthropic/v1/messages?beta=true"} {
		m := ask(t, url+path, body(`"max_tokens":1`), "anthropic-version", "2023-06-01")
		want(t, path, m["content"], `[{"type":"text","text":"a"}]`)
	}
}

func TestCase03Probe(t *testing.T) {
	url, _ := serveCases(t, &scriptEngine{}, func(c *Config) { c.Keys = NewKeyRing(nil, time.Now) })
	status, _, text := sendAs(t, http.MethodHead, url+"/", nil)
	if status != 200 || text != "" {
		t.Errorf("status %d, body %q", status, text)
	}
}

func TestCase04CORS(t *testing.T) {
	url, _ := serveCases(t, &scriptEngine{}, func(c *Config) {
		c.Origins = []string{"https://app.example"}
		c.Keys = NewKeyRing(nil, time.Now)
	})
	asked := "x-stainless-lang, anthropic-version, authorization"
	preflight := func(url, origin string, more ...string) (int, http.Header) {
		status, header, _ := sendAs(t, http.MethodOptions, url+messagesPath, nil, append([]string{
			"Origin", origin, "Access-Control-Request-Method", "POST", "Access-Control-Request-Headers", asked}, more...)...)
		return status, header
	}
	private := []string{"Access-Control-Request-Private-Network", "true"}
	status, h := preflight(url, "https://app.example")
	if status != 204 || h.Get("Access-Control-Allow-Origin") != "https://app.example" || h.Get("Access-Control-Allow-Headers") != asked ||
		h.Get("Vary") != "Origin" || h.Get("Access-Control-Allow-Private-Network") != "" {
		t.Errorf("listed origin: %d %v", status, h)
	}
	if _, h := preflight(url, "https://app.example", private...); h.Get("Access-Control-Allow-Private-Network") != "true" {
		t.Errorf("listed origin, private network: %v", h)
	}
	if status, h := preflight(url, "https://other.example", private...); status != 403 || h.Get("Access-Control-Allow-Origin") != "" ||
		h.Get("Access-Control-Allow-Private-Network") != "" {
		t.Errorf("foreign origin: %d %v", status, h)
	}
	all, _ := serveCases(t, &scriptEngine{}, func(c *Config) { c.Origins = []string{"*"} })
	if status, h := preflight(all, "https://any.example", private...); status != 204 || h.Get("Access-Control-Allow-Origin") != "https://any.example" ||
		h.Get("Access-Control-Allow-Private-Network") != "" {
		t.Errorf("any origin: %d %v", status, h)
	}
	if _, h, _ := send(t, all+"/v1/models", "", "Origin", "https://any.example"); h.Get("Access-Control-Allow-Origin") != "https://any.example" {
		t.Errorf("answer to a page: %v", h)
	}
}

func TestCase05Models(t *testing.T) {
	url, _ := serve(t, &scriptEngine{}, nil)
	list := ask(t, url+"/v1/models", "")
	want(t, "first", at(list, "data", 0), `{"id":"kvasir-tiny","object":"model","created":1,"owned_by":"kvasir"}`)
	want(t, "kind", list["object"], `"list"`)
	want(t, "id with slash and colon", ask(t, url+"/v1/models/org/big:q4", "")["id"], `"org/big:q4"`)
	if status, _, _ := send(t, url+"/v1/models/none", ""); status != 404 {
		t.Errorf("unknown: %d", status)
	}
}

func TestCase06ClaudeModels(t *testing.T) {
	url, _ := serveCases(t, &scriptEngine{}, nil)
	first := `{"type":"model","id":"qwen","display_name":"qwen","created_at":"1970-01-01T00:00:01Z"}`
	for _, path := range []string{"/v1/models", "/anthropic/v1/models"} {
		list := ask(t, url+path, "", "anthropic-version", "2023-06-01")
		want(t, path, at(list, "data", 0), first)
		want(t, "more", list["has_more"], `false`)
		want(t, "ends", []any{list["first_id"], list["last_id"]}, `["qwen","opener"]`)
		want(t, "one", ask(t, url+path+"/qwen", "", "anthropic-version", "2023-06-01"), first)
	}
}

func TestCase07CodexModels(t *testing.T) {
	url, _ := serveCases(t, &scriptEngine{}, nil)
	list := ask(t, url+"/v1/models?client_version=0.99", "")
	if _, there := list["models"]; there || list["object"] != "list" {
		t.Errorf("%v: a models entry must be complete or absent", list)
	}
}

func TestCase08UnknownModel(t *testing.T) {
	url, _ := serveCases(t, &scriptEngine{pieces: []string{"a"}}, nil)
	unknown := strings.Replace(body(`"max_tokens":1`), "qwen", "qwem", 1)
	status, _, text := send(t, url+chatPath, unknown)
	e := object(t, text)["error"].(map[string]any)
	delete(e, "message")
	if status != 404 {
		t.Errorf("status %d", status)
	}
	want(t, "chat", e, `{"type":"invalid_request_error","param":"model","code":"model_not_found"}`)
	status, _, text = send(t, url+"/v1/messages", unknown)
	if m := object(t, text); status != 404 || at(m, "error", "type") != "not_found_error" || !strings.Contains(text, `nearest is \"qwen\"`) {
		t.Errorf("messages: %d %s", status, text)
	}
	alias := strings.Replace(body(`"max_tokens":1`), "qwen", "claude-haiku-4-5", 1)
	want(t, "model of an alias", ask(t, url+"/v1/messages", alias)["model"], `"qwen"`)
	want(t, "model of an alias", ask(t, url+chatPath, alias)["model"], `"qwen"`)
}

func TestCase09NoModel(t *testing.T) {
	url, _ := serveCases(t, &scriptEngine{pieces: []string{"a"}}, nil)
	want(t, "model", ask(t, url+"/v1/responses", `{"input":"hi"}`)["model"], `"qwen"`)
}

func TestCase10Encodings(t *testing.T) {
	url, _ := serveCases(t, &scriptEngine{pieces: []string{"a"}}, nil)
	gzipped := func(text string) []byte {
		var b bytes.Buffer
		w := gzip.NewWriter(&b)
		if _, err := io.WriteString(w, text); err != nil || w.Close() != nil {
			t.Fatal(err)
		}
		return b.Bytes()
	}
	var deflated bytes.Buffer
	z := zlib.NewWriter(&deflated)
	if _, err := io.WriteString(z, body()); err != nil || z.Close() != nil {
		t.Fatal(err)
	}
	zstded := func(text string, opts ...zstd.EOption) []byte {
		w, err := zstd.NewWriter(nil, opts...)
		if err != nil {
			t.Fatal(err)
		}
		defer w.Close()
		return w.EncodeAll([]byte(text), nil)
	}
	goodZstd := zstded(body())
	// Frames that say little, and want much: a window of 64 MB, and 1 GB of the content.
	wide := append([]byte{0x28, 0xb5, 0x2f, 0xfd, 0x00, 0x80}, 0x01, 0x00, 0x00)
	stated := append([]byte{0x28, 0xb5, 0x2f, 0xfd, 0xa0, 0x00, 0x00, 0x00, 0x40}, 0x01, 0x00, 0x00)
	good := gzipped(body())
	large := gzipped(`{"x":"` + strings.Repeat("x", maxBody) + `"}`)
	tests := []struct {
		name, encoding string
		body           []byte
		want           int
	}{
		{"gzip", "gzip", good, 200},
		{"deflate", "deflate", deflated.Bytes(), 200},
		{"identity", "identity", []byte(body()), 200},
		{"large", "gzip", large, 413},
		{"corrupt", "gzip", append(bytes.Clone(good[:20]), 0xff, 0xff, 0xff), 400},
		{"cut", "gzip", good[:len(good)-9], 400},
		{"no gzip", "gzip", []byte(body()), 400},
		{"no deflate", "deflate", []byte(body()), 400},
		{"zstd", "zstd", goodZstd, 200},
		{"zstd in two frames", "ZSTD", append(zstded(body()[:9]), zstded(body()[9:])...), 200},
		{"zstd of a small body with a large window", "zstd", streamed(t, body(), zstd.WithWindowSize(16<<20)), 200},
		{"zstd of more than a small body", "zstd", zstded(body(`"pad":"` + strings.Repeat("x", smallBody) + `"`)), 200},
		{"zstd that hardly packs", "zstd", zstded(body(`"pad":"` + noise(smallBody+1) + `"`)), 200},
		{"large zstd", "zstd", zstded(`{"x":"` + strings.Repeat("x", maxBody) + `"}`), 413},
		{"large zstd in frames", "zstd", bytes.Repeat(zstded(strings.Repeat(" ", smallBody)), 9), 413},
		{"zstd with a window that is too large", "zstd", wide, 413},
		{"zstd with a size that is too large", "zstd", stated, 413},
		{"zstd cut", "zstd", goodZstd[:len(goodZstd)-5], 400},
		{"zstd of nothing", "zstd", nil, 400},
		{"zstd corrupt", "zstd", append(bytes.Clone(goodZstd[:len(goodZstd)-4]), 1, 2, 3, 4), 400},
		{"zstd magic alone", "zstd", []byte{0x28, 0xb5, 0x2f, 0xfd}, 400},
		{"no zstd", "zstd", []byte(body()), 400},
		{"two encodings", "gzip, zstd", good, 415},
		{"br", "br", []byte{1}, 415},
		{"unknown", "rot13", []byte(body()), 415},
	}
	for _, tt := range tests {
		status, h, text := sendAs(t, http.MethodPost, url+chatPath, reader(tt.body), "Content-Encoding", tt.encoding)
		if status != tt.want {
			t.Errorf("%s: status %d, want %d: %s", tt.name, status, tt.want, text)
		}
		if refused := status == 415; refused != strings.Contains(text, encodings) || refused != (h.Get("Accept-Encoding") == encodings) {
			t.Errorf("%s: it takes %q, %s", tt.name, h.Get("Accept-Encoding"), text)
		}
	}
}

// streamed is zstd as of an encoder that does not know the size beforehand.
func streamed(t *testing.T, text string, opts ...zstd.EOption) []byte {
	t.Helper()
	var b bytes.Buffer
	w, err := zstd.NewWriter(&b, opts...)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.WriteString(w, text); err != nil || w.Close() != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// noise is text of n letters that does not compress well.
func noise(n int) string {
	const letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
	random, out := rand.New(rand.NewPCG(1, 2)), make([]byte, n)
	for i := range out {
		out[i] = letters[random.IntN(len(letters))]
	}
	return string(out)
}

// TestZstdBombs: many small bodies that want much at once take little memory, and no
// place for good.
func TestZstdBombs(t *testing.T) {
	url, g := serveCases(t, &scriptEngine{pieces: []string{"a"}}, nil)
	var b bytes.Buffer
	w, err := zstd.NewWriter(&b)
	if err != nil {
		t.Fatal(err)
	}
	for range 256 {
		w.Write(make([]byte, 1<<20))
	}
	if err := w.Close(); err != nil || b.Len() > 1<<20 {
		t.Fatalf("a bomb of %d bytes: %v", b.Len(), err)
	}
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	var group sync.WaitGroup
	for range 8 {
		group.Go(func() {
			if status, _, text := sendAs(t, http.MethodPost, url+chatPath, bytes.NewReader(b.Bytes()), "Content-Encoding", "zstd"); status != 413 {
				t.Errorf("status %d: %s", status, text)
			}
		})
	}
	group.Wait()
	runtime.ReadMemStats(&after)
	if took := after.HeapSys - before.HeapSys; after.HeapSys > before.HeapSys && took > 12*maxBody {
		t.Errorf("8 bombs of 256 MB took %d MB at a time", took>>20)
	}
	if len(g.large)+len(g.preparing) != 0 {
		t.Errorf("%d and %d places are still held", len(g.large), len(g.preparing))
	}
	if status, _, text := sendAs(t, http.MethodPost, url+chatPath, strings.NewReader(body())); status != 200 {
		t.Errorf("afterwards: %d %s", status, text)
	}
}

func TestCase11UnknownFields(t *testing.T) {
	e := &scriptEngine{pieces: []string{"a"}}
	url, _ := serveCases(t, e, nil)
	unknown := `"context_management":{"edits":[]},"speed":"fast","metadata":{"user_id":"u"},"service_tier":"auto","prompt_cache_key":"k","client_metadata":{}`
	ask(t, url+chatPath, body(unknown, `"include":["x"]`))
	ask(t, url+messagesPath, turnsOf(`{"role":"user","content":[{"type":"text","text":"hi","cache_control":{"type":"ephemeral","scope":"global"}}]}`,
		unknown, `"max_tokens":9`, `"tools":[{"name":"f","input_schema":{"type":"object"},"defer_loading":true,"cache_control":{"type":"ephemeral"}}]`))
	ask(t, url+"/v1/responses", `{"model":"qwen","input":"hi","include":["message.input_image.image_url"],`+unknown+`}`)
}

func TestCase12StreamHeaders(t *testing.T) {
	e := &scriptEngine{block: true}
	url, g := serveCases(t, e, nil)
	g.waits.header = 20 * time.Millisecond
	for _, path := range []string{chatPath, messagesPath, "/v1/responses", "/v1/completions"} {
		request := body(`"stream":true,"max_tokens":5,"input":"hi"`)
		if path == "/v1/completions" {
			request = `{"model":"qwen","prompt":"hi","stream":true}`
		}
		req, err := http.NewRequest(http.MethodPost, url+path, strings.NewReader(request))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Accept-Encoding", "gzip")
		resp, err := http.DefaultClient.Do(req) // returns with the headers, before any token
		if err != nil {
			t.Fatal(err)
		}
		h := resp.Header
		got := fmt.Sprint(h.Get("Content-Type"), " ", h.Get("Cache-Control"), " ", h.Get("X-Accel-Buffering"), " ", h.Get("Content-Encoding"))
		if got != "text/event-stream no-cache no " {
			t.Errorf("%s: headers %q", path, got)
		}
		resp.Body.Close()
	}
}
