//go:build cgo && linux

package node

import (
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"kvasird/ggml/gguf"
	"kvasird/node/api"
	"kvasird/node/meter"
	"kvasird/settle"
)

// hot asks one thing after another until the cache of a node is as it should be.
func (n *network) hot(status func() *api.Status, ask func(question string), good func(*api.HotExperts) bool) *api.HotExperts {
	n.t.Helper()
	for i := 0; ; i++ {
		ask(questions[i%len(questions)])
		h := status().Hot
		if h == nil {
			n.t.Fatal("the status says nothing of hot experts")
		}
		if good(h) {
			return h
		}
		if n.ctx.Err() != nil {
			n.t.Fatalf("%+v", h)
		}
		time.Sleep(200 * time.Millisecond)
	}
}

// cacheOf is a backbone that knows the network's model by its id alone, beside a worker that has
// it.
func (n *network) cacheOf(budget string) (id string, args []string) {
	w, _ := n.here("worker", "--role", "worker", "--model", n.whole)
	id = w.file.id.String()
	return id, []string{"--peer", localAddr(must(w.Status(n.ctx))(n.t)), "--role", "backbone,entry", "--model", id, "--cache", budget, "--wait", "60", "--disk", "1GB"}
}

// TestHotExperts: a backbone fetches a part of the experts, as many as its budget allows, and its
// answers stay those of the model. After a restart they are there before anything was asked.
func TestHotExperts(t *testing.T) {
	n := newNetwork(t, NewNetwork{})
	_, args := n.cacheOf("4MB")
	n.backbone = n.join("entry", args...)
	st, err := n.backbone.await(n.ctx, serving)
	if err != nil {
		t.Fatal(err)
	}
	n.http = st.HTTP
	status := func() *api.Status { return must(n.backbone.client().Status(n.ctx))(t) }
	h := n.hot(status, func(q string) {
		code, got, body := n.chat(long(q), nil)
		if want := reference().answer(t, q, true); code != 200 || got != want {
			t.Fatalf("status %d, answer %q, want %q: %s", code, got, want, body)
		}
	}, func(h *api.HotExperts) bool { return h.Experts > 20 && h.Recent > 0.3 && h.Trouble == "" })
	t.Logf("%+v", *h)
	if h.Bytes > h.Budget || h.Budget != 4e6 || h.Fetched < uint64(h.Experts) || h.Hits > h.Pairs {
		t.Errorf("%+v", *h)
	}

	n.backbone.stop()
	n.backbone = n.join("entry", args...)
	if _, err = n.backbone.await(n.ctx, func(st *api.Status) bool { return st.Hot != nil && st.Hot.Experts >= h.Experts-4 }); err != nil {
		t.Fatal(err)
	}
}

// TestHotExpertsAreMetered: what a backbone computes itself it is credited for, and the worker for
// the rest.
func TestHotExpertsAreMetered(t *testing.T) {
	n := newNetwork(t, NewNetwork{Token: deskSettings()})
	_, args := n.cacheOf("4MB")
	entry, _ := n.here("entry", args...)
	n.serves(entry)
	h := n.hot(func() *api.Status { return must(entry.Status(n.ctx))(t) }, func(q string) { n.answered(entry, q, 40) },
		func(h *api.HotExperts) bool { return h.Experts > 20 && h.Recent > 0.3 && h.Trouble == "" })
	d := entry.dispatching()
	if held, counted := d.hot.kernel.Bytes(), d.hot.cache.Load().Stats().Bytes; held > counted {
		t.Errorf("the kernel holds %d bytes, the cache counts %d", held, counted)
	}
	n.reports(entry, settle.QuoteID{7}, 100000) // of what was asked so far
	hits, pairs := d.LocalPairs(), d.Pairs()
	list := n.pays(entry, 20, 60, 120)
	n.accountsFor(list, 2)
	want := float64(d.LocalPairs()-hits) / float64(d.Pairs()-pairs)
	self := must(meter.NodeOf(entry.host.ID().String()))(t)
	var own, all float64
	for _, p := range list {
		for _, c := range p.credit {
			for _, l := range c.Lines {
				if l.Part > 0 && int(l.Part)%2 == gguf.ExpertPart(0)%2 && int(l.Part) <= gguf.ExpertPart(3) {
					all += float64(l.Units)
					if c.Worker == self {
						own += float64(l.Units)
					}
				}
			}
		}
	}
	t.Logf("%+v; %.3f of the pairs credited, %.3f computed here", *h, own/all, want)
	if share := own / all; share < want-0.05 || share > want+0.05 {
		t.Errorf("%.3f of the pairs are credited to the backbone, which computed %.3f of them", share, want)
	}
}

// TestHotExpertsOnDisk: what is kept no more goes from the disk too, what is kept stays, and is
// fetched again when it was lost.
func TestHotExpertsOnDisk(t *testing.T) {
	n := newNetwork(t, NewNetwork{})
	id, args := n.cacheOf("1MB")
	entry, _ := n.here("entry", args...)
	n.serves(entry)
	h := must(entry.openHot(entry.backbone.Load().file, 4e6))(t)
	defer h.kernel.Close()
	h.stored, h.from = entry.store.Model(must(gguf.ParseModelID(id))(t)), h.file.Model
	var all []int32
	for e := range int32(h.from.Experts()) {
		all = append(all, e)
	}
	const layer = 1
	for _, keep := range [][]int32{all, {3, 20, 21}, {20, 21, 22}, nil, {9}} {
		if got, err := h.Fetch(t.Context(), layer, keep); err != nil || !slices.Equal(got, keep) {
			t.Fatalf("fetched %v of %v: %v", got, keep, err)
		}
		if err := h.Put(t.Context(), layer, keep); err != nil {
			t.Fatal(err)
		}
		here := h.onDisk(layer, all)
		if held := h.onDisk(layer, keep); !slices.Equal(held, keep) {
			t.Errorf("of %v, %v are on disk", keep, held)
		}
		if len(keep) < len(all) && len(here) > len(keep)+12 { // 256 KiB have some more
			t.Errorf("%v are on disk, %v are kept", here, keep)
		}
		if (h.kernel.Bytes() > 0) != (len(keep) > 0) {
			t.Errorf("%d bytes in memory with %v kept", h.kernel.Bytes(), keep)
		}
	}
}

// TestCacheOfAFileWithHoles: without a network file there is nobody to fetch experts from.
func TestCacheOfAFileWithHoles(t *testing.T) {
	s := newSwarm(t)
	m := must(gguf.OpenModel(s.whole))(t)
	defer m.Close()
	sparse := filepath.Join(s.dir, "holes.gguf")
	if err := gguf.WriteBackbone(t.Context(), sparse, m); err != nil {
		t.Fatal(err)
	}
	s.refused(t, "holes", []string{"model.cache", "has holes", "network with a file"}, append(loopback, "--model", sparse, "--cache", "1MB")...)
}

func TestCacheSetting(t *testing.T) {
	for _, tt := range []struct {
		m    ModelConfig
		want string
	}{
		{ModelConfig{Cache: "1MB", Experts: ExpertsSwarm}, "model.cache: with model.experts"},
		{ModelConfig{Cache: "1MB", Experts: ExpertsHere}, "model.cache: with model.experts"},
		{ModelConfig{Cache: "many"}, `model.cache "many"`},
		{ModelConfig{Cache: "0"}, ""},
		{ModelConfig{Cache: "2GiB", Experts: ExpertsRemote}, ""},
	} {
		cfg := Config{Data: t.TempDir(), Model: tt.m}
		err := cfg.Validate()
		if (err == nil) != (tt.want == "") || err != nil && !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%+v: %v, want %q", tt.m, err, tt.want)
		}
	}
}
