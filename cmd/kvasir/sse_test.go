package main

import (
	"bytes"
	"errors"
	"io"
	"slices"
	"strings"
	"testing"
	"testing/iotest"
)

// readEvents reads to the end or the first error.
func readEvents(r io.Reader) (events []string, err error) {
	for er := newEventReader(r); ; {
		data, err := er.next()
		if err != nil {
			return events, err
		}
		events = append(events, string(data))
	}
}

func TestEvents(t *testing.T) {
	tests := []struct {
		name, in string
		want     []string
	}{
		{"none", "", nil},
		{"one", "data: {}\n\n", []string{"{}"}},
		{"two, the second without a space", "data: a\n\ndata:b\n\n", []string{"a", "b"}},
		{"one space alone is taken off", "data:  a \n\n", []string{" a "}},
		{"data lines add up", "data: a\ndata\ndata: b\n\n", []string{"a\n\nb"}},
		{"CR LF", "data: a\r\n\r\ndata: b\r\n\r\n", []string{"a", "b"}},
		{"CR", "data: a\r\rdata: b\r\r", []string{"a", "b"}},
		{"mixed", "data: a\n\r\ndata: b\r\n\n\n\r", []string{"a", "b"}},
		{"a comment does not end an event", ": keep-alive\ndata: a\n: keep-alive\n\n", []string{"a"}},
		{"other fields", "event: x\nid: 1\nretry: 5\ndatum: 3\ndata: a\n\nevent: alone\n\n", []string{"a"}},
		{"empty data", "data:\n\ndata\n\n", []string{"", ""}},
		{"byte order mark", "\ufeffdata: a\n\n\ufeffdata: b\n\n", []string{"a"}},
		{"colons in the value", "data: a: b\n\n", []string{"a: b"}},
		{"unended event", "data: a\n\ndata: b\n", []string{"a"}},
		{"unended line", "data: a\n\ndata: b", []string{"a"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			for _, r := range []io.Reader{strings.NewReader(tt.in), iotest.OneByteReader(strings.NewReader(tt.in))} {
				if got, err := readEvents(r); err != io.EOF || !slices.Equal(got, tt.want) {
					t.Errorf("%q, %v, want %q", got, err, tt.want)
				}
			}
		})
	}
}

// endless repeats a text for ever.
type endless string

func (e endless) Read(p []byte) (n int, err error) {
	for n < len(p) {
		n += copy(p[n:], e)
	}
	return n, nil
}

func TestEventsRefuse(t *testing.T) {
	broken := errors.New("broken")
	line := "data: " + strings.Repeat("x", maxEventLine/2-6) + "\n"
	tests := []struct {
		name string
		in   io.Reader
		want error
	}{
		{"a line without an end", endless("x"), errEventTooLong},
		{"an event without an end", endless(line), errEventTooLong},
		{"a reader that fails", io.MultiReader(strings.NewReader("data: a\n\ndata"), iotest.ErrReader(broken)), broken},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if _, err := readEvents(tt.in); !errors.Is(err, tt.want) {
				t.Errorf("%v, want %v", err, tt.want)
			}
		})
	}
}

// An event is given out when its empty line is there, before anything follows.
func TestEventAtOnce(t *testing.T) {
	for _, end := range []string{"\n\n", "\r\r", "\r\n\r"} {
		r, w := io.Pipe()
		go io.WriteString(w, "data: a"+end)
		if data, err := newEventReader(r).next(); err != nil || string(data) != "a" {
			t.Errorf("%q: %q, %v", end, data, err)
		}
		r.Close()
	}
}

// slowEvents is what an event stream means, without regard to length or time.
func slowEvents(in []byte) (events []string) {
	text := strings.ReplaceAll(strings.ReplaceAll(string(in), "\r\n", "\n"), "\r", "\n")
	lines := strings.Split(text, "\n")
	lines[0] = strings.TrimPrefix(lines[0], "\ufeff")
	var data []string
	for _, line := range lines[:len(lines)-1] {
		if line == "" && data != nil {
			events, data = append(events, strings.Join(data, "\n")), nil
		} else if name, value, _ := strings.Cut(line, ":"); name == "data" {
			data = append(data, strings.TrimPrefix(value, " "))
		}
	}
	return events
}

func FuzzEvents(f *testing.F) {
	for _, s := range []string{"data: a\n\ndata:b\r\n\r\n: c\rdata: d\r\r", "\ufeffdata\n\n", "event: x\ndata: {\"a\":1}\n\n"} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, in []byte) {
		got, err := readEvents(bytes.NewReader(in))
		if errors.Is(err, errEventTooLong) && len(in) > maxEventLine {
			return
		}
		if want := slowEvents(in); err != io.EOF || !slices.Equal(got, want) {
			t.Errorf("%q: %q, %v, want %q", in, got, err, want)
		}
	})
}
