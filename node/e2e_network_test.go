//go:build cgo && linux

package node

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"testing"
	"time"

	"kvasird/node/api"
)

// network is a swarm that forms itself: a network file and nodes that are only
// started.
type network struct {
	*swarm
	file string
}

func newNetwork(t *testing.T, opts NewNetwork) *network {
	t.Helper()
	n := &network{swarm: newSwarm(t)}
	n.file = filepath.Join(n.dir, "home.toml")
	opts.Name, opts.Out = "home", n.file
	if err := CreateNetwork(opts, io.Discard); err != nil {
		t.Fatal(err)
	}
	named := filepath.Join(n.dir, "backbone.gguf") // as chat asks for it
	if err := os.Link(n.whole, named); err != nil {
		t.Fatal(err)
	}
	n.whole = named
	return n
}

// join starts a node of the network on this machine.
func (n *network) join(name string, args ...string) *child {
	n.t.Helper()
	return n.start(name, append([]string{"--network", n.file, "--listen", "/ip4/127.0.0.1/tcp/0", "--http", "127.0.0.1:0"}, args...)...)
}

// covered waits until every expert is served by so many volunteers, as c sees it.
func (n *network) covered(c *child, replicas int) {
	n.t.Helper()
	eventually(n.t, func() error {
		maps, err := c.client().Coverage(n.ctx)
		if err != nil {
			return err
		}
		if len(maps) == 0 {
			return errors.New("no model is known")
		}
		return leastCovered(maps[0], replicas)
	})
}

func leastCovered(m api.CoverageMap, replicas int) error {
	if len(m.Layers) == 0 {
		return fmt.Errorf("no layer of %s is known", m.Model)
	}
	for _, l := range m.Layers {
		for e, got := range l.Replicas {
			if got < replicas {
				return fmt.Errorf("layer %d expert %d: %d replicas, want %d", l.Layer, e, got, replicas)
			}
		}
	}
	return nil
}

// TestSwarmFormsItself: one node has the model, three have nothing but the network
// file and room for half of the experts each.
func TestSwarmFormsItself(t *testing.T) {
	n := newNetwork(t, NewNetwork{Replicas: 1})
	began := time.Now()
	n.backbone = n.join("backbone", "--model", n.whole, "--experts", "remote", "--wait", "60")
	var volunteers []*child
	for _, name := range []string{"v1", "v2", "v3"} {
		volunteers = append(volunteers, n.join(name, "--memory", "8MB", "--disk", "1GB"))
	}
	st, err := n.backbone.await(n.ctx, serving)
	if err != nil {
		t.Fatal(err)
	}
	n.http = st.HTTP
	got, _, err := askTokens(n.ctx, n.backbone.client(), api.AskRequest{Prompt: questions[0], MaxTokens: 64}, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("from nothing to %d tokens of an answer: %v", len(got), time.Since(began).Round(time.Millisecond))
	n.sameAsAlone(questions[0], nil)
	n.covered(n.backbone, 1)
	var rows uint64
	for _, v := range volunteers {
		st, err := v.client().Status(context.Background())
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range st.Rows {
			rows += r.Rows
		}
		t.Logf("%s serves %v", v.name, st.Slices)
	}
	if rows == 0 {
		t.Error("the volunteers computed nothing")
	}
}
