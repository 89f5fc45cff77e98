package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"text/tabwriter"

	"kvasird/node/api"
)

// chatCommand is a line that begins with a slash.
type chatCommand struct {
	name, args, about string
	run               func(c *chat, ctx context.Context, arg string) error
}

func chatCommands() []chatCommand {
	return []chatCommand{
		{"help", "", "this list", (*chat).help},
		{"model", "[NAME]", "list the models, or go on with another one", (*chat).switchModel},
		{"system", "[TEXT]", "show the system prompt, or set it (- for none)", (*chat).setSystem},
		{"stats", "", "tokens and speed of the last answer and of all", (*chat).stats},
		{"retry", "", "ask the last question again", (*chat).retry},
		{"clear", "", "forget the conversation; the model and the system prompt stay", (*chat).clear},
		{"save", "FILE", "write the conversation to a new file, as Markdown", (*chat).saveTo},
		{"quit", "", "end", func(*chat, context.Context, string) error { return errQuit }},
	}
}

// command carries out a line that begins with a slash.
func (c *chat) command(ctx context.Context, line string) error {
	name, arg, _ := strings.Cut(line[1:], " ")
	var known []string
	for _, cmd := range chatCommands() {
		known = append(known, cmd.name)
		if arg = strings.TrimSpace(arg); cmd.name == name {
			switch {
			case cmd.args == "" && arg != "":
				return fmt.Errorf("/%s takes nothing, got %q", name, arg)
			case cmd.args != "" && cmd.args[0] != '[' && arg == "":
				return fmt.Errorf("/%s takes a %s", name, cmd.args)
			}
			return cmd.run(c, ctx, arg)
		}
	}
	mean := "/help lists them"
	if near := api.Nearest(name, known); near != "" {
		mean = fmt.Sprintf("did you mean /%s?", near)
	}
	return fmt.Errorf(`no command /%s: %s (a message that begins with a slash goes between """)`, name, mean)
}

func (c *chat) help(context.Context, string) error {
	t := tabwriter.NewWriter(c.out, 0, 0, 2, ' ', 0)
	for _, cmd := range chatCommands() {
		fmt.Fprintf(t, "/%s %s\t%s\n", cmd.name, cmd.args, cmd.about)
	}
	fmt.Fprint(t, "\nA line that ends with \\ goes on in the next one; \"\"\" begins and ends a message of several lines.\n",
		"Ctrl-C stops an answer or empties the line, Ctrl-R searches what was written before, Ctrl-D ends.\n")
	return t.Flush()
}

func (c *chat) switchModel(ctx context.Context, name string) (err error) {
	ctx, done := c.stoppable(ctx)
	defer done()
	if name != "" {
		found, err := c.g.model(ctx, name)
		if err == nil {
			c.model = found
			c.note("going on with %s", found)
		}
		return err
	}
	if c.known, err = c.g.models(ctx); err != nil {
		return err
	}
	for _, m := range c.known {
		mark := "  "
		if m == c.model {
			mark = "* "
		}
		fmt.Fprintln(c.out, mark+plain(m))
	}
	return nil
}

func (c *chat) setSystem(_ context.Context, text string) error {
	switch text {
	case "":
		if c.system == "" {
			c.note("there is no system prompt")
			return nil
		}
		_, err := fmt.Fprintln(c.out, plain(c.system))
		return err
	case "-":
		text = ""
	}
	c.system = text
	return nil
}

func (c *chat) stats(context.Context, string) error {
	if c.session.told+c.session.untold == 0 {
		c.note("nothing was answered yet")
		return nil
	}
	last := "not told, since it was stopped or broke off"
	if c.last != nil {
		last = c.last.String()
	}
	_, err := fmt.Fprintf(c.out, "last  %s\nall   %v\n", plain(last), &c.session)
	return err
}

func (c *chat) retry(ctx context.Context, _ string) error {
	question, before, ok := c.again()
	if !ok {
		return errors.New("nothing was asked yet")
	}
	return c.ask(ctx, question, before)
}

func (c *chat) clear(context.Context, string) error {
	c.turns, c.unanswered = nil, ""
	c.note("forgotten")
	return nil
}

func (c *chat) saveTo(_ context.Context, name string) error {
	path, err := c.save(name, c.model)
	if err == nil {
		c.note("saved to %s", path)
	}
	return err
}

// complete lists the commands, and the models that are known by a name that a terminal can show.
func (c *chat) complete() (lines []string) {
	for _, cmd := range chatCommands() {
		lines = append(lines, "/"+cmd.name)
	}
	for _, m := range c.known {
		if oneLine(plain(m)) == m {
			lines = append(lines, "/model "+m)
		}
	}
	return lines
}
