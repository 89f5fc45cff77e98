package verify

import (
	"fmt"
	"html"
	"io"
	"math"
	"slices"
	"strings"
	"text/tabwriter"

	"kvasird/experts/tolerance"
)

// Report is what was measured; a part that was not is nil.
type Report struct {
	Operations *Operations `json:"operations,omitempty"`
	Model      *Model      `json:"model,omitempty"`
	Verdicts   []string    `json:"verdicts"` // in words
	Within     bool        `json:"within"`   // nothing is outside its band
}

// Judge fills in the verdicts. One who could not be measured is told of, and is no fault:
// a CPU runs few of the variants.
func (r *Report) Judge() {
	r.Within, r.Verdicts = true, nil
	if r.Operations != nil {
		for _, b := range r.Operations.Backends {
			r.Verdicts = append(r.Verdicts, r.Operations.verdict(b, &r.Within))
		}
	}
	if r.Model != nil {
		for i := range r.Model.Pairs {
			r.Verdicts = append(r.Verdicts, r.Model.Pairs[i].verdict(r.Model))
		}
	}
}

func (o *Operations) verdict(b Measured, within *bool) string {
	if b.Trouble != "" {
		return fmt.Sprintf("%s was not measured: %s", b.Backend, b.Trouble)
	}
	var outside []string
	unknown := false
	for _, p := range o.Pairs {
		if p.A != b.Backend && p.B != b.Backend {
			continue
		}
		unknown = unknown || !p.Band.Measured
		if !p.Within {
			what, is, allowed := "a row is off by", p.Largest.L2, p.Band.L2
			if is <= allowed {
				what, is, allowed = "a value is off by", p.Largest.Max, p.Band.Max
			}
			outside = append(outside, fmt.Sprintf("%s, %s, %s with %s: %s %.2g where %.2g is allowed", p.Op, p.Shape, p.Quant, other(p, b.Backend), what, is, allowed))
		}
	}
	switch {
	case len(outside) > 0:
		*within = false
		return fmt.Sprintf("%s is outside the tolerance in %d comparisons, first %s: do not let it compute for others before that is explained (kvasir doctor, other libraries, memory)", b.Backend, len(outside), outside[0])
	case unknown:
		return b.Backend + " is within the widest tolerance; pairs with it are not in the table"
	}
	return b.Backend + " agrees with all others within the tolerance"
}

func other(p Pair, name string) string {
	if p.A == name {
		return p.B
	}
	return p.A
}

func (p *ModelPair) verdict(m *Model) string {
	if p.Trouble != "" {
		return fmt.Sprintf("%s did not run the model: %s", p.Backend, p.Trouble)
	}
	routes := ""
	if p.Routed > 0 {
		routes = fmt.Sprintf("routes %.2f %% alike, ", 100*p.Routes)
	}
	text := fmt.Sprintf("%s %sand ", p.Backend, routes)
	switch {
	case p.Differ == 0:
		return fmt.Sprintf("%sgives the same %d tokens for all %d prompts as %s", text, m.Greedy, m.Prompts, m.Base)
	case p.Margin <= 2*p.LogitMax:
		return fmt.Sprintf("%sgives other tokens for %d of %d prompts, from token %d on, where %s was not sure: its choice was %.2g ahead, and logits differ by up to %.2g", text, p.Differ, m.Prompts, p.Diverges, m.Base, p.Margin, p.LogitMax)
	}
	return fmt.Sprintf("%sgives other tokens for %d of %d prompts, from token %d on, though %s was sure (%.2g ahead, logits of the prompts differ by up to %.2g)", text, p.Differ, m.Prompts, p.Diverges, m.Base, p.Margin, p.LogitMax)
}

// WriteText prints the report for people.
func (r *Report) WriteText(w io.Writer) error {
	if r.Operations != nil {
		if err := r.Operations.writeText(w); err != nil {
			return err
		}
	}
	if r.Model != nil {
		if err := r.Model.writeText(w); err != nil {
			return err
		}
	}
	fmt.Fprintln(w)
	for _, v := range r.Verdicts {
		fmt.Fprintln(w, v)
	}
	return nil
}

// ops are the operations of a report in their order, with the types of each.
func (o *Operations) columns() (cols [][2]string) {
	for _, p := range o.Pairs {
		if c := [2]string{p.Op, p.Quant}; !slices.Contains(cols, c) {
			cols = append(cols, c)
		}
	}
	slices.SortStableFunc(cols, func(a, b [2]string) int { return strings.Compare(a[0], b[0]) })
	return cols
}

// cell is the largest delta of two backends in a column, over the shapes.
func (o *Operations) cell(a, b string, col [2]string) (d tolerance.Delta, found, within bool) {
	within = true
	for _, p := range o.Pairs {
		if (p.A == a && p.B == b || p.A == b && p.B == a) && p.Op == col[0] && p.Quant == col[1] {
			d, found, within = d.Wider(p.Largest), true, within && p.Within
		}
	}
	return d, found, within
}

// against is the backend that the table compares with: plain Go where it was measured.
func (o *Operations) against() string {
	for _, b := range o.Backends {
		if b.Trouble == "" {
			return b.Backend
		}
	}
	return ""
}

func (o *Operations) writeText(w io.Writer) error {
	base := o.against()
	fmt.Fprintf(w, "Largest relative difference (L2 of a row) from %s; ! is outside the tolerance\n\n", base)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprint(t, "operation\ttype")
	var names []string
	for _, b := range o.Backends {
		if b.Trouble == "" && b.Backend != base {
			names = append(names, b.Backend)
			fmt.Fprint(t, "\t", b.Backend)
		}
	}
	fmt.Fprintln(t)
	for _, col := range o.columns() {
		fmt.Fprintf(t, "%s\t%s", col[0], col[1])
		for _, n := range names {
			d, found, within := o.cell(base, n, col)
			switch {
			case !found:
				fmt.Fprint(t, "\t")
			case within:
				fmt.Fprintf(t, "\t%.1e", d.L2)
			default:
				fmt.Fprintf(t, "\t%.1e!", d.L2)
			}
		}
		fmt.Fprintln(t)
	}
	return t.Flush()
}

func (m *Model) writeText(w io.Writer) error {
	fmt.Fprintf(w, "\n%s against %s: %d prompts of %d tokens, %d greedy tokens each", m.Path, m.Base, m.Prompts, m.Tokens, m.Greedy)
	if m.TextTokens > 0 {
		fmt.Fprintf(w, ", perplexity %.4f over %d tokens", m.Perplexity, m.TextTokens)
	}
	fmt.Fprint(w, "\n\n")
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprint(t, "backend\tdrift after the first, last layer\tlogits L∞\tL2\tKL mean\tKL max\ttop-1\troutes\tfirst other token")
	if m.TextTokens > 0 {
		fmt.Fprint(t, "\tperplexity")
	}
	fmt.Fprintln(t)
	for _, p := range m.Pairs {
		if p.Trouble != "" {
			continue
		}
		diverges := "none"
		if p.Diverges > 0 {
			diverges = fmt.Sprint(p.Diverges)
		}
		fmt.Fprintf(t, "%s\t%.1e, %.1e\t%.1e\t%.1e\t%.1e\t%.1e\t%.4f\t%.4f\t%s", p.Backend, p.Drift[0], p.Drift[len(p.Drift)-1],
			p.LogitMax, p.LogitL2, p.KLMean, p.KLMax, p.Top1, p.Routes, diverges)
		if m.TextTokens > 0 {
			fmt.Fprintf(t, "\t%.4f", p.Perplexity)
		}
		fmt.Fprintln(t)
	}
	return t.Flush()
}

// WriteSVG draws the whole expert of every pair of backends as heat maps, one for each
// quantisation; brighter is farther apart, a red frame is outside the tolerance.
func (r *Report) WriteSVG(w io.Writer) error {
	if r.Operations == nil {
		return fmt.Errorf("there is nothing to draw: operations were not measured")
	}
	o := r.Operations
	var names []string
	for _, b := range o.Backends {
		if b.Trouble == "" {
			names = append(names, b.Backend)
		}
	}
	var cols [][2]string
	for _, c := range o.columns() {
		if c[0] == opFFN {
			cols = append(cols, c)
		}
	}
	const cell, left, top = 44, 130, 40
	size := cell * len(names)
	fmt.Fprintf(w, `<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" font-family="sans-serif" font-size="11">`+"\n", left+size+20, len(cols)*(size+top+90))
	fmt.Fprintln(w, `<rect width="100%" height="100%" fill="white"/>`)
	for i, c := range cols {
		y := i*(size+top+90) + top
		fmt.Fprintf(w, `<text x="%d" y="%d" font-size="14">whole expert, %s: largest L2 difference of a row</text>`+"\n", left, y-14, html.EscapeString(c[1]))
		for row, a := range names {
			fmt.Fprintf(w, `<text x="%d" y="%d" text-anchor="end">%s</text>`+"\n", left-6, y+row*cell+cell/2+4, html.EscapeString(a))
			fmt.Fprintf(w, `<text transform="translate(%d %d) rotate(60)">%s</text>`+"\n", left+row*cell+cell/2-4, y+size+12, html.EscapeString(a))
			for at, b := range names {
				if d, found, within := o.cell(a, b, c); found {
					drawCell(w, left+at*cell, y+row*cell, cell, d.L2, within)
				}
			}
		}
	}
	_, err := fmt.Fprintln(w, "</svg>")
	return err
}

func drawCell(w io.Writer, x, y, size int, l2 float64, within bool) {
	heat := 0.0 // of 1e-8 to 1
	if l2 > 0 {
		heat = max(0, min(1, 1+math.Log10(l2)/8))
	}
	frame, text := "white", "white"
	if !within {
		frame = "red"
	}
	if heat > 0.6 {
		text = "black"
	}
	fmt.Fprintf(w, `<rect x="%d" y="%d" width="%d" height="%d" fill="hsl(%.0f 70%% %.0f%%)" stroke="%s"/>`+"\n", x+1, y+1, size-2, size-2, 250-200*heat, 20+50*heat, frame)
	fmt.Fprintf(w, `<text x="%d" y="%d" text-anchor="middle" fill="%s" font-size="10">%.0e</text>`+"\n", x+size/2, y+size/2+4, text, l2)
}
