//go:build unix

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

const (
	// parkCost is added to the budget when a parked read is judged: waking up takes
	// about that long, so data that came within the budget seems to come this much later.
	parkCost = 100 * time.Microsecond
	// maxTrust is the score at which the whole budget is spent.
	maxTrust = 8
	// probeEvery is how many reads pass without a spin before one tries again.
	probeEvery = 16
)

// spinConn is a TCP connection whose reads look at the socket for a bounded time before
// they park. Waking a parked goroutine costs tens of microseconds, more than the whole
// exchange on a local network.
//
// The time adapts: each read that finds data within the budget raises trust, each that
// does not lowers it, and without trust nearly all reads park at once. An idle connection
// costs one budget, then it is parked like any other. Between two looks the goroutine
// yields.
type spinConn struct {
	*net.TCPConn
	raw    syscall.RawConn
	budget time.Duration // 0: off

	mu    sync.Mutex // one reader at a time; guards what follows
	trust int        // 0 … maxTrust
	cold  int        // reads since the last spin
	look  func(fd uintptr) bool
	buf   []byte // of the look under way, as n and err
	n     int
	err   error
}

func newSpinConn(c *net.TCPConn) *spinConn {
	s := &spinConn{TCPConn: c, trust: maxTrust}
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
	for spin := s.spinTime(); time.Since(start) < spin; {
		runtime.Gosched()
		if n, ok, err = s.tryRead(b); ok {
			s.trust = min(s.trust+1, maxTrust)
			return n, err
		}
	}
	n, err = s.TCPConn.Read(b)
	if time.Since(start) <= s.budget+parkCost {
		s.trust = min(s.trust+1, maxTrust)
	} else {
		s.trust = max(s.trust-1, 0)
	}
	return n, err
}

// spinTime is how long this read may spin.
func (s *spinConn) spinTime() time.Duration {
	if s.trust == 0 {
		if s.cold++; s.cold < probeEvery {
			return 0
		}
	}
	s.cold = 0
	return s.budget * time.Duration(max(s.trust, 1)) / maxTrust
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
