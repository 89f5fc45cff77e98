package node

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/pelletier/go-toml/v2"

	"kvasird/ring/plan"
)

// maxSpecFile bounds a description of nodes, in bytes.
const maxSpecFile = 1 << 20

// unlimitedDisk is what a node has whose description does not say.
const unlimitedDisk = 1 << 60

// planSpec is a description of nodes: a TOML file. Sizes are texts such as "64 GB",
// rates such as "40 GB/s", times such as "300us". What is left out is guessed.
type planSpec struct {
	RTT  string     `toml:"rtt"` // between nodes that no link names
	Node []specNode `toml:"node"`
	Link []specLink `toml:"link"`
}

type specNode struct {
	Name     string `toml:"name"`
	RAM      string `toml:"ram"`
	VRAM     string `toml:"vram"`      // "": no GPU
	Disk     string `toml:"disk"`      // "": enough
	HasModel bool   `toml:"has_model"` // nothing is to be downloaded
	Cores    int    `toml:"cores"`     // to guess from where no bandwidth is given

	// As `kvasir plan --measure` prints them: the bytes of weights that one row goes
	// through in a second, that every further row of a step does, and the fixed time
	// of a layer.
	MemoryBandwidth string `toml:"memory_bandwidth"`
	BatchBandwidth  string `toml:"batch_bandwidth"`
	LayerTime       string `toml:"layer_time"`

	GPUBandwidth      string `toml:"gpu_bandwidth"`
	GPUBatchBandwidth string `toml:"gpu_batch_bandwidth"`
	GPULayerTime      string `toml:"gpu_layer_time"`

	Upload   string `toml:"upload"` // per second
	Download string `toml:"download"`
	CallTime string `toml:"call_time"` // of asking another node, beyond the round trip
}

type specLink struct {
	Between []string `toml:"between"` // two names
	RTT     string   `toml:"rtt"`
}

// readPlanSpec reads a description of nodes that is sound.
func readPlanSpec(path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", fmt.Errorf("description of nodes: %w", err)
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, maxSpecFile+1))
	if err != nil {
		return "", fmt.Errorf("description of nodes: %w", err)
	}
	if len(text) > maxSpecFile {
		return "", fmt.Errorf("description of nodes: %s is larger than %d bytes", path, maxSpecFile)
	}
	if _, _, err := parsePlanSpec(text); err != nil {
		return "", fmt.Errorf("description of nodes: %s:%w", path, err)
	}
	return string(text), nil
}

// parsePlanSpec decodes strictly; errors about the form begin with the line.
func parsePlanSpec(text []byte) ([]plan.Node, roundTrip, error) {
	var spec planSpec
	err := toml.NewDecoder(bytes.NewReader(text)).DisallowUnknownFields().Decode(&spec)
	var unknown *toml.StrictMissingError
	var bad *toml.DecodeError
	switch {
	case errors.As(err, &unknown) && len(unknown.Errors) > 0:
		line, _ := unknown.Errors[0].Position()
		key := strings.Join(unknown.Errors[0].Key(), ".")
		return nil, nil, fmt.Errorf("%d: unknown key %q%s", line, key, Suggest(key, configKeys(reflect.TypeFor[planSpec](), "")))
	case errors.As(err, &bad):
		line, column := bad.Position()
		return nil, nil, fmt.Errorf("%d:%d: %s", line, column, strings.TrimPrefix(bad.Error(), "toml: "))
	case err != nil:
		return nil, nil, err
	}
	if len(spec.Node) == 0 || len(spec.Node) > plan.MaxNodes {
		return nil, nil, fmt.Errorf(" %d nodes: want a [[node]] for each, 1 to %d", len(spec.Node), plan.MaxNodes)
	}
	var nodes []plan.Node
	for i, s := range spec.Node {
		n, err := s.node()
		if err != nil {
			return nil, nil, fmt.Errorf(" node %d (%s): %w", i+1, s.Name, err)
		}
		nodes = append(nodes, n)
	}
	rtt, err := spec.links(nodes)
	return nodes, rtt.between, err
}

// node reads the texts of one node.
func (s specNode) node() (plan.Node, error) {
	n := plan.Node{Name: s.Name, Has: s.HasModel, Cores: s.Cores, Disk: unlimitedDisk}
	if s.Name == "" {
		return n, errors.New("it has no name")
	}
	if s.RAM == "" {
		return n, errors.New(`it has no ram: say how much it gives, such as ram = "16 GB"`)
	}
	if s.Cores < 0 || s.Cores > maxThreads {
		return n, fmt.Errorf("cores = %d: want 0 to %d", s.Cores, maxThreads)
	}
	for _, f := range []struct {
		key, text string
		to        *int64
	}{{"ram", s.RAM, &n.RAM}, {"vram", s.VRAM, &n.VRAM}, {"disk", s.Disk, &n.Disk}} {
		if f.text == "" {
			continue
		}
		v, err := parseBytes(f.text)
		if err != nil {
			return n, fmt.Errorf("%s %q: %w", f.key, f.text, err)
		}
		*f.to = v
	}
	for _, f := range []struct {
		key, text string
		to        *float64
	}{
		{"memory_bandwidth", s.MemoryBandwidth, &n.CPU.Bytes}, {"batch_bandwidth", s.BatchBandwidth, &n.CPU.Batch},
		{"gpu_bandwidth", s.GPUBandwidth, &n.GPU.Bytes}, {"gpu_batch_bandwidth", s.GPUBatchBandwidth, &n.GPU.Batch},
		{"upload", s.Upload, &n.Up}, {"download", s.Download, &n.Down},
	} {
		if f.text == "" {
			continue
		}
		v, err := parseBytes(strings.TrimSuffix(strings.TrimSpace(f.text), "/s"))
		if err != nil {
			return n, fmt.Errorf("%s %q: want a rate such as 40 GB/s", f.key, f.text)
		}
		*f.to = float64(v)
	}
	for _, f := range []struct {
		key, text string
		to        *time.Duration
	}{{"layer_time", s.LayerTime, &n.CPU.Layer}, {"gpu_layer_time", s.GPULayerTime, &n.GPU.Layer}, {"call_time", s.CallTime, &n.Call}} {
		v, err := parseSpan(f.key, f.text)
		if err != nil {
			return n, err
		}
		*f.to = v
	}
	return n, nil
}

// parseSpan reads a time; "" is 0.
func parseSpan(key, text string) (time.Duration, error) {
	if text == "" {
		return 0, nil
	}
	d, err := time.ParseDuration(strings.ReplaceAll(text, " ", ""))
	if err != nil || d < 0 || d > time.Minute {
		return 0, fmt.Errorf("%s %q: want a time such as 300us or 20ms", key, text)
	}
	return d, nil
}

// roundTrip is what plan.Query.RTT asks.
type roundTrip = func(a, b string) (time.Duration, bool)

// planRTT are round trips between named nodes; that of two empty names stands for
// all others.
type planRTT map[[2]string]time.Duration

func (r planRTT) set(a, b string, d time.Duration) { r[[2]string{min(a, b), max(a, b)}] = d }

func (r planRTT) between(a, b string) (time.Duration, bool) {
	d, ok := r[[2]string{min(a, b), max(a, b)}]
	if !ok {
		d, ok = r[[2]string{}]
	}
	return d, ok
}

func (spec *planSpec) links(nodes []plan.Node) (planRTT, error) {
	rtt := planRTT{}
	var names []string
	for _, n := range nodes {
		names = append(names, n.Name)
	}
	if spec.RTT != "" {
		d, err := parseSpan("rtt", spec.RTT)
		if err != nil {
			return nil, fmt.Errorf(" %w", err)
		}
		rtt.set("", "", d)
	}
	for i, l := range spec.Link {
		if len(l.Between) != 2 || l.Between[0] == l.Between[1] || l.RTT == "" {
			return nil, fmt.Errorf(` link %d: want between = ["A", "B"] and rtt = "20ms"`, i+1)
		}
		for _, name := range l.Between {
			if !slices.Contains(names, name) {
				return nil, fmt.Errorf(" link %d: no node is named %q%s", i+1, name, Suggest(name, names))
			}
		}
		d, err := parseSpan("rtt", l.RTT)
		if err != nil {
			return nil, fmt.Errorf(" link %d: %w", i+1, err)
		}
		rtt.set(l.Between[0], l.Between[1], d)
	}
	return rtt, nil
}
