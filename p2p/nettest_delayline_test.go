//go:build nettest && linux

package p2p_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// link is what a line does to packets, each way. The zero link is a plain cable.
type link struct {
	Delay  time.Duration
	Jitter time.Duration // up to so much more, without reordering
	Loss   float64       // share of the packets, 0 to 1
	Rate   int64         // bit/s; 0: no limit. Above about 200 Mbit/s the CPU is the limit
	Queue  int           // bytes that wait for Rate before the tail is dropped; 0: 256 KiB
}

const (
	tunMTU       = 1500
	defaultQueue = 256 << 10
	// linePackets bounds the packets under way in one direction.
	linePackets = 16384
	// noSleep is the longest wait that is left out: timers are too coarse for it, and
	// sleeping for each packet would cap the rate.
	noSleep = 700 * time.Microsecond
)

// delayline connects two namespaces by TUN devices of the given names, as netem would by
// a queue discipline where the kernel has it.
func (w *world) delayline(nsA, devA, nsB, devB string, l link) {
	w.t.Helper()
	a, errA := openTUN(nsA, devA)
	b, errB := openTUN(nsB, devB)
	w.check("delay line", errors.Join(errA, errB))
	var running sync.WaitGroup
	for i, ends := range [][2]*os.File{{a, b}, {b, a}} {
		packets := make(chan packet, linePackets)
		running.Go(func() {
			defer close(packets)
			l.receive(ends[0], packets, rand.New(rand.NewPCG(uint64(w.sites), uint64(i))))
		})
		running.Go(func() { deliver(ends[1], packets) })
	}
	w.t.Cleanup(func() {
		a.Close()
		b.Close()
		running.Wait()
	})
}

func openTUN(ns, name string) (tun *os.File, err error) {
	err = inNamespace(ns, func() error {
		fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC, 0)
		if err != nil {
			return fmt.Errorf("/dev/net/tun: %w", err)
		}
		req, err := unix.NewIfreq(name)
		if err == nil {
			req.SetUint16(unix.IFF_TUN | unix.IFF_NO_PI)
			err = unix.IoctlIfreq(fd, unix.TUNSETIFF, req)
		}
		if err == nil {
			// Only now: before it has a device, the file can not be polled.
			err = unix.SetNonblock(fd, true)
		}
		if err != nil {
			unix.Close(fd)
			return fmt.Errorf("TUN device %s in %s: %w", name, ns, err)
		}
		tun = os.NewFile(uintptr(fd), name)
		return nil
	})
	return tun, err
}

type packet struct {
	due  time.Time
	data []byte
}

// receive takes packets off a device until it is closed, and says when each is due.
func (l link) receive(from *os.File, to chan<- packet, rnd *rand.Rand) {
	queue := defaultQueue
	if l.Queue > 0 {
		queue = l.Queue
	}
	var sent, last time.Time // when the line has sent all before; when the last one is due
	buf := make([]byte, tunMTU+64)
	for {
		n, err := from.Read(buf)
		if err != nil {
			return
		}
		now := time.Now()
		if l.Loss > 0 && rnd.Float64() < l.Loss {
			continue
		}
		if sent.Before(now) {
			sent = now
		}
		if l.Rate > 0 {
			if waiting := int64(sent.Sub(now).Seconds() * float64(l.Rate) / 8); waiting+int64(n) > int64(queue) {
				continue
			}
			sent = sent.Add(time.Duration(float64(n) * 8 / float64(l.Rate) * float64(time.Second)))
		}
		due := sent.Add(l.Delay)
		if l.Jitter > 0 {
			due = due.Add(rand.N(l.Jitter))
		}
		if due.Before(last) {
			due = last
		}
		last = due
		select {
		case to <- packet{due, append([]byte(nil), buf[:n]...)}:
		default: // the queue is full
		}
	}
}

// deliver hands packets over when they are due.
func deliver(to *os.File, packets <-chan packet) {
	for p := range packets {
		if wait := time.Until(p.due); wait > noSleep {
			time.Sleep(wait)
		}
		// A device that is down or closed loses packets, as a cable would.
		_, _ = to.Write(p.data)
	}
}
