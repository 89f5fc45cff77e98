package p2p

import (
	"net"
	"sync"
)

const (
	// tlsRecord is the largest payload of a TLS record.
	tlsRecord = 16 << 10
	// gatherBytes is how much of one write is held back at most.
	gatherBytes = 256 << 10
)

// gatherConn is the socket below a lane's TLS. TLS writes its records one by one, and every
// write wakes the reader of the other side, which finds one record and sleeps again: tens of
// microseconds each. So the records of one large write leave together.
type gatherConn struct {
	net.Conn

	mu   sync.Mutex // guards the rest
	hold bool
	buf  []byte
}

// Write is called by TLS, one record at a time.
func (g *gatherConn) Write(b []byte) (int, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.hold {
		return g.Conn.Write(b)
	}
	g.buf = append(g.buf, b...)
	if len(g.buf) >= gatherBytes {
		return len(b), g.flushLocked()
	}
	return len(b), nil
}

func (g *gatherConn) flushLocked() error {
	_, err := g.Conn.Write(g.buf)
	g.buf = g.buf[:0]
	return err
}

// together holds back what write sends through g until it returns.
func (g *gatherConn) together(write func() (int, error)) (int, error) {
	g.setHold(true)
	n, err := write()
	g.mu.Lock()
	defer g.mu.Unlock()
	g.hold = false
	if flushErr := g.flushLocked(); err == nil {
		err = flushErr
	}
	return n, err
}

func (g *gatherConn) setHold(hold bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.hold = hold
}
