// Package plan decides how a model is spread over nodes, before anything is
// loaded or sent.
//
// Chain picks the stages of a ring for one request out of the windows that nodes
// hold now. Plan compares the ways in which given nodes could run a model: alone,
// as a ring, as a backbone with expert workers, as a ring of backbones; it says
// where every byte goes, how fast each is expected to be and by what it is limited.
//
// It is pure: no clock, no network, no randomness. What was measured comes in
// through the query, so that the same query gives the same plan, whatever the
// order of its lists. It knows nothing of addresses, prices or trust.
package plan
