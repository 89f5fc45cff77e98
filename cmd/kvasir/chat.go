package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/signal"
	"slices"
	"strings"
	"time"

	"kvasird/node/api"
	"kvasird/node/client"
)

// chat is a conversation at a terminal, or of a script, which writes a message a
// line and gets the answers alone on stdout.
type chat struct {
	conversation
	g     *gateway
	model string
	known []string // models, as last listed
	how   chatRequest

	in         liner
	out        io.Writer
	notes      io.Writer // what is neither an answer nor the result of a command
	style      style
	terminal   bool // somebody writes, and sees what the program says
	thoughts   io.Writer
	showStats  bool
	interrupts <-chan os.Signal // Ctrl-C; nil without a terminal: there it ends the program

	last    *answerStats
	session sessionStats
}

// runChat is `kvasir chat`.
func runChat(ctx context.Context, c console, f *flags) error {
	f.daemonFlags()
	address := f.String("url", "", "`address` of the gateway of another node (default: this machine's daemon)")
	key := f.String("key", "", "API `key` (default: $KVASIR_API_KEY, where other users do not see it)")
	stats := f.Bool("stats", false, "print tokens, tokens/s and the time to the first token after each answer")
	forget := f.Bool("no-history", false, "neither read nor keep the history of what is written")
	how := f.answerFlags()
	rest, err := f.parse(c)
	if err != nil {
		return err
	}
	if len(rest) > 1 {
		return usagef("%s takes one MODEL, got %d. See `%s --help`", f.Name(), len(rest), f.Name())
	}
	ch := &chat{
		out: c.out, notes: c.err, terminal: isTerminal(c.in), showStats: *stats,
		conversation: conversation{system: how.system}, how: sampling(f, how),
	}
	ctx, stop := ch.watchInterrupts(ctx)
	defer stop()
	if err := ch.begin(ctx, *address, *key, f.daemon, strings.Join(rest, "")); err != nil {
		return err
	}
	if err := ch.open(c, !*forget); err != nil {
		return err
	}
	return errors.Join(ch.loop(ctx), ch.in.Close())
}

// sampling holds the flags that were given; the others are the gateway's to choose.
func sampling(f *flags, how *answerFlags) (req chatRequest) {
	f.Visit(func(fl *flag.Flag) {
		switch fl.Name {
		case "max-tokens":
			req.MaxTokens = &how.maxTokens
		case "temperature":
			req.Temperature = &how.temperature
		case "top-p":
			req.TopP = &how.topP
		case "seed":
			req.Seed = &how.seed
		}
	})
	return req
}

// watchInterrupts has Ctrl-C stop an answer at a terminal, and end ctx elsewhere.
func (c *chat) watchInterrupts(ctx context.Context) (context.Context, func()) {
	if !c.terminal {
		return signal.NotifyContext(ctx, os.Interrupt)
	}
	interrupts := make(chan os.Signal, 1)
	signal.Notify(interrupts, os.Interrupt)
	c.interrupts = interrupts
	return ctx, func() { signal.Stop(interrupts) }
}

// begin finds the gateway and the model.
func (c *chat) begin(ctx context.Context, address, key string, daemon func() (*client.Client, error), model string) error {
	ctx, done := c.stoppable(ctx)
	defer done()
	st := new(api.Status)
	if address == "" {
		d, err := daemon()
		if err != nil {
			return err
		}
		if st, err = d.Status(ctx); err != nil {
			if errors.Is(err, client.ErrNoDaemon) {
				err = fmt.Errorf("%w Or name the gateway of another node with --url", err)
			}
			return err
		}
		if address, err = gatewayOf(st); err != nil {
			return err
		}
	}
	if key == "" {
		key = os.Getenv("KVASIR_API_KEY")
	}
	var err error
	if c.g, err = newGateway(address, key); err != nil {
		return err
	}
	if model != "" {
		c.model, err = c.g.model(ctx, model)
		return err
	}
	if c.known, err = c.g.models(ctx); err != nil {
		return err
	}
	switch {
	case len(c.known) == 0 && st.Reason != "":
		return fmt.Errorf("no model answers yet: %s", st.Reason)
	case len(c.known) == 0:
		return fmt.Errorf("%s serves no model now. See `kvasir status` there", c.g.base)
	}
	c.model = c.known[0]
	if st.Model != nil && slices.Contains(c.known, st.Model.Name) {
		c.model = st.Model.Name
	}
	return nil
}

// gatewayOf is where a daemon of this machine answers over HTTP.
func gatewayOf(st *api.Status) (string, error) {
	if st.HTTP == "" {
		return "", errors.New("the daemon answers nothing over HTTP: start it with the role entry and without `--http off`, or name the gateway of another node with --url")
	}
	host, port, err := net.SplitHostPort(st.HTTP)
	if err != nil {
		return "", fmt.Errorf("the daemon says that it answers at %q: %w", st.HTTP, err)
	}
	if ip := net.ParseIP(host); ip != nil && ip.IsUnspecified() {
		host = "127.0.0.1"
	}
	return net.JoinHostPort(host, port), nil
}

// open makes ready to read: with a line editor where the terminal can do that.
func (c *chat) open(con console, keep bool) error {
	if !c.terminal {
		c.in = newPlainLines(con.in, nil, nil)
		return nil
	}
	if isTerminal(con.out) {
		c.notes, c.thoughts, c.style = con.out, con.out, styleOf(con.out)
	}
	also := ""
	if n := len(c.known) - 1; n > 0 {
		also = fmt.Sprintf("; /model lists %d more", n)
	}
	c.note("%s at %s%s. /help lists the commands; Ctrl-C stops an answer, Ctrl-D ends", c.model, c.g.base, also)
	if !isTerminal(con.out) || isDumb() {
		c.in = newPlainLines(con.in, con.err, c.interrupts)
		return nil
	}
	var h *history
	if keep {
		dir, err := api.DefaultDataDir()
		if err == nil {
			h, err = openHistory(dir)
		}
		if err != nil { // no reason not to talk
			c.note("the history is not kept: %v", err)
		}
	}
	var err error
	c.in, err = newEditor(con.in, con.out, h, c.style, c.complete)
	return err
}

// errStopped means that Ctrl-C stopped an answer.
var errStopped = errors.New("stopped")

// stoppable ends a context with errStopped at Ctrl-C. done must be called.
func (c *chat) stoppable(ctx context.Context) (stopped context.Context, done func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	select {
	case <-c.interrupts: // pressed too late for what was before
	default:
	}
	gone := make(chan struct{})
	go func() {
		defer close(gone)
		select {
		case <-c.interrupts:
			cancel(errStopped)
		case <-ctx.Done():
		}
	}()
	return ctx, func() { cancel(nil); <-gone }
}

var errQuit = errors.New("quit")

// loop takes messages until the end of the input. An error ends a script: what
// follows was written for another conversation.
func (c *chat) loop(ctx context.Context) error {
	for {
		text, literal, err := readMessage(ctx, c.in)
		switch {
		case errors.Is(err, io.EOF):
			return nil
		case errors.Is(err, errDiscarded):
			continue
		case errors.Is(err, errEmptied):
			c.note("Ctrl-D or /quit ends the chat")
			continue
		case err != nil && !errors.Is(err, errTooLong):
			return err
		case err != nil: // and go on
		case strings.TrimSpace(text) == "":
			continue
		case !literal && strings.HasPrefix(text, "/"):
			err = c.command(ctx, text)
		default:
			err = c.ask(ctx, text, c.turns)
		}
		switch {
		case errors.Is(err, errQuit):
			return nil
		case err != nil && (!c.terminal || ctx.Err() != nil):
			return err
		case err != nil:
			c.complain(err)
		}
	}
}

// ask puts a question after the turns before it and prints the answer.
func (c *chat) ask(ctx context.Context, question string, before []turn) error {
	ctx, done := c.stoppable(ctx)
	defer done()
	out := &answerWriter{out: c.out, thoughts: c.thoughts, notes: c.notes, style: c.style}
	req := c.how
	req.Model, req.Messages = c.model, c.messages(before, question)
	var answer strings.Builder
	took := new(stopwatch)
	end, err := c.answer(ctx, req, took, func(text, reasoning string) error {
		took.piece()
		answer.WriteString(text)
		if err := out.reasoning(reasoning); err != nil {
			return err
		}
		return out.text(text)
	})
	out.end()
	if answer.Len() > 0 {
		cut := err != nil || end.finish == "length"
		c.turns, c.unanswered = append(slices.Clip(before), turn{question, answer.String(), cut}), ""
	} else if len(before) == len(c.turns) {
		c.unanswered = question
	}
	if took.begun() {
		c.count(end, took)
	}
	return c.conclude(end, err, answer.Len() > 0)
}

// conclude says what is unusual about the end of an answer.
func (c *chat) conclude(end chatEnd, err error, some bool) error {
	switch {
	case errors.Is(err, errStopped) && some:
		c.note("stopped; what there is of the answer stays in the conversation")
		return nil
	case errors.Is(err, errStopped):
		c.note("stopped. /retry asks again")
		return nil
	case err != nil:
		return err
	case end.finish == "length":
		c.note("cut: the answer has reached its longest length")
	case !some:
		c.note("the model ended without an answer. /retry asks again")
	}
	if c.showStats && c.last != nil {
		c.note("%v", c.last)
	}
	return nil
}

// Waits for a gateway that has too much to do.
const (
	busyWait    = 5 * time.Second // where it does not say how long
	maxBusyWait = 10 * time.Minute
)

// answer asks, and asks again as long as the gateway says to come back later.
func (c *chat) answer(ctx context.Context, req chatRequest, took *stopwatch, on func(text, reasoning string) error) (chatEnd, error) {
	for waited := time.Duration(0); ; {
		took.start()
		end, err := c.g.stream(ctx, req, on)
		var no *refusal
		if !errors.As(err, &no) || no.status != http.StatusTooManyRequests {
			return end, err
		}
		wait := no.retryAfter
		if wait == 0 {
			wait = busyWait
		}
		if waited += wait; waited > maxBusyWait {
			return end, fmt.Errorf("%w. It says to come back in %v", err, wait)
		}
		c.note("%v. Asking again in %v", no, wait)
		select {
		case <-time.After(wait):
		case <-ctx.Done():
			return end, context.Cause(ctx)
		}
	}
}

// stopwatch takes the times of an answer.
type stopwatch struct{ asked, first, last time.Time }

func (s *stopwatch) start()      { *s = stopwatch{asked: time.Now()} }
func (s *stopwatch) begun() bool { return !s.first.IsZero() }

func (s *stopwatch) piece() {
	s.last = time.Now()
	if !s.begun() {
		s.first = s.last
	}
}

// count takes down what an answer took.
func (c *chat) count(end chatEnd, took *stopwatch) {
	c.last = nil
	u := end.usage
	if u == nil {
		c.session.untold++
		return
	}
	c.last = &answerStats{AskDone: api.AskDone{
		Finish: end.finish, PromptTokens: u.Prompt, Tokens: u.Completion,
		FirstTokenSec: took.first.Sub(took.asked).Seconds(), Seconds: took.last.Sub(took.asked).Seconds(),
	}}
	if u.Details != nil {
		c.last.cached = &u.Details.Cached
	}
	c.session.add(*c.last)
}

// note tells a person something in passing.
func (c *chat) note(format string, args ...any) {
	fmt.Fprintln(c.notes, c.style.dim(plain("("+fmt.Sprintf(format, args...)+")")))
}

// complain tells of an error, and what to do.
func (c *chat) complain(err error) {
	next := ""
	var no *refusal
	switch known := errors.As(err, &no); {
	case known && no.code == "context_length_exceeded":
		next = ". /clear starts over"
	case known && no.status == http.StatusNotFound:
		next = ". /model lists what there is"
	case known && (no.status >= 500 || no.status == 0), errors.Is(err, errNoGateway), errors.Is(err, errNoEnd):
		next = ". /retry asks again"
	}
	fmt.Fprintln(c.notes, c.style.bold("error:"), plain(err.Error()+next))
}
