package verify

import (
	"context"
	"fmt"
	"math"
	"slices"

	"kvasird/experts/tolerance"
)

// ModelConfig says what is measured with a whole model.
type ModelConfig struct {
	Path    string
	Base    Backend // what the others are compared with; Reference is compared too
	Prompts []string
	Greedy  int
	Text    string
}

// ModelPair is how far a backend lies from the base through a whole model.
type ModelPair struct {
	Backend string    `json:"backend"`
	Trouble string    `json:"trouble,omitempty"`
	Drift   []float64 `json:"drift"` // by layer: largest L2 of the rows after it
	// Logits, over all tokens of the prompts, which are the same for all: the largest
	// |difference|, the largest |a-b|/|b|, the mean and largest KL(base || this) in nats.
	LogitMax float64 `json:"logit_max"`
	LogitL2  float64 `json:"logit_l2"`
	KLMean   float64 `json:"kl_mean"`
	KLMax    float64 `json:"kl_max"`
	Top1     float64 `json:"top1"`   // share of tokens with the same likeliest next one
	Routes   float64 `json:"routes"` // share of the base's choices of an expert that are made here too
	Routed   int     `json:"routed"` // choices
	// Diverges is the first of Greedy tokens that differs, of the prompt where that is
	// earliest, counted from 1; 0 if none does. Margin is the base's there: how much
	// likelier (in logits) its token was than the next.
	Diverges   int     `json:"diverges"`
	Margin     float64 `json:"margin,omitempty"`
	Differ     int     `json:"differ"` // prompts whose greedy tokens differ
	Perplexity float64 `json:"perplexity,omitempty"`
}

// Model is the second part of a report.
type Model struct {
	Path       string      `json:"path"`
	Base       string      `json:"base"`
	Prompts    int         `json:"prompts"`
	Tokens     int         `json:"tokens"`
	Greedy     int         `json:"greedy"`
	TextTokens int         `json:"text_tokens"`
	Perplexity float64     `json:"perplexity,omitempty"`
	Pairs      []ModelPair `json:"pairs"`
}

// MeasureModel runs a model on every backend, and compares each with the base.
func MeasureModel(ctx context.Context, c *Config, m *ModelConfig) (*Model, error) {
	t := task{LibDir: c.LibDir, Model: &modelTask{Path: m.Path, Base: m.Base, Prompts: m.Prompts, Greedy: m.Greedy, Text: m.Text}}
	run := func(b Backend) (*modelRun, error) {
		c.say("running %s on %s", m.Path, b.Name)
		t.Backend = b
		if b.Name == tolerance.Reference {
			t.Backend.Variant, t.Backend.Device = m.Base.Variant, m.Base.Device
		}
		o, err := c.ask(ctx, &t)
		if err != nil {
			return nil, err
		}
		return o.Model, nil
	}
	base, err := run(m.Base)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", m.Base.Name, err)
	}
	report := &Model{Path: m.Path, Base: m.Base.Name, Prompts: len(m.Prompts), Greedy: m.Greedy, TextTokens: base.Tokens, Perplexity: base.perplexity()}
	for _, p := range base.Prompts {
		report.Tokens += len(p.Tokens)
	}
	for _, b := range c.Backends {
		if b.Name == m.Base.Name {
			continue
		}
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		pair := ModelPair{Backend: b.Name}
		if other, err := run(b); err != nil {
			pair.Trouble = err.Error()
		} else if err := pair.compare(base, other); err != nil {
			pair.Trouble = err.Error()
		}
		report.Pairs = append(report.Pairs, pair)
	}
	return report, nil
}

func (r *modelRun) perplexity() float64 {
	if r.Tokens == 0 {
		return 0
	}
	return math.Exp(r.Surprise)
}

func (p *ModelPair) compare(base, other *modelRun) error {
	p.Perplexity = other.perplexity()
	tokens, same, routesSame := 0, 0, 0
	for i := range base.Prompts {
		a, b := &base.Prompts[i], &other.Prompts[i]
		if !slices.Equal(a.Tokens, b.Tokens) || len(a.Layers) != len(b.Layers) {
			return fmt.Errorf("prompt %d has other tokens there", i+1)
		}
		if err := p.compareLayers(a, b, &routesSame); err != nil {
			return err
		}
		for at := range a.Logits {
			tokens++
			if p.compareLogits(a.Logits[at], b.Logits[at]) {
				same++
			}
		}
		p.compareGreedy(a, b)
	}
	p.KLMean /= float64(tokens)
	p.Top1, p.Routes = float64(same)/float64(tokens), 1
	if p.Routed > 0 {
		p.Routes = float64(routesSame) / float64(p.Routed)
	}
	return nil
}

func (p *ModelPair) compareLayers(a, b *promptRun, same *int) error {
	if p.Drift == nil {
		p.Drift = make([]float64, len(a.Layers))
	}
	for l := range a.Layers {
		if len(a.Layers[l]) == 0 || len(a.Layers[l]) != len(b.Layers[l]) || len(a.Routes[l]) != len(b.Routes[l]) {
			return fmt.Errorf("layer %d shows no rows, or not as many as on the base", l)
		}
		for _, d := range deltas(nil, a.Layers[l], b.Layers[l], a.Width) {
			p.Drift[l] = max(p.Drift[l], d.L2)
		}
		for at := 0; at < len(a.Routes[l]); at += a.Used {
			for _, e := range a.Routes[l][at : at+a.Used] {
				if _, found := slices.BinarySearch(b.Routes[l][at:at+a.Used], e); found {
					*same++
				}
				p.Routed++
			}
		}
	}
	return nil
}

// compareLogits says whether the likeliest token is the same.
func (p *ModelPair) compareLogits(a, b []float32) bool {
	var diff, norm float64
	for i := range a {
		d := float64(a[i]) - float64(b[i])
		diff, norm = diff+d*d, norm+float64(a[i])*float64(a[i])
		p.LogitMax = max(p.LogitMax, math.Abs(d))
	}
	p.LogitL2 = max(p.LogitL2, math.Sqrt(diff/norm))
	kl := 0.0
	x, y := logSoftmax(a), logSoftmax(b)
	for i := range x {
		kl += math.Exp(x[i]) * (x[i] - y[i])
	}
	p.KLMean, p.KLMax = p.KLMean+kl, max(p.KLMax, kl)
	first, _ := likeliest(a)
	second, _ := likeliest(b)
	return first == second
}

func (p *ModelPair) compareGreedy(a, b *promptRun) {
	for i := range a.Greedy {
		if a.Greedy[i] == b.Greedy[i] {
			continue
		}
		p.Differ++
		if p.Diverges == 0 || i+1 < p.Diverges {
			p.Diverges, p.Margin = i+1, a.Margin[i]
		}
		return
	}
}
