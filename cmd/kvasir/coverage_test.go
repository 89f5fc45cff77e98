package main

import (
	"encoding/json"
	"net/http"
	"strings"
	"testing"

	"kvasird/node/api"
)

func TestCoverageMap(t *testing.T) {
	m := api.CoverageMap{
		Model: "tiny", Target: 2, Experts: 8,
		Layers: []api.LayerMap{
			{Layer: 0, Replicas: []int{2, 2, 1, 0, 0, 12, 3, 2}, Claimed: []int{0, 0, 0, 1, 0, 0, 0, 0}},
			{Layer: 1, Replicas: []int{2, 2, 2, 2, 2, 2, 2, 2}},
		},
		Holders: []api.Holder{
			{Peer: "12D3KooWabcdefgh", Serving: []api.Slice{{LayerEnd: 2, ExpertEnd: 4}}, Whole: true},
			{Peer: "12D3KooWijklmnop", Claimed: []api.Slice{{LayerEnd: 1, ExpertBegin: 3, ExpertEnd: 4}}, Leaving: true},
		},
	}
	m.Price = &api.Price{Epoch: 12, Raw: 1_250_000_000_000, Million: 6_250_000}
	m.Ring = &api.RingMap{Layers: 4, Missing: []api.LayerSpan{{Begin: 2, End: 4}}, Windows: []api.Window{
		{Peer: "12D3KooWabcdefgh", Layers: api.LayerSpan{End: 2}, State: api.PartServing, Sequences: 4, Free: 3, TokenMicro: 1500},
		{Peer: "12D3KooWijklmnop", Layers: api.LayerSpan{Begin: 2, End: 9}, State: api.PartClaimed},
	}}
	tests := []struct {
		width int
		want  []string
	}{
		{64, []string{"tiny: 2 of 16 experts are held by nobody", "held by nobody\nPrice: 1.250000 for a million tokens, 6250000 base units of the token, by the record of epoch 12\n\n",
			"    0  221d.+32\n", "    1  22222222\n", "is one expert:",
			"…abcdefgh has the whole model, serves layers 0:2 experts 0:4", "…ijklmnop downloads layers 0:1 experts 3:4, is leaving"}},
		{4, []string{"    0  2d.2\n", "is 2 experts, and shows the rarest",
			"Rings: none is complete, layers 2:4 lack", "==..  …abcdefgh layers 0:2 serving, 3 of 4 sequences free, 1.5 ms a token", "..==  …ijklmnop layers 2:9 claimed\n"}},
	}
	for _, tt := range tests {
		var text strings.Builder
		printCoverage(&text, m, tt.width, false)
		for _, want := range tt.want {
			if !strings.Contains(text.String(), want) {
				t.Errorf("width %d: no %q in\n%s", tt.width, want, text.String())
			}
		}
	}
	if got, want := heatRow(m.Layers[0], 2, 4, true), "\x1b[30;41md\x1b[0m\x1b[30;41m.\x1b[0m"; got != want {
		t.Errorf("coloured row %q, want %q", got, want)
	}
}

func TestPriceText(t *testing.T) {
	for want, p := range map[string]api.Price{
		"0.000001 for a million tokens, 7 base units of the token, by the record of epoch 0; too old": {Raw: 1_000_000, Million: 7, Trouble: "too old"},
		"do not pay": {Trouble: "do not pay"},
	} {
		if got := priceText(&p); got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}

func TestCoverageCommand(t *testing.T) {
	maps := []api.CoverageMap{{Model: "bad\x1b[2J", Target: 1, Experts: 1, Layers: []api.LayerMap{{Replicas: []int{1}}}}}
	data := daemon(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != api.PathCoverage {
			t.Errorf("asked for %s", r.URL.Path)
		}
		json.NewEncoder(w).Encode(maps)
	})
	status, out, errs := kvasir(t, "", "coverage", "--data", data)
	if status != exitOK || !strings.Contains(out, "every expert has 1 replicas") || strings.Contains(out, "\x1b") {
		t.Errorf("status %d, out %q, err %q", status, out, errs)
	}
	if status, _, errs := kvasir(t, "", "coverage", "--width", "2"); status != exitUsage || !strings.Contains(errs, "--width") {
		t.Errorf("width 2: status %d, err %q", status, errs)
	}
	maps = nil
	if status, out, _ := kvasir(t, "", "coverage", "--data", data); status != exitOK || !strings.Contains(out, "No model is known yet") {
		t.Errorf("no models: status %d, out %q", status, out)
	}
}
