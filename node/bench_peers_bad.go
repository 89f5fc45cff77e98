package node

import (
	"context"
	"fmt"
	"runtime"
	"sync"
	"syscall"
	"time"

	"kvasird/experts"
)

// mishap is what befalls a worker.
type mishap struct {
	name string
	line line                       // to it
	on   func(*child) (mend func()) // nil: the line is all
}

// slowShare is the part of its time that a slow worker gets, in turns of slowTurn.
const (
	slowShare = 10
	slowTurn  = time.Millisecond
)

var mishaps = []mishap{
	{"stopped", line{rtt: loadRTT}, func(w *child) func() {
		w.cmd.Process.Signal(syscall.SIGSTOP)
		return func() { w.cmd.Process.Signal(syscall.SIGCONT) }
	}},
	{"10 times slower", line{rtt: loadRTT}, slowed},
	{"loses 5 % of packets", line{rtt: loadRTT, loss: 0.05}, nil},
}

// slowed has a worker run a part of its time only.
func slowed(w *child) func() {
	ctx, end := context.WithCancel(context.Background())
	var pacing sync.WaitGroup
	pacing.Go(func() {
		for ctx.Err() == nil {
			w.cmd.Process.Signal(syscall.SIGSTOP)
			sleepUntil(time.Now().Add((slowShare - 1) * slowTurn))
			w.cmd.Process.Signal(syscall.SIGCONT)
			sleepUntil(time.Now().Add(slowTurn))
		}
	})
	return func() {
		end()
		pacing.Wait()
	}
}

// withBadWanted is what is wanted of the ratio: 1, of which the scatter is left out.
const withBadWanted = 0.95

// badWorkers measures two workers with and without a third that is in trouble.
func (b *bench) badWorkers() error {
	path, err := b.tinyModel()
	if err != nil {
		return err
	}
	c, err := b.openContest("shipped", path, true, 3)
	if err != nil {
		return err
	}
	defer c.Close()
	fmt.Fprintf(b.out, "\n### Two workers, and a third one in trouble: shipped, %v, %d streams\n\n"+
		"The trouble begins with the first of %d answers of each stream; all are counted. Lost packets are emulated: what is written waits %v for each, "+
		"and all behind it. %d cores.\n\n", loadRTT, peerStreams, b.Rounds, lineStall, runtime.NumCPU())
	t := newTable(b.out, "the third", "with it tok/s", "without it tok/s", "ratio", "worst answer", "wanted", "")
	for _, bad := range mishaps {
		if err := c.withBad(t, bad); err != nil {
			return fmt.Errorf("%s: %w", bad.name, err)
		}
	}
	return t.Flush()
}

func (c *contest) withBad(t benchTable, bad mishap) error {
	names := c.crew.names
	lines := func(name string) line {
		if name == names[2] {
			return bad.line
		}
		return line{rtt: loadRTT}
	}
	e, err := c.openEngine(c.swarm)
	if err != nil {
		return err
	}
	defer e.Close()
	var ways []contestant
	for _, way := range []struct {
		name    string
		workers []string
	}{{"with it", names}, {"without it", names[:2]}} {
		d, err := c.crew.dispatch(c.ctx, experts.Config{}, way.workers, lines)
		if err != nil {
			return err
		}
		defer d.Close()
		w := contestant{way.name, false, func(texts []*rttText, n int) ([][]int32, float64, error) {
			c.by.Store(d)
			return c.byEngine(e)(texts, n)
		}}
		if _, _, err := w.run(c.texts, rttFewest); err != nil {
			return err
		}
		ways = append(ways, w)
	}
	if bad.on != nil {
		defer bad.on(c.crew.workers[2])()
	}
	rates, err := c.turns(line{}, c.texts, ways)
	if err != nil {
		return err
	}
	with, without := mean(rates[0]), mean(rates[1])
	worst := rates[0][0] / without
	for _, r := range rates[0] {
		worst = min(worst, r/without)
	}
	t.row(append([]string{bad.name, rttRate(with), rttRate(without), fmt.Sprintf("%.2f", with/without), fmt.Sprintf("%.2f", worst)},
		atLeast(with/without, withBadWanted)...)...)
	return nil
}

// mean is the rate of several answers of the same length.
func mean(rates []float64) float64 {
	times := 0.0
	for _, r := range rates {
		times += 1 / r
	}
	return float64(len(rates)) / times
}
