// Package p2p connects a node to its peers: identity, listeners, the ways to find peers and
// to be reached by them, the hello gate, connections, streams, framing, the fast lane, and
// what nodes say of themselves to all others.
//
// It is not for deciding whom to ask for what: it reports which peers are ready and
// carries bytes.
//
// How peers meet. A host keeps connected to those of its configuration for ever. It meets
// others by multicast on the local network, by the DHT of its network, in which members are
// found under [MemberKey], and by its memory of good peers; all end in [Host.Hello]. A node
// that nobody can connect to has relays take it in, of the configuration or of those found
// under [RelayKey], and peers reach it through them. Beside such a connection both sides
// try to make a direct one, by dialling each other and by punching holes into NATs. When
// they have it the peer is reported ready again, with the new address: streams and lanes
// opened from then on go there, and the relayed connection is closed when its last stream
// is. [Host.Report] says in words how far all that went.
//
// What would hold up other data, as weights do, goes by [Host.OpenBulk]: a connection of its
// own also where the peer is behind a relay or a hole in a NAT.
//
// Who may come in. A [Genesis] is the network: its id, made of everything that all must
// agree on, and who is admitted. The hello shows the ticket that the network's authority
// signed; from it follow the [Rights] that this node grants the peer, for as long as the
// ticket is good. What was revoked reaches every node from any: see [Host.Revoke].
//
// What nodes say to all. A [Topic] carries [Envelope]s, signed by their author, to every
// node that joined it: only the newest of an author counts, until its time is over, and
// nobody can bring an old one back. Who is not reached by gossip pulls.
//
// Who misbehaves. [Host.Blame] lowers a peer's [Standing]; below a bound it is cut off for
// a time. A ready peer that says nothing for six seconds is lost.
//
// Invariants:
//   - Nothing but the hello works before both sides passed it: streams and lanes of a
//     peer that did not are refused, and so is opening one to it. That holds for the DHT,
//     gossip and the relay too.
//   - Whoever made a connection — the DHT, a relay, a hole punched — the side that dialled
//     says hello over it at once. A connection over which it does not pass in time is closed.
//   - A peer is ready while a connection over which it passed the hello is open. When the
//     last one ends, so do all its streams and lanes.
//   - No connection is made before the listeners are up: one from another port than theirs
//     would show a wrong address to others.
//   - What a peer sends is bounded before memory is taken for it, and every read of the
//     hello and of a lane's preface has a deadline. The deadlines of data are the
//     business of whoever opened the stream.
//
// All methods of [Host] may be called concurrently. A [Conn] takes one reader and one
// writer at a time; Close and the deadlines may be called beside them. [FrameReader] and
// [FrameWriter] belong to one goroutine each.
package p2p
