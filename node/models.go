package node

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"time"

	"kvasird/ggml/store"
	"kvasird/node/api"
	"kvasird/node/client"
)

// storeName is the folder of the model store in the data folder.
const storeName = "models"

// progressEvery is the pace of progress lines.
const progressEvery = 500 * time.Millisecond

// leastOfID is how many digits of an id name a model.
const leastOfID = 4

// openStore opens the node's model store within the budget.
func openStore(cfg Config) (*store.Store, error) {
	return store.Open(filepath.Join(cfg.Data, storeName), cfg.Budget.limits.disk)
}

// doModel carries out a request on the model store. It calls emit, on its own
// goroutine, for progress and the result; an error of emit ends it.
func doModel(ctx context.Context, st *store.Store, req api.ModelRequest, emit func(api.ModelEvent) error) error {
	if req.Action == api.ModelList {
		list := api.ModelEvent{Models: storedModels(st), Done: true}
		if err := errors.Join(st.Problems()...); err != nil {
			list.Note = err.Error()
		}
		return emit(list)
	}
	if req.Action == api.ModelAdd {
		return importModel(ctx, st, req.Paths, emit)
	}
	m, err := findModel(st, req.Model)
	if err != nil {
		return err
	}
	done := api.ModelEvent{Models: []api.StoredModel{storedModel(m)}, Done: true}
	switch req.Action {
	case api.ModelVerify:
		err = withProgress(ctx, "verify", emit, func(ctx context.Context, p func(done, total int64)) error {
			return st.Verify(ctx, m.ID(), p)
		})
		done.Models = []api.StoredModel{storedModel(m)}
	case api.ModelRemove:
		err = st.Remove(m.ID())
	case api.ModelPin, api.ModelUnpin:
		err = st.Pin(m.ID(), req.Action == api.ModelPin)
		done.Models = []api.StoredModel{storedModel(m)}
	default:
		return &api.Error{Code: api.CodeBadRequest, Message: fmt.Sprintf("unknown action %q on models", req.Action)}
	}
	if err != nil {
		return err
	}
	return emit(done)
}

func importModel(ctx context.Context, st *store.Store, paths []string, emit func(api.ModelEvent) error) error {
	if len(paths) == 0 {
		return &api.Error{Code: api.CodeBadRequest, Message: "no file is named"}
	}
	var m *store.Model
	err := withProgress(ctx, "import", emit, func(ctx context.Context, p func(done, total int64)) (err error) {
		m, err = st.Import(ctx, paths, p)
		return err
	})
	if err != nil {
		return err
	}
	return emit(api.ModelEvent{Models: []api.StoredModel{storedModel(m)}, Done: true})
}

// withProgress runs do and emits how far it is, at a pace that people can read.
func withProgress(ctx context.Context, what string, emit func(api.ModelEvent) error, do func(context.Context, func(done, total int64)) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	began, last := time.Now(), time.Time{}
	err := do(ctx, func(done, total int64) {
		now := time.Now()
		if now.Sub(last) < progressEvery && done < total {
			return
		}
		last = now
		p := api.Progress{What: what, Done: done, Total: total}
		if spent := now.Sub(began).Seconds(); spent > 0 {
			p.Rate = float64(done) / spent
		}
		if p.Rate > 0 {
			p.LeftSec = float64(total-done) / p.Rate
		}
		if err := emit(api.ModelEvent{Progress: &p}); err != nil {
			cancel(err)
		}
	})
	if cause := context.Cause(ctx); cause != nil && err != nil {
		return cause
	}
	return err
}

// findModel finds a model by id, the beginning of one, or name.
func findModel(st *store.Store, name string) (*store.Model, error) {
	var found []*store.Model
	for _, m := range st.Models() {
		id := m.ID().String()
		if id == name {
			return m, nil
		}
		if m.Name() == name || len(name) >= leastOfID && strings.HasPrefix(id, name) {
			found = append(found, m)
		}
	}
	switch len(found) {
	case 1:
		return found[0], nil
	case 0:
		return nil, &api.Error{Code: api.CodeNotFound, Message: fmt.Sprintf("no model %q in the store: `kvasir model list` shows what is there", name)}
	}
	return nil, &api.Error{Code: api.CodeBadRequest, Message: fmt.Sprintf("%d models have the name or an id that begins with %q: give more of the id", len(found), name)}
}

func storedModels(st *store.Store) []api.StoredModel {
	out := []api.StoredModel{}
	for _, m := range st.Models() {
		out = append(out, storedModel(m))
	}
	return out
}

func storedModel(m *store.Model) api.StoredModel {
	held, total := m.Bytes()
	out := api.StoredModel{ID: m.ID().String(), Name: m.Name(), Held: held, Total: total, Pinned: m.Pinned()}
	if err := m.Err(); err != nil {
		out.Note = err.Error()
	}
	return out
}

// modelCommand carries out a request through the daemon that holds the data
// folder or, when none runs, on the folder itself.
func modelCommand(ctx context.Context, cfg Config, req api.ModelRequest, emit func(api.ModelEvent) error) error {
	for i, path := range req.Paths { // the daemon works in another folder
		abs, err := filepath.Abs(path)
		if err != nil {
			return err
		}
		req.Paths[i] = abs
	}
	data, err := OpenData(cfg.Data)
	if errors.Is(err, ErrDataBusy) {
		err = client.New(cfg.Control).Model(ctx, req, emit)
		if errors.Is(err, client.ErrNoDaemon) {
			err = fmt.Errorf("data folder %s is %w that does not answer at %s: if it is starting, or a `kvasird model` at work, try again later", cfg.Data, ErrDataBusy, cfg.Control)
		}
		return err
	}
	if err != nil {
		return err
	}
	defer data.Close()
	st, err := openStore(cfg)
	if err != nil {
		return err
	}
	defer st.Close()
	return doModel(ctx, st, req, emit)
}
