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
// Invariants:
//   - a draw of T tokens takes at most T · PerToken units of a part, from all together,
//     and at most what a worker has in the pool;
//   - Σ units signed for a peer <= Σ units computed for it, whatever it asks;
//   - of one request a worker signs records of which each covers those before it, also
//     after it was started again, so that it never says two things;
//   - pools and counts are bounded, whatever drafts, canaries and failed answers leave.
//
// Not counted are hedged losers, failed calls, retries, and canaries of workers. Nobody
// computes the last token of an answer, nor the last layer's experts for the tokens of a
// prompt but its last: with rounding that is the rest of a request, unless drafts that were
// not accepted make up for it. A stage is counted whole rows of its window.
//
// Concurrency: everything is safe for concurrent use. Counting holds one lock for some
// additions and waits for nobody.
package meter
