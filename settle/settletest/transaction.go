package settletest

import (
	"crypto/ed25519"
	"crypto/sha256"
	"encoding/binary"
	"slices"

	"kvasird/settle"
)

// Wallet is a key pair of a test, made from its name.
type Wallet struct {
	Key     settle.Wallet
	Private ed25519.PrivateKey
}

// NewWallet makes the wallet of a name.
func NewWallet(name string) Wallet {
	seed := sha256.Sum256([]byte("kvasir test wallet " + name))
	private := ed25519.NewKeyFromSeed(seed[:])
	return Wallet{Key: settle.Key(private.Public().(ed25519.PublicKey)), Private: private}
}

// Account is an account as an instruction uses it.
type Account struct {
	Key              settle.Key
	Signer, Writable bool
}

// Instruction is one call of a program.
type Instruction struct {
	Program  settle.Key
	Accounts []Account
	Data     []byte
}

// Versions of transactions.
const (
	Legacy = iota
	V0
	V1 // SIMD-0385
)

// Table is a lookup table of a V0 transaction.
type Table struct {
	Address settle.Key
	Keys    []settle.Key
}

// Tx is a transaction to be signed.
type Tx struct {
	Version      int
	Instructions []Instruction
	Signers      []Wallet   // the first pays the fee
	Blockhash    settle.Key // zero: the latest
	Tables       []Table
}

// layout is the accounts of a transaction in the order of the wire.
type layout struct {
	keys                                     []settle.Key // static, then loaded
	static                                   int
	signers, readonlySigners, readonlyOthers byte
	lookups                                  []lookup
}

type lookup struct {
	table              settle.Key
	writable, readonly []byte
}

// lay orders the accounts: signers before others, writable before read-only, the payer
// first. Accounts in a table that sign nothing and run nothing are looked up.
func lay(tx Tx) layout {
	order, uses := accountsOf(tx)
	var l layout
	add := func(signer, writable bool, count *byte) {
		for _, k := range order {
			if u := uses[k]; u.Signer == signer && u.Writable == writable && !tx.looksUp(k, u) {
				l.keys = append(l.keys, k)
				*count++
			}
		}
	}
	var readonlySigners, others byte
	add(true, true, &l.signers)
	add(true, false, &readonlySigners)
	add(false, true, &others)
	add(false, false, &l.readonlyOthers)
	l.signers, l.readonlySigners, l.static = l.signers+readonlySigners, readonlySigners, len(l.keys)
	var readonly []settle.Key
	for _, t := range tx.Tables {
		lk := lookup{table: t.Address}
		for i, k := range t.Keys {
			u, used := uses[k]
			if !used || !tx.looksUp(k, u) {
				continue
			}
			if u.Writable {
				lk.writable = append(lk.writable, byte(i))
				l.keys = append(l.keys, k)
			} else {
				lk.readonly = append(lk.readonly, byte(i))
				readonly = append(readonly, k)
			}
		}
		l.lookups = append(l.lookups, lk)
	}
	l.keys = append(l.keys, readonly...)
	return l
}

// accountsOf gives each account once, in the order of first use, with all its rights. A
// program has the key of the account and no rights.
func accountsOf(tx Tx) (order []settle.Key, uses map[settle.Key]Account) {
	uses = map[settle.Key]Account{}
	add := func(a Account) {
		u, seen := uses[a.Key]
		if !seen {
			order = append(order, a.Key)
		}
		uses[a.Key] = Account{a.Key, u.Signer || a.Signer, u.Writable || a.Writable}
	}
	add(Account{tx.Signers[0].Key, true, true})
	for _, in := range tx.Instructions {
		for _, a := range in.Accounts {
			add(a)
		}
	}
	for _, in := range tx.Instructions {
		add(Account{Key: in.Program})
	}
	return order, uses
}

func (tx Tx) looksUp(k settle.Key, u Account) bool {
	runs := slices.ContainsFunc(tx.Instructions, func(in Instruction) bool { return in.Program == k })
	return !u.Signer && !runs && slices.ContainsFunc(tx.Tables, func(t Table) bool { return slices.Contains(t.Keys, k) })
}

func (l layout) index(k settle.Key) byte { return byte(slices.Index(l.keys, k)) }

// Sign gives the bytes of a transaction. A signer that is not among tx.Signers leaves
// its signature empty.
func Sign(tx Tx) []byte {
	l := lay(tx)
	message := tx.message(l)
	signatures := make([]byte, 64*int(l.signers))
	for i, k := range l.keys[:l.signers] {
		for _, w := range tx.Signers {
			if w.Key == k {
				copy(signatures[64*i:], ed25519.Sign(w.Private, message))
			}
		}
	}
	if tx.Version == V1 {
		return append(message, signatures...)
	}
	raw := compact(nil, int(l.signers))
	return append(append(raw, signatures...), message...)
}

func (tx Tx) message(l layout) []byte {
	if tx.Version == V1 {
		return tx.messageV1(l)
	}
	var b []byte
	if tx.Version == V0 {
		b = append(b, 0x80)
	}
	b = append(b, l.signers, l.readonlySigners, l.readonlyOthers)
	b = compact(b, l.static)
	for _, k := range l.keys[:l.static] {
		b = append(b, k[:]...)
	}
	b = append(b, tx.Blockhash[:]...)
	b = compact(b, len(tx.Instructions))
	for _, in := range tx.Instructions {
		b = append(b, l.index(in.Program))
		b = compact(b, len(in.Accounts))
		for _, a := range in.Accounts {
			b = append(b, l.index(a.Key))
		}
		b = append(compact(b, len(in.Data)), in.Data...)
	}
	if tx.Version == Legacy {
		return b
	}
	b = compact(b, len(l.lookups))
	for _, lk := range l.lookups {
		b = append(b, lk.table[:]...)
		b = append(compact(b, len(lk.writable)), lk.writable...)
		b = append(compact(b, len(lk.readonly)), lk.readonly...)
	}
	return b
}

// messageV1 has its compute budget in the message: 200,000 units and 64 MiB of loaded
// data here, since unset would be none.
func (tx Tx) messageV1(l layout) []byte {
	b := []byte{0x81, l.signers, l.readonlySigners, l.readonlyOthers}
	b = binary.LittleEndian.AppendUint32(b, 4|8)
	b = append(b, tx.Blockhash[:]...)
	b = append(b, byte(len(tx.Instructions)), byte(len(l.keys)))
	for _, k := range l.keys {
		b = append(b, k[:]...)
	}
	b = binary.LittleEndian.AppendUint32(b, 200_000)
	b = binary.LittleEndian.AppendUint32(b, 64<<20)
	for _, in := range tx.Instructions {
		b = append(b, l.index(in.Program), byte(len(in.Accounts)))
		b = binary.LittleEndian.AppendUint16(b, uint16(len(in.Data)))
	}
	for _, in := range tx.Instructions {
		for _, a := range in.Accounts {
			b = append(b, l.index(a.Key))
		}
		b = append(b, in.Data...)
	}
	return b
}

// compact appends a count of 7 bits a byte.
func compact(b []byte, n int) []byte { return binary.AppendUvarint(b, uint64(n)) }

// Sign signs with the latest blockhash, if tx names none.
func (c *Chain) Sign(tx Tx) []byte {
	c.t.Helper()
	if tx.Blockhash == (settle.Key{}) {
		tx.Blockhash, _ = c.Blockhash()
	}
	return Sign(tx)
}

// Send signs and sends a transaction that has to land without an error.
func (c *Chain) Send(tx Tx) settle.Signature {
	c.t.Helper()
	sig, err := c.SendRaw(c.Sign(tx), true)
	if err != nil {
		c.t.Fatalf("a transaction failed: %v", err)
	}
	return sig
}

// Run sends instructions as a legacy transaction of the signers.
func (c *Chain) Run(signers []Wallet, instructions ...Instruction) settle.Signature {
	c.t.Helper()
	return c.Send(Tx{Instructions: instructions, Signers: signers})
}
