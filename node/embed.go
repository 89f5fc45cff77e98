package node

import (
	"context"
	"errors"

	"kvasird/node/engine"
	"kvasird/node/gateway"
)

var _, _ gateway.EmbedEngine = embedDoor{}, farVectors{}

var errNoText = errors.New("the model makes embeddings, no text")

// embedDoor lets clients use an embedder.
type embedDoor struct {
	node *Node
	*engine.Embedder
}

// Ready is the node's, as for text.
func (d embedDoor) Ready() error { return d.node.Ready() }

// Embed makes embedDoor a gateway.EmbedEngine.
func (d embedDoor) Embed(ctx context.Context, owner string, inputs [][]int32) ([][]float32, error) {
	if b := d.node.backbone.Load(); b != nil {
		b.begin(ctx)
	}
	return d.Embedder.Embed(ctx, owner, inputs)
}

// Start makes embedDoor a gateway.Engine; the gateway knows that there is no text.
func (embedDoor) Start(context.Context, gateway.Request) (gateway.Stream, error) {
	return nil, errNoText
}

// farVectors has other nodes make embeddings. No stage does.
type farVectors struct{ *ringModel }

// Tokenize is engine.Embedder's.
func (v farVectors) Tokenize(text string) ([]int32, error) {
	return engine.TokenizeInput(v.vocab, text)
}

// Start makes farVectors a gateway.Engine; the gateway knows that there is no text.
func (farVectors) Start(context.Context, gateway.Request) (gateway.Stream, error) {
	return nil, errNoText
}

// Embed makes farVectors a gateway.EmbedEngine. The node that computes knows this one as the owner.
func (v farVectors) Embed(ctx context.Context, _ string, inputs [][]int32) ([][]float32, error) {
	return v.far.Embed(ctx, inputs)
}
