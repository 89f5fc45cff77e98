package cashier

import (
	"context"

	"kvasird/settle"
)

// Service is what a settlement does for one node, which asks in its own name: the node's
// key is known by the connection, or by being the same process, and never from what is
// asked. Every call may be made again: what it changes is changed once.
//
// Errors are *Refusal wherever the caller can act on them.
type Service interface {
	// Terms are what anybody needs to know before paying.
	Terms(ctx context.Context) (Terms, error)
	// Quote prices a request that this node is asked to answer.
	Quote(ctx context.Context, ask Ask) (Offer, error)
	// Pay says that a transaction on the chain pays a quote. Until it is final the refusal
	// is CodeNotYet: ask again.
	Pay(ctx context.Context, p Proof) (settle.Request, error)
	// PayX402 takes a transaction that its payer signed and the fee payer did not: it is
	// checked, signed, sent, and waited for.
	PayX402(ctx context.Context, p Partial) (settle.Request, error)
	// Debit pays a quote from the balance of the wallet that this node is linked to, if
	// the wallet lets it spend.
	Debit(ctx context.Context, id settle.QuoteID) (settle.Request, error)
	// Request is a request that this node asked a quote for, as it stands.
	Request(ctx context.Context, id settle.QuoteID) (settle.Request, error)
	// Run starts a paid request. Alone of all calls it is refused when it is made again
	// while the request runs: nothing is computed twice for one payment.
	Run(ctx context.Context, id settle.QuoteID) (Started, error)
	// End ends it, with what was done for it, and settles it.
	End(ctx context.Context, e Ended) (Settled, error)

	// Credits says of requests what they credited to this node, in their order.
	Credits(ctx context.Context, ids []settle.QuoteID) ([]WorkerCredit, error)

	// Link lets a wallet have this node's pay, or takes that back. Another wallet's needs
	// that the linked one lets go first.
	Link(ctx context.Context, l Link) (Linked, error)
	// Deposit credits a transfer to the vault, to the balance of its sender or, as a
	// stake, to the bond of this node: see StakeMemo.
	Deposit(ctx context.Context, d Deposit) (Ledger, error)
	// Unstake begins to take an amount out of this node's bond.
	Unstake(ctx context.Context, m Move) (Ledger, error)
	// Claim pays an amount of the linked wallet's balance to that wallet.
	Claim(ctx context.Context, m Move) (Payout, error)
	// Complain claims an amount of the insurance pool for a request that was paid and badly
	// answered: its payer does, by its signature or through a node linked to it.
	Complain(ctx context.Context, c Complaint) (Complained, error)
	// Ledger is what a wallet has, or a node.
	Ledger(ctx context.Context, owner settle.Key) (Ledger, error)

	// Propose makes the next change of parameters, or a withdrawal, for wallets to sign.
	Propose(ctx context.Context, p Change) (Proposed, error)
	// Activate takes it, with their signatures and a code of the authenticator.
	Activate(ctx context.Context, a Activation) (Activated, error)
}

// Terms are what a network with a token charges and how it is paid.
type Terms struct {
	Network  settle.Hash       `json:"network"`
	Node     settle.Node       `json:"settlement"` // who settles
	Cluster  settle.Key        `json:"cluster"`    // hash of the chain's genesis block
	Mint     settle.Key        `json:"mint"`
	Program  settle.Key        `json:"token_program"`
	Decimals uint8             `json:"decimals"`
	Owner    settle.Wallet     `json:"vault_owner"`
	Vault    settle.Key        `json:"vault"`     // the owner's associated token account
	FeePayer settle.Wallet     `json:"fee_payer"` // of x402 transactions; zero: none are taken
	Epoch    uint64            `json:"epoch"`
	Sequence uint64            `json:"parameters_sequence"` // of the change that made the parameters
	Ref      uint64            `json:"reference"`           // base units per fiat unit
	Params   map[string]uint64 `json:"parameters"`
	Prices   []ModelPrice      `json:"prices"`
}

// ModelPrice is what a model costs in this epoch.
type ModelPrice struct {
	Model  string      `json:"model"` // id
	Raw    uint64      `json:"price"` // fiat micro-units · 10⁶ per 10⁶ tokens
	Hash   settle.Hash `json:"price_record_hash"`
	Record []byte      `json:"price_record"` // signed, see market.PriceRecord; none of a model that nobody has paid for
}

// Ask is a request for a quote. The node that asks is the quote's entry.
type Ask struct {
	Model        string        `json:"model"`         // id
	PromptTokens uint64        `json:"prompt_tokens"` // limits
	AnswerTokens uint64        `json:"answer_tokens"`
	RequestHash  settle.Hash   `json:"request_hash"` // SHA-256 of the request's body
	Owner        settle.Wallet `json:"owner"`        // who must pay; zero: whoever pays
}

// Offer is a quote with the secret that opens it, which is given once.
type Offer struct {
	Quote  settle.Quote `json:"quote"`
	Secret []byte       `json:"claim_secret"`
}

// Proof names a transaction that pays a quote.
type Proof struct {
	ID        settle.QuoteID   `json:"quote"`
	Signature settle.Signature `json:"signature"`
	Payer     settle.Wallet    `json:"payer"`
}

// Partial is a transaction that pays a quote once the fee payer signs.
type Partial struct {
	ID          settle.QuoteID `json:"quote"`
	Transaction []byte         `json:"transaction"`
}

// Started is a request that runs.
type Started struct {
	Request settle.Request `json:"request"`
	// Seed is what replicas are drawn by for the request: nobody knew it before it was
	// paid. In it are the payment and a secret of the settlement.
	Seed settle.Hash `json:"seed"`
	// Pass is a signed settle.Pass of the request: those who compute for it ask for that.
	Pass []byte `json:"pass"`
}

// WorkerCredit is what a request credited to a node.
type WorkerCredit struct {
	Settled bool   `json:"settled"` // else it runs, or there is none
	Tokens  uint64 `json:"tokens"`  // of the whole model, in billionths: its share of all, times what was delivered
}

// Ended says how a request ended. Reports are settle.Report, signed.
type Ended struct {
	ID         settle.QuoteID `json:"quote"`
	Tokens     uint64         `json:"tokens"` // delivered, prompt included
	Failed     string         `json:"failed"` // why not all was delivered, or empty
	Receipt    []byte         `json:"receipt"`
	Statements [][]byte       `json:"statements"`
}

// Settled is what came of a request.
type Settled struct {
	Used    settle.Amount `json:"used"`
	Refund  settle.Amount `json:"refund"`
	Fee     settle.Amount `json:"fee"`
	Paid    settle.Amount `json:"paid"` // to workers, emission included
	Emitted settle.Amount `json:"emitted"`
}

// Link is a wallet's word that it has the pay of a node. What it signs is LinkText, wrapped
// by govern.Wrap. A zero Wallet is the linked wallet's word that it lets go.
type Link struct {
	Wallet    settle.Wallet    `json:"wallet"`
	Spend     bool             `json:"spend"`  // the node may pay from the wallet's balance
	Since     uint64           `json:"since"`  // Unix seconds; of two links of a wallet the later holds
	Format    string           `json:"format"` // how the wallet wraps the text: v0, v1, raw
	Signature settle.Signature `json:"signature"`
}

// Linked is a link that holds.
type Linked struct {
	Node   settle.Node   `json:"node"`
	Wallet settle.Wallet `json:"wallet"`
	Spend  bool          `json:"spend"`
	Since  uint64        `json:"since"`
}

// Deposit names a transfer to the vault that pays no quote.
type Deposit struct {
	Signature settle.Signature `json:"signature"`
	Owner     settle.Wallet    `json:"owner"`  // whose own accounts it came from
	Amount    settle.Amount    `json:"amount"` // at least
	Stake     bool             `json:"stake"`
}

// Move is an amount that a node moves, once for its id.
type Move struct {
	ID     settle.Hash   `json:"id"`
	Amount settle.Amount `json:"amount"`
}

// Complaint is a claim on the insurance pool. Without a signature the node that asks is
// linked to the wallet that paid. What that signs is ComplaintText, wrapped by govern.Wrap.
type Complaint struct {
	ID        settle.QuoteID   `json:"request"`
	Amount    settle.Amount    `json:"amount"`
	Format    string           `json:"format"` // how the wallet wraps the text: v0, v1, raw
	Signature settle.Signature `json:"signature"`
}

// Complained is a claim that was taken.
type Complained struct {
	Asked     settle.Amount `json:"asked"`
	Due       uint64        `json:"due"`       // Unix seconds: it is paid in an epoch that begins later
	Over      bool          `json:"over"`      // it was
	Recovered settle.Amount `json:"recovered"` // to the payer's balance
}

// Ledger is what an owner has. Bond and what follows is a node's.
type Ledger struct {
	Owner     settle.Key       `json:"owner"`
	Wallet    settle.Wallet    `json:"wallet"` // that the node is linked to; zero: none
	Balance   settle.Amount    `json:"balance"`
	Leaving   settle.Amount    `json:"leaving"` // payouts on their way
	Held      settle.Amount    `json:"held"`    // pay whose audits are open
	Bonded    settle.Amount    `json:"bonded"`
	Unbonding settle.Amount    `json:"unbonding"`
	Target    settle.Amount    `json:"bond_target"`
	Earned    settle.Amount    `json:"earned"`   // in all, gross
	Requests  uint64           `json:"requests"` // that it was paid for
	Vesting   []settle.Pending `json:"vesting"`
	Payouts   []Payout         `json:"payouts"` // the newest
}

// Change is what parameters are to become, or an amount of the treasury that is to be paid.
type Change struct {
	Values map[string]uint64 `json:"values"`

	Withdraw settle.Amount `json:"withdraw"` // 0: nothing
	To       settle.Wallet `json:"to"`

	Epoch uint64 `json:"epoch"` // from which; 0: as soon as can be
	Valid uint64 `json:"valid"` // seconds until which it has to be taken; 0: a day
}

// Proposed is a proposal with the text that each wallet with authority signs.
type Proposed struct {
	Proposal []byte            `json:"proposal"` // to be given back with the signatures
	Texts    map[string]string `json:"texts"`    // by wallet
}

// Activation is a proposal with what it needs to be taken.
type Activation struct {
	Proposal   []byte      `json:"proposal"`
	Signatures []Signature `json:"signatures"`
	Code       string      `json:"code"` // of the authenticator
}

// Signature is a wallet's consent.
type Signature struct {
	Wallet    settle.Wallet    `json:"wallet"`
	Format    string           `json:"format"` // v0, v1, raw
	Signature settle.Signature `json:"signature"`
}

// Activated is a change that was taken.
type Activated struct {
	Sequence uint64 `json:"sequence"`
	Epoch    uint64 `json:"epoch"` // from which it holds
}

// Code says what a caller can do about a refusal.
type Code string

// The codes.
const (
	CodeBad      Code = "bad_request"     // what was asked is malformed, or cannot be
	CodeRights   Code = "not_allowed"     // this node, or this wallet, may not
	CodeNotFound Code = "not_found"       // no such quote, model, owner
	CodeInvalid  Code = "payment_invalid" // the chain says no, for good
	CodeNotYet   Code = "not_yet"         // the chain does not say yet: ask again
	CodeFunds    Code = "no_funds"        // the balance does not reach
	CodeState    Code = "wrong_state"     // not in this state of the request
	CodeBusy     Code = "busy"            // too many open quotes, or too often
)

// Refusal is an error of a Service.
type Refusal struct {
	Code  Code   `json:"code"`
	Field string `json:"field,omitempty"` // which of what was asked
	Text  string `json:"text"`
	Retry uint64 `json:"retry,omitempty"` // seconds, after which to ask again
}

func (r *Refusal) Error() string { return r.Text }
