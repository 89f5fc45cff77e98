package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"

	"kvasird/node/api"
)

var governCommands = []command{
	{name: "propose", args: "[flags] NAME=VALUE…", about: "make the next change of parameters, in a file for wallets to sign", run: propose},
	{name: "withdraw", args: "[flags] AMOUNT WALLET", about: "make the same for an amount of the treasury that is to be paid", run: withdraw},
	{name: "sign", args: "[flags] FILE", about: "sign a proposal with --keypair, or add what was signed elsewhere", run: signProposal},
	{name: "activate", args: "[flags] FILE", about: "have a signed proposal taken, with a code of the authenticator", run: activate},
}

// maxProposal bounds the file of a proposal in bytes.
const maxProposal = 1 << 20

// proposalFile goes from hand to hand until enough wallets have signed.
type proposalFile struct {
	api.Proposed
	Signatures []api.WalletSignature `json:"signatures"`
}

func readProposal(path string) (p proposalFile, err error) {
	file, err := os.Open(path)
	if err != nil {
		return p, err
	}
	defer file.Close()
	text, err := io.ReadAll(io.LimitReader(file, maxProposal+1))
	if err != nil {
		return p, err
	}
	dec := json.NewDecoder(bytes.NewReader(text))
	dec.DisallowUnknownFields()
	if len(text) > maxProposal {
		err = fmt.Errorf("it is larger than %d bytes", maxProposal)
	} else if err = dec.Decode(&p); err == nil && (len(p.Proposal) == 0 || len(p.Texts) == 0) {
		err = errors.New("the proposal or its texts are missing")
	}
	if err != nil {
		return p, fmt.Errorf("%s is no proposal as `kvasir govern propose` writes it: %w", path, err)
	}
	return p, nil
}

func (p *proposalFile) write(path string, flag int) error {
	text, err := json.MarshalIndent(p, "", "  ")
	if err != nil {
		return err
	}
	file, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|flag, 0o644)
	if err != nil {
		return err
	}
	_, err = file.Write(append(text, '\n'))
	return errors.Join(err, file.Sync(), file.Close())
}

func propose(ctx context.Context, c console, f *flags) error {
	f.daemonFlags()
	out := f.String("out", "proposal.json", "`file` to write")
	var change api.Change
	f.Uint64Var(&change.Epoch, "epoch", 0, "`number` of the epoch from which it holds (default: as soon as can be)")
	f.Uint64Var(&change.Valid, "valid", 0, "`seconds` until which it has to be activated (default: a day)")
	rest, err := f.parse(c)
	if err != nil {
		return err
	}
	change.Values = map[string]uint64{}
	for _, s := range rest {
		name, value, _ := strings.Cut(s, "=")
		n, err := strconv.ParseUint(value, 10, 64)
		if _, twice := change.Values[name]; err != nil || twice || strings.HasPrefix(value, "+") {
			return usagef("%q: want NAME=VALUE with a whole number, each name once", s)
		}
		change.Values[name] = n
	}
	if len(change.Values) == 0 {
		return usagef("%s takes what is to change, such as fee=120000. See `%s --help`", f.Name(), f.Name())
	}
	return proposed(ctx, c, f, *out, change)
}

func withdraw(ctx context.Context, c console, f *flags) error {
	f.daemonFlags()
	out := f.String("out", "withdrawal.json", "`file` to write")
	var change api.Change
	f.Uint64Var(&change.Epoch, "epoch", 0, "`number` of the epoch in which it is paid (default: as soon as can be)")
	f.Uint64Var(&change.Valid, "valid", 0, "`seconds` until which it has to be activated (default: a day)")
	rest, err := f.parse(c)
	if err != nil {
		return err
	}
	if len(rest) != 2 || !isAmount(rest[0]) {
		return usagef("%s takes an AMOUNT in base units and the WALLET that is paid, got %q. See `%s --help`", f.Name(), rest, f.Name())
	}
	change.Withdraw, change.To = rest[0], rest[1]
	return proposed(ctx, c, f, *out, change)
}

// proposed has a proposal made, and writes it to a new file.
func proposed(ctx context.Context, c console, f *flags, out string, change api.Change) error {
	daemon, err := f.daemon()
	if err != nil {
		return err
	}
	made, err := daemon.Propose(ctx, change)
	if err != nil {
		return err
	}
	p := proposalFile{Proposed: made}
	if err := p.write(out, os.O_EXCL); err != nil {
		return err
	}
	for _, wallet := range slices.Sorted(maps.Keys(p.Texts)) {
		fmt.Fprintf(c.out, "Wallet %s signs:\n\n%s\n", plain(wallet), plain(p.Texts[wallet]))
	}
	_, err = fmt.Fprintf(c.out, "The proposal is in %s. Next: kvasir govern sign %s --keypair FILE\n", out, out)
	return err
}

func signProposal(_ context.Context, c console, f *flags) error {
	s := f.signerFlags()
	wallet := f.String("wallet", "", "`wallet` that signed elsewhere, or whose text is to be shown")
	rest, err := f.parse(c)
	if err == nil {
		err = s.check()
	}
	if err != nil {
		return err
	}
	if len(rest) != 1 {
		return usagef("%s takes one FILE, got %d. See `%s --help`", f.Name(), len(rest), f.Name())
	}
	p, err := readProposal(rest[0])
	if err != nil {
		return err
	}
	if s.keypair != "" {
		key, err := readKeyPair(s.keypair)
		if err != nil {
			return err
		}
		*wallet = walletOf(key)
	}
	text, ok := p.Texts[*wallet]
	if !ok {
		return fmt.Errorf("wallet %q has no authority over this: one of %s signs", *wallet, strings.Join(slices.Sorted(maps.Keys(p.Texts)), ", "))
	}
	add := api.WalletSignature{Wallet: *wallet, Format: s.format, Signature: s.signature}
	switch {
	case s.keypair != "":
		// What is signed is shown, since nobody else does.
		fmt.Fprintln(c.err, plain(text))
		if _, add.Format, add.Signature, err = s.sign(text); err != nil {
			return err
		}
	case s.signature == "":
		_, err := io.WriteString(c.out, plain(text))
		return err
	}
	p.Signatures = append(slices.DeleteFunc(p.Signatures, func(o api.WalletSignature) bool { return o.Wallet == *wallet }), add)
	if err := p.write(rest[0], os.O_TRUNC); err != nil {
		return err
	}
	_, err = fmt.Fprintf(c.out, "Signed by %d wallets. Next: kvasir govern activate %s --code 123456\n", len(p.Signatures), rest[0])
	return err
}

func activate(ctx context.Context, c console, f *flags) error {
	f.daemonFlags()
	code := f.String("code", "", "`digits` that the authenticator shows")
	rest, err := f.parse(c)
	if err != nil {
		return err
	}
	if len(rest) != 1 || *code == "" {
		return usagef("%s takes one FILE and a --code. See `%s --help`", f.Name(), f.Name())
	}
	p, err := readProposal(rest[0])
	if err != nil {
		return err
	}
	daemon, err := f.daemon()
	if err != nil {
		return err
	}
	done, err := daemon.Activate(ctx, api.Activation{Proposal: p.Proposal, Signatures: p.Signatures, Code: *code})
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(c.out, "Change %d holds from epoch %d.\n", done.Sequence, done.Epoch)
	return err
}
