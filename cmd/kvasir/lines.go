package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"kvasird/node/api"
)

// liner gives out what a person or a script writes, line by line.
type liner interface {
	// line returns the next line without its end. more says that it goes on
	// with the message begun before it. The error is io.EOF at the end,
	// errDiscarded or errEmptied when Ctrl-C was pressed.
	line(ctx context.Context, more bool) (string, error)
	// Close gives the terminal back as it was.
	Close() error
}

var (
	errDiscarded = errors.New("Ctrl-C with something written")
	errEmptied   = errors.New("Ctrl-C with nothing written")
	errTooLong   = errors.New("the message is too long")
)

// fence begins and ends a message of several lines.
const fence = `"""`

// readMessage reads a line, or several: a line that ends with a backslash goes
// on in the next one, and what stands between two fences is taken as it is.
// literal says that it stood between fences: it is no command.
func readMessage(ctx context.Context, in liner) (text string, literal bool, err error) {
	line, err := in.line(ctx, false)
	if err != nil {
		return "", false, err
	}
	var b strings.Builder
	rest, literal := strings.CutPrefix(strings.TrimSpace(line), fence)
	if literal {
		line = rest
	}
	for {
		part, more := strings.CutSuffix(line, `\`)
		if literal {
			part, more = strings.CutSuffix(strings.TrimRight(line, " \t"), fence)
			if more = !more; more {
				part = line
			}
		}
		if b.Len()+len(part) > api.MaxRequest {
			return "", false, fmt.Errorf("%w: more than %d bytes", errTooLong, api.MaxRequest)
		}
		b.WriteString(part)
		if !more {
			return strings.Trim(b.String(), "\n"), literal, nil
		}
		b.WriteByte('\n')
		if line, err = in.line(ctx, true); err != nil {
			return "", false, unfinished(err, literal)
		}
	}
}

// unfinished says what an end of input in the middle of a message means.
func unfinished(err error, literal bool) error {
	switch {
	case errors.Is(err, errEmptied):
		return errDiscarded
	case !errors.Is(err, io.EOF):
		return err
	case literal:
		return errors.New(`the input ends before the """ that ends the message`)
	}
	return errors.New(`the input ends after a line that ends with \`)
}

// plainLines reads lines as they are: from a script, or from a terminal that
// cannot move its cursor.
type plainLines struct {
	r          *bufio.Reader
	prompt     io.Writer        // nil: none is written
	interrupts <-chan os.Signal // Ctrl-C; nil where the context sees to it
	lines      chan string
	err        error // of the last read, once lines is closed
	done       chan struct{}
}

// newPlainLines reads a line ahead in a goroutine, since a read from a terminal
// cannot be interrupted: it ends with the input, or after Close with the next line.
func newPlainLines(r io.Reader, prompt io.Writer, interrupts <-chan os.Signal) *plainLines {
	p := &plainLines{bufio.NewReader(r), prompt, interrupts, make(chan string), nil, make(chan struct{})}
	go func() {
		defer close(p.lines)
		for {
			line, err := p.read()
			if err != nil {
				p.err = err
				return
			}
			select {
			case p.lines <- line:
			case <-p.done:
				return
			}
		}
	}()
	return p
}

func (p *plainLines) line(ctx context.Context, more bool) (string, error) {
	if p.prompt != nil {
		fmt.Fprint(p.prompt, promptText(more))
	}
	select {
	case line, ok := <-p.lines:
		if !ok {
			return "", p.err
		}
		return line, nil
	case <-p.interrupts:
		fmt.Fprintln(p.prompt)
		return "", errEmptied
	case <-ctx.Done():
		return "", ctx.Err()
	}
}

// read reads a line of at most api.MaxRequest bytes.
func (p *plainLines) read() (string, error) {
	var line []byte
	for {
		part, err := p.r.ReadSlice('\n')
		line = append(line, part...)
		switch {
		case len(line) > api.MaxRequest:
			return "", fmt.Errorf("a line is longer than %d bytes", api.MaxRequest)
		case err == bufio.ErrBufferFull:
			continue
		case err == io.EOF && len(line) > 0, err == nil:
			return strings.TrimRight(string(line), "\r\n"), nil
		}
		return "", err
	}
}

func (p *plainLines) Close() error {
	close(p.done)
	return nil
}

func promptText(more bool) string {
	if more {
		return ". "
	}
	return "> "
}
