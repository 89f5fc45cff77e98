//go:build phone && cgo && linux

package node

import (
	"io"
	"os"
	"slices"
	"strings"
	"testing"

	"kvasird/node/api"
)

// TestPhoneServes: a daemon for ARM, whose command line begins with $KVASIR_PHONE, has
// nothing but the network file. It fetches all experts and computes them for a backbone
// on this machine that holds none; the first tokens are those of the model alone.
func TestPhoneServes(t *testing.T) {
	program := strings.Fields(os.Getenv("KVASIR_PHONE"))
	if len(program) == 0 {
		t.Fatal("KVASIR_PHONE does not say how to run kvasird for ARM: use `make test-arm`")
	}
	n := newNetwork(t, NewNetwork{Replicas: 1})
	alone := n.start("alone", "--model", n.whole, "--listen", "/ip4/127.0.0.1/tcp/0", "--http", Off)
	n.backbone = n.join("backbone", "--model", n.whole, "--experts", "remote", "--wait", "60")
	at, err := n.backbone.await(n.ctx, func(st *api.Status) bool { return localAddr(st) != "" })
	if err != nil {
		t.Fatal(err)
	}
	// In emulation there is no multicast, by which it would find the backbone.
	phone, err := startProgram(program, n.dir, "phone", "--network", n.file, "--listen", "/ip4/127.0.0.2/tcp/0", "--http", Off,
		"--peer", localAddr(at), "--mdns", Off,
		"--memory", "64MB", "--disk", "1GB", "--threads", "1")
	if err != nil {
		t.Fatal(err)
	}
	n.family.list = append(n.family.list, phone)
	for _, c := range []*child{alone, n.backbone} {
		if _, err := c.await(n.ctx, serving); err != nil {
			t.Fatal(err)
		}
	}
	n.covered(n.backbone, 1)
	const count = 8
	full := 0
	for _, q := range questions {
		ask := api.AskRequest{Prompt: q, MaxTokens: count}
		want, _, err := askTokens(n.ctx, alone.client(), ask, io.Discard)
		if err != nil {
			t.Fatal(err)
		}
		got, _, err := askTokens(n.ctx, n.backbone.client(), ask, io.Discard)
		if err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(got, want) {
			t.Errorf("%s\ngot tokens %v, want %v", q, got, want)
		}
		if len(want) == count {
			full++
		}
	}
	if full == 0 {
		t.Errorf("no answer of the model alone has %d tokens", count)
	}
	st, err := phone.client().Status(n.ctx)
	if err != nil {
		t.Fatal(err)
	}
	if !strings.HasPrefix(st.Backend, "cpu armv") {
		t.Errorf("the phone computes with %q, want an ARM kernel", st.Backend)
	}
	if want := reference().model.Layers(); len(st.Rows) != want {
		t.Errorf("the phone computed rows of %d layers, want all %d: %v", len(st.Rows), want, st.Rows)
	}
	t.Logf("%s: %d answers of %d tokens, slices %v, rows %v", st.Backend, full, count, st.Slices, st.Rows)
}
