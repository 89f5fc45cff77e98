package node

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync"

	"kvasird/ggml"
	"kvasird/ggml/gguf"
	"kvasird/node/api"
	"kvasird/node/engine"
	"kvasird/node/gateway"
)

// answerer answers for a model, whoever computes it.
type answerer interface {
	gateway.ExtraEngine
	gateway.Engine
	// generate is StartExtra for those who want the tokens' ids too.
	generate(ctx context.Context, req engine.Request, extra engine.Extra) (generation, error)
}

// allAbilities are those of every answerer.
var allAbilities = gateway.Abilities{Grammar: true, Special: true, Logprobs: true}

// generation is a gateway.Stream with the tokens' ids.
type generation interface {
	gateway.Stream
	gateway.ProbStream
	NextToken(ctx context.Context) (ggml.Token, []byte, error)
}

// nameDigits are the digits of its id by which a model is told from one of the same name.
const nameDigits = 12

// answers are the models that this node answers for: the one that it runs, and
// those of rings. The gateway is told what they are.
type answers struct {
	gateway *gateway.Gateway
	names   *GatewayConfig // has the aliases
	log     *slog.Logger

	mu     sync.Mutex // guards what follows
	list   []namedModel
	warned []string // aliases that name no model, of which the log told
}

// namedModel is a model by the name that clients give it.
type namedModel struct {
	gateway.Model
	id gguf.ModelID
}

// set adds a model. Names come from peers: one that another model has here already is
// told apart by the id, so that nobody takes the place of a model by its name.
func (a *answers) set(id gguf.ModelID, m gateway.Model) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	list := slices.DeleteFunc(slices.Clone(a.list), func(o namedModel) bool { return o.id == id })
	if slices.ContainsFunc(list, func(o namedModel) bool { return o.ID == m.ID }) {
		m.ID += "-" + id.String()[:nameDigits]
	}
	m.Digest, m.Aliases = id.String(), a.names.aliasesOf(m.ID, id.String())
	list = append(list, namedModel{m, id})
	slices.SortFunc(list, func(x, y namedModel) int { return cmp.Compare(x.ID, y.ID) })
	models := make([]gateway.Model, len(list))
	for i, o := range list {
		models[i] = o.Model
	}
	if err := a.gateway.SetModels(models); err != nil {
		return err
	}
	a.list = list
	a.warnLocked()
	return nil
}

// warnLocked tells, once, of aliases that name no model here. It may come later.
func (a *answers) warnLocked() {
	for alias, model := range a.names.Aliases {
		served := slices.ContainsFunc(a.list, func(m namedModel) bool { return slices.Contains(m.Aliases, alias) })
		if !served && !slices.Contains(a.warned, alias) {
			a.warned = append(a.warned, alias)
			a.log.Warn("an alias names no model that is answered for here yet", "alias", alias, "model", model)
		}
	}
}

// find returns the model of a name that clients may use; "" is the only one.
func (a *answers) find(name string) (gateway.Model, answerer, error) {
	if id, ok := a.gateway.Resolve(name); ok && name != "" {
		name = id
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, m := range a.list {
		if m.ID != name && (name != "" || len(a.list) > 1) {
			continue
		}
		if m.NoText {
			return gateway.Model{}, nil, &api.Error{Code: api.CodeBadRequest, Message: fmt.Sprintf("model %q makes embeddings, no text: POST to /v1/embeddings", m.ID)}
		}
		return m.Model, m.Engine.(answerer), nil
	}
	var names []string
	for _, m := range a.list {
		names = append(names, m.ID)
	}
	switch {
	case len(names) == 0:
		return gateway.Model{}, nil, &api.Error{Code: api.CodeNotReady, Message: "no model is answered for here: this node runs none, and it knows neither a node that answers nor a complete ring"}
	case name == "":
		return gateway.Model{}, nil, &api.Error{Code: api.CodeBadRequest, Message: fmt.Sprintf("several models are answered for here: name one of %q", names)}
	}
	return gateway.Model{}, nil, &api.Error{Code: api.CodeNotFound, Message: fmt.Sprintf("no model %q is answered for here%s", name, Suggest(name, names))}
}

// startExtra is StartExtra of every answerer.
func startExtra(ctx context.Context, a answerer, req gateway.Request, extra gateway.Extra) (gateway.Stream, error) {
	g, err := a.generate(ctx, engine.Request(req), engine.Extra(extra))
	if err != nil {
		return nil, err // not a nil generation in another interface
	}
	return g, nil
}

// ownStream is a generation with log-probabilities as the gateway knows them.
type ownStream struct{ *engine.Generation }

func (s ownStream) Prob() (chosen gateway.TokenProb, top []gateway.TokenProb) {
	c, list := s.Generation.Prob()
	for _, p := range list {
		top = append(top, gateway.TokenProb(p))
	}
	return gateway.TokenProb(c), top
}

// probOf is a token that another node was told the likelihood of.
func probOf(vocab *ggml.Model, t int32, logprob float32) gateway.TokenProb {
	return gateway.TokenProb{ID: t, Bytes: vocab.Piece(ggml.Token(t), false), Logprob: logprob}
}

// pieceOf is the text of a token of an answer.
func pieceOf(vocab *ggml.Model, t ggml.Token, special bool) []byte {
	if vocab.IsEOG(t) {
		return nil
	}
	return vocab.Piece(t, special)
}
