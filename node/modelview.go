package node

import (
	"context"
	"fmt"
	"io"
	"os"
	"strings"
	"text/tabwriter"
	"time"
	"unicode"

	"kvasird/node/api"
)

// plainEvery is the pace of progress lines where they cannot be rewritten.
const plainEvery = 5 * time.Second

// ManageModels is `kvasird model`: args are the files of one model for "add",
// nothing for "list", and a model for "verify", "remove", "pin" and "unpin". The
// result goes to out, how far it is to progress.
func ManageModels(ctx context.Context, cfg Config, action string, args []string, out, progress io.Writer) error {
	req := api.ModelRequest{Action: api.ModelAction(action)}
	if req.Action == api.ModelAdd {
		req.Paths = args
	} else if len(args) > 0 {
		req.Model = args[0]
	}
	terminal, _ := progress.(*os.File)
	line := progressLine{w: progress, rewrite: terminal != nil && isTerminal(terminal)}
	var last api.ModelEvent
	err := modelCommand(ctx, cfg, req, func(ev api.ModelEvent) error {
		if ev.Progress != nil {
			line.show(*ev.Progress, time.Now())
		}
		if ev.Done {
			last = ev
		}
		return nil
	})
	line.end()
	if err != nil {
		return err
	}
	_, err = io.WriteString(out, printable(modelText(req.Action, last)))
	return err
}

// progressLine shows how far something is: in one line of a terminal, else in
// lines now and then.
type progressLine struct {
	w       io.Writer
	rewrite bool
	last    time.Time // of the latest line
}

func (l *progressLine) show(p api.Progress, now time.Time) {
	switch {
	case l.rewrite:
		fmt.Fprintf(l.w, "\r%s\x1b[K", progressText(p))
	case now.Sub(l.last) < plainEvery && p.Done < p.Total:
		return
	default:
		fmt.Fprintln(l.w, progressText(p))
	}
	l.last = now
}

func (l *progressLine) end() {
	if l.rewrite && !l.last.IsZero() {
		fmt.Fprintln(l.w)
	}
}

// progressText is "import 45%, 1.2 GiB of 2.7 GiB, 310.0 MiB/s, 5s left".
func progressText(p api.Progress) string {
	var b strings.Builder
	b.WriteString(p.What)
	if p.Total > 0 {
		fmt.Fprintf(&b, " %d%%", int64(100*(float64(p.Done)/float64(p.Total))))
	}
	fmt.Fprintf(&b, ", %s of %s", bytesText(p.Done), bytesText(p.Total))
	if p.Rate > 0 {
		fmt.Fprintf(&b, ", %s/s", bytesText(int64(p.Rate)))
	}
	if p.LeftSec > 0 {
		fmt.Fprintf(&b, ", %v left", time.Duration(p.LeftSec*float64(time.Second)).Round(time.Second))
	}
	return b.String()
}

// modelText says what came of an action.
func modelText(action api.ModelAction, ev api.ModelEvent) string {
	var b strings.Builder
	if action == api.ModelList {
		writeModelTable(&b, ev.Models)
	} else {
		for _, m := range ev.Models {
			fmt.Fprintf(&b, "%s %s, id %s: %s\n", doneTexts[action].verb, m.Name, m.ID, doneTexts[action].result(m))
			if m.Note != "" {
				fmt.Fprintf(&b, "But: %s\n", m.Note)
			}
		}
	}
	if ev.Note != "" {
		fmt.Fprintf(&b, "But: %s\n", ev.Note)
	}
	return b.String()
}

var doneTexts = map[api.ModelAction]struct {
	verb   string
	result func(m api.StoredModel) string
}{
	api.ModelAdd:    {"Added", func(m api.StoredModel) string { return heldText(m) + ", which stay where they are." }},
	api.ModelVerify: {"Verified", func(m api.StoredModel) string { return heldText(m) + " are as they should be." }},
	api.ModelRemove: {"Removed", func(api.StoredModel) string { return "files that were added stay where they are." }},
	api.ModelPin:    {"Pinned", func(api.StoredModel) string { return "nothing of it is dropped to make room." }},
	api.ModelUnpin:  {"Unpinned", func(api.StoredModel) string { return "it may be dropped to make room." }},
}

func heldText(m api.StoredModel) string {
	if m.Held == m.Total {
		return bytesText(m.Total)
	}
	return bytesText(m.Held) + " of " + bytesText(m.Total)
}

func writeModelTable(w io.Writer, models []api.StoredModel) {
	if len(models) == 0 {
		fmt.Fprintln(w, "No model is in the store: `kvasir model add FILE.gguf` brings one.")
		return
	}
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "NAME\tHELD\tPINNED\tID\tNOTE")
	for _, m := range models {
		pinned := "no"
		if m.Pinned {
			pinned = "yes"
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\n", m.Name, heldText(m), pinned, m.ID, strings.ReplaceAll(m.Note, "\n", "; "))
	}
	t.Flush()
}

// printable takes what could steer a terminal out of names that peers gave.
func printable(s string) string {
	return strings.Map(func(r rune) rune {
		if r == '\n' || unicode.IsPrint(r) {
			return r
		}
		return unicode.ReplacementChar
	}, s)
}
