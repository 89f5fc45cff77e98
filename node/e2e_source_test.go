//go:build cgo && linux

package node

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"kvasird/ggml"
	"kvasird/ggml/store"
	"kvasird/market"
	"kvasird/node/api"
	"kvasird/p2p"
	"kvasird/p2p/fetch"
)

// lie is a model that is given to others with wrong bytes, and perhaps with a wrong
// tree or as another model.
type lie struct {
	shelf
	files, tree bool
}

func (l lie) Shelf([32]byte) fetch.Shelf { return l }

func (l lie) Files() []fetch.File {
	files := l.shelf.Files()
	if l.files {
		files[0].Root[0]++
	}
	return files
}

func (l lie) ReadTree(file int, p []byte, off int64) (int, error) {
	n, err := l.shelf.ReadTree(file, p, off)
	if l.tree && n > 0 {
		p[n-1]++
	}
	return n, err
}

func (l lie) ReadAt(file int, p []byte, off int64) (int, error) {
	n, err := l.shelf.ReadAt(file, p, off)
	if n > 0 {
		p[n-1]++
	}
	return n, err
}

// liar is a member of the network that says it has all of the model.
func (n *network) liar(l lie) *p2p.Host {
	n.t.Helper()
	rt, err := ggml.Open(ggml.Config{})
	if err != nil {
		n.t.Fatal(err)
	}
	genesis, err := ReadNetwork(n.file)
	if err != nil {
		n.t.Fatal(err)
	}
	server := fetch.NewServer(fetch.ServerConfig{Library: l})
	h := n.stranger(func(c *p2p.Config) {
		c.Network, c.Genesis, c.Pack, c.Protocols = "", genesis, Pack(rt), []string{fetch.Protocol}
	}, nil)
	err = h.HandleStream(fetch.Protocol, func(_ *p2p.Peer, c p2p.Conn) { server.Serve(context.Background(), c) })
	if err != nil {
		n.t.Fatal(err)
	}
	topic, err := h.JoinTopic(p2p.TopicConfig{
		Name: market.Topic, MaxBody: market.MaxBody,
		Check: func(p2p.Envelope) error { return nil }, Handle: func(p2p.Envelope) {},
	})
	if err != nil {
		n.t.Fatal(err)
	}
	g, err := l.GGUF(n.ctx)
	if err != nil {
		n.t.Fatal(err)
	}
	defer g.Close()
	shape, err := market.ShapeOf(g)
	if err != nil {
		n.t.Fatal(err)
	}
	says := market.Announcement{Models: []market.ModelNews{{ID: l.ID(), Name: "backbone", Shape: shape, Full: true}}}
	body, err := says.Encode()
	if err == nil {
		err = topic.Publish(body, joinTime)
	}
	if err != nil {
		n.t.Fatal(err)
	}
	return h
}

// TestLyingSources: whoever gives wrong bytes, a wrong tree or another model is
// found out and put out, and the download completes from an honest node.
func TestLyingSources(t *testing.T) {
	t.Parallel()
	n := newNetwork(t, NewNetwork{Replicas: 1})
	ctx, cancel := context.WithTimeout(context.Background(), joinTime)
	t.Cleanup(cancel)
	n.ctx = ctx
	st, err := store.Open(filepath.Join(n.dir, "lies"), 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { st.Close() })
	m, err := st.Import(n.ctx, []string{n.whole}, nil)
	if err != nil {
		t.Fatal(err)
	}
	v := n.join("v")
	at := localAddr(n.sees(v, serving))
	var liars []*p2p.Host
	for _, test := range []struct {
		lie   lie
		fault fetch.Fault
	}{
		{lie{shelf{m}, true, true}, fetch.FaultModel},
		{lie{shelf{m}, false, true}, fetch.FaultTree},
		{lie{shelf{m}, false, false}, fetch.FaultData},
	} {
		h := n.liar(test.lie)
		if _, err := n.meet(h, at); err != nil {
			t.Fatal(err)
		}
		n.says(v, "bad source of weights", h.ID().String()+`","fault":"`+test.fault.String())
		liars = append(liars, h)
	}
	if held := n.held(v); held != 0 {
		t.Errorf("%d bytes of liars are held", held)
	}
	// slow enough that the others are asked too
	n.backbone = n.join("backbone", "--model", n.whole, "--experts", "remote", "--wait", "60", "--upload", "5MB", "--peer", at)
	n.http = n.sees(n.backbone, serving).HTTP
	n.sees(v, servesParts)
	n.covered(n.backbone, 1)
	if out, err := manage(t, v, "verify", "backbone"); err != nil || !strings.Contains(out, "as they should be") {
		t.Errorf("%q, %v", out, err)
	}
	n.sameAsAlone(questions[0], nil)
	for _, h := range liars {
		for { // it is told why only now and then
			var refused *p2p.RefusedError
			_, err := n.meet(h, at)
			if errors.As(err, &refused) && refused.Field == "standing" {
				break
			}
			if err == nil || n.ctx.Err() != nil {
				t.Fatalf("a liar comes back: %v", err)
			}
			time.Sleep(time.Second)
		}
	}
}

// TestFullDisk: a volunteer whose disk is full says so and waits.
func TestFullDisk(t *testing.T) {
	t.Parallel()
	n, at := newJoining(t, NewNetwork{Replicas: 1})
	dir := filepath.Join(n.dir, "v")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, "size=32m,mode=700"); errors.Is(err, syscall.EPERM) {
		t.Skip("only root can make a small disk")
	} else if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { syscall.Unmount(dir, syscall.MNT_DETACH) })
	filler := filepath.Join(dir, "filler")
	if err := os.WriteFile(filler, make([]byte, 24<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	v := n.join("v", "--peer", at, "--disk", "1GB")
	st := n.sees(v, func(st *api.Status) bool {
		return st.Volunteer != nil && strings.Contains(strings.Join(st.Volunteer.Troubles, "\n"), "the disk is full: free some space")
	})
	t.Log(st.Volunteer.Troubles)
	if st.State != api.StateServing || servesParts(st) {
		t.Errorf("it is %s: %+v", st.State, st.Volunteer)
	}
	if err := os.Remove(filler); err != nil {
		t.Fatal(err)
	}
	n.sees(v, func(st *api.Status) bool { return servesParts(st) && len(st.Volunteer.Troubles) == 0 })
	n.covered(n.backbone, 1)
	if out, err := manage(t, v, "verify", "backbone"); err != nil || !strings.Contains(out, "as they should be") {
		t.Errorf("%q, %v", out, err)
	}
}
