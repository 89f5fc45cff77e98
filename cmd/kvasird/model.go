package main

import (
	"context"
	"flag"
	"fmt"
	"os"

	"kvasird/node"
)

var modelCommands = []command{
	{"add", "FILE…: take a whole GGUF model in, which stays where it is; peers can fetch it from here", modelAdd},
	{"list", "show the models in the store", modelOf("list")},
	{"verify", "MODEL: hash again what is held, and drop what is wrong", modelOf("verify", "MODEL")},
	{"remove", "MODEL: delete it from the store; files that were added stay where they are", modelOf("remove", "MODEL")},
	{"pin", "MODEL: keep it, however scarce room is", modelOf("pin", "MODEL")},
	{"unpin", "MODEL: let it be dropped to make room", modelOf("unpin", "MODEL")},
}

func model(ctx context.Context, args []string) error {
	return choose(ctx, "kvasird model", "Kvasird model shows and changes the store of models. MODEL is a name, an id, or the beginning of one.", modelCommands, args)
}

// modelOf runs an action that takes the named arguments.
func modelOf(action string, names ...string) func(context.Context, []string) error {
	return func(ctx context.Context, args []string) error {
		set := flag.NewFlagSet("model "+action, flag.ContinueOnError)
		load := node.ConfigFlags(set)
		rest, err := parseMixed(set, args, names...)
		if err != nil {
			return err
		}
		return manageModels(ctx, load, action, rest)
	}
}

func modelAdd(ctx context.Context, args []string) error {
	set := flag.NewFlagSet("model add", flag.ContinueOnError)
	load := node.ConfigFlags(set)
	rest, err := parseAny(set, args)
	if err != nil {
		return err
	}
	if len(rest) == 0 {
		return fmt.Errorf("%w: kvasird model add takes the FILE of a model, or all of its parts", errUsage)
	}
	return manageModels(ctx, load, "add", rest)
}

func manageModels(ctx context.Context, load func() (node.Config, error), action string, args []string) error {
	cfg, err := load()
	if err != nil {
		return err
	}
	return node.ManageModels(ctx, cfg, action, args, os.Stdout, os.Stderr)
}
