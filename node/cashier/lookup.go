package cashier

import (
	"context"

	"kvasird/settle"
)

// Request is a request that this node asked a quote for, as it stands. Errors: a Refusal
// with CodeNotFound or CodeRights, those of the store.
func (t *Teller) Request(_ context.Context, id settle.QuoteID) (settle.Request, error) {
	return t.mine(id)
}
