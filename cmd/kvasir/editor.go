package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"unicode/utf8"

	// The kept fork of chzyer/readline: history search, completion and wide
	// characters, which x/term lacks, without a screen of its own.
	"github.com/ergochat/readline"
)

// editor reads lines that a person edits at a terminal.
type editor struct {
	rl      *readline.Instance
	screen  *screen
	history *history // nil: none is kept
	style   style
	written bool // since the line began
}

// completer lists the lines that Tab completes to.
type completer func() []string

// Do returns the rests of the lines that begin as this one does.
func (c completer) Do(line []rune, pos int) (rests [][]rune, length int) {
	begun := string(line[:pos])
	for _, whole := range c() {
		if rest, ok := strings.CutPrefix(whole, begun); ok && begun != "" {
			rests = append(rests, []rune(rest))
		}
	}
	return rests, pos
}

// newEditor takes the terminal of stdin and stdout.
func newEditor(in io.Reader, out io.Writer, h *history, st style, complete completer) (*editor, error) {
	e := &editor{screen: newScreen(in, out), history: h, style: st}
	rl, err := readline.NewFromConfig(&readline.Config{
		Stdin: e.screen, Stdout: e.screen, Stderr: e.screen,
		AutoComplete: complete,
		HistoryLimit: maxHistoryLines, Undo: true,
		Listener: func(line []rune, pos int, _ rune) ([]rune, int, bool) {
			if line == nil { // the terminal is in raw mode now: Ctrl-C is a key, no signal
				io.WriteString(out, pasteOn)
			}
			e.written = len(line) > 0
			return nil, 0, false
		},
	})
	if err != nil {
		return nil, fmt.Errorf("take the terminal: %w", err)
	}
	e.rl = rl
	if h != nil {
		for _, line := range h.lines {
			if err := rl.SaveToHistory(line); err != nil {
				return nil, err
			}
		}
	}
	return e, nil
}

func (e *editor) line(ctx context.Context, more bool) (string, error) {
	e.rl.SetPrompt(e.style.bold(promptText(more)))
	stop := context.AfterFunc(ctx, func() { e.rl.Close() })
	defer stop()
	line, err := e.rl.ReadLine()
	io.WriteString(e.screen.out, pasteOff)
	switch {
	case ctx.Err() != nil:
		return "", ctx.Err()
	case errors.Is(err, readline.ErrInterrupt) && e.written:
		return "", errDiscarded
	case errors.Is(err, readline.ErrInterrupt):
		return "", errEmptied
	case err != nil:
		return "", err
	}
	whole := e.screen.expand(line)
	if e.history != nil && whole == line {
		if err := e.history.add(line); err != nil {
			e.history = nil
			fmt.Fprintln(e.screen.out, e.style.dim(plain(fmt.Sprintf("(the history is kept no more: %v)", err))))
		}
	}
	return whole, nil
}

func (e *editor) Close() error {
	if e.history != nil {
		e.history.Close()
	}
	return e.rl.Close()
}

// What a terminal is told and tells around pasted text.
const (
	pasteOn    = "\x1b[?2004h"
	pasteOff   = "\x1b[?2004l"
	pasteBegin = "\x1b[200~"
	pasteEnd   = "\x1b[201~"
)

// Limits of pasted text, in bytes. A longer paste is cut; as many last ones as
// fit are kept for the lines that name them.
const (
	maxPaste    = 4 << 20
	maxPastes   = 16 << 20
	inlinePaste = 1000 // and no line end: shown as it is
)

// screen is the terminal as the line editor sees it. Pasted text that has
// several lines, or is long, becomes one mark in the line, so that it is not
// taken for several messages. And the editor's question where the cursor is
// (which a terminal need not answer, and the editor would wait for ever) is
// answered here: a prompt always begins a line.
type screen struct {
	in  io.Reader
	out io.Writer

	mu      sync.Mutex // guards what is below
	answers []byte     // for the editor to read before anything else
	held    []byte     // read, and not given to the editor yet
	pasting bool
	ended   bool // nothing more will be read
	paste   []byte
	pastes  map[string]string // by their marks
	marks   []string          // of pastes, the oldest first
	size    int               // of pastes
	made    int
}

func newScreen(in io.Reader, out io.Writer) *screen {
	return &screen{in: in, out: out, pastes: map[string]string{}}
}

const (
	whereAsked  = "\x1b[6n"
	whereAnswer = "\x1b[1;1R"
)

func (s *screen) Write(p []byte) (int, error) {
	if string(p) != whereAsked {
		return s.out.Write(p)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.answers = append(s.answers, whereAnswer...)
	return len(p), nil
}

func (s *screen) Read(p []byte) (int, error) {
	for buf := make([]byte, 4096); ; {
		if n := s.give(p); n > 0 {
			return n, nil
		}
		n, err := s.in.Read(buf)
		s.take(buf[:n], err)
		if err == nil {
			continue
		}
		if n := s.give(p); n > 0 {
			return n, nil // and the error when it is read again
		}
		return 0, err
	}
}

// give hands out what the editor may have now.
func (s *screen) give(p []byte) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.answers) > 0 {
		n := copy(p, s.answers)
		s.answers = s.answers[n:]
		return n
	}
	ready := len(s.held)
	for i := ready - 1; !s.pasting && !s.ended && i >= max(0, len(s.held)-len(pasteBegin)+1); i-- {
		if strings.HasPrefix(pasteBegin, string(s.held[i:])) {
			ready = i // the rest of the sequence may be to come; the editor, too, would wait for it
		}
	}
	n := copy(p, s.held[:ready])
	s.held = s.held[n:]
	return n
}

// take sorts what was read into keys and pasted text.
func (s *screen) take(data []byte, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ended = err != nil
	for len(data) > 0 {
		if s.pasting {
			data = s.takePasteLocked(data)
			continue
		}
		s.held = append(s.held, data...)
		before, after, found := bytes.Cut(s.held, []byte(pasteBegin))
		if !found {
			return
		}
		data = bytes.Clone(after)
		s.held, s.pasting = before, true
	}
}

// takePasteLocked returns what follows the paste, if it ends in data.
func (s *screen) takePasteLocked(data []byte) (rest []byte) {
	from := max(0, len(s.paste)-len(pasteEnd)+1)
	s.paste = append(s.paste, data...)
	end := bytes.Index(s.paste[from:], []byte(pasteEnd))
	if end < 0 {
		const most = maxPaste + 1              // so that it shows as too long
		if len(s.paste) > most+len(pasteEnd) { // keep the tail, where the end may begin
			s.paste = append(s.paste[:most], s.paste[len(s.paste)-len(pasteEnd):]...)
		}
		return nil
	}
	rest = bytes.Clone(s.paste[from+end+len(pasteEnd):])
	text, cut := s.paste[:from+end], ""
	if len(text) > maxPaste {
		text, cut = text[:maxPaste], ", cut"
	}
	s.held = append(s.held, s.shownLocked(strings.ToValidUTF8(string(text), string(utf8.RuneError)), cut)...)
	s.paste, s.pasting = nil, false
	return rest
}

// shownLocked is what stands for pasted text in the line. note is added to a mark.
func (s *screen) shownLocked(text, note string) string {
	text = strings.ReplaceAll(strings.ReplaceAll(text, "\r\n", "\n"), "\r", "\n")
	if !strings.ContainsAny(text, "\n\t") && len(text) <= inlinePaste {
		return plain(text)
	}
	s.made++
	mark := fmt.Sprintf("[paste %d: %d lines, %d bytes%s]", s.made, strings.Count(text, "\n")+1, len(text), note)
	s.pastes[mark], s.marks = text, append(s.marks, mark)
	for s.size += len(text); s.size > maxPastes; s.marks = s.marks[1:] {
		s.size -= len(s.pastes[s.marks[0]])
		delete(s.pastes, s.marks[0])
	}
	return mark
}

// expand puts pasted texts back in the place of their marks.
func (s *screen) expand(line string) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	var swaps []string
	for mark, text := range s.pastes {
		swaps = append(swaps, mark, text)
	}
	return strings.NewReplacer(swaps...).Replace(line)
}
