// Package node is the composition: it reads the configuration, opens the data
// folder, wires the packages below it into the roles of a daemon, and starts
// and stops them in order. It holds no loop over peers and no arithmetic on
// price or layers: those live in the packages that it wires.
//
// Start goes from the ground up, stop goes the other way under a deadline. What
// a caller opens it closes; a Close may be called twice.
package node
