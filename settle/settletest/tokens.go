package settletest

import (
	"encoding/base64"
	"fmt"

	"kvasird/settle"
)

// Mint is a token with the wallet that may make more of it.
type Mint struct {
	Key       settle.Key
	Program   settle.Key
	Decimals  byte
	Authority Wallet
	chain     *Chain
}

// lamports is what new wallets get: 10 SOL.
const lamports = 10_000_000_000

// NewWallet is a wallet with SOL for fees.
func (c *Chain) NewWallet(name string) Wallet {
	c.t.Helper()
	w := NewWallet(name)
	c.Airdrop(w.Key, lamports)
	return w
}

// NewMint makes a token of six decimals. Extensions are Token-2022's: the bytes that
// they need in the mint, and the instructions that set them up.
func (c *Chain) NewMint(name string, program settle.Key, extensions ...Extension) Mint {
	c.t.Helper()
	authority, account := c.NewWallet(name+" authority"), NewWallet(name+" mint")
	size := 82
	if len(extensions) > 0 {
		size = 166
	}
	var setUp []Instruction
	for _, e := range extensions {
		size += 4 + e.Size
		setUp = append(setUp, Instruction{program, append([]Account{writes(account.Key)}, e.Accounts...), e.Data})
	}
	in := []Instruction{CreateAccount(authority.Key, account.Key, program, size, c.Rent(size))}
	in = append(in, setUp...)
	// InitializeMint2, the authority may freeze too.
	in = append(in, Instruction{program, []Account{writes(account.Key)}, join([]byte{20, 6}, authority.Key[:], []byte{1}, authority.Key[:])})
	c.Run([]Wallet{authority, account}, in...)
	return Mint{Key: account.Key, Program: program, Decimals: 6, Authority: authority, chain: c}
}

// Extension is an extension of a Token-2022 mint.
type Extension struct {
	Size     int
	Accounts []Account
	Data     []byte
}

// TransferFee takes so many hundredths of a percent of each transfer.
func TransferFee(authority settle.Key, basisPoints uint16) Extension {
	some := join([]byte{1}, authority[:])
	return Extension{Size: 108, Data: join([]byte{26, 0}, some, some, []byte{byte(basisPoints), byte(basisPoints >> 8)}, u64(1<<62))}
}

// PermanentDelegate lets a key move everybody's tokens.
func PermanentDelegate(delegate settle.Key) Extension {
	return Extension{Size: 32, Data: join([]byte{35}, delegate[:])}
}

// ConfidentialTransfers lets balances be hidden.
func ConfidentialTransfers(authority settle.Key) Extension {
	return Extension{Size: 65, Data: join([]byte{27, 0}, authority[:], []byte{1}, make([]byte, 32))}
}

// Open makes the associated token account of a wallet.
func (m Mint) Open(owner settle.Key) settle.Key {
	m.chain.t.Helper()
	m.chain.Run([]Wallet{m.Authority}, CreateATA(m.Authority.Key, owner, m.Key, m.Program))
	return m.ATA(owner)
}

// Fund gives a wallet tokens in its associated account.
func (m Mint) Fund(owner settle.Key, amount settle.Amount) settle.Key {
	m.chain.t.Helper()
	// The memo makes each a transaction of its own, also under one blockhash.
	m.chain.Run([]Wallet{m.Authority}, CreateATA(m.Authority.Key, owner, m.Key, m.Program), m.MintTo(m.ATA(owner), amount),
		Memo(fmt.Sprint("fund ", m.chain.funded.Add(1)), m.Authority.Key))
	return m.ATA(owner)
}

// ATA is the associated token account of a wallet.
func (m Mint) ATA(owner settle.Key) settle.Key { return ATA(owner, m.Key, m.Program) }

// NewAccount makes a token account that is not the associated one, with the given
// tokens.
func (m Mint) NewAccount(name string, owner settle.Key, amount settle.Amount) settle.Key {
	m.chain.t.Helper()
	account := NewWallet(name)
	size := 165
	in := []Instruction{
		CreateAccount(m.Authority.Key, account.Key, m.Program, size, m.chain.Rent(size)),
		m.InitAccount(account.Key, owner),
	}
	if amount > 0 {
		in = append(in, m.MintTo(account.Key, amount))
	}
	m.chain.Run([]Wallet{m.Authority, account}, in...)
	return account.Key
}

// InitAccount makes a new account a token account.
func (m Mint) InitAccount(account, owner settle.Key) Instruction {
	return Instruction{m.Program, []Account{writes(account), reads(m.Key)}, join([]byte{18}, owner[:])}
}

// InitMultisig makes a new account an owner that signs by one of two.
func (m Mint) InitMultisig(account, a, b settle.Key) Instruction {
	return Instruction{m.Program, []Account{writes(account), reads(a), reads(b)}, []byte{19, 1}}
}

// MintTo makes tokens.
func (m Mint) MintTo(account settle.Key, amount settle.Amount) Instruction {
	return Instruction{m.Program, []Account{writes(m.Key), writes(account), signs(m.Authority.Key)}, join([]byte{7}, u64(uint64(amount)))}
}

// Burn destroys tokens.
func (m Mint) Burn(account, authority settle.Key, amount settle.Amount) Instruction {
	return Instruction{m.Program, []Account{writes(account), writes(m.Key), signs(authority)}, join([]byte{8}, u64(uint64(amount)))}
}

// Transfer moves tokens and names no mint.
func (m Mint) Transfer(from, to, authority settle.Key, amount settle.Amount) Instruction {
	return Instruction{m.Program, []Account{writes(from), writes(to), signs(authority)}, join([]byte{3}, u64(uint64(amount)))}
}

// TransferChecked moves tokens.
func (m Mint) TransferChecked(from, to, authority settle.Key, amount settle.Amount) Instruction {
	return Instruction{m.Program, []Account{writes(from), reads(m.Key), writes(to), signs(authority)},
		join([]byte{12}, u64(uint64(amount)), []byte{m.Decimals})}
}

// TransferWithFee is Token-2022's TransferCheckedWithFee.
func (m Mint) TransferWithFee(from, to, authority settle.Key, amount, fee settle.Amount) Instruction {
	return Instruction{m.Program, []Account{writes(from), reads(m.Key), writes(to), signs(authority)},
		join([]byte{26, 1}, u64(uint64(amount)), []byte{m.Decimals}, u64(uint64(fee)))}
}

// TransferMultisig moves tokens of a multisig owner.
func (m Mint) TransferMultisig(from, to, multisig, signer settle.Key, amount settle.Amount) Instruction {
	return Instruction{m.Program, []Account{writes(from), reads(m.Key), writes(to), reads(multisig), signs(signer)},
		join([]byte{12}, u64(uint64(amount)), []byte{m.Decimals})}
}

// Approve lets a delegate spend.
func (m Mint) Approve(account, delegate, owner settle.Key, amount settle.Amount) Instruction {
	return Instruction{m.Program, []Account{writes(account), reads(delegate), signs(owner)}, join([]byte{4}, u64(uint64(amount)))}
}

// SetOwner gives a token account to another owner.
func (m Mint) SetOwner(account, owner, to settle.Key) Instruction {
	return Instruction{m.Program, []Account{writes(account), signs(owner)}, join([]byte{6, 2, 1}, to[:])}
}

// SetCloser sets who may close a token account.
func (m Mint) SetCloser(account, owner, to settle.Key) Instruction {
	return Instruction{m.Program, []Account{writes(account), signs(owner)}, join([]byte{6, 3, 1}, to[:])}
}

// Close closes an empty token account.
func (m Mint) Close(account, to, owner settle.Key) Instruction {
	return Instruction{m.Program, []Account{writes(account), writes(to), signs(owner)}, []byte{9}}
}

// Freeze freezes a token account.
func (m Mint) Freeze(account settle.Key) Instruction {
	return Instruction{m.Program, []Account{writes(account), reads(m.Key), signs(m.Authority.Key)}, []byte{10}}
}

// SyncNative makes the balance of a wrapped-SOL account its lamports.
func (m Mint) SyncNative(account settle.Key) Instruction {
	return Instruction{m.Program, []Account{writes(account)}, []byte{17}}
}

// Native is wrapped SOL.
func (c *Chain) Native() Mint { return Mint{Key: WrappedSOL, Program: Token, Decimals: 9, chain: c} }

// NewTable makes a lookup table that has long been there.
func (c *Chain) NewTable(name string, keys ...settle.Key) Table {
	c.t.Helper()
	t := Table{Address: NewWallet(name).Key, Keys: keys}
	// State 1; not deactivated; extended in slot 0 from index 0; no authority; padding.
	data := join(u32(1), u64(1<<64-1), u64(0), make([]byte, 56-20))
	for _, k := range keys {
		data = append(data, k[:]...)
	}
	c.SetAccount(t.Address, LookupTable, c.Rent(len(data)), data)
	return t
}

// NewNonce makes a durable nonce account and gives what transactions name.
func (c *Chain) NewNonce(name string, authority Wallet) (account, nonce settle.Key) {
	c.t.Helper()
	w := NewWallet(name)
	c.Run([]Wallet{authority, w}, CreateAccount(authority.Key, w.Key, System, 80, c.Rent(80)), InitNonce(w.Key, authority.Key))
	return w.Key, settle.Key(c.AccountData(w.Key)[40:72])
}

// AccountData is the bytes of an account.
func (c *Chain) AccountData(address settle.Key) []byte {
	c.t.Helper()
	var answer struct {
		Value *struct {
			Data []string
		}
	}
	c.into(&answer, "getAccountInfo", address, map[string]string{"encoding": "base64"})
	if answer.Value == nil {
		c.t.Fatalf("there is no account %s", address)
	}
	data, err := base64.StdEncoding.DecodeString(answer.Value.Data[0])
	if err != nil {
		c.t.Fatalf("account %s: %v", address, err)
	}
	return data
}
