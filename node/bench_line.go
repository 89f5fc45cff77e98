package node

import (
	"context"
	"io"
	"net"
	"sync"
	"time"
)

// line is what lies between two places. The zero line is nothing.
type line struct {
	rtt  time.Duration // round trip
	rate float64       // bytes a second, each way; 0: no limit
	loss float64       // share of packets that are lost
}

func noLine(string) line { return line{} }

// bridge hands on what comes from each of two connections to the other over a line, until
// one of them or ctx ends. It closes both.
func bridge(ctx context.Context, a, b net.Conn, l line) {
	a, b = delayConn(a, l.rtt/2, l), delayConn(b, l.rtt-l.rtt/2, l)
	hangUp := sync.OnceFunc(func() {
		a.Close()
		b.Close()
	})
	defer hangUp()
	defer context.AfterFunc(ctx, hangUp)()
	var ways sync.WaitGroup
	for _, way := range [][2]net.Conn{{a, b}, {b, a}} {
		ways.Go(func() {
			io.Copy(way[0], way[1]) // how a connection ended is of no interest here
			hangUp()
		})
	}
	ways.Wait()
}

// lineProxy takes connections at an address of its own and carries each over a line
// to another address.
type lineProxy struct {
	listener net.Listener
	end      context.CancelFunc
	carried  sync.WaitGroup
}

func openProxy(to string, l line) (*lineProxy, error) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	ctx, end := context.WithCancel(context.Background())
	p := &lineProxy{listener: listener, end: end}
	p.carried.Go(func() {
		for {
			near, err := listener.Accept()
			if err != nil {
				return
			}
			far, err := net.Dial("tcp", to)
			if err != nil {
				near.Close()
				continue
			}
			p.carried.Go(func() { bridge(ctx, near, far, l) })
		}
	})
	return p, nil
}

func (p *lineProxy) addr() string { return p.listener.Addr().String() }

// Close ends what it carries.
func (p *lineProxy) Close() error {
	err := p.listener.Close()
	p.end()
	p.carried.Wait()
	return err
}
