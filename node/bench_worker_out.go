package node

import (
	"encoding/csv"
	"encoding/xml"
	"fmt"
	"io"
	"math"
	"strconv"
	"strings"
	"text/tabwriter"
)

var workerColumns = []string{"backend", "model", "batch", "tokens_per_second", "ms_per_token", "ms_per_call", "weight_bytes", "gflop", "roofline_share", "bound", "memory_gb_per_second", "peak_gflops"}

func (r workerRow) columns() []string {
	share, bound := r.Roofline()
	number := func(v float64) string { return strconv.FormatFloat(v, 'g', 4, 64) }
	return []string{
		r.Backend, r.Model, fmt.Sprint(r.Batch), number(r.TokensPerSecond()), number(r.Seconds * 1e3 / float64(r.Batch)), number(r.Seconds * 1e3),
		fmt.Sprint(r.Bytes), number(r.Flops / 1e9), number(share), bound, number(r.Memory / 1e9), number(r.Peak / 1e9),
	}
}

func writeWorkerCSV(out io.Writer, rows []workerRow) error {
	w := csv.NewWriter(out)
	if err := w.Write(workerColumns); err != nil {
		return err
	}
	for _, r := range rows {
		if err := w.Write(r.columns()); err != nil {
			return err
		}
	}
	w.Flush()
	return w.Error()
}

func writeWorkerTable(out io.Writer, threads int, rows []workerRow) error {
	fmt.Fprintf(out, "worker: one MoE layer, %d thread(s); the roofline is what weights from memory (F32, all experts, one row) and arithmetic (64 rows, one expert) were measured to allow\n", threads)
	t := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprint(t, "backend\tmodel\tbatch\ttokens/s\tms/token\tms/call\tof roofline\tbound\t\n")
	for _, r := range rows {
		c, share := r.columns(), 0.0
		share, _ = r.Roofline()
		fmt.Fprintf(t, "%s\t%s\t%s\t%.0f\t%s\t%s\t%.2f\t%s\t\n", c[0], c[1], c[2], r.TokensPerSecond(), c[4], c[5], share, c[9])
	}
	return t.Flush()
}

// writeWorkerSVG draws tokens/s over the batch, both in powers, a line for each backend
// and model.
func writeWorkerSVG(out io.Writer, rows []workerRow) error {
	const width, height, left, top, plot = 760, 420, 70, 20, 480
	x := func(batch float64) float64 { return left + plot*math.Log2(batch)/12 } // to 4096
	low, high := math.Inf(1), 0.0
	for _, r := range rows {
		low, high = min(low, r.TokensPerSecond()), max(high, r.TokensPerSecond())
	}
	first, last := math.Floor(math.Log10(low)), math.Ceil(math.Log10(high)+1e-9)
	y := func(rate float64) float64 {
		return top + (height-80)*(last-math.Log10(rate))/max(last-first, 1)
	}
	var s strings.Builder
	fmt.Fprintf(&s, `<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" font-family="sans-serif" font-size="11"><rect width="100%%" height="100%%" fill="white"/>`+"\n", width, height)
	for p := first; p <= last; p++ {
		at := y(math.Pow(10, p))
		fmt.Fprintf(&s, `<path d="M%d %.1fH%d" stroke="#ddd"/><text x="%d" y="%.1f" text-anchor="end">%g</text>`+"\n", left, at, left+plot, left-6, at+4, math.Pow(10, p))
	}
	for batch := 1; batch <= 4096; batch *= 4 {
		fmt.Fprintf(&s, `<text x="%.1f" y="%d" text-anchor="middle">%d</text>`+"\n", x(float64(batch)), height-40, batch)
	}
	fmt.Fprintf(&s, `<text x="%d" y="%d" text-anchor="middle">tokens in a call</text><text x="14" y="%d" transform="rotate(-90 14 %d)" text-anchor="middle">tokens/s of a layer</text>`+"\n", left+plot/2, height-18, height/2, height/2)
	type line struct{ backend, model string }
	points := map[line][]string{}
	var lines []line
	for _, r := range rows {
		l := line{r.Backend, r.Model}
		if points[l] == nil {
			lines = append(lines, l)
		}
		points[l] = append(points[l], fmt.Sprintf("%.1f,%.1f", x(float64(r.Batch)), y(r.TokensPerSecond())))
	}
	for i, l := range lines {
		colour := fmt.Sprintf("hsl(%d 70%% 40%%)", i*360/len(lines))
		fmt.Fprintf(&s, `<polyline points="%s" fill="none" stroke="%s" stroke-width="1.5"/><text x="%d" y="%d" fill="%s">`, strings.Join(points[l], " "), colour, left+plot+12, top+10+16*i, colour)
		if err := xml.EscapeText(&s, []byte(l.backend+", "+l.model)); err != nil {
			return err
		}
		s.WriteString("</text>\n")
	}
	s.WriteString("</svg>\n")
	_, err := io.WriteString(out, s.String())
	return err
}
