// Package grammar turns a JSON schema into GBNF, the grammar that llama.cpp's
// sampler enforces.
//
// Every text that a grammar of FromSchema accepts is JSON and validates against
// the schema. What cannot be enforced is refused, naming the keyword, or, when
// Lenient, left out and reported. Some valid texts are not accepted: properties
// come in the order of the schema, white space is bounded, numbers are of
// bounded length.
//
// llama.cpp ends the process on a grammar that has no way on, and takes
// exponential time for some others. So every rule of a grammar from here is
// productive, none is left-recursive, and rules, repetitions and nesting are
// bounded.
//
// The package is pure and safe for concurrent use.
package grammar

import "fmt"

// Options of FromSchema.
type Options struct {
	// Root names the start rule, "root" when empty. All names of rules begin
	// with it, so that grammars with different roots can be joined.
	Root string
	// Lenient leaves out constraints that cannot be enforced.
	Lenient bool
	// Dropped is called for each constraint left out. It may be nil.
	Dropped func(*UnsupportedError)
}

// UnsupportedError says what of a schema cannot be enforced.
type UnsupportedError struct {
	Keyword string // "pattern"; "" when the schema as a whole is meant
	Path    string // JSON pointer of the schema that holds it, "" for the root
	Reason  string
}

func (e *UnsupportedError) Error() string {
	at := e.Path
	if at == "" {
		at = "/"
	}
	if e.Keyword == "" {
		return fmt.Sprintf("schema at %s: %s", at, e.Reason)
	}
	return fmt.Sprintf("schema at %s: %s is not supported: %s", at, e.Keyword, e.Reason)
}
