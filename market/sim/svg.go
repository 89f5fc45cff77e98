package sim

import (
	"bufio"
	"fmt"
	"html"
	"io"
	"math"
)

// plots are the curves of a result, one under the other.
var plots = []struct {
	name string
	of   func(Sample) float64
	most float64 // of the scale; 0: as the values are
}{
	{"price, fiat units for 10⁶ tokens", func(s Sample) float64 { return s.Price }, 0},
	{"supply, 1 in balance", func(s Sample) float64 { return s.Supply }, 0},
	{"utilisation", func(s Sample) float64 { return s.Utilisation }, 1},
	{"rejected, part of the demand", func(s Sample) float64 { return s.Rejected }, 1},
	{"rewards of an hour, fiat units", func(s Sample) float64 { return s.Rewards }, 0},
	{"insurance pool, fiat units", func(s Sample) float64 { return s.Pool }, 0},
	{"emission of an hour, fiat units", func(s Sample) float64 { return s.Emission }, 0},
}

// Of a picture, in pixels.
const (
	plotWidth, plotHeight = 720, 110
	plotLeft, plotTop     = 60, 52
	plotGap               = 34
	plotPoints            = 720
)

// SVG draws a result.
func SVG(w io.Writer, r *Result) error {
	out := bufio.NewWriter(w)
	height := plotTop + len(plots)*(plotHeight+plotGap) + 10
	fmt.Fprintf(out, `<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" font-family="sans-serif" font-size="12">`+"\n", plotLeft+plotWidth+20, height)
	fmt.Fprintf(out, `<rect width="100%%" height="100%%" fill="white"/>`+"\n")
	fmt.Fprintf(out, `<text x="%d" y="20" font-size="15">%s</text>`+"\n", plotLeft, html.EscapeString(r.Scenario.Name))
	fmt.Fprintf(out, `<text x="%d" y="38">%s</text>`+"\n", plotLeft, html.EscapeString(r.Scenario.About))
	for i, p := range plots {
		y := plotTop + i*(plotHeight+plotGap) + 16
		most := p.most
		for _, s := range r.Samples {
			most = max(most, p.of(s))
		}
		if most == 0 {
			most = 1
		}
		fmt.Fprintf(out, `<text x="%d" y="%d">%s</text>`+"\n", plotLeft, y-4, html.EscapeString(p.name))
		fmt.Fprintf(out, `<rect x="%d" y="%d" width="%d" height="%d" fill="none" stroke="#bbb"/>`+"\n", plotLeft, y, plotWidth, plotHeight)
		fmt.Fprintf(out, `<text x="%d" y="%d" text-anchor="end">%.3g</text><text x="%d" y="%d" text-anchor="end">0</text>`+"\n",
			plotLeft-5, y+10, most, plotLeft-5, y+plotHeight)
		fmt.Fprintf(out, `<polyline fill="none" stroke="#1560bd" points="`)
		for j := range plotPoints {
			s := r.Samples[j*(len(r.Samples)-1)/(plotPoints-1)]
			fmt.Fprintf(out, "%.1f,%.1f ", float64(plotLeft)+float64(j)*plotWidth/(plotPoints-1), float64(y)+plotHeight*(1-p.of(s)/most))
		}
		fmt.Fprintln(out, `"/>`)
	}
	days := len(r.Samples) / 24
	step := max(1, int(math.Round(float64(days)/6)))
	for d := 0; d <= days; d += step {
		fmt.Fprintf(out, `<text x="%d" y="%d" text-anchor="middle" fill="#555">%d d</text>`+"\n", plotLeft+d*plotWidth/max(days, 1), height-6, d)
	}
	fmt.Fprintln(out, `</svg>`)
	return out.Flush()
}
