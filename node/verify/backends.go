package verify

import (
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"kvasird/experts/tolerance"
	"kvasird/ggml"
)

// Backends lists what may compute on this machine: plain Go, each CPU variant in libDir
// ("" = where the linked library lies), whether or not this CPU runs it, and each other
// device.
func Backends(libDir string) ([]Backend, error) {
	rt, err := ggml.Open(ggml.Config{LibDir: libDir})
	if err != nil {
		return nil, err
	}
	list := []Backend{{Name: tolerance.Reference}}
	libs, err := filepath.Glob(filepath.Join(rt.LibDir(), "libggml-cpu-*.so"))
	if err != nil {
		return nil, err
	}
	slices.Sort(libs)
	for _, lib := range libs {
		variant := strings.TrimSuffix(strings.TrimPrefix(filepath.Base(lib), "libggml-cpu-"), ".so")
		list = append(list, Backend{Name: tolerance.Name("CPU", variant), Variant: variant})
	}
	if len(libs) == 0 {
		list = append(list, Backend{Name: tolerance.Name("CPU", rt.Variant())})
	}
	for _, d := range rt.Devices() {
		if d.Kind != "cpu" {
			list = append(list, Backend{Name: tolerance.Name(d.Backend, ""), Device: d.Name})
		}
	}
	return list, nil
}

// Choose picks backends by name.
func Choose(all []Backend, names []string) (chosen []Backend, err error) {
	var known []string
	for _, b := range all {
		known = append(known, b.Name)
	}
	for _, n := range names {
		i := slices.IndexFunc(all, func(b Backend) bool {
			return b.Name == n || b.Name == tolerance.Name("CPU", n) || b.Device == n && n != ""
		})
		if i < 0 {
			return nil, fmt.Errorf("no backend %q here; there are: %s", n, strings.Join(known, ", "))
		}
		if !slices.Contains(chosen, all[i]) {
			chosen = append(chosen, all[i])
		}
	}
	return chosen, nil
}
