// Package audit judges who is wrong when the same rows were computed by several who hold an expert,
// and how a worker stands after that: the decisions of audits, without clock, network or chance of
// their own. It does not choose what is audited, nor asks anybody: package experts does that.
//
// An audited call was answered before anybody knew that it would be audited. Its row is computed
// again, by the own copy of who asked or by another replica, in a call like all others, and compared
// within what the two backends may differ by. Where they differ a third one says who is wrong.
//
// Invariants:
//   - The own copy is right. Nobody else is believed alone: without an own copy a worker is blamed
//     only against two who agree with each other.
//   - Beyond the band but within SlashFactor bands is drift, a matter of rounding: it makes a worker
//     unfit for a while, and costs nothing. Only what is beyond that is wrong work.
//   - A score only falls by time, so that one who is out comes back, later each time he is found
//     again soon.
//   - A signed Record has one encoding, and says nothing of the rows but their hash: they are what
//     became of somebody's text.
//
// Two replicas that compute wrongly in the same way, and know of each other which rows they were
// sent, pass as one honest pair. What bounds that is the choice of the second by chance, and an own
// copy.
//
// Concurrency: everything is a value; the caller guards it.
package audit
