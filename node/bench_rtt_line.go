package node

import (
	"errors"
	"math/rand/v2"
	"net"
	"sync"
	"time"
)

// delayedConn is one end of a connection whose writes arrive later, in order, as over a
// long line, which may carry so many bytes a second only. What is written is kept until it is
// due. A write waits only for a line with a rate, as long as lineBuffer bytes are kept.
type delayedConn struct {
	net.Conn
	delay time.Duration
	line  line
	kick  chan struct{} // there is something in queue; capacity 1
	ended chan struct{} // closed with err
	sent  sync.WaitGroup

	mu    sync.Mutex // guards the rest
	queue []delayedWrite
	kept  int       // bytes that are not handed over yet
	room  sync.Cond // kept is less, or err is set
	free  time.Time // when the line has carried what is on it
	err   error     // of the line, for later writes
}

const (
	linePacket = 1448                   // bytes
	lineBuffer = 1 << 20                // bytes, as those of a socket
	lineStall  = 200 * time.Millisecond // the shortest time after which Linux sends a lost packet again unasked
)

// sleepNear is the end of a wait, which is slept precisely.
const sleepNear = 2 * time.Millisecond

type delayedWrite struct {
	due  time.Time
	data []byte
}

// delayConn has what is written to c arrive after a delay, by what else the line is.
func delayConn(c net.Conn, delay time.Duration, l line) net.Conn {
	if delay == 0 && l.rate == 0 && l.loss == 0 {
		return c
	}
	d := &delayedConn{Conn: c, delay: delay, line: l, kick: make(chan struct{}, 1), ended: make(chan struct{})}
	d.room.L = &d.mu
	d.sent.Go(d.send)
	return d
}

func (d *delayedConn) Write(b []byte) (int, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for d.err == nil && d.line.rate > 0 && d.kept >= lineBuffer {
		d.room.Wait()
	}
	if d.err != nil {
		return 0, d.err
	}
	d.kept += len(b)
	if now := time.Now(); d.free.Before(now) {
		d.free = now
	}
	if d.line.rate > 0 {
		d.free = d.free.Add(time.Duration(float64(len(b)) / d.line.rate * float64(time.Second)))
	}
	d.queue = append(d.queue, delayedWrite{d.free.Add(d.delay + d.stall(len(b))), append([]byte(nil), b...)})
	select {
	case d.kick <- struct{}{}:
	default:
	}
	return len(b), nil
}

// stall is how much later some bytes arrive since packets of them were lost. What is
// written behind them waits, as the order is kept.
func (d *delayedConn) stall(bytes int) time.Duration {
	for ; bytes > 0 && d.line.loss > 0; bytes -= linePacket {
		if rand.Float64() < d.line.loss {
			return lineStall
		}
	}
	return 0
}

// send hands writes over when they are due.
func (d *delayedConn) send() {
	for {
		select {
		case <-d.kick:
		case <-d.ended:
			return
		}
		d.mu.Lock()
		queue := d.queue
		d.queue = nil
		d.mu.Unlock()
		for _, w := range queue {
			select {
			case <-time.After(time.Until(w.due) - sleepNear):
			case <-d.ended:
				return
			}
			sleepUntil(w.due)
			if _, err := d.Conn.Write(w.data); err != nil {
				d.fail(err)
				return
			}
			d.mu.Lock()
			d.kept -= len(w.data)
			d.room.Signal()
			d.mu.Unlock()
		}
	}
}

func (d *delayedConn) fail(err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.err == nil {
		d.err = err
		d.room.Broadcast()
		close(d.ended)
	}
}

// Close ends the line at once; what is on its way is lost.
func (d *delayedConn) Close() error {
	d.fail(net.ErrClosed)
	err := d.Conn.Close()
	d.sent.Wait()
	return err
}

// A write waits for the line alone, and has no deadline; the one under it is not set
// either, since a write is due when the deadline of its caller has passed.
func (d *delayedConn) SetWriteDeadline(time.Time) error { return nil }
func (d *delayedConn) SetDeadline(t time.Time) error    { return d.SetReadDeadline(t) }

// delayedPair is a connection over loopback TCP with a round trip of rtt.
func delayedPair(rtt time.Duration) (near, far net.Conn, err error) { return linePair(rtt, 0) }

// linePair is one that carries rate bytes a second each way; 0: any number.
func linePair(rtt time.Duration, rate float64) (near, far net.Conn, err error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, nil, err
	}
	defer l.Close()
	type accepted struct {
		conn net.Conn
		err  error
	}
	got := make(chan accepted, 1)
	go func() {
		c, err := l.Accept()
		got <- accepted{c, err}
	}()
	if near, err = net.Dial("tcp", l.Addr().String()); err != nil {
		l.Close()
		return nil, nil, errors.Join(err, (<-got).err)
	}
	other := <-got
	if other.err != nil {
		near.Close()
		return nil, nil, other.err
	}
	way := line{rtt: rtt, rate: rate}
	return delayConn(near, rtt/2, way), delayConn(other.conn, rtt-rtt/2, way), nil
}

// measureLine is the round trip of a byte, the median of some.
func measureLine(rtt time.Duration) (time.Duration, error) {
	near, far, err := delayedPair(rtt)
	if err != nil {
		return 0, err
	}
	defer near.Close()
	var echo sync.WaitGroup
	echo.Go(func() {
		b := make([]byte, 1)
		for {
			if _, err := far.Read(b); err != nil {
				return
			}
			if _, err := far.Write(b); err != nil {
				return
			}
		}
	})
	defer echo.Wait()
	defer far.Close()
	const tries = 21
	var times []time.Duration
	b := make([]byte, 1)
	for range tries {
		start := time.Now()
		if _, err := near.Write(b); err != nil {
			return 0, err
		}
		if _, err := near.Read(b); err != nil {
			return 0, err
		}
		times = append(times, time.Since(start))
	}
	return median(times), nil
}
