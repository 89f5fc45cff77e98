// Package fetch moves verified byte ranges of model files between peers, protocol
// [Protocol]: a [Server] gives what a [Library] holds, a [Client] fills a [Sink] from many
// sources at once.
//
// It is not for deciding what to download or from whom, and it stores and verifies
// nothing itself: the sink does both, against the roots of the model's files. So fetch
// knows no model format, and a source is never trusted.
//
// Invariants:
//   - What a source sends reaches the sink as [Sink.SetTree] and [Sink.WriteGroups] only,
//     and counts as received once these accept it.
//   - A source is left for the rest of a fetch when it is wrong, and for a while when it is
//     slow or gone. What was asked of it is asked of others.
//   - A source holds at most two ranges of [MaxRange] bytes of the fetcher's memory, a
//     session at most one piece of the server's.
//   - Every read and write has a deadline, and what a peer sends is bounded before memory is
//     taken for it.
//
// All methods of [Server] and [Client] may be called concurrently.
package fetch
