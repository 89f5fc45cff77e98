//go:build !unix

package p2p

import (
	"net"
	"time"
)

// spinConn does not spin where sockets can not be read without waiting.
type spinConn struct{ *net.TCPConn }

func newSpinConn(c *net.TCPConn) *spinConn { return &spinConn{c} }

func (*spinConn) spinFor(time.Duration) {}
