package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"time"
)

// sibling runs kvasird with a command and all arguments as they are: its flags
// are its own. It is the binary beside this one, else the one in PATH.
func sibling(name string) func(context.Context, console, *flags) error {
	return func(ctx context.Context, c console, f *flags) error {
		path, err := siblingPath()
		if err != nil {
			return err
		}
		cmd := exec.CommandContext(ctx, path, append([]string{name}, f.args...)...)
		cmd.Stdin, cmd.Stdout, cmd.Stderr = c.in, c.out, c.err
		// Ctrl-C reaches the child by itself; it gets time to clean up.
		cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
		cmd.WaitDelay = 10 * time.Second
		var exit *exec.ExitError
		err = cmd.Run()
		if errors.As(err, &exit) && exit.ExitCode() > 0 {
			return said(exit.ExitCode())
		}
		if err != nil {
			return fmt.Errorf("kvasird %s: %w", name, err)
		}
		return nil
	}
}

// said is the exit status of a sibling that has printed its error already.
type said int

func (s said) Error() string { return fmt.Sprintf("exit status %d", int(s)) }

func siblingPath() (string, error) {
	self, err := os.Executable()
	if err != nil {
		return "", err
	}
	beside := filepath.Join(filepath.Dir(self), "kvasird")
	if _, err := os.Stat(beside); err == nil {
		return beside, nil
	}
	path, err := exec.LookPath("kvasird")
	if err != nil {
		return "", fmt.Errorf("kvasird is neither at %s nor in PATH: build it with make build", beside)
	}
	return path, nil
}

// version prints the commit that this binary was built from.
func version(_ context.Context, c console, f *flags) error {
	if err := f.parseNone(c); err != nil {
		return err
	}
	commit, dirty := "unknown", ""
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, s := range info.Settings {
			switch {
			case s.Key == "vcs.revision":
				commit = s.Value[:min(12, len(s.Value))]
			case s.Key == "vcs.modified" && s.Value == "true":
				dirty = "+changes"
			}
		}
	}
	_, err := fmt.Fprintf(c.out, "kvasir %s%s %s %s/%s\n", commit, dirty, runtime.Version(), runtime.GOOS, runtime.GOARCH)
	return err
}
