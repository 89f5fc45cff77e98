// Package pay is the paying door of an entry node: it takes the money for answers
// through the network's settlement, before anything of them is computed, and reports
// afterwards what was delivered and who did it.
//
// A request is paid in one of three ways, tried in this order:
//
//   - PAYMENT-SIGNATURE, as x402 version 2 has it: a transaction that its payer signed.
//   - X-Kvasir-Quote, X-Kvasir-Payment and X-Kvasir-Secret: a transfer that was sent.
//     X-Kvasir-Payer names the wallet, unless the quote does.
//   - nothing: the wallet that this node is linked to, if it lets the node spend.
//
// Else it is answered 402 with a quote: in the PAYMENT-REQUIRED header, and under
// "payment" in the body with the claim secret, for a transfer of one's own.
//
// A quote is for one body, byte for byte. The same call again while it runs is a 503
// with Retry-After, another body a 409, and so is a call that was answered: answers are
// not kept.
//
// Invariants: nothing is computed before the settlement says that it is paid and runs;
// what is reported is never more than what was quoted; what was not delivered goes back
// to the payer's balance.
//
// The package holds no money and asks no chain. A Door is safe for concurrent use.
package pay
