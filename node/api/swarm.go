package api

import "encoding/json"

// Paths of what a node knows of its swarm and does in it.
const (
	PathCoverage = "/v1/coverage" // GET → []CoverageMap
	PathPause    = "/v1/pause"    // POST PauseRequest → PauseResult
	PathModels   = "/v1/models"   // POST ModelRequest → one ModelEvent per line, the last with Done or Error
	PathPlan     = "/v1/plan"     // POST PlanRequest → one PlanEvent per line, the last with Done or Error
)

// CoverageMap says how well the experts of one model are held, as this node
// sees it from what peers announce.
type CoverageMap struct {
	Model    string     `json:"model"` // name
	ID       string     `json:"id"`
	Target   int        `json:"target"` // replicas wanted of every expert
	Experts  int        `json:"experts"`
	Layers   []LayerMap `json:"layers"` // MoE layers, ascending
	Holders  []Holder   `json:"holders,omitempty"`
	Segments []Segment  `json:"segments,omitempty"` // what is scarcest, worst first
	Here     []Slice    `json:"here,omitempty"`     // what this node serves of it
	Ring     *RingMap   `json:"ring,omitempty"`     // who runs windows of layers; nil: nobody does
	Price    *Price     `json:"price,omitempty"`    // nil: none is known, or the network has no token
}

// Price is what a model costs, as this node heard and checked it.
type Price struct {
	Epoch   uint64  `json:"epoch"`             // after which it holds
	Raw     uint64  `json:"price"`             // fiat micro-units · 10⁶ per 10⁶ tokens
	Million uint64  `json:"million"`           // base units of the token for a million tokens
	AgeSec  float64 `json:"age_sec"`           // since it was issued
	Trouble string  `json:"trouble,omitempty"` // why it should not be paid by, or soon not
}

// RingMap says who runs which layers of a model as stages of rings.
type RingMap struct {
	Layers  int         `json:"layers"`            // of the model
	Chains  int         `json:"chains"`            // of windows that cover all layers, no two of which share one
	Missing []LayerSpan `json:"missing,omitempty"` // what a first chain lacks
	Windows []Window    `json:"windows,omitempty"` // by first layer
}

// LayerSpan is the layers [Begin, End).
type LayerSpan struct {
	Begin int `json:"begin"`
	End   int `json:"end"`
}

// Window is a range of layers that a node runs, or is about to.
type Window struct {
	Peer       string    `json:"peer,omitempty"`
	Model      string    `json:"model,omitempty"` // name
	Layers     LayerSpan `json:"layers"`
	State      PartState `json:"state"`
	Sequences  int       `json:"sequences,omitempty"` // that it has room for
	Free       int       `json:"free,omitempty"`      // of these
	TokenMicro int64     `json:"token_us,omitempty"`  // to compute one token
}

// LayerMap has one entry per expert.
type LayerMap struct {
	Layer    int   `json:"layer"`
	Replicas []int `json:"replicas"`          // that serve
	Claimed  []int `json:"claimed,omitempty"` // that are being downloaded; absent: none
}

// Holder is a peer that announced a part of the model.
type Holder struct {
	Peer    string  `json:"peer"`
	Serving []Slice `json:"serving,omitempty"`
	Claimed []Slice `json:"claimed,omitempty"` // downloading
	Leaving bool    `json:"leaving,omitempty"`
	Whole   bool    `json:"whole,omitempty"` // has every byte: others download from it
}

// Segment is a contiguous range of experts in a layer that are equally scarce.
type Segment struct {
	Layer       int     `json:"layer"`
	ExpertBegin int     `json:"expert_begin"`
	ExpertEnd   int     `json:"expert_end"`
	Replicas    int     `json:"replicas"`
	Target      int     `json:"target"`
	Scarcity    float64 `json:"scarcity"` // 0 none … 1 nobody holds them
}

// PauseRequest starts or ends a pause: a paused node finishes what it computes
// for others, tells them to go elsewhere, and takes nothing new.
type PauseRequest struct {
	Paused bool `json:"paused"`
}

// PauseResult says how the node stands now.
type PauseResult struct {
	Paused bool   `json:"paused"`
	Note   string `json:"note,omitempty"` // such as: last holder of some experts
}

// ModelAction is what is asked of the node's model store.
type ModelAction string

// The actions.
const (
	ModelList   ModelAction = "list"
	ModelAdd    ModelAction = "add"    // Paths
	ModelVerify ModelAction = "verify" // Model
	ModelRemove ModelAction = "remove" // Model
	ModelPin    ModelAction = "pin"    // Model
	ModelUnpin  ModelAction = "unpin"  // Model
)

// ModelRequest asks something of the model store.
type ModelRequest struct {
	Action ModelAction `json:"action"`
	Model  string      `json:"model,omitempty"` // id, the beginning of one, or a name
	Paths  []string    `json:"paths,omitempty"` // absolute, of a GGUF or all parts of one
}

// ModelEvent is one line of the answer.
type ModelEvent struct {
	Progress *Progress     `json:"progress,omitempty"`
	Models   []StoredModel `json:"models,omitempty"` // list: all; else the one concerned
	Done     bool          `json:"done,omitempty"`
	Note     string        `json:"note,omitempty"`
	Error    *Error        `json:"error,omitempty"`
}

// Progress is how far something long is.
type Progress struct {
	What    string  `json:"what"` // "import", "verify", "download"
	Done    int64   `json:"done"` // bytes
	Total   int64   `json:"total"`
	Rate    float64 `json:"rate"`                   // bytes per second, smoothed
	LeftSec float64 `json:"left_seconds,omitempty"` // 0: not known yet
	Sources int     `json:"sources,omitempty"`      // peers that send now
}

// StoredModel is a model in the node's store, whole or in part.
type StoredModel struct {
	ID     string `json:"id"`
	Name   string `json:"name"`
	Held   int64  `json:"held"` // verified bytes
	Total  int64  `json:"total"`
	Pinned bool   `json:"pinned,omitempty"`
	Note   string `json:"note,omitempty"` // what is wrong with it
}

// PlanRequest asks in which ways a model could run on this node and its peers.
type PlanRequest struct {
	Model     string `json:"model,omitempty"` // id, the beginning of one, a name, or the absolute path of a GGUF; "": the node's
	Context   int    `json:"context"`         // tokens of all sequences together
	Sequences int    `json:"sequences"`       // that run at once
	Nodes     string `json:"nodes,omitempty"` // TOML that describes nodes, to plan for those instead
}

// PlanEvent is one line of the answer.
type PlanEvent struct {
	Done  *PlanResult `json:"done,omitempty"`
	Error *Error      `json:"error,omitempty"`
}

// PlanResult is a plan, for people and for programs.
type PlanResult struct {
	Text string          `json:"text"`
	Plan json.RawMessage `json:"plan"`
}
