package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// fixedLines are given out in turn; "^C" is errEmptied, "^X" errDiscarded.
type fixedLines []string

func (f *fixedLines) line(context.Context, bool) (string, error) {
	if len(*f) == 0 {
		return "", io.EOF
	}
	line := (*f)[0]
	*f = (*f)[1:]
	switch line {
	case "^C":
		return "", errEmptied
	case "^X":
		return "", errDiscarded
	}
	return line, nil
}

func (f *fixedLines) Close() error { return nil }

func TestReadMessage(t *testing.T) {
	tests := []struct {
		name    string
		lines   fixedLines
		want    string
		literal bool
		err     error
		left    int // lines
	}{
		{"a line", fixedLines{"a b", "c"}, "a b", false, nil, 1},
		{"an empty line", fixedLines{"", "c"}, "", false, nil, 1},
		{"backslash", fixedLines{`a\`, `b \`, "c", "d"}, "a\nb \nc", false, nil, 1},
		{"fenced", fixedLines{`"""`, "a", "", ` b\`, `"""`, "d"}, "a\n\n b\\", true, nil, 1},
		{"fenced with text beside", fixedLines{` """ a`, `b""" `, "d"}, " a\nb", true, nil, 1},
		{"fenced on one line", fixedLines{`"""/quit"""`, "d"}, "/quit", true, nil, 1},
		{"fences in a line", fixedLines{`a """b"""`, "d"}, `a """b"""`, false, nil, 1},
		{"Ctrl-C at first", fixedLines{"^C", "d"}, "", false, errEmptied, 1},
		{"Ctrl-C in a line", fixedLines{"^X", "d"}, "", false, errDiscarded, 1},
		{"Ctrl-C in a message", fixedLines{`"""`, "^C", "d"}, "", false, errDiscarded, 1},
		{"the end", nil, "", false, io.EOF, 0},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			text, literal, err := readMessage(t.Context(), &tt.lines)
			if text != tt.want || err == nil && literal != tt.literal || !errors.Is(err, tt.err) || len(tt.lines) != tt.left {
				t.Errorf("%q, %v, %v, %d lines left", text, literal, err, len(tt.lines))
			}
		})
	}
}

// TestPlainLines: Ctrl-C and the end of a context end the wait for a line that
// does not come, and no line is lost by it.
func TestPlainLines(t *testing.T) {
	r, w := io.Pipe()
	interrupts := make(chan os.Signal, 1)
	var prompts strings.Builder
	p := newPlainLines(r, &prompts, interrupts)
	defer p.Close()
	interrupts <- os.Interrupt
	if line, err := p.line(t.Context(), false); err != errEmptied {
		t.Errorf("%q, %v", line, err)
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if line, err := p.line(ended, true); err != context.Canceled {
		t.Errorf("%q, %v", line, err)
	}
	go func() {
		io.WriteString(w, "a\r\nb")
		w.Close()
	}()
	for _, want := range []string{"a", "b"} {
		if line, err := p.line(t.Context(), false); line != want || err != nil {
			t.Errorf("%q, %v, want %q", line, err, want)
		}
	}
	for range 2 {
		if _, err := p.line(t.Context(), false); err != io.EOF {
			t.Error(err)
		}
	}
	if got := prompts.String(); got != "> \n. > > > > " {
		t.Errorf("prompts %q", got)
	}
}

// keys is what the line editor reads of a screen, read in parts of n bytes.
func keys(t *testing.T, s *screen, in string, n int) string {
	t.Helper()
	s.in = &inParts{in, n}
	var got strings.Builder
	for buf := make([]byte, 64); ; {
		n, err := s.Read(buf)
		got.Write(buf[:n])
		if err != nil {
			return got.String()
		}
	}
}

type inParts struct {
	text string
	n    int
}

func (p *inParts) Read(b []byte) (int, error) {
	if p.text == "" {
		return 0, io.EOF
	}
	n := copy(b[:min(p.n, len(b))], p.text)
	p.text = p.text[n:]
	return n, nil
}

func TestPaste(t *testing.T) {
	long := strings.Repeat("x", inlinePaste+1)
	tests := []struct{ name, in, keys, line string }{
		{"typed", "ab\r\x1b[A\x1b[2~c", "ab\r\x1b[A\x1b[2~c", "ab\r\x1b[A\x1b[2~c"},
		{"a word", "a" + pasteBegin + "b c" + pasteEnd + "d\r", "ab cd\r", "ab cd\r"},
		{"escapes", pasteBegin + "\x1b[2J\x03" + pasteEnd, "\ufffd[2J\ufffd", "\ufffd[2J\ufffd"},
		{"two lines", "<" + pasteBegin + "b\r\nc\r" + pasteEnd + ">", "<[paste 1: 3 lines, 4 bytes]>", "<b\nc\n>"},
		{"a tab", pasteBegin + "b\tc" + pasteEnd, "[paste 1: 1 lines, 3 bytes]", "b\tc"},
		{"long", pasteBegin + long + pasteEnd, "[paste 1: 1 lines, 1001 bytes]", long},
		{"two", pasteBegin + "a\n" + pasteEnd + pasteBegin + "b\n" + pasteEnd, "[paste 1: 2 lines, 2 bytes][paste 2: 2 lines, 2 bytes]", "a\nb\n"},
		{"no UTF-8", pasteBegin + "\xff" + pasteEnd, "\ufffd", "\ufffd"},
		{"unended", "a" + pasteBegin + "b", "a", "a"},
	}
	for _, tt := range tests {
		for _, n := range []int{1, 2, 3, 5, 4096} {
			s := newScreen(nil, io.Discard)
			got := keys(t, s, tt.in, n)
			if line := s.expand(got); got != tt.keys || line != tt.line {
				t.Errorf("%s in parts of %d: %.80q and %.80q, want %.80q and %.80q", tt.name, n, got, line, tt.keys, tt.line)
			}
		}
	}
}

// TestPasteLimits: one paste and all that are kept are bounded.
func TestPasteLimits(t *testing.T) {
	s := newScreen(nil, io.Discard)
	huge := pasteBegin + strings.Repeat("x", maxPaste+4096) + pasteEnd + "end"
	if got := keys(t, s, huge, 4096); got != fmt.Sprintf("[paste 1: 1 lines, %d bytes, cut]end", maxPaste) || s.size > maxPaste || len(s.expand(got)) > maxPaste+3 {
		t.Errorf("%q, %d bytes kept", got, s.size)
	}
	for range 2 * maxPastes / maxPaste {
		keys(t, s, huge, 4096)
	}
	if s.size > maxPastes || len(s.pastes) != len(s.marks) || len(s.pastes) != maxPastes/maxPaste {
		t.Errorf("%d bytes of %d pastes kept, %d marks", s.size, len(s.pastes), len(s.marks))
	}
}

// TestWhereIsTheCursor: the question is answered before anything that is typed.
func TestWhereIsTheCursor(t *testing.T) {
	var out strings.Builder
	s := newScreen(nil, &out)
	io.WriteString(s, "prompt")
	io.WriteString(s, whereAsked)
	if got := keys(t, s, "ab", 1); got != whereAnswer+"ab" || out.String() != "prompt" {
		t.Errorf("read %q, written %q", got, out.String())
	}
}

func FuzzPaste(f *testing.F) {
	f.Add("a"+pasteBegin+"b\nc"+pasteEnd+"d", 3)
	f.Add("\x1b[200\x1b[200~\x1b[201\x1b[201~", 1)
	f.Fuzz(func(t *testing.T, in string, n int) {
		whole, parts := newScreen(nil, io.Discard), newScreen(nil, io.Discard)
		a, b := keys(t, whole, in, len(in)+1), keys(t, parts, in, max(1, n))
		if a != b || whole.expand(a) != parts.expand(b) {
			t.Errorf("%q: %q at once, %q in parts of %d", in, a, b, n)
		}
	})
}

func TestHistory(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "new")
	write := func(lines ...string) {
		t.Helper()
		h, err := openHistory(dir)
		if err != nil {
			t.Fatal(err)
		}
		for _, line := range lines {
			if err := h.add(line); err != nil {
				t.Fatal(err)
			}
		}
		h.Close()
	}
	read := func() []string {
		t.Helper()
		h, err := openHistory(dir)
		if err != nil {
			t.Fatal(err)
		}
		defer h.Close()
		return h.lines
	}
	path := filepath.Join(dir, historyName)
	write("a", "a", " ", "b\x1b[2J", strings.Repeat("x", maxHistoryLine+1), "a")
	if got, want := read(), []string{"a", "b\ufffd[2J", "a"}; !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
	if err := os.Chmod(path, 0o644); err != nil {
		t.Fatal(err)
	}
	many := strings.Repeat(strings.Repeat("y", 2000)+"\n", maxHistoryLines-1) + "last\n"
	if err := os.WriteFile(path, []byte(many), 0o644); err != nil { // more than is read
		t.Fatal(err)
	}
	got := read()
	write("later")
	st, err := os.Stat(path)
	if n := maxHistoryFile / 2001; err != nil || len(got) != n+1 || got[n] != "last" || len(got[0]) != 2000 ||
		st.Mode().Perm() != 0o600 || st.Size() > maxHistoryFile {
		t.Errorf("%d lines, file %v, %v", len(got), st, err)
	}
	if err := os.WriteFile(path, []byte(strings.Repeat("z\n", 3*maxHistoryLines)), 0o600); err != nil {
		t.Fatal(err)
	}
	if got := read(); len(got) != maxHistoryLines {
		t.Errorf("%d lines", len(got))
	}
	if text, err := os.ReadFile(path); err != nil || len(text) != 2*maxHistoryLines {
		t.Errorf("%d bytes left, %v", len(text), err)
	}
	if left, err := filepath.Glob(filepath.Join(dir, "*")); err != nil || len(left) != 1 {
		t.Errorf("files %v, %v", left, err)
	}
	dir = path // a file where a folder should be
	if _, err := openHistory(dir); err == nil {
		t.Error("a history in a file")
	}
}
