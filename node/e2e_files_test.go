//go:build cgo && linux

package node

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"kvasird/ggml"
	"kvasird/ggml/gguf"
	"kvasird/node/api"
)

// loopback are flags of a daemon that nobody needs to find.
var loopback = []string{"--listen", "/ip4/127.0.0.1/tcp/0", "--http", Off}

// refused starts a daemon that must end by itself, with status 1 and these words.
func (s *swarm) refused(t *testing.T, name string, words []string, args ...string) {
	t.Helper()
	c, err := startChild(s.dir, name, append(args, "--threads", "1")...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.stop() })
	awaitEnd(t, c, 1)
	for _, w := range words {
		if !strings.Contains(c.lastWords(), w) {
			t.Errorf("%s does not say %q:\n%s", name, w, c.lastWords())
		}
	}
}

// awaitEnd sees that a daemon ends with a status within 10 s and leaves nothing.
func awaitEnd(t *testing.T, c *child, status int) {
	t.Helper()
	select {
	case <-c.exited:
	case <-time.After(10 * time.Second):
		t.Fatalf("%s goes on\n%s", c.name, c.lastWords())
	}
	state := c.cmd.ProcessState.Sys().(syscall.WaitStatus)
	if !state.Exited() || state.ExitStatus() != status {
		t.Errorf("%s ended by %v, want exit status %d\n%s", c.name, c.cmd.ProcessState, status, c.lastWords())
	}
	nothingLeft(t, c)
}

// nothingLeft sees that a daemon that ended left no process, socket or folder, but for
// its store.
func nothingLeft(t *testing.T, c *child) {
	t.Helper()
	for _, p := range processes(t) {
		if strings.Contains(p.line, c.dir+"\x00") || strings.HasPrefix(p.line, c.cmd.Path+"\x00probe\x00") {
			t.Errorf("%s left process %d: %q", c.name, p.pid, p.line)
		}
	}
	files, err := os.ReadDir(c.dir)
	if err != nil && !os.IsNotExist(err) {
		t.Fatal(err)
	}
	for _, f := range files {
		if f.Type()&os.ModeSocket != 0 || f.IsDir() && f.Name() != kvName {
			t.Errorf("%s left %s (%v)", c.name, f.Name(), f.Type())
		}
	}
}

type process struct {
	pid, parent int
	line        string // arguments, each ended by a zero byte
}

// processes lists the living processes.
func processes(t *testing.T) []process {
	t.Helper()
	list, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		t.Fatal(err)
	}
	var out []process
	for _, path := range list {
		var p process
		var state string
		text, _ := os.ReadFile(path) // the process may be gone
		_, rest, _ := strings.Cut(string(text), ") ")
		if n, _ := fmt.Sscan(rest, &state, &p.parent); n != 2 || state == "Z" {
			continue
		}
		p.pid, _ = strconv.Atoi(filepath.Base(filepath.Dir(path)))
		line, _ := os.ReadFile(filepath.Join(filepath.Dir(path), "cmdline"))
		p.line = string(line)
		out = append(out, p)
	}
	return out
}

// write makes a file in the swarm's folder.
func (s *swarm) write(name string, data []byte) string {
	s.t.Helper()
	path := filepath.Join(s.dir, name)
	if err := os.WriteFile(path, data, 0o600); err != nil {
		s.t.Fatal(err)
	}
	return path
}

func (s *swarm) readWhole() []byte {
	s.t.Helper()
	data, err := os.ReadFile(s.whole)
	if err != nil {
		s.t.Fatal(err)
	}
	return data
}

// generate makes a random-weight model.
func (s *swarm) generate(name string, cfg ggml.GenerateConfig) string {
	s.t.Helper()
	rt, err := ggml.Open(ggml.Config{})
	if err != nil {
		s.t.Fatal(err)
	}
	path := filepath.Join(s.dir, name)
	if err := rt.GenerateModel(path, cfg); err != nil {
		s.t.Fatal(err)
	}
	return path
}

// patchMeta sets a u32 of the metadata.
func patchMeta(t *testing.T, file []byte, key string, value uint32) []byte {
	t.Helper()
	i := bytes.Index(file, []byte(key))
	if i < 0 {
		t.Fatalf("no %s", key)
	}
	file = bytes.Clone(file)
	binary.LittleEndian.PutUint32(file[i+len(key)+4:], value)
	return file
}

// hostile is a well-formed file on which llama.cpp's loader fails an assertion.
func (s *swarm) hostile() string {
	return s.write("hostile.gguf", patchMeta(s.t, s.readWhole(), "qwen3moe.expert_used_count", 99))
}

// integerExperts is a well-formed file whose experts have a type that the CPU
// backend says it can multiply with, and cannot.
func (s *swarm) integerExperts() string {
	path := s.generate("integers.gguf", ggml.GenerateConfig{Arch: "qwen3moe", Layers: 1})
	data, err := os.ReadFile(path)
	if err != nil {
		s.t.Fatal(err)
	}
	for _, name := range []string{"up", "gate", "down"} {
		entry := "blk.0.ffn_" + name + "_exps.weight"
		i := bytes.Index(data, []byte(entry)) + len(entry) + 4 + 3*8
		binary.LittleEndian.PutUint32(data[i:], 26) // i32, as wide as f32
	}
	return s.write("integers.gguf", data)
}

func TestBadModelFiles(t *testing.T) {
	s := newSwarm(t)
	whole := s.readWhole()
	garbage := make([]byte, 64<<10)
	rand.NewChaCha8([32]byte{1}).Read(garbage)
	folder := filepath.Join(s.dir, "folder.gguf")
	if err := os.Mkdir(folder, 0o700); err != nil {
		t.Fatal(err)
	}
	both := []string{"backbone", "worker"}
	tests := []struct {
		name, path, say string
		roles           []string
	}{
		{"missing", filepath.Join(s.dir, "missing.gguf"), "no such file", both},
		{"folder", folder, "not a regular file", both},
		{"empty", s.write("empty.gguf", nil), "0 are left in the file", both},
		{"garbage", s.write("garbage.gguf", garbage), "magic is", both},
		{"header cut", s.write("header.gguf", whole[:4000]), "are left in the file", both},
		{"data cut", s.write("data.gguf", whole[:len(whole)/2]), "end past the file", both},
		// a worker never gives its file to the code that asserts this
		{"more used than there are", s.hostile(), "GGML_ASSERT(n_expert_used_max <= hparams.n_expert) failed", both[:1]},
		{"integer experts", s.integerExperts(), "type i32", both[1:]},
		{"integer experts", s.integerExperts(), "llama.cpp aborts", both[:1]},
	}
	for _, test := range tests {
		for _, role := range test.roles {
			t.Run(test.name+" "+role, func(t *testing.T) {
				s.refused(t, "bad", []string{test.path, test.say, "--model"}, append(loopback, "--model", test.path, "--role", role)...)
			})
		}
	}
}

// probeOf waits for the probe child of a backbone and holds it.
func probeOf(t *testing.T, c *child) (pid int) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); time.Now().Before(end); time.Sleep(2 * time.Millisecond) {
		for _, p := range processes(t) {
			if p.parent == c.cmd.Process.Pid && strings.Contains(p.line, "\x00probe\x00") {
				syscall.Kill(p.pid, syscall.SIGSTOP)
				return p.pid
			}
		}
	}
	t.Fatalf("no probe\n%s", c.lastWords())
	return 0
}

func TestEndWhileProbing(t *testing.T) {
	s := newSwarm(t)
	for _, sig := range []syscall.Signal{syscall.SIGTERM, syscall.SIGKILL} {
		c := s.start("probing-"+sig.String(), append(loopback, "--model", s.whole, "--role", "backbone")...)
		pid := probeOf(t, c)
		c.cmd.Process.Signal(sig)
		if sig == syscall.SIGTERM {
			awaitEnd(t, c, 0)
		}
		<-c.exited
		for end := time.Now().Add(5 * time.Second); syscall.Kill(pid, 0) == nil; time.Sleep(10 * time.Millisecond) {
			if time.Now().After(end) {
				syscall.Kill(pid, syscall.SIGKILL)
				t.Fatalf("%v of the backbone left its probe", sig)
			}
		}
	}
}

// dense rewrites the shipped model as one without experts: the first expert of
// each layer is its feed forward, and there is no router.
func (s *swarm) dense() string {
	s.t.Helper()
	m, err := gguf.OpenModel(s.whole)
	if err != nil {
		s.t.Fatal(err)
	}
	defer m.Close()
	le := binary.LittleEndian
	text := func(t string) []byte { return append(le.AppendUint64(nil, uint64(len(t))), t...) }
	var index, data []byte
	tensors := 0
	for _, t := range m.Tensors() {
		if strings.Contains(t.Name, "ffn_gate_inp") {
			continue
		}
		dims, size := t.Shape.Dims(), t.Bytes
		if strings.Contains(t.Name, "_exps.") {
			dims, size = 2, size/int64(m.Experts())
		}
		index = append(index, text(strings.Replace(t.Name, "_exps.", ".", 1))...)
		index = le.AppendUint32(index, uint32(dims))
		for _, d := range t.Shape[:dims] {
			index = le.AppendUint64(index, uint64(d))
		}
		index = le.AppendUint64(le.AppendUint32(index, uint32(t.DType)), uint64(len(data)))
		from, err := m.Section(t.Name)
		if err != nil {
			s.t.Fatal(err)
		}
		at := len(data)
		data = append(data, make([]byte, (size+31)/32*32)...)
		if _, err := io.ReadFull(from, data[at:at+int(size)]); err != nil {
			s.t.Fatal(err)
		}
		tensors++
	}
	file := s.denseMeta(m, text)
	le.PutUint64(file[8:], uint64(tensors))
	file = append(file, index...)
	file = append(file, make([]byte, (len(file)+31)/32*32-len(file))...)
	return s.write("dense.gguf", append(file, data...))
}

// denseMeta is the shipped file up to its tensor index, as of architecture qwen3.
func (s *swarm) denseMeta(m *gguf.Model, text func(string) []byte) []byte {
	file := s.readWhole()
	for _, t := range m.Tensors() {
		if i := bytes.Index(file, text(t.Name)); i >= 0 {
			file = file[:i]
		}
	}
	for i := range m.Meta().Len() {
		key := m.Meta().At(i).Key
		if field, ok := strings.CutPrefix(key, "qwen3moe."); ok {
			renamed := "qwen3." + field
			switch field {
			case "expert_feed_forward_length":
				renamed = "qwen3.feed_forward_length"
			case "expert_count", "expert_used_count", "feed_forward_length":
				renamed = "unused." + field
			}
			file = bytes.Replace(file, text(key), text(renamed), 1)
		}
	}
	return bytes.Replace(file, text("qwen3moe"), text("qwen3"), 1)
}

func TestModelWithoutExperts(t *testing.T) {
	s := newSwarm(t)
	path := s.dense()
	s.backbone = s.start("plain", "--model", path, "--listen", "/ip4/127.0.0.1/tcp/0", "--http", "127.0.0.1:0")
	st, err := s.backbone.await(s.ctx, serving)
	if err != nil {
		t.Fatal(err)
	}
	s.http = st.HTTP
	req := long(questions[0])
	req["model"] = "dense"
	status, text, body := s.chat(req, nil)
	if status != http.StatusOK || text == "" {
		t.Errorf("status %d, answer %q: %s", status, text, body)
	}
	s.refused(t, "remote", []string{path, "has no experts", `"here"`}, append(loopback, "--model", path, "--experts", "remote")...)
	s.refused(t, "worker", []string{path, "has no experts: a worker has nothing to do"}, append(loopback, "--model", path, "--role", "worker")...)
}

// TestWorkerWithAnotherModel has one worker with a model of the same shapes.
func TestWorkerWithAnotherModel(t *testing.T) {
	s := newSwarm(t)
	s.worker("w1")
	right := s.whole
	s.whole = s.generate("other.gguf", ggml.GenerateConfig{Arch: "qwen3moe", Layers: 4, Experts: 32, ExpertsUsed: 4, Type: "Q4_K"})
	other := s.worker("other")
	s.whole = right
	s.run()
	ids := []string{modelID(t, s.workers[0]), modelID(t, other)}
	_, err := s.backbone.await(s.ctx, func(st *api.Status) bool {
		for _, p := range st.Peers {
			if strings.HasSuffix(s.addrs[1], p.ID) {
				return strings.Contains(p.Reason, ids[0]) && strings.Contains(p.Reason, ids[1])
			}
		}
		return false
	})
	if err != nil {
		t.Errorf("the backbone does not name both models in its status: %v", err)
	}
	if words := other.lastWords(); !strings.Contains(words, ids[0]) || !strings.Contains(words, ids[1]) {
		t.Errorf("the worker does not name both models:\n%s", words)
	}
	s.sameAsAlone(questions[0], nil)
}

func modelID(t *testing.T, c *child) string {
	t.Helper()
	st, err := c.client().Status(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	return st.Model.ID
}

func TestModes(t *testing.T) {
	s := newSwarm(t)
	w := s.worker("w1")
	for name, want := range map[string]os.FileMode{"": 0o700, "identity.key": 0o600, api.SocketName: 0o600, "lock": 0o600} {
		info, err := os.Stat(filepath.Join(w.dir, name))
		if err != nil {
			t.Fatal(err)
		}
		if info.Mode().Perm() != want {
			t.Errorf("%s has mode %04o, want %04o", filepath.Join("DATA", name), info.Mode().Perm(), want)
		}
	}
}
