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

// model finds a model by id or alias; the error names the nearest id.
func (g *Gateway) model(id string) (*servedModel, *apiError) {
	nearest, best := "", 0
	for _, m := range *g.models.Load() {
		if m.ID == id { // an id goes before any alias
			return m, nil
		}
	}
	for _, m := range *g.models.Load() {
		if m.isAlias(id) {
			return m, nil
		}
		if d := distance(clip(id), m.ID); nearest == "" || d < best {
			nearest, best = m.ID, d
		}
	}
	hint := "no model is served here"
	if nearest != "" {
		hint = fmt.Sprintf("the nearest is %q", nearest)
	}
	return nil, &apiError{status: http.StatusNotFound, code: "model_not_found", param: "model",
		message: fmt.Sprintf("model %q is not served here; %s", clip(id), hint)}
}

func (m *servedModel) isAlias(id string) bool {
	return slices.ContainsFunc(m.Aliases, func(a string) bool {
		prefix, open := strings.CutSuffix(a, "*")
		return id == a || open && strings.HasPrefix(id, prefix)
	})
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
