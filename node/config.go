package node

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/libp2p/go-libp2p/core/peer"
	"github.com/multiformats/go-multiaddr"
	manet "github.com/multiformats/go-multiaddr/net"
	"github.com/pelletier/go-toml/v2"

	"kvasird/experts"
	"kvasird/ggml"
	"kvasird/ggml/gguf"
	"kvasird/node/api"
	"kvasird/node/gateway"
	"kvasird/p2p"
	"kvasird/ring"
	"kvasird/ring/plan"
)

// Role is a part that a node plays.
type Role string

// The roles. RoleAuto stands alone and is replaced when the configuration is
// checked: a node with slices becomes a worker; in a network with a file, one that
// names a model by its id a stage and entry, one that names none a volunteer and
// entry; any other a backbone and entry.
const (
	RoleAuto      Role = "auto"
	RoleBackbone  Role = "backbone"  // runs the model but for the experts that others hold
	RoleWorker    Role = "worker"    // computes the experts of its slices for others
	RoleVolunteer Role = "volunteer" // likewise, and chooses by itself which, by what is scarce
	RoleStage     Role = "stage"     // runs a window of a model's layers, which it chooses, in rings
	RoleEntry     Role = "entry"     // serves HTTP clients
	RoleRelay     Role = "relay"     // carries the traffic of members that cannot be reached directly
	RoleSettle    Role = "settle"    // keeps the money of a network with a token, on one machine
)

// Off in place of an address turns that listener off.
const Off = "off"

// Where a backbone's experts are.
const (
	ExpertsAuto   = "auto"   // remote for a file with holes or with a cache, swarm with peers, else here
	ExpertsHere   = "here"   // in this process, as in any llama.cpp
	ExpertsSwarm  = "swarm"  // workers compute them; a copy here is the last resort
	ExpertsRemote = "remote" // workers compute them; none are in memory here
)

// Limits of a configuration.
const (
	maxConfigFile = 1 << 20
	maxPeers      = 1024
	maxSlices     = 1024
	maxThreads    = 1024
	maxDeadline   = 86400 // seconds
	maxContext    = 1 << 24
	maxSequences  = 255 // llama.cpp takes 256, and canaries have one
	maxGPULayers  = 4096
	maxRules      = 4096
)

// Config says what a node does. The zero value of a field is its default; see
// docs/kvasird.toml for the file.
type Config struct {
	Data     string    `toml:"data"`    // state folder; "": api.DefaultDataDir
	Roles    []Role    `toml:"roles"`   // empty: auto
	Network  string    `toml:"network"` // network file (with .toml or a slash), or only a name; "": "kvasir"
	Ticket   string    `toml:"ticket"`  // invitation into the network; "": the one of before
	Listen   []string  `toml:"listen"`  // multiaddrs for peers; empty: all interfaces with a network file, else this machine only
	Lane     string    `toml:"lane"`    // host:port of the fast lane; "": a free port where Listen begins; "off"
	Peers    []string  `toml:"peers"`   // multiaddrs with /p2p/ID, kept connected
	Reach    string    `toml:"reach"`   // whether peers can connect to this node: auto, public, private; "": auto
	Tell     []string  `toml:"tell"`    // multiaddrs to tell peers beside the own ones, as behind a proxy
	MDNS     string    `toml:"mdns"`    // find peers on the local network: on, off; "": on with a network file
	TLS      TLSConfig `toml:"tls"`
	HTTP     string    `toml:"http"`     // host:port of the gateway; "": 127.0.0.1:19000; "off"
	Deadline int       `toml:"deadline"` // seconds that a request may take, its time in the queue too; 0: 600
	Control  string    `toml:"control"`  // control socket; "": in the data folder
	Threads  int       `toml:"threads"`  // that compute; 0: one per core
	Device   string    `toml:"device"`   // that a worker's experts lie on, as `kvasird doctor` names it; "": the CPU

	Gateway GatewayConfig `toml:"gateway"`
	Model   ModelConfig   `toml:"model"`
	Slices  []SliceConfig `toml:"slice"` // what a worker serves; empty: all of the model
	Budget  Budget        `toml:"budget"`
	Settle  SettleConfig  `toml:"settle"` // of the role settle
	Log     LogSettings   `toml:"log"`

	// Genesis is the network file that Network names, read by Validate; nil when
	// Network is only a name.
	Genesis *p2p.Genesis `toml:"-"`
}

// TLSConfig is the certificate of the listeners …/tls/ws.
type TLSConfig struct {
	Cert string `toml:"cert"` // PEM files
	Key  string `toml:"key"`
	CA   string `toml:"ca"` // of certificates of others that public authorities did not sign
}

// ModelConfig names the model and the room for its sequences.
type ModelConfig struct {
	Path       string   `toml:"path"`       // GGUF, or its first part, or the id of a model of the network; "": the shipped model
	Experts    string   `toml:"experts"`    // where a backbone's experts are: see ExpertsAuto
	Cache      string   `toml:"cache"`      // size of the experts kept here of those that others compute, "2 GB"; "" or "0": none
	Wait       int      `toml:"wait"`       // seconds that a request waits for missing experts; 0: 2
	Context    int      `toml:"context"`    // tokens of all running sequences together; 0: 8192
	Sequences  int      `toml:"sequences"`  // answered at a time; 0: 4
	GPULayers  int      `toml:"gpu_layers"` // of a backbone, on the first GPU, counted from the last; -1: all
	Place      []string `toml:"place"`      // where tensors of it lie instead, as `kvasird plan` prints rules
	Drafts     string   `toml:"drafts"`     // whether a backbone whose experts are elsewhere guesses tokens: auto, where it pays, or off; "": auto
	Interleave int      `toml:"interleave"` // contexts among which the sequences of a backbone whose experts are elsewhere are split; 0: one, and a second one where it pays
	Rows       string   `toml:"rows"`       // how a stage sends rows to the next: f32 (exact), f16 (half the bytes); "": f32
	Precision  string   `toml:"precision"`  // of rows to experts elsewhere, and back: see PrecisionAuto
	Sums       string   `toml:"sums"`       // whether experts elsewhere send the sums of a token's rows: auto, where rows take long to come and nothing is audited, on or off; "": auto

	// ID is what Path names, when that is an id and no file; set by Validate.
	ID *gguf.ModelID `toml:"-"`
}

// overrides reads the rules of Place.
func (m *ModelConfig) overrides() ([]ggml.Override, error) {
	if len(m.Place) > maxRules {
		return nil, fmt.Errorf("%d rules: at most %d", len(m.Place), maxRules)
	}
	var list []ggml.Override
	for _, rule := range m.Place {
		pattern, device, err := plan.ParseRule(rule)
		if err != nil {
			return nil, err
		}
		list = append(list, ggml.Override{Pattern: pattern, Device: device})
	}
	return list, nil
}

// names reads an id where a file could be named.
func (m *ModelConfig) names() {
	m.ID = nil
	if id, err := gguf.ParseModelID(m.Path); err == nil {
		if _, err := os.Stat(m.Path); errors.Is(err, fs.ErrNotExist) {
			m.ID = &id
		}
	}
}

// SliceConfig is a part of the model's experts, as half-open ranges "0:4".
type SliceConfig struct {
	Layers  string `toml:"layers"`  // "": all
	Experts string `toml:"experts"` // "": all
}

// LogSettings says what is logged and where to.
type LogSettings struct {
	Level string `toml:"level"` // debug, info, warn, error; "": info
	File  string `toml:"file"`  // JSON lines, rotated by size; "": none
}

var networkName = regexp.MustCompile(`^[a-z0-9._-]{1,64}$`)

// ReadConfigFile reads a TOML file into cfg. A key that is not known is an
// error that names its line and the nearest known one. Nothing is checked yet:
// see Validate.
func ReadConfigFile(path string, cfg *Config) error {
	f, err := os.Open(path)
	if err != nil {
		return fmt.Errorf("configuration: %w", err)
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxConfigFile+1))
	if err != nil {
		return fmt.Errorf("configuration: %w", err)
	}
	if len(data) > maxConfigFile {
		return fmt.Errorf("configuration: %s is larger than %d bytes", path, maxConfigFile)
	}
	if err := parseConfig(data, cfg); err != nil {
		return fmt.Errorf("configuration: %s:%w", path, err)
	}
	if namesFile(cfg.Network) && !filepath.IsAbs(cfg.Network) {
		cfg.Network = filepath.Join(filepath.Dir(path), cfg.Network)
	}
	return nil
}

// parseConfig decodes strictly; errors begin with the line.
func parseConfig(data []byte, cfg *Config) error {
	err := toml.NewDecoder(bytes.NewReader(data)).DisallowUnknownFields().Decode(cfg)
	var unknown *toml.StrictMissingError
	if errors.As(err, &unknown) && len(unknown.Errors) > 0 {
		e := unknown.Errors[0]
		line, _ := e.Position()
		key := strings.Join(e.Key(), ".")
		msg := fmt.Sprintf("%d: unknown key %q", line, key)
		if near := api.Nearest(key, configKeys(reflect.TypeFor[Config](), "")); near != "" {
			msg += fmt.Sprintf(": did you mean %q?", near)
		}
		return errors.New(msg)
	}
	var bad *toml.DecodeError
	if errors.As(err, &bad) {
		line, column := bad.Position()
		return fmt.Errorf("%d:%d: %s", line, column, strings.TrimPrefix(bad.Error(), "toml: "))
	}
	return err
}

// configKeys lists the dotted names of all keys.
func configKeys(t reflect.Type, prefix string) []string {
	var keys []string
	for f := range t.Fields() {
		if tag := f.Tag.Get("toml"); tag == "" || tag == "-" {
			continue
		}
		name := prefix + f.Tag.Get("toml")
		keys = append(keys, name)
		inner := f.Type
		if inner.Kind() == reflect.Slice {
			inner = inner.Elem()
		}
		if inner.Kind() == reflect.Struct {
			keys = append(keys, configKeys(inner, name+".")...)
		}
	}
	return keys
}

// Validate fills in defaults and refuses what cannot work. It may be called
// again.
func (c *Config) Validate() error {
	if err := c.fillDefaults(); err != nil {
		return err
	}
	for _, check := range []func() error{c.checkRoles, c.checkAddresses, c.checkNumbers, c.checkSlices, c.checkSettle, c.Budget.validate, c.Gateway.validate} {
		if err := check(); err != nil {
			return fmt.Errorf("configuration: %w", err)
		}
	}
	return nil
}

func (c *Config) fillDefaults() error {
	if c.Data == "" {
		dir, err := api.DefaultDataDir()
		if err != nil {
			return err
		}
		c.Data = dir
	}
	setDefault(&c.Network, "kvasir")
	if err := c.readNetwork(); err != nil {
		return fmt.Errorf("configuration: %w", err)
	}
	setDefault(&c.HTTP, gateway.DefaultAddr)
	setDefault(&c.Deadline, 600)
	setDefault(&c.Control, filepath.Join(c.Data, api.SocketName))
	setDefault(&c.Threads, runtime.NumCPU())
	setDefault(&c.Model.Context, 8192)
	setDefault(&c.Model.Sequences, 4)
	setDefault(&c.Model.Experts, ExpertsAuto)
	setDefault(&c.Model.Wait, 2)
	setDefault(&c.Model.Drafts, draftsAuto)
	setDefault(&c.Model.Rows, "f32")
	setDefault(&c.Model.Precision, PrecisionAuto)
	setDefault(&c.Model.Sums, "auto")
	setDefault(&c.Log.Level, "info")
	c.Gateway.fillDefaults()
	setDefault(&c.Reach, string(p2p.ReachAuto))
	setDefault(&c.MDNS, "on")
	if len(c.Listen) == 0 {
		c.Listen = []string{"/ip4/127.0.0.1/tcp/19001", "/ip4/127.0.0.1/udp/19001/quic-v1"}
		if c.Genesis != nil {
			c.Listen = anyInterface()
		}
	}
	c.Model.names()
	if len(c.Roles) == 0 {
		c.Roles = []Role{RoleAuto}
	}
	if slices.Equal(c.Roles, []Role{RoleAuto}) {
		c.Roles = []Role{RoleBackbone, RoleEntry}
		switch {
		case len(c.Slices) > 0:
			c.Roles = []Role{RoleWorker}
		case c.Genesis != nil && c.Model.ID != nil:
			c.Roles = []Role{RoleStage, RoleEntry}
		case c.Genesis != nil && c.Model.Path == "":
			c.Roles = []Role{RoleVolunteer, RoleEntry}
		}
	}
	return nil
}

func setDefault[T comparable](v *T, d T) {
	if *v == *new(T) {
		*v = d
	}
}

// CoverageWait is how long a request waits for missing experts.
func (c *Config) CoverageWait() time.Duration { return time.Duration(c.Model.Wait) * time.Second }

// Has says whether the node plays a role.
func (c *Config) Has(r Role) bool { return slices.Contains(c.Roles, r) }

func (c *Config) checkRoles() error {
	known := []string{string(RoleAuto), string(RoleBackbone), string(RoleWorker), string(RoleVolunteer), string(RoleStage), string(RoleEntry), string(RoleRelay), string(RoleSettle)}
	for i, r := range c.Roles {
		switch {
		case r == RoleAuto:
			return fmt.Errorf("role %q stands alone: remove it or the others", r)
		case !slices.Contains(known, string(r)):
			return fmt.Errorf("unknown role %q: want %s%s", r, strings.Join(known, ", "), Suggest(string(r), known))
		case slices.Contains(c.Roles[:i], r):
			return fmt.Errorf("role %q is named twice", r)
		}
	}
	switch {
	case len(c.Slices) > 0 && !c.Has(RoleWorker):
		return errors.New("a slice is for workers: add the role worker or remove the slice")
	case c.Has(RoleVolunteer) && (c.Has(RoleWorker) || c.Has(RoleBackbone)):
		return errors.New("a volunteer chooses by itself what to hold: remove the role volunteer, or the roles worker and backbone")
	case c.Has(RoleStage) && (c.Has(RoleWorker) || c.Has(RoleBackbone) || c.Has(RoleVolunteer)):
		return errors.New("a stage gives its budget to one window of layers: remove the role stage, or the roles worker, backbone and volunteer")
	case c.Has(RoleStage) && c.Model.Path == "":
		return errors.New("a stage needs a model: name its file, or its id in the network, with --model")
	case c.Model.ID != nil && (c.Genesis == nil || !c.Has(RoleStage) && !c.Has(RoleBackbone)):
		return fmt.Errorf("model %v is named by its id: only a stage or a backbone in a network with a file fetches it; name the file", *c.Model.ID)
	case c.Genesis == nil && (c.Has(RoleVolunteer) || c.Has(RoleRelay) || c.Has(RoleStage)):
		return errors.New("volunteers, stages and relays need a network file: make one with `kvasir network create NAME` and name it with --network")
	}
	return c.checkReach()
}

// checkReach checks how peers find and reach this node.
func (c *Config) checkReach() error {
	for _, w := range []struct {
		key, got string
		known    []string
	}{
		{"reach", c.Reach, []string{string(p2p.ReachAuto), string(p2p.ReachPublic), string(p2p.ReachPrivate)}},
		{"mdns", c.MDNS, []string{"on", Off}},
	} {
		if !slices.Contains(w.known, w.got) {
			return fmt.Errorf("%s %q: want %s%s", w.key, w.got, strings.Join(w.known, ", "), Suggest(w.got, w.known))
		}
	}
	if (c.TLS.Cert == "") != (c.TLS.Key == "") {
		return errors.New("tls.cert and tls.key belong together: name both files, or none")
	}
	return nil
}

// Suggest is the end of an error about an unknown word: the nearest known one,
// or "" when none is like it.
func Suggest(word string, known []string) string {
	if near := api.Nearest(word, known); near != "" {
		return fmt.Sprintf("; did you mean %q?", near)
	}
	return ""
}

func (c *Config) checkAddresses() error {
	if c.Genesis == nil && !networkName.MatchString(c.Network) {
		return fmt.Errorf("network %q: want a network file, or a name of 1 to 64 of a-z 0-9 . _ -", c.Network)
	}
	var first string
	for _, s := range c.Listen {
		a, err := multiaddr.NewMultiaddr(s)
		if err != nil {
			return fmt.Errorf("listen address %q: want one like /ip4/0.0.0.0/tcp/19001", s)
		}
		if ip, err := manet.ToIP(a); err == nil && first == "" {
			first = ip.String()
		}
	}
	if first == "" {
		return fmt.Errorf("listen address %q: the first must begin with /ip4 or /ip6", c.Listen[0])
	}
	setDefault(&c.Lane, net.JoinHostPort(first, "0"))
	if len(c.Peers) > maxPeers {
		return fmt.Errorf("%d peers: at most %d", len(c.Peers), maxPeers)
	}
	for _, s := range c.Peers {
		if ai, err := peer.AddrInfoFromString(s); err != nil || len(ai.Addrs) == 0 {
			return fmt.Errorf("peer %q: want an address with its id, as in /ip4/192.168.1.20/tcp/19001/p2p/12D3KooW…", s)
		}
	}
	if err := checkHostPort("http", c.HTTP); err != nil {
		return err
	}
	return checkHostPort("lane", c.Lane)
}

func checkHostPort(key, s string) error {
	if s == Off {
		return nil
	}
	host, port, err := net.SplitHostPort(s)
	if err == nil {
		_, err = strconv.ParseUint(port, 10, 16)
	}
	if err != nil || host == "" {
		return fmt.Errorf("%s %q: want host:port, as in 127.0.0.1:19000, or %q", key, s, Off)
	}
	return nil
}

func (c *Config) checkNumbers() error {
	for _, n := range []struct {
		key             string
		got, least, max int
	}{
		{"threads", c.Threads, 1, maxThreads},
		{"deadline", c.Deadline, 1, maxDeadline},
		{"model.context", c.Model.Context, 64, maxContext},
		{"model.sequences", c.Model.Sequences, 1, maxSequences},
		{"model.interleave", c.Model.Interleave, 0, c.Model.Sequences},
		{"model.wait", c.Model.Wait, 1, 600},
		{"model.gpu_layers", c.Model.GPULayers, -1, maxGPULayers},
	} {
		if n.got < n.least || n.got > n.max {
			return fmt.Errorf("%s = %d: want %d to %d", n.key, n.got, n.least, n.max)
		}
	}
	if c.Model.Context < c.Model.Sequences*16 {
		return fmt.Errorf("model.context = %d: too little for %d sequences: want at least 16 tokens for each",
			c.Model.Context, c.Model.Sequences)
	}
	modes := []string{ExpertsAuto, ExpertsHere, ExpertsSwarm, ExpertsRemote}
	if !slices.Contains(modes, c.Model.Experts) {
		return fmt.Errorf("model.experts %q: want %s%s", c.Model.Experts, strings.Join(modes, ", "), Suggest(c.Model.Experts, modes))
	}
	if err := c.Model.checkCache(); err != nil {
		return err
	}
	if _, err := c.Model.overrides(); err != nil {
		return fmt.Errorf("model.place: %w", err)
	}
	if c.Model.Drafts != draftsAuto && c.Model.Drafts != Off {
		return fmt.Errorf("model.drafts %q: want auto or off", c.Model.Drafts)
	}
	if _, ok := rowPrecisions[c.Model.Rows]; !ok {
		return fmt.Errorf("model.rows %q: want f32 or f16", c.Model.Rows)
	}
	if _, err := c.Model.precision(); err != nil {
		return fmt.Errorf("model.precision: %w, or %s", err, PrecisionAuto)
	}
	if _, err := experts.ParseSums(c.Model.Sums); err != nil {
		return fmt.Errorf("model.%w", err)
	}
	_, err := c.Log.level()
	return err
}

var rowPrecisions = map[string]ring.Precision{"f32": ring.F32, "f16": ring.F16}

func (l LogSettings) level() (slog.Level, error) {
	known := []string{"debug", "info", "warn", "error"}
	if !slices.Contains(known, l.Level) {
		return 0, fmt.Errorf("log.level %q: want debug, info, warn, error%s", l.Level, Suggest(l.Level, known))
	}
	var lv slog.Level
	return lv, lv.UnmarshalText([]byte(l.Level))
}

func (c *Config) checkSlices() error {
	if len(c.Slices) > maxSlices {
		return fmt.Errorf("%d slices: at most %d", len(c.Slices), maxSlices)
	}
	for _, s := range c.Slices {
		if _, _, err := s.Ranges(); err != nil {
			return err
		}
	}
	return nil
}
