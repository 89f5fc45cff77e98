package gguf

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
)

// Kind says how much of a model a file holds.
type Kind int

// The kinds of files.
const (
	Full        Kind = iota // a stock model
	ExpertSlice             // the experts of a Slice, nothing else
	Stage                   // a window of layers, numbered from 0
	Backbone                // the whole model with holes where experts are
	Partial                 // a model of which some bytes are not held yet, see OpenKnown
)

// String returns the kind's name.
func (k Kind) String() string {
	return [...]string{"full model", "expert slice", "stage", "backbone", "partial model"}[k]
}

// Part is one file of a model.
type Part struct {
	Path string
	*Header
	file io.ReaderAt
	held func(off, n int64) bool // nil: all of the file
}

// Located is a tensor and the file it is in.
type Located struct {
	Tensor
	Part int // index in Parts
}

// Model is an opened model: one GGUF file or all files of a split set.
type Model struct {
	parts    []Part
	closers  []io.Closer
	tensors  []Located // by file, then by offset
	byName   map[string]int
	arch     string
	layers   int // block_count, so with multi-token-prediction layers
	experts  int // per layer of the whole model; 0 without experts
	used     int
	perGroup int // experts per row of a chunk-expert tensor (grovemoe)

	kind       Kind
	id         ModelID // unless Full
	slice      Slice   // of an ExpertSlice; Layers also of a Stage
	holes      []Slice // of a Backbone
	expertRefs [][]expertRef

	sumsMu sync.Mutex // guards sums
	sums   []FileSum  // from the start of a Backbone and by OpenKnown, of another Full once computed
}

// maxSplit is the largest number of files in a split set, as the name has 5 digits.
const maxSplit = 99999

// OpenModel opens the model that the file belongs to: the file itself, or, when it
// is one of a split set (split.count > 1, named …-00002-of-00005.gguf), all of them.
func OpenModel(path string) (*Model, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("gguf: %w", err)
	}
	defer f.Close()
	h, err := parseFile(f, path)
	if err != nil {
		return nil, err
	}
	count, err := h.Meta.count("split.count", 1, maxSplit)
	if err != nil {
		return nil, fmt.Errorf("%w in %s", err, path)
	}
	if count <= 1 {
		return Open(path)
	}
	no, err := h.Meta.count("split.no", 0, maxSplit)
	if err != nil {
		return nil, fmt.Errorf("%w in %s", err, path)
	}
	prefix, ok := strings.CutSuffix(path, splitSuffix(no, count))
	if !ok {
		return nil, fmt.Errorf("gguf: %s is part %d of %d: its name must end in %s, as its neighbours' do", path, no+1, count, splitSuffix(no, count))
	}
	paths := make([]string, 0, min(count, 1024))
	for i := range count {
		part := prefix + splitSuffix(i, count)
		if _, err := os.Stat(part); err != nil {
			return nil, fmt.Errorf("gguf: part %d of %d is missing: %w", i+1, count, err)
		}
		paths = append(paths, part)
	}
	return Open(paths...)
}

// splitSuffix returns the end of the name of part i (from 0) of a split set.
func splitSuffix(i, count int) string { return fmt.Sprintf("-%05d-of-%05d.gguf", i+1, count) }

// Open opens a model from all of its files, in order.
func Open(paths ...string) (*Model, error) {
	m := &Model{byName: make(map[string]int)}
	if err := m.open(paths); err != nil {
		m.Close()
		return nil, err
	}
	return m, nil
}

func (m *Model) open(paths []string) error {
	if len(paths) == 0 {
		return errors.New("gguf: no file to open")
	}
	for i, path := range paths {
		f, err := os.Open(path)
		if err != nil {
			return fmt.Errorf("gguf: %w", err)
		}
		m.closers = append(m.closers, f)
		m.parts = append(m.parts, Part{Path: path, file: f})
		h, err := parseFile(f, path)
		if err != nil {
			return err
		}
		m.parts[i].Header = h
		if err := m.addTensors(i); err != nil {
			return err
		}
	}
	return m.index(m.readKind)
}

// index reads what the headers say of the model as a whole.
func (m *Model) index(readKind func() error) error {
	for _, check := range []func() error{m.checkSplit, m.readShape, readKind, m.indexExperts} {
		if err := check(); err != nil {
			return fmt.Errorf("%w (in %s)", err, m.parts[0].Path)
		}
	}
	return nil
}

func parseFile(f *os.File, path string) (*Header, error) {
	info, err := f.Stat()
	if err != nil {
		return nil, fmt.Errorf("gguf: %w", err)
	}
	if !info.Mode().IsRegular() {
		return nil, fmt.Errorf("gguf: %s is not a regular file", path)
	}
	h, err := Parse(f, info.Size())
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return h, nil
}

func (m *Model) addTensors(part int) error {
	for _, t := range m.parts[part].Tensors {
		if i, dup := m.byName[t.Name]; dup {
			return fmt.Errorf("gguf: tensor %q is in %s and in %s", t.Name, m.parts[m.tensors[i].Part].Path, m.parts[part].Path)
		}
		m.byName[t.Name] = len(m.tensors)
		m.tensors = append(m.tensors, Located{t, part})
	}
	return nil
}

// checkSplit checks that the files are a whole split set in order.
func (m *Model) checkSplit() error {
	count, err := m.Meta().count("split.count", 1, maxSplit)
	if err != nil {
		return err
	}
	if max(count, 1) != len(m.parts) {
		return fmt.Errorf("gguf: the model has %d files (split.count), %d were given", count, len(m.parts))
	}
	if len(m.parts) == 1 {
		return nil
	}
	for i, p := range m.parts {
		no, err := p.Meta.count("split.no", -1, maxSplit)
		if err != nil {
			return err
		}
		if no != i {
			return fmt.Errorf("gguf: %s has split.no %d where %d is wanted", p.Path, no, i)
		}
	}
	total, err := m.Meta().Int("split.tensors.count")
	if err != nil {
		return err
	}
	if total != int64(len(m.tensors)) {
		return fmt.Errorf("gguf: the split set has %d tensors, split.tensors.count says %d", len(m.tensors), total)
	}
	return nil
}

// readShape reads the sizes that metadata announces.
func (m *Model) readShape() error {
	var err error
	if m.arch, err = m.Meta().Text("general.architecture"); err != nil {
		return err
	}
	for _, field := range []struct {
		key string
		dst *int
	}{
		{"block_count", &m.layers}, {"expert_count", &m.experts}, {"experts_per_group", &m.perGroup},
	} {
		if *field.dst, err = m.Meta().count(m.arch+"."+field.key, 0, maxIndex); err != nil {
			return err
		}
	}
	// The number used may differ by layer; the largest is what a caller must provide for.
	key := m.arch + ".expert_used_count"
	if list, err := m.Meta().Ints(key); err == nil {
		for _, n := range list {
			m.used = max(m.used, int(min(max(n, 0), maxIndex)))
		}
	} else if m.used, err = m.Meta().count(key, 0, maxIndex); err != nil {
		return err
	}
	m.expertRefs = make([][]expertRef, m.layers)
	return nil
}

// Close closes the files that Open opened. It may be called more than once.
func (m *Model) Close() error {
	var errs []error
	for _, f := range m.closers {
		errs = append(errs, f.Close())
	}
	m.closers = nil
	return errors.Join(errs...)
}

// Meta returns the metadata of the model, which is that of its first file.
func (m *Model) Meta() Metadata { return m.parts[0].Meta }

// Arch returns general.architecture.
func (m *Model) Arch() string { return m.arch }

// Layers returns the number of layers, which counts layers for multi-token prediction.
func (m *Model) Layers() int { return m.layers }

// Experts returns the number of experts per MoE layer of the whole model, also when
// this file holds fewer; 0 for a model without experts.
func (m *Model) Experts() int { return m.experts }

// ExpertsUsed returns the number of experts that a token uses, the largest of all layers.
func (m *Model) ExpertsUsed() int { return m.used }

// Kind says how much of the model this is.
func (m *Model) Kind() Kind { return m.kind }

// Slice returns what an expert slice holds, and the window of a stage (its Experts
// are then empty); the zero Slice for other kinds.
func (m *Model) Slice() Slice { return m.slice }

// Holes returns the slices that a backbone leaves out. The caller must not change it.
func (m *Model) Holes() []Slice { return m.holes }

// Parts returns the files of the model. The caller must not change it.
func (m *Model) Parts() []Part { return m.parts }

// Tensors returns all tensors by file and offset. The caller must not change it.
func (m *Model) Tensors() []Located { return m.tensors }

// Tensor returns the tensor of a name.
func (m *Model) Tensor(name string) (Located, bool) {
	i, ok := m.byName[name]
	if !ok {
		return Located{}, false
	}
	return m.tensors[i], true
}

// Section returns a reader over a tensor's bytes. It refuses a tensor that is not
// held in full, as the expert tensors of a backbone are not (ErrNotHeld).
func (m *Model) Section(name string) (*io.SectionReader, error) {
	t, ok := m.Tensor(name)
	if !ok {
		return nil, fmt.Errorf("gguf: no tensor %q in %s", name, m.parts[0].Path)
	}
	if e, ok := parseExpertName(name); ok && e.isHoled() {
		for _, hole := range m.holes {
			if hole.Layers.Contains(e.layer) {
				return nil, fmt.Errorf("gguf: %s: %w: the backbone has a hole there", name, ErrNotHeld)
			}
		}
	}
	part := m.parts[t.Part]
	if !part.holds(t.Offset, t.Bytes) {
		return nil, fmt.Errorf("gguf: %s: %w: they are still to be fetched", name, ErrNotHeld)
	}
	return io.NewSectionReader(part.file, t.Offset, t.Bytes), nil
}

// holds reports whether n bytes at off are here.
func (p Part) holds(off, n int64) bool { return p.held == nil || p.held(off, n) }

// baseName returns the file name of a part without its folder.
func (p Part) baseName() string { return filepath.Base(p.Path) }
