package main

import (
	"context"
	"fmt"
)

// pause starts or ends a pause of the daemon.
func pause(paused bool) func(context.Context, console, *flags) error {
	return func(ctx context.Context, c console, f *flags) error {
		f.daemonFlags()
		daemon, err := f.parseForDaemon(c)
		if err != nil {
			return err
		}
		result, err := daemon.Pause(ctx, paused)
		if err != nil {
			return err
		}
		state := "The node works for others again."
		if result.Paused {
			state = "The node takes nothing new. `kvasir resume` ends the pause."
		}
		fmt.Fprintln(c.out, state)
		if result.Note != "" {
			fmt.Fprintln(c.out, plain(result.Note))
		}
		return nil
	}
}
