// Kvasird is the daemon: a backbone, an expert worker or an entry node of a
// network, or all of these. Kvasir is the program that talks to it.
//
// Exit status: 0 done, 1 failed, 2 wrong usage.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"syscall"

	"kvasird/node"
)

type command struct {
	name  string
	about string
	run   func(ctx context.Context, args []string) error
}

var commands = []command{
	{"run", "start this node; its settings are in kvasird.toml and flags", run},
	{"demo", "a backbone and three expert workers on this machine answer three questions", demo},
	{"doctor", "say what is wrong with this machine", doctor},
	{"network", "create a network, invite into it, revoke", network},
	{"model", "add, list, verify, remove and pin the models of this node's store", model},
	{"plan", "[MODEL] [flags]: say how a model would run on this machine and its peers, or on nodes that a file describes, and how fast", plan},
	{"bench", "[worker] [flags]: measure dispatch, swarm against alone, and the expert kernel; worker: a worker's tokens per second on every backend", bench},
	{"verify", "measure this machine's backends against plain Go and each other, and say whether they agree", verifyBackends},
	{"version", "print the version", version},
	{"probe", "try out a model file (started by run, reads a request from its standard input)", probe},
}

// errUsage is wrapped by errors that deserve exit status 2.
var errUsage = errors.New("wrong usage")

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := dispatch(ctx, os.Args[1:])
	stop()
	switch {
	case err == nil || errors.Is(err, flag.ErrHelp):
	case errors.Is(err, errUsage):
		fmt.Fprintln(os.Stderr, "kvasird:", err)
		os.Exit(2)
	default:
		fmt.Fprintln(os.Stderr, "kvasird:", err)
		os.Exit(1)
	}
}

func dispatch(ctx context.Context, args []string) error {
	return choose(ctx, "kvasird", "Kvasird runs a node of a kvasir network.", commands, args)
}

// choose runs the command that the first argument names; without one it lists
// them.
func choose(ctx context.Context, program, about string, commands []command, args []string) error {
	if len(args) == 0 || slices.Contains([]string{"help", "-h", "-help", "--help"}, args[0]) {
		fmt.Printf("%s\n\nUsage: %s COMMAND [flags]\n\n", about, program)
		for _, c := range commands {
			fmt.Printf("  %-8s %s\n", c.name, c.about)
		}
		fmt.Printf("\nThe flags of a command: %s COMMAND --help\n", program)
		return nil
	}
	var names []string
	for _, c := range commands {
		if c.name == args[0] {
			return c.run(ctx, args[1:])
		}
		names = append(names, c.name)
	}
	return fmt.Errorf("%w: unknown command %q%s", errUsage, args[0], node.Suggest(args[0], names))
}

// parse parses flags of a command without other arguments.
func parse(set *flag.FlagSet, args []string) error {
	if err := set.Parse(args); errors.Is(err, flag.ErrHelp) {
		return err
	} else if err != nil {
		return fmt.Errorf("%w: see kvasird %s --help", errUsage, set.Name())
	}
	if set.NArg() > 0 {
		return fmt.Errorf("%w: kvasird %s takes no argument %q", errUsage, set.Name(), set.Arg(0))
	}
	return nil
}

// configure reads the settings of a command from its flags and the file.
func configure(name string, args []string) (node.Config, error) {
	set := flag.NewFlagSet(name, flag.ContinueOnError)
	load := node.ConfigFlags(set)
	if err := parse(set, args); err != nil {
		return node.Config{}, err
	}
	return load()
}

func run(ctx context.Context, args []string) error {
	cfg, err := configure("run", args)
	if err != nil {
		return err
	}
	log, err := node.OpenLog(cfg.Log, os.Stderr)
	if err != nil {
		return err
	}
	defer log.Close()
	return node.Run(ctx, cfg, log.Logger, func(n *node.Node) {
		for _, a := range n.Addrs() {
			fmt.Println("peers reach this node at", a)
		}
		if http := n.HTTPAddr(); http != "" {
			fmt.Printf("clients reach it at http://%s/v1\n", http)
		}
	})
}

func doctor(ctx context.Context, args []string) error {
	cfg, err := configure("doctor", args)
	if err != nil {
		return err
	}
	ok, err := node.WriteFindings(os.Stdout, node.ExamineHere(ctx, cfg))
	if err == nil && !ok {
		err = errors.New("something is to be fixed, see above")
	}
	return err
}

func probe(_ context.Context, args []string) error {
	if err := parse(flag.NewFlagSet("probe", flag.ContinueOnError), args); err != nil {
		return err
	}
	return node.ServeProbe(os.Stdin, os.Stdout)
}

func version(_ context.Context, args []string) error {
	if err := parse(flag.NewFlagSet("version", flag.ContinueOnError), args); err != nil {
		return err
	}
	fmt.Println("kvasird", node.Version, node.RuntimePack())
	return nil
}

func demo(ctx context.Context, args []string) error {
	set := flag.NewFlagSet("demo", flag.ContinueOnError)
	if err := parse(set, args); err != nil {
		return err
	}
	return node.Demo(ctx, os.Stdout)
}

func bench(ctx context.Context, args []string) error {
	if len(args) > 0 && args[0] == "worker" {
		set := flag.NewFlagSet("bench worker", flag.ContinueOnError)
		opts := node.BenchWorkerFlags(set)
		if err := parse(set, args[1:]); err != nil {
			return err
		}
		return node.BenchWorker(ctx, opts, os.Stdout)
	}
	set := flag.NewFlagSet("bench", flag.ContinueOnError)
	opts := node.BenchFlags(set)
	if err := parse(set, args); err != nil {
		return err
	}
	return node.Bench(ctx, opts, os.Stdout)
}

func verifyBackends(ctx context.Context, args []string) error {
	set := flag.NewFlagSet("verify", flag.ContinueOnError)
	opts := node.VerifyFlags(set)
	if err := parse(set, args); err != nil {
		return err
	}
	return node.Verify(ctx, opts, os.Stdout, os.Stderr)
}
