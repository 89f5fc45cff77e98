package node

import (
	"context"
	"errors"

	"kvasird/node/engine"
	"kvasird/node/gateway"
)

var _ gateway.EmbedEngine = embedDoor{}

// embedDoor lets clients use an embedder.
type embedDoor struct {
	node *Node
	*engine.Embedder
}

// Ready is the node's, as for text.
func (d embedDoor) Ready() error { return d.node.Ready() }

// Start makes embedDoor a gateway.Engine; the gateway knows that there is no text.
func (embedDoor) Start(context.Context, gateway.Request) (gateway.Stream, error) {
	return nil, errors.New("the model makes embeddings, no text")
}
