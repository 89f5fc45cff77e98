// Package govern changes the economic parameters of a network: by signatures of the wallets that
// the genesis names, and a code of an authenticator (TOTP), and by nothing else.
//
// A Proposal names every parameter with its old and its new value. Its Text is what a wallet shows
// and signs; the verifier writes the text again from the proposal and compares, and never reads
// what was signed. A Governor takes a proposal when it is the next in sequence, of the values in
// force, within the bounds of each parameter and of the whole set after the change, signed by
// enough wallets, and carries a code of a later step than the last one taken. It holds from the
// epoch that it names, the next one at the earliest.
//
// What was taken, and every wrong code, is a record in a Store, appended before the answer: a
// Governor that is opened again stands where it stood. Others who hold the accepted records, and
// not the secret of the authenticator, compute the same parameters by Replay.
//
// Invariants. Sequence numbers rise by one. The epochs of changes never fall. The accepted step of
// the authenticator rises strictly, over restarts too. A wrong code counts only after the
// signatures were found good, so that nobody else can lock the operator out.
//
// A Governor is safe for concurrent use. The package has no clock: times are arguments.
package govern
