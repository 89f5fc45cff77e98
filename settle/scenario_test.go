package settle

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
)

var rewrite = flag.Bool("rewrite", false, "write the golden scenarios anew")

// Each file of testdata is a play: commands, and under each what it did. A number that
// changes there is money that moves.
func TestScenarios(t *testing.T) {
	files, err := filepath.Glob("testdata/*.txt")
	if err != nil || len(files) < 4 {
		t.Fatal(files, err)
	}
	for _, file := range files {
		t.Run(filepath.Base(file), func(t *testing.T) {
			b, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			got := play(t, string(b))
			if *rewrite {
				if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
			} else if got != string(b) {
				t.Errorf("%s plays as\n%s\n(-rewrite writes it anew)", file, got)
			}
		})
	}
}

// play runs the commands of a script, which are its lines that begin with "> ", and gives
// the script with what they do. Comments begin with "#".
func play(t *testing.T, script string) string {
	w := newWorld(t)
	var s strings.Builder
	for _, line := range strings.Split(script, "\n") {
		if strings.HasPrefix(line, "#") {
			fmt.Fprintln(&s, line)
		}
		command, ok := strings.CutPrefix(line, "> ")
		if !ok {
			continue
		}
		out, err := w.do(strings.Fields(command))
		if err != nil {
			out = "refused: " + err.Error() + "\n"
		}
		for k, name := range w.names {
			out = strings.ReplaceAll(out, k.String(), name)
		}
		fmt.Fprintf(&s, "> %s\n%s", command, out)
	}
	w.check()
	return s.String()
}

// number is the argument NAME=N.
func number(args []string, name string) uint64 {
	for _, a := range args {
		if v, ok := strings.CutPrefix(a, name+"="); ok {
			n, err := strconv.ParseUint(v, 10, 64)
			if err == nil {
				return n
			}
		}
	}
	return 0
}

func has(args []string, word string) bool {
	for _, a := range args {
		if a == word {
			return true
		}
	}
	return false
}

func (w *world) do(c []string) (string, error) {
	args, amount := c[2:], Amount(number(c, "amount"))
	switch c[0] {
	case "set":
		f, err := FieldByName(c[1])
		if err != nil {
			return "", err
		}
		f.Set(&w.p, number(args, "to"))
		return "", w.p.Validate(false)
	case "fund":
		w.reserve = NewReserve(amount)
		return w.move(ActFund, Transfer{Account{Kind: Inflow}, Account{Kind: Emission}, amount})
	case "wait":
		w.now += number(args, "hours") * Hour
		w.slot += number(args, "hours") * 9000
		return "", nil
	case "deposit":
		return w.move(ActDeposit, Transfer{Account{Kind: Inflow}, Account{Balance, w.key(c[1])}, amount})
	case "quote":
		return w.quote(c[1], number(args, "prompt"), number(args, "answer"))
	case "pay":
		return w.pay(c[1], args[0], amount)
	case "debit":
		return w.debit(c[1], args[0])
	case "settle":
		work := map[string]uint64{}
		for _, node := range []string{"a", "b"} {
			if n := number(args, node); n > 0 {
				work[node] = n
			}
		}
		return w.settle(c[1], number(args, "tokens"), work, has(args, "counted"), has(args, "failed"), number(args, "late"))
	}
	return w.doNode(c, args, amount)
}

func (w *world) doNode(c, args []string, amount Amount) (string, error) {
	switch c[0] {
	case "stake":
		return w.stake(c[1], amount)
	case "vest":
		return w.vest(c[1])
	case "unbond":
		return w.unbond(c[1], amount)
	case "unbonded":
		return w.unbonded(c[1])
	case "slash":
		return w.slash(c[1], args[0], args[1])
	case "claim":
		return w.claim(c[1], args[0], amount)
	case "claims":
		return w.poolEpoch()
	case "payout":
		return w.payout(c[1], amount, !has(args, "fails"))
	case "balances":
		var s strings.Builder
		for _, a := range w.ledger.Accounts() {
			fmt.Fprintf(&s, "  %-28s %d\n", w.account(a.Account), a.Amount)
		}
		return s.String(), nil
	}
	w.t.Fatalf("no command %q", c[0])
	return "", nil
}
