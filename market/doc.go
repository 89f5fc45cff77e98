// Package market is how nodes, without a hub, come to hold what is scarce: announcements of
// who holds what, the coverage that every node computes from them, and the decisions of a
// volunteer.
//
// It is pure. It knows no network, disk, clock or goroutine: records come in as bytes that
// somebody else has verified to be signed by their author, and time and identities come in as
// arguments. So the same inputs give the same coverage and the same decisions on every node, and
// a thousand nodes can be simulated in one test.
//
// The parts, bottom up: an Announcement is what one node says of itself; a Table keeps the
// latest of each author and answers with Coverage; Assign finds the scarcest range for a budget;
// a Volunteer decides for one node what to claim, load, serve and give up; a Pace says when to
// announce. For rings, windows of layers take the place of slices: the Table answers with Windows,
// WindowCoverage and round trips, Tiled says whether windows make a chain, and a Stager decides
// which window of one model a node holds.
//
// Prices: PriceRules is the thermostat of a model's price, in integers; a Usage collects the Load
// that moves it: only work whose node the hash of a payment drew, and only capacity that was shown;
// a PriceRecord is the signed news of one epoch, and a PriceChain computes each again before it
// believes it. A Price is in fiat units, and a governed Reference converts it: a band fixed in the
// token would die with a crash of the token. Rewards are settle's.
//
// Words: a cell is one expert of one layer. A replica of a cell is an author that serves it and
// is not leaving. The target of a cell is how many replicas the network wants; its scarcity is
// max(0, 1 - replicas/target).
//
// Invariants. What an author says counts once, however often it restarts. Only the author's own
// newer record, or direct contact with it, brings back an author that was lost. A volunteer never
// holds more bytes than its budget, half-done downloads and not yet deleted ones included, and
// never gives up the last replica of a cell unless its budget shrinks below it. A stager holds one
// window, never more than its budget, and does not by choice break the last complete chain. No
// price is a trap: from every price of the band, a full market raises it and an idle one lowers
// it. Floor ≤ price ≤ ceiling, but while the band moves, which it follows by a step per epoch.
//
// A Table is safe for concurrent use; everything else is not, unless it says so.
package market
