package node

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"regexp"
	"slices"
	"sync"
	"time"

	"github.com/libp2p/go-libp2p/core/peer"

	"kvasird/ggml/gguf"
	"kvasird/ggml/store"
	"kvasird/node/api"
	"kvasird/p2p"
	"kvasird/p2p/fetch"
)

// maxHeader bounds what is fetched of a file before its header is understood.
const maxHeader = 256 << 20

// weights is the node's store of models: how it fills from peers, and what it
// gives to them.
type weights struct {
	store  *store.Store
	host   *p2p.Host
	client *fetch.Client
	server *fetch.Server
	// holders names the peers that announce parts of a model, set before the
	// first download.
	holders func(gguf.ModelID) []holder
	log     *slog.Logger

	mu     sync.Mutex // guards what follows
	opened map[gguf.ModelID]*gguf.Model
	under  map[string]api.Progress // downloads under way, by what they are for
}

// holder is a peer that has something of a model.
type holder struct {
	id    peer.ID
	whole bool
	name  string // of the model, as the peer says it
}

func openWeights(cfg Config, st *store.Store, host *p2p.Host, busy func() bool, log *slog.Logger) *weights {
	w := &weights{store: st, host: host, log: log, opened: map[gguf.ModelID]*gguf.Model{}, under: map[string]api.Progress{}}
	w.server = fetch.NewServer(fetch.ServerConfig{Library: library{st}, Rate: cfg.Budget.limits.upload, Busy: busy})
	w.client = fetch.NewClient(fetch.ClientConfig{
		Rate: cfg.Budget.limits.download, Blame: w.blame, Logger: log,
		VerifyManifest: func(model [32]byte, files []fetch.File) error {
			if got := gguf.ManifestID(sumsOf("", files)); got != gguf.ModelID(model) {
				return fmt.Errorf("these files are model %v", got)
			}
			return nil
		},
	})
	return w
}

// blame passes on what a source did wrong; slowness is nobody's fault.
func (w *weights) blame(e *fetch.BadSourceError) {
	w.log.Warn("bad source of weights", "peer", e.Source, "fault", e.Fault.String(), "error", e.Err)
	if id, err := peer.Decode(e.Source); err == nil && e.Fault.Malicious() {
		w.host.Blame(id, p2p.WrongData, e.Error())
	}
}

// serve answers a peer that fetches.
func (w *weights) serve(p *p2p.Peer, c p2p.Conn) {
	err := w.server.Serve(context.Background(), c)
	if errors.Is(err, fetch.ErrMalformed) {
		w.host.Blame(p.ID, p2p.Malformed, err.Error())
	}
	if err != nil {
		w.log.Info("fetch session ended", "peer", p.ID.String(), "error", err)
	}
}

// sources lists the ready peers that have something of a model, the ones that
// have all of it last: they are the fewest.
func (w *weights) sources(id gguf.ModelID) []fetch.Source {
	list := w.holders(id)
	slices.SortStableFunc(list, func(a, b holder) int { return cmp.Compare(intOf(a.whole), intOf(b.whole)) })
	var out []fetch.Source
	for _, h := range list {
		if w.host.Peer(h.id) != nil {
			out = append(out, fetch.FromPeer(w.host, h.id))
		}
	}
	return out
}

func intOf(b bool) int {
	if b {
		return 1
	}
	return 0
}

// learn has the header of a model in the store, fetching it when need be. The
// returned model is closed with the weights.
func (w *weights) learn(ctx context.Context, id gguf.ModelID) (*store.Model, *gguf.Model, error) {
	m, err := w.meet(ctx, id)
	if err != nil {
		return nil, nil, err
	}
	if g := w.known(id); g != nil {
		return m, g, nil
	}
	for file := range m.Files() {
		if err := w.header(ctx, m, file); err != nil {
			return nil, nil, err
		}
	}
	g, err := w.open(ctx, m)
	return m, g, err
}

// known returns a model whose header was learned, or nil.
func (w *weights) known(id gguf.ModelID) *gguf.Model {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.opened[id]
}

// adopt has a model that somebody else opened be known, who closes it.
func (w *weights) adopt(id gguf.ModelID, g *gguf.Model) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.opened[id] = g
}

// open opens a stored model whose header is held, once.
func (w *weights) open(ctx context.Context, m *store.Model) (*gguf.Model, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if g := w.opened[m.ID()]; g != nil {
		return g, nil
	}
	g, err := m.GGUF(ctx)
	if err == nil {
		w.opened[m.ID()] = g
	}
	return g, err
}

// forget closes a model that was removed from the store.
func (w *weights) forget(id gguf.ModelID) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if g := w.opened[id]; g != nil {
		g.Close()
		delete(w.opened, id)
	}
}

// meet has a model's manifest in the store.
func (w *weights) meet(ctx context.Context, id gguf.ModelID) (*store.Model, error) {
	if m := w.store.Model(id); m != nil {
		return m, nil
	}
	list := w.holders(id)
	errs := []error{fmt.Errorf("nobody who is connected has model %v", id)}
	for _, h := range list {
		if w.host.Peer(h.id) == nil {
			continue
		}
		files, err := w.client.Manifest(ctx, fetch.FromPeer(w.host, h.id), id)
		if err == nil {
			return w.store.Create(id, sumsOf(h.name, files))
		}
		errs = append(errs, err)
	}
	if len(errs) > 1 {
		errs = errs[1:]
	}
	return nil, errors.Join(errs...)
}

// header has the header of a file in the store.
func (w *weights) header(ctx context.Context, m *store.Model, file int) error {
	for {
		need, held, err := m.HeaderNeeds(file)
		switch {
		case err != nil:
			return err
		case held:
			return nil
		case need.Len > maxHeader:
			return fmt.Errorf("model %s: the header of file %d takes more than %s", m.Name(), file+1, bytesText(maxHeader))
		}
		if err := w.fetch(ctx, m, map[int][]store.Span{file: {need}}, "header of "+m.Name()); err != nil {
			return err
		}
	}
}

// fetch brings spans of a model into the store, waiting for sources. what says
// in the status what they are for.
func (w *weights) fetch(ctx context.Context, m *store.Model, spans map[int][]store.Span, what string) error {
	return w.bring(ctx, m, spans, what, true)
}

// fetchNow is fetch that fails when nobody who is connected has the rest.
func (w *weights) fetchNow(ctx context.Context, m *store.Model, spans map[int][]store.Span, what string) error {
	return w.bring(ctx, m, spans, what, false)
}

func (w *weights) bring(ctx context.Context, m *store.Model, spans map[int][]store.Span, what string, wait bool) error {
	release, err := m.Reserve(spans)
	if err != nil {
		return err
	}
	defer release()
	defer w.note(what, nil)
	err = w.client.Fetch(ctx, fetch.Request{
		Model: m.ID(), Sink: shelf{m}, Spans: fetchSpans(spans), Wait: wait,
		Sources: func() []fetch.Source { return w.sources(m.ID()) },
		Progress: func(p fetch.Progress) {
			w.note(what, &api.Progress{
				What: what, Done: p.Done, Total: p.Total, Rate: p.Rate, LeftSec: max(0, p.Left.Seconds()), Sources: len(p.Sources),
			})
		},
	})
	return errors.Join(err, m.Flush())
}

// fetchPatiently is fetch that waits for disk space too; note is told why, and nil
// at the end.
func (w *weights) fetchPatiently(ctx context.Context, m *store.Model, spans map[int][]store.Span, what string, note func(error)) error {
	for {
		err := w.fetch(ctx, m, spans, what)
		var full *gguf.DiskFullError
		if err == nil {
			note(nil)
		}
		if !errors.As(err, &full) {
			return err
		}
		note(fmt.Errorf("%s: the disk is full: free some space, and the download goes on by itself", full.Path))
		select {
		case <-time.After(fullPause):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (w *weights) note(what string, p *api.Progress) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if p == nil {
		delete(w.under, what)
		return
	}
	w.under[what] = *p
}

// progress lists the downloads under way.
func (w *weights) progress() []api.Progress {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.SortedFunc(maps.Values(w.under), func(a, b api.Progress) int { return cmp.Compare(a.What, b.What) })
}

// Close closes the opened models.
func (w *weights) Close() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, g := range w.opened {
		g.Close()
	}
	clear(w.opened)
	return nil
}

var partOf = regexp.MustCompile(`-\d{5}-of-\d{5}$`)

// partName names file i of a model, as llama.cpp names the parts of a split one.
func partName(name string, i, of int) string {
	name = partOf.ReplaceAllString(cmp.Or(name, "model"), "")
	if of == 1 {
		return name + ".gguf"
	}
	return fmt.Sprintf("%s-%05d-of-%05d.gguf", name, i+1, of)
}

// fullPause is how long a download waits for disk space to return.
const fullPause = 5 * time.Second

// fetchPause is how long to wait after a failed attempt to learn of a model.
const fetchPause = 5 * time.Second
