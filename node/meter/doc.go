// Package meter counts who did what of a request, in a network with a token: for the
// node that answers it (Pool, Meter), and for those that compute for others (Counts,
// Signer). It is not for prices, for receipts, or for deciding who is paid: package settle
// does that, from the lesser of what an entry and a worker say.
//
// Units are those of settle.Line: rows of a dense part, (row, expert) pairs of an expert
// part. Requests are computed together, so that no unit belongs to one of them. What was
// accepted for this node goes into a pool, and a request that ends draws out of it what its
// tokens need of each part, from every worker in proportion to what it has there. A worker
// keeps what it computed for each peer, and signs no more than that, and no unit twice.
//
// What a peer carried, which is answered with the whole model for an entry that lacks it, is in
// the entry's pool apart. When such a request ends the entry asks the peer who did its units: the
// peer draws them out of its own pool, asks its workers for statements about the request, and
// answers with theirs and its own. An entry takes no more units than it asked about; else, or
// without an answer, the peer alone is paid. A peer that names others than those who did it can
// take from its own workers, as any entry can, and from nobody else.
//
// Nothing is computed for a peer beyond what it showed to be paid (Grants): an entry shows the passes
// of its requests to those who compute, and a node that they are lent to shows them to its own
// workers. What passes credited is asked for later, and an entry's passes that credit less than half
// of what was computed by them are not believed for a while, from who showed them.
//
// Invariants:
//   - a draw of T tokens takes at most T · PerToken units of a part, from all together,
//     and at most what a worker has in the pool;
//   - Σ units signed or divided for a peer <= Σ units computed for it, whatever it asks;
//   - a division that is asked for again is the same, as long as it is kept;
//   - of one request a worker signs records of which each covers those before it, also
//     after it was started again, so that it never says two things;
//   - by a pass at most 1.5 times its tokens are computed, however many show it;
//   - pools, counts and passes are bounded, whatever drafts, canaries, failed answers, and carried ones
//     that no entry asks about leave.
//
// Not counted are hedged losers, failed calls, retries, and canaries of workers. Nobody
// computes the last token of an answer, nor the last layer's experts for the tokens of a
// prompt but its last: with rounding that is the rest of a request, unless drafts that were
// not accepted make up for it. A stage is counted whole rows of its window.
//
// Concurrency: everything is safe for concurrent use. Counting holds one lock for some
// additions and waits for nobody. Passes are shown in the background, until Meter.Close.
package meter
