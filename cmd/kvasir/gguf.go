package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strings"
	"syscall"
	"text/tabwriter"

	"kvasird/ggml/gguf"
)

var ggufCommands = []command{
	{name: "inspect", args: "[flags] FILE", about: "print what a model file is and holds", run: inspect},
	{name: "slice", args: "--layers A:B --experts C:D --out OUT FILE", about: "cut the experts that a worker serves out of a model", run: cutSlice},
	{name: "stage", args: "--layers A:B --out OUT FILE", about: "cut a window of layers out of a model", run: cutStage},
	{name: "backbone", args: "--out OUT FILE", about: "copy a model without its experts, as a file with holes", run: cutBackbone},
}

// openOne opens the one FILE that a command takes.
func openOne(c console, f *flags) (*gguf.Model, error) {
	rest, err := f.parse(c)
	if err != nil {
		return nil, err
	}
	if len(rest) != 1 {
		return nil, usagef("%s takes one FILE, got %d. See `%s --help`", f.Name(), len(rest), f.Name())
	}
	return gguf.OpenModel(rest[0])
}

// inspect prints the header in words, then the metadata.
func inspect(ctx context.Context, c console, f *flags) error {
	tensors := f.Bool("tensors", false, "list the tensors too")
	id := f.Bool("id", false, "compute the model id, which reads the whole model")
	m, err := openOne(c, f)
	if err != nil {
		return err
	}
	defer m.Close()
	var text strings.Builder
	t := tabwriter.NewWriter(&text, 0, 0, 2, ' ', 0)
	summary(t, m)
	if *id || m.Kind() != gguf.Full {
		sum, err := m.ID(ctx)
		if err != nil {
			return err
		}
		fmt.Fprintf(t, "Model id\t%v\n", sum)
	}
	fmt.Fprintf(t, "\nMetadata\t%d\n", m.Meta().Len())
	for i := range m.Meta().Len() {
		kv := m.Meta().At(i)
		fmt.Fprintf(t, "  %s\t%v\t%v\n", kv.Key, kv.Value.Type(), kv.Value)
	}
	if *tensors {
		fmt.Fprintf(t, "\nTensors\t%d\n", len(m.Tensors()))
		for _, x := range m.Tensors() {
			fmt.Fprintf(t, "  %s\t%v\t%v\tpart %d at %d\t%d bytes\n", x.Name, x.DType, x.Shape, x.Part, x.Offset, x.Bytes)
		}
	}
	t.Flush()
	_, err = io.WriteString(c.out, plain(text.String()))
	return err
}

func summary(t io.Writer, m *gguf.Model) {
	fmt.Fprintf(t, "Kind\t%v\n", m.Kind())
	fmt.Fprintf(t, "Architecture\t%s\n", m.Arch())
	fmt.Fprintf(t, "Layers\t%d\n", m.Layers())
	switch m.Kind() {
	case gguf.ExpertSlice:
		fmt.Fprintf(t, "Slice\t%v\n", m.Slice())
	case gguf.Stage:
		fmt.Fprintf(t, "Window\tlayers %v\n", m.Slice().Layers)
	case gguf.Backbone:
		fmt.Fprintf(t, "Left out\t%v\n", m.Holes())
	}
	var all, inExperts int64
	for _, x := range m.Tensors() {
		all += x.Bytes
	}
	if n := m.Experts(); n > 0 {
		fmt.Fprintf(t, "Experts\t%d per layer in %d layers, %d used per token\n", n, len(m.ExpertLayers()), m.ExpertsUsed())
		inExperts = expertBytes(m)
	}
	if inExperts > 0 {
		fmt.Fprintf(t, "Weights\t%s, %s of them experts\n", bytesText(all), bytesText(inExperts))
	} else {
		fmt.Fprintf(t, "Weights\t%s\n", bytesText(all))
	}
	for _, p := range m.Parts() {
		fmt.Fprintf(t, "File\t%s, GGUF v%d, %s", p.Path, p.Version, bytesText(p.Size))
		if disk, err := diskBytes(p.Path); err == nil && disk < p.Size {
			fmt.Fprintf(t, ", %s on disk", bytesText(disk))
		}
		fmt.Fprintln(t)
	}
}

// expertBytes is 0 where the file does not hold them.
func expertBytes(m *gguf.Model) (n int64) {
	held := gguf.Range{End: m.Experts()}
	if m.Kind() == gguf.ExpertSlice {
		held = m.Slice().Experts
	}
	for _, layer := range m.ExpertLayers() {
		list, err := m.ExpertTensors(layer, held)
		if err != nil {
			return 0
		}
		for _, x := range list {
			n += x.Bytes
		}
	}
	return n
}

// target is the file that a command writes.
type target struct {
	path  *string
	force *bool
}

func (f *flags) target() target {
	return target{f.String("out", "", "`file` to write"), f.Bool("force", false, "replace the file if it is there")}
}

func (t target) check(f *flags) error {
	if *t.path == "" {
		return usagef("%s: --out is missing. See `%s --help`", f.Name(), f.Name())
	}
	if _, err := os.Lstat(*t.path); !*t.force && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%s is already there: remove it, or add --force", *t.path)
	}
	return nil
}

// report says what was written.
func (t target) report(c console, what string) error {
	info, err := os.Stat(*t.path)
	if err != nil {
		return err
	}
	disk, err := diskBytes(*t.path)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(c.out, "%s: %s, %s, %s on disk\n", *t.path, what, bytesText(info.Size()), bytesText(disk))
	return err
}

// rangeFlag adds a flag for a half-open range.
func (f *flags) rangeFlag(name, usage string) *gguf.Range {
	r := new(gguf.Range)
	f.Func(name, usage, func(s string) (err error) {
		*r, err = gguf.ParseRange(s)
		return err
	})
	return r
}

func cutSlice(ctx context.Context, c console, f *flags) error {
	to := f.target()
	layers := f.rangeFlag("layers", "`range` such as 0:4 (default: all)")
	experts := f.rangeFlag("experts", "`range` such as 0:16 (default: all)")
	m, err := openOne(c, f)
	if err != nil {
		return err
	}
	defer m.Close()
	if err := to.check(f); err != nil {
		return err
	}
	s := gguf.Slice{Layers: *layers, Experts: *experts}
	if s.Layers.Len() == 0 {
		s.Layers = gguf.Range{End: m.Layers()}
	}
	if s.Experts.Len() == 0 {
		s.Experts = gguf.Range{End: m.Experts()}
	}
	image, err := m.SliceImage(ctx, s)
	if err != nil {
		return err
	}
	if err := image.WriteFile(ctx, *to.path); err != nil {
		return err
	}
	return to.report(c, fmt.Sprintf("layers %v experts %v", s.Layers, s.Experts))
}

func cutStage(ctx context.Context, c console, f *flags) error {
	to := f.target()
	layers := f.rangeFlag("layers", "`range` such as 0:2")
	m, err := openOne(c, f)
	if err != nil {
		return err
	}
	defer m.Close()
	if layers.Len() == 0 {
		return usagef("%s: --layers is missing. See `%s --help`", f.Name(), f.Name())
	}
	if err := to.check(f); err != nil {
		return err
	}
	image, err := m.StageImage(ctx, *layers)
	if err != nil {
		return err
	}
	if err := image.WriteFile(ctx, *to.path); err != nil {
		return err
	}
	return to.report(c, fmt.Sprintf("layers %v", *layers))
}

func cutBackbone(ctx context.Context, c console, f *flags) error {
	to := f.target()
	m, err := openOne(c, f)
	if err != nil {
		return err
	}
	defer m.Close()
	if err := to.check(f); err != nil {
		return err
	}
	if err := gguf.WriteBackbone(ctx, *to.path, m); err != nil {
		return err
	}
	return to.report(c, "backbone without experts")
}

// diskBytes is what a file takes on disk, its holes left out.
func diskBytes(path string) (int64, error) {
	var st syscall.Stat_t
	if err := syscall.Stat(path, &st); err != nil {
		return 0, fmt.Errorf("%s: %w", path, err)
	}
	return st.Blocks * 512, nil
}

func bytesText(n int64) string {
	switch {
	case n >= 1<<30:
		return fmt.Sprintf("%.1f GiB", float64(n)/(1<<30))
	case n >= 1<<20:
		return fmt.Sprintf("%.1f MiB", float64(n)/(1<<20))
	}
	return fmt.Sprintf("%d bytes", n)
}
