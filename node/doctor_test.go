package node

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"kvasird/node/api"
)

// healthy is an examination where nothing is wrong.
func healthy(t *testing.T) *doctor {
	t.Helper()
	cfg := Config{Data: t.TempDir(), Threads: 2}
	if err := cfg.Validate(); err != nil {
		t.Fatal(err)
	}
	return &doctor{
		cfg: cfg, cores: 2, now: time.Date(2027, 1, 2, 3, 4, 5, 0, time.UTC),
		runtime: RuntimeFacts{Release: "llama.cpp v0.5.0", LibDir: "/lib", Variant: "haswell", Features: []string{"AVX2"},
			Devices: []DeviceFact{{Name: "CPU", Description: "a processor", FreeBytes: 1 << 30, TotalBytes: 4 << 30}}},
		synced: func() (bool, error) { return true, nil },
		memory: func() (int64, error) { return 4 << 30, nil },
		disk:   func(string) (int64, error) { return 100 << 30, nil },
		listen: func(string, string) error { return nil },
	}
}

func TestDoctor(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, []byte("not a model"), 0o600); err != nil {
		t.Fatal(err)
	}
	loose := filepath.Join(t.TempDir(), "loose")
	if err := errors.Join(os.Mkdir(loose, 0o700), os.Chmod(loose, 0o777)); err != nil {
		t.Fatal(err)
	}
	keyed, spoilt := t.TempDir(), t.TempDir()
	if err := errors.Join(os.Chmod(keyed, 0o700), os.Chmod(spoilt, 0o700), os.WriteFile(filepath.Join(spoilt, keysName), []byte("{"), 0o600)); err != nil {
		t.Fatal(err)
	}
	if _, err := openTestKeys(t, keyed).add(api.NewKey{Name: "a"}); err != nil {
		t.Fatal(err)
	}
	tests := []struct {
		name  string
		spoil func(*doctor)
		want  Severity
		text  string // in the finding with that severity
	}{
		{"healthy", func(*doctor) {}, SeverityOK, "ports free: tcp 127.0.0.1:19001, udp 127.0.0.1:19001, tcp 127.0.0.1:19000, tcp 127.0.0.1:0"},
		{"libraries", func(d *doctor) { d.runtime = RuntimeFacts{Err: errors.New("libllama.so not found")} }, SeverityFail, "libllama.so not found run make deps"},
		{"http", func(*doctor) {}, SeverityOK, "127.0.0.1:19000 is open to this machine, without a key"},
		{"http beyond loopback", func(d *doctor) { d.cfg.HTTP = "0.0.0.0:19000" }, SeverityWarn, "run kvasir keys add NAME, or set http to 127.0.0.1:19000"},
		{"http without a key", func(d *doctor) { d.cfg.Gateway.RequireKey = true }, SeverityWarn, "a key is asked for, and there is none"},
		{"http with keys", func(d *doctor) { d.cfg.HTTP, d.cfg.Data = "0.0.0.0:19000", keyed }, SeverityOK, "open to other machines, with one of 1 keys"},
		{"http with bad keys", func(d *doctor) { d.cfg.Data = spoilt }, SeverityFail, "the keys of the HTTP API cannot be read"},
		{"no variant", func(d *doctor) { d.runtime.Variant = "" }, SeverityFail, "no library for this CPU"},
		{"threads", func(d *doctor) { d.cfg.Threads = 4 }, SeverityWarn, "4 on 2 cores"},
		{"memory", func(d *doctor) { d.memory = func() (int64, error) { return 1 << 20, nil } }, SeverityWarn, "1.0 MiB available"},
		{"memory unknown", func(d *doctor) { d.memory = func() (int64, error) { return 0, errors.New("no /proc") } }, SeverityWarn, "no /proc"},
		{"no model", func(d *doctor) { d.cfg.Model.Path = "/nonexistent/m.gguf" }, SeverityFail, "/nonexistent/m.gguf cannot be used"},
		{"bad model", func(d *doctor) { d.cfg.Model.Path = file }, SeverityFail, file + " cannot be used"},
		{"data is a file", func(d *doctor) { d.cfg.Data = file }, SeverityFail, "is no folder"},
		{"data is open", func(d *doctor) { d.cfg.Data = loose }, SeverityFail, "chmod 700 " + loose},
		{"data is new", func(d *doctor) { d.cfg.Data = "/nonexistent/a" }, SeverityOK, "/nonexistent/a will be made"},
		{"disk", func(d *doctor) { d.disk = func(string) (int64, error) { return 5, nil } }, SeverityWarn, "5 bytes free at"},
		{"disk unknown", func(d *doctor) { d.disk = func(dir string) (int64, error) { return 0, errors.New("stale " + dir) } }, SeverityWarn, "stale"},
		{"port", func(d *doctor) {
			d.listen = func(network, addr string) error {
				if network == "udp" {
					return fmt.Errorf("in use")
				}
				return nil
			}
		}, SeverityFail, "udp 127.0.0.1:19001 cannot be used in use end the program that has it, or set another listen"},
		{"ports of the daemon", func(d *doctor) {
			d.answered = true
			d.listen = func(string, string) error { return errors.New("in use") }
		}, SeverityOK, "held by the running daemon"},
		{"clock never set", func(d *doctor) { d.now = time.Unix(0, 0) }, SeverityFail, "shows 1970-01-01"},
		{"clock drifts", func(d *doctor) { d.synced = func() (bool, error) { return false, nil } }, SeverityWarn, "not synchronised"},
		{"clock source unknown", func(d *doctor) { d.synced = func() (bool, error) { return false, errors.New("denied") } }, SeverityOK, "2027-01-02"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			d := healthy(t)
			tt.spoil(d)
			var found []string
			for _, f := range d.examine() {
				if f.Severity == tt.want {
					found = append(found, strings.Join([]string{f.Name, f.Text, f.Why, f.Fix}, " "))
				} else if f.Severity != SeverityOK {
					t.Errorf("also: %+v", f)
				}
				if f.Severity == SeverityFail && f.Fix == "" {
					t.Errorf("nothing to do about %+v", f)
				}
			}
			if !strings.Contains(strings.Join(found, "\n"), tt.text) {
				t.Errorf("findings %q, want one with %q", found, tt.text)
			}
		})
	}
}

func TestWriteFindings(t *testing.T) {
	for want, list := range map[bool][]Finding{
		true:  {{Name: "a", Severity: SeverityOK, Text: "fine"}, {Name: "b", Severity: SeverityWarn, Text: "so so", Fix: "do x"}},
		false: {{Name: "c", Severity: SeverityFail, Text: "broken", Why: "because"}},
	} {
		var out bytes.Buffer
		ok, err := WriteFindings(&out, list)
		if ok != want || err != nil {
			t.Errorf("%v: ok %v, %v", list, ok, err)
		}
		for _, f := range list {
			for _, part := range []string{f.Name, f.Text, f.Why, f.Fix} {
				if !strings.Contains(out.String(), part) {
					t.Errorf("%q does not contain %q", out.String(), part)
				}
			}
		}
	}
}

// TestMachine asks this machine: the answers must be possible.
func TestMachine(t *testing.T) {
	if free, err := availableMemory(); err != nil || free < 1<<20 {
		t.Errorf("available memory %d, %v", free, err)
	}
	if free, err := freeDisk(t.TempDir()); err != nil || free <= 0 {
		t.Errorf("free disk %d, %v", free, err)
	}
	if _, err := freeDisk("/nonexistent"); err == nil {
		t.Error("free disk of a folder that is not there")
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if err := tryListen("tcp", l.Addr().String()); err == nil {
		t.Error("a taken port was called free")
	}
	for _, network := range []string{"tcp", "udp"} {
		if err := tryListen(network, "127.0.0.1:0"); err != nil {
			t.Errorf("%s: %v", network, err)
		}
	}
}

func TestParseMemAvailable(t *testing.T) {
	tests := []struct {
		text string
		want int64
		ok   bool
	}{
		{"MemTotal: 8 kB\nMemAvailable:   1024 kB\n", 1 << 20, true},
		{"MemTotal: 8 kB\n", 0, false},
		{"MemAvailable: lots\n", 0, false},
		{"", 0, false},
	}
	for _, tt := range tests {
		if got, err := parseMemAvailable(strings.NewReader(tt.text)); got != tt.want || (err == nil) != tt.ok {
			t.Errorf("%q: %d, %v, want %d", tt.text, got, err, tt.want)
		}
	}
}
