// Package draft guesses the next tokens of a sequence, and says how many guesses are worth their
// time: somebody else computes them together with the next token, and keeps those that are right.
// It is for a stage of a ring (Drafter, one sequence) and for an engine (LookUp, Costs, Share:
// several sequences in one batch, and guesses that cost a pass each). It is not for computing or
// comparing tokens.
//
// What pays is measured: what a round takes, by its rows, and which share of the guesses is right.
//
// Invariants: guesses <= Most; none before a round was measured; none where they bring less than
// worthwhile times the tokens per time of none.
//
// Everything is pure: no clock, no randomness. Nothing is safe for concurrent use.
package draft

// Most bounds the tokens that are drafted at a time.
const Most = 16

// Spare is how many guesses a request can still afford where who computes is paid for its tokens
// and not for guesses: wrong ones stay within a quarter of its tokens, so that nobody computes
// much for nothing, or takes its entry for one who does not pay.
func Spare(tokens, wrong int) int { return max(tokens/4-wrong, 0) }
