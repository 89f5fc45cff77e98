//go:build cgo && linux

package node

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"kvasird/ggml/tiny"
	"kvasird/node/api"
)

// manage runs `kvasird model` beside a running daemon.
func manage(t *testing.T, c *child, action string, args ...string) (string, error) {
	t.Helper()
	cfg := Config{Data: c.dir}
	if err := cfg.Validate(); err != nil {
		t.Fatal(err)
	}
	var out, progress bytes.Buffer
	err := ManageModels(t.Context(), cfg, action, args, &out, &progress)
	return out.String(), err
}

// TestModelAddedToRunningNode: a model that is added to a running node without
// one is announced and served to a volunteer that has none.
func TestModelAddedToRunningNode(t *testing.T) {
	n := newNetwork(t, NewNetwork{Replicas: 1, Admission: "open"})
	name := strings.TrimSuffix(filepath.Base(n.whole), ".gguf")
	source := n.join("source", "--role", "entry")
	taker := n.join("taker", "--memory", "8MB", "--disk", "1GB")
	for _, c := range []*child{source, taker} {
		if _, err := c.await(n.ctx, serving); err != nil {
			t.Fatal(err)
		}
	}
	if out, err := manage(t, source, "list"); err != nil || !strings.Contains(out, "No model") {
		t.Fatalf("%q, %v", out, err)
	}
	for _, tt := range []struct{ action, arg, want string }{
		{"add", filepath.Join(n.dir, "none.gguf"), "no such file"},
		{"add", n.file, "not a usable GGUF"},
		{"pin", "none", `no model "none"`},
	} {
		if out, err := manage(t, source, tt.action, tt.arg); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s %s: %q, %v, want %q", tt.action, tt.arg, out, err, tt.want)
		}
	}
	t.Chdir(filepath.Dir(n.whole)) // a relative path is meant from here, not from the daemon's folder
	if out, err := manage(t, source, "add", filepath.Base(n.whole)); err != nil || !strings.HasPrefix(out, "Added "+name) || strings.Contains(out, "But") {
		t.Fatalf("%q, %v", out, err)
	}
	st, err := taker.await(n.ctx, func(st *api.Status) bool {
		if st.Volunteer == nil || st.Reach == nil {
			return false
		}
		for _, p := range st.Volunteer.Parts {
			if p.State == api.PartServing && p.Model == name {
				return true
			}
		}
		return false
	})
	if err != nil {
		t.Fatal(err)
	}
	v, r := st.Volunteer, st.Reach
	if v.Memory.Used == 0 || v.Memory.Limit != 8e6 || v.Disk.Used == 0 || v.Disk.Limit != 1e9 {
		t.Errorf("memory %+v, disk %+v", v.Memory, v.Disk)
	}
	if r.DirectPeers != 1 || r.Reach == "" || r.DHT == "" || len(r.Listening) == 0 || st.Admission != "open" || strings.Contains(st.Network, "/") {
		t.Errorf("network %q, %q, %+v", st.Network, st.Admission, r)
	}
	if len(st.Peers) != 1 || st.Peers[0].Path != "direct" {
		t.Errorf("peers %+v", st.Peers)
	}
	if out, err := manage(t, taker, "remove", name); err == nil || !strings.Contains(err.Error(), "is in use: this node serves experts of it") {
		t.Errorf("remove what is served: %q, %v", out, err)
	}
	if st, err := source.client().Status(n.ctx); err != nil || st.Volunteer != nil || st.Reach == nil {
		t.Errorf("the source is no volunteer: %+v, %v", st, err)
	}
	for _, action := range []string{"pin", "verify", "remove", "add"} {
		arg := name
		if action == "add" {
			arg = n.whole
		}
		if out, err := manage(t, source, action, arg); err != nil || !strings.Contains(out, name) || strings.Contains(out, "But") {
			t.Errorf("%s: %q, %v", action, out, err)
		}
	}
}

// TestModelOfPlainNode: a daemon without a network file has a store all the same,
// though it does not use it.
func TestModelOfPlainNode(t *testing.T) {
	s := newSwarm(t)
	worker := s.worker("worker", "--slice", "0:1/0:4")
	other := filepath.Join(s.dir, "other")
	if err := os.Mkdir(other, 0o700); err != nil {
		t.Fatal(err)
	}
	file, err := tiny.Write(other)
	if err != nil {
		t.Fatal(err)
	}
	name := strings.TrimSuffix(tiny.Name, ".gguf")
	for _, tt := range []struct{ action, arg, want string }{
		{"add", file, "Added " + name}, {"list", "", name}, {"remove", name, "Removed " + name}, {"list", "", "No model"},
	} {
		var args []string
		if tt.arg != "" {
			args = append(args, tt.arg)
		}
		if out, err := manage(t, worker, tt.action, args...); err != nil || !strings.Contains(out, tt.want) {
			t.Errorf("%s: %q, %v, want %q", tt.action, out, err, tt.want)
		}
	}
	st, err := worker.client().Status(s.ctx)
	if err != nil || st.Reach != nil || st.Network != "kvasir" {
		t.Errorf("%+v, %v, want no reach", st, err)
	}
}
