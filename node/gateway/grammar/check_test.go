package grammar

import (
	"fmt"
	"os"
	"strings"
	"testing"
)

// TestCheckRefuses has one grammar for every reason to refuse.
func TestCheckRefuses(t *testing.T) {
	chain := &strings.Builder{}
	chain.WriteString("root ::= \"a\" r0\n")
	for i := range maxAllRules {
		fmt.Fprintf(chain, "r%d ::= \"a\" r%d\n", i, i+1)
	}
	fmt.Fprintf(chain, "r%d ::= \"a\"\n", maxAllRules)
	wide := "root ::= a a a a\na ::= " + strings.TrimSuffix(strings.Repeat(`"x" | `, maxLeftmost), "| ")
	for _, tt := range []struct{ name, gbnf, want string }{
		{"long", strings.Repeat(" ", MaxText+1), "at most"},
		{"no text", "root ::= \"\xff\"", "of text"},
		{"zero byte", "root ::= \"a\x00\"", "of text"},
		{"no rule", "root", "no ::="},
		{"no name", `::= "a"`, `unexpected "::=`},
		{"two rules", "root ::= \"a\"\nroot ::= \"b\"", "a second rule root"},
		{"comment behind a rule", "root ::= \"a\" # b", `unexpected "# b"`},
		{"token", "root ::= <[1]>", `unexpected "<[1]>"`},
		{"any character", "root ::= .", `unexpected "."`},
		{"open group", `root ::= ("a"`, "no ) behind"},
		{"closed group", `root ::= "a")`, "does not end with its line"},
		{"group of two lines", "root ::= (\"a\"\n)", "no ) behind"},
		{"deep groups", "root ::= " + strings.Repeat("(", maxGroups+1), "groups in each other"},
		{"open text", `root ::= "a`, "does not end"},
		{"text of two lines", "root ::= \"a\n\"", "does not end"},
		{"open set", `root ::= [a`, "does not end"},
		{"open range", `root ::= [a-]`, "- at its end"},
		{"empty set", `root ::= []`, "no characters"},
		{"empty rest", `root ::= [^]`, "no characters"},
		{"range from the end", `root ::= [z-a]`, `from 'z' to 'a'`},
		{"backslash", `root ::= "\`, "nothing behind"},
		{"escape", `root ::= "\q"`, "unknown character"},
		{"short escape", `root ::= "\u12`, "unknown character"},
		{"no digits", `root ::= "\x+1"`, `the number "+1"`},
		{"no character", `root ::= "\U00110000"`, "no character has"},
		{"open bounds", `root ::= "a"{1`, "no } behind"},
		{"long bounds", `root ::= "a"{1,` + strings.Repeat("0", 99) + "}", "no } behind"},
		{"no bounds", `root ::= "a"{}`, `"" times`},
		{"large bound", `root ::= "a"{2001}`, `"2001" times`},
		{"large upper bound", `root ::= "a"{1,9999}`, `"9999" times`},
		{"bounds from the end", `root ::= "a"{2,1}`, "2 to 1 times"},
		{"repeated twice", `root ::= "a"*?`, "a repetition of a repetition"},
		{"repetition of nothing", `root ::= *`, `unexpected "*"`},
		{"gigabytes", `root ::= "` + strings.Repeat("a", 1000) + `"{2000}`, "elements"},
		{"many rules", chain.String(), "rules"},
		{"no root", `a ::= "a"`, "no rule root"},
		{"missing rule", `root ::= a`, "no rule a"},
		{"endless", `root ::= "a" root`, "nothing matches the rule root"},
		{"endless part", "root ::= \"a\" | b\nb ::= \"b\" b", "nothing matches the rule b"},
		{"left recursion", "root ::= root \"a\" | \"b\"", "refers to itself"},
		{"left recursion behind nothing", "root ::= e root \"a\" | \"b\"\ne ::= f\nf ::= \"\"", "refers to itself"},
		{"repeated nothing", `root ::= ("a"?)*`, "may be empty"},
		{"many ways", wide, "alternatives at one place"},
	} {
		if err := Check(tt.gbnf); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v, want %q", tt.name, err, tt.want)
		}
	}
}

// TestCheckTakes: what this package writes, it takes.
func TestCheckTakes(t *testing.T) {
	file, err := os.ReadFile("testdata/schemas.jsonl")
	if err != nil {
		t.Fatal(err)
	}
	taken := 0
	for line := range strings.Lines(string(file)) {
		gbnf, err := FromSchema([]byte(line), Options{})
		if err != nil {
			continue
		}
		taken++
		if err := Check(gbnf); err != nil {
			t.Errorf("%s: %v", line, err)
		}
	}
	if taken < 100 {
		t.Errorf("%d grammars", taken)
	}
	for _, gbnf := range []string{"", AnyJSON(), "# a comment\n\n # two\nroot ::= \"a-]\\x41\\u00e9\\U0001f600\\n\" | [^\\]\\-a-z0]{2,} ( \"a\" | ) b?  \n b ::= [x]+\n#"} {
		if err := Check(gbnf); err != nil {
			t.Errorf("%s: %v", gbnf, err)
		}
	}
}

func FuzzCheck(f *testing.F) {
	f.Add(AnyJSON())
	f.Add("root ::= \"a\" (b | [^a-z]{2,3})*\nb ::= \"\\x41\"")
	f.Add("root ::= a\na ::= a | \"\"")
	f.Fuzz(func(t *testing.T, gbnf string) {
		if gbnf != "" && Check(gbnf) == nil && Check(gbnf+"\n") != nil {
			t.Errorf("%q is taken, with a line feed it is not", gbnf)
		}
	})
}
