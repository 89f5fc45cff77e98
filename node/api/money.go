package api

// Paths of the money of a network with a token. What is asked and answered is what the
// settlement takes and gives, in JSON: keys and signatures of the chain are base58, hashes
// and ids hexadecimal digits, amounts decimal digits of base units in a string.
const (
	PathMoney         = "/v1/money"               // GET → Money
	PathQuote         = "/v1/money/quote"         // POST QuoteRequest → Quote
	PathLedger        = "/v1/money/ledger"        // POST LedgerRequest → Ledger
	PathLinkText      = "/v1/money/linktext"      // POST LinkTextRequest → LinkText
	PathLink          = "/v1/money/link"          // POST Link → Linked
	PathDeposit       = "/v1/money/deposit"       // POST Deposit → Ledger
	PathUnstake       = "/v1/money/unstake"       // POST Move → Ledger
	PathClaim         = "/v1/money/claim"         // POST Move → Payout
	PathComplain      = "/v1/money/complain"      // POST Complaint → Complained
	PathComplaintText = "/v1/money/complainttext" // POST ComplaintTextRequest → ComplaintText
	PathPropose       = "/v1/money/propose"       // POST Change → Proposed
	PathActivate      = "/v1/money/activate"      // POST Activation → Activated
)

// Money is how the network is paid, and what this node has.
type Money struct {
	Terms  MoneyTerms `json:"terms"`
	Ledger Ledger     `json:"ledger"` // of this node
	// StakeMemo marks a transfer to the vault as this node's stake, whoever sends it.
	StakeMemo string `json:"stake_memo"`
	// FundMemos mark transfers that are for the network, by what they fill: emission, pool.
	FundMemos map[string]string `json:"fund_memos"`
}

// MoneyTerms are what anybody needs to know before paying.
type MoneyTerms struct {
	Network  string            `json:"network"` // hash
	Node     string            `json:"settlement"`
	Mint     string            `json:"mint"`
	Program  string            `json:"token_program"`
	Decimals int               `json:"decimals"`
	Owner    string            `json:"vault_owner"`
	Vault    string            `json:"vault"`
	Epoch    uint64            `json:"epoch"`
	Sequence uint64            `json:"parameters_sequence"`
	Ref      uint64            `json:"reference"` // base units per fiat unit
	Params   map[string]uint64 `json:"parameters"`
	Prices   []MoneyPrice      `json:"prices"`
}

// MoneyPrice is what a model costs in this epoch.
type MoneyPrice struct {
	Model string `json:"model"` // id
	Raw   uint64 `json:"price"` // fiat micro-units · 10⁶ per 10⁶ tokens
}

// QuoteRequest asks what a request would cost.
type QuoteRequest struct {
	Model        string `json:"model"` // name, id, or the beginning of one; "": the only one
	PromptTokens uint64 `json:"prompt_tokens"`
	AnswerTokens uint64 `json:"answer_tokens"`
	RequestHash  string `json:"request_hash"` // SHA-256 of the request's body
	Owner        string `json:"owner,omitempty"`
}

// Quote is a price that can be paid until it expires.
type Quote struct {
	ID         string `json:"id"`
	Memo       string `json:"memo"` // of the transaction that pays it
	Model      string `json:"model"`
	Amount     string `json:"amount"`
	Mint       string `json:"mint"`
	Vault      string `json:"vault"`
	VaultOwner string `json:"vault_owner"`
	Expires    uint64 `json:"expires"` // Unix seconds
	Secret     string `json:"claim_secret"`
}

// LedgerRequest asks what a wallet or a node has.
type LedgerRequest struct {
	Owner string `json:"owner"`
}

// Ledger is what an owner has. Bonded and what follows is a node's.
type Ledger struct {
	Owner     string    `json:"owner"`
	Wallet    string    `json:"wallet"` // that the node is linked to; NoWallet: none
	Balance   string    `json:"balance"`
	Leaving   string    `json:"leaving"`
	Held      string    `json:"held"`
	Bonded    string    `json:"bonded"`
	Unbonding string    `json:"unbonding"`
	Target    string    `json:"bond_target"`
	Earned    string    `json:"earned"`
	Requests  uint64    `json:"requests"`
	Vesting   []Vesting `json:"vesting"`
	Payouts   []Payout  `json:"payouts"`
}

// NoWallet is the wallet of a node that is linked to none.
const NoWallet = "11111111111111111111111111111111"

// Vesting is pay, and when it is free, in Unix seconds.
type Vesting struct {
	Amount string `json:"Amount"`
	Free   uint64 `json:"Free"`
}

// Payout is a claim on its way to a wallet.
type Payout struct {
	ID      string       `json:"ID"`
	Owner   string       `json:"Owner"`
	Amount  string       `json:"Amount"`
	Signed  PayoutSigned `json:"Signed"`
	Outcome int          `json:"Outcome"` // 0 on its way, 1 paid, 2 failed, 3 expired: the balance has it again
}

// PayoutSigned names a payout's transaction.
type PayoutSigned struct {
	Signature string `json:"Signature"`
}

// LinkTextRequest asks what a wallet signs to have this node's pay.
type LinkTextRequest struct {
	Wallet string `json:"wallet"` // NoWallet: what the linked one signs to let go
	Spend  bool   `json:"spend"`
}

// LinkText is what is signed.
type LinkText struct {
	Text   string `json:"text"`
	Domain string `json:"domain"` // application domain of an off-chain message v0, base58
	Since  uint64 `json:"since"`
}

// Link is a wallet's word that it has the pay of this node.
type Link struct {
	Wallet    string `json:"wallet"`
	Spend     bool   `json:"spend"`
	Since     uint64 `json:"since"`
	Format    string `json:"format"` // v0, v1, raw
	Signature string `json:"signature"`
}

// Linked is a link that holds.
type Linked struct {
	Node   string `json:"node"`
	Wallet string `json:"wallet"`
	Spend  bool   `json:"spend"`
	Since  uint64 `json:"since"`
}

// Deposit names a transfer to the vault that pays no quote.
type Deposit struct {
	Signature string `json:"signature"`
	Owner     string `json:"owner"`
	Amount    string `json:"amount"` // at least
	Stake     bool   `json:"stake"`
}

// Move is an amount that this node moves, once for its id of 64 hexadecimal digits.
type Move struct {
	ID     string `json:"id"`
	Amount string `json:"amount"`
}

// ComplaintTextRequest asks what a wallet signs to claim of the insurance pool.
type ComplaintTextRequest struct {
	Request string `json:"request"`
	Amount  string `json:"amount"`
	Wallet  string `json:"wallet"` // that paid for the request
}

// ComplaintText is what is signed.
type ComplaintText struct {
	Text   string `json:"text"`
	Domain string `json:"domain"` // application domain of an off-chain message v0, base58
}

// Complaint is a claim on the insurance pool. Without a signature this node is linked to
// the wallet that paid for the request.
type Complaint struct {
	Request   string `json:"request"` // id of its quote
	Amount    string `json:"amount"`
	Format    string `json:"format,omitempty"` // v0, v1, raw
	Signature string `json:"signature,omitempty"`
}

// Complained is a claim that was taken.
type Complained struct {
	Asked     string `json:"asked"`
	Due       uint64 `json:"due"`  // Unix seconds: it is paid in an epoch that begins later
	Over      bool   `json:"over"` // it was
	Recovered string `json:"recovered"`
}

// Change is what parameters are to become.
type Change struct {
	Values map[string]uint64 `json:"values"`
	Epoch  uint64            `json:"epoch"` // 0: as soon as can be
	Valid  uint64            `json:"valid"` // seconds; 0: a day
}

// Proposed is a proposal with the text that each wallet with authority signs.
type Proposed struct {
	Proposal []byte            `json:"proposal"`
	Texts    map[string]string `json:"texts"` // by wallet
}

// Activation is a proposal with what it needs to be taken.
type Activation struct {
	Proposal   []byte            `json:"proposal"`
	Signatures []WalletSignature `json:"signatures"`
	Code       string            `json:"code"`
}

// WalletSignature is a wallet's consent.
type WalletSignature struct {
	Wallet    string `json:"wallet"`
	Format    string `json:"format"` // v0, v1, raw
	Signature string `json:"signature"`
}

// Activated is a change that was taken.
type Activated struct {
	Sequence uint64 `json:"sequence"`
	Epoch    uint64 `json:"epoch"`
}
