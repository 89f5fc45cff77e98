// Package experts lets a backbone have its experts computed by other machines: a Dispatcher
// on its side, a Worker on theirs, and the protocol /kvasir/<net>/experts/1 between them.
//
// It is not for routing (the backbone picks the experts), not for combining their outputs
// (the backbone does, but for sums, see below), not for finding peers, and it knows nothing of what an
// expert program says.
//
// Invariants:
//   - Every row of an answer was computed by an expert that its pair names. There is no
//     masked, zeroed or stale row: what nobody can compute is a *MissingError. Only a call that
//     says that it is a draft gets zeros for what is not here (draft.go).
//   - Calls are pure, so a call that failed on one replica is repeated on another, and one that is
//     late is asked of a second one too: at most a tenth of the calls (hedge.go).
//   - What a worker offers is given calls only once a canary row of it came back, and is the one
//     that the backbone's own copy or most other workers compute (canary.go).
//   - What the backbone has itself may change while calls run (local.go): a Cache keeps what its
//     router really chooses there (cache.go).
//   - What a worker offers may change. It refuses nothing that was sent before the dispatcher
//     knew of the change, and its kernel is asked for nothing that it was told to drop.
//   - Of replicas that are about as near and fast each gets a share of the calls. While a seed is
//     set, the seed says which one of the soonest is asked first (draw.go).
//   - Rows are exact (f32) unless Config.Precision says otherwise and the worker offers that. An
//     answer has a row for each pair, or, where bytes take long, the weighted sum of a token's rows,
//     which is exact when all of them are in it; others are made where rows need not be exact
//     either (sums.go).
//   - What a peer sends is bounded before memory is taken for it: frames by MaxFrame, calls by
//     the limits that the worker offers, the queue by its calls and bytes.
//   - A worker keeps a program as long as a session uses it, and few of one peer, so that no
//     peer's programs keep out those of others.
//   - A peer that missed a deadline or answered wrongly is suspect and gets no calls until it
//     answered a heartbeat, later each time that happens in a row. One that was outrun by its
//     hedge, or is leaving, gets only what nobody else computes.
//   - Nothing on the path of a call waits for a peer without a deadline, and no peer can make
//     another one's call wait: a frame that might not fit the socket is left to the writer
//     goroutine of its session.
//
// Memory: Compute is done with Call.Rows and Call.Out when it returns, whatever it returns.
// In the steady state neither side allocates per call.
//
// Concurrency: Dispatcher and Worker are safe for concurrent use. A Worker gives its Kernel
// one call at a time and computes what waits for the same program together. A session has one
// reader goroutine and one writer goroutine on each side, and one that tries what is offered on
// the dispatcher's; on the fast path neither is woken:
// the worker's reader computes a small call itself and writes the answer, Compute writes its
// frames and reads the answers itself (turns.go).
package experts
