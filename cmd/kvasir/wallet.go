package main

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"io"
	"strings"

	"kvasird/node/api"
	"kvasird/node/client"
)

var walletCommands = []command{
	{name: "link", args: "[flags] [WALLET]", about: "let a wallet have this node's pay: it signs, with --keypair or elsewhere", run: linkWallet},
	{name: "unlink", args: "[flags]", about: "take the link back: the linked wallet signs", run: unlinkWallet},
	{name: "status", args: "[flags]", about: "what this node earned, and what the linked wallet has", run: walletStatus},
	{name: "deposit", args: "[flags] AMOUNT", about: "count a transfer to the vault as the balance of its sender", run: deposit(false)},
	{name: "stake", args: "[flags] AMOUNT", about: "count a transfer to the vault as this node's bond", run: deposit(true)},
	{name: "unstake", args: "[flags] AMOUNT", about: "take an amount out of this node's bond, after a while", run: moveAmount((*client.Client).Unstake, printedLedger)},
	{name: "claim", args: "[flags] AMOUNT", about: "pay an amount of the balance to the linked wallet", run: moveAmount((*client.Client).Claim, printedPayout)},
}

// linkWallet links, or prints what is to be signed elsewhere.
func linkWallet(ctx context.Context, c console, f *flags) error {
	f.daemonFlags()
	s := f.signerFlags()
	spend := f.Bool("spend", false, "this node may pay from the wallet's balance")
	since := f.Uint64("since", 0, "`second` that was printed with the text that was signed elsewhere")
	rest, err := f.parse(c)
	if err == nil {
		err = s.check()
	}
	if err != nil {
		return err
	}
	wallet := strings.Join(rest, "")
	if s.keypair != "" {
		key, err := readKeyPair(s.keypair)
		if err != nil {
			return err
		}
		if wallet == "" {
			wallet = walletOf(key)
		}
		if wallet != walletOf(key) {
			return usagef("%s is the key pair of %s, not of %s", s.keypair, walletOf(key), wallet)
		}
	}
	if len(rest) > 1 || wallet == "" {
		return usagef("%s takes the WALLET to link, or its --keypair. See `%s --help`", f.Name(), f.Name())
	}
	return link(ctx, c, f, s, api.Link{Wallet: wallet, Spend: *spend, Since: *since})
}

func unlinkWallet(ctx context.Context, c console, f *flags) error {
	f.daemonFlags()
	s := f.signerFlags()
	since := f.Uint64("since", 0, "`second` that was printed with the text that was signed elsewhere")
	err := f.parseNone(c)
	if err == nil {
		err = s.check()
	}
	if err != nil {
		return err
	}
	return link(ctx, c, f, s, api.Link{Wallet: api.NoWallet, Since: *since})
}

// link signs what the daemon gives to sign, or has it signed elsewhere.
func link(ctx context.Context, c console, f *flags, s *signer, l api.Link) error {
	daemon, err := f.daemon()
	if err != nil {
		return err
	}
	if s.signature != "" {
		if l.Since == 0 {
			return usagef("--signature needs --since, which was printed with the text")
		}
		l.Format, l.Signature = s.format, s.signature
	} else {
		t, err := daemon.LinkText(ctx, api.LinkTextRequest{Wallet: l.Wallet, Spend: l.Spend})
		if err != nil {
			return err
		}
		l.Since = t.Since
		if s.keypair == "" {
			return printToSign(c, t, l)
		}
		if _, l.Format, l.Signature, err = s.sign(t.Text); err != nil {
			return err
		}
	}
	done, err := daemon.Link(ctx, l)
	if err != nil {
		return err
	}
	text := fmt.Sprintf("Node %s is linked to %s.\n", done.Node, done.Wallet)
	if done.Wallet == api.NoWallet {
		text = fmt.Sprintf("Node %s is linked to no wallet: its pay is held until it is.\n", done.Node)
	}
	_, err = io.WriteString(c.out, plain(text))
	return err
}

// printToSign gives the text on the standard output alone, so that a script can take it.
func printToSign(c console, t api.LinkText, l api.Link) error {
	spend := ""
	if l.Spend {
		spend = " --spend"
	}
	again := fmt.Sprintf("kvasir wallet link %s%s --since %d", l.Wallet, spend, t.Since)
	if l.Wallet == api.NoWallet {
		again = fmt.Sprintf("kvasir wallet unlink --since %d", t.Since)
	}
	fmt.Fprintf(c.err, "The wallet has to sign this text, with its line ends, as an off-chain message (application domain of a v0 one: %s)\nor raw. Then:\n  %s --signature SIGNATURE --format v0|v1|raw\n",
		plain(t.Domain), plain(again))
	_, err := io.WriteString(c.out, plain(t.Text))
	return err
}

func walletStatus(ctx context.Context, c console, f *flags) error {
	f.daemonFlags()
	asJSON := f.Bool("json", false, "print it as JSON")
	daemon, err := f.parseForDaemon(c)
	if err != nil {
		return err
	}
	m, err := daemon.Money(ctx)
	if err != nil {
		return err
	}
	if *asJSON {
		return printJSON(c.out, m)
	}
	fmt.Fprintf(c.out, "This node:\n")
	if err := printLedger(c.out, &m.Ledger, m.Terms.Decimals); err != nil {
		return err
	}
	if m.Ledger.Wallet == api.NoWallet {
		_, err := fmt.Fprintln(c.out, "\nIt is linked to no wallet: its pay is held until `kvasir wallet link`.")
		return err
	}
	l, err := daemon.Ledger(ctx, m.Ledger.Wallet)
	if err != nil {
		return err
	}
	fmt.Fprintf(c.out, "\nIts wallet:\n")
	return printLedger(c.out, &l, m.Terms.Decimals)
}

// deposit names a transfer, or says how to make one.
func deposit(stake bool) func(ctx context.Context, c console, f *flags) error {
	return func(ctx context.Context, c console, f *flags) error {
		f.daemonFlags()
		signature := f.String("signature", "", "`signature` of the transaction that paid the vault, in base58")
		owner := f.String("owner", "", "`wallet` whose own tokens it moved (default: the linked wallet)")
		fund := new(string)
		if !stake {
			f.StringVar(fund, "fund", "", "it is for the network, and nobody's balance: `emission` fills the reserve that adds to pay, pool the insurance")
		}
		amount, daemon, err := f.parseAmount(c)
		if err != nil {
			return err
		}
		m, err := daemon.Money(ctx)
		if err != nil {
			return err
		}
		if *owner == "" {
			if *owner = m.Ledger.Wallet; *owner == api.NoWallet {
				return usagef("no wallet is linked: name the one that paid with --owner")
			}
		}
		memo, ok := m.FundMemos[*fund]
		if !ok && *fund != "" {
			return usagef("--fund takes emission or pool, not %q", *fund)
		}
		if stake {
			memo = m.StakeMemo
		}
		if *signature == "" {
			return printTransfer(c.out, m.Terms, amount, *owner, memo, f.Name())
		}
		l, err := daemon.Deposit(ctx, api.Deposit{Signature: *signature, Owner: *owner, Amount: amount, Stake: stake})
		if err != nil {
			return err
		}
		return printLedger(c.out, &l, m.Terms.Decimals)
	}
}

// printTransfer says how to pay the vault so that command can count it.
func printTransfer(w io.Writer, t api.MoneyTerms, amount, owner, memo, command string) error {
	line := fmt.Sprintf("spl-token transfer %s %s %s", t.Mint, tokens(amount, t.Decimals), t.Vault)
	if memo == "" {
		memo = "none"
	} else {
		line += " --with-memo " + memo
	}
	_, err := io.WriteString(w, plain(fmt.Sprintf(`Transfer %s in one transaction that %s signs:
  mint    %s
  to      %s, the vault, an account of %s
  memo    %s
With Solana's tools, set to its key pair (or with --owner FILE):
  %s
Once the chain has finalized it, with the signature that this prints:
  %s %s --owner %s --signature SIGNATURE
`, units(amount, t.Decimals), owner, t.Mint, t.Vault, t.Owner, memo, line, command, amount, owner)))
	return err
}

// parseAmount is for commands with an AMOUNT of base units.
func (f *flags) parseAmount(c console) (amount string, daemon *client.Client, err error) {
	rest, err := f.parse(c)
	if err != nil {
		return "", nil, err
	}
	if len(rest) != 1 || !isAmount(rest[0]) {
		return "", nil, usagef("%s takes one AMOUNT in base units, such as 1500, got %q. See `%s --help`", f.Name(), rest, f.Name())
	}
	daemon, err = f.daemon()
	return rest[0], daemon, err
}

// isAmount says whether a text is an amount of base units above 0.
func isAmount(s string) bool {
	return s != "" && len(s) <= 20 && s[0] != '0' && strings.Trim(s, "0123456789") == ""
}

// moveAmount makes a move with an id of its own: the same id again is the same move.
func moveAmount[Out any](call func(*client.Client, context.Context, api.Move) (Out, error), text func(Out, int) string) func(context.Context, console, *flags) error {
	return func(ctx context.Context, c console, f *flags) error {
		f.daemonFlags()
		id := f.String("id", "", "`id` of a move that may have been made already, to make it once")
		amount, daemon, err := f.parseAmount(c)
		if err != nil {
			return err
		}
		if *id == "" {
			var random [32]byte
			rand.Read(random[:]) // it never fails
			*id = hex.EncodeToString(random[:])
		}
		m, err := daemon.Money(ctx)
		if err != nil {
			return err
		}
		out, err := call(daemon, ctx, api.Move{ID: *id, Amount: amount})
		if err != nil {
			return fmt.Errorf("%w\nIf it may have been made all the same, run it again with --id %s: then it is made once", err, *id)
		}
		_, err = io.WriteString(c.out, text(out, m.Terms.Decimals))
		return err
	}
}

func printedLedger(l api.Ledger, decimals int) string {
	var b strings.Builder
	printLedger(&b, &l, decimals) // a Builder takes all
	return b.String()
}

func printedPayout(p api.Payout, decimals int) string {
	return fmt.Sprintf("%s to %s, transaction %s: `kvasir wallet status` shows when it is paid.\n", units(p.Amount, decimals), plain(p.Owner), plain(p.Signed.Signature))
}
