package gateway

import "testing"

func TestNames(t *testing.T) {
	g, err := New(Config{Models: []Model{
		{ID: "small", Engine: &scriptEngine{}, Digest: "0123456789abcdef0000", Aliases: []string{"claude-*", "gpt-4o", "*"}},
		{ID: "large", Engine: &scriptEngine{}, Digest: "0123456789abcdef1111", Aliases: []string{"claude-opus-*", "gpt-*", "small"}},
		{ID: "0123456789abcdef000", Engine: &scriptEngine{}, Digest: "fedcba98"},
		{ID: "none", Engine: &scriptEngine{}},
	}})
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{
		"small":                "small", // before the alias
		"large":                "large",
		"gpt-4o":               "small", // before the longer list gpt-*
		"gpt-4o-mini":          "large",
		"claude-haiku-4-5":     "small",
		"claude-opus-4-1":      "large", // the longest
		"0123456789abcdef0000": "small",
		"0123456789abcdef1":    "large",
		"0123456789ABCDEF1":    "large",
		"0123456789abcdef000":  "0123456789abcdef000",
		"fedcba98":             "0123456789abcdef000",
		"fedcba9":              "small", // too short; *
		"01234567":             "small", // two begin so; *
		"":                     "small", // *
	} {
		if got, ok := g.Resolve(name); !ok || got != want {
			t.Errorf("%q is %q, %v; want %q", name, got, ok, want)
		}
	}
	g.SetModels([]Model{{ID: "none", Engine: &scriptEngine{}}})
	for _, name := range []string{"", "x", "01234567"} {
		if got, ok := g.Resolve(name); ok {
			t.Errorf("%q is %q", name, got)
		}
	}
}
