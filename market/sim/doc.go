// Package sim runs a market of agents over the real rules of price, fee, emission and insurance,
// hour by hour, years in seconds: to see what a change of the rules does before it is made.
//
// The agents are a toy, in floats: consumers who buy less when it is dearer, volunteers with costs
// of their own who come late and leave, people who are both, mercenaries who come for an emission,
// and wash traders who buy from themselves. Read signs, orders of magnitude and thresholds, not
// forecasts. The rules are not a toy: they are those of market and settle, in integers, and a
// Mutation says which of them a scenario does without, to show what it is there for.
//
// Units: a capacity of 1 is what serves in balance, 1,000 tokens per second; a price of 1 is the
// price in balance, one fiat unit for 10⁶ tokens. The package has no clock and no randomness: a
// scenario gives the same result every time. Nothing in it is safe for concurrent use.
package sim
