package main

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"math/big"
	"os"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"kvasird/node/api"
)

// maxBody bounds the request that is quoted, in bytes.
const maxBody = 64 << 20

// quote asks for a price, and for one that can be paid when the request is given.
func quote(ctx context.Context, c console, f *flags) error {
	f.daemonFlags()
	prompt := f.Uint64("prompt-tokens", 1000, "`number` of tokens of the prompt, at most")
	answer := f.Uint64("answer-tokens", 1000, "`number` of tokens of the answer, at most")
	body := f.String("body", "", "`file` with the body of the HTTP request: the quote is for it and can be paid")
	owner := f.String("owner", "", "`wallet` that has to pay (default: whoever pays)")
	asJSON := f.Bool("json", false, "print it as JSON")
	rest, err := f.parse(c)
	if err != nil {
		return err
	}
	if len(rest) > 1 {
		return usagef("%s takes one MODEL, got %d. See `%s --help`", f.Name(), len(rest), f.Name())
	}
	daemon, err := f.daemon()
	if err != nil {
		return err
	}
	if *body == "" {
		m, err := daemon.Money(ctx)
		if err != nil {
			return err
		}
		name := strings.Join(rest, "")
		maps, err := daemon.Coverage(ctx)
		if err != nil {
			return err
		}
		for _, known := range maps {
			if known.Model == name {
				name = known.ID
			}
		}
		return printPrices(c.out, &m.Terms, name, *prompt+*answer)
	}
	req := api.QuoteRequest{Model: strings.Join(rest, ""), PromptTokens: *prompt, AnswerTokens: *answer, Owner: *owner}
	if req.Owner == "" {
		req.Owner = api.NoWallet
	}
	if req.RequestHash, err = hashFile(*body); err != nil {
		return err
	}
	q, err := daemon.Quote(ctx, req)
	if err != nil {
		return err
	}
	if *asJSON {
		return printJSON(c.out, q)
	}
	return printQuote(c.out, &q)
}

// hashFile is what binds a quote to a request.
func hashFile(path string) (string, error) {
	file, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer file.Close()
	h := sha256.New()
	if n, err := io.Copy(h, io.LimitReader(file, maxBody+1)); err != nil || n > maxBody {
		return "", errors.Join(err, fmt.Errorf("%s: at most %d bytes", path, maxBody))
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

func printQuote(w io.Writer, q *api.Quote) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, row := range [][2]string{
		{"Quote", q.ID}, {"Model", q.Model}, {"Pay", q.Amount + " base units"}, {"of", q.Mint}, {"to", q.VaultOwner + " (account " + q.Vault + ")"},
		{"Memo", q.Memo}, {"Until", time.Unix(int64(q.Expires), 0).Format(time.DateTime)}, {"Secret", q.Secret},
	} {
		fmt.Fprintf(t, "%s\t%s\n", row[0], plain(row[1]))
	}
	fmt.Fprint(t, "\nThen send the request with X-Kvasir-Quote, X-Kvasir-Payment (the transaction's signature) and X-Kvasir-Secret.\n")
	return t.Flush()
}

// printPrices says what so many tokens cost of the models whose ids begin so.
func printPrices(w io.Writer, terms *api.MoneyTerms, id string, tokens uint64) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintf(t, "MODEL\tPRICE OF %d TOKENS\n", tokens)
	found := false
	for _, p := range terms.Prices {
		if !strings.HasPrefix(p.Model, id) {
			continue
		}
		found = true
		fmt.Fprintf(t, "%s\t%s\n", plain(p.Model), units(charge(tokens, p.Raw, terms.Ref), terms.Decimals))
	}
	if !found {
		return fmt.Errorf("no model %q has a price yet: it gets one with its first quote (--body FILE)", id)
	}
	fmt.Fprintf(t, "\nEpoch %d. With --body FILE you get a quote that can be paid.\n", terms.Epoch)
	return t.Flush()
}

// charge is what tokens cost in base units, as the settlement has it: tokens · price ·
// reference / 10¹⁸, rounded up.
func charge(tokens, raw, ref uint64) string {
	n := new(big.Int).SetUint64(tokens)
	n.Mul(n, new(big.Int).SetUint64(raw)).Mul(n, new(big.Int).SetUint64(ref))
	unit := new(big.Int).Exp(big.NewInt(10), big.NewInt(18), nil)
	n.Add(n, new(big.Int).Sub(unit, big.NewInt(1)))
	return n.Div(n, unit).String()
}

// units writes base units, and as many tokens of the mint.
func units(amount string, decimals int) string {
	return plain(tokens(amount, decimals) + " (" + amount + " base units)")
}

// tokens writes base units as tokens of the mint.
func tokens(amount string, decimals int) string {
	digits := amount
	if len(digits) <= decimals {
		digits = strings.Repeat("0", decimals-len(digits)+1) + digits
	}
	at := len(digits) - decimals
	whole := digits[:at]
	if part := strings.TrimRight(digits[at:], "0"); part != "" {
		whole += "." + part
	}
	return whole
}

// ledger prints what an owner has.
func ledger(ctx context.Context, c console, f *flags) error {
	f.daemonFlags()
	asJSON := f.Bool("json", false, "print it as JSON")
	rest, err := f.parse(c)
	if err != nil {
		return err
	}
	if len(rest) != 1 {
		return usagef("%s takes one OWNER, a wallet or the key of a node, got %d. See `%s --help`", f.Name(), len(rest), f.Name())
	}
	daemon, err := f.daemon()
	if err != nil {
		return err
	}
	m, err := daemon.Money(ctx)
	if err != nil {
		return err
	}
	l, err := daemon.Ledger(ctx, rest[0])
	if err != nil {
		return err
	}
	if *asJSON {
		return printJSON(c.out, l)
	}
	return printLedger(c.out, &l, m.Terms.Decimals)
}

var outcomes = [...]string{"on its way", "paid", "failed, and in the balance again", "expired, and in the balance again"}

func printLedger(w io.Writer, l *api.Ledger, decimals int) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	row := func(name, amount string) {
		if amount != "0" && amount != "" {
			fmt.Fprintf(t, "%s\t%s\n", name, units(amount, decimals))
		}
	}
	fmt.Fprintf(t, "Owner\t%s\n", plain(l.Owner))
	if l.Wallet != api.NoWallet {
		fmt.Fprintf(t, "Linked to\t%s\n", plain(l.Wallet))
	}
	fmt.Fprintf(t, "Balance\t%s\n", units(l.Balance, decimals))
	row("Leaving", l.Leaving)
	row("Held", l.Held)
	row("Bonded", l.Bonded)
	row("Unbonding", l.Unbonding)
	row("Bond to reach", l.Target)
	if l.Requests > 0 {
		fmt.Fprintf(t, "Earned\t%s with %d requests\n", units(l.Earned, decimals), l.Requests)
	}
	for _, v := range l.Vesting {
		fmt.Fprintf(t, "Free at %s\t%s\n", time.Unix(int64(v.Free), 0).Format(time.DateTime), units(v.Amount, decimals))
	}
	for _, p := range l.Payouts {
		what := "outcome " + strconv.Itoa(p.Outcome)
		if p.Outcome >= 0 && p.Outcome < len(outcomes) {
			what = outcomes[p.Outcome]
		}
		fmt.Fprintf(t, "Payout\t%s, %s, transaction %s\n", units(p.Amount, decimals), what, plain(p.Signed.Signature))
	}
	return t.Flush()
}
