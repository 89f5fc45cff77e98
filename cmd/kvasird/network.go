package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"

	"kvasird/node"
)

var networkCommands = []command{
	{"create", "NAME [flags]: write NAME.toml, which others copy, and the key that signs invitations", networkCreate},
	{"show", "FILE: say what a network file means", networkShow},
	{"invite", "FILE [flags]: print a ticket", networkInvite},
	{"revoke", "FILE TICKET|SERIAL|PEERID [flags]: put out who has a ticket, or a peer", networkRevoke},
}

func network(ctx context.Context, args []string) error {
	return choose(ctx, "kvasird network", "Kvasird network makes networks and says who may come in.", networkCommands, args)
}

// parseAny parses a command whose flags may follow its other arguments.
func parseAny(set *flag.FlagSet, args []string) (rest []string, err error) {
	for {
		if err := set.Parse(args); errors.Is(err, flag.ErrHelp) {
			return nil, err
		} else if err != nil {
			return nil, fmt.Errorf("%w: see kvasird %s --help", errUsage, set.Name())
		}
		if set.NArg() == 0 {
			return rest, nil
		}
		rest, args = append(rest, set.Arg(0)), set.Args()[1:]
	}
}

// parseMixed is parseAny for as many arguments as names.
func parseMixed(set *flag.FlagSet, args []string, names ...string) ([]string, error) {
	rest, err := parseAny(set, args)
	if err == nil && len(rest) != len(names) {
		err = fmt.Errorf("%w: kvasird %s takes %v, got %q", errUsage, set.Name(), names, rest)
	}
	return rest, err
}

// listFlag is a flag that may be repeated.
func listFlag(set *flag.FlagSet, to *[]string, name, usage string) {
	set.Func(name, usage+" (may be repeated)", func(s string) error {
		*to = append(*to, s)
		return nil
	})
}

func networkCreate(_ context.Context, args []string) error {
	set := flag.NewFlagSet("network create", flag.ContinueOnError)
	var opts node.NewNetwork
	set.StringVar(&opts.Admission, "admission", "open", "who may come in: open (all), invitation (by ticket), closed (members)")
	set.IntVar(&opts.Replicas, "replicas", 0, "`number` of nodes wanted for every expert (default 2)")
	set.StringVar(&opts.Out, "out", "", "`file` to write (default NAME.toml)")
	listFlag(set, &opts.Bootstrap, "bootstrap", "`multiaddr` with /p2p/ID of a node to come in by")
	listFlag(set, &opts.Relays, "relay", "`multiaddr` with /p2p/ID of a relay")
	listFlag(set, &opts.Models, "model", "`id` of a model that volunteers keep to")
	listFlag(set, &opts.Token, "token", "`key=value` of what is paid with: mint, decimals, cluster, vault_owner, wallets (with commas) and more; or of a parameter, such as fee=100000")
	set.BoolVar(&opts.Devnet, "devnet", false, "a network to try things in: its parameters have wider bounds")
	set.StringVar(&opts.Data, "data", "", "state `folder` of the node here, which settles unless --token settlement=PEERID names another")
	rest, err := parseMixed(set, args, "NAME")
	if err != nil {
		return err
	}
	opts.Name = rest[0]
	return node.CreateNetwork(opts, os.Stdout)
}

func networkShow(_ context.Context, args []string) error {
	rest, err := parseMixed(flag.NewFlagSet("network show", flag.ContinueOnError), args, "FILE")
	if err != nil {
		return err
	}
	return node.ShowNetwork(rest[0], os.Stdout)
}

func networkInvite(_ context.Context, args []string) error {
	set := flag.NewFlagSet("network invite", flag.ContinueOnError)
	var opts node.NewTicket
	set.StringVar(&opts.Key, "key", "", "key `file` of the network's authority (default: beside FILE)")
	set.StringVar(&opts.For, "for", "", "`peer id` that the ticket is for (default: whoever has it)")
	set.BoolVar(&opts.Infer, "infer", false, "with the right to have others compute; needs --for")
	set.IntVar(&opts.Days, "days", 0, "`number` of days that it is good for (default: 365 with --for, else 30)")
	set.StringVar(&opts.Note, "note", "", "`text` for people, in the ticket")
	rest, err := parseMixed(set, args, "FILE")
	if err != nil {
		return err
	}
	opts.File = rest[0]
	return node.Invite(opts, os.Stdout, os.Stderr)
}

func networkRevoke(ctx context.Context, args []string) error {
	set := flag.NewFlagSet("network revoke", flag.ContinueOnError)
	var opts node.Revocation
	set.StringVar(&opts.Key, "key", "", "key `file` of the network's authority (default: beside FILE)")
	set.StringVar(&opts.Data, "data", "", "state `folder` of the daemon on this machine")
	rest, err := parseMixed(set, args, "FILE", "TICKET|SERIAL|PEERID")
	if err != nil {
		return err
	}
	opts.File, opts.What = rest[0], rest[1]
	return node.RevokeMember(ctx, opts, os.Stdout)
}
