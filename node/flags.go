package node

import (
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"kvasird/node/api"
)

// ConfigName is the configuration file's name in the data folder.
const ConfigName = "kvasird.toml"

// ConfigFlags adds the settings to a command's flags. The function that it
// returns is called after the flags were parsed: it reads the file (the one of
// --config, else kvasird.toml in the data folder if there is one), lets the
// flags override it, and validates.
func ConfigFlags(set *flag.FlagSet) (load func() (Config, error)) {
	var file, data string
	var settings []func(*Config) error
	set.StringVar(&file, "config", "", "configuration `file` (default: kvasird.toml in the data folder, if there is one)")
	set.StringVar(&data, "data", "", "state `folder`")
	addSettings(set, func(apply func(*Config) error) { settings = append(settings, apply) })
	return func() (Config, error) {
		var cfg Config
		if err := readChosen(file, data, &cfg); err != nil {
			return cfg, err
		}
		if data != "" {
			cfg.Data = data
		}
		for _, apply := range settings {
			if err := apply(&cfg); err != nil {
				return cfg, err
			}
		}
		return cfg, cfg.Validate()
	}
}

// readChosen reads the named file, or the data folder's if it exists.
func readChosen(file, data string, cfg *Config) error {
	if file != "" {
		return ReadConfigFile(file, cfg)
	}
	if data == "" {
		dir, err := api.DefaultDataDir()
		if err != nil {
			return err
		}
		data = dir
	}
	path := filepath.Join(data, ConfigName)
	if _, err := os.Stat(path); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return ReadConfigFile(path, cfg)
}

// addSettings adds a flag for each setting; later is given what a flag does
// to the configuration, in the order of the command line.
func addSettings(set *flag.FlagSet, later func(func(*Config) error)) {
	text := func(name, usage string, at func(*Config) *string) {
		set.Func(name, usage, func(s string) error {
			later(func(c *Config) error { *at(c) = s; return nil })
			return nil
		})
	}
	number := func(name, usage string, at func(*Config) *int) {
		set.Func(name, usage, func(s string) error {
			n, err := strconv.Atoi(s)
			if err != nil {
				return errors.New("want a whole number")
			}
			later(func(c *Config) error { *at(c) = n; return nil })
			return nil
		})
	}
	text("network", "network `file`, or a name that is the same on every node", func(c *Config) *string { return &c.Network })
	text("ticket", "`invitation` into the network; it is remembered", func(c *Config) *string { return &c.Ticket })
	text("reach", "whether peers can connect to this node: auto, public or private", func(c *Config) *string { return &c.Reach })
	text("mdns", "find peers on the local network: on or off", func(c *Config) *string { return &c.MDNS })
	text("lane", "`host:port` of the fast lane, or off", func(c *Config) *string { return &c.Lane })
	text("http", "`host:port` of the HTTP API, or off", func(c *Config) *string { return &c.HTTP })
	text("control", "control socket `path`", func(c *Config) *string { return &c.Control })
	text("model", "GGUF `file`, or its first part, or the id of a model of the network (default: the shipped model)", func(c *Config) *string { return &c.Model.Path })
	text("experts", "where a backbone's experts are: auto, here, swarm or remote", func(c *Config) *string { return &c.Model.Experts })
	text("cache", "`size` of the experts that a backbone keeps of those that others compute", func(c *Config) *string { return &c.Model.Cache })
	text("device", "`name` of the device that a worker's experts lie on (default: the CPU)", func(c *Config) *string { return &c.Device })
	text("disk", "`size` that weights of others may take on disk, such as 20GB", func(c *Config) *string { return &c.Budget.Disk })
	text("memory", "`size` that served experts may take in memory", func(c *Config) *string { return &c.Budget.Memory })
	text("vram", "`size` that they may take on a GPU, where --device names one", func(c *Config) *string { return &c.Budget.VRAM })
	text("upload", "`size` of weights sent per second, such as 5MB", func(c *Config) *string { return &c.Budget.Upload })
	text("download", "`size` of weights fetched per second", func(c *Config) *string { return &c.Budget.Download })
	text("log-level", "debug, info, warn or error", func(c *Config) *string { return &c.Log.Level })
	text("log-file", "`file` for JSON lines", func(c *Config) *string { return &c.Log.File })
	text("drafts", "whether a backbone whose experts are elsewhere guesses tokens: auto, where it pays, or off", func(c *Config) *string { return &c.Model.Drafts })
	text("rows", "how a stage sends rows to the next one: f32 (exact) or f16 (half the bytes)", func(c *Config) *string { return &c.Model.Rows })
	text("precision", "how rows travel to experts elsewhere: auto (f32), f32 (exact), f16, bf16 (half the bytes) or q8 (a quarter)", func(c *Config) *string { return &c.Model.Precision })
	text("sums", "whether experts elsewhere send one sum for a token in place of its rows: auto (where rows take long to come and nothing is audited), on or off", func(c *Config) *string { return &c.Model.Sums })
	number("threads", "`number` of threads that compute (default: one per core)", func(c *Config) *int { return &c.Threads })
	number("context", "`tokens` of all running sequences together", func(c *Config) *int { return &c.Model.Context })
	number("deadline", "`seconds` that a request may take", func(c *Config) *int { return &c.Deadline })
	number("wait", "`seconds` that a request waits for missing experts", func(c *Config) *int { return &c.Model.Wait })
	number("gpu-layers", "`number` of a backbone's layers on the first GPU, counted from the last (-1: all)", func(c *Config) *int { return &c.Model.GPULayers })
	number("sequences", "`number` of sequences answered at a time", func(c *Config) *int { return &c.Model.Sequences })
	number("interleave", "`number` of contexts among which the sequences of a backbone whose experts are elsewhere are split (default: a second one where it pays)", func(c *Config) *int { return &c.Model.Interleave })
	addLists(set, later)
}

// addLists adds the flags that may be repeated. The first use of one replaces
// the list of the file.
func addLists(set *flag.FlagSet, later func(func(*Config) error)) {
	list := func(name, usage string, add func(c *Config, s string, first bool) error) {
		used := false
		set.Func(name, usage, func(s string) error {
			first := !used
			used = true
			later(func(c *Config) error { return add(c, s, first) })
			return nil
		})
	}
	list("listen", "`multiaddr` for peers, such as /ip4/0.0.0.0/tcp/19001 (may be repeated)", func(c *Config, s string, first bool) error {
		c.Listen = appendOrReplace(c.Listen, s, first)
		return nil
	})
	list("peer", "`multiaddr` of a peer with its /p2p/ID (may be repeated)", func(c *Config, s string, first bool) error {
		c.Peers = appendOrReplace(c.Peers, s, first)
		return nil
	})
	list("tell", "`multiaddr` to tell peers beside the own ones, as behind a proxy (may be repeated)", func(c *Config, s string, first bool) error {
		c.Tell = appendOrReplace(c.Tell, s, first)
		return nil
	})
	list("place", "`rule` that places tensors of a backbone, as kvasird plan prints them (may be repeated)", func(c *Config, s string, first bool) error {
		c.Model.Place = appendOrReplace(c.Model.Place, s, first)
		return nil
	})
	list("role", "auto, backbone, worker, volunteer, stage, entry, relay or settle, or several with commas", func(c *Config, s string, first bool) error {
		for i, r := range strings.Split(s, ",") {
			c.Roles = appendOrReplace(c.Roles, Role(strings.TrimSpace(r)), first && i == 0)
		}
		return nil
	})
	list("slice", "`layers/experts` that a worker serves, such as 0:4/0:16 (may be repeated)", func(c *Config, s string, first bool) error {
		layers, experts, ok := strings.Cut(s, "/")
		if !ok {
			return fmt.Errorf("slice %q: want layers/experts, as in 0:4/0:16", s)
		}
		c.Slices = appendOrReplace(c.Slices, SliceConfig{Layers: layers, Experts: experts}, first)
		return nil
	})
}

func appendOrReplace[T any](list []T, v T, replace bool) []T {
	if replace {
		list = nil
	}
	return append(list, v)
}
