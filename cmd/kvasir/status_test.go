package main

import (
	"bytes"
	"strings"
	"testing"

	"kvasird/node/api"
)

func TestStatusOfHotExperts(t *testing.T) {
	for _, tt := range []struct {
		hot  *api.HotExperts
		want string
	}{
		{&api.HotExperts{Budget: 4 << 30, Trouble: "it is not known yet"}, "0 kept, 0 bytes of 4.0 GiB; it is not known yet"},
		{&api.HotExperts{Budget: 4 << 30, Bytes: 7 << 29, Experts: 700, Pairs: 1000, Hits: 250, Recent: 0.4},
			"700 kept, 3.5 GiB of 4.0 GiB; 40 % of the work done here now, 25 % since the start"},
	} {
		var out bytes.Buffer
		printStatus(&out, &api.Status{Hot: tt.hot})
		if !strings.Contains(out.String(), tt.want) {
			t.Errorf("%q, want it to have %q", out.String(), tt.want)
		}
	}
	var out bytes.Buffer
	if printStatus(&out, &api.Status{}); strings.Contains(out.String(), "Hot experts") {
		t.Errorf("without a cache: %q", out.String())
	}
}
