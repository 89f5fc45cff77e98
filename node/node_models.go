package node

import (
	"context"
	"errors"
	"fmt"

	"kvasird/ggml/gguf"
	"kvasird/ggml/store"
	"kvasird/market"
	"kvasird/node/api"
)

// Model carries out a request on the model store.
func (n *Node) Model(ctx context.Context, req api.ModelRequest, emit func(api.ModelEvent) error) error {
	switch {
	case n.exchange == nil:
		return n.modelAlone(ctx, req, emit)
	case req.Action == api.ModelAdd:
		return n.addModel(ctx, req, emit)
	case req.Action == api.ModelRemove:
		return n.removeModel(ctx, req, emit)
	}
	defer n.exchange.changed()
	return doModel(ctx, n.store, req, emit)
}

// modelAlone works on the store of a node that does not use it: the folder is
// this daemon's all the same. Who hears that it is done may go on with the store.
func (n *Node) modelAlone(ctx context.Context, req api.ModelRequest, emit func(api.ModelEvent) error) error {
	var done api.ModelEvent
	err := n.withStore(func(st *store.Store) error {
		return doModel(ctx, st, req, func(ev api.ModelEvent) error {
			if ev.Done {
				done = ev
				return nil
			}
			return emit(ev)
		})
	})
	if err != nil {
		return err
	}
	return emit(done)
}

// withStore opens the store for a while.
func (n *Node) withStore(work func(*store.Store) error) error {
	if !n.storeMu.TryLock() {
		return &api.Error{Code: api.CodeBusy, Message: "another command works on the models of this node: try again when it is done"}
	}
	defer n.storeMu.Unlock()
	st, err := openStore(n.cfg)
	if err != nil {
		return err
	}
	return errors.Join(work(st), st.Close())
}

// addModel imports a model and offers it to the peers.
func (n *Node) addModel(ctx context.Context, req api.ModelRequest, emit func(api.ModelEvent) error) error {
	return doModel(ctx, n.store, req, func(ev api.ModelEvent) error {
		if ev.Done {
			if err := n.offer(ctx, ev.Models[0].ID); err != nil {
				ev.Note = fmt.Sprintf("it is in the store, but peers are not told: %v", err)
			}
		}
		return emit(ev)
	})
}

// offer has the exchange know a model that is whole in the store.
func (n *Node) offer(ctx context.Context, text string) error {
	id, err := gguf.ParseModelID(text)
	if err != nil {
		return err
	}
	m := n.store.Model(id)
	if m == nil {
		return errors.New("it was removed again")
	}
	g, err := n.weights.open(ctx, m)
	if err != nil {
		return err
	}
	if _, err := market.ShapeOf(g); err != nil {
		return err
	}
	select {
	case n.exchange.learned <- learned{id: id, g: g}:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// removeModel removes a model that this node does not use.
func (n *Node) removeModel(ctx context.Context, req api.ModelRequest, emit func(api.ModelEvent) error) error {
	m, err := findModel(n.store, req.Model)
	if err != nil {
		return err
	}
	if use := n.useOf(m.ID()); use != "" {
		return &api.Error{Code: api.CodeBadRequest, Message: fmt.Sprintf(
			"model %s is in use: this node %s. Stop the node first, then remove it", m.Name(), use)}
	}
	req.Model = m.ID().String()
	defer n.exchange.changed()
	err = doModel(ctx, n.store, req, emit)
	n.weights.forget(m.ID())
	return err
}

// useOf says what this node does with a model, or "".
func (n *Node) useOf(id gguf.ModelID) string {
	switch {
	case n.file != nil && n.file.id == id, n.cfg.Model.ID != nil && *n.cfg.Model.ID == id:
		return "runs it, or serves experts of it"
	case len(n.workers.loaded()[id]) > 0 || n.exchange.volunteer.has(id):
		return "serves experts of it, or is about to"
	}
	return ""
}
