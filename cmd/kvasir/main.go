// Kvasir shows and asks a daemon on this machine, and takes GGUF files apart.
// It talks to kvasird over the control socket (node/client) and, to chat, over
// HTTP as any client does, runs its sibling binary for what needs llama.cpp, and
// computes nothing itself.
//
// Exit status: 0 done, 1 failed, 2 wrong usage.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"text/tabwriter"

	"kvasird/node/api"
	"kvasird/node/client"
)

// Exit statuses.
const (
	exitOK    = 0
	exitFail  = 1
	exitUsage = 2
)

// console is where a command reads and writes.
type console struct {
	in       io.Reader
	out, err io.Writer
}

// command is one word of the command line. Commands with subcommands have no
// run of their own.
type command struct {
	name, args, about string
	run               func(ctx context.Context, c console, f *flags) error
	sub               []command
	interrupts        bool // it sees to Ctrl-C itself, which else ends ctx
}

var commands = []command{
	{name: "run", args: "[flags]", about: "start this node (runs kvasird run)", run: sibling("run")},
	{name: "status", args: "[flags]", about: "what the daemon does: roles, peers, model, coverage, speed", run: status},
	{name: "coverage", args: "[flags]", about: "who holds which experts of each model, as a map of characters", run: coverage},
	{name: "pause", args: "[flags]", about: "finish what is computed for others, then take nothing new", run: pause(true)},
	{name: "resume", args: "[flags]", about: "end a pause", run: pause(false)},
	{name: "ask", args: `[flags] "question"`, about: "ask the model and print the answer as it comes", run: ask},
	{name: "quote", args: "[MODEL] [flags]", about: "what a request would cost in a network with a token, and how to pay it", run: quote},
	{name: "wallet", about: "this node's pay: link a wallet, stake, claim", sub: walletCommands},
	{name: "ledger", args: "[flags] OWNER", about: "what a wallet or a node has at the settlement", run: ledger},
	{name: "complain", args: "[flags] REQUEST AMOUNT", about: "claim of the insurance pool for a request that was badly answered", run: complain},
	{name: "govern", about: "change the parameters of a network with a token", sub: governCommands},
	{name: "keys", about: "the keys of the HTTP API: make, list, revoke", sub: keysCommands},
	{name: "chat", args: "[MODEL] [flags]", about: "talk with the model in the terminal", run: runChat, interrupts: true},
	{name: "gguf", about: "look at a model file, or cut the parts of it that nodes hold", sub: ggufCommands},
	{name: "model", args: "add|list|verify|remove|pin …", about: "the models in this node's store (runs kvasird model)", run: sibling("model")},
	{name: "network", args: "create|show|invite|revoke …", about: "create a network, invite into it, revoke (runs kvasird network)", run: sibling("network")},
	{name: "plan", args: "[MODEL] [flags]", about: "how a model would run on nodes: where, how fast, limited by what (runs kvasird plan)", run: sibling("plan")},
	{name: "sim", args: "[SCENARIO…] [flags]", about: "play markets of agents over the real rules of price, fee and emission", run: simulate},
	{name: "bench", args: "[worker] [flags]", about: "measure this machine, or what a worker gives on each of its backends (runs kvasird bench)", run: sibling("bench")},
	{name: "verify", args: "[flags]", about: "measure this machine's backends against plain Go and each other (runs kvasird verify)", run: sibling("verify")},
	{name: "doctor", args: "[flags]", about: "say what is wrong with this machine (runs kvasird doctor)", run: sibling("doctor")},
	{name: "version", about: "print the version", run: version},
}

// errUsage is wrapped by errors that deserve exit status 2.
var errUsage = errors.New("wrong usage")

func usagef(format string, args ...any) error {
	return fmt.Errorf("%w: %w", errUsage, fmt.Errorf(format, args...))
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	os.Exit(run(ctx, console{os.Stdin, os.Stdout, os.Stderr}, os.Args[1:]))
}

// run carries out a command line and returns the exit status.
func run(ctx context.Context, c console, args []string) int {
	cmd, path, rest, err := find(args)
	if err == nil && cmd == nil {
		return exitWith(c, printHelp(c.out, path))
	}
	if err == nil {
		if !cmd.interrupts {
			var stop func()
			ctx, stop = signal.NotifyContext(ctx, os.Interrupt)
			defer stop()
		}
		err = cmd.run(ctx, c, newFlags(path, *cmd, rest))
	}
	if errors.Is(err, flag.ErrHelp) {
		return exitOK
	}
	return exitWith(c, err)
}

func exitWith(c console, err error) int {
	var status said
	switch {
	case err == nil:
		return exitOK
	case errors.As(err, &status):
		return int(status)
	case errors.Is(err, errUsage):
		fmt.Fprintf(c.err, "kvasir: %s\n", strings.TrimPrefix(err.Error(), errUsage.Error()+": "))
		return exitUsage
	case errors.Is(err, context.Canceled):
		fmt.Fprintln(c.err, "kvasir: stopped")
		return exitFail
	}
	fmt.Fprintf(c.err, "kvasir: %s\n", plain(err.Error()))
	return exitFail
}

// find walks the table. A nil command asks for the help of path.
func find(args []string) (cmd *command, path string, rest []string, err error) {
	list, path := commands, "kvasir"
	for {
		if len(args) == 0 || isHelp(args[0]) {
			return helpFor(list, path, args)
		}
		cmd, err = lookUp(list, path, args[0])
		if err != nil {
			return nil, path, nil, err
		}
		path, args = path+" "+cmd.name, args[1:]
		if cmd.run != nil {
			return cmd, path, args, nil
		}
		list = cmd.sub
	}
}

func isHelp(arg string) bool {
	return arg == "help" || arg == "-h" || arg == "-help" || arg == "--help"
}

// helpFor resolves "help", "help ask" and "help gguf slice".
func helpFor(list []command, path string, args []string) (*command, string, []string, error) {
	for _, word := range args[min(1, len(args)):] {
		cmd, err := lookUp(list, path, word)
		if err != nil {
			return nil, path, nil, err
		}
		path += " " + cmd.name
		if cmd.run != nil {
			return cmd, path, []string{"--help"}, nil
		}
		list = cmd.sub
	}
	return nil, path, nil, nil
}

func lookUp(list []command, path, name string) (*command, error) {
	var known []string
	for i := range list {
		if list[i].name == name {
			return &list[i], nil
		}
		known = append(known, list[i].name)
	}
	if near := api.Nearest(name, known); near != "" {
		return nil, usagef("unknown command %q: did you mean %q? See `%s help`", name, near, path)
	}
	return nil, usagef("unknown command %q. See `%s help`", name, path)
}

// printHelp lists the commands below path.
func printHelp(w io.Writer, path string) error {
	list, about := commands, "Kvasir talks to the kvasird daemon on this machine."
	for _, word := range strings.Fields(path)[1:] {
		cmd, err := lookUp(list, path, word)
		if err != nil {
			return err
		}
		list, about = cmd.sub, strings.ToUpper(cmd.about[:1])+cmd.about[1:]+"."
	}
	fmt.Fprintf(w, "%s\n\nUsage: %s COMMAND\n\n", about, path)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, cmd := range list {
		fmt.Fprintf(t, "  %s\t%s\n", cmd.name, cmd.about)
	}
	fmt.Fprintf(t, "  %s\t%s\n", "help COMMAND", "the flags of a command")
	return t.Flush()
}

// flags parses the arguments of one command. Unlike the flag package's own
// order, flags may also follow the other arguments.
type flags struct {
	*flag.FlagSet
	usage string
	args  []string

	socket, data *string // of daemonFlags
}

func newFlags(path string, cmd command, args []string) *flags {
	f := &flags{FlagSet: flag.NewFlagSet(path, flag.ContinueOnError), args: args}
	f.usage = fmt.Sprintf("Usage: %s %s\n\n%s.\n", path, cmd.args, strings.ToUpper(cmd.about[:1])+cmd.about[1:])
	f.SetOutput(io.Discard)
	f.Usage = func() {}
	return f
}

// parse returns the arguments that are not flags. Help goes to c.out.
func (f *flags) parse(c console) (rest []string, err error) {
	args := f.args
	for {
		err := f.Parse(args)
		if errors.Is(err, flag.ErrHelp) {
			f.help(c.out)
			return nil, err
		}
		if err != nil {
			return nil, usagef("%s: %w. See `%s --help`", f.Name(), err, f.Name())
		}
		left := f.Args()
		if ended := len(args) - len(left); len(left) == 0 || ended > 0 && args[ended-1] == "--" {
			return append(rest, left...), nil
		}
		rest, args = append(rest, left[0]), left[1:]
	}
}

// parseNone is for commands without arguments.
func (f *flags) parseNone(c console) error {
	rest, err := f.parse(c)
	if err == nil && len(rest) > 0 {
		err = usagef("%s takes no argument, got %q. See `%s --help`", f.Name(), rest[0], f.Name())
	}
	return err
}

func (f *flags) help(w io.Writer) {
	fmt.Fprint(w, f.usage)
	first := true
	f.VisitAll(func(*flag.Flag) {
		if first {
			fmt.Fprint(w, "\nFlags:\n")
		}
		first = false
	})
	f.SetOutput(w)
	f.PrintDefaults()
	f.SetOutput(io.Discard)
}

// daemonFlags adds --socket and --data, which say who daemon is.
func (f *flags) daemonFlags() {
	f.socket = f.String("socket", "", "control socket `path` (default: control.sock in the data folder)")
	f.data = f.String("data", "", "state `folder` of the daemon (default: ~/.local/share/kvasir)")
}

// daemon is the one that the parsed flags name.
func (f *flags) daemon() (*client.Client, error) {
	if *f.socket != "" {
		return client.New(*f.socket), nil
	}
	dir := *f.data
	if dir == "" {
		var err error
		if dir, err = api.DefaultDataDir(); err != nil {
			return nil, err
		}
	}
	return client.New(filepath.Join(dir, api.SocketName)), nil
}

// parseForDaemon is for commands that ask the daemon and take no argument.
func (f *flags) parseForDaemon(c console) (*client.Client, error) {
	if err := f.parseNone(c); err != nil {
		return nil, err
	}
	return f.daemon()
}

func printJSON(w io.Writer, v any) error {
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	return enc.Encode(v)
}

// plain takes control characters out of what comes from peers, files and
// models, so that it cannot steer the terminal, nor, by turning the direction of
// text round, seem to be what it is not. Line ends and tabs stay; a CR goes.
func plain(s string) string {
	return strings.Map(func(r rune) rune {
		switch {
		case r == '\r':
			return -1
		case r < ' ' && r != '\n' && r != '\t', 0x7f <= r && r < 0xa0,
			0x202a <= r && r <= 0x202e, 0x2066 <= r && r <= 0x2069:
			return '\ufffd'
		}
		return r
	}, s)
}
