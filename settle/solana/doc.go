// Package solana says what the chain proves: that a transaction pays the vault, who
// paid, how much, and for which quote; and it builds, sends and resolves payouts. It
// keeps nothing: which signature has been used is the ledger's to know.
//
// A payment is believed when every provider that is asked shows the same finalized
// transaction and it passes all rules of rules.go. They rest on four things: the
// signatures over the bytes, which are verified here; the balances before and after;
// the trace of all calls, inner ones too; and one memo that names the quote and that
// the payer signed. Balances alone do not say who paid, the trace alone not how much
// arrived.
//
// Refusals are of three classes. ErrInvalid is final: this transaction does not pay
// this claim. ErrNotYet and ErrUnknown are not: ask again. A node that is down, slow,
// behind or lying never makes a payment invalid. No error carries a provider's URL,
// which often holds a key.
//
// A Client may be used by several goroutines.
package solana
