package gateway

import (
	"encoding/base64"
	"encoding/binary"
	"fmt"
	"math"
	"net/http"
	"slices"

	"kvasird/node/gateway/jinja"
)

// embedTask is a checked body of /v1/embeddings.
type embedTask struct {
	model  string
	inputs []rawPrompt
	base64 bool
}

func parseEmbeddings(d *jinja.Dict) (*embedTask, *apiError) {
	f := newFields(d)
	t := newTask()
	f.modelName(t)
	e := &embedTask{model: t.model, inputs: f.rawPrompts("input", maxInputs)}
	f.refuse("dimensions")
	switch form, ok := f.text("encoding_format"); {
	case !ok, form == "float":
	case form == "base64":
		e.base64 = true
	default:
		f.fail("encoding_format", "%q is none of float, base64", clip(form))
	}
	return e, f.err()
}

type embeddingItem struct {
	Object    string `json:"object"`
	Index     int    `json:"index"`
	Embedding any    `json:"embedding"` // numbers, or base64 of little-endian float32
}

// embeddings is POST /v1/embeddings.
func (g *Gateway) embeddings(w http.ResponseWriter, r *http.Request) {
	g.withPlace(w, r, func() {
		d, sum, done, e := g.body(w, r)
		if e != nil {
			writeError(w, r, e)
			return
		}
		t, e := parseEmbeddings(d)
		var m *servedModel
		var prompts [][]int32
		if e == nil {
			m, prompts, e = g.prepareEmbeddings(t)
		}
		done()
		if e != nil {
			writeError(w, r, e)
			return
		}
		cost := Cost{Body: sum}
		for _, p := range prompts {
			cost.Prompt += len(p)
		}
		paid, e := g.charge(w, r, m, cost)
		if e != nil {
			writeError(w, r, e)
			return
		}
		tokens, err := g.embed(w, r, t, m, prompts, bill{paid: paid})
		if paid != nil {
			paid.End(Outcome{Delivered: tokens, Computed: tokens, Failed: err})
		}
	})
}

// embed answers, and says how many tokens it cost.
func (g *Gateway) embed(w http.ResponseWriter, r *http.Request, t *embedTask, m *servedModel, prompts [][]int32, b bill) (tokens int, err error) {
	ctx, cancel := g.limit(b.context(r.Context()))
	defer cancel()
	vectors, err := m.Engine.(EmbedEngine).Embed(ctx, asker(r), prompts)
	if err == nil && len(vectors) != len(prompts) {
		err = fmt.Errorf("the engine made %d embeddings of %d inputs", len(vectors), len(prompts))
	}
	for i := range vectors {
		if slices.ContainsFunc(vectors[i], func(x float32) bool { return x-x != 0 }) {
			err = fmt.Errorf("the embedding of input %d is not finite", i)
		}
	}
	if err != nil {
		e := engineError(causeOf(ctx, err))
		if e.code == codeTooLong {
			e.param = "input"
		}
		writeError(w, r, e)
		return 0, e
	}
	return g.sendEmbeddings(w, r, t, prompts, vectors), nil
}

func (g *Gateway) prepareEmbeddings(t *embedTask) (*servedModel, [][]int32, *apiError) {
	m, e := g.model(t.model)
	if e != nil {
		return nil, nil, e
	}
	if _, ok := m.Engine.(EmbedEngine); !ok {
		return nil, nil, lacks("model", fmt.Sprintf("%q makes text, it has no embeddings", m.ID))
	}
	t.model = m.ID
	var prompts [][]int32
	for i, p := range t.inputs {
		param := fmt.Sprintf("input[%d]", i)
		if p.tokens == nil && p.text == "" { // which some vocabularies have tokens for
			return nil, nil, badParam(param, param+": the text is empty")
		}
		tokens, e := m.tokensOf(p, param)
		if e != nil {
			return nil, nil, e
		}
		prompts = append(prompts, tokens)
	}
	return m, prompts, nil
}

func (g *Gateway) sendEmbeddings(w http.ResponseWriter, r *http.Request, t *embedTask, prompts [][]int32, vectors [][]float32) (tokens int) {
	type usage struct {
		Prompt int `json:"prompt_tokens"`
		Total  int `json:"total_tokens"`
	}
	out := struct {
		Object string          `json:"object"`
		Data   []embeddingItem `json:"data"`
		Model  string          `json:"model"`
		Usage  usage           `json:"usage"`
	}{Object: "list", Model: t.model}
	for i, v := range vectors {
		item := embeddingItem{Object: "embedding", Index: i, Embedding: v}
		if t.base64 {
			item.Embedding = packed(v)
		}
		out.Data = append(out.Data, item)
		out.Usage.Prompt += len(prompts[i])
	}
	out.Usage.Total = out.Usage.Prompt
	countTokens(r, out.Usage.Total)
	g.writeAnswer(w, out)
	return out.Usage.Total
}

func packed(v []float32) string {
	b := make([]byte, 0, 4*len(v))
	for _, x := range v {
		b = binary.LittleEndian.AppendUint32(b, math.Float32bits(x))
	}
	return base64.StdEncoding.EncodeToString(b)
}
