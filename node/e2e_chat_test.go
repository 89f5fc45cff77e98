//go:build cgo && linux

package node

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"kvasird/node/api"
)

// chatCommand is `kvasir chat` with the backbone of s, as people build it.
func (s *swarm) chatCommand(args ...string) *exec.Cmd {
	s.t.Helper()
	binary := filepath.Join(s.dir, "kvasir")
	if out, err := exec.CommandContext(s.ctx, "go", "build", "-o", binary, "kvasird/cmd/kvasir").CombinedOutput(); err != nil {
		s.t.Fatalf("build kvasir: %v\n%s", err, out)
	}
	cmd := exec.CommandContext(s.ctx, binary, append([]string{"chat", "--data", s.backbone.dir, "--temperature", "0"}, args...)...)
	cmd.Env = append(os.Environ(), "XDG_DATA_HOME="+filepath.Join(s.dir, "home"), "TERM=xterm", "NO_COLOR=")
	return cmd
}

// typist is a person at a terminal with a program.
type typist struct {
	t        *testing.T
	terminal *os.File
	exited   chan error

	mu   sync.Mutex // guards what is below
	said string     // by the program, and not waited for yet
	more chan struct{}
}

// sit starts a program at a terminal of 24 lines of 80 characters.
func sit(t *testing.T, cmd *exec.Cmd) *typist {
	t.Helper()
	fd, err := unix.Open("/dev/ptmx", unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	terminal := os.NewFile(uintptr(fd), "/dev/ptmx")
	t.Cleanup(func() { terminal.Close() })
	n, err := unix.IoctlGetInt(fd, unix.TIOCGPTN)
	if err := errors.Join(err, unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0),
		unix.IoctlSetWinsize(fd, unix.TIOCSWINSZ, &unix.Winsize{Row: 24, Col: 80})); err != nil {
		t.Fatal(err)
	}
	program, err := os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|syscall.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stdin, cmd.Stdout, cmd.Stderr = program, program, program
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true, Pdeathsig: syscall.SIGTERM}
	p := &typist{t: t, terminal: terminal, exited: make(chan error, 1), more: make(chan struct{}, 1)}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		p.exited <- cmd.Wait()
		program.Close() // kept open until now, so that what was said last can be read
	}()
	go p.listen()
	return p
}

func (p *typist) listen() {
	buf := make([]byte, 4096)
	for {
		n, err := p.terminal.Read(buf)
		p.mu.Lock()
		p.said += string(buf[:n])
		p.mu.Unlock()
		select {
		case p.more <- struct{}{}:
		default:
		}
		if err != nil {
			return
		}
	}
}

func (p *typist) types(keys string) {
	p.t.Helper()
	if _, err := p.terminal.WriteString(keys); err != nil {
		p.t.Fatal(err)
	}
}

// sees waits until the program has said want, and returns what it said up to there.
func (p *typist) sees(want string) string {
	p.t.Helper()
	late := time.After(30 * time.Second)
	for {
		p.mu.Lock()
		before, after, found := strings.Cut(p.said, want)
		if found {
			p.said = after
		}
		p.mu.Unlock()
		if found {
			return before + want
		}
		select {
		case <-p.more:
		case <-late:
			p.t.Fatalf("%q is not seen after %q", want, before)
		}
	}
}

// ready is what a terminal gets when the next line may be typed: it is told to
// mark pasted text.
const ready = "\x1b[?2004h"

// TestChat: the real binary at a terminal. Ctrl-C stops an answer and not the
// program; what follows works.
func TestChat(t *testing.T) {
	s := newSwarm(t)
	w := s.worker("w1")
	s.run()
	p := sit(t, s.chatCommand())
	p.sees("/help lists the commands")
	p.sees(ready)
	s.stopInAnswer(p, w)
	w.cmd.Process.Signal(syscall.SIGCONT)
	if _, err := s.backbone.await(s.ctx, func(st *api.Status) bool { return st.Tokens.Running == 0 }); err != nil {
		t.Errorf("the stopped answer goes on: %v", err)
	}
	p.types("\x03")
	p.sees("Ctrl-D or /quit ends the chat")
	p.sees(ready)
	p.types("half a line\x03")
	p.sees(ready) // and nothing of it is asked
	p.types("/stats\r")
	p.sees("last  not told")
	p.sees(ready)
	p.types("What is the capital of France?\r")
	p.sees("capital of France?\r\n") // as typed
	p.sees(".\r\n")
	p.sees(ready)
	p.types("/clear\r")
	p.sees("forgotten")
	p.sees(ready)
	p.types("What is the capital of France?\r")
	p.sees("The capital of France is Paris.\r\n")
	p.sees(ready)
	p.types("\x1b[200~What is the capital\nof France?\x1b[201~\r") // pasted: one question
	p.sees("[paste 1: 2 lines, 30 bytes]")
	p.sees(".\r\n")
	p.sees(ready)
	p.types("/stats\r")
	p.sees(" tokens/s, first token after ")
	p.sees(ready)
	p.types("/quit\r")
	if err := <-p.exited; err != nil {
		t.Errorf("/quit ends with %v", err)
	}
	mode, err := unix.IoctlGetTermios(int(p.terminal.Fd()), unix.TCGETS)
	if err != nil || mode.Lflag&(unix.ICANON|unix.ECHO|unix.ISIG) != unix.ICANON|unix.ECHO|unix.ISIG {
		t.Errorf("the terminal is left as %+v, %v", mode, err)
	}
	file := filepath.Join(s.dir, "home", "kvasir", "chat_history")
	text, err := os.ReadFile(file)
	st, e := os.Stat(file)
	if err := errors.Join(err, e); err != nil || st.Mode().Perm() != 0o600 || !strings.HasPrefix(string(text), "What is an expert?\n") || !strings.HasSuffix(string(text), "/clear\nWhat is the capital of France?\n/stats\n/quit\n") {
		t.Errorf("history %q, %v", text, err)
	}
}

// stopInAnswer presses Ctrl-C in the middle of an answer: the only worker runs
// for moments until something is said, and not on.
func (s *swarm) stopInAnswer(p *typist, w *child) {
	s.t.Helper()
	p.types("What is an expert?\r")
	p.sees("What is an expert?\r\n")
	const most = 2 * time.Millisecond // of the 30 that the answer takes
	for moment := 100 * time.Microsecond; ; moment = min(moment*3/2, most) {
		w.cmd.Process.Signal(syscall.SIGSTOP)
		time.Sleep(50 * time.Millisecond) // until what it let be said is seen
		p.mu.Lock()
		said := p.said
		p.mu.Unlock()
		if strings.Contains(said, ready) { // it was over before
			p.sees(ready)
			p.types("/retry\r")
			p.sees("/retry\r\n")
		} else if strings.Contains(said, "An") {
			break
		}
		if s.ctx.Err() != nil {
			s.t.Fatalf("no answer, but %q", said)
		}
		w.cmd.Process.Signal(syscall.SIGCONT)
		time.Sleep(moment)
	}
	p.types("\x03")
	answer := p.sees("stopped; what there is of the answer stays")
	if strings.Contains(answer, "for every token.") {
		s.t.Errorf("the answer was stopped too late: %q", answer)
	}
	p.sees(ready)
}

// TestChatOfScript: without a terminal each line is a turn, stdout has the
// answers alone, and the exit status tells of a failure.
func TestChatOfScript(t *testing.T) {
	s := newSwarm(t)
	w := s.worker("w1")
	s.run("--wait", "1")
	const question = "What is the capital of France?\n"
	cmd := s.chatCommand()
	var out, errs bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(question+"/clear\n"+question), &out, &errs
	const answer = "The capital of France is Paris.\n"
	if err := cmd.Run(); err != nil || out.String() != answer+answer || errs.String() != "(forgotten)\n" {
		t.Errorf("%v, %q, %q", err, out.String(), errs.String())
	}
	w.cmd.Process.Signal(syscall.SIGTERM)
	awaitEnd(t, w, 0)
	out.Reset()
	errs.Reset()
	cmd = s.chatCommand()
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(question), &out, &errs
	if err := cmd.Run(); err == nil || cmd.ProcessState.ExitCode() != 1 || out.Len() > 0 || !strings.Contains(errs.String(), "no worker for experts") {
		t.Errorf("%v, %q, %q, want the missing experts", err, out.String(), errs.String())
	}
	if _, err := os.Stat(filepath.Join(s.dir, "home")); !os.IsNotExist(err) {
		t.Errorf("a script leaves a history: %v", err)
	}
}
