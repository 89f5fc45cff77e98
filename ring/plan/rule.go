package plan

import (
	"fmt"
	"regexp"
	"strings"
)

// maxRule bounds a rule, in bytes.
const maxRule = 256

// Rule keeps the experts of a layer in RAM: a pattern of tensor names and a device,
// as llama.cpp's --override-tensor takes them.
func Rule(layer int, fused bool) string {
	which := "up|down|gate"
	if fused {
		which += "|gate_up"
	}
	return fmt.Sprintf(`blk\.%d\.ffn_(%s)_(ch|)exps=CPU`, layer, which)
}

// ParseRule takes a rule apart: "pattern=device". The pattern is a regular
// expression that is searched for in tensor names; the device is CPU, or one as
// `kvasird doctor` names it.
func ParseRule(rule string) (pattern, device string, err error) {
	pattern, device, ok := strings.Cut(rule, "=")
	switch {
	case len(rule) > maxRule:
		return "", "", fmt.Errorf("rule of %d bytes: at most %d", len(rule), maxRule)
	case !ok || pattern == "" || device == "":
		return "", "", fmt.Errorf("rule %q: want PATTERN=DEVICE, such as %s", rule, Rule(38, false))
	}
	if _, err := regexp.Compile(pattern); err != nil {
		return "", "", fmt.Errorf("rule %q: %w", rule, err)
	}
	return pattern, device, nil
}
