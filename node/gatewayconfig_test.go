package node

import (
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"kvasird/ggml/gguf"
	"kvasird/node/gateway"
)

func TestGatewayConfig(t *testing.T) {
	for _, tt := range []struct{ text, want string }{
		{``, ""},
		{`hosts = ["box.example", "box"]`, ""},
		{`origins = ["*", "https://chat.example", "http://localhost:3000", "app://obsidian"]`, ""},
		{`aliases = {"gpt-4o" = "m", "gpt-*" = "m", "claude-*" = "m"}`, ""},
		{`responses = "off"`, ""},
		{`hosts = ["box:80"]`, `"box:80"`},
		{`hosts = ["http://box"]`, "without a port"},
		{`hosts = [""]`, "gateway.hosts"},
		{`origins = ["chat.example"]`, "want one such as https://"},
		{`origins = ["https://chat.example/"]`, "gateway.origins"},
		{`origins = ["null"]`, "gateway.origins"},
		{`aliases = {"" = "m"}`, "want a name of 1"},
		{`aliases = {"a*b" = "m"}`, "may only be its end"},
		{`aliases = {"a" = ""}`, "names no model"},
		{`aliases = {"gpt-4o" = "m", "GPT-4o" = "n"}`, `"GPT-4o" and "gpt-4o" are alike`},
		{`aliases = {"a" = "m", "a" = "n"}`, "already defined"},
		{`responses = "1s"`, "from 1m0s"},
		{`responses = "24"`, "want a time such as 24h"},
		{`responses_size = "1 kB"`, "at least 1 MiB"},
		{`responses_size = "much"`, "want a size"},
		{`orgins = []`, `did you mean "gateway.origins"?`},
	} {
		var c Config
		err := parseConfig([]byte("[gateway]\n"+tt.text), &c)
		if err == nil {
			c.Data = t.TempDir()
			err = c.Validate()
		}
		if (err == nil) != (tt.want == "") || err != nil && !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v, want %q", tt.text, err, tt.want)
		}
	}
	c := defaults(t)
	if c.Gateway.age != 24*time.Hour || c.Gateway.bytes != 256e6 {
		t.Errorf("%v, %d bytes", c.Gateway.age, c.Gateway.bytes)
	}
}

func TestExposed(t *testing.T) {
	for addr, want := range map[string]bool{
		"127.0.0.1:19000": false, "127.0.0.2:0": false, "localhost:19000": false, "[::1]:19000": false, "[::ffff:127.0.0.1]:1": false,
		"0.0.0.0:19000": true, "[::]:19000": true, "192.168.1.2:19000": true, "box.example:19000": true, "localhost.example:1": true, Off: false,
	} {
		c := Config{HTTP: addr, Roles: []Role{RoleEntry}}
		if c.exposed() != want || c.asksForKey() != want {
			t.Errorf("%s: exposed %v, asks for a key %v; want %v", addr, c.exposed(), c.asksForKey(), want)
		}
		c.Gateway.RequireKey = true
		if !c.asksForKey() {
			t.Errorf("%s: no key is asked for", addr)
		}
		c.Roles = []Role{RoleWorker}
		if c.exposed() {
			t.Errorf("%s of a worker is exposed", addr)
		}
	}
}

// An alias names its model once that is there, and is told of while it is not.
func TestAliases(t *testing.T) {
	g, err := gateway.New(gateway.Config{})
	if err != nil {
		t.Fatal(err)
	}
	var log strings.Builder
	a := answers{gateway: g, log: slog.New(slog.NewTextHandler(&log, nil)), names: &GatewayConfig{
		Aliases: map[string]string{"gpt-4o": "one", "claude-*": "0203000000", "late": "two", "never": "three"},
	}}
	one, two := &ringModel{name: "one"}, &ringModel{name: "two"}
	if err := a.set(gguf.ModelID{1}, gateway.Model{ID: "one", Engine: one}); err != nil {
		t.Fatal(err)
	}
	for _, alias := range []string{"late", "never", "claude-*"} {
		if !strings.Contains(log.String(), "alias="+alias) {
			t.Errorf("log without %s: %s", alias, log.String())
		}
	}
	log.Reset()
	for range 2 {
		if err := a.set(gguf.ModelID{2, 3}, gateway.Model{ID: "two", Engine: two}); err != nil {
			t.Fatal(err)
		}
	}
	for name, want := range map[string]*ringModel{
		"one": one, "gpt-4o": one, "01000000": one, "two": two, "late": two, "claude-opus": two, "0203000000": two,
	} {
		if _, got, err := a.find(name); err != nil || got != want {
			t.Errorf("%s: %v, %v", name, got, err)
		}
	}
	for _, name := range []string{"never", "0100000", "gpt-4"} {
		if _, _, err := a.find(name); err == nil {
			t.Errorf("%q finds a model", name)
		}
	}
	if log.Len() > 0 || !slices.Contains(a.warned, "never") {
		t.Errorf("told of again: %s", log.String())
	}
}
