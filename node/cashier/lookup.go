package cashier

import (
	"context"
	"errors"
	"fmt"

	"kvasird/settle"
)

// Request is a request that this node asked a quote for, as it stands. Errors: *Refusal
// with CodeNotFound, those of the store.
func (t *Teller) Request(_ context.Context, id settle.QuoteID) (settle.Request, error) {
	r, err := t.cfg.Books.Request(id)
	if errors.Is(err, ErrNoQuote) || err == nil && r.Quote.Entry != t.node {
		return settle.Request{}, &Refusal{Code: CodeNotFound, Field: "quote", Text: fmt.Sprintf("there is no quote %s of this node: ask for one", id)}
	}
	return r, err
}
