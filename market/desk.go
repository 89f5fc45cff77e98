package market

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"kvasird/ggml/gguf"
)

// The HTTP requests and replies of the market, as pure functions: who mounts them authenticates
// the caller, reads at most MaxRequest bytes and writes the reply as JSON.
//
//	POST /api/expert-coverage   CoverageRequest  → CoverageReply   a worker's heartbeat
//	GET  /api/expert-demand     ?model=ID        → DemandReply
//	POST /api/expert-volunteer  VolunteerRequest → VolunteerReply
//
// Ranges are [first, end). A worker that speaks HTTP is an author of its own, by the name that it
// was authenticated under; it counts in the table of this node only.

// MaxRequest bounds the body of a request, in bytes.
const MaxRequest = 256 << 10

// Limits of what a Desk keeps.
const (
	maxWorkers     = 1024
	maxWorkerName  = 96
	maxHeldEntries = MaxHoldings
	heartbeat      = 90 * time.Second // for which a heartbeat is counted: three of 30 s
)

// RequestError is a request that cannot be answered.
type RequestError struct {
	Status int // of HTTP
	Text   string
}

func (e *RequestError) Error() string { return e.Text }

func badRequest(format string, args ...any) error {
	return &RequestError{400, fmt.Sprintf(format, args...)}
}

// CoverageRequest is a worker's heartbeat: all that it serves of a model.
type CoverageRequest struct {
	Worker   string         `json:"worker,omitempty"` // empty: the caller's name
	Model    string         `json:"model,omitempty"`  // empty: the only one that is known
	Holdings []LayerExperts `json:"holdings"`
}

// LayerExperts is a range of experts of one layer.
type LayerExperts struct {
	Layer   int    `json:"layer"`
	Experts [2]int `json:"experts"`
}

// CoverageReply answers a heartbeat.
type CoverageReply struct {
	Model      string `json:"model"`
	ExpiresSec int    `json:"expires_sec"` // send the next before
}

// DemandReply is the coverage of a model.
type DemandReply struct {
	Model          string        `json:"model"`
	Name           string        `json:"name,omitempty"`
	Layers         int           `json:"layers"`
	Experts        int           `json:"experts"`
	TargetReplicas int           `json:"target_replicas"`
	Backbones      int           `json:"backbones"`
	Sources        int           `json:"sources"`
	Segments       []SegmentView `json:"segments"` // by layer, then expert
}

// SegmentView is a run of experts that are equally well covered.
type SegmentView struct {
	Layer    int     `json:"layer"`
	Experts  [2]int  `json:"experts"`
	Scarcity float64 `json:"scarcity"`
	Replicas int     `json:"replicas"`
	Claimed  int     `json:"claimed,omitempty"`
	Target   int     `json:"target"`
}

// VolunteerRequest asks for a range to serve.
type VolunteerRequest struct {
	Worker     string `json:"worker,omitempty"` // with a name, equals spread and the range is claimed for a minute
	Model      string `json:"model,omitempty"`  // empty: any
	MaxExperts int    `json:"max_experts,omitempty"`
	MaxBytes   int64  `json:"max_bytes,omitempty"`
}

// VolunteerReply is the scarcest range that fits. Model is told where the request left a choice.
type VolunteerReply struct {
	Model    string  `json:"model,omitempty"`
	Layer    int     `json:"layer"`
	Experts  [2]int  `json:"experts"`
	Scarcity float64 `json:"scarcity"`
	Replicas int     `json:"replicas"`
	Target   int     `json:"target"`
}

// Desk answers the requests over a table. It is not safe for concurrent use.
type Desk struct {
	table   *Table
	sizes   Sizes
	workers map[string]*desked
	seq     uint64
}

// desked is what the desk was told by, and promised to, one worker.
type desked struct {
	until time.Time
	held  map[gguf.ModelID][]gguf.Slice
	claim map[gguf.ModelID][]claimed
}

type claimed struct {
	slice gguf.Slice
	until time.Time
}

// NewDesk returns a desk.
func NewDesk(t *Table, sizes Sizes) *Desk {
	return &Desk{table: t, sizes: sizes, workers: map[string]*desked{}}
}

// Coverage takes a heartbeat. caller is the name under which the worker was authenticated.
func (d *Desk) Coverage(body []byte, caller string, now time.Time) (CoverageReply, error) {
	var q CoverageRequest
	if err := decodeRequest(body, &q); err != nil {
		return CoverageReply{}, err
	}
	if len(q.Holdings) > maxHeldEntries {
		return CoverageReply{}, badRequest("%d holdings, at most %d", len(q.Holdings), maxHeldEntries)
	}
	id, shape, err := d.model(q.Model, now)
	if err != nil {
		return CoverageReply{}, err
	}
	w, name, err := d.worker(caller, q.Worker, now)
	if err != nil {
		return CoverageReply{}, err
	}
	list := make([]gguf.Slice, 0, len(q.Holdings))
	for _, h := range q.Holdings {
		s := gguf.Slice{Layers: gguf.Range{Begin: h.Layer, End: h.Layer + 1},
			Experts: gguf.Range{Begin: h.Experts[0], End: h.Experts[1]}}
		if !shape.Has(s) {
			return CoverageReply{}, badRequest("holding layer %d, experts [%d, %d) is not in a model of %v",
				h.Layer, h.Experts[0], h.Experts[1], shape)
		}
		list = append(list, s)
	}
	before := w.held[id]
	w.until, w.held[id] = now.Add(heartbeat), list
	if err := d.publish(name, w, now); err != nil {
		w.held[id] = before
		return CoverageReply{}, badRequest("%v", err)
	}
	return CoverageReply{Model: id.String(), ExpiresSec: int(heartbeat / time.Second)}, nil
}

// Demand answers which experts of a model are scarce; an empty id means the only one known.
func (d *Desk) Demand(model string, now time.Time) (DemandReply, error) {
	id, _, err := d.model(model, now)
	if err != nil {
		return DemandReply{}, err
	}
	c, ok := d.table.Coverage(id, now)
	if !ok {
		return DemandReply{}, &RequestError{404, "nobody announces model " + id.String()}
	}
	r := DemandReply{Model: id.String(), Name: c.Name, Layers: c.Shape.Layers, Experts: c.Shape.Experts,
		TargetReplicas: c.Target, Backbones: c.Backbones, Sources: c.Sources, Segments: []SegmentView{}}
	for _, l := range c.Layers {
		for _, s := range l.Segments {
			r.Segments = append(r.Segments, SegmentView{l.Layer, [2]int{s.Experts.Begin, s.Experts.End},
				s.Scarcity, s.Replicas, s.Claimed, s.Target})
		}
	}
	return r, nil
}

// Volunteer answers with the scarcest range. caller is the name under which the worker was
// authenticated, empty for anybody.
func (d *Desk) Volunteer(body []byte, caller string, now time.Time) (VolunteerReply, error) {
	var q VolunteerRequest
	if err := decodeRequest(body, &q); err != nil {
		return VolunteerReply{}, err
	}
	if q.MaxExperts < 0 || q.MaxBytes < 0 || q.MaxExperts == 0 && q.MaxBytes == 0 {
		return VolunteerReply{}, badRequest("max_experts is %d, max_bytes %d: set one of them above 0", q.MaxExperts, q.MaxBytes)
	}
	want := Want{MaxExperts: q.MaxExperts, MaxBytes: q.MaxBytes, Bytes: d.sizes, Models: d.table.Verified()}
	if q.Model != "" {
		id, _, err := d.model(q.Model, now)
		if err != nil {
			return VolunteerReply{}, err
		}
		want.Models = []gguf.ModelID{id}
	}
	var w *desked
	if q.Worker != "" {
		var err error
		if w, want.Peer, err = d.worker(caller, q.Worker, now); err != nil {
			return VolunteerReply{}, err
		}
		want.Held = w.has
	}
	c, ok := d.table.Assign(want, now)
	if !ok {
		return VolunteerReply{}, &RequestError{404, "nothing that fits is scarce: ask again later"}
	}
	r := VolunteerReply{Layer: c.Layer, Experts: [2]int{c.Experts.Begin, c.Experts.End},
		Scarcity: c.Scarcity, Replicas: c.Replicas, Target: c.Target}
	if len(want.Models) > 1 {
		r.Model = c.Model.String()
	}
	if w == nil {
		return r, nil
	}
	w.claim[c.Model] = append(w.claim[c.Model], claimed{gguf.Slice{
		Layers: gguf.Range{Begin: c.Layer, End: c.Layer + 1}, Experts: c.Experts}, now.Add(claimLease)})
	if w.until.Before(now.Add(claimLease)) {
		w.until = now.Add(claimLease)
	}
	return r, d.publish(want.Peer, w, now)
}

// has lists what the worker serves or was promised.
func (w *desked) has(id gguf.ModelID) []gguf.Slice {
	list := slices.Clone(w.held[id])
	for _, c := range w.claim[id] {
		list = append(list, c.slice)
	}
	return list
}

// model finds a model by id, or the only one that is verified.
func (d *Desk) model(text string, now time.Time) (gguf.ModelID, Shape, error) {
	var id gguf.ModelID
	if text == "" {
		known := d.table.Verified()
		if len(known) != 1 {
			return id, Shape{}, badRequest("name a model: this node knows %d", len(known))
		}
		id = known[0]
	} else if err := id.UnmarshalText([]byte(text)); err != nil {
		return id, Shape{}, badRequest("%v", err)
	}
	s, ok := d.table.Shape(id)
	if !ok {
		return id, s, &RequestError{404, "this node has no verified header of model " + id.String()}
	}
	return id, s, nil
}

// worker finds or adds a worker; its author's name cannot be that of a peer.
func (d *Desk) worker(caller, name string, now time.Time) (*desked, string, error) {
	name = "http " + caller + "/" + name
	if len(name) > 2*maxWorkerName || checkName(name[:min(len(name), maxName)]) != nil {
		return nil, "", badRequest("worker name is too long or not printable")
	}
	for n, w := range d.workers {
		if !now.Before(w.until) {
			delete(d.workers, n)
		}
	}
	w := d.workers[name]
	if w == nil {
		if len(d.workers) >= maxWorkers {
			return nil, "", &RequestError{429, fmt.Sprintf("%d workers already", len(d.workers))}
		}
		w = &desked{held: map[gguf.ModelID][]gguf.Slice{}, claim: map[gguf.ModelID][]claimed{}, until: now.Add(heartbeat)}
		d.workers[name] = w
	}
	return w, name, nil
}

// publish puts the record of a worker into the table.
func (d *Desk) publish(name string, w *desked, now time.Time) error {
	var a Announcement
	for _, id := range d.table.Verified() {
		s, _ := d.table.Shape(id)
		m := ModelNews{ID: id, Shape: s}
		for _, x := range w.held[id] {
			m.Holdings = append(m.Holdings, Holding{Slice: x, State: Serving})
		}
		w.claim[id] = slices.DeleteFunc(w.claim[id], func(c claimed) bool {
			return c.until.Sub(now) < time.Second || slices.ContainsFunc(w.held[id], func(h gguf.Slice) bool {
				return h.Layers.Intersect(c.slice.Layers).Len() > 0 && h.Experts.Intersect(c.slice.Experts).Len() > 0
			})
		})
		for _, c := range w.claim[id] {
			m.Holdings = append(m.Holdings, Holding{c.slice, Claimed, c.until.Sub(now).Truncate(time.Second)})
		}
		if len(m.Holdings) > 0 {
			a.Models = append(a.Models, m)
		}
	}
	slices.SortFunc(a.Models, func(x, y ModelNews) int { return cmp.Compare(x.ID.String(), y.ID.String()) })
	body, err := a.Encode()
	if err != nil {
		return err
	}
	d.seq = max(d.seq+1, uint64(now.UnixNano()))
	_, err = d.table.Update(Record{name, d.seq, now, heartbeat, body}, now)
	return err
}

// decodeRequest is strict: unknown fields, trailing bytes and large bodies are refused.
func decodeRequest(body []byte, v any) error {
	if len(body) > MaxRequest {
		return &RequestError{413, fmt.Sprintf("request of %d bytes, at most %d", len(body), MaxRequest)}
	}
	dec := json.NewDecoder(bytes.NewReader(body))
	dec.DisallowUnknownFields()
	if err := dec.Decode(v); err != nil {
		return badRequest("request is not the JSON that is expected: %v", err)
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return badRequest("request has bytes after its JSON value")
	}
	return nil
}
