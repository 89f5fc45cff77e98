package node

import (
	"cmp"
	"fmt"
	"strings"
	"text/tabwriter"

	"kvasird/ring/plan"
)

// planText writes a plan for people: first what to do, then each way, then what is
// known of the nodes of a network.
func planText(name string, q plan.Query, p *plan.Plan, peers []planPeer) string {
	var b strings.Builder
	all, inExperts := q.Model.Bytes()
	fmt.Fprintf(&b, "%s: %s, %d layers, %s of weights", name, q.Model.Arch, len(q.Model.Layers), byteText(all))
	if inExperts > 0 {
		fmt.Fprintf(&b, " (%.0f %% in experts)", 100*float64(inExperts)/float64(all))
	}
	fmt.Fprintf(&b, "; a token reads %s.\nContext of %d tokens for %d streams together; speeds are those at half of it.\n\n",
		byteText(q.Model.Active()), q.Context, q.Sequences)
	if best, ok := p.Best(); ok {
		fmt.Fprintf(&b, "Best: %s, %s tokens/s for one stream, %s for %d at once.\n",
			best.Kind, rateText(best.One.TokensPerSecond), rateText(best.Many.TokensPerSecond), q.Sequences)
	} else {
		fmt.Fprintf(&b, "It does not run on these nodes.\n")
	}
	for _, c := range p.Candidates {
		writeWay(&b, c, q)
	}
	writePeers(&b, peers)
	for _, n := range p.Notes {
		fmt.Fprintf(&b, "\nNote: %s.", n)
	}
	if len(p.Notes) > 0 {
		fmt.Fprintln(&b)
	}
	return b.String()
}

// writePeers prints what nodes tell of themselves, and why some are not planned with.
func writePeers(b *strings.Builder, peers []planPeer) {
	if len(peers) == 0 {
		return
	}
	fmt.Fprint(b, "\nNodes, as they tell of themselves\n")
	t := tabwriter.NewWriter(b, 0, 0, 2, ' ', 0)
	fmt.Fprint(t, "  node\tmemory\tGPU memory\tdisk\tweights/s\tround trip\thas of the model\n")
	for _, p := range peers {
		if p.LeftOut != "" {
			continue
		}
		speed, rtt := "guessed", "-"
		if p.Speed > 0 {
			speed = bytesText(int64(p.Speed)) + "/s"
		}
		if p.RTTMicro > 0 {
			rtt = fmt.Sprintf("%.2g ms", float64(p.RTTMicro)/1000)
		}
		fmt.Fprintf(t, "  %s\t%s\t%s\t%s\t%s\t%s\t%s\n", p.Name, byteText(p.Memory), byteText(p.VRAM), byteText(p.Disk), speed, rtt, cmp.Or(p.Has, "-"))
	}
	t.Flush()
	for _, p := range peers {
		if p.LeftOut != "" {
			fmt.Fprintf(b, "  %s is left out: %s\n", p.Name, p.LeftOut)
		}
	}
}

// writeWay prints one candidate.
func writeWay(b *strings.Builder, c plan.Candidate, q plan.Query) {
	fmt.Fprintf(b, "\n%s%s\n", strings.ToUpper(string(c.Kind[:1])), c.Kind[1:])
	if c.Refused != "" {
		fmt.Fprintf(b, "  Refused: %s.\n", c.Refused)
	}
	if len(c.Places) == 0 {
		return
	}
	fmt.Fprintf(b, "  one stream  %s tokens/s, limited by %s\n", rateText(c.One.TokensPerSecond), c.One.Limit)
	fmt.Fprintf(b, "  %d at once  %s tokens/s, limited by %s\n", q.Sequences, rateText(c.Many.TokensPerSecond), c.Many.Limit)
	t := tabwriter.NewWriter(b, 0, 0, 2, ' ', 0)
	fmt.Fprint(t, "  node\tpart\tlayers\texperts\tRAM\tVRAM\tof it KV cache\tdisk\tto download\n")
	for _, p := range c.Places {
		experts := "-"
		if p.Experts.Len() > 0 {
			experts = p.Experts.String()
		}
		fmt.Fprintf(t, "  %s\t%s\t%v\t%s\t%s\t%s\t%s\t%s\t%s\n", p.Node, p.Role, p.Layers, experts,
			byteText(p.RAM), byteText(p.VRAM), byteText(p.KV), byteText(p.Disk), byteText(p.Download))
	}
	t.Flush()
	for _, p := range c.Places {
		if p.GPULayers > 0 {
			fmt.Fprintf(b, "  on %s: %d of its layers on the GPU, experts of %d of them in RAM\n", p.Node, p.GPULayers, len(p.Rules))
		}
		for _, r := range p.Rules {
			fmt.Fprintf(b, "    %s\n", r)
		}
	}
}

// byteText writes a size for people.
func byteText(n int64) string {
	if n == 0 {
		return "-"
	}
	return bytesText(n)
}

// rateText writes a speed to two digits at the least.
func rateText(v float64) string {
	if v >= 10 {
		return fmt.Sprintf("%.0f", v)
	}
	return fmt.Sprintf("%.2g", v)
}
