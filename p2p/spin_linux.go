package p2p

import (
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// A read that finds nothing waits for threadWait on its own thread, in slices of
// threadSlice, since Close and deadlines are noticed between two of them.
const (
	threadWait  = 20 * time.Millisecond
	threadSlice = 2 * time.Millisecond
)

// spinConn is a TCP connection whose reads wait in three steps. First they may look at the
// socket again and again, for a bounded time: spinChoice measures whether that helps. Then
// the thread itself sleeps in poll(2) for a while, so that the kernel wakes it and nobody
// else. Then the goroutine parks, which needs no thread, but to be woken it takes the
// poller's thread and, where the goroutine is bound to a thread, that one too: tens of
// microseconds each, more than the whole exchange on a local network.
//
// An idle connection costs nothing once it is parked. Between two looks of a spin the core
// is offered to whoever wants it.
type spinConn struct {
	*net.TCPConn
	raw    syscall.RawConn
	budget time.Duration // 0: off

	mu     sync.Mutex // one reader at a time; guards what follows
	choice spinChoice
	look   func(fd uintptr) bool
	sleep  func(fd uintptr) bool
	buf    []byte // of the look under way, as n and err
	n      int
	err    error
}

func newSpinConn(c *net.TCPConn) *spinConn {
	s := &spinConn{TCPConn: c}
	s.look = func(fd uintptr) bool {
		s.n, s.err = syscall.Read(int(fd), s.buf)
		return true // never wait here
	}
	s.sleep = func(fd uintptr) bool {
		fds := [1]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		unix.Poll(fds[:], int(threadSlice/time.Millisecond)) // whatever it says, a look follows
		return true
	}
	return s
}

// spinFor sets the largest time that a read may spin. Call it before the reads.
func (s *spinConn) spinFor(budget time.Duration) {
	raw, err := s.TCPConn.SyscallConn()
	if err != nil || budget <= 0 {
		return
	}
	s.raw, s.budget = raw, budget
}

// Read reads like net.TCPConn.
func (s *spinConn) Read(b []byte) (int, error) {
	if s.budget == 0 || len(b) == 0 {
		return s.TCPConn.Read(b)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	n, ok, err := s.tryRead(b)
	if ok {
		return n, err
	}
	start := time.Now()
	if s.choice.spins() {
		n, ok, err = s.spin(b, start)
	}
	for !ok && time.Since(start) < threadWait {
		if err := s.raw.Read(s.sleep); err != nil {
			return 0, err
		}
		n, ok, err = s.tryRead(b)
	}
	if !ok {
		n, err = s.TCPConn.Read(b)
	}
	s.choice.learn(time.Since(start))
	return n, err
}

// spin looks until there is something or the budget is spent.
func (s *spinConn) spin(b []byte, start time.Time) (n int, ok bool, err error) {
	for {
		syscall.Syscall(syscall.SYS_SCHED_YIELD, 0, 0, 0)
		if n, ok, err = s.tryRead(b); ok {
			return n, ok, err
		}
		if time.Since(start) >= s.budget {
			return 0, false, nil
		}
	}
}

// tryRead looks once. It is not ok when there is nothing yet. A deadline that has passed
// and a closed conn are errors here as in any read.
func (s *spinConn) tryRead(b []byte) (n int, ok bool, err error) {
	s.buf = b
	err = s.raw.Read(s.look)
	s.buf = nil
	switch {
	case err != nil:
		return 0, true, err
	case s.err == nil && s.n == 0:
		return 0, true, io.EOF
	case s.err == nil:
		return s.n, true, nil
	case errors.Is(s.err, syscall.EAGAIN), errors.Is(s.err, syscall.EINTR):
		return 0, false, nil
	}
	return 0, true, &net.OpError{
		Op: "read", Net: "tcp", Source: s.LocalAddr(), Addr: s.RemoteAddr(),
		Err: os.NewSyscallError("read", s.err),
	}
}
