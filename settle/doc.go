// Package settle is the money of a network with a token: amounts, quotes, deposits,
// receipts, epochs, and the rules by which a balance changes. It is pure: integers
// only, no clock, no disk, no network, and nothing of ours imported, so that an
// auditor reads it alone. It does not ask the chain, keep records, or authorise callers.
//
// The rule that never breaks: credit only what the chain proves, never what a client
// says. Value is never created: what a payer pays rounds up, what anyone receives
// rounds down, and the rest is named and goes to the insurance pool.
//
// What holds after every step:
//   - balances + paid out = what came in, and none is negative (Ledger.Verify);
//   - an entry happens once under its key, a message of the chain comes in once whatever
//     for, and a payout ends once (Post);
//   - refund + pay + dust + insurance + burn + treasury = the escrow (Params.Split);
//   - emission + claims < fee · (1 − treasury): who pays itself loses (Params.Validate);
//   - a record has one encoding, and is signed under the domain of its kind (ParseReport,
//     DecodeEntry).
//
// Records are values: a step returns the next one and leaves the old as it was, so they
// can be shared. Only Ledger changes, and it is not safe for concurrent use.
package settle
