//go:build cgo && linux

package node

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"net/http"
	"os"
	"strings"
	"sync"
	"testing"

	"kvasird/ggml"
	"kvasird/node/gateway/grammar"
)

// calling rewrites the shipped model as one whose chat template has tools, in the
// way of Hermes. The template grows by a multiple of 32, so that tensors lie as before.
func (s *swarm) calling() string {
	s.t.Helper()
	text := func(t string) []byte {
		return append(binary.LittleEndian.AppendUint64(nil, uint64(len(t))), t...)
	}
	old := reference().model.ChatTemplate()
	changed := "{% if tools %}<|im_start|>system\n{{ tools | tojson }} <tool_call><|im_end|>\n{% endif %}" + old
	changed += strings.Repeat(" ", (32-(len(changed)-len(old))%32)%32)
	file := s.readWhole()
	if bytes.Count(file, text(old)) != 1 {
		s.t.Fatal("the template of the shipped model was not found")
	}
	return s.write("calling.gguf", bytes.Replace(file, text(old), text(changed), 1))
}

// newCalling runs a node that has such a model all by itself.
func newCalling(t *testing.T) *swarm {
	s := newSwarm(t)
	s.backbone = s.start("calling", append(loopback, "--model", s.calling(), "--sequences", "4", "--http", "127.0.0.1:0")...)
	st, err := s.backbone.await(s.ctx, serving)
	if err != nil {
		t.Fatal(err)
	}
	s.http = st.HTTP
	return s
}

// said is an answer of /v1/chat/completions, whole or joined.
type said struct {
	Content string
	Calls   []struct {
		Function struct{ Name, Arguments string }
	} `json:"tool_calls"`

	finish string
	probs  []saidProb
}

type saidProb struct {
	Token   string
	Logprob float64
	Top     []struct {
		Token   string
		Logprob float64
	} `json:"top_logprobs"`
}

// say asks for an answer, streamed or not.
func (s *swarm) say(req map[string]any, stream bool) (got said, err error) {
	req = maps.Clone(req)
	req["model"], req["stream"] = "calling", stream
	req["messages"] = []map[string]string{{"role": "user", "content": "What is 6 plus 7?"}}
	data, err := json.Marshal(req)
	if err != nil {
		return got, err
	}
	post, err := http.NewRequestWithContext(s.ctx, http.MethodPost, "http://"+s.http+"/v1/chat/completions", bytes.NewReader(data))
	if err != nil {
		return got, err
	}
	resp, err := http.DefaultClient.Do(post)
	if err != nil {
		return got, err
	}
	defer resp.Body.Close()
	if !stream || resp.StatusCode != http.StatusOK {
		data, err := io.ReadAll(resp.Body)
		if err == nil && resp.StatusCode != http.StatusOK {
			err = fmt.Errorf("status %d: %s", resp.StatusCode, data)
		}
		if err == nil {
			err = got.take(data)
		}
		return got, err
	}
	lines := bufio.NewScanner(resp.Body)
	for lines.Scan() {
		data, ok := strings.CutPrefix(lines.Text(), "data: ")
		if !ok || data == "[DONE]" {
			continue
		}
		if err := got.take([]byte(data)); err != nil {
			return got, err
		}
	}
	return got, lines.Err()
}

// take adds a whole answer or a chunk of one.
func (a *said) take(data []byte) error {
	var c struct {
		Choices []struct {
			Message, Delta said
			Logprobs       *struct{ Content []saidProb }
			Finish         string `json:"finish_reason"`
		}
		Error any
	}
	if err := json.Unmarshal(data, &c); err != nil || c.Error != nil || len(c.Choices) != 1 {
		return fmt.Errorf("%w: %s", errors.Join(err, errors.New("no answer")), data)
	}
	one := c.Choices[0]
	a.Content += one.Message.Content + one.Delta.Content
	a.finish += one.Finish
	if one.Logprobs != nil {
		a.probs = append(a.probs, one.Logprobs.Content...)
	}
	for _, call := range append(one.Message.Calls, one.Delta.Calls...) {
		if call.Function.Name != "" {
			a.Calls = append(a.Calls, call)
		} else {
			a.Calls[len(a.Calls)-1].Function.Arguments += call.Function.Arguments
		}
	}
	return nil
}

// endings makes the ends of strings, arrays and objects likelier, and what begins
// with unwanted unlikely: the shipped model knows nothing of JSON, and would reason.
func endings(unwanted string) map[string]float64 {
	bias := map[string]float64{}
	m := reference().model
	for token := range ggml.Token(m.VocabSize()) {
		switch piece := string(m.Piece(token, true)); {
		case strings.HasPrefix(piece, unwanted):
			bias[fmt.Sprint(token)] = -100
		case piece != "" && strings.IndexByte(`"]}`, piece[0]) >= 0:
			bias[fmt.Sprint(token)] = 9
		}
	}
	return bias
}

// TestForms: a running node holds its answers to forms.
func TestForms(t *testing.T) {
	s := newCalling(t)
	s.forms(t)
	t.Run("logprobs", s.logprobs)
	t.Run("schemas", s.schemas)
}

// forms: answers are held to a schema, to JSON and to calls, the streamed as the others.
func (s *swarm) forms(t *testing.T) {
	const city = `{"type":"object","properties":{"city":{"enum":["Oslo","Rome"]},"days":{"type":"integer","minimum":1,"maximum":9}},
		"required":["city","days"],"additionalProperties":false}`
	tool := func(name string) map[string]any {
		return map[string]any{"type": "function", "function": map[string]any{"name": name, "parameters": json.RawMessage(city)}}
	}
	tools := []any{tool("weather"), tool("now")}
	for _, tt := range []struct {
		name   string
		add    map[string]any
		schema string // of the content, or of the arguments
		tool   string // that must be called; "" none, "any"
	}{
		{"schema", map[string]any{"response_format": map[string]any{"type": "json_schema",
			"json_schema": map[string]any{"name": "city", "strict": true, "schema": json.RawMessage(city)}}}, city, ""},
		{"object", map[string]any{"response_format": map[string]any{"type": "json_object"}}, `{"type":"object"}`, ""},
		{"required", map[string]any{"tools": tools, "tool_choice": "required"}, city, "any"},
		{"named", map[string]any{"tools": tools, "parallel_tool_calls": false,
			"tool_choice": map[string]any{"type": "function", "function": map[string]any{"name": "now"}}}, city, "now"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			req := map[string]any{"temperature": 1, "max_tokens": 160, "logit_bias": endings("<")}
			if tt.tool != "" {
				req["logit_bias"] = endings("h")
			}
			maps.Copy(req, tt.add)
			ended := 0
			for seed := range 4 {
				req["seed"] = seed
				got, err := s.say(req, false)
				streamed, err2 := s.say(req, true)
				if err != nil || err2 != nil || fmt.Sprint(got) != fmt.Sprint(streamed) {
					t.Fatalf("whole %+v, %v\nstreamed %+v, %v", got, err, streamed, err2)
				}
				if got.finish == "length" {
					continue
				}
				ended++
				got.check(t, tt.schema, tt.tool)
				if tt.name == "named" && len(got.Calls) != 1 {
					t.Errorf("%d calls", len(got.Calls))
				}
			}
			if ended < 2 {
				t.Errorf("%d answers of 4 came to their end", ended)
			}
		})
	}
	_, err := s.say(map[string]any{"response_format": map[string]any{"type": "json_schema",
		"json_schema": map[string]any{"name": "x", "schema": json.RawMessage(`{"not":{}}`)}}}, true)
	if err == nil || !strings.Contains(err.Error(), "status 400") || !strings.Contains(err.Error(), "not is not supported") {
		t.Errorf("a keyword that cannot be held to: %v", err)
	}
}

// check holds a complete answer to a schema, or its calls.
func (a *said) check(t *testing.T, schema, tool string) {
	t.Helper()
	if tool == "" {
		if err := validates(t, schema, a.Content); err != nil || a.finish != "stop" || len(a.Calls) > 0 {
			t.Errorf("%+v: %v", a, err)
		}
		return
	}
	if len(a.Calls) == 0 || a.Content != "" || a.finish != "tool_calls" {
		t.Errorf("%+v", a)
	}
	for _, c := range a.Calls {
		if err := validates(t, schema, c.Function.Arguments); err != nil || tool != "any" && c.Function.Name != tool {
			t.Errorf("call %+v: %v", c, err)
		}
	}
}

// logprobs: a greedy answer is the same with them, its tokens are the likeliest and
// joined the text.
func (s *swarm) logprobs(t *testing.T) {
	req := map[string]any{"temperature": 0, "max_tokens": 40}
	plain, err := s.say(req, false)
	if err != nil || plain.probs != nil {
		t.Fatalf("%+v, %v", plain, err)
	}
	req["logprobs"], req["top_logprobs"] = true, 3
	got, err := s.say(req, false)
	streamed, err2 := s.say(req, true)
	if err != nil || err2 != nil || fmt.Sprint(got) != fmt.Sprint(streamed) || got.Content != plain.Content {
		t.Fatalf("without %+v\nwhole %+v, %v\nstreamed %+v, %v", plain, got, err, streamed, err2)
	}
	text := ""
	for _, p := range got.probs {
		text += p.Token
		sum := 0.0
		for _, top := range p.Top {
			sum += math.Exp(top.Logprob)
		}
		if len(p.Top) != 3 || p.Top[0].Token != p.Token || p.Top[0].Logprob != p.Logprob || sum > 1.001 {
			t.Errorf("%+v", p)
		}
	}
	if text != got.Content || text == "" {
		t.Errorf("tokens %q, answer %q", text, got.Content)
	}
}

// schemas: of every fifth of the 200 schemas, four at once, each is refused, naming
// the keyword, or the answer at temperature 1 validates.
func (s *swarm) schemas(t *testing.T) {
	file, err := os.ReadFile("gateway/grammar/testdata/schemas.jsonl")
	if err != nil {
		t.Fatal(err)
	}
	var schemas []string
	for line := range strings.Lines(string(file)) {
		schemas = append(schemas, strings.TrimSpace(line))
	}
	answers, errs := make([]said, len(schemas)), make([]error, len(schemas))
	bias := endings("<")
	var asking sync.WaitGroup
	for client := range 4 {
		asking.Go(func() {
			for i := 5 * client; i < len(schemas); i += 20 {
				answers[i], errs[i] = s.say(map[string]any{"temperature": 1, "seed": i, "max_tokens": 120, "logit_bias": bias,
					"response_format": map[string]any{"type": "json_schema",
						"json_schema": map[string]any{"name": "x", "strict": true, "schema": json.RawMessage(schemas[i])}}}, i%2 == 0)
			}
		})
	}
	asking.Wait()
	var whole, cut, refused int
	for i := 0; i < len(schemas); i += 5 {
		_, err := grammar.FromSchema([]byte(schemas[i]), grammar.Options{})
		var unsupported *grammar.UnsupportedError
		switch {
		case errors.As(err, &unsupported) && errs[i] != nil && strings.Contains(errs[i].Error(), "status 400") &&
			strings.Contains(errs[i].Error(), unsupported.Keyword+" is not supported"):
			refused++
		case err != nil || errs[i] != nil:
			t.Errorf("schema %s: %v, %v", schemas[i], err, errs[i])
		case answers[i].finish == "length":
			cut++
		default:
			whole++
			answers[i].check(t, schemas[i], "")
		}
	}
	t.Logf("%d answers whole, %d cut, %d schemas refused", whole, cut, refused)
	if whole+cut+refused != 40 || whole < 24 {
		t.Errorf("of 40 schemas %d gave a whole answer, %d a cut one, %d were refused", whole, cut, refused)
	}
}
