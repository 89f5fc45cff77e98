//go:build !linux

package p2p

import (
	"net"
	"time"
)

// spinConn does not spin where it was not measured.
type spinConn struct{ *net.TCPConn }

func newSpinConn(c *net.TCPConn) *spinConn { return &spinConn{c} }

func (*spinConn) spinFor(time.Duration) {}
