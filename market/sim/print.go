package sim

import (
	"fmt"
	"io"
	"text/tabwriter"
)

// Table writes a line for each result.
func Table(w io.Writer, results []*Result) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "scenario\tprice\tsupply\tused\tserved\tleast supply\tswing\tsettled\trejecting\tat most\twash traders\tend")
	for _, r := range results {
		end := "lives"
		if r.Dead {
			end = "death spiral"
		}
		washed := ""
		if r.Washed > 0 {
			washed = fmt.Sprintf("pay %.0f", r.Washed)
		}
		settled := fmt.Sprintf("%.0f d", r.Settled)
		if r.Swing > 0.15 {
			settled = "swings"
		}
		fmt.Fprintf(t, "%s\t%.2f\t%.2f\t%.0f %%\t%.2f\t%.2f\t%.2f\t%s\t%.1f d\t%.0f %%\t%s\t%s\n", r.Scenario.Name, r.Price, r.Supply,
			100*r.Utilisation, r.Served, r.SupplyMin, r.Swing, settled, r.Rejecting, 100*r.RejectedPeak, washed, end)
	}
	return t.Flush()
}

// Days writes one line for each so many days of a result: what happened, and when.
func Days(w io.Writer, r *Result, every int) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "day\tprice\tsupply\tused\trejected\trewards/h\temission/h\tpool\ttreasury\t")
	for h := 0; h < len(r.Samples); h += 24 * max(every, 1) {
		s := r.Samples[h]
		fmt.Fprintf(t, "%d\t%.3f\t%.2f\t%.0f %%\t%.0f %%\t%.3f\t%.4f\t%.2f\t%.2f\t\n", h/24, s.Price, s.Supply, 100*s.Utilisation,
			100*s.Rejected, s.Rewards, s.Emission, s.Pool, s.Treasury)
	}
	return t.Flush()
}
