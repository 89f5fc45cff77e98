package main

import (
	"errors"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestNetworkCommands runs the commands as a person types them: flags before and
// behind the other arguments.
func TestNetworkCommands(t *testing.T) {
	t.Chdir(t.TempDir())
	const peer = "12D3KooWGsFTMJhHS4zJ6Pn8BGWZTPDw8y3KQF6dPx3ZcbfBKsYf"
	for _, line := range []string{
		"network create home --admission invitation --replicas 3",
		"network create --admission closed --out there/club.toml --bootstrap /ip4/10.0.0.1/tcp/1/p2p/" + peer + " club",
		"network show home.toml",
		"network invite --days 7 home.toml --for " + peer + " --infer",
		"network revoke home.toml " + peer + " --data data",
		"network invite there/club.toml --for " + peer + " --key there/club.authority.key --note Ada",
	} {
		if err := dispatch(t.Context(), strings.Fields(line)); err != nil {
			t.Errorf("kvasird %s: %v", line, err)
		}
	}
	for _, name := range []string{"home.toml", "home.authority.key", "home.revocations", filepath.Join("there", "club.toml")} {
		if _, err := os.Stat(name); err != nil {
			t.Error(err)
		}
	}
}

func TestNetworkUsage(t *testing.T) {
	t.Chdir(t.TempDir())
	for _, tt := range []struct {
		line  string
		usage bool
		want  string
	}{
		{"network creat home", true, `unknown command "creat"; did you mean "create"?`},
		{"network create", true, "kvasird network create takes [NAME]"},
		{"network create a b", true, `takes [NAME], got ["a" "b"]`},
		{"network create --nam a", true, "see kvasird network create --help"},
		{"network show", true, "takes [FILE]"},
		{"network revoke home.toml", true, "takes [FILE TICKET|SERIAL|PEERID]"},
		{"network show none.toml", false, "no such file"},
		{"doctor --network ./none.toml --data d", false, "network file: stat ./none.toml: no such file"},
	} {
		err := dispatch(t.Context(), strings.Fields(tt.line))
		if err == nil || errors.Is(err, errUsage) != tt.usage || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("kvasird %s: %v, want %q", tt.line, err, tt.want)
		}
	}
	for _, line := range []string{"network", "network help", "network --help"} {
		if err := dispatch(t.Context(), strings.Fields(line)); err != nil {
			t.Errorf("kvasird %s: %v", line, err)
		}
	}
	if err := dispatch(t.Context(), []string{"network", "invite", "--help"}); !errors.Is(err, flag.ErrHelp) {
		t.Errorf("help: %v", err)
	}
}
