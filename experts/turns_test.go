package experts

import (
	"bufio"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"kvasird/p2p"
)

// interruptibleReader reads frames from one end of a TCP connection; the other end is returned.
func interruptibleReader(t *testing.T) (*link, net.Conn) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	there, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	here, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { here.Close(); there.Close() })
	reader := newLink(here)
	reader.source.interruptible = true
	return reader, there
}

func frameBytes(t *testing.T, id uint64, payload string) string {
	t.Helper()
	var b strings.Builder
	if err := p2p.NewFrameWriter(&b, MaxFrame).Write(p2p.Frame{Type: frameReply, ID: id, Payload: []byte(payload)}); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

func TestInterruptBetweenFrames(t *testing.T) {
	l, there := interruptibleReader(t)
	for id := uint64(1); id < 4; id++ {
		time.AfterFunc(5*time.Millisecond, func() { l.conn.SetReadDeadline(longAgo) })
		if _, err := l.next(); err != errInterrupted {
			t.Fatalf("got %v, want errInterrupted", err)
		}
		io.WriteString(there, frameBytes(t, id, "payload"))
		f, err := l.next()
		if err != nil || f.ID != id || string(f.Payload) != "payload" {
			t.Fatalf("after the interruption: got frame %d %q, %v", f.ID, f.Payload, err)
		}
	}
}

// TestInterruptWithinFrame cuts a frame at every place and interrupts there.
func TestInterruptWithinFrame(t *testing.T) {
	l, there := interruptibleReader(t)
	whole := frameBytes(t, 7, "payload")
	for cut := 1; cut < len(whole); cut++ {
		io.WriteString(there, whole[:cut])
		time.AfterFunc(2*time.Millisecond, func() { l.conn.SetReadDeadline(longAgo) })
		time.AfterFunc(5*time.Millisecond, func() { l.conn.SetReadDeadline(longAgo) })
		time.AfterFunc(8*time.Millisecond, func() { io.WriteString(there, whole[cut:]) })
		f, err := l.next()
		for err == errInterrupted { // the deadline came before the first byte
			f, err = l.next()
		}
		if err != nil || f.ID != 7 || string(f.Payload) != "payload" {
			t.Fatalf("cut at %d: got frame %d %q, %v", cut, f.ID, f.Payload, err)
		}
	}
}

func TestStalledFrame(t *testing.T) {
	l, there := interruptibleReader(t)
	io.WriteString(there, frameBytes(t, 7, "payload")[:10])
	time.AfterFunc(5*time.Millisecond, func() { l.conn.SetReadDeadline(longAgo) })
	began := time.Now()
	_, err := l.next()
	if err == nil || !strings.Contains(err.Error(), "middle of a frame") {
		t.Errorf("got %v", err)
	}
	if took := time.Since(began); took < stallLimit || took > patient/2 {
		t.Errorf("it took %v, want about %v", took, stallLimit)
	}
}

// TestBufferedFramesCountAsConsumed has several frames in one read: the source knows that none
// is under way once all are taken.
func TestBufferedFramesCountAsConsumed(t *testing.T) {
	l, there := interruptibleReader(t)
	l.r = p2p.NewFrameReader(bufio.NewReaderSize(&l.source, readBuffer), MaxFrame)
	io.WriteString(there, strings.Repeat(frameBytes(t, 1, "x"), 5))
	for range 5 {
		if _, err := l.next(); err != nil {
			t.Fatal(err)
		}
	}
	l.conn.SetReadDeadline(longAgo)
	if _, err := l.next(); err != errInterrupted {
		t.Errorf("got %v, want errInterrupted", err)
	}
}
