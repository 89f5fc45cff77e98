package main

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
)

// Limits of a stream of server-sent events, in bytes.
const (
	maxEventLine = 1 << 20
	maxEventData = 4 << 20 // of all data lines of one event
)

var errEventTooLong = errors.New("an event of the answer is too long")

// eventReader reads the data of server-sent events. Lines end with LF, CR LF or
// CR; a line is a field, a colon and a value; data lines add up until an empty
// line; comments and all other fields are left out. What follows the last empty
// line is not an event.
type eventReader struct {
	r      *bufio.Reader
	begun  bool
	skipLF bool // the line before ended with CR
}

func newEventReader(r io.Reader) *eventReader {
	return &eventReader{r: bufio.NewReader(r)}
}

// next returns the data of the next event that has some. The error is io.EOF at
// the end, errEventTooLong past a limit, or that of the reader.
func (e *eventReader) next() ([]byte, error) {
	var data []byte
	for some := false; ; {
		line, err := e.line()
		if err != nil {
			return nil, err
		}
		if len(line) == 0 {
			if some {
				return data, nil
			}
			continue
		}
		name, value, _ := bytes.Cut(line, []byte(":"))
		if string(name) != "data" {
			continue
		}
		if some {
			data = append(data, '\n')
		}
		data, some = append(data, bytes.TrimPrefix(value, []byte(" "))...), true
		if len(data) > maxEventData {
			return nil, fmt.Errorf("%w: more than %d bytes", errEventTooLong, maxEventData)
		}
	}
}

// line returns the next line without its end. It does not wait for the LF that
// may follow a CR: that would hold an event back.
func (e *eventReader) line() (line []byte, err error) {
	for {
		b, err := e.r.ReadByte()
		if err != nil {
			return nil, err // a line without an end is none
		}
		skip := e.skipLF && b == '\n'
		e.skipLF = b == '\r'
		switch {
		case skip:
			continue
		case b == '\n' || b == '\r':
			if !e.begun {
				e.begun, line = true, bytes.TrimPrefix(line, []byte("\ufeff"))
			}
			return line, nil
		case len(line) == maxEventLine:
			return nil, fmt.Errorf("%w: a line of more than %d bytes", errEventTooLong, maxEventLine)
		}
		line = append(line, b)
	}
}
