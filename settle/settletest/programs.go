package settletest

import (
	"crypto/sha256"
	"encoding/binary"
	"math/big"

	"kvasird/settle"
)

// The programs that every chain has.
var (
	System      = mustKey("11111111111111111111111111111111")
	Token       = mustKey("TokenkegQfeZyiNwAJbNbGKPFXCWuBvf9Ss623VQ5DA")
	Token2022   = mustKey("TokenzQdBNbLqP5VEhdkAS6EPFLC1PHnBqCXEpPxuEb")
	Associated  = mustKey("ATokenGPvbdGVxr1b2hvZbsiqW5xWH25efTNsLJA8knL")
	MemoProgram = mustKey("MemoSq4gqABAXKb96qnH8TysNcWxMyWCqXgDLGmfcHr")
	LookupTable = mustKey("AddressLookupTab1e1111111111111111111111111")
	WrappedSOL  = mustKey("So11111111111111111111111111111111111111112")

	recentBlockhashes = mustKey("SysvarRecentB1ockHashes11111111111111111111")
	rentSysvar        = mustKey("SysvarRent111111111111111111111111111111111")
)

func mustKey(s string) settle.Key {
	k, err := settle.ParseKey(s)
	if err != nil {
		panic(err)
	}
	return k
}

func signs(k settle.Key) Account  { return Account{Key: k, Signer: true} }
func writes(k settle.Key) Account { return Account{Key: k, Writable: true} }
func reads(k settle.Key) Account  { return Account{Key: k} }
func pays(k settle.Key) Account   { return Account{Key: k, Signer: true, Writable: true} }

func u32(n uint32) []byte { return binary.LittleEndian.AppendUint32(nil, n) }
func u64(n uint64) []byte { return binary.LittleEndian.AppendUint64(nil, n) }

func join(parts ...[]byte) (b []byte) {
	for _, p := range parts {
		b = append(b, p...)
	}
	return b
}

// CreateAccount makes an account of size bytes for a program.
func CreateAccount(payer, account, owner settle.Key, size int, lamports uint64) Instruction {
	return Instruction{System, []Account{pays(payer), pays(account)}, join(u32(0), u64(lamports), u64(uint64(size)), owner[:])}
}

// SendSOL moves lamports.
func SendSOL(from, to settle.Key, lamports uint64) Instruction {
	return Instruction{System, []Account{pays(from), writes(to)}, join(u32(2), u64(lamports))}
}

// AdvanceNonce is the first instruction of a transaction that names a durable nonce in
// place of a blockhash.
func AdvanceNonce(nonce, authority settle.Key) Instruction {
	return Instruction{System, []Account{writes(nonce), reads(recentBlockhashes), signs(authority)}, u32(4)}
}

// InitNonce makes a new account a nonce account.
func InitNonce(nonce, authority settle.Key) Instruction {
	return Instruction{System, []Account{writes(nonce), reads(recentBlockhashes), reads(rentSysvar)}, join(u32(6), authority[:])}
}

// Memo writes a text that the signers sign.
func Memo(text string, signers ...settle.Key) Instruction {
	in := Instruction{Program: MemoProgram, Data: []byte(text)}
	for _, s := range signers {
		in.Accounts = append(in.Accounts, signs(s))
	}
	return in
}

// AddressOf derives the address of a program's account from seeds.
func AddressOf(program settle.Key, seeds ...[]byte) (address settle.Key, bump byte) {
	for bump = 255; ; bump-- {
		h := sha256.Sum256(join(join(seeds...), []byte{bump}, program[:], []byte("ProgramDerivedAddress")))
		if address = settle.Key(h); !onCurve(address) {
			return address, bump
		}
	}
}

// onCurve says whether the bytes are a point of edwards25519: whether (y²−1)/(dy²+1) is
// a square, by Euler's criterion.
func onCurve(k settle.Key) bool {
	le := make([]byte, 32)
	for i, b := range k {
		le[31-i] = b
	}
	le[0] &= 0x7f
	p := new(big.Int).Sub(new(big.Int).Lsh(big.NewInt(1), 255), big.NewInt(19))
	d := new(big.Int).Mul(big.NewInt(-121665), new(big.Int).ModInverse(big.NewInt(121666), p))
	y2 := new(big.Int).SetBytes(le)
	y2.Mul(y2, y2).Mod(y2, p)
	u := new(big.Int).Sub(y2, big.NewInt(1))
	v := new(big.Int).Mul(d, y2)
	v.Add(v, big.NewInt(1)).Mod(v, p)
	x2 := u.Mul(u, v.ModInverse(v, p))
	x2.Mod(x2, p)
	return big.Jacobi(x2, p) >= 0
}

// ATA is the associated token account of a wallet.
func ATA(owner, mint, program settle.Key) settle.Key {
	address, _ := AddressOf(Associated, owner[:], program[:], mint[:])
	return address
}

// CreateATA makes the associated token account, if it is not there.
func CreateATA(payer, owner, mint, program settle.Key) Instruction {
	return Instruction{Associated, []Account{pays(payer), writes(ATA(owner, mint, program)), reads(owner), reads(mint), reads(System), reads(program)}, []byte{1}}
}

// RecoverNested moves the tokens of an associated account whose owner is another
// associated account of the wallet to the wallet's own.
func RecoverNested(wallet, ownerMint, nestedMint, program settle.Key) Instruction {
	owner := ATA(wallet, ownerMint, program)
	return Instruction{Associated, []Account{writes(ATA(owner, nestedMint, program)), reads(nestedMint), writes(ATA(wallet, nestedMint, program)),
		reads(owner), reads(ownerMint), pays(wallet), reads(program)}, []byte{2}}
}
