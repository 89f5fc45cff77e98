package main

import (
	"context"
	"flag"
	"fmt"
	"os"

	"kvasird/node"
)

// plan takes the model to plan for; without one, the node's.
func plan(ctx context.Context, args []string) error {
	set := flag.NewFlagSet("plan", flag.ContinueOnError)
	load := node.ConfigFlags(set)
	opts := node.PlanFlags(set)
	rest, err := parseAny(set, args)
	if err != nil {
		return err
	}
	if len(rest) > 1 {
		return fmt.Errorf("%w: kvasird plan takes one MODEL, got %q", errUsage, rest)
	}
	cfg, err := load()
	if err != nil {
		return err
	}
	model := ""
	if len(rest) == 1 {
		model = rest[0]
	}
	return node.PlanModel(ctx, cfg, *opts, model, os.Stdout)
}
