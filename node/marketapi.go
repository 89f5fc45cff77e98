package node

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"sync"
	"time"

	"kvasird/ggml/gguf"
	"kvasird/market"
)

// localCaller is who calls the market's HTTP door, which listens on this machine
// only unless its operator has it otherwise.
const localCaller = "http"

// marketDoor serves the market over HTTP, for programs that are no peers: what
// they say counts in this node's table only.
type marketDoor struct {
	mu   sync.Mutex // guards desk
	desk *market.Desk
}

func newMarketDoor(t *market.Table, w *weights) *marketDoor {
	var sizes sync.Map // model id → []int64
	return &marketDoor{desk: market.NewDesk(t, func(id gguf.ModelID, layer int) int64 {
		list, ok := sizes.Load(id)
		if !ok {
			g := w.known(id)
			if g == nil {
				return 0
			}
			found, err := expertSizes(g)
			if err != nil {
				return 0
			}
			list, _ = sizes.LoadOrStore(id, found)
		}
		if of := list.([]int64); layer < len(of) {
			return of[layer]
		}
		return 0
	})}
}

// expertSizes is what an expert of each layer takes on disk, rounded up; 0 for
// layers without experts.
func expertSizes(g *gguf.Model) ([]int64, error) {
	list, n := make([]int64, g.Layers()), int64(g.Experts())
	for _, layer := range g.ExpertLayers() {
		tensors, err := g.PlanSlice(gguf.Slice{Layers: gguf.Range{Begin: layer, End: layer + 1}, Experts: gguf.Range{End: int(n)}})
		if err != nil {
			return nil, err
		}
		bytes := int64(0)
		for _, t := range tensors {
			bytes += t.Bytes
		}
		list[layer] = (bytes + n - 1) / n
	}
	return list, nil
}

// routes are the requests that the door answers.
func (d *marketDoor) routes() map[string]http.Handler {
	return map[string]http.Handler{
		"POST /api/expert-coverage": d.answer(func(r *http.Request, body []byte, now time.Time) (any, error) {
			return d.desk.Coverage(body, localCaller, now)
		}),
		"GET /api/expert-demand": d.answer(func(r *http.Request, _ []byte, now time.Time) (any, error) {
			return d.desk.Demand(r.URL.Query().Get("model"), now)
		}),
		"POST /api/expert-volunteer": d.answer(func(r *http.Request, body []byte, now time.Time) (any, error) {
			return d.desk.Volunteer(body, localCaller, now)
		}),
	}
}

// answer reads a request, has it answered at the desk, and writes the reply.
func (d *marketDoor) answer(do func(r *http.Request, body []byte, now time.Time) (any, error)) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		http.NewResponseController(w).SetReadDeadline(time.Now().Add(controlTimeout))
		body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, market.MaxRequest))
		var large *http.MaxBytesError
		if errors.As(err, &large) {
			err = &market.RequestError{Status: http.StatusRequestEntityTooLarge, Text: fmt.Sprintf("a request has at most %d bytes", large.Limit)}
		}
		var reply any
		if err == nil {
			d.mu.Lock()
			reply, err = do(r, body, time.Now())
			d.mu.Unlock()
		}
		status := http.StatusOK
		if err != nil {
			status = http.StatusBadRequest
			var bad *market.RequestError
			if errors.As(err, &bad) {
				status = bad.Status
			}
			reply = map[string]any{"error": map[string]string{"message": err.Error()}}
		}
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(status)
		json.NewEncoder(w).Encode(reply)
	})
}
