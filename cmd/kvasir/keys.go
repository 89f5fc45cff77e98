package main

import (
	"context"
	"fmt"
	"io"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"kvasird/node/api"
	"kvasird/node/client"
)

var keysCommands = []command{
	{name: "add", args: "[flags] NAME", about: "make a key of the HTTP API and show it, this once", run: addKey},
	{name: "list", args: "[flags]", about: "the names of the keys, and what each may use", run: listKeys},
	{name: "revoke", args: "[flags] NAME", about: "end a key, at once", run: revokeKey},
}

// addKey prints the key alone on the standard output, so that a script can take it.
func addKey(ctx context.Context, c console, f *flags) error {
	f.daemonFlags()
	var req api.NewKey
	f.IntVar(&req.RequestsPerMinute, "requests-per-minute", 0, "`number` of requests that it may make in a minute (default: no limit)")
	f.IntVar(&req.TokensPerMinute, "tokens-per-minute", 0, "`number` of tokens of prompts and answers in a minute (default: no limit)")
	f.IntVar(&req.Concurrent, "concurrent", 0, "`number` of requests at once (default: no limit)")
	f.BoolVar(&req.Admin, "admin", false, "it may act for this node's account at the settlement, as the service token may")
	f.BoolVar(&req.Spend, "spend", false, "what it asks may be paid from the balance that this node may spend, as what an admin's asks")
	name, daemon, err := f.parseKeyName(c)
	if err != nil {
		return err
	}
	req.Name = name
	made, err := daemon.AddKey(ctx, req)
	if err != nil {
		return err
	}
	fmt.Fprintf(c.err, "The key %s. It is shown this once: only its hash is kept.\n", plain(made.Key.Name))
	if made.Note != "" {
		fmt.Fprintln(c.err, plain(made.Note))
	}
	_, err = fmt.Fprintln(c.out, plain(made.Secret))
	return err
}

// parseKeyName is for commands with a NAME.
func (f *flags) parseKeyName(c console) (name string, daemon *client.Client, err error) {
	rest, err := f.parse(c)
	if err != nil {
		return "", nil, err
	}
	if len(rest) != 1 {
		return "", nil, usagef("%s takes one NAME, got %d. See `%s --help`", f.Name(), len(rest), f.Name())
	}
	daemon, err = f.daemon()
	return rest[0], daemon, err
}

func listKeys(ctx context.Context, c console, f *flags) error {
	f.daemonFlags()
	daemon, err := f.parseForDaemon(c)
	if err != nil {
		return err
	}
	keys, err := daemon.Keys(ctx)
	if err != nil {
		return err
	}
	var text strings.Builder
	printKeys(&text, keys)
	_, err = io.WriteString(c.out, plain(text.String()))
	return err
}

func printKeys(w io.Writer, keys []api.Key) {
	if len(keys) == 0 {
		fmt.Fprintln(w, "No keys.")
		return
	}
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "NAME\tREQUESTS/MIN\tTOKENS/MIN\tAT ONCE\tMADE")
	for _, k := range keys {
		name := k.Name
		if k.Admin {
			name += " (admin)"
		}
		if k.Spend {
			name += " (may spend)"
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\n", name, limitText(k.RequestsPerMinute), limitText(k.TokensPerMinute), limitText(k.Concurrent),
			time.Unix(k.CreatedUnix, 0).Format(time.DateOnly))
	}
	t.Flush()
}

func limitText(n int) string {
	if n == 0 {
		return "-"
	}
	return strconv.Itoa(n)
}

func revokeKey(ctx context.Context, c console, f *flags) error {
	f.daemonFlags()
	name, daemon, err := f.parseKeyName(c)
	if err != nil {
		return err
	}
	revoked, err := daemon.RevokeKey(ctx, name)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(c.out, "The key %s is revoked. Keys left: %d.\n", plain(name), revoked.Left)
	return err
}
