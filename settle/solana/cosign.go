package solana

import (
	"context"
	"crypto/ed25519"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"slices"

	sdk "github.com/gagliardetto/solana-go"

	"kvasird/settle"
)

// Limits of a transaction that is co-signed: what it may cost the fee payer.
const (
	// MaxPartial is in bytes: the most that a transaction before version 1 has.
	MaxPartial = 1232
	maxUnits   = 400_000 // compute units
	// maxPrice is in 10⁻⁶ lamports per unit: with the units, which a price has to come
	// with, 0.00004 SOL at most. Without them the chain counts 200,000 for each call.
	maxPrice = 100_000
)

// The programs that a transaction may call beside the token's. Lighthouse has assertions,
// which wallets add to protect their owner.
var (
	memoProgram   = settle.Key(sdk.MemoProgramID)
	budgetProgram = settle.Key(sdk.ComputeBudget)
	lighthouse    = settle.Key(sdk.MustPublicKeyFromBase58("L2TExMFKdjpN9kozasaurPirfHy9P8sbXoAN1qA3S95"))
)

// Why a transaction is not co-signed.
var (
	ErrPartial    = invalid("the transaction cannot be co-signed")
	ErrPartialPay = invalid("the transaction does not pay what is due, and that alone")
	ErrTried      = invalid("the transaction fails when it is tried: nothing was paid, sign another one")
)

// Due is what a partially signed transaction has to pay to the vault.
type Due struct {
	Amount settle.Amount // exactly
	Memo   string        // exactly, once
}

// CoSigned is a transaction with all its signatures.
type CoSigned struct {
	Signed
	Payer settle.Wallet
}

// CoSign checks a transaction that its payer signed and that names the fee key as who
// pays for it, and signs it for the fee key. It sends nothing. The transaction is of two
// signers, before version 1 and without tables; its calls are budgets within limits, one
// memo, assertions, and one TransferChecked from the payer's associated account to the
// vault; and no call has the fee key among its accounts. It is not tried: see Try.
//
// Errors: of class ErrInvalid, and ErrUnknown when no provider says how long it is valid.
func (cl *Client) CoSign(ctx context.Context, fee ed25519.PrivateKey, partial []byte, due Due) (CoSigned, error) {
	if len(fee) != ed25519.PrivateKeySize {
		return CoSigned{}, fmt.Errorf("%w: the fee key has not %d bytes", ErrPayout, ed25519.PrivateKeySize)
	}
	tx, payer, err := cl.readPartial(sdk.PublicKeyFromBytes(fee.Public().(ed25519.PublicKey)), partial)
	if err != nil {
		return CoSigned{}, err
	}
	if err := cl.checkDue(tx, payer, due); err != nil {
		return CoSigned{}, err
	}
	latest, err := cl.latest(ctx)
	if err != nil {
		return CoSigned{}, err
	}
	message := messageOf(tx, partial)
	tx.Signatures[0] = sdk.Signature(ed25519.Sign(fee, message))
	raw, err := tx.MarshalBinary()
	if err != nil {
		return CoSigned{}, fmt.Errorf("%w: %v", ErrPartial, err)
	}
	// The blockhash is the payer's: it is not newer than the newest, which Resolve's margin covers.
	return CoSigned{Signed{Raw: raw, Signature: settle.Signature(tx.Signatures[0]), Message: sha256.Sum256(message),
		Slot: latest.Context.Slot, LastValid: latest.Value.LastValidBlockHeight}, payer}, nil
}

// readPartial reads a transaction of two signers, of which the second has signed.
func (cl *Client) readPartial(fee sdk.PublicKey, partial []byte) (tx *sdk.Transaction, payer settle.Wallet, err error) {
	if len(partial) > MaxPartial {
		return nil, payer, fmt.Errorf("%w: %d bytes, at most %d", ErrPartial, len(partial), MaxPartial)
	}
	tx, _, err = readTransaction([]string{base64.StdEncoding.EncodeToString(partial), "base64"})
	if err != nil {
		return nil, payer, fmt.Errorf("%w: %v", ErrPartial, err)
	}
	m := tx.Message
	bad := ""
	switch {
	case m.GetVersion() == sdk.MessageVersionV1:
		bad = "it is of version 1: legacy and 0 are taken"
	case len(m.AddressTableLookups) > 0:
		bad = "it looks accounts up in a table: name them all"
	case len(tx.Signatures) != 2:
		bad = fmt.Sprintf("it has %d signers: they are the fee payer and who pays", len(tx.Signatures))
	case m.AccountKeys[0] != fee:
		bad = fmt.Sprintf("its fee payer is %s, not %s", m.AccountKeys[0], fee)
	}
	if bad != "" {
		return nil, payer, fmt.Errorf("%w: %s", ErrPartial, bad)
	}
	payer = settle.Wallet(m.AccountKeys[1])
	switch {
	case settle.SmallOrder(payer):
		return nil, payer, ErrSmallOrder
	case payer == cl.vault.Owner || payer == cl.vault.Account || slices.Contains(cl.operators, payer):
		return nil, payer, ErrOperator
	case !ed25519.Verify(payer[:], messageOf(tx, partial), tx.Signatures[1][:]):
		return nil, payer, fmt.Errorf("%w: the signature of %s does not hold", ErrPartial, payer)
	}
	return tx, payer, nil
}

// checkDue looks at every call of the transaction.
func (cl *Client) checkDue(tx *sdk.Transaction, payer settle.Wallet, due Due) error {
	transfers, memos, budgets := 0, 0, map[byte]bool{}
	for i, in := range tx.Message.Instructions {
		c, err := callOf(tx, in)
		if err != nil {
			return fmt.Errorf("%w: call %d: %v", ErrPartial, i, err)
		}
		if c.program == settle.Key(tx.Message.AccountKeys[0]) || slices.Contains(c.accounts, settle.Key(tx.Message.AccountKeys[0])) {
			return fmt.Errorf("%w: call %d has the fee payer among its accounts", ErrPartial, i)
		}
		switch c.program {
		case cl.vault.Program:
			transfers++
			err = cl.checkTransfer(c, payer, due.Amount)
		case memoProgram:
			memos++
			err = checkMemo(c, payer, due.Memo)
		case budgetProgram:
			err = checkBudget(c, budgets)
		case lighthouse:
		default:
			err = fmt.Errorf("%w: it calls %s", ErrPartial, c.program)
		}
		if err != nil {
			return fmt.Errorf("%w (call %d)", err, i)
		}
	}
	if budgets[budgetPrice] && !budgets[budgetUnits] {
		return fmt.Errorf("%w: it sets a price for compute units and no limit of them: set both", ErrPartial)
	}
	if transfers != 1 || memos != 1 {
		return fmt.Errorf("%w: %d transfers and %d memos, one each", ErrPartialPay, transfers, memos)
	}
	return nil
}

// callOf resolves the accounts of an instruction.
func callOf(tx *sdk.Transaction, in sdk.CompiledInstruction) (call, error) {
	e := evidence{}
	for _, k := range tx.Message.AccountKeys {
		e.keys = append(e.keys, settle.Key(k))
	}
	accounts := make([]int, len(in.Accounts))
	for i, a := range in.Accounts {
		accounts[i] = int(a)
	}
	if err := e.addCall(int(in.ProgramIDIndex), accounts, in.Data, false); err != nil {
		return call{}, err
	}
	return e.calls[0], nil
}

func (cl *Client) checkTransfer(c call, payer settle.Wallet, amount settle.Amount) error {
	source, err := ataOf(payer, cl.vault.Mint, cl.vault.Program)
	if err != nil {
		return err
	}
	bad := ""
	switch {
	case len(c.data) != 10 || c.data[0] != tokenTransferChecked || len(c.accounts) != 4:
		bad = "it calls the token program for something else than one TransferChecked"
	case c.accounts[1] != cl.vault.Mint || c.data[9] != cl.decimals:
		bad = fmt.Sprintf("it is not of the mint %s with %d decimals", cl.vault.Mint, cl.decimals)
	case c.accounts[2] != cl.vault.Account:
		bad = fmt.Sprintf("it pays %s, not the vault %s", c.accounts[2], cl.vault.Account)
	case c.accounts[3] != payer || c.accounts[0] != source:
		bad = fmt.Sprintf("it is not from the associated account %s of %s, by its owner", source, payer)
	case settle.Amount(binary.LittleEndian.Uint64(c.data[1:9])) != amount:
		bad = fmt.Sprintf("it pays %d, not %d", binary.LittleEndian.Uint64(c.data[1:9]), amount)
	default:
		return nil
	}
	return fmt.Errorf("%w: %s", ErrPartialPay, bad)
}

// checkMemo takes a memo that no account signs too: x402 clients write such, and here all
// that is signed is the payer's.
func checkMemo(c call, payer settle.Wallet, memo string) error {
	if string(c.data) != memo {
		return fmt.Errorf("%w: %.60q", ErrMemo, c.data)
	}
	if slices.ContainsFunc(c.accounts, func(k settle.Key) bool { return k != payer }) {
		return ErrMemoSigner
	}
	return nil
}

// Instructions of the compute budget, by their first byte.
const (
	budgetUnits = 2 // 4 bytes
	budgetPrice = 3 // 8 bytes
)

func checkBudget(c call, seen map[byte]bool) error {
	var kind byte
	if len(c.data) > 0 {
		kind = c.data[0]
	}
	bad := ""
	switch {
	case seen[kind] || len(c.accounts) > 0:
		bad = "a budget is set twice, or names accounts"
	case kind == budgetUnits && len(c.data) == 5:
		if units := binary.LittleEndian.Uint32(c.data[1:]); units > maxUnits {
			bad = fmt.Sprintf("it asks for %d compute units, at most %d", units, maxUnits)
		}
	case kind == budgetPrice && len(c.data) == 9:
		if price := binary.LittleEndian.Uint64(c.data[1:]); price > maxPrice {
			bad = fmt.Sprintf("it pays %d micro-lamports a compute unit, at most %d", price, maxPrice)
		}
	default:
		bad = "it sets another budget than units and their price"
	}
	if bad != "" {
		return fmt.Errorf("%w: %s", ErrPartial, bad)
	}
	seen[kind] = true
	return nil
}

// Try asks the first provider what the transaction would do, and changes nothing.
// Errors: ErrTried, and of class ErrUnknown.
func (cl *Client) Try(ctx context.Context, s Signed) error {
	var tried struct {
		Value struct{ Err json.RawMessage }
	}
	err := cl.providers[0].call(ctx, "simulateTransaction", []any{base64.StdEncoding.EncodeToString(s.Raw),
		map[string]any{"encoding": "base64", "commitment": "confirmed", "sigVerify": true}}, &tried)
	switch {
	case err != nil:
		return err
	case len(tried.Value.Err) == 0:
		return fmt.Errorf("%w: no word of success", ErrMalformed)
	case string(tried.Value.Err) != "null":
		return fmt.Errorf("%w: %.100s", ErrTried, tried.Value.Err)
	}
	return nil
}

// Slot is the newest finalized slot that every provider that answers has: what a payment
// of a quote that is made now is not before. Error: ErrProvider.
func (cl *Client) Slot(ctx context.Context) (slot uint64, err error) {
	for _, p := range cl.providers {
		var at uint64
		if e := p.call(ctx, "getSlot", []any{map[string]string{"commitment": "finalized"}}, &at); e != nil {
			err = e
			continue
		}
		if slot == 0 || at < slot {
			slot = at
		}
	}
	if slot > 0 {
		err = nil
	} else if err == nil {
		err = fmt.Errorf("%w: slot 0", ErrProvider)
	}
	return slot, err
}
