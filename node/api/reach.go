package api

// Reach says in words how a node in a network with a file is connected, and if
// it is not, why.
type Reach struct {
	Reach string `json:"reach"` // whether others can connect to it, and how that is known
	NAT   string `json:"nat"`   // what NAT there is before it
	MDNS  string `json:"mdns"`  // whether peers are found on the local network
	DHT   string `json:"dht"`

	// Multiaddrs: where it listens, where peers see it from, what was configured to
	// be told, and circuits at relays.
	Listening []string `json:"listening,omitempty"`
	Observed  []string `json:"observed,omitempty"`
	Announced []string `json:"announced,omitempty"`
	Relayed   []string `json:"relayed,omitempty"`

	DirectPeers  int       `json:"direct_peers"`
	RelayedPeers int       `json:"relayed_peers"`
	Bootstrap    []Contact `json:"bootstrap,omitempty"`
	Relays       []Contact `json:"relays,omitempty"`
	Unmet        []Contact `json:"unmet,omitempty"`   // peers that were found and not met, at most 32
	Serving      *Relaying `json:"serving,omitempty"` // on a relay
	Advice       []string  `json:"advice,omitempty"`  // what to do about it, most urgent first
}

// Contact is a node to which this one connects, or tries to.
type Contact struct {
	ID       string    `json:"id"`
	Addrs    []string  `json:"addrs,omitempty"`
	State    PeerState `json:"state"`
	Error    string    `json:"error,omitempty"`    // why it is not connected
	Reserved bool      `json:"reserved,omitempty"` // a relay by which others reach this node
}

// Relaying is what a node does as a relay.
type Relaying struct {
	Reservations int   `json:"reservations"` // open
	Circuits     int   `json:"circuits"`     // open
	Refused      int64 `json:"refused"`      // requests
	Bytes        int64 `json:"bytes"`        // carried
}

// Volunteer is what a node has taken on for its network.
type Volunteer struct {
	Paused    bool       `json:"paused,omitempty"`
	Parts     []Part     `json:"parts,omitempty"`
	Windows   []Window   `json:"windows,omitempty"` // of layers, of a stage
	Disk      Share      `json:"disk"`
	Memory    Share      `json:"memory"`           // of the experts, where they lie
	OnGPU     bool       `json:"on_gpu,omitempty"` // which is a GPU
	Downloads []Progress `json:"downloads,omitempty"`
	Troubles  []string   `json:"troubles,omitempty"` // in the way of parts, in words
}

// PartState is how far a part is.
type PartState string

// The states of a part, in their order.
const (
	PartClaimed PartState = "claimed" // chosen, and said so
	PartLoading PartState = "loading"
	PartServing PartState = "serving"
	PartLeaving PartState = "leaving" // still served, while others take over
)

// Part is a range of experts of a model.
type Part struct {
	Model string    `json:"model"` // name
	ID    string    `json:"id"`
	Slice Slice     `json:"slice"`
	State PartState `json:"state"`
}

// Share is how much of what is given is used, in bytes. What is being downloaded
// counts as used.
type Share struct {
	Used  int64 `json:"used"`
	Limit int64 `json:"limit"`
}
