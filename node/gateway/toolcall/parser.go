package toolcall

// Parser turns the text of one answer into events.
type Parser struct {
	out       []Event
	truncated bool
}

// New starts an answer. Without tools, and without NoCalls, what looks like a
// call is text.
func New(f Family, tools []Tool, opt Options) *Parser { return &Parser{} }

// Feed takes the next piece of the answer, cut anywhere.
func (p *Parser) Feed(text string) []Event { return []Event{{Kind: Text, Text: text}} }

// Close ends the answer and reports what was held back. An unfinished call gets
// no End.
func (p *Parser) Close() []Event { return nil }

// Truncated says, after Close, that the answer ended inside a call: the reason
// to finish is then "length", not "tool_calls".
func (p *Parser) Truncated() bool { return p.truncated }

// Detect finds the family of a model by its chat template.
func Detect(chatTemplate string) Family { return None }

// InReasoning says whether a rendered prompt ends inside a reasoning block.
func InReasoning(f Family, prompt string) bool { return false }

// Trigger lists the texts of which any begins a call; nil when the family has
// no marker for it.
func Trigger(f Family) []string { return nil }

// RuleFunc writes the GBNF rule named root, and those under it, all of whose
// names begin with root, for JSON texts that a schema allows (nil: any value).
type RuleFunc func(root string, schema []byte) (string, error)

// Grammar writes GBNF, start rule "root", for one call, or with parallel one or
// more, of the tools, after reasoning where the family reasons. For a named
// choice pass that tool alone.
func Grammar(f Family, tools []Tool, parallel bool, opt Options, rule RuleFunc) (string, error) {
	return "", nil
}

// AnswerGrammar writes a rule "root": reasoning where the family reasons, then
// the rule named answer, which the caller adds.
func AnswerGrammar(f Family, opt Options, answer string) string { return "" }

// HistoryID rewrites the id of a call for the template of a family. index is
// the call's place in the whole conversation, from 0.
func HistoryID(f Family, id, name string, index int) string { return id }
