package main

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strings"

	"kvasird/node/api"
)

// printReach writes how the node is connected, as rows of the status table.
func printReach(row func(name, format string, args ...any), r *api.Reach) {
	row("Peers", "%s", peersText(r))
	row("Reached", "%s", r.Reach)
	row("NAT", "%s", r.NAT)
	row("LAN", "%s", r.MDNS)
	row("DHT", "%s", r.DHT)
	for i, a := range r.Observed {
		row([]string{"Seen at", ""}[min(i, 1)], "%s", a)
	}
	for i, a := range r.Relayed {
		row([]string{"Relayed", ""}[min(i, 1)], "%s", a)
	}
	for i, c := range r.Bootstrap {
		row([]string{"Bootstrap", ""}[min(i, 1)], "%s", contactText(c))
	}
	for i, c := range r.Relays {
		row([]string{"Relays", ""}[min(i, 1)], "%s", contactText(c))
	}
	if s := r.Serving; s != nil {
		row("As relay", "%d nodes reached through it, %d connections, %s carried, %d refused",
			s.Reservations, s.Circuits, bytesText(s.Bytes), s.Refused)
	}
}

func peersText(r *api.Reach) string {
	switch {
	case r.DirectPeers+r.RelayedPeers == 0:
		return "connected to nobody"
	case r.RelayedPeers == 0:
		return fmt.Sprintf("%d connected, all directly", r.DirectPeers)
	}
	return fmt.Sprintf("%d connected directly, %d through a relay", r.DirectPeers, r.RelayedPeers)
}

func contactText(c api.Contact) string {
	text := fmt.Sprintf("%s %s", shortID(c.ID), c.State)
	if c.Reserved {
		text += ", others reach this node through it"
	}
	if c.Error != "" {
		text += ": " + oneLine(c.Error)
	}
	return text
}

// printVolunteer writes what the node has taken on, as rows of the status table.
func printVolunteer(row func(name, format string, args ...any), v *api.Volunteer) {
	if v.Paused {
		row("Paused", "it takes nothing new; `kvasir resume` ends that")
	}
	texts := partsTexts(v.Parts)
	for _, w := range v.Windows {
		texts = append(texts, fmt.Sprintf("layers %d:%d of %s: %s", w.Layers.Begin, w.Layers.End, oneLine(w.Model), windowText(w)))
	}
	for i, text := range texts {
		row([]string{"Holds", ""}[min(i, 1)], "%s", text)
	}
	if len(texts) == 0 {
		row("Holds", "nothing yet")
	}
	where := "memory"
	if v.OnGPU {
		where = "GPU memory"
	}
	row("Gives", "%s %s, disk %s", where, shareText(v.Memory), shareText(v.Disk))
}

// windowText says how a window of layers does.
func windowText(w api.Window) string {
	text := string(w.State)
	if w.Sequences > 0 {
		text += fmt.Sprintf(", %d of %d sequences free", w.Free, w.Sequences)
	}
	if w.TokenMicro > 0 {
		text += fmt.Sprintf(", %.1f ms a token", float64(w.TokenMicro)/1000)
	}
	return text
}

func shareText(s api.Share) string {
	if s.Limit <= 0 {
		return bytesText(s.Used)
	}
	return bytesText(s.Used) + " of " + bytesText(s.Limit)
}

// partsTexts counts the experts of each model by state.
func partsTexts(parts []api.Part) []string {
	states := []api.PartState{api.PartServing, api.PartLoading, api.PartClaimed, api.PartLeaving}
	experts := map[string]map[api.PartState]int{}
	var ids []string
	names := map[string]string{}
	for _, p := range parts {
		if experts[p.ID] == nil {
			experts[p.ID] = map[api.PartState]int{}
			ids = append(ids, p.ID)
			names[p.ID] = oneLine(cmp.Or(p.Model, p.ID))
		}
		s := p.Slice
		experts[p.ID][p.State] += (s.LayerEnd - s.LayerBegin) * (s.ExpertEnd - s.ExpertBegin)
	}
	slices.Sort(ids)
	var out []string
	for _, id := range ids {
		var counts []string
		for _, state := range states {
			if n := experts[id][state]; n > 0 {
				counts = append(counts, fmt.Sprintf("%d %s", n, state))
			}
		}
		out = append(out, fmt.Sprintf("experts of %s: %s", names[id], strings.Join(counts, ", ")))
	}
	return out
}

// printOpen writes what is under way and what is in the way.
func printOpen(w io.Writer, st *api.Status) {
	list := func(title string, lines []string) {
		if len(lines) == 0 {
			return
		}
		fmt.Fprintf(w, "\n%s\n", title)
		for _, l := range lines {
			fmt.Fprintf(w, "  %s\n", oneLine(l))
		}
	}
	if v := st.Volunteer; v != nil {
		var lines []string
		for _, p := range v.Downloads {
			lines = append(lines, downloadText(p))
		}
		list("Downloads", lines)
		list("In the way", v.Troubles)
	}
	if r := st.Reach; r != nil {
		var unmet []string
		for _, c := range r.Unmet {
			unmet = append(unmet, contactText(c))
		}
		list("Found but not connected", unmet)
		list("What to do", r.Advice)
	}
}

// downloadText is "experts of m: 45%, 1.2 MiB of 2.7 MiB, 3.1 MiB/s, 5s left, from 2 peers".
func downloadText(p api.Progress) string {
	text := oneLine(p.What) + ":"
	if p.Total > 0 {
		text += fmt.Sprintf(" %d%%,", int64(100*(float64(p.Done)/float64(p.Total))))
	}
	text += fmt.Sprintf(" %s of %s", bytesText(p.Done), bytesText(p.Total))
	if p.Sources == 0 {
		return text + ", nobody sends it now"
	}
	text += fmt.Sprintf(", %s/s", bytesText(int64(p.Rate)))
	if p.LeftSec > 0 {
		text += fmt.Sprintf(", %v left", seconds(p.LeftSec))
	}
	return text + fmt.Sprintf(", from %d peers", p.Sources)
}

// oneLine keeps what peers wrote from looking like lines of this program.
func oneLine(s string) string { return strings.Join(strings.Fields(s), " ") }
