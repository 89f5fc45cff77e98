package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// turn is a question and what was answered.
type turn struct {
	question, answer string
	cut              bool // the answer was stopped, or broke off
}

// conversation is what the model is told with each question.
type conversation struct {
	system string
	turns  []turn
	// unanswered is the last question if nothing at all came back. It is not
	// told to the model: many chat templates refuse two questions in a row.
	unanswered string
}

// messages is the conversation with a new question.
func (c *conversation) messages(turns []turn, question string) []chatMessage {
	var list []chatMessage
	if c.system != "" {
		list = append(list, chatMessage{"system", c.system})
	}
	for _, t := range turns {
		list = append(list, chatMessage{"user", t.question}, chatMessage{"assistant", t.answer})
	}
	return append(list, chatMessage{"user", question})
}

// again returns the last question and the turns before it.
func (c *conversation) again() (question string, before []turn, ok bool) {
	if c.unanswered != "" {
		return c.unanswered, c.turns, true
	}
	n := len(c.turns)
	if n == 0 {
		return "", nil, false
	}
	return c.turns[n-1].question, c.turns[:n-1], true
}

// markdown is the conversation as a text for people.
func (c *conversation) markdown(model string) string {
	var b strings.Builder
	fmt.Fprintf(&b, "# Conversation with %s\n", model)
	if c.system != "" {
		fmt.Fprintf(&b, "\n## System\n\n%s\n", c.system)
	}
	for _, t := range c.turns {
		fmt.Fprintf(&b, "\n## Question\n\n%s\n\n## Answer\n\n%s\n", t.question, t.answer)
		if t.cut {
			b.WriteString("\n(cut here)\n")
		}
	}
	if c.unanswered != "" {
		fmt.Fprintf(&b, "\n## Question\n\n%s\n\n(not answered)\n", c.unanswered)
	}
	return b.String()
}

// save writes the conversation to a new file that only its owner reads. A
// leading ~/ is the home folder.
func (c *conversation) save(name, model string) (path string, err error) {
	if rest, ok := strings.CutPrefix(name, "~/"); ok {
		home, err := os.UserHomeDir()
		if err != nil {
			return "", err
		}
		name = filepath.Join(home, rest)
	}
	f, err := os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if os.IsExist(err) {
		return "", fmt.Errorf("%s is there already: name another file", name)
	}
	if err != nil {
		return "", err
	}
	_, err = f.WriteString(c.markdown(model))
	if e := f.Close(); err == nil {
		err = e
	}
	return name, err
}
