package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"text/tabwriter"

	"kvasird/market/sim"
)

// simulate plays scenarios of the economics, and prints and draws what comes of them.
func simulate(ctx context.Context, c console, f *flags) error {
	list := f.Bool("list", false, "print the scenarios and what they are about, play none")
	every := f.Int("every", 0, "print a line for each so many `days` too; 0: only the result")
	svg := f.String("svg", "", "draw each into a file SCENARIO.svg in this `folder`, which has to exist")
	names, err := f.parse(c)
	if err != nil {
		return err
	}
	if *every < 0 {
		return usagef("--every %d: want 0 or more days", *every)
	}
	scenarios := sim.Scenarios()
	if len(names) > 0 {
		scenarios = nil
	}
	for _, name := range names {
		s, err := sim.Find(name)
		if err != nil {
			return usagef("%w. See `kvasir sim --list`", err)
		}
		scenarios = append(scenarios, s)
	}
	if *list {
		t := tabwriter.NewWriter(c.out, 0, 0, 2, ' ', 0)
		for _, s := range scenarios {
			fmt.Fprintf(t, "%s\t%s\n", s.Name, s.About)
		}
		return t.Flush()
	}
	var results []*sim.Result
	for _, s := range scenarios {
		if err := ctx.Err(); err != nil {
			return err
		}
		r, err := sim.Run(s)
		if err != nil {
			return err
		}
		results = append(results, r)
		if err := show(c, r, *every, *svg); err != nil {
			return err
		}
	}
	return sim.Table(c.out, results)
}

// show prints the days of a result and draws it, where that is asked for.
func show(c console, r *sim.Result, every int, folder string) error {
	if every > 0 {
		fmt.Fprintf(c.out, "%s: %s\n", r.Scenario.Name, r.Scenario.About)
		if err := sim.Days(c.out, r, every); err != nil {
			return err
		}
		fmt.Fprintln(c.out)
	}
	if folder == "" {
		return nil
	}
	path := filepath.Join(folder, r.Scenario.Name+".svg")
	file, err := os.Create(path)
	if err != nil {
		return fmt.Errorf("draw %s: %w", r.Scenario.Name, err)
	}
	if err := sim.SVG(file, r); err != nil {
		file.Close()
		return fmt.Errorf("draw %s: %w", path, err)
	}
	return file.Close()
}
