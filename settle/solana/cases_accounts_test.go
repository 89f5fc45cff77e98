//go:build svm

package solana

import (
	"bytes"
	"encoding/base64"
	"encoding/binary"
	"time"

	"github.com/mr-tron/base58"

	"kvasird/settle"
	"kvasird/settle/settletest"
)

// accounts are the cases of other accounts, tokens and programs.
var accounts = []verdict{
	{"36", "an account is given to the vault's owner", func(w *world) ask {
		account := w.mint.NewAccount("alice 36", w.alice.Key, price)
		return ask{claim: w.claimOf(w.wallets(w.alice), w.mint.SetOwner(account, w.alice.Key, w.operator.Key))}
	}, ErrNoVault},
	{"37a", "SOL to the vault", func(w *world) ask {
		return ask{claim: w.claimOf(w.wallets(w.alice), settletest.SendSOL(w.alice.Key, w.vault(), price))}
	}, ErrShort},
	{"37b", "SOL to the vault's owner", func(w *world) ask {
		return ask{claim: w.claimOf(w.wallets(w.alice), settletest.SendSOL(w.alice.Key, w.operator.Key, price))}
	}, ErrNoVault},
	{"39a", "a token that takes a fee of each transfer, the price sent", func(w *world) ask {
		return ask{claim: w.ofMint(w.fee, price), mint: w.fee}
	}, ErrShort},
	{"39b", "the same, the price arrives", func(w *world) ask {
		c := w.ofMint(w.fee, price)
		c.Amount = price * 99 / 100
		return ask{claim: c, amount: price * 99 / 100, mint: w.fee}
	}, nil},
	{"40a", "the vault's owner recovers a nested account, claimed for its owner", func(w *world) ask {
		c := w.nested()
		c.Owner = w.other.ATA(w.operator.Key)
		return ask{claim: c}
	}, ErrNotSigner},
	{"40b", "the vault's owner recovers a nested account, claimed for Alice", func(w *world) ask { return ask{claim: w.nested()} }, ErrDebit},
	{"41a", "from a frozen account", func(w *world) ask {
		account := w.mint.NewAccount("alice 41", w.alice.Key, price)
		w.Run(w.wallets(w.mint.Authority), w.mint.Freeze(account))
		memo := w.memo()
		sig := w.landed(w.wallets(w.alice), w.mint.TransferChecked(account, w.vault(), w.alice.Key, price), settletest.Memo(memo, w.alice.Key))
		return ask{claim: Claim{Signature: sig, Owner: w.alice.Key, Amount: price, Memo: memo}}
	}, ErrFailed},
	{"41b", "wrong decimals", func(w *world) ask {
		memo, in := w.memo(), w.transfer(w.alice, price)
		in.Data[9]++
		sig := w.landed(w.wallets(w.alice), in, settletest.Memo(memo, w.alice.Key))
		return ask{claim: Claim{Signature: sig, Owner: w.alice.Key, Amount: price, Memo: memo}}
	}, ErrFailed},
	{"56a", "wrapped SOL: the vault's lamports become tokens", func(w *world) ask {
		vault := w.wsol.ATA(w.operator.Key)
		return ask{mint: w.wsol, claim: w.claimOf(w.wallets(w.alice), settletest.SendSOL(w.alice.Key, vault, price), w.wsol.SyncNative(vault))}
	}, ErrDebit},
	{"56b", "the same, and Alice sends as much to Eve", func(w *world) ask {
		vault := w.wsol.ATA(w.operator.Key)
		return ask{mint: w.wsol, claim: w.claimOf(w.wallets(w.alice), settletest.SendSOL(w.alice.Key, vault, price), w.wsol.SyncNative(vault),
			w.wsol.TransferChecked(w.wsol.ATA(w.alice.Key), w.wsol.ATA(w.eve.Key), w.alice.Key, price))}
	}, ErrVaultTouched},
	{"56c", "wrapped SOL, transferred", func(w *world) ask { return ask{mint: w.wsol, claim: w.ofMint(w.wsol, price)} }, nil},
	{"57a", "TransferCheckedWithFee", func(w *world) ask {
		from, to := w.fee.ATA(w.alice.Key), w.fee.ATA(w.operator.Key)
		return ask{mint: w.fee, claim: w.claimOf(w.wallets(w.alice), w.fee.TransferWithFee(from, to, w.alice.Key, 2*price, 2*price/100))}
	}, ErrVaultTouched},
	{"57b", "a permanent delegate takes Alice's tokens", func(w *world) ask {
		m := w.drained
		return ask{mint: m, claim: w.claimOf(w.wallets(w.alice, w.eve), m.TransferChecked(m.ATA(w.alice.Key), m.ATA(w.operator.Key), w.eve.Key, price))}
	}, ErrAuthority},
	{"57c", "a deposit into confidential balances, by an inner call", func(w *world) ask {
		c := w.claimOf(w.wallets(w.alice), settletest.Forward(w.forwarder, w.transfer(w.alice, price)))
		// No vault of these tests can have such balances, so the call is added to what
		// the node shows: ConfidentialTransfer (27), Deposit (5), on the vault.
		return ask{claim: c, faults: func(w *world) []settletest.Fault {
			return []settletest.Fault{w.patched(c.Signature, func(a map[string]any) {
				inner := metaOf(a)["innerInstructions"].([]any)[0].(map[string]any)
				list := inner["instructions"].([]any)
				first := list[0].(map[string]any)
				indices := first["accounts"].([]any)
				inner["instructions"] = append(list, map[string]any{"programIdIndex": first["programIdIndex"], "stackHeight": 2,
					"accounts": []any{indices[2], indices[1], indices[3]}, "data": base58.Encode([]byte{27, 5, 1, 0, 0, 0, 0, 0, 0, 0, 6})})
			})}
		}}
	}, ErrVaultTouched},
}

// ofMint is a payment of another token.
func (w *world) ofMint(m settletest.Mint, amount settle.Amount) Claim {
	return w.claimOf(w.wallets(w.alice), m.TransferChecked(m.ATA(w.alice.Key), m.ATA(w.operator.Key), w.alice.Key, amount))
}

// nested has the vault's owner recover tokens of an associated account that another
// associated account of theirs owns: a transfer to the vault by an inner call.
func (w *world) nested() Claim {
	owner := w.other.ATA(w.operator.Key)
	w.mint.Fund(owner, price)
	return w.claimOf(w.wallets(w.operator, w.alice), settletest.RecoverNested(w.operator.Key, w.other.Key, w.mint.Key, w.mint.Program))
}

// lies are the cases of providers that are old, down, or not honest.
var lies = []verdict{
	{"34a", "balances without owners", func(w *world) ask {
		return w.patchedPayment(func(a map[string]any) { delete(w.entry(a, postList, w.vault()), "owner") })
	}, ErrUnverifiable},
	{"34b", "balances without programs", func(w *world) ask {
		return w.patchedPayment(func(a map[string]any) { delete(w.entry(a, preList, w.vault()), "programId") })
	}, ErrUnverifiable},
	{"34c", "balances of more than what was transferred", func(w *world) ask {
		c := w.claimOf(w.wallets(w.alice), w.transfer(w.alice, price/2))
		return ask{claim: c, faults: w.patches(c.Signature, func(a map[string]any) {
			setAmount(w.entry(a, preList, w.vault()), 0)
			setAmount(w.entry(a, postList, w.vault()), price)
			setAmount(w.entry(a, preList, w.mint.ATA(w.alice.Key)), price)
			setAmount(w.entry(a, postList, w.mint.ATA(w.alice.Key)), 0)
		})}
	}, ErrTraced},
	{"35a", "no balances", func(w *world) ask {
		return w.patchedPayment(func(a map[string]any) { metaOf(a)[preList] = nil })
	}, ErrUnverifiable},
	{"35b", "no inner calls", func(w *world) ask {
		return w.patchedPayment(func(a map[string]any) { metaOf(a)["innerInstructions"] = nil })
	}, ErrUnverifiable},
	{"35c", "no meta", func(w *world) ask { return w.patchedPayment(func(a map[string]any) { a["meta"] = nil }) }, ErrUnverifiable},
	{"35d", "balances of fewer accounts", func(w *world) ask {
		return w.patchedPayment(func(a map[string]any) { metaOf(a)["preBalances"] = metaOf(a)["preBalances"].([]any)[1:] })
	}, ErrMalformed},
	{"35e", "a balance of an account that is not there", func(w *world) ask {
		return w.patchedPayment(func(a map[string]any) { w.entry(a, postList, w.vault())["accountIndex"] = 99 })
	}, ErrMalformed},
	{"35f", "no time, with an end to hold", func(w *world) ask {
		a := w.patchedPayment(func(a map[string]any) { a["blockTime"] = nil })
		a.claim.NotAfter = time.Now().Unix() + 1<<20
		return a
	}, ErrUnverifiable},
	{"35g", "balances whose sum overflows", func(w *world) ask {
		second := w.mint.NewAccount("alice 35g", w.alice.Key, price)
		c := w.claimOf(w.wallets(w.alice), w.transfer(w.alice, price), w.mint.Transfer(second, w.vault(), w.alice.Key, price))
		return ask{claim: c, faults: w.patches(c.Signature, func(a map[string]any) {
			setAmount(w.entry(a, preList, second), 1<<64-1)
		})}
	}, ErrMalformed},
	{"35h", "balances without amounts", func(w *world) ask {
		return w.patchedPayment(func(a map[string]any) {
			delete(w.entry(a, preList, w.vault())["uiTokenAmount"].(map[string]any), "amount")
		})
	}, ErrUnverifiable},
	{"35i", "no word of success", func(w *world) ask { return w.patchedPayment(func(a map[string]any) { delete(metaOf(a), "err") }) }, ErrUnverifiable},
	{"35j", "no slot", func(w *world) ask { return w.patchedPayment(func(a map[string]any) { delete(a, "slot") }) }, ErrUnverifiable},
	{"36a", "the vault with another mint", func(w *world) ask {
		return w.patchedPayment(func(a map[string]any) { w.entry(a, postList, w.vault())["mint"] = w.other.Key })
	}, ErrVaultAccount},
	{"36b", "the vault with another owner before", func(w *world) ask {
		return w.patchedPayment(func(a map[string]any) { w.entry(a, preList, w.vault())["owner"] = w.eve.Key })
	}, ErrVaultAccount},
	{"36c", "the vault with another program", func(w *world) ask {
		return w.patchedPayment(func(a map[string]any) { w.entry(a, postList, w.vault())["programId"] = settletest.Token2022 })
	}, ErrVaultAccount},
	{"42a", "too many requests", func(w *world) ask {
		return w.troubled(settletest.Fault{HTTP: &settletest.HTTPFault{Status: 429, Body: "slow down"}})
	}, ErrProvider},
	{"42b", "a node that is behind", func(w *world) ask {
		return w.troubled(settletest.Fault{Error: &settletest.RPCFault{Code: codeBehind, Message: "Node is behind by 42 slots"}})
	}, ErrProvider},
	{"42c", "no answer in time", func(w *world) ask {
		a := w.troubled(settletest.Fault{Delay: 1500})
		a.slow = true
		return a
	}, ErrProvider},
	{"42d", "a connection that breaks", func(w *world) ask { return w.troubled(settletest.Fault{Drop: true}) }, ErrProvider},
	{"42e", "an answer that is a web page", func(w *world) ask {
		return w.troubled(settletest.Fault{HTTP: &settletest.HTTPFault{Status: 200, Body: "<html>127.0.0.1</html>"}})
	}, ErrProvider},
	{"42f", "an answer of another shape", func(w *world) ask { return w.troubled(settletest.Fault{Result: []byte(`[1]`)}) }, ErrProvider},
	{"42g", "one of two is down", func(w *world) ask {
		a := w.troubled(settletest.Fault{Path: "/b", Drop: true})
		a.providers = []string{"a", "b"}
		return a
	}, ErrProvider},
	{"42h", "one of two does not know it yet", func(w *world) ask {
		a := w.troubled(settletest.Fault{Path: "/b", Method: "getTransaction", Result: []byte("null")})
		a.providers = []string{"a", "b"}
		return a
	}, ErrNotYet},
	{"42i", "two providers that agree", func(w *world) ask { return ask{claim: w.paid(), providers: []string{"a", "b"}} }, nil},
	{"43a", "another transaction of Alice's", func(w *world) ask {
		other := w.paid()
		c := other
		c.Signature[9] ^= 1
		return ask{claim: c, faults: func(w *world) []settletest.Fault {
			f := w.patched(other.Signature, func(map[string]any) {})
			f.First = c.Signature.String()
			return []settletest.Fault{f}
		}}
	}, ErrSwapped},
	{"43b", "a transaction that nobody signed so", func(w *world) ask {
		c := w.claimOf(w.wallets(w.alice), w.transfer(w.alice, price/2))
		return ask{claim: c, faults: w.patches(c.Signature, func(a map[string]any) {
			setAmount(w.entry(a, preList, w.vault()), 0)
			setAmount(w.entry(a, postList, w.vault()), price)
			setAmount(w.entry(a, preList, w.mint.ATA(w.alice.Key)), price)
			setAmount(w.entry(a, postList, w.mint.ATA(w.alice.Key)), 0)
			a["transaction"] = changedAmount(a["transaction"].([]any), price/2, price)
		})}
	}, ErrForged},
	{"43c", "one of two lies about the slot", func(w *world) ask {
		return w.disputed(func(a map[string]any) { a["slot"] = a["slot"].(float64) + 1 })
	}, ErrDisagree},
	{"43g", "one of two lies about the time, to make it late", func(w *world) ask {
		a := w.disputed(func(a map[string]any) { a["blockTime"] = a["blockTime"].(float64) + 1<<20 })
		a.claim.NotAfter = time.Now().Unix() + 1<<19
		return a
	}, ErrDisagree},
	{"43h", "one of two says that it failed", func(w *world) ask {
		return w.disputed(func(a map[string]any) { metaOf(a)["err"] = "AccountInUse" })
	}, ErrDisagree},
	{"43i", "one of two shows other balances", func(w *world) ask {
		return w.disputed(func(a map[string]any) { setAmount(w.entry(a, postList, w.vault()), 1) })
	}, ErrDisagree},
	{"43j", "one of two hides an inner call", func(w *world) ask {
		c := w.claimOf(w.wallets(w.alice), settletest.Forward(w.forwarder, w.transfer(w.alice, price)))
		return w.second(c, func(a map[string]any) { metaOf(a)["innerInstructions"] = []any{} })
	}, ErrDisagree},
	{"43k", "one of two keeps no times", func(w *world) ask {
		a := w.disputed(func(a map[string]any) { a["blockTime"] = nil })
		a.claim.NotAfter = time.Now().Unix() + 1<<20
		return a
	}, nil},
	{"43d", "a transaction that is cut off", func(w *world) ask {
		return w.patchedPayment(func(a map[string]any) {
			raw := a["transaction"].([]any)[0].(string)
			a["transaction"] = []any{raw[:len(raw)/8*4], "base64"}
		})
	}, ErrMalformed},
	{"43e", "a transaction in another encoding", func(w *world) ask {
		return w.patchedPayment(func(a map[string]any) { a["transaction"].([]any)[1] = "base58" })
	}, ErrMalformed},
	{"43f", "keys that were looked up in no table", func(w *world) ask {
		return w.patchedPayment(func(a map[string]any) {
			metaOf(a)["loadedAddresses"] = map[string]any{"writable": []any{w.eve.Key}, "readonly": []any{}}
		})
	}, ErrMalformed},
}

func (w *world) patches(sig settle.Signature, change func(map[string]any)) func(*world) []settletest.Fault {
	return func(w *world) []settletest.Fault { return []settletest.Fault{w.patched(sig, change)} }
}

// patchedPayment is a good payment of which the provider says something else.
func (w *world) patchedPayment(change func(map[string]any)) ask {
	c := w.paid()
	return ask{claim: c, faults: w.patches(c.Signature, change)}
}

// disputed is a good payment of which the second provider says something else.
func (w *world) disputed(change func(map[string]any)) ask { return w.second(w.paid(), change) }

func (w *world) second(c Claim, change func(map[string]any)) ask {
	return ask{claim: c, providers: []string{"a", "b"}, faults: func(w *world) []settletest.Fault {
		f := w.patched(c.Signature, change)
		f.Path = "/b"
		return []settletest.Fault{f}
	}}
}

// troubled is a good payment of which the provider can say nothing.
func (w *world) troubled(f settletest.Fault) ask {
	return ask{claim: w.paid(), faults: func(*world) []settletest.Fault { return []settletest.Fault{f} }}
}

// changedAmount changes the amount of a transfer in a transaction, and no signature.
func changedAmount(field []any, from, to settle.Amount) []any {
	raw, err := base64.StdEncoding.DecodeString(field[0].(string))
	if err != nil {
		panic(err)
	}
	old := append([]byte{tokenTransferChecked}, little(from)...)
	raw = bytes.Replace(raw, old, append([]byte{tokenTransferChecked}, little(to)...), 1)
	return []any{base64.StdEncoding.EncodeToString(raw), "base64"}
}

func little(a settle.Amount) []byte { return binary.LittleEndian.AppendUint64(nil, uint64(a)) }
