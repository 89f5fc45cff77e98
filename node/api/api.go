// Package api is the local control API of a daemon: JSON over HTTP on a unix
// socket that only the daemon's user may open. It holds the messages and the
// paths, no behaviour: node serves them, node/client calls them, and a later
// page reads them. It is not the API for other machines (that is node/gateway).
// The one secret that it carries is a new key of the gateway, in CreatedKey.
//
// Fields are only ever added. Counters count since the daemon started. A value
// that is not known is absent, never zero by pretence.
//
//	GET  /v1/status  → Status
//	POST /v1/ask     AskRequest → one AskEvent per line, the last with Done or Error
//
// A request that cannot be served is answered with an HTTP status and Failure.
package api

import (
	"errors"
	"os"
	"path/filepath"
)

// Paths of the API.
const (
	PathStatus = "/v1/status"
	PathAsk    = "/v1/ask"
)

// Limits of the messages, in bytes, checked by whoever reads them.
const (
	MaxRequest = 4 << 20
	MaxStatus  = 16 << 20
	MaxEvent   = 1 << 20
)

// HeartbeatSeconds is the longest silence of an answer: a daemon that has
// nothing to say sends an empty AskEvent, so that a reader can tell waiting
// from a daemon that hangs.
const HeartbeatSeconds = 5

// SocketName is the control socket's file name in the data folder.
const SocketName = "control.sock"

// DefaultDataDir is where a daemon keeps its state unless told otherwise:
// $XDG_DATA_HOME/kvasir, else ~/.local/share/kvasir.
func DefaultDataDir() (string, error) {
	if dir := os.Getenv("XDG_DATA_HOME"); filepath.IsAbs(dir) {
		return filepath.Join(dir, "kvasir"), nil
	}
	home, err := os.UserHomeDir()
	if err != nil {
		return "", errors.New("no home folder is known ($HOME is not set): name the data folder")
	}
	return filepath.Join(home, ".local", "share", "kvasir"), nil
}

// State is what a node as a whole is doing.
type State string

// The states of a node.
const (
	StateStarting State = "starting" // loading, connecting
	StateServing  State = "serving"  // its roles do their work
	StateBlocked  State = "blocked"  // running, but it cannot do its work: see Reason
	StateStopping State = "stopping"
)

// Status is everything a node says of itself.
type Status struct {
	PeerID      string      `json:"peer_id"`
	Version     string      `json:"version"`
	RuntimePack string      `json:"runtime_pack"`        // llama.cpp release, ggml ABI, wire version
	Network     string      `json:"network"`             // id
	Admission   string      `json:"admission,omitempty"` // of a network with a file
	Roles       []string    `json:"roles"`
	State       State       `json:"state"`
	Reason      string      `json:"reason,omitempty"` // why it is blocked or starting, and what to do
	UptimeSec   float64     `json:"uptime_seconds"`
	Listen      []string    `json:"listen"`                // multiaddrs, with the peer id
	HTTP        string      `json:"http,omitempty"`        // host:port of the gateway
	HTTPAccess  string      `json:"http_access,omitempty"` // who may use it, or why it is closed and what to do
	Backend     string      `json:"backend,omitempty"`
	Threads     int         `json:"threads"`
	Model       *Model      `json:"model,omitempty"`
	Slices      []Slice     `json:"slices,omitempty"`   // what this node serves to others
	Coverage    []Coverage  `json:"coverage,omitempty"` // per MoE layer, on a backbone
	Rows        []Rows      `json:"rows,omitempty"`     // computed by this node
	Peers       []Peer      `json:"peers,omitempty"`
	Tokens      *Tokens     `json:"tokens,omitempty"`      // on a node that generates
	Hot         *HotExperts `json:"hot_experts,omitempty"` // on a backbone with a cache
	Reach       *Reach      `json:"reach,omitempty"`       // in a network with a file
	Volunteer   *Volunteer  `json:"volunteer,omitempty"`   // on a volunteer
	Carried     *Carried    `json:"carried,omitempty"`     // in a network with a file
	Earnings    *Earnings   `json:"earnings,omitempty"`    // in a network with a token, once a wallet is linked
}

// HotExperts are the experts that a backbone keeps of those that others compute.
type HotExperts struct {
	Budget  int64   `json:"budget_bytes"`
	Bytes   int64   `json:"bytes"`
	Experts int     `json:"experts"`           // that are here now, of all layers
	Fetched uint64  `json:"fetched"`           // that came here since the start
	Hits    uint64  `json:"hits"`              // (row, expert) pairs that were computed here
	Pairs   uint64  `json:"pairs"`             // and in all
	Recent  float64 `json:"recent"`            // share of hits when last there were any
	Trouble string  `json:"trouble,omitempty"` // why something is not here that should be
}

// Earnings is what a node was paid, in base units of the token, as decimal digits.
type Earnings struct {
	Wallet   string `json:"wallet"` // that has it
	Earned   string `json:"earned"` // in all
	Held     string `json:"held"`   // whose audits are open
	Bonded   string `json:"bonded"`
	Requests uint64 `json:"requests"` // that it was paid for
}

// Carried counts the requests that other nodes carried to this one.
type Carried struct {
	Running  int               `json:"running"`
	Answered uint64            `json:"answered"`          // completely
	Gone     uint64            `json:"gone"`              // whose client left
	Refused  map[string]uint64 `json:"refused,omitempty"` // by reason
}

// Model is the model that a node runs or serves a part of.
type Model struct {
	Name      string `json:"name"`
	ID        string `json:"id"` // hexadecimal BLAKE3 of the manifest
	Arch      string `json:"arch"`
	Layers    int    `json:"layers"`
	MoELayers int    `json:"moe_layers"` // 0: a model without experts
	Experts   int    `json:"experts"`    // per MoE layer
	Used      int    `json:"experts_used"`
	Price     *Price `json:"price,omitempty"` // nil: none is known, or the network has no token
}

// Slice is a half-open range of layers and experts.
type Slice struct {
	LayerBegin  int `json:"layer_begin"`
	LayerEnd    int `json:"layer_end"`
	ExpertBegin int `json:"expert_begin"`
	ExpertEnd   int `json:"expert_end"`
}

// Coverage says how well the experts of one layer are held by the workers that
// can be reached now, this node included.
type Coverage struct {
	Layer       int    `json:"layer"`
	Experts     int    `json:"experts"`
	Held        int    `json:"held"`              // experts with at least one holder
	MinReplicas int    `json:"min_replicas"`      // of the layer's worst expert
	Missing     string `json:"missing,omitempty"` // ranges without a holder: "16:24,30:32"
}

// Rows counts the expert rows computed in one layer.
type Rows struct {
	Layer int    `json:"layer"`
	Rows  uint64 `json:"rows"`
}

// PeerState is how this node stands with a peer.
type PeerState string

// The states of a peer.
const (
	PeerConnecting PeerState = "connecting"
	PeerConnected  PeerState = "connected"
	PeerRefused    PeerState = "refused" // one side refused the other: see Reason
	PeerLost       PeerState = "lost"
)

// Peer is another node as this node sees it.
type Peer struct {
	ID       string    `json:"id"`
	Addr     string    `json:"addr,omitempty"`
	Path     string    `json:"path,omitempty"` // while connected: direct, or relayed
	State    PeerState `json:"state"`
	Reason   string    `json:"reason,omitempty"`
	SinceSec float64   `json:"since_seconds"` // how long it has been in this state
	Roles    []string  `json:"roles,omitempty"`
	Slices   []Slice   `json:"slices,omitempty"`
	RTTMicro int64     `json:"rtt_microseconds,omitempty"`
	Rows     []Rows    `json:"rows,omitempty"`   // computed by it for this node
	Failed   uint64    `json:"failed,omitempty"` // calls that it failed or answered too late

	Standing string `json:"standing,omitempty"` // what audits of its answers say of it
	Out      bool   `json:"out,omitempty"`      // for that it gets no calls now

	Precision string `json:"precision,omitempty"` // of rows to its experts and back, unless that is f32
}

// Tokens counts what a node generated.
type Tokens struct {
	Prompt    uint64  `json:"prompt"`
	Generated uint64  `json:"generated"`
	Drafted   uint64  `json:"drafted,omitempty"`   // guessed, and computed with others
	Accepted  uint64  `json:"accepted,omitempty"`  // of them, since they were right
	NoDrafts  string  `json:"no_drafts,omitempty"` // why none are guessed though that was asked for
	PerSecond float64 `json:"per_second"`          // of all sequences, over the last 10 s
	Running   int     `json:"running"`             // sequences
	Waiting   int     `json:"waiting"`
}

// AskRequest asks the node's model.
type AskRequest struct {
	Model       string   `json:"model,omitempty"` // "": the only one that the node answers for
	Prompt      string   `json:"prompt"`
	System      string   `json:"system,omitempty"`
	Raw         bool     `json:"raw,omitempty"`        // complete the prompt as it is, without the chat template
	MaxTokens   int      `json:"max_tokens,omitempty"` // 0: the node's default
	Temperature float32  `json:"temperature"`          // 0: greedy
	TopP        float32  `json:"top_p,omitempty"`      // 0: off
	Seed        uint32   `json:"seed,omitempty"`
	Stop        []string `json:"stop,omitempty"`
}

// AskEvent is one line of an answer.
type AskEvent struct {
	Text  string   `json:"text,omitempty"`  // whole UTF-8 runes
	IDs   []int32  `json:"ids,omitempty"`   // the tokens that the text came from
	Done  *AskDone `json:"done,omitempty"`  // set in the last event of a full answer
	Error *Error   `json:"error,omitempty"` // set in the last event of a failed one
	Note  string   `json:"note,omitempty"`  // what the node waits for, to show a person
}

// AskDone closes an answer.
type AskDone struct {
	Finish        string  `json:"finish"` // "stop" or "length"
	PromptTokens  int     `json:"prompt_tokens"`
	Tokens        int     `json:"tokens"`
	FirstTokenSec float64 `json:"first_token_seconds"`
	Seconds       float64 `json:"seconds"` // from request to last token
}

// TokensPerSecond is the speed after the first token, 0 when there is no
// second one.
func (d AskDone) TokensPerSecond() float64 {
	if d.Tokens < 2 || d.Seconds <= d.FirstTokenSec {
		return 0
	}
	return float64(d.Tokens-1) / (d.Seconds - d.FirstTokenSec)
}

// Code names the kind of an error for programs.
type Code string

// The codes, each with the HTTP status that it travels with.
const (
	CodeBadRequest Code = "bad_request" // 400
	CodePayment    Code = "payment"     // 402: the linked wallet does not pay for the answer
	CodeNotFound   Code = "not_found"   // 404
	CodeBusy       Code = "busy"        // 429
	CodeInternal   Code = "internal"    // 500
	CodeNotReady   Code = "not_ready"   // 503: no model, or not ready yet
	CodeCoverage   Code = "coverage"    // 503: no worker holds some experts
	CodeTooSlow    Code = "too_slow"    // 504: the time that a request may take is over
)

// HTTPStatus is the status that a code travels with.
func (c Code) HTTPStatus() int {
	switch c {
	case CodeBadRequest:
		return 400
	case CodePayment:
		return 402
	case CodeNotFound:
		return 404
	case CodeBusy:
		return 429
	case CodeNotReady, CodeCoverage:
		return 503
	case CodeTooSlow:
		return 504
	}
	return 500
}

// Error is an error in words, with what to do where that is known.
type Error struct {
	Code    Code   `json:"code"`
	Message string `json:"message"`
}

func (e *Error) Error() string { return e.Message }

// Failure is the body of an answer with an HTTP status of 400 and above.
type Failure struct {
	Error *Error `json:"error"`
}
