package node

import (
	"context"
	"encoding/hex"
	"errors"
	"net/http"
	"time"

	"github.com/mr-tron/base58"

	"kvasird/node/api"
	"kvasird/node/cashier"
	"kvasird/settle"
)

// Purse is the money of a node, as the control API has it.
type Purse struct {
	Service cashier.Service
	Node    settle.Node // this one
	Network settle.Hash
	Model   func(name string) (id string, err error)
	Now     func() time.Time
}

// purseMoney is api.Money before it is written.
type purseMoney struct {
	Terms     cashier.Terms     `json:"terms"`
	Ledger    cashier.Ledger    `json:"ledger"`
	StakeMemo string            `json:"stake_memo"`
	FundMemos map[string]string `json:"fund_memos"`
}

// money asks for both.
func (p *Purse) money(ctx context.Context) (m purseMoney, err error) {
	m.StakeMemo, m.FundMemos = cashier.StakeMemo(p.Node), cashier.FundMemos()
	if m.Terms, err = p.Service.Terms(ctx); err == nil {
		m.Ledger, err = p.Service.Ledger(ctx, p.Node)
	}
	return m, err
}

// quoteRequest is api.QuoteRequest with the types of what settles.
type quoteRequest struct {
	Model        string        `json:"model"`
	PromptTokens uint64        `json:"prompt_tokens"`
	AnswerTokens uint64        `json:"answer_tokens"`
	RequestHash  settle.Hash   `json:"request_hash"`
	Owner        settle.Wallet `json:"owner"`
}

func (p *Purse) quote(ctx context.Context, req quoteRequest) (out api.Quote, err error) {
	id, err := p.Model(req.Model)
	if err != nil {
		return out, err
	}
	terms, err := p.Service.Terms(ctx)
	if err != nil {
		return out, err
	}
	o, err := p.Service.Quote(ctx, cashier.Ask{Model: id, PromptTokens: req.PromptTokens, AnswerTokens: req.AnswerTokens, RequestHash: req.RequestHash, Owner: req.Owner})
	if err != nil {
		return out, err
	}
	return api.Quote{
		ID: o.Quote.ID.String(), Memo: o.Quote.ID.Memo(), Model: o.Quote.Model, Amount: o.Quote.Amount.String(), Mint: terms.Mint.String(),
		Vault: terms.Vault.String(), VaultOwner: terms.Owner.String(), Expires: o.Quote.Expires, Secret: hex.EncodeToString(o.Secret),
	}, nil
}

// linkTextRequest is api.LinkTextRequest with the types of what settles.
type linkTextRequest struct {
	Wallet settle.Wallet `json:"wallet"`
	Spend  bool          `json:"spend"`
}

func (p *Purse) linkText(_ context.Context, req linkTextRequest) (api.LinkText, error) {
	l := cashier.Link{Wallet: req.Wallet, Spend: req.Spend, Since: uint64(p.Now().Unix())}
	return api.LinkText{Text: cashier.LinkText(p.Network, p.Node, l), Domain: base58.Encode(p.Network[:]), Since: l.Since}, nil
}

// complaintTextRequest is api.ComplaintTextRequest with the types of what settles.
type complaintTextRequest struct {
	Request settle.QuoteID `json:"request"`
	Amount  settle.Amount  `json:"amount"`
	Wallet  settle.Wallet  `json:"wallet"`
}

func (p *Purse) complaintText(_ context.Context, req complaintTextRequest) (api.ComplaintText, error) {
	text := cashier.ComplaintText(p.Network, cashier.Complaint{ID: req.Request, Amount: req.Amount}, req.Wallet)
	return api.ComplaintText{Text: text, Domain: base58.Encode(p.Network[:])}, nil
}

func (p *Purse) ledger(ctx context.Context, req struct {
	Owner settle.Key `json:"owner"`
}) (cashier.Ledger, error) {
	return p.Service.Ledger(ctx, req.Owner)
}

// moneyRoutes adds the part of the control API that is about money.
func (c *Control) moneyRoutes(mux *http.ServeMux) {
	mux.HandleFunc("GET "+api.PathMoney, func(w http.ResponseWriter, r *http.Request) {
		p, err := c.daemon.Purse()
		var m purseMoney
		if err == nil {
			m, err = p.money(r.Context())
		}
		c.answer(w, m, moneyError(err))
	})
	for path, h := range map[string]http.HandlerFunc{
		api.PathQuote:         moneyCall(c, (*Purse).quote),
		api.PathLedger:        moneyCall(c, (*Purse).ledger),
		api.PathLinkText:      moneyCall(c, (*Purse).linkText),
		api.PathComplaintText: moneyCall(c, (*Purse).complaintText),
		api.PathLink:          moneyCall(c, served(cashier.Service.Link)),
		api.PathDeposit:       moneyCall(c, served(cashier.Service.Deposit)),
		api.PathUnstake:       moneyCall(c, served(cashier.Service.Unstake)),
		api.PathClaim:         moneyCall(c, served(cashier.Service.Claim)),
		api.PathComplain:      moneyCall(c, served(cashier.Service.Complain)),
		api.PathPropose:       moneyCall(c, served(cashier.Service.Propose)),
		api.PathActivate:      moneyCall(c, served(cashier.Service.Activate)),
	} {
		mux.HandleFunc("POST "+path, h)
	}
}

// served is a method of the settlement as one of a purse.
func served[In, Out any](call func(cashier.Service, context.Context, In) (Out, error)) func(*Purse, context.Context, In) (Out, error) {
	return func(p *Purse, ctx context.Context, in In) (Out, error) { return call(p.Service, ctx, in) }
}

func moneyCall[In, Out any](c *Control, call func(*Purse, context.Context, In) (Out, error)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		var in In
		if !c.read(w, r, &in) {
			return
		}
		p, err := c.daemon.Purse()
		var out Out
		if err == nil {
			out, err = call(p, r.Context(), in)
		}
		c.answer(w, out, moneyError(err))
	}
}

// moneyError gives the settlement's refusals the codes of the control API.
func moneyError(err error) error {
	var r *cashier.Refusal
	if !errors.As(err, &r) {
		if errors.Is(err, cashier.ErrAway) {
			return &api.Error{Code: api.CodeNotReady, Message: err.Error()}
		}
		return err
	}
	code := api.CodeBadRequest
	switch r.Code {
	case cashier.CodeNotFound:
		code = api.CodeNotFound
	case cashier.CodeBusy:
		code = api.CodeBusy
	case cashier.CodeNotYet:
		code = api.CodeNotReady
	}
	return &api.Error{Code: code, Message: r.Text}
}
