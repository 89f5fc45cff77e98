package gateway

import (
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"
	"unicode/utf8"
)

// modelObject is OpenAI's description of a model.
type modelObject struct {
	ID      string `json:"id"`
	Object  string `json:"object"`
	Created int64  `json:"created"`
	OwnedBy string `json:"owned_by"`
}

func (m *servedModel) object() modelObject {
	return modelObject{m.ID, "model", m.Created.Unix(), "kvasir"}
}

// claudeModel is Anthropic's.
type claudeModel struct {
	Type    string `json:"type"`
	ID      string `json:"id"`
	Name    string `json:"display_name"`
	Created string `json:"created_at"`
}

func (m *servedModel) claude() claudeModel {
	return claudeModel{"model", m.ID, m.ID, m.Created.UTC().Format(time.RFC3339)}
}

func (g *Gateway) listModels(w http.ResponseWriter, r *http.Request) {
	if isAnthropic(r) {
		g.listClaudeModels(w)
		return
	}
	list := struct {
		Object string        `json:"object"`
		Data   []modelObject `json:"data"`
	}{Object: "list", Data: []modelObject{}}
	for _, m := range *g.models.Load() {
		list.Data = append(list.Data, m.object())
	}
	writeJSON(w, http.StatusOK, list)
}

func (g *Gateway) listClaudeModels(w http.ResponseWriter) {
	list := struct {
		Data  []claudeModel `json:"data"`
		More  bool          `json:"has_more"`
		First *string       `json:"first_id"`
		Last  *string       `json:"last_id"`
	}{Data: []claudeModel{}}
	for _, m := range *g.models.Load() {
		list.Data = append(list.Data, m.claude())
	}
	if n := len(list.Data); n > 0 {
		list.First, list.Last = &list.Data[0].ID, &list.Data[n-1].ID
	}
	writeJSON(w, http.StatusOK, list)
}

func (g *Gateway) getModel(w http.ResponseWriter, r *http.Request) {
	m, e := g.model(r.PathValue("id"))
	if e != nil {
		writeError(w, r, e)
		return
	}
	if isAnthropic(r) {
		writeJSON(w, http.StatusOK, m.claude())
		return
	}
	writeJSON(w, http.StatusOK, m.object())
}

// model finds a model by a name of it; the error names the nearest id.
func (g *Gateway) model(name string) (*servedModel, *apiError) {
	models := *g.models.Load()
	if m := find(models, name); m != nil {
		return m, nil
	}
	nearest, best := "", 0
	for _, m := range models {
		if d := distance(clip(name), m.ID); nearest == "" || d < best {
			nearest, best = m.ID, d
		}
	}
	hint := "no model is served here"
	if nearest != "" {
		hint = fmt.Sprintf("the nearest is %q", nearest)
	}
	return nil, &apiError{status: http.StatusNotFound, code: "model_not_found", param: "model",
		message: fmt.Sprintf("model %q is not served here; %s", clip(name), hint)}
}

// textModel finds a model that makes text.
func (g *Gateway) textModel(name string) (*servedModel, *apiError) {
	m, e := g.model(name)
	if e == nil && m.NoText {
		return nil, lacks("model", fmt.Sprintf("%q makes embeddings, no text: it answers at /v1/embeddings", m.ID))
	}
	return m, e
}

// Resolve returns the ID of the model that is meant by a name: its ID, an alias, or
// the beginning of its digest.
func (g *Gateway) Resolve(name string) (id string, ok bool) {
	if m := find(*g.models.Load(), name); m != nil {
		return m.ID, true
	}
	return "", false
}

// minDigest is how many digits of a digest name a model.
const minDigest = 8

// find returns the model of a name, or nil. An ID goes before an alias, that before a
// digest, and that before an alias with *, of which the longest counts.
func find(models []*servedModel, name string) *servedModel {
	for _, m := range models {
		if m.ID == name {
			return m
		}
	}
	for _, m := range models {
		if slices.Contains(m.Aliases, name) {
			return m
		}
	}
	if m := findDigest(models, name); m != nil {
		return m
	}
	var open *servedModel
	longest := -1
	for _, m := range models {
		for _, a := range m.Aliases {
			if prefix, ok := strings.CutSuffix(a, "*"); ok && len(prefix) > longest && strings.HasPrefix(name, prefix) {
				open, longest = m, len(prefix)
			}
		}
	}
	return open
}

// findDigest returns the only model whose digest begins so.
func findDigest(models []*servedModel, digits string) (found *servedModel) {
	if len(digits) < minDigest {
		return nil
	}
	for _, m := range models {
		if strings.HasPrefix(m.Digest, strings.ToLower(digits)) {
			if found != nil {
				return nil
			}
			found = m
		}
	}
	return found
}

// distance is the number of single-letter edits between two names.
func distance(a, b string) int {
	row := make([]int, utf8.RuneCountInString(b)+1)
	for j := range row {
		row[j] = j
	}
	i := 0
	for _, x := range a {
		i++
		diagonal, j := row[0], 0
		row[0] = i
		for _, y := range b {
			j++
			cost := diagonal
			if x != y {
				cost++
			}
			diagonal = row[j]
			row[j] = min(cost, row[j]+1, row[j-1]+1)
		}
	}
	return row[len(row)-1]
}

// healthz says that the process is alive, nothing more.
func (g *Gateway) healthz(w http.ResponseWriter, _ *http.Request) {
	writeJSON(w, http.StatusOK, map[string]string{"status": "ok"})
}

// readyz is 200 when a token went through every part that serves each model.
func (g *Gateway) readyz(w http.ResponseWriter, _ *http.Request) {
	models := *g.models.Load()
	if len(models) == 0 {
		writeJSON(w, http.StatusServiceUnavailable, map[string]string{"status": "not ready", "reason": "no model is served here"})
		return
	}
	for _, m := range models {
		if err := m.Engine.Ready(); err != nil {
			writeJSON(w, http.StatusServiceUnavailable, map[string]string{
				"status": "not ready", "model": m.ID, "reason": err.Error(),
			})
			return
		}
	}
	writeJSON(w, http.StatusOK, map[string]string{"status": "ready"})
}
