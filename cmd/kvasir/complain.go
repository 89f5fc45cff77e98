package main

import (
	"context"
	"fmt"
	"io"
	"time"

	"kvasird/node/api"
)

// complain claims of the insurance pool, in the name of the linked wallet or of one that
// signs.
func complain(ctx context.Context, c console, f *flags) error {
	f.daemonFlags()
	s := f.signerFlags()
	wallet := f.String("wallet", "", "`wallet` that paid: print what it has to sign elsewhere")
	rest, err := f.parse(c)
	if err == nil {
		err = s.check()
	}
	if err != nil {
		return err
	}
	if len(rest) != 2 || !isAmount(rest[1]) {
		return usagef("%s takes the REQUEST (the id of its quote) and an AMOUNT in base units, got %q. See `%s --help`", f.Name(), rest, f.Name())
	}
	claim := api.Complaint{Request: rest[0], Amount: rest[1]}
	daemon, err := f.daemon()
	if err != nil {
		return err
	}
	m, err := daemon.Money(ctx)
	if err != nil {
		return err
	}
	if s.signature != "" {
		claim.Format, claim.Signature = s.format, s.signature
	} else if s.keypair != "" || *wallet != "" {
		if s.keypair != "" {
			key, err := readKeyPair(s.keypair)
			if err != nil {
				return err
			}
			*wallet = walletOf(key)
		}
		t, err := daemon.ComplaintText(ctx, api.ComplaintTextRequest{Request: claim.Request, Amount: claim.Amount, Wallet: *wallet})
		if err != nil {
			return err
		}
		if s.keypair == "" {
			fmt.Fprintf(c.err, "The wallet has to sign this text, with its line ends, as an off-chain message (application domain of a v0 one: %s)\nor raw. Then:\n  %s %s %s --signature SIGNATURE --format v0|v1|raw\n",
				plain(t.Domain), f.Name(), plain(claim.Request), claim.Amount)
			_, err := io.WriteString(c.out, plain(t.Text))
			return err
		}
		if _, claim.Format, claim.Signature, err = s.sign(t.Text); err != nil {
			return err
		}
	}
	done, err := daemon.Complain(ctx, claim)
	if err != nil {
		return err
	}
	return printComplained(c.out, done, m.Terms.Decimals)
}

func printComplained(w io.Writer, c api.Complained, decimals int) error {
	if c.Over {
		_, err := fmt.Fprintf(w, "Of %s the pool has paid %s.\n", units(c.Asked, decimals), units(c.Recovered, decimals))
		return err
	}
	_, err := fmt.Fprintf(w, "%s are claimed. The pool pays in the epoch after %s, as far as it reaches: ask again then.\n",
		units(c.Asked, decimals), time.Unix(int64(c.Due), 0).Format(time.DateTime))
	return err
}
