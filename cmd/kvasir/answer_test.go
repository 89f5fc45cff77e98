package main

import (
	"errors"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"
)

func TestAnswerWriter(t *testing.T) {
	type piece struct{ thought, text string }
	tests := []struct {
		name       string
		style      style
		script     bool
		pieces     []piece
		out, notes string
	}{
		{"text", style{}, false, []piece{{"", "a"}, {"", "b"}}, "ab\n", ""},
		{"ended line", style{}, false, []piece{{"", "a\n"}}, "a\n", ""},
		{"nothing", style{true}, false, nil, "", ""},
		{"thought, dimmed", style{true}, false, []piece{{"h", ""}, {"m", ""}, {"", "a"}}, "\x1b[2mh\x1b[0m\x1b[2mm\x1b[0m\na\n", ""},
		{"thought, plain", style{}, false, []piece{{"h", ""}, {"m\n", ""}, {"", "a"}}, "(thinking)\nhm\n(answer)\na\n", ""},
		{"thought of a script", style{}, true, []piece{{"h", ""}, {"m", ""}, {"", "a"}}, "a\n", "(the model thinks first)\n"},
		{"thought cut", style{true}, false, []piece{{"h", ""}}, "\x1b[2mh\x1b[0m\n", ""},
		{"thought in between", style{true}, false, []piece{{"", "a"}, {"h", ""}, {"", "b"}}, "a\n\x1b[2mh\x1b[0m\nb\n", ""},
		{"escapes", style{true}, false, []piece{{"\x1b[0m\x07", ""}, {"", "\x1b]0;t\x07\u009b1m\u202ex\r\n"}},
			"\x1b[2m\ufffd[0m\ufffd\x1b[0m\n\ufffd]0;t\ufffd\ufffd1m\ufffdx\n", ""},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var out, notes strings.Builder
			a := answerWriter{out: &out, notes: &notes, style: tt.style}
			if !tt.script {
				a.thoughts = &out
			}
			for _, p := range tt.pieces {
				if err := errors.Join(a.reasoning(p.thought), a.text(p.text)); err != nil {
					t.Fatal(err)
				}
			}
			a.end()
			if out.String() != tt.out || notes.String() != tt.notes {
				t.Errorf("%q and %q, want %q and %q", out.String(), notes.String(), tt.out, tt.notes)
			}
		})
	}
}

// talk has a person write lines and returns what is seen.
func talk(t *testing.T, g *gatewayServer, interrupts <-chan os.Signal, lines ...string) (c *chat, seen string) {
	t.Helper()
	var out strings.Builder
	gw, err := newGateway(g.URL, "")
	if err != nil {
		t.Fatal(err)
	}
	in := fixedLines(lines)
	c = &chat{g: gw, model: "m-one", in: &in, out: &out, notes: &out, terminal: true, thoughts: &out, interrupts: interrupts}
	if err := c.loop(t.Context()); err != nil {
		t.Errorf("the chat ends with %v", err)
	}
	return c, out.String()
}

// TestChatGoesOn: nothing that goes wrong ends a chat at a terminal; each failure
// says what to do, and what was not answered can be asked again.
func TestChatGoesOn(t *testing.T) {
	begun := `data: {"choices":[{"delta":{"content":"par"}}]}` + "\n\n"
	g := newGatewayServer(t,
		raw(503, `{"error":{"message":"no worker"}}`), // one
		says("1"),                                // one again
		raw(200, begun),                          // two breaks off
		says("2"),                                // two again
		says(),                                   // three is not answered
		raw(404, `{"error":{"message":"gone"}}`), // three again
		raw(400, `{"error":{"message":"9 > 8","code":"context_length_exceeded"}}`), // four
		raw(200, `data: {"choices":[{"delta":{"content":"4"},"finish_reason":"length"}]}`+"\n\ndata: [DONE]\n\n"),
		raw(500, `{"error":{"message":"broken"}}`), // four again: its answer stays
	)
	c, seen := talk(t, g, nil, "^C", "one", "/retry", "^X", "two", "/retry", "three", "/retry", "four", "/retry", "/retry", "/stats", "/bad")
	want := `(Ctrl-D or /quit ends the chat)
error: no worker. /retry asks again
1
par
error: the answer broke off: the node or the line to it is gone. /retry asks again
2
(the model ended without an answer. /retry asks again)
error: gone. /model lists what there is
error: 9 > 8. /clear starts over
4
(cut: the answer has reached its longest length)
error: broken. /retry asks again
last  not told, since it was stopped or broke off
all   2 answers, 8 tokens, `
	if !strings.HasPrefix(seen, want) || !strings.Contains(seen, "; and 2 whose tokens were not told\nerror: no command /bad") {
		t.Errorf("%s\nwant\n%s", seen, want)
	}
	last := "user: one\nassistant: 1\nuser: two\nassistant: 2\nuser: four\n"
	if got := roles(g.asked[len(g.asked)-1]); got != last {
		t.Errorf("told %q, want %q", got, last)
	}
	if n := len(c.turns); n != 3 || c.turns[2] != (turn{"four", "4", true}) || c.unanswered != "" {
		t.Errorf("turns %v, not answered %q", c.turns, c.unanswered)
	}
	if md := c.markdown("m"); !strings.HasSuffix(md, "## Question\n\nfour\n\n## Answer\n\n4\n\n(cut here)\n") {
		t.Errorf("%q", md)
	}
}

// TestChatStopped: Ctrl-C stops an answer before its first word, and a wait for a
// full queue; one that came before the question does not count.
func TestChatStopped(t *testing.T) {
	interrupts := make(chan os.Signal, 1)
	press := func(body string) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			raw(200, body)(w, r)
			w.(http.Flusher).Flush()
			interrupts <- os.Interrupt
			<-r.Context().Done()
		}
	}
	busy := func(w http.ResponseWriter, r *http.Request) {
		raw(429, `{"error":{"message":"full"}}`, "Retry-After", "60")(w, r)
		time.AfterFunc(300*time.Millisecond, func() { interrupts <- os.Interrupt })
	}
	interrupts <- os.Interrupt
	g := newGatewayServer(t, says("0"), press(": keep-alive\n"), busy, says("1"))
	c, seen := talk(t, g, interrupts, "zero", "one", "/retry", "/retry")
	want := "0\n(stopped. /retry asks again)\n(full. Asking again in 1m0s)\n(stopped. /retry asks again)\n1\n"
	if seen != want || len(c.turns) != 2 {
		t.Errorf("%q, want %q; turns %v", seen, want, c.turns)
	}
}
