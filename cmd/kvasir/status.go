package main

import (
	"context"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"kvasird/node/api"
)

// status prints what the daemon says of itself.
func status(ctx context.Context, c console, f *flags) error {
	f.daemonFlags()
	asJSON := f.Bool("json", false, "print it as JSON")
	daemon, err := f.parseForDaemon(c)
	if err != nil {
		return err
	}
	st, err := daemon.Status(ctx)
	if err != nil {
		return err
	}
	if *asJSON {
		return printJSON(c.out, st)
	}
	var text strings.Builder
	printStatus(&text, st)
	_, err = io.WriteString(c.out, plain(text.String()))
	return err
}

// printStatus writes for a person: one sentence, then what it rests on.
func printStatus(w io.Writer, st *api.Status) {
	fmt.Fprintf(w, "%s is %s as %s, up %v.\n", shortID(st.PeerID), st.State, strings.Join(st.Roles, ", "), seconds(st.UptimeSec))
	if st.Reason != "" {
		fmt.Fprintf(w, "%s\n", st.Reason)
	}
	fmt.Fprintln(w)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	row := func(name, format string, args ...any) { fmt.Fprintf(t, "%s\t%s\n", name, fmt.Sprintf(format, args...)) }
	row("Version", "%s, runtime pack %s", st.Version, st.RuntimePack)
	network := st.Network
	if st.Admission != "" {
		network += ", " + st.Admission
	}
	row("Network", "%s", network)
	row("Compute", "%s, %d threads", orDash(st.Backend), st.Threads)
	if m := st.Model; m != nil {
		row("Model", "%s", modelText(m))
		if m.Price != nil {
			row("Price", "%s", priceText(m.Price))
		}
		row("", "id %s", m.ID)
	}
	for _, s := range st.Slices {
		row("Serves", "%s", sliceText(s))
	}
	if len(st.Coverage) > 0 {
		row("Coverage", "%s", coverageText(st.Coverage))
	}
	if h := st.Hot; h != nil {
		row("Hot experts", "%s", hotText(h))
	}
	if n := st.Tokens; n != nil {
		row("Tokens", "%d generated, %d of prompts; %.1f tokens/s now; %d running, %d waiting",
			n.Generated, n.Prompt, n.PerSecond, n.Running, n.Waiting)
		switch {
		case n.NoDrafts != "":
			row("Drafts", "none: %s", n.NoDrafts)
		case n.Drafted > 0:
			row("Drafts", "%d of %d accepted", n.Accepted, n.Drafted)
		}
	}
	if c := st.Carried; c != nil && (c.Running > 0 || c.Answered+c.Gone > 0 || len(c.Refused) > 0) {
		row("Carried", "%s", carriedText(c))
	}
	if e := st.Earnings; e != nil {
		row("Earned", "%s base units with %d requests, %s held, %s bonded, for %s", e.Earned, e.Requests, e.Held, e.Bonded, e.Wallet)
	}
	if st.HTTP != "" || st.HTTPAccess != "" {
		row("HTTP", "%s", strings.TrimPrefix(st.HTTP+", "+st.HTTPAccess, ", "))
	}
	for i, a := range st.Listen {
		row([]string{"Listens", ""}[min(i, 1)], "%s", a)
	}
	if st.Reach != nil {
		printReach(row, st.Reach)
	}
	if st.Volunteer != nil {
		printVolunteer(row, st.Volunteer)
	}
	t.Flush()
	printOpen(w, st)
	printPeers(w, st.Peers)
	printRows(w, st)
}

// hotText says how much of the work the experts that are kept here do.
func hotText(h *api.HotExperts) string {
	text := fmt.Sprintf("%d kept, %s of %s", h.Experts, bytesText(h.Bytes), bytesText(h.Budget))
	if h.Pairs > 0 {
		text += fmt.Sprintf("; %.0f %% of the work done here now, %.0f %% since the start", 100*h.Recent, 100*float64(h.Hits)/float64(h.Pairs))
	}
	if h.Trouble != "" {
		text += "; " + h.Trouble
	}
	return text
}

func modelText(m *api.Model) string {
	if m.MoELayers == 0 {
		return fmt.Sprintf("%s (%s), %d layers, no experts", m.Name, m.Arch, m.Layers)
	}
	return fmt.Sprintf("%s (%s), %d layers, %d of them with %d experts, %d used per token",
		m.Name, m.Arch, m.Layers, m.MoELayers, m.Experts, m.Used)
}

// coverageText says first whether the model can answer.
func coverageText(list []api.Coverage) string {
	least, missing := list[0].MinReplicas, []string(nil)
	for _, l := range list {
		least = min(least, l.MinReplicas)
		if l.Missing != "" {
			missing = append(missing, fmt.Sprintf("layer %d experts %s", l.Layer, l.Missing))
		}
	}
	if len(missing) == 0 {
		return fmt.Sprintf("all experts of %d layers are held, the rarest by %d", len(list), least)
	}
	const shown = 4
	more := ""
	if n := len(missing) - shown; n > 0 {
		missing, more = missing[:shown], fmt.Sprintf(" and of %d more layers", n)
	}
	return "nobody holds " + strings.Join(missing, "; ") + more
}

func printPeers(w io.Writer, peers []api.Peer) {
	if len(peers) == 0 {
		fmt.Fprintln(w, "\nNo peers.")
		return
	}
	fmt.Fprintln(w)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "PEER\tSTATE\tFOR\tRTT\tSERVES\tROWS\tFAILED")
	for _, p := range peers {
		rtt := "-"
		if p.RTTMicro > 0 {
			rtt = fmt.Sprintf("%.2f ms", float64(p.RTTMicro)/1000)
		}
		var serves []string
		for _, s := range p.Slices {
			serves = append(serves, sliceText(s))
		}
		if p.Precision != "" {
			serves = append(serves, "rows in "+p.Precision)
		}
		state := string(p.State)
		if p.Path == "relayed" {
			state += " (relayed)"
		}
		fmt.Fprintf(t, "%s\t%s\t%v\t%s\t%s\t%d\t%d\n", shortID(p.ID), state, seconds(p.SinceSec), rtt,
			orDash(strings.Join(serves, "; ")), total(p.Rows), p.Failed)
	}
	t.Flush()
	for _, p := range peers {
		if p.Reason != "" {
			fmt.Fprintf(w, "  %s %s: %s\n", shortID(p.ID), p.State, p.Reason)
		}
		if p.Standing != "" && !p.Out {
			fmt.Fprintf(w, "  %s audits: %s\n", shortID(p.ID), p.Standing)
		}
	}
}

// maxColumns is how many peers the table of rows has; the rest is in --json.
const maxColumns = 6

// printRows shows which layer's rows were computed where.
func printRows(w io.Writer, st *api.Status) {
	type column struct {
		name string
		rows []api.Rows
	}
	var columns []column
	if len(st.Rows) > 0 {
		columns = append(columns, column{"HERE", st.Rows})
	}
	for _, p := range st.Peers {
		if len(p.Rows) > 0 && len(columns) < maxColumns {
			columns = append(columns, column{shortID(p.ID), p.Rows})
		}
	}
	var layers []int
	for _, c := range columns {
		for _, r := range c.rows {
			layers = append(layers, r.Layer)
		}
	}
	if len(layers) == 0 {
		return
	}
	slices.Sort(layers)
	fmt.Fprintln(w, "\nExpert rows computed per layer")
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprint(t, "LAYER\t")
	for _, c := range columns {
		fmt.Fprintf(t, "%s\t", c.name)
	}
	fmt.Fprintln(t)
	for _, layer := range slices.Compact(layers) {
		fmt.Fprintf(t, "%d\t", layer)
		for _, c := range columns {
			fmt.Fprintf(t, "%d\t", rowsOf(c.rows, layer))
		}
		fmt.Fprintln(t)
	}
	t.Flush()
}

func rowsOf(list []api.Rows, layer int) (n uint64) {
	for _, r := range list {
		if r.Layer == layer {
			n += r.Rows
		}
	}
	return n
}

func total(list []api.Rows) (n uint64) {
	for _, r := range list {
		n += r.Rows
	}
	return n
}

// shortID is the end of a peer id, which is where ids differ.
func shortID(id string) string {
	const tail = 8
	if len(id) <= tail {
		return orDash(id)
	}
	return "…" + id[len(id)-tail:]
}

func sliceText(s api.Slice) string {
	return "layers " + strconv.Itoa(s.LayerBegin) + ":" + strconv.Itoa(s.LayerEnd) +
		" experts " + strconv.Itoa(s.ExpertBegin) + ":" + strconv.Itoa(s.ExpertEnd)
}

func seconds(s float64) time.Duration {
	return (time.Duration(s * float64(time.Second))).Round(time.Second)
}

func orDash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}

// carriedText counts what other nodes had answered here.
func carriedText(c *api.Carried) string {
	text := fmt.Sprintf("%d answered for other nodes, %d running", c.Answered, c.Running)
	for _, why := range slices.Sorted(maps.Keys(c.Refused)) {
		text += fmt.Sprintf("; %d refused: %s", c.Refused[why], why)
	}
	return text
}
