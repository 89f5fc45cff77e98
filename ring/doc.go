// Package ring runs one model over a chain of stages, each of which holds a window of its
// layers: a Stage on every machine of the chain, an Entry where requests come in, and the
// protocol /kvasir/<net>/ring/1 between them.
//
// It is not for choosing the chain (package ring/plan), not for finding peers, not for text,
// and it computes nothing itself: a stage's part of the model is a Compute.
//
// A request is a session. The entry opens it with the first stage, each stage opens it with the
// next one, and the last one with the first: the ring is closed. Tokens go in, hidden rows go
// from stage to stage, the last stage draws the token and sends it round to the first, which
// tells the entry and goes on. So a stage has two links only, which all sessions share that
// take the same way.
//
// A stage that is lost is replaced without the client noticing: every stage keeps the rows that
// it sent, the entry keeps the tokens. Whoever misses its successor says so back along the
// links; the entry asks for another chain and opens the session again with a higher epoch.
// Stages that are in both chains go on where they are, the new one is refilled from what its
// predecessor kept.
//
// Invariants:
//   - Of a session a stage has the rows of positions [0, have), without gaps, in its memory or
//     in its queue. Rows begin at p <= have; then those at p and beyond are dropped first.
//   - The token of a position depends on the logits, the answer before it, the seed and the
//     position, so that drawing it again gives the same token. Drafted tokens are only ever
//     compared with drawn ones: an answer has none that was not drawn.
//   - What a session may take is reserved when it is opened: a sequence, the rows kept, the rows
//     that wait. An OPEN that does not fit is refused, and so is every frame beyond it.
//   - What a peer sends is bounded before memory is taken for it, and a peer that does not
//     read is disconnected.
//   - A frozen neighbour is known after DeadAfter. A session whose predecessor is gone is freed
//     after Grace, one whose entry is gone, or that is closed, at once on all stages.
//
// Concurrency: Stage, Entry and Session are safe for concurrent use. A stage has one loop, which
// alone calls its Compute, one reader and one writer goroutine for each link, and one that
// keeps time. Nothing waits for a peer with the stage's lock held.
package ring
