// Package settle is the money of a network with a token: amounts, quotes, deposits,
// receipts, epochs, and the rules by which a balance changes. It is pure: integers
// only, no clock, no disk, no network, and nothing of ours imported, so that an
// auditor reads it alone.
//
// The rule that never breaks: credit only what the chain proves, never what a client
// says. Value is never created: what a payer pays rounds up, what anyone receives
// rounds down, and the rest is named and goes to the insurance pool.
package settle
