package client

import (
	"context"
	"net/http"
	"time"

	"kvasird/node/api"
)

// moneyTimeout is longer than the settlement takes, which may wait for the chain.
const moneyTimeout = 2 * time.Minute

// pay makes a call about money.
func pay[Out any](ctx context.Context, c *Client, path string, in any) (out Out, err error) {
	method := http.MethodPost
	if in == nil {
		method = http.MethodGet
	}
	err = c.callWithin(ctx, moneyTimeout, method, path, in, &out)
	return out, err
}

// Money asks how the network is paid, and what this node has.
func (c *Client) Money(ctx context.Context) (api.Money, error) {
	return pay[api.Money](ctx, c, api.PathMoney, nil)
}

// Quote asks what a request costs, for it to be paid.
func (c *Client) Quote(ctx context.Context, req api.QuoteRequest) (api.Quote, error) {
	return pay[api.Quote](ctx, c, api.PathQuote, req)
}

// Ledger asks what a wallet or a node has.
func (c *Client) Ledger(ctx context.Context, owner string) (api.Ledger, error) {
	return pay[api.Ledger](ctx, c, api.PathLedger, api.LedgerRequest{Owner: owner})
}

// LinkText asks what a wallet signs to have this node's pay.
func (c *Client) LinkText(ctx context.Context, req api.LinkTextRequest) (api.LinkText, error) {
	return pay[api.LinkText](ctx, c, api.PathLinkText, req)
}

// Link gives a wallet this node's pay.
func (c *Client) Link(ctx context.Context, l api.Link) (api.Linked, error) {
	return pay[api.Linked](ctx, c, api.PathLink, l)
}

// Deposit names a transfer to the vault.
func (c *Client) Deposit(ctx context.Context, d api.Deposit) (api.Ledger, error) {
	return pay[api.Ledger](ctx, c, api.PathDeposit, d)
}

// Unstake begins to take an amount out of this node's bond.
func (c *Client) Unstake(ctx context.Context, m api.Move) (api.Ledger, error) {
	return pay[api.Ledger](ctx, c, api.PathUnstake, m)
}

// Claim pays an amount of the linked wallet's balance to it.
func (c *Client) Claim(ctx context.Context, m api.Move) (api.Payout, error) {
	return pay[api.Payout](ctx, c, api.PathClaim, m)
}

// ComplaintText asks what a wallet signs to claim of the insurance pool.
func (c *Client) ComplaintText(ctx context.Context, req api.ComplaintTextRequest) (api.ComplaintText, error) {
	return pay[api.ComplaintText](ctx, c, api.PathComplaintText, req)
}

// Complain claims an amount of the insurance pool for a request.
func (c *Client) Complain(ctx context.Context, req api.Complaint) (api.Complained, error) {
	return pay[api.Complained](ctx, c, api.PathComplain, req)
}

// Propose makes the next change of parameters.
func (c *Client) Propose(ctx context.Context, p api.Change) (api.Proposed, error) {
	return pay[api.Proposed](ctx, c, api.PathPropose, p)
}

// Activate has a signed change taken.
func (c *Client) Activate(ctx context.Context, a api.Activation) (api.Activated, error) {
	return pay[api.Activated](ctx, c, api.PathActivate, a)
}
