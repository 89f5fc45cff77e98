//go:build svm

package solana

import (
	"strings"

	"kvasird/settle"
	"kvasird/settle/settletest"
)

// identities are the cases of who paid, and of the memo that says so.
var identities = []verdict{
	{"5", "Eve claims Alice's payment", func(w *world) ask {
		c := w.paid()
		c.Owner = w.eve.Key
		return ask{claim: c}
	}, ErrDebit},
	{"5b", "Eve stakes Alice's payment", func(w *world) ask {
		c := w.paid()
		c.Owner, c.Memo = w.eve.Key, ""
		return ask{claim: c, stake: true}
	}, ErrDebit},
	{"14", "Bob pays, Alice signs the memo only", func(w *world) ask {
		return ask{claim: w.claimOf(w.wallets(w.bob, w.alice), w.transfer(w.bob, price))}
	}, ErrDebit},
	{"15", "two payers", func(w *world) ask {
		return ask{claim: w.claimOf(w.wallets(w.alice, w.bob), w.transfer(w.alice, price*6/10), w.transfer(w.bob, price*4/10))}
	}, ErrDebit},
	{"16", "Bob pays, Alice sends as much to Eve", func(w *world) ask {
		away := w.mint.TransferChecked(w.mint.ATA(w.alice.Key), w.mint.ATA(w.eve.Key), w.alice.Key, price)
		return ask{claim: w.claimOf(w.wallets(w.alice, w.bob), w.transfer(w.bob, price), away)}
	}, ErrAuthority},
	{"18", "Bob's tokens through an account that Alice has for a moment", func(w *world) ask {
		return ask{claim: w.claimOf(w.through("18"), w.throughAlice("18")...)}
	}, ErrDebit},
	{"18b", "the same, and Alice sends as much to Eve", func(w *world) ask {
		away := w.mint.Transfer(w.mint.ATA(w.alice.Key), w.mint.ATA(w.eve.Key), w.alice.Key, price)
		return ask{claim: w.claimOf(w.through("18b"), append(w.throughAlice("18b"), away)...)}
	}, ErrSource},
	{"19a", "Eve as Alice's delegate, claimed for Alice", func(w *world) ask { return ask{claim: w.delegated("19a")} }, ErrAuthority},
	{"19b", "Eve as Alice's delegate, claimed for Eve", func(w *world) ask {
		c := w.delegated("19b")
		c.Owner = w.eve.Key
		return ask{claim: c}
	}, ErrDebit},
	{"20", "Alice's account is given to Eve, Bob pays", func(w *world) ask {
		account := w.mint.NewAccount("alice 20", w.alice.Key, price)
		return ask{claim: w.claimOf(w.wallets(w.alice, w.bob), w.mint.SetOwner(account, w.alice.Key, w.eve.Key), w.transfer(w.bob, price))}
	}, ErrAuthority},
	{"25", "the memo is signed by another wallet", func(w *world) ask {
		memo := w.memo()
		sig := w.Run(w.wallets(w.alice, w.bob), w.transfer(w.alice, price), settletest.Memo(memo, w.bob.Key))
		return ask{claim: Claim{Signature: sig, Owner: w.alice.Key, Amount: price, Memo: memo}}
	}, ErrMemoSigner},
	{"38a", "a multisig owner pays, claimed for it", func(w *world) ask {
		c, multisig := w.multisig("38a")
		c.Owner = multisig
		return ask{claim: c}
	}, ErrNotSigner},
	{"38b", "a multisig owner pays, claimed for the one who signed", func(w *world) ask {
		c, _ := w.multisig("38b")
		return ask{claim: c}
	}, ErrDebit},
	{"44", "paid by an inner call, as smart wallets do", func(w *world) ask {
		return ask{claim: w.claimOf(w.wallets(w.alice), settletest.Forward(w.forwarder, w.transfer(w.alice, price)))}
	}, nil},
	{"45", "the memo is in an inner call only", func(w *world) ask {
		memo := w.memo()
		sig := w.Run(w.wallets(w.alice), w.transfer(w.alice, price), settletest.Forward(w.forwarder, settletest.Memo(memo, w.alice.Key)))
		return ask{claim: Claim{Signature: sig, Owner: w.alice.Key, Amount: price, Memo: memo}}
	}, ErrNoMemo},
	{"46", "the vault is drained by an inner call", func(w *world) ask {
		drain := w.mint.TransferChecked(w.vault(), w.mint.ATA(w.eve.Key), w.operator.Key, price)
		return ask{claim: w.claimOf(w.wallets(w.alice, w.operator), w.transfer(w.alice, 2*price), settletest.Forward(w.forwarder, drain))}
	}, ErrVaultTouched},
	{"47", "twice the price, for a second quote", func(w *world) ask {
		c := w.claimOf(w.wallets(w.alice), w.transfer(w.alice, 2*price))
		c.Memo = w.memo()
		return ask{claim: c}
	}, ErrMemo},
	{"50a", "older than the quote", func(w *world) ask {
		c := w.paid()
		c.NotBefore = w.Slot() + 1
		return ask{claim: c}
	}, ErrEarly},
	{"50b", "after the quote's end", func(w *world) ask {
		c := w.paid()
		w.Advance(1)
		c.NotAfter = w.blockTime(c.Signature) - 1
		return ask{claim: c}
	}, ErrLate},
	{"50c", "in the quote's last second, and first slot", func(w *world) ask {
		c := w.paid()
		c.NotBefore = w.Slot()
		w.Advance(1)
		c.NotAfter = w.blockTime(c.Signature)
		return ask{claim: c}
	}, nil},
	{"51a", "memo in capitals", func(w *world) ask { return w.withMemo("quote a", "QUOTE a") }, ErrMemo},
	{"51b", "memo with a newline", func(w *world) ask { return w.withMemo("quote b", "quote b\n") }, ErrMemo},
	{"51c", "memo with a NUL", func(w *world) ask { return w.withMemo("quote c", "quote c\x00") }, ErrMemo},
	{"51d", "memo composed, quote decomposed", func(w *world) ask { return w.withMemo("quote e\u0301", "quote \u00e9") }, ErrMemo},
	{"51e", "memo of more than 256 bytes", func(w *world) ask { return w.withMemo("quote f", "quote f"+strings.Repeat(" ", 260)) }, ErrMemo},
	{"51f", "a quote with a memo of more than 256 bytes", func(w *world) ask { return w.withMemo(strings.Repeat("q", 257), strings.Repeat("q", 257)) }, ErrClaim},
	{"51g", "memo of 256 bytes", func(w *world) ask { return w.withMemo(strings.Repeat("q", 256), strings.Repeat("q", 256)) }, nil},
	{"51h", "an empty memo", func(w *world) ask { return w.withMemo("", " ") }, ErrClaim},
	{"52a", "a price of 2⁶⁴ − 1", func(w *world) ask {
		c := w.paid()
		c.Amount = 1<<64 - 1
		return ask{claim: c}
	}, ErrShort},
	{"52b", "a price of 0", func(w *world) ask {
		c := w.paid()
		c.Amount = 0
		return ask{claim: c}
	}, ErrClaim},
	{"54a", "the owner is the vault's", func(w *world) ask { return w.ownedBy(w.operator.Key) }, ErrOperator},
	{"54b", "the owner is the system program", func(w *world) ask { return w.ownedBy(settletest.System) }, ErrClaim},
	{"54c", "the owner is the vault", func(w *world) ask { return w.ownedBy(w.vault()) }, ErrOperator},
	{"54d", "the owner is the identity", func(w *world) ask { return w.ownedBy(settle.Key{1}) }, ErrSmallOrder},
	{"54e", "the owner is of order 8, its sign set", func(w *world) ask {
		k := settle.Key{0x26, 0xe8, 0x95, 0x8f, 0xc2, 0xb2, 0x27, 0xb0, 0x45, 0xc3, 0xf4, 0x89, 0xf2, 0xef, 0x98, 0xf0,
			0xd5, 0xdf, 0xac, 0x05, 0xd3, 0xc6, 0x33, 0x39, 0xb1, 0x38, 0x02, 0x88, 0x6d, 0x53, 0xfc, 0x05}
		k[31] |= 0x80
		return w.ownedBy(k)
	}, ErrSmallOrder},
	{"54f", "no signature", func(w *world) ask {
		c := w.paid()
		c.Signature = settle.Signature{}
		return ask{claim: c}
	}, ErrClaim},
	{"55", "the operator pays from another wallet", func(w *world) ask {
		memo := w.memo()
		sig := w.Run(w.wallets(w.operator2), w.transfer(w.operator2, price), settletest.Memo(memo, w.operator2.Key))
		return ask{claim: Claim{Signature: sig, Owner: w.operator2.Key, Amount: price, Memo: memo}}
	}, ErrOperator},
}

func (w *world) ownedBy(k settle.Key) ask {
	c := w.paid()
	c.Owner = k
	return ask{claim: c}
}

// withMemo is a payment whose memo is not, or not quite, the quote's.
func (w *world) withMemo(quote, memo string) ask {
	sig := w.Run(w.wallets(w.alice), w.transfer(w.alice, price), settletest.Memo(memo, w.alice.Key))
	return ask{claim: Claim{Signature: sig, Owner: w.alice.Key, Amount: price, Memo: quote}}
}

// through are the signers of throughAlice.
func (w *world) through(name string) []settletest.Wallet {
	return w.wallets(w.alice, w.bob, settletest.NewWallet("moment "+name))
}

// throughAlice makes an account of Alice's, pays into it from Bob's, on to the vault,
// and closes it.
func (w *world) throughAlice(name string) []settletest.Instruction {
	account := settletest.NewWallet("moment " + name).Key
	return []settletest.Instruction{
		settletest.CreateAccount(w.alice.Key, account, w.mint.Program, 165, w.Rent(165)), w.mint.InitAccount(account, w.alice.Key),
		w.mint.Transfer(w.mint.ATA(w.bob.Key), account, w.bob.Key, price), w.mint.Transfer(account, w.vault(), w.alice.Key, price),
		w.mint.Close(account, w.alice.Key, w.alice.Key),
	}
}

// delegated is a payment from an account of Alice's by Eve, her delegate; all sign the
// memo.
func (w *world) delegated(name string) Claim {
	account := w.mint.NewAccount("alice "+name, w.alice.Key, price)
	w.Run(w.wallets(w.alice), w.mint.Approve(account, w.eve.Key, w.alice.Key, price))
	memo := w.memo()
	sig := w.Run(w.wallets(w.alice, w.eve), w.mint.TransferChecked(account, w.vault(), w.eve.Key, price), settletest.Memo(memo, w.alice.Key, w.eve.Key))
	return Claim{Signature: sig, Owner: w.alice.Key, Amount: price, Memo: memo}
}

// multisig is a payment from an account of a multisig owner, for which Alice signs.
func (w *world) multisig(name string) (Claim, settle.Key) {
	owner := settletest.NewWallet("multisig " + name)
	w.Run(w.wallets(w.alice, owner), settletest.CreateAccount(w.alice.Key, owner.Key, w.mint.Program, 355, w.Rent(355)),
		w.mint.InitMultisig(owner.Key, w.alice.Key, w.bob.Key))
	account := w.mint.NewAccount("account of multisig "+name, owner.Key, price)
	return w.claimOf(w.wallets(w.alice), w.mint.TransferMultisig(account, w.vault(), owner.Key, w.alice.Key, price)), owner.Key
}
