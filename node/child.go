package node

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"kvasird/node/api"
	"kvasird/node/client"
)

// child is a daemon in a process of its own: for the demo and benchmarks.
type child struct {
	name   string
	dir    string // its data folder
	cmd    *exec.Cmd
	exited chan struct{}
	err    error // of the process, once exited is closed

	mu    sync.Mutex // guards words
	words bytes.Buffer
}

// startChild runs `kvasird run` with these flags beside --data.
// The process dies with this one, however that ends.
func startChild(dir, name string, args ...string) (*child, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	return startProgram([]string{self}, dir, name, args...)
}

// startProgram is startChild for another kvasird and what runs it.
func startProgram(program []string, dir, name string, args ...string) (*child, error) {
	c := &child{name: name, dir: filepath.Join(dir, name), exited: make(chan struct{})}
	args = slices.Concat(program[1:], []string{"run", "--data", c.dir}, args)
	c.cmd = exec.Command(program[0], args...)
	c.cmd.Stderr = c
	c.cmd.SysProcAttr = dieWithParent(syscall.SIGTERM)
	if err := c.cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	go func() {
		c.err = c.cmd.Wait()
		close(c.exited)
	}()
	return c, nil
}

// Write keeps the last words of the process.
func (c *child) Write(p []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.words.Write(p)
	if extra := c.words.Len() - 16<<10; extra > 0 {
		c.words.Next(extra)
	}
	return len(p), nil
}

func (c *child) lastWords() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	lines := strings.Split(strings.TrimSpace(c.words.String()), "\n")
	return strings.Join(lines[max(0, len(lines)-5):], "\n")
}

func (c *child) client() *client.Client {
	return client.New(filepath.Join(c.dir, api.SocketName))
}

// await polls the daemon until good is true of its status.
func (c *child) await(ctx context.Context, good func(*api.Status) bool) (*api.Status, error) {
	last := errors.New("no answer yet")
	for {
		st, err := c.client().Status(ctx)
		switch {
		case err != nil:
			last = err
		case good(st):
			return st, nil
		case st.Reason != "":
			last = errors.New(st.Reason)
		}
		select {
		case <-c.exited:
			return nil, fmt.Errorf("%s ended: %v\n%s", c.name, c.err, c.lastWords())
		case <-ctx.Done():
			return nil, fmt.Errorf("%s: %w (%v)\n%s", c.name, ctx.Err(), last, c.lastWords())
		case <-time.After(20 * time.Millisecond):
		}
	}
}

func serving(st *api.Status) bool { return st.State == api.StateServing }

// stop asks the process to end, and makes it after a while.
func (c *child) stop() error {
	c.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-c.exited:
	case <-time.After(stopTime):
		c.cmd.Process.Kill()
		<-c.exited
		return fmt.Errorf("%s had to be killed\n%s", c.name, c.lastWords())
	}
	if c.err != nil {
		return fmt.Errorf("%s: %w\n%s", c.name, c.err, c.lastWords())
	}
	return nil
}

// family is a set of children that end together.
type family struct{ list []*child }

func (f *family) start(dir, name string, args ...string) (*child, error) {
	c, err := startChild(dir, name, args...)
	if err == nil {
		f.list = append(f.list, c)
	}
	return c, err
}

// stop ends all, the last one first.
func (f *family) stop() error {
	var errs []error
	for i := len(f.list) - 1; i >= 0; i-- {
		errs = append(errs, f.list[i].stop())
	}
	return errors.Join(errs...)
}

// localAddr is the TCP address among a daemon's listen addresses.
func localAddr(st *api.Status) string {
	for _, a := range st.Listen {
		if strings.Contains(a, "/tcp/") {
			return a
		}
	}
	return ""
}

// askTokens asks and returns the token ids, writing the text to w as it comes.
func askTokens(ctx context.Context, c *client.Client, req api.AskRequest, w io.Writer) ([]int32, api.AskDone, error) {
	var ids []int32
	done, err := c.Ask(ctx, req, func(ev api.AskEvent) error {
		ids = append(ids, ev.IDs...)
		_, err := io.WriteString(w, ev.Text)
		return err
	})
	return ids, done, err
}
