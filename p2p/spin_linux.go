package p2p

import (
	"errors"
	"io"
	"net"
	"os"
	"runtime"
	"sync"
	"syscall"
	"time"
)

// goYield is how often a spinning reader lets the goroutines of its thread run. It gives
// the core to other threads at each look, and they are more often those that wait.
const goYield = 20 * time.Microsecond

// spinConn is a TCP connection whose reads look at the socket for a bounded time before
// they park. Waking a parked goroutine can cost tens of microseconds, more than the whole
// exchange on a local network. Whether it does depends on how busy the cores are, so
// spinChoice measures it.
//
// An idle connection costs one budget, then it is parked like any other. Between two looks
// the core is offered to whoever wants it.
type spinConn struct {
	*net.TCPConn
	raw    syscall.RawConn
	budget time.Duration // 0: off

	mu     sync.Mutex // one reader at a time; guards what follows
	choice spinChoice
	look   func(fd uintptr) bool
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
	spin := s.choice.spins()
	if spin {
		n, ok, err = s.spin(b, start)
	}
	if !ok {
		n, err = s.TCPConn.Read(b)
	}
	s.choice.learn(time.Since(start))
	return n, err
}

// spin looks until there is something or the budget is spent.
func (s *spinConn) spin(b []byte, start time.Time) (n int, ok bool, err error) {
	yielded := time.Duration(0)
	for {
		syscall.Syscall(syscall.SYS_SCHED_YIELD, 0, 0, 0)
		if n, ok, err = s.tryRead(b); ok {
			return n, ok, err
		}
		spent := time.Since(start)
		if spent >= s.budget {
			return 0, false, nil
		}
		if spent-yielded >= goYield {
			runtime.Gosched()
			yielded = spent
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
