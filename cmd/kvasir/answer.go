package main

import (
	"fmt"
	"io"
	"os"
	"strings"

	"golang.org/x/term" // whether a file is a terminal: no part of the standard library says

	"kvasird/node/api"
)

// isTerminal reports whether a console's reader or writer is one.
func isTerminal(v any) bool {
	f, ok := v.(*os.File)
	return ok && term.IsTerminal(int(f.Fd()))
}

// isDumb reports whether the terminal cannot move its cursor.
func isDumb() bool {
	t := os.Getenv("TERM")
	return t == "" || t == "dumb"
}

// style marks text where the terminal can show it. The zero value marks none.
type style struct{ on bool }

// styleOf is the style for a writer, as https://no-color.org wants it.
func styleOf(w io.Writer) style {
	return style{isTerminal(w) && !isDumb() && os.Getenv("NO_COLOR") == ""}
}

const (
	dimOn  = "\x1b[2m"
	boldOn = "\x1b[1m"
	allOff = "\x1b[0m"
)

func (s style) mark(on, text string) string {
	if !s.on || text == "" {
		return text
	}
	return on + text + allOff
}

func (s style) dim(text string) string  { return s.mark(dimOn, text) }
func (s style) bold(text string) string { return s.mark(boldOn, text) }

// answerWriter prints an answer as it comes. Reasoning goes to thoughts, marked
// by its style, or by words where there is none.
type answerWriter struct {
	out      io.Writer
	thoughts io.Writer // nil: a line on notes says that there is some
	notes    io.Writer
	style    style

	open     bool // the last line is not ended
	thinking bool
	noted    bool
}

func (a *answerWriter) text(s string) error {
	if s == "" {
		return nil
	}
	if a.thinking {
		a.end()
		a.thinking = false
		if !a.style.on {
			fmt.Fprintln(a.out, "(answer)")
		}
	}
	return a.write(a.out, s, plain(s))
}

func (a *answerWriter) reasoning(s string) error {
	switch {
	case s == "":
		return nil
	case a.thoughts == nil:
		if !a.noted {
			fmt.Fprintln(a.notes, "(the model thinks first)")
		}
		a.noted = true
		return nil
	case !a.thinking:
		a.end()
		a.thinking = true
		if !a.style.on {
			fmt.Fprintln(a.thoughts, "(thinking)")
		}
	}
	return a.write(a.thoughts, s, a.style.dim(plain(s)))
}

func (a *answerWriter) write(w io.Writer, s, shown string) error {
	a.open = !strings.HasSuffix(s, "\n")
	_, err := io.WriteString(w, shown)
	return err
}

// end ends a line that was begun.
func (a *answerWriter) end() {
	if a.open {
		io.WriteString(a.out, "\n")
	}
	a.open = false
}

// answerStats is what one answer took.
type answerStats struct {
	api.AskDone
	cached *int // tokens of the prompt that were not computed again; nil: not told
}

func (s answerStats) String() string {
	cached := ""
	if s.cached != nil {
		cached = fmt.Sprintf(", %d of them cached", *s.cached)
	}
	return fmt.Sprintf("%d tokens, %s tokens/s, first token after %.3f s; prompt %d tokens%s; ended by %s",
		s.Tokens, speed(s.TokensPerSecond()), s.FirstTokenSec, s.PromptTokens, cached, s.Finish)
}

func speed(perSecond float64) string {
	if perSecond <= 0 {
		return "-"
	}
	return fmt.Sprintf("%.1f", perSecond)
}

// sessionStats sums answers.
type sessionStats struct {
	told, untold           int // answers whose tokens were told, and others
	tokens, prompt, cached int
	cachedTold             bool
	first, after           float64 // seconds to the first tokens, and from them to the last
	timed                  int     // tokens in after
}

func (s *sessionStats) add(a answerStats) {
	s.told++
	s.tokens += a.Tokens
	s.prompt += a.PromptTokens
	s.first += a.FirstTokenSec
	if a.TokensPerSecond() > 0 {
		s.timed += a.Tokens - 1
		s.after += a.Seconds - a.FirstTokenSec
	}
	if a.cached != nil {
		s.cached, s.cachedTold = s.cached+*a.cached, true
	}
}

func (s *sessionStats) String() string {
	if s.told == 0 {
		return counted(s.untold) + " whose tokens were not told"
	}
	average := 0.0
	if s.after > 0 {
		average = float64(s.timed) / s.after
	}
	text := fmt.Sprintf("%s, %d tokens, %s tokens/s, first token after %.3f s on average; prompts %d tokens",
		counted(s.told), s.tokens, speed(average), s.first/float64(s.told), s.prompt)
	if s.cachedTold {
		text += fmt.Sprintf(", %d of them cached", s.cached)
	}
	if s.untold > 0 {
		text += fmt.Sprintf("; and %d whose tokens were not told", s.untold)
	}
	return text
}

func counted(answers int) string {
	if answers == 1 {
		return "1 answer"
	}
	return fmt.Sprintf("%d answers", answers)
}
