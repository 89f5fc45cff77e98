// Package carry takes a generation to another node that answers for the model: the client's side
// on an entry that has no weights, the server's on a node that has an engine. What travels is token
// ids and sampling settings; text, templates and stop strings stay with the entry. What a server
// answers from, and who may ask, it is told; how a server is found and reached, likewise the client.
//
// A request is tried on a second server when the first fails before its first token, never after.
// Which one is tried is predicted from the way there, what a token takes there, and how many are
// there already (see Choose). A server never carries on what it was asked.
//
// Invariants: a server has at most Window tokens under way that the client did not read; it serves
// at most MaxPeer requests of one peer and MaxAll in all; what a peer sends is bounded before it
// takes memory, and every read and write has a deadline.
//
// Concurrency: Server and Client are safe for concurrent use, an Answer is read by one goroutine.
// A request lives in the goroutine that serves it, and on the client in one that ends with the
// request's context.
package carry
