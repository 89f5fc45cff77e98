package node

import (
	"cmp"
	"fmt"
	"maps"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"time"
)

// GatewayConfig says who may use the HTTP API, and by which names.
type GatewayConfig struct {
	RequireKey    bool              `toml:"require_key"`    // ask for a key on loopback too
	Hosts         []string          `toml:"hosts"`          // names of this machine, beside loopback and its addresses, that clients may use
	Origins       []string          `toml:"origins"`        // web origins whose pages may use it, scheme://host:port, or "*"
	Aliases       map[string]string `toml:"aliases"`        // further names of models; one may end in *
	Responses     string            `toml:"responses"`      // how long stored responses are kept on disk; "": 24h; "off": in memory
	ResponsesSize string            `toml:"responses_size"` // how much of them; "": 256 MB

	age   time.Duration // of stored responses; 0: off
	bytes int64
}

// Limits of the section.
const (
	maxNames         = 256 // hosts, origins, aliases
	maxName          = 256 // bytes of one
	minResponsesAge  = time.Minute
	maxResponsesAge  = 366 * 24 * time.Hour
	minResponsesSize = 1 << 20
)

var hostName = regexp.MustCompile(`^[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?$`)

func (g *GatewayConfig) fillDefaults() {
	setDefault(&g.Responses, "24h")
	setDefault(&g.ResponsesSize, "256 MB")
}

func (g *GatewayConfig) validate() error {
	for key, n := range map[string]int{"hosts": len(g.Hosts), "origins": len(g.Origins), "aliases": len(g.Aliases)} {
		if n > maxNames {
			return fmt.Errorf("gateway.%s: %d: at most %d", key, n, maxNames)
		}
	}
	for _, h := range g.Hosts {
		if len(h) > maxName || !hostName.MatchString(h) {
			return fmt.Errorf("gateway.hosts: %q: want a name such as box.example, without a port", h)
		}
	}
	for _, o := range g.Origins {
		u, err := url.Parse(o)
		if o != "*" && (err != nil || len(o) > maxName || u.Host == "" || u.Scheme+"://"+u.Host != o) {
			return fmt.Errorf("gateway.origins: %q: want one such as https://chat.example or http://localhost:3000, or \"*\"", o)
		}
	}
	if err := g.checkAliases(); err != nil {
		return err
	}
	return g.checkResponses()
}

// checkAliases refuses aliases that nobody could tell apart.
func (g *GatewayConfig) checkAliases() error {
	names := slices.SortedFunc(maps.Keys(g.Aliases), func(x, y string) int {
		return cmp.Or(cmp.Compare(strings.ToLower(x), strings.ToLower(y)), cmp.Compare(x, y))
	})
	for i, a := range names {
		switch {
		case a == "" || len(a) > maxName || strings.ContainsFunc(a, func(r rune) bool { return r < ' ' || r == 0x7f }):
			return fmt.Errorf("gateway.aliases: %q: want a name of 1 to %d bytes", a, maxName)
		case strings.Contains(strings.TrimSuffix(a, "*"), "*"):
			return fmt.Errorf("gateway.aliases: %q: a * may only be its end", a)
		case g.Aliases[a] == "" || len(g.Aliases[a]) > maxName:
			return fmt.Errorf("gateway.aliases: %q names no model: want its name or the beginning of its id", a)
		case i > 0 && strings.EqualFold(a, names[i-1]):
			return fmt.Errorf("gateway.aliases: %q and %q are alike: remove one", names[i-1], a)
		}
	}
	return nil
}

func (g *GatewayConfig) checkResponses() error {
	g.age = 0
	if g.Responses != Off {
		age, err := time.ParseDuration(g.Responses)
		if err != nil || age < minResponsesAge || age > maxResponsesAge {
			return fmt.Errorf("gateway.responses %q: want a time such as 24h or 90m, from %v to %v, or %q", g.Responses, minResponsesAge, maxResponsesAge, Off)
		}
		g.age = age
	}
	size, err := parseBytes(g.ResponsesSize)
	if err != nil || size < minResponsesSize {
		return fmt.Errorf("gateway.responses_size %q: want a size such as 256 MB, at least 1 MiB", g.ResponsesSize)
	}
	g.bytes = size
	return nil
}

// aliasesOf are the further names of a model, sorted.
func (g *GatewayConfig) aliasesOf(name, id string) []string {
	var list []string
	for alias, model := range g.Aliases {
		if namesModel(model, name, id) {
			list = append(list, alias)
		}
	}
	slices.Sort(list)
	return list
}

// namesModel says whether text is a model's name, or its id or the beginning of it.
func namesModel(text, name, id string) bool {
	const digits = 8
	return text == name || len(text) >= digits && strings.HasPrefix(id, strings.ToLower(text))
}
