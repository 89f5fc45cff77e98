// Package verify measures how far the backends of machines lie from each other and from
// plain Go, operation by operation and through a whole model, and says in words whether
// that is within the table of package tolerance.
//
// A process holds one CPU variant, so every backend computes in a child of its own, one
// after the other; the parent compares. A child is started by the caller (Config.Child),
// reads one task, and writes what it computed; a child that dies costs the report that
// backend, which is then said to be unusable.
//
// It measures and judges nobody: audits are elsewhere.
package verify
