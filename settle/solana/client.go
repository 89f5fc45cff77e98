package solana

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"slices"
	"sync"
	"time"

	"kvasird/settle"
)

// Config is what a Client is pinned to.
type Config struct {
	// Providers are the URLs of RPC nodes of one cluster, two of different operators in
	// earnest. All of them have to agree.
	Providers []string
	// Genesis is the hash of the cluster's genesis block.
	Genesis settle.Key
	// Vault is what is paid. Its Account may be zero: then it is the associated token
	// account of its Owner, which it has to be anyway.
	Vault Vault
	// Decimals is the mint's.
	Decimals uint8
	// Operators are other wallets of the network's operator: what they pay is no
	// payment, since it comes back to them.
	Operators []settle.Wallet
	// Timeout bounds one call of a provider. Zero: 10 s.
	Timeout time.Duration
	// Alarm is called when a provider lies, providers disagree, or transactions cannot
	// be read any more: somebody has to look. It must not block. Nil: nobody is told.
	Alarm func(error)
}

// Client verifies payments to one vault and pays from it.
type Client struct {
	providers []*provider
	genesis   settle.Key
	vault     Vault
	decimals  uint8
	operators []settle.Wallet
	alarm     func(error)

	without string // a rule that is not asked, by its name: tests see that each one counts
}

// New makes a client; it asks nothing yet. Check has to pass before the first payment.
func New(cfg Config) (*Client, error) {
	if len(cfg.Providers) == 0 {
		return nil, errors.New("no RPC provider: name one, or better two of different operators")
	}
	if cfg.Vault.Program != tokenProgram && cfg.Vault.Program != token2022Program {
		return nil, fmt.Errorf("%s is not a token program: it is %s or %s", cfg.Vault.Program, tokenProgram, token2022Program)
	}
	account, err := ataOf(cfg.Vault.Owner, cfg.Vault.Mint, cfg.Vault.Program)
	if err != nil {
		return nil, err
	}
	if cfg.Vault.Account == (settle.Key{}) {
		cfg.Vault.Account = account
	}
	if cfg.Vault.Account != account {
		return nil, fmt.Errorf("the vault %s is not the associated token account of %s, which is %s", cfg.Vault.Account, cfg.Vault.Owner, account)
	}
	cl := &Client{genesis: cfg.Genesis, vault: cfg.Vault, decimals: cfg.Decimals, operators: slices.Clone(cfg.Operators), alarm: cfg.Alarm}
	timeout := cfg.Timeout
	if timeout == 0 {
		timeout = defaultTimeout
	}
	for i, u := range cfg.Providers {
		if p, err := url.Parse(u); err != nil || p.Host == "" || p.Scheme != "https" && p.Scheme != "http" {
			return nil, fmt.Errorf("RPC provider %d has no http or https URL", i+1)
		}
		cl.providers = append(cl.providers, &provider{number: i + 1, url: u, timeout: timeout, http: newHTTP()})
	}
	return cl, nil
}

// Vault is what is paid.
func (cl *Client) Vault() Vault { return cl.vault }

// Claim is what a transaction is said to be.
type Claim struct {
	Signature settle.Signature
	Owner     settle.Wallet // who paid, and gets the credit
	Amount    settle.Amount // at least this, in base units; not 0
	Memo      string        // the quote's; empty for a stake only
	NotBefore uint64        // the slot of the quote
	NotAfter  int64         // its end, in seconds since 1970; 0 is none
	// Sponsor pays the transaction's fee. When it and the owner are all that sign, the
	// memo needs no signer of its own. Zero: it does.
	Sponsor settle.Key
}

// memoLimit is the most bytes that a memo may have, as x402 has it.
const memoLimit = 256

func (c Claim) validate(stake bool) error {
	switch {
	case c.Amount == 0:
		return fmt.Errorf("%w: an amount of 0", ErrClaim)
	case c.Signature == settle.Signature{}:
		return fmt.Errorf("%w: an empty signature", ErrClaim)
	case c.Owner == settle.Wallet{}:
		return fmt.Errorf("%w: the owner is the system program", ErrClaim)
	case !stake && (c.Memo == "" || len(c.Memo) > memoLimit):
		return fmt.Errorf("%w: a memo of %d bytes, it has 1 to %d", ErrClaim, len(c.Memo), memoLimit)
	}
	return nil
}

// Payment is what the chain proves.
type Payment struct {
	Owner     settle.Wallet
	Signature settle.Signature
	Message   settle.Hash   // of what was signed: one message can have many signatures
	Amount    settle.Amount // what counts: the least of received, paid and transferred
	Slot      uint64
	Time      int64  // seconds since 1970, 0 when no provider keeps it
	Version   int    // of the transaction: −1 is legacy
	Memo      string // its own, when it has one and not several
}

// Payment verifies that a transaction pays a quote. Whether its signature or its message
// has been used before is not known here.
func (cl *Client) Payment(ctx context.Context, c Claim) (Payment, error) {
	return cl.verify(ctx, c, false)
}

// Stake verifies a deposit or a stake: a payment that is bound to its sender and to no
// quote.
func (cl *Client) Stake(ctx context.Context, c Claim) (Payment, error) {
	return cl.verify(ctx, c, true)
}

func (cl *Client) verify(ctx context.Context, c Claim, stake bool) (Payment, error) {
	if err := c.validate(stake); err != nil {
		return Payment{}, err
	}
	ask := func(e *evidence) error {
		for _, r := range rules {
			if r.claim != (e == nil) || r.memo && stake || r.name == cl.without {
				continue
			}
			if err := r.check(cl, e, c); err != nil {
				return err
			}
		}
		return nil
	}
	if err := ask(nil); err != nil {
		return Payment{}, err
	}
	e, err := cl.fetch(ctx, c.Signature)
	if err == nil {
		err = ask(e)
	}
	if err != nil {
		cl.tell(err)
		return Payment{}, err
	}
	return cl.payment(e, c)
}

func (cl *Client) payment(e *evidence, c Claim) (Payment, error) {
	paid, err := e.debit(cl.vault, c.Owner)
	if err != nil {
		return Payment{}, err
	}
	traced, err := e.traced(cl.vault)
	if err != nil {
		return Payment{}, err
	}
	p := Payment{Owner: c.Owner, Signature: c.Signature, Message: e.message, Amount: min(e.received(cl.vault), paid, traced),
		Slot: e.slot, Time: e.time, Version: e.version}
	if ms := e.memos(); len(ms) == 1 {
		p.Memo = string(ms[0].data)
	}
	return p, nil
}

// tell raises the alarm for what nobody but a person can mend.
func (cl *Client) tell(err error) {
	if cl.alarm == nil {
		return
	}
	for _, e := range []error{ErrDisagree, ErrSwapped, ErrForged, ErrMalformed, ErrUnverifiable, ErrVersion, ErrVaultAccount} {
		if errors.Is(err, e) {
			cl.alarm(err)
			return
		}
	}
}

// fetch asks all providers for a finalized transaction. They have to show the same.
func (cl *Client) fetch(ctx context.Context, sig settle.Signature) (*evidence, error) {
	found := make([]*evidence, len(cl.providers))
	errs := make([]error, len(cl.providers))
	var wg sync.WaitGroup
	for i, p := range cl.providers {
		wg.Go(func() { found[i], errs[i] = cl.fetchFrom(ctx, p, sig) })
	}
	wg.Wait()
	// A lie of one outweighs that another is only late.
	var late error
	for _, err := range errs {
		if errors.Is(err, ErrNotYet) {
			late = err
		} else if err != nil {
			return nil, err
		}
	}
	if late != nil {
		return nil, late
	}
	e := found[0]
	for i, o := range found[1:] {
		if cl.without != agreement && !e.same(o) {
			return nil, fmt.Errorf("%w: 1 and %d of %s", ErrDisagree, i+2, sig)
		}
		e.time = max(e.time, o.time)
	}
	return e, nil
}

// Rules that are no entry of the list, by name.
const (
	agreement = "agreement"
	finality  = "finalized"
)

func (cl *Client) fetchFrom(ctx context.Context, p *provider, sig settle.Signature) (*evidence, error) {
	commitment := "finalized"
	if cl.without == finality {
		commitment = "confirmed"
	}
	var a *answer
	err := p.call(ctx, "getTransaction", []any{sig, map[string]any{
		"encoding": "base64", "commitment": commitment, "maxSupportedTransactionVersion": 1}}, &a)
	switch {
	case codeOf(err) == codeVersion:
		return nil, fmt.Errorf("%w (provider %d)", ErrVersion, p.number)
	case err != nil:
		return nil, err
	case a == nil:
		return nil, ErrNotYet
	}
	e, err := readEvidence(a)
	if err != nil {
		return nil, fmt.Errorf("%w (provider %d)", err, p.number)
	}
	return e, nil
}
