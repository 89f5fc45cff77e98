//go:build cgo && linux

package node

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/santhosh-tekuri/jsonschema/v6"

	"kvasird/ggml"
	"kvasird/ggml/tiny"
	"kvasird/node/gateway/grammar"
)

// speaker generates with the shipped model, which knows nothing of JSON and
// would seldom close what it opened: endings are made likelier, not sure.
type speaker struct {
	model *ggml.Model
	c     *ggml.Context
	bias  map[ggml.Token]float32
}

func newSpeaker(t *testing.T) *speaker {
	t.Helper()
	path, err := tiny.Write(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	rt, err := ggml.Open(ggml.Config{})
	if err != nil {
		t.Fatal(err)
	}
	m, err := rt.LoadModel(ggml.ModelConfig{Path: path})
	if err != nil {
		t.Fatal(err)
	}
	c, err := m.NewContext(ggml.ContextConfig{Tokens: 512, Batch: 64, Threads: 1})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close(); m.Close() })
	bias := map[ggml.Token]float32{}
	for token := range ggml.Token(m.VocabSize()) {
		if piece := m.Piece(token, true); len(piece) > 0 && strings.IndexByte(`"]}`, piece[0]) >= 0 {
			bias[token] = 9
		}
	}
	return &speaker{m, c, bias}
}

// say gives the answer under a grammar, and whether it came to its end within
// limit tokens.
func (s *speaker) say(t *testing.T, prompt, gbnf string, seed uint32, limit int) (string, bool) {
	t.Helper()
	sampler, err := s.model.NewSampler(ggml.SamplerConfig{Temperature: 1, Seed: seed, Grammar: gbnf, LogitBias: s.bias})
	if err != nil {
		t.Fatalf("%v:\n%s", err, gbnf)
	}
	defer sampler.Close()
	tokens, err := s.model.Tokenize(prompt, true, true)
	if err != nil {
		t.Fatal(err)
	}
	s.c.SeqRemove(0, 0, -1)
	b := ggml.NewBatch(64)
	for i, token := range tokens {
		b.Add(token, i, 0, i == len(tokens)-1)
	}
	var answer bytes.Buffer
	for n := range limit {
		if err := s.c.Decode(context.Background(), b); err != nil {
			t.Fatal(err)
		}
		token := sampler.Sample(s.c, b.Len()-1)
		if s.model.IsEOG(token) {
			return answer.String(), true
		}
		answer.Write(s.model.Piece(token, true))
		b.Reset()
		b.Add(token, len(tokens)+n, 0, true)
	}
	return answer.String(), false
}

// TestSchemasHold: of 200 schemas each is refused, naming the keyword, or the
// model's answers at temperature 1 validate. Answers that are cut by the limit of
// tokens are not counted; most must be whole.
func TestSchemasHold(t *testing.T) {
	file, err := os.ReadFile("gateway/grammar/testdata/schemas.jsonl")
	if err != nil {
		t.Fatal(err)
	}
	s := newSpeaker(t)
	var whole, cut, refused int
	for line := range strings.Lines(string(file)) {
		gbnf, err := grammar.FromSchema([]byte(line), grammar.Options{})
		var unsupported *grammar.UnsupportedError
		if errors.As(err, &unsupported) && unsupported.Keyword != "" {
			refused++
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		answer, ended := s.say(t, "What is 6 plus 7?", gbnf, uint32(whole+cut), 120)
		if !ended {
			cut++
			continue
		}
		whole++
		if err := validates(t, line, answer); err != nil {
			t.Errorf("schema %s got %s: %v", line, answer, err)
		}
	}
	t.Logf("%d answers whole, %d cut, %d schemas refused", whole, cut, refused)
	if whole+cut+refused != 200 || whole < 120 {
		t.Errorf("of 200 schemas %d gave a whole answer, %d a cut one, %d were refused", whole, cut, refused)
	}
}

func validates(t *testing.T, schema, answer string) error {
	t.Helper()
	if !utf8.ValidString(answer) {
		return errors.New("not UTF-8")
	}
	doc, err := jsonschema.UnmarshalJSON(strings.NewReader(schema))
	if err != nil {
		t.Fatal(err)
	}
	c := jsonschema.NewCompiler()
	c.AssertFormat()
	if err := c.AddResource("schema.json", doc); err != nil {
		t.Fatal(err)
	}
	compiled, err := c.Compile("schema.json")
	if err != nil {
		t.Fatal(err)
	}
	value, err := jsonschema.UnmarshalJSON(strings.NewReader(answer))
	if err != nil {
		return fmt.Errorf("not JSON: %w", err)
	}
	return compiled.Validate(value)
}

// TestAnyJSONHolds: json_object.
func TestAnyJSONHolds(t *testing.T) {
	s := newSpeaker(t)
	ended := 0
	for seed := range uint32(10) {
		answer, end := s.say(t, "What is 6 plus 7?", grammar.AnyJSON(), seed, 120)
		if !end {
			continue
		}
		ended++
		if err := validates(t, `{"type":"object"}`, answer); err != nil {
			t.Errorf("got %s: %v", answer, err)
		}
	}
	if ended == 0 {
		t.Error("no answer came to its end")
	}
}
