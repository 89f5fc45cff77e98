package node

import (
	"flag"
	"io"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
)

const somePeer = "/ip4/192.168.1.20/tcp/19001/p2p/12D3KooWGsFTMJhHS4zJ6Pn8BGWZTPDw8y3KQF6dPx3ZcbfBKsYf"

// defaults is the configuration of a node that nobody told anything.
func defaults(t *testing.T) Config {
	t.Helper()
	t.Setenv("XDG_DATA_HOME", "/data")
	var c Config
	if err := c.Validate(); err != nil {
		t.Fatal(err)
	}
	return c
}

func TestConfigDefaults(t *testing.T) {
	c := defaults(t)
	if c.Data != "/data/kvasir" || c.Control != "/data/kvasir/control.sock" || c.HTTP != "127.0.0.1:19000" ||
		c.Lane != "127.0.0.1:0" || !slices.Equal(c.Roles, []Role{RoleBackbone, RoleEntry}) || c.Threads < 1 {
		t.Errorf("defaults %+v", c)
	}
	again := c
	if err := again.Validate(); err != nil || !reflect.DeepEqual(again, c) {
		t.Errorf("a second Validate changes %+v to %+v, %v", c, again, err)
	}
}

// TestConfigExamples keeps docs/ true: every file is accepted, and the one with
// the defaults names every key and changes nothing.
func TestConfigExamples(t *testing.T) {
	files, err := filepath.Glob("../docs/*.toml")
	if err != nil || len(files) < 3 {
		t.Fatalf("examples %v, %v", files, err)
	}
	want := defaults(t)
	for _, file := range files {
		var c Config
		if err := ReadConfigFile(file, &c); err != nil {
			t.Error(err)
			continue
		}
		if err := c.Validate(); err != nil {
			t.Errorf("%s: %v", file, err)
		}
		if filepath.Base(file) != "kvasird.toml" {
			continue
		}
		c.Peers, c.Tell, c.Model.Place, c.Settle.RPC = nil, nil, nil, nil
		if !reflect.DeepEqual(c, want) {
			t.Errorf("%s gives %+v, want the defaults %+v", file, c, want)
		}
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, key := range configKeys(reflect.TypeFor[Config](), "") {
			if last := key[strings.LastIndexByte(key, '.')+1:]; !strings.Contains(string(text), last) {
				t.Errorf("%s does not mention %s", file, key)
			}
		}
	}
}

func TestParseConfigRefuses(t *testing.T) {
	tests := []struct{ name, text, want string }{
		{"unknown key", "\n\ntreads = 4\n", `3: unknown key "treads": did you mean "threads"?`},
		{"unknown key in a table", "[model]\npath = \"a\"\nsequence = 4\n", `3: unknown key "model.sequence": did you mean "model.sequences"?`},
		{"unknown key in a list", "[[slice]]\nexpert = \"0:4\"\n", `2: unknown key "slice.expert": did you mean "slice.experts"?`},
		{"unknown table", "[modle]\npath = \"a\"\n", `unknown key "modle": did you mean "model"?`},
		{"nothing like it", "zzzzzzzzzzzzz = 1\n", `1: unknown key "zzzzzzzzzzzzz"`},
		{"wrong type", "network = \"a\"\nthreads = \"four\"\n", "2:"},
		{"not TOML", "threads 4\n", "1:"},
		{"key twice", "threads = 1\nthreads = 2\n", "2:"},
		{"number too large", "threads = 99999999999999999999\n", "1:"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var c Config
			err := parseConfig([]byte(tt.text), &c)
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("error %v, want one with %q", err, tt.want)
			}
		})
	}
}

func TestReadConfigFileRefuses(t *testing.T) {
	dir := t.TempDir()
	large := filepath.Join(dir, "large.toml")
	if err := os.WriteFile(large, []byte("#"+strings.Repeat("a", maxConfigFile)), 0o600); err != nil {
		t.Fatal(err)
	}
	bad := filepath.Join(dir, "bad.toml")
	if err := os.WriteFile(bad, []byte("a = 1"), 0o600); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]string{
		large:                      "larger than",
		bad:                        bad + ":1: unknown key",
		filepath.Join(dir, "none"): "no such file",
		dir:                        "is a directory",
	} {
		if err := ReadConfigFile(path, new(Config)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: error %v, want one with %q", path, err, want)
		}
	}
}

func TestConfigRefuses(t *testing.T) {
	tests := []struct {
		name string
		set  Config
		want string
	}{
		{"unknown role", Config{Roles: []Role{"wroker"}}, `unknown role "wroker": want auto, backbone, worker, volunteer, stage, entry, relay, settle; did you mean "worker"?`},
		{"auto beside another", Config{Roles: []Role{"worker", "auto"}}, `"auto" stands alone`},
		{"role twice", Config{Roles: []Role{"worker", "worker"}}, "named twice"},
		{"slice without worker", Config{Roles: []Role{"backbone"}, Slices: []SliceConfig{{}}}, "a slice is for workers"},
		{"network name", Config{Network: "My Net"}, `network "My Net"`},
		{"listen not a multiaddr", Config{Listen: []string{"0.0.0.0:1"}}, `listen address "0.0.0.0:1"`},
		{"listen not an IP", Config{Listen: []string{"/dns4/a/tcp/1"}}, "must begin with /ip4"},
		{"peer without id", Config{Peers: []string{"/ip4/1.2.3.4/tcp/1"}}, `peer "/ip4/1.2.3.4/tcp/1"`},
		{"peer without address", Config{Peers: []string{somePeer[strings.Index(somePeer, "/p2p"):]}}, "want an address with its id"},
		{"too many peers", Config{Peers: slices.Repeat([]string{somePeer}, maxPeers+1)}, "at most 1024"},
		{"http without port", Config{HTTP: "127.0.0.1"}, `http "127.0.0.1": want host:port`},
		{"http without host", Config{HTTP: ":80"}, `http ":80"`},
		{"http port too large", Config{HTTP: "127.0.0.1:70000"}, "want host:port"},
		{"lane", Config{Lane: "x"}, `lane "x"`},
		{"threads", Config{Threads: -1}, "threads = -1: want 1 to"},
		{"too many threads", Config{Threads: maxThreads + 1}, "threads = 1025"},
		{"context", Config{Model: ModelConfig{Context: 1}}, "model.context = 1"},
		{"sequences", Config{Model: ModelConfig{Sequences: maxSequences + 1}}, "model.sequences = 256"},
		{"context too little for its sequences", Config{Model: ModelConfig{Context: 64, Sequences: 100}}, "too little for 100 sequences"},
		{"more contexts than sequences", Config{Model: ModelConfig{Interleave: 5}}, "model.interleave = 5: want 0 to 4"},
		{"rule", Config{Model: ModelConfig{Place: []string{"exps"}}}, `model.place: rule "exps": want PATTERN=DEVICE`},
		{"drafts", Config{Model: ModelConfig{Drafts: "on"}}, `model.drafts "on": want auto or off`},
		{"rows", Config{Model: ModelConfig{Rows: "f8"}}, `model.rows "f8": want f32 or f16`},
		{"sums", Config{Model: ModelConfig{Sums: "yes"}}, `model.sums "yes": want auto, on or off`},
		{"precision", Config{Model: ModelConfig{Precision: "q4"}}, `model.precision: precision "q4": want one of f32, f16, bf16, q8, or auto`},
		{"level", Config{Log: LogSettings{Level: "warning"}}, `log.level "warning": want debug, info, warn, error; did you mean "warn"?`},
		{"slice words", Config{Slices: []SliceConfig{{Layers: "all"}}}, `slice layers: gguf: "all" is not a range`},
		{"slice empty", Config{Slices: []SliceConfig{{Experts: "4:4"}}}, `slice experts: gguf: "4:4"`},
		{"slice too large", Config{Slices: []SliceConfig{{Experts: "0:4294967295"}}}, "not a range"},
		{"too many slices", Config{Slices: make([]SliceConfig, maxSlices+1)}, "1025 slices"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			c := tt.set
			c.Data = "/data"
			if err := c.Validate(); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("error %v, want one with %q", err, tt.want)
			}
		})
	}
}

// flagsOf runs ConfigFlags on a command line.
func flagsOf(args ...string) (Config, error) {
	set := flag.NewFlagSet("run", flag.ContinueOnError)
	set.SetOutput(io.Discard)
	load := ConfigFlags(set)
	if err := set.Parse(args); err != nil {
		return Config{}, err
	}
	return load()
}

func TestConfigFlags(t *testing.T) {
	dir := t.TempDir()
	file := "threads = 3\npeers = [\"" + somePeer + "\"]\nnetwork = \"home\"\n[[slice]]\nlayers = \"0:1\"\n"
	if err := os.WriteFile(filepath.Join(dir, ConfigName), []byte(file), 0o600); err != nil {
		t.Fatal(err)
	}
	other := strings.Replace(somePeer, "192.168.1.20", "192.168.1.21", 1)
	c, err := flagsOf("--data", dir, "--threads", "2", "--peer", other, "--peer", somePeer, "--role", "worker,entry",
		"--slice", "0:2/0:16", "--slice", "/16:32", "--http", "off", "--model", "/m.gguf", "--context", "4096",
		"--sequences", "2", "--deadline", "30", "--log-level", "debug", "--listen", "/ip4/127.0.0.2/tcp/0")
	if err != nil {
		t.Fatal(err)
	}
	want := Config{
		Data: dir, Roles: []Role{RoleWorker, RoleEntry}, Network: "home", Listen: []string{"/ip4/127.0.0.2/tcp/0"},
		Lane: "127.0.0.2:0", Peers: []string{other, somePeer}, HTTP: Off, Control: filepath.Join(dir, "control.sock"), Threads: 2, Deadline: 30,
		Model:  ModelConfig{Path: "/m.gguf", Experts: ExpertsAuto, Wait: 2, Drafts: "auto", Rows: "f32", Precision: PrecisionAuto, Sums: "auto", Context: 4096, Sequences: 2},
		Slices: []SliceConfig{{"0:2", "0:16"}, {"", "16:32"}},
		Log:    LogSettings{Level: "debug"},
		Reach:  "auto", MDNS: "on",
		Gateway: GatewayConfig{Responses: "24h", ResponsesSize: "256 MB", age: 24 * time.Hour, bytes: 256e6},
	}
	if !reflect.DeepEqual(c, want) {
		t.Errorf("got  %+v\nwant %+v", c, want)
	}
	if c, err = flagsOf("--data", dir); err != nil || c.Threads != 3 || !c.Has(RoleWorker) || c.Has(RoleEntry) {
		t.Errorf("the file alone gives %+v, %v", c, err)
	}
}

func TestConfigFlagsRefuse(t *testing.T) {
	t.Setenv("XDG_DATA_HOME", t.TempDir())
	tests := []struct {
		args []string
		want string
	}{
		{[]string{"--config", "/nonexistent"}, "/nonexistent"},
		{[]string{"--threads", "two"}, "want a whole number"},
		{[]string{"--slice", "0:4"}, "want layers/experts"},
		{[]string{"--role", "boss"}, `unknown role "boss"`},
		{[]string{"--colour"}, "not defined"},
	}
	for _, tt := range tests {
		if _, err := flagsOf(tt.args...); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%v: error %v, want one with %q", tt.args, err, tt.want)
		}
	}
}

func FuzzParseConfig(f *testing.F) {
	for _, file := range []string{"../docs/kvasird.toml", "../docs/lan-worker.toml"} {
		data, err := os.ReadFile(file)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data)
	}
	f.Add([]byte("[[slice]]\nlayers = \"0:\xff\"\na.b.c = {}"))
	f.Fuzz(func(t *testing.T, data []byte) {
		var c Config
		if err := parseConfig(data, &c); err != nil {
			return
		}
		if err := c.Validate(); err != nil {
			return
		}
		for _, s := range c.Slices {
			layers, experts, err := s.Ranges()
			if err != nil || layers.Len() > 1<<16 || experts.Len() > 1<<16 {
				t.Errorf("accepted slice %+v: %v %v %v", s, layers, experts, err)
			}
		}
	})
}

// A node in a network that names a model by its id is a stage of it.
func TestStageRole(t *testing.T) {
	dir := t.TempDir()
	network := filepath.Join(dir, "home.toml")
	if err := CreateNetwork(NewNetwork{Name: "home", Out: network}, io.Discard); err != nil {
		t.Fatal(err)
	}
	id := strings.Repeat("ab", 32)
	file := filepath.Join(dir, id)
	tests := []struct {
		name string
		set  Config
		want string // part of the error
	}{
		{"id in a network", Config{Network: network, Model: ModelConfig{Path: id}}, ""},
		{"id without a network", Config{Model: ModelConfig{Path: id}}, "in a network with a file"},
		{"id and worker", Config{Network: network, Roles: []Role{RoleWorker}, Model: ModelConfig{Path: id}}, "only a stage or a backbone"},
		{"stage without a network", Config{Roles: []Role{RoleStage}, Model: ModelConfig{Path: id}}, "in a network with a file"},
		{"stage without a model", Config{Network: network, Roles: []Role{RoleStage}}, "a stage needs a model"},
		{"stage and volunteer", Config{Network: network, Roles: []Role{RoleStage, RoleVolunteer}, Model: ModelConfig{Path: id}}, "one window of layers"},
		{"stage of a file", Config{Network: network, Roles: []Role{RoleStage}, Model: ModelConfig{Path: "m.gguf"}}, ""},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			c := tt.set
			c.Data = dir
			err := c.Validate()
			if (err == nil) != (tt.want == "") || err != nil && !strings.Contains(err.Error(), tt.want) {
				t.Fatalf("error %v, want one with %q", err, tt.want)
			}
			if err == nil && !c.Has(RoleStage) {
				t.Errorf("roles %v", c.Roles)
			}
		})
	}
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	c := Config{Data: dir, Network: network, Model: ModelConfig{Path: file}}
	if err := c.Validate(); err != nil || c.Model.ID != nil || !c.Has(RoleBackbone) {
		t.Errorf("a file whose name is an id: %v, %v", c.Roles, err)
	}
}
