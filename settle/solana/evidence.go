package solana

import (
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"slices"

	sdk "github.com/gagliardetto/solana-go"
	"github.com/mr-tron/base58"

	"kvasird/settle"
)

// answer is a node's answer to getTransaction in base64. Lists that may be missing are
// pointers: an old node leaves them out, and nothing is not the same as none.
type answer struct {
	Slot        uint64
	BlockTime   *int64
	Transaction []string
	Meta        *meta
}

type meta struct {
	Err                                 json.RawMessage
	PreBalances, PostBalances           []uint64
	PreTokenBalances, PostTokenBalances *[]tokenBalance
	InnerInstructions                   *[]innerInstructions
	LoadedAddresses                     struct{ Writable, Readonly []settle.Key }
}

// tokenBalance is of a token account. Owner is the wallet at that moment, so it can
// differ before and after.
type tokenBalance struct {
	AccountIndex  int
	Mint          settle.Key
	Owner         *settle.Key
	ProgramID     *settle.Key
	UITokenAmount struct{ Amount *settle.Amount }
}

type innerInstructions struct {
	Index        int
	Instructions []innerInstruction
}

type innerInstruction struct {
	ProgramIDIndex int
	Accounts       []int
	Data           string // base58
}

// evidence is what one provider shows of a transaction, in plain terms.
type evidence struct {
	slot    uint64
	time    int64 // seconds since 1970 of its block, 0 when the node does not say
	tx      *sdk.Transaction
	message settle.Hash
	version int // -1 is legacy
	keys    []settle.Key
	failed  bool

	pre, post []holding
	calls     []call // the transaction's own and the inner ones
}

// holding is what a token account has at a moment.
type holding struct {
	account, mint, owner, program settle.Key
	amount                        settle.Amount
}

// call is one call of a program.
type call struct {
	program  settle.Key
	accounts []settle.Key
	data     []byte
	inner    bool // made by another program
}

// readEvidence reads an answer. Its errors are ErrMalformed and ErrUnverifiable.
func readEvidence(a *answer) (*evidence, error) {
	tx, raw, err := readTransaction(a.Transaction)
	if err != nil {
		return nil, fmt.Errorf("%w: %v", ErrMalformed, err)
	}
	if a.Meta == nil || len(a.Meta.Err) == 0 || a.Slot == 0 {
		return nil, fmt.Errorf("%w: no meta, no word of success, or no slot", ErrUnverifiable)
	}
	e := &evidence{slot: a.Slot, tx: tx, version: int(tx.Message.GetVersion()) - 1}
	if a.BlockTime != nil {
		e.time = *a.BlockTime
	}
	e.message = sha256.Sum256(messageOf(tx, raw))
	e.failed = string(a.Meta.Err) != "null"
	if err := e.readKeys(a.Meta); err != nil {
		return nil, fmt.Errorf("%w: %v", ErrMalformed, err)
	}
	if e.pre, err = e.holdings(a.Meta.PreTokenBalances); err != nil {
		return nil, err
	}
	if e.post, err = e.holdings(a.Meta.PostTokenBalances); err != nil {
		return nil, err
	}
	if a.Meta.InnerInstructions == nil {
		return nil, fmt.Errorf("%w: no inner calls", ErrUnverifiable)
	}
	if err := e.readCalls(*a.Meta.InnerInstructions); err != nil {
		return nil, fmt.Errorf("%w: %v", ErrMalformed, err)
	}
	return e, nil
}

// readTransaction reads the bytes, which have to be what the SDK would write: the
// signatures are verified over what it writes.
func readTransaction(field []string) (*sdk.Transaction, []byte, error) {
	if len(field) != 2 || field[1] != "base64" {
		return nil, nil, fmt.Errorf("the transaction is not in base64")
	}
	raw, err := base64.StdEncoding.DecodeString(field[0])
	if err != nil {
		return nil, nil, fmt.Errorf("the transaction is not in base64")
	}
	tx, err := sdk.TransactionFromBytes(raw)
	if err != nil {
		return nil, nil, fmt.Errorf("the transaction cannot be read: %v", err)
	}
	again, err := tx.MarshalBinary()
	if err != nil || !bytes.Equal(raw, again) || len(tx.Signatures) == 0 || len(tx.Signatures) > len(tx.Message.AccountKeys) ||
		len(tx.Signatures) != int(tx.Message.Header.NumRequiredSignatures) {
		return nil, nil, fmt.Errorf("the transaction is not written as it has to be")
	}
	return tx, raw, nil
}

// messageOf is what was signed: all but the signatures, which version 1 has at the end.
func messageOf(tx *sdk.Transaction, raw []byte) []byte {
	n := 64 * len(tx.Signatures)
	if tx.Message.GetVersion() == sdk.MessageVersionV1 {
		return raw[:len(raw)-n]
	}
	return raw[1+n:] // at most 127 signatures fit a packet, so their count is one byte
}

// readKeys puts the keys in the order of all indices: the transaction's, then those
// that it looked up, the writable ones first.
func (e *evidence) readKeys(m *meta) error {
	for _, k := range e.tx.Message.AccountKeys {
		e.keys = append(e.keys, settle.Key(k))
	}
	lookups := e.tx.Message.AddressTableLookups
	writable := lookups.NumWritableLookups()
	if len(m.LoadedAddresses.Writable) != writable || len(m.LoadedAddresses.Readonly) != lookups.NumLookups()-writable {
		return fmt.Errorf("the keys that were looked up are not those of the transaction's tables")
	}
	e.keys = append(append(e.keys, m.LoadedAddresses.Writable...), m.LoadedAddresses.Readonly...)
	if len(m.PreBalances) != len(e.keys) || len(m.PostBalances) != len(e.keys) {
		return fmt.Errorf("%d and %d balances of %d accounts", len(m.PreBalances), len(m.PostBalances), len(e.keys))
	}
	return nil
}

func (e *evidence) holdings(list *[]tokenBalance) (hs []holding, err error) {
	if list == nil {
		return nil, fmt.Errorf("%w: no token balances", ErrUnverifiable)
	}
	for _, b := range *list {
		if b.Owner == nil || b.ProgramID == nil || b.UITokenAmount.Amount == nil {
			return nil, fmt.Errorf("%w: a token balance without its owner, program or amount", ErrUnverifiable)
		}
		account, err := e.key(b.AccountIndex)
		if err != nil {
			return nil, fmt.Errorf("%w: a token balance: %v", ErrMalformed, err)
		}
		if slices.ContainsFunc(hs, func(h holding) bool { return h.account == account }) {
			return nil, fmt.Errorf("%w: two token balances of one account", ErrMalformed)
		}
		hs = append(hs, holding{account, b.Mint, *b.Owner, *b.ProgramID, *b.UITokenAmount.Amount})
	}
	return hs, nil
}

func (e *evidence) key(i int) (settle.Key, error) {
	if i < 0 || i >= len(e.keys) {
		return settle.Key{}, fmt.Errorf("account %d of %d", i, len(e.keys))
	}
	return e.keys[i], nil
}

// decodedData is the most characters of inner data that are decoded: more than a
// transfer has (14), since decoding takes the square of the length. Longer data is no
// transfer, and is compared as it is.
const decodedData = 64

func (e *evidence) readCalls(inner []innerInstructions) error {
	for _, in := range e.tx.Message.Instructions {
		accounts := make([]int, len(in.Accounts))
		for i, a := range in.Accounts {
			accounts[i] = int(a)
		}
		if err := e.addCall(int(in.ProgramIDIndex), accounts, in.Data, false); err != nil {
			return err
		}
	}
	own := len(e.calls)
	for _, list := range inner {
		if list.Index < 0 || list.Index >= own {
			return fmt.Errorf("inner calls of call %d of %d", list.Index, own)
		}
		for _, in := range list.Instructions {
			data := []byte(in.Data)
			if len(in.Data) <= decodedData {
				var err error
				if data, err = base58.Decode(in.Data); in.Data != "" && err != nil {
					return fmt.Errorf("an inner call's data is not base58")
				}
			}
			if err := e.addCall(in.ProgramIDIndex, in.Accounts, data, true); err != nil {
				return err
			}
		}
	}
	return nil
}

func (e *evidence) addCall(program int, accounts []int, data []byte, inner bool) (err error) {
	c := call{data: data, inner: inner}
	if c.program, err = e.key(program); err != nil {
		return err
	}
	for _, a := range accounts {
		k, err := e.key(a)
		if err != nil {
			return err
		}
		c.accounts = append(c.accounts, k)
	}
	e.calls = append(e.calls, c)
	return nil
}

// same says whether two providers show the same. Some nodes do not keep times: one
// alone counts.
func (e *evidence) same(o *evidence) bool {
	if e.time != o.time && e.time != 0 && o.time != 0 {
		return false
	}
	equal := func(a, b call) bool {
		return a.program == b.program && a.inner == b.inner && slices.Equal(a.accounts, b.accounts) && bytes.Equal(a.data, b.data)
	}
	return e.slot == o.slot && e.failed == o.failed && e.message == o.message && slices.Equal(e.tx.Signatures, o.tx.Signatures) &&
		slices.Equal(e.keys, o.keys) && slices.Equal(e.pre, o.pre) && slices.Equal(e.post, o.post) && slices.EqualFunc(e.calls, o.calls, equal)
}
