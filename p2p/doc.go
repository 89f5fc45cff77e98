// Package p2p connects a node to its peers: identity, listeners, the hello gate,
// connections kept to configured peers, streams, framing, and the fast lane.
//
// It is not for deciding whom to ask for what: it reports which peers are ready and
// carries bytes. Discovery, gossip and relays will find more peers; they enter through
// [Host.Hello] like the configured ones.
//
// Invariants:
//   - Nothing but the hello works before both sides passed it: streams and lanes of a
//     peer that did not are refused, and so is opening one to it.
//   - A peer is ready while the connection over which it last passed the hello is open.
//     When that ends, so do all its streams and lanes.
//   - What a peer sends is bounded before memory is taken for it, and every read of the
//     hello and of a lane's preface has a deadline. The deadlines of data are the
//     business of whoever opened the stream.
//
// All methods of [Host] may be called concurrently. A [Conn] takes one reader and one
// writer at a time; Close and the deadlines may be called beside them. [FrameReader] and
// [FrameWriter] belong to one goroutine each.
package p2p
