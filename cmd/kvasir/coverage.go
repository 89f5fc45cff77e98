package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"

	"kvasird/node/api"
)

// mapWidth is how many experts wide the heat map is when the terminal does not
// say; with more experts a character stands for several.
const mapWidth = 64

// coverage prints who holds what of each model.
func coverage(ctx context.Context, c console, f *flags) error {
	f.daemonFlags()
	asJSON := f.Bool("json", false, "print it as JSON")
	width := f.Int("width", mapWidth, "`characters` per layer")
	daemon, err := f.parseForDaemon(c)
	if err != nil {
		return err
	}
	if *width < 8 || *width > 4096 {
		return usagef("--width %d: want 8 to 4096", *width)
	}
	maps, err := daemon.Coverage(ctx)
	if err != nil {
		return err
	}
	if *asJSON {
		return printJSON(c.out, maps)
	}
	var text strings.Builder
	for i, m := range maps {
		if i > 0 {
			fmt.Fprintln(&text)
		}
		printCoverage(&text, m, *width, colours(c.out))
	}
	if len(maps) == 0 {
		fmt.Fprintln(&text, "No model is known yet: nobody has announced one. `kvasir model add FILE` brings one, `kvasir status` shows the peers.")
	}
	_, err = io.WriteString(c.out, text.String())
	return err
}

// colours reports whether a person looks at a terminal that shows them.
func colours(w io.Writer) bool {
	f, ok := w.(*os.File)
	if !ok || os.Getenv("NO_COLOR") != "" || os.Getenv("TERM") == "dumb" {
		return false
	}
	info, err := f.Stat()
	return err == nil && info.Mode()&os.ModeCharDevice != 0
}

// printCoverage writes one model: a sentence, the map, and who holds what.
func printCoverage(w io.Writer, m api.CoverageMap, width int, colour bool) {
	fmt.Fprintf(w, "%s: %s\n", plain(m.Model), coverageSentence(m))
	if m.Price != nil {
		fmt.Fprintf(w, "Price: %s\n", priceText(m.Price))
	}
	fmt.Fprintln(w)
	per := (m.Experts + width - 1) / max(width, 1)
	for _, l := range m.Layers {
		fmt.Fprintf(w, "%5d  %s\n", l.Layer, heatRow(l, m.Target, max(per, 1), colour))
	}
	each := "one expert"
	if per > 1 {
		each = fmt.Sprintf("%d experts, and shows the rarest of them", per)
	}
	fmt.Fprintf(w, "\nA row is a layer, a character is %s: its replicas, . none, + more than 9, d none but being downloaded. Wanted: %d.\n", each, m.Target)
	for _, h := range m.Holders {
		fmt.Fprintf(w, "  %s %s\n", plain(shortID(h.Peer)), holderText(h))
	}
	if m.Ring != nil {
		printRing(w, *m.Ring)
	}
}

// printRing writes who runs windows of layers.
func printRing(w io.Writer, r api.RingMap) {
	var missing []string
	for _, m := range r.Missing {
		missing = append(missing, fmt.Sprintf("%d:%d", m.Begin, m.End))
	}
	switch {
	case r.Chains == 0:
		fmt.Fprintf(w, "\nRings: none is complete, layers %s lack.\n", strings.Join(missing, ", "))
	case r.Chains == 1:
		fmt.Fprintf(w, "\nRings: one is complete.\n")
	default:
		fmt.Fprintf(w, "\nRings: %d are complete side by side.\n", r.Chains)
	}
	for _, held := range r.Windows {
		row := []byte(strings.Repeat(".", max(r.Layers, 0)))
		for l := max(0, held.Layers.Begin); l < min(held.Layers.End, len(row)); l++ {
			row[l] = '='
		}
		fmt.Fprintf(w, "  %s  %s layers %d:%d %s\n", row, plain(shortID(held.Peer)), held.Layers.Begin, held.Layers.End, windowText(held))
	}
}

// priceText says what a model costs, in fiat units and in base units of the token.
func priceText(p *api.Price) string {
	const unit = 1_000_000 // of a fiat unit
	var parts []string
	if p.Raw > 0 {
		micro := p.Raw / 1_000_000
		parts = append(parts, fmt.Sprintf("%d.%06d for a million tokens, %d base units of the token, by the record of epoch %d",
			micro/unit, micro%unit, p.Million, p.Epoch))
	}
	if p.Trouble != "" {
		parts = append(parts, plain(p.Trouble))
	}
	return strings.Join(parts, "; ")
}

// coverageSentence says first whether the model can answer.
func coverageSentence(m api.CoverageMap) string {
	cells, missing, below := 0, 0, 0
	for _, l := range m.Layers {
		for _, n := range l.Replicas {
			cells++
			if n == 0 {
				missing++
			}
			if n < m.Target {
				below++
			}
		}
	}
	switch {
	case cells == 0:
		return "it has no experts to share"
	case missing > 0:
		return fmt.Sprintf("%d of %d experts are held by nobody", missing, cells)
	case below > 0:
		return fmt.Sprintf("every expert is held; %d of %d have fewer than %d replicas", below, cells, m.Target)
	}
	return fmt.Sprintf("every expert has %d replicas or more", m.Target)
}

// heatRow draws a layer; a character stands for per experts.
func heatRow(l api.LayerMap, target, per int, colour bool) string {
	var row strings.Builder
	for begin := 0; begin < len(l.Replicas); begin += per {
		end := min(begin+per, len(l.Replicas))
		least := slices.Min(l.Replicas[begin:end])
		cell := "."
		switch {
		case least > 9:
			cell = "+"
		case least > 0:
			cell = strconv.Itoa(least)
		case len(l.Claimed) == len(l.Replicas) && claimed(l, begin, end):
			cell = "d"
		}
		if colour {
			cell = paint(cell, least, target)
		}
		row.WriteString(cell)
	}
	return row.String()
}

// claimed reports whether every expert that nobody serves is being downloaded.
func claimed(l api.LayerMap, begin, end int) bool {
	for e := begin; e < end; e++ {
		if l.Replicas[e] == 0 && l.Claimed[e] == 0 {
			return false
		}
	}
	return true
}

func paint(cell string, replicas, target int) string {
	const red, yellow, green = 41, 43, 42
	code := green
	switch {
	case replicas == 0:
		code = red
	case replicas < target:
		code = yellow
	}
	return fmt.Sprintf("\x1b[30;%dm%s\x1b[0m", code, cell)
}

func holderText(h api.Holder) string {
	var parts []string
	if h.Whole {
		parts = append(parts, "has the whole model")
	}
	if len(h.Serving) > 0 {
		parts = append(parts, "serves "+slicesText(h.Serving))
	}
	if len(h.Claimed) > 0 {
		parts = append(parts, "downloads "+slicesText(h.Claimed))
	}
	if h.Leaving {
		parts = append(parts, "is leaving")
	}
	if len(parts) == 0 {
		return "holds nothing"
	}
	return strings.Join(parts, ", ")
}

func slicesText(list []api.Slice) string {
	var texts []string
	for _, s := range list {
		texts = append(texts, sliceText(s))
	}
	return strings.Join(texts, "; ")
}
