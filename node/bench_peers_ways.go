package node

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"time"

	"kvasird/experts"
	"kvasird/ggml"
	"kvasird/ggml/gguf"
)

// wantedOfRPC is how many times the tokens per second of llama.cpp's RPC backend are
// wanted; 0: nothing is.
func (c *contest) wantedOfRPC(rtt time.Duration, streams int) float64 {
	switch {
	case rtt >= 5*time.Millisecond && c.prompts:
		return 3
	case rtt > 0 || streams > 1:
		return 0
	case c.prompts:
		return 1.3
	}
	return 1.1
}

// against measures the model in every way over every line.
func (c *contest) against() error {
	alone, err := c.openEngine(c.alone.model)
	if err != nil {
		return err
	}
	defer alone.Close()
	fmt.Fprintf(c.out, "\n### Against llama.cpp's RPC backend: %s\n\n", c.name)
	t := newTable(c.out, "streams", "RTT", "way", "tok/s", "of RPC", "wanted", "")
	for _, rtt := range peerLines {
		if err := c.againstOver(t, line{rtt: rtt}, contestant{"alone", true, c.byEngine(alone)}); err != nil {
			return err
		}
	}
	if err := t.Flush(); err != nil {
		return err
	}
	fmt.Fprintf(c.out, "\nOf %d answers %d equal that of the model alone; the others, computed beside other rows or by other kernels, are its choice up to rounding.\n",
		c.checked, c.checked-c.near)
	return nil
}

func (c *contest) againstOver(t benchTable, l line, alone contestant) error {
	ways := []contestant{alone}
	if l.rtt == 0 {
		plain, err := c.openPlain(c.path, peerStreams)
		if err != nil {
			return err
		}
		defer plain.Close()
		ways = append(ways, contestant{"llama.cpp alone", false, c.byRPC(plain)})
	}
	rpc, err := c.openRPC(c.path, peerStreams, l)
	if err != nil {
		return err
	}
	defer rpc.Close()
	ways = append(ways, contestant{"llama.cpp RPC", false, c.byRPC(rpc)})
	theirs := len(ways) - 1
	d, err := c.crew.dispatch(c.ctx, experts.Config{}, c.crew.names, func(string) line { return l })
	if err != nil {
		return err
	}
	defer d.Close()
	c.by.Store(d)
	own, err := c.openEngine(c.swarm)
	if err != nil {
		return err
	}
	defer own.Close()
	ways = append(ways, contestant{"expert dispatch", true, c.byEngine(own)})
	ring, err := openRing(l.rtt, c.id, peerStreams, c.windows, c.stages)
	if err != nil {
		return err
	}
	defer ring.Close()
	ways = append(ways, contestant{"ring", false, func(texts []*rttText, n int) ([][]int32, float64, error) {
		return ring.run(c.ctx, texts, n, true)
	}})
	for _, texts := range [][]*rttText{{c.fresh}, c.texts} {
		for _, w := range ways[theirs:] { // programs are learned, and what is made at first use is made
			if _, _, err := w.run(texts, 4); err != nil {
				return fmt.Errorf("%s, round trip %v, %d streams: %w", w.name, l.rtt, len(texts), err)
			}
		}
		rates, err := c.turns(l, texts, ways)
		if err != nil {
			return err
		}
		for i, w := range ways {
			of, verdict := "-", notWanted
			if ratio := medianRatio(rates[i], rates[theirs]); i != theirs {
				of = fmt.Sprintf("%.2f", ratio)
				if want := c.wantedOfRPC(l.rtt, len(texts)); want > 0 && w.name == "expert dispatch" {
					verdict = atLeast(ratio, want)
				}
			}
			t.row(append([]string{strconv.Itoa(len(texts)), msText(l.rtt), w.name, rttRate(median(rates[i])), of}, verdict...)...)
		}
	}
	return nil
}

func (c *contest) byRPC(p *rpcPeer) func([]*rttText, int) ([][]int32, float64, error) {
	return func(texts []*rttText, n int) ([][]int32, float64, error) { return p.run(c.ctx, texts, n) }
}

func msText(d time.Duration) string { return fmt.Sprintf("%d ms", d.Milliseconds()) }

// bound compares one stream at 20 ms with one round trip in every layer, with none and
// with some of the experts resident.
func (c *contest) bound() error {
	const rtt = 20 * time.Millisecond
	measured, err := measureLine(rtt)
	if err != nil {
		return err
	}
	synchronous := 1 / (float64(len(c.desc.Layers)) * measured.Seconds())
	fmt.Fprintf(c.out, "\n### One stream against one round trip for each layer: %s\n\n%d layers, %v: %.1f tokens/s at most, one by one. "+
		"Resident are the experts that all %d answers of the other table used most.\n\n",
		c.name, len(c.desc.Layers), measured.Round(10*time.Microsecond), synchronous, peerStreams)
	used, err := c.used()
	if err != nil {
		return err
	}
	t := newTable(c.out, "text", "repeats itself", "resident", "tok/s", "of the bound", "wanted", "")
	for _, share := range []int{0, 8, 4} {
		if err := c.boundWith(t, line{rtt: rtt}, synchronous, used, share); err != nil {
			return err
		}
	}
	return t.Flush()
}

// used counts how often each expert of each layer is picked by all texts.
func (c *contest) used() ([][]uint64, error) {
	d, err := c.crew.dispatch(c.ctx, experts.Config{}, c.crew.names, noLine)
	if err != nil {
		return nil, err
	}
	defer d.Close()
	c.by.Store(d)
	e, err := c.openEngine(c.swarm)
	if err != nil {
		return nil, err
	}
	defer e.Close()
	if _, _, err := c.byEngine(e)(c.texts, rttTokens); err != nil {
		return nil, err
	}
	return d.Demand(), nil
}

// boundWith measures with one of so many experts resident, or none.
func (c *contest) boundWith(t benchTable, l line, synchronous float64, used [][]uint64, share int) error {
	cfg, resident := experts.Config{}, "none"
	if share > 0 {
		resident = fmt.Sprintf("1/%d", share)
		held := mostUsed(used, c.file.Experts()/share)
		k, err := c.rt.NewKernel(ggml.KernelConfig{Threads: c.Threads})
		if err != nil {
			return err
		}
		defer k.Close()
		if err := k.LoadSlices(c.file, held...); err != nil {
			return err
		}
		cfg.Local = &experts.Local{Kernel: k, Slices: wireSlices(held), First: true}
	}
	d, err := c.crew.dispatch(c.ctx, cfg, c.crew.names, func(string) line { return l })
	if err != nil {
		return err
	}
	defer d.Close()
	c.by.Store(d)
	e, err := c.openEngine(c.swarm)
	if err != nil {
		return err
	}
	defer e.Close()
	for _, text := range []*rttText{c.fresh, c.loop} {
		way := contestant{"expert dispatch, " + resident + " resident", false, c.byEngine(e)}
		if _, _, err := way.run([]*rttText{text}, rttFewest); err != nil {
			return fmt.Errorf("%s: %w", way.name, err)
		}
		rates, err := c.turns(l, []*rttText{text}, []contestant{way})
		if err != nil {
			return err
		}
		rate, verdict := median(rates[0]), notWanted
		switch {
		case !c.prompts:
		case share == 4:
			verdict = atLeast(rate/synchronous, 4)
		case share == 8:
			verdict = atLeast(rate/synchronous, 3)
		case text == c.loop:
			verdict = atLeast(rate/synchronous, 3)
		}
		t.row(append([]string{textName(text == c.loop), fmt.Sprintf("%.0f %%", 100*text.repeats), resident, rttRate(rate),
			fmt.Sprintf("%.2f", rate/synchronous)}, verdict...)...)
	}
	return nil
}

func textName(loop bool) string {
	if loop {
		return "repeating"
	}
	return "new"
}

// mostUsed are the n most used experts of each layer.
func mostUsed(used [][]uint64, n int) (list []gguf.Slice) {
	for layer, counts := range used {
		ids := make([]int, len(counts))
		for i := range ids {
			ids[i] = i
		}
		slices.SortStableFunc(ids, func(a, b int) int { return cmp.Compare(counts[b], counts[a]) })
		for _, id := range ids[:min(n, len(ids))] {
			list = append(list, gguf.Slice{Layers: gguf.Range{Begin: layer, End: layer + 1}, Experts: gguf.Range{Begin: id, End: id + 1}})
		}
	}
	return list
}
