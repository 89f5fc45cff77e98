package market

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/fxamacker/cbor/v2"

	"kvasird/ggml/gguf"
)

// The announcement, version 1: the body of a signed envelope on the topic Topic. Author,
// sequence, time and validity are the envelope's.
//
// It is deterministic CBOR (RFC 8949, 4.2.1) of integers, byte strings and text, at most MaxBody
// bytes. Maps have integer keys. Decoding refuses any other encoding of the same value, unknown
// keys, keys given twice, and trailing bytes. A key is left out where its value is zero.
//
//	announcement  1 version, 2 away, 3 capacity, 4 models, 5 near, 6 machine
//	              away: the author leaves politely; there is nothing else in the map then
//	capacity      [rows per second, free disk bytes, free memory bytes]; hints, 0 unknown, but
//	              for the bytes where there is a machine
//	machine       [free bytes of the GPU's memory, cores, bytes of weights per second for the
//	              first row of a step, the same for each further one, ns for a layer beside,
//	              bytes per second up, down, ns for asking another node]; 0 unknown or without
//	model         1 id (32 bytes), 2 name, 3 shape, 4 flags, 5 holdings, 6 demand, 7 windows, 8 room,
//	              9 bytes of memory, or of the GPU's, that the author has the model loaded in, 10 service
//	              flags: bit 0, the author has every byte and sends any; bit 1, the author runs
//	              the model for clients; bit 2, its windows are without the experts
//	shape         [layers, experts per MoE layer, [begin, end, begin, end…] of the MoE layers];
//	              of a dense model [layers, 0, []]
//	holding       [first layer, end, first expert, end, state, lease]
//	              state: 1 claimed, 2 loading, 3 serving, 4 leaving
//	              lease: seconds after the envelope's time for which a claimed or loading
//	              holding is to be counted, 1 to MaxLease; else 0
//	demand        [layer, pairs, [expert, share, expert, share…]]
//	              pairs: (row, expert) pairs routed in this layer, decayed (see Meter)
//	              share: of the pairs, in 1/10,000; experts ascending
//	window        [first layer, end, state, lease, slots, free slots, token, batched]
//	              state and lease as of a holding; token: µs that the author computes for one
//	              token alone, batched: for one more beside others, 0 unknown; a window that
//	              does not compute yet has slots and times of 0
//	room          [disk bytes, memory bytes] that the author gives to a window of the model
//	service       [slots, free slots, context, token]: the author answers for the model: sequences
//	              that it runs at once, tokens of one, µs of one token of one, 0 unknown
//	near          [[peer, µs]…] round trips that the author measured, by peer
//
// Version history: 1; keys 5 and 6 of an announcement, 7 to 10 and flag 2 of a model were added
// later, and a reader without them refuses the record.
const (
	wireVersion = 1

	// Topic names the gossip topic of announcements.
	Topic = "coverage"
	// MaxBody bounds an encoded announcement, in bytes.
	MaxBody = 16 << 10
	// MaxModels and MaxHoldings bound an announcement, MaxHot the hot experts of one layer.
	MaxModels   = 16
	MaxHoldings = 640
	MaxHot      = 16
	// MaxWindows bounds the windows of one model, MaxWindowsAll those of an announcement.
	MaxWindows    = 8
	MaxWindowsAll = 32
	// MaxNear bounds the neighbours, MaxSlots the sequences of a window.
	MaxNear  = 16
	MaxSlots = 4096
	// MaxToken is the longest time that a token takes: slower does not compute.
	MaxToken = time.Minute
	// MaxLease is the longest lease.
	MaxLease = 10 * time.Minute
	// MaxHint bounds every size and rate of what a node gives, in bytes.
	MaxHint = 1 << 50

	maxName   = 96
	maxPeer   = 128         // bytes of a neighbour's identity
	maxRTT    = time.Minute // slower is not a neighbour
	maxWindow = 1 << 30     // tokens of a sequence
	maxHotAll = 640         // hot experts of one announcement
	maxLayer  = time.Second // of a machine: slower does not compute
	maxCores  = 4096
	maxPairs  = 1 << 50
	shareUnit = 10_000
)

// State is how far a holding has come.
type State uint8

// The states, in the order in which a holding passes through them.
const (
	Claimed State = 1 + iota // wanted; no byte is downloaded yet, others may outrank it
	Loading                  // being downloaded and proven
	Serving                  // computes for others: a replica
	Leaving                  // still computes, and will be given up: no replica
)

func (s State) String() string {
	if s < Claimed || s > Leaving {
		return "unknown"
	}
	return [...]string{"claimed", "loading", "serving", "leaving"}[s-1]
}

// MarshalText writes what String writes.
func (s State) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// Holding is a slice that the author has or wants.
type Holding struct {
	Slice gguf.Slice
	State State
	Lease time.Duration // from the record's time, in whole seconds; claimed and loading only
}

// WindowHolding is a contiguous range of layers that the author runs, or wants to run, as a stage
// of a ring.
type WindowHolding struct {
	Layers gguf.Range
	State  State
	Lease  time.Duration // from the record's time, in whole seconds; claimed and loading only
	Slots  int           // sequences that it has room for
	Free   int           // of Slots
	// Token is the compute of one token alone, Batched of one more beside others, 0 unknown. They
	// are told in whole microseconds, rounded up.
	Token, Batched time.Duration
}

// Service is what an author offers who answers for a model by itself: whoever may infer sends it
// requests.
type Service struct {
	Slots   int           // sequences that it runs at once; 0: it offers nothing
	Free    int           // of Slots
	Context int           // tokens of one sequence, prompt and answer together
	Token   time.Duration // one token of one sequence of late, in whole microseconds; 0 unknown
}

// Footprint is what something takes, in bytes.
type Footprint struct{ Disk, Memory int64 }

// Neighbour is a peer and the round trip to it, told in whole microseconds, rounded up.
type Neighbour struct {
	Peer string
	RTT  time.Duration
}

// HotExpert is an expert that is used more than others of its layer.
type HotExpert struct {
	Expert int
	Share  int // of the layer's pairs, in 1/10,000
}

// LayerDemand is what a backbone measured of one layer.
type LayerDemand struct {
	Layer int
	Pairs uint64 // routed, decayed
	Hot   []HotExpert
}

// ModelNews is what the author says about one model.
type ModelNews struct {
	ID       gguf.ModelID
	Name     string // for people
	Shape    Shape
	Full     bool // has every byte: a source of any slice
	Backbone bool // runs the model for clients
	Dense    bool // its windows are without the experts
	Holdings []Holding
	Demand   []LayerDemand // layers ascending
	Windows  []WindowHolding
	Room     Footprint // given to a window, held already or not; zero: none
	Memory   uint64    // bytes that the author has the model loaded in, of its GPU's where it has one; 0: not, or not told
	Service  Service   // zero: the author answers for the model to its own clients at most
}

// Capacity hints at what the author can take on. Zero is unknown, unless a Machine is told too.
type Capacity struct {
	RowsPerSecond uint64
	FreeDisk      uint64 // bytes
	FreeMemory    uint64 // bytes
}

// Machine is what an author computes with, for those who plan. Zero is unknown, or without.
type Machine struct {
	VRAM     uint64        // free bytes of the memory of its GPU
	Cores    int           // that it computes with
	Bytes    uint64        // of weights that the first row of a step goes through in a second
	Batch    uint64        // likewise each further row
	Layer    time.Duration // of a step beyond that, for every layer
	Up, Down uint64        // bytes per second to and from others
	Call     time.Duration // of asking another node, beyond round trip and compute
}

// Announcement is all that a node says of itself. Whoever reads one shares it: it is never
// changed.
type Announcement struct {
	Away     bool // leaves politely: holds nothing any more
	Capacity Capacity
	Models   []ModelNews
	Near     []Neighbour // by peer, ascending
	Machine  *Machine    // nil: not told
}

type wireAnnouncement struct {
	Version  uint          `cbor:"1,keyasint"`
	Away     bool          `cbor:"2,keyasint,omitempty"`
	Capacity *wireCapacity `cbor:"3,keyasint,omitempty"`
	Models   []wireModel   `cbor:"4,keyasint,omitempty"`
	Near     []wireNear    `cbor:"5,keyasint,omitempty"`
	Machine  *wireMachine  `cbor:"6,keyasint,omitempty"`
}

type wireMachine struct {
	_            struct{} `cbor:",toarray"`
	VRAM         uint64
	Cores        int
	Bytes, Batch uint64
	Layer        int64 // ns
	Up, Down     uint64
	Call         int64 // ns
}

type wireCapacity struct {
	_                  struct{} `cbor:",toarray"`
	Rows, Disk, Memory uint64
}

type wireModel struct {
	ID       []byte        `cbor:"1,keyasint"`
	Name     string        `cbor:"2,keyasint,omitempty"`
	Shape    wireShape     `cbor:"3,keyasint"`
	Flags    uint          `cbor:"4,keyasint,omitempty"`
	Holdings []wireHolding `cbor:"5,keyasint,omitempty"`
	Demand   []wireDemand  `cbor:"6,keyasint,omitempty"`
	Windows  []wireWindow  `cbor:"7,keyasint,omitempty"`
	Room     *wireRoom     `cbor:"8,keyasint,omitempty"`
	Memory   uint64        `cbor:"9,keyasint,omitempty"`
	Service  *wireService  `cbor:"10,keyasint,omitempty"`
}

type wireShape struct {
	_               struct{} `cbor:",toarray"`
	Layers, Experts int
	MoE             []int
}

type wireHolding struct {
	_                      struct{} `cbor:",toarray"`
	FirstLayer, EndLayer   int
	FirstExpert, EndExpert int
	State                  State
	Lease                  uint32
}

type wireDemand struct {
	_     struct{} `cbor:",toarray"`
	Layer int
	Pairs uint64
	Hot   []int
}

type wireWindow struct {
	_              struct{} `cbor:",toarray"`
	Begin, End     int
	State          State
	Lease          uint32
	Slots, Free    int
	Token, Batched int64 // µs
}

type wireRoom struct {
	_            struct{} `cbor:",toarray"`
	Disk, Memory int64
}

type wireService struct {
	_                    struct{} `cbor:",toarray"`
	Slots, Free, Context int
	Token                int64 // µs
}

type wireNear struct {
	_    struct{} `cbor:",toarray"`
	Peer string
	RTT  int64 // µs
}

const (
	flagFull uint = 1 << iota
	flagBackbone
	flagDense
)

var (
	encMode = mustMode(cbor.CoreDetEncOptions().EncMode())
	decMode = mustMode(cbor.DecOptions{
		DupMapKey:         cbor.DupMapKeyEnforcedAPF,
		IndefLength:       cbor.IndefLengthForbidden,
		TagsMd:            cbor.TagsForbidden,
		ExtraReturnErrors: cbor.ExtraDecErrorUnknownField,
		MaxNestedLevels:   8,
		MaxArrayElements:  2 * MaxHoldings,
		MaxMapPairs:       16,
	}.DecMode())
)

func mustMode[M any](mode M, err error) M {
	if err != nil {
		panic(err) // constant options: wrong for every input or for none
	}
	return mode
}

// Encode returns the body. It refuses what Decode refuses.
func (a *Announcement) Encode() ([]byte, error) {
	if err := a.check(); err != nil {
		return nil, err
	}
	w := wireAnnouncement{Version: wireVersion, Away: a.Away}
	if a.Capacity != (Capacity{}) {
		w.Capacity = &wireCapacity{Rows: a.Capacity.RowsPerSecond, Disk: a.Capacity.FreeDisk, Memory: a.Capacity.FreeMemory}
	}
	for i := range a.Models {
		w.Models = append(w.Models, a.Models[i].wire())
	}
	for _, n := range a.Near {
		w.Near = append(w.Near, wireNear{Peer: n.Peer, RTT: micros(n.RTT)})
	}
	if m := a.Machine; m != nil {
		w.Machine = &wireMachine{VRAM: m.VRAM, Cores: m.Cores, Bytes: m.Bytes, Batch: m.Batch,
			Layer: m.Layer.Nanoseconds(), Up: m.Up, Down: m.Down, Call: m.Call.Nanoseconds()}
	}
	b, err := encMode.Marshal(w)
	if err == nil && len(b) > MaxBody {
		return nil, refuse(Oversized, "announcement of %d bytes, at most %d: hold fewer, longer ranges", len(b), MaxBody)
	}
	return b, err
}

func (m *ModelNews) wire() wireModel {
	w := wireModel{ID: m.ID[:], Name: m.Name, Memory: m.Memory,
		Shape: wireShape{Layers: m.Shape.Layers, Experts: m.Shape.Experts, MoE: []int{}}}
	for _, r := range m.Shape.MoE {
		w.Shape.MoE = append(w.Shape.MoE, r.Begin, r.End)
	}
	if m.Full {
		w.Flags |= flagFull
	}
	if m.Backbone {
		w.Flags |= flagBackbone
	}
	if m.Dense {
		w.Flags |= flagDense
	}
	for _, h := range m.Holdings {
		w.Holdings = append(w.Holdings, wireHolding{FirstLayer: h.Slice.Layers.Begin, EndLayer: h.Slice.Layers.End,
			FirstExpert: h.Slice.Experts.Begin, EndExpert: h.Slice.Experts.End,
			State: h.State, Lease: uint32(h.Lease / time.Second)})
	}
	for _, d := range m.Demand {
		x := wireDemand{Layer: d.Layer, Pairs: d.Pairs, Hot: []int{}}
		for _, h := range d.Hot {
			x.Hot = append(x.Hot, h.Expert, h.Share)
		}
		w.Demand = append(w.Demand, x)
	}
	for _, x := range m.Windows {
		w.Windows = append(w.Windows, wireWindow{Begin: x.Layers.Begin, End: x.Layers.End, State: x.State,
			Lease: uint32(x.Lease / time.Second), Slots: x.Slots, Free: x.Free, Token: micros(x.Token), Batched: micros(x.Batched)})
	}
	if m.Room != (Footprint{}) {
		w.Room = &wireRoom{Disk: m.Room.Disk, Memory: m.Room.Memory}
	}
	if x := m.Service; x != (Service{}) {
		w.Service = &wireService{Slots: x.Slots, Free: x.Free, Context: x.Context, Token: micros(x.Token)}
	}
	return w
}

// micros rounds up, so that what is not zero stays so.
func micros(d time.Duration) int64 { return int64((d + time.Microsecond - 1) / time.Microsecond) }

// fromMicros reads micros; what is beyond any limit stays so.
func fromMicros(n int64) time.Duration {
	return time.Duration(max(-1, min(n, int64(time.Hour/time.Microsecond)))) * time.Microsecond
}

// Decode reads a body. What is wrong with it is a *RefusedError. Whether its shapes are those of
// the models only a Table can say.
func Decode(body []byte) (*Announcement, error) {
	if len(body) > MaxBody {
		return nil, refuse(Oversized, "announcement of %d bytes, at most %d", len(body), MaxBody)
	}
	var w wireAnnouncement
	if err := decMode.Unmarshal(body, &w); err != nil {
		return nil, refuse(Malformed, "%v", err)
	}
	if w.Version != wireVersion {
		return nil, refuse(Malformed, "announcement version %d, this side speaks %d", w.Version, wireVersion)
	}
	a := &Announcement{Away: w.Away}
	if c := w.Capacity; c != nil {
		a.Capacity = Capacity{c.Rows, c.Disk, c.Memory}
	}
	for i := range w.Models {
		m, err := w.Models[i].news()
		if err != nil {
			return nil, err
		}
		a.Models = append(a.Models, m)
	}
	for _, n := range w.Near {
		a.Near = append(a.Near, Neighbour{n.Peer, fromMicros(n.RTT)})
	}
	if m := w.Machine; m != nil {
		a.Machine = &Machine{VRAM: m.VRAM, Cores: m.Cores, Bytes: m.Bytes, Batch: m.Batch,
			Layer: time.Duration(m.Layer), Up: m.Up, Down: m.Down, Call: time.Duration(m.Call)}
	}
	if err := a.check(); err != nil {
		return nil, err
	}
	if again, err := a.Encode(); err != nil || !bytes.Equal(again, body) {
		return nil, refuse(Malformed, "announcement is not in its deterministic encoding")
	}
	return a, nil
}

func (w *wireModel) news() (ModelNews, error) {
	m := ModelNews{Name: w.Name, Memory: w.Memory,
		Full: w.Flags&flagFull != 0, Backbone: w.Flags&flagBackbone != 0, Dense: w.Flags&flagDense != 0}
	if copy(m.ID[:], w.ID) != len(m.ID) || len(w.ID) != len(m.ID) {
		return m, refuse(Malformed, "model id of %d bytes, want %d", len(w.ID), len(m.ID))
	}
	if w.Flags&^(flagFull|flagBackbone|flagDense) != 0 {
		return m, refuse(Malformed, "unknown flags %#x", w.Flags)
	}
	m.Shape = Shape{Layers: w.Shape.Layers, Experts: w.Shape.Experts}
	if len(w.Shape.MoE)%2 != 0 {
		return m, refuse(BadShape, "%d bounds of MoE layers, want pairs", len(w.Shape.MoE))
	}
	for i := 0; i < len(w.Shape.MoE); i += 2 {
		m.Shape.MoE = append(m.Shape.MoE, gguf.Range{Begin: w.Shape.MoE[i], End: w.Shape.MoE[i+1]})
	}
	for _, h := range w.Holdings {
		m.Holdings = append(m.Holdings, Holding{
			Slice: gguf.Slice{Layers: gguf.Range{Begin: h.FirstLayer, End: h.EndLayer},
				Experts: gguf.Range{Begin: h.FirstExpert, End: h.EndExpert}},
			State: h.State, Lease: time.Duration(h.Lease) * time.Second})
	}
	for _, d := range w.Demand {
		if len(d.Hot)%2 != 0 {
			return m, refuse(Malformed, "%d values of hot experts, want pairs", len(d.Hot))
		}
		x := LayerDemand{Layer: d.Layer, Pairs: d.Pairs}
		for i := 0; i < len(d.Hot); i += 2 {
			x.Hot = append(x.Hot, HotExpert{d.Hot[i], d.Hot[i+1]})
		}
		m.Demand = append(m.Demand, x)
	}
	for _, x := range w.Windows {
		m.Windows = append(m.Windows, WindowHolding{Layers: gguf.Range{Begin: x.Begin, End: x.End}, State: x.State,
			Lease: time.Duration(x.Lease) * time.Second, Slots: x.Slots, Free: x.Free,
			Token: fromMicros(x.Token), Batched: fromMicros(x.Batched)})
	}
	if r := w.Room; r != nil {
		m.Room = Footprint{r.Disk, r.Memory}
	}
	if x := w.Service; x != nil {
		m.Service = Service{x.Slots, x.Free, x.Context, fromMicros(x.Token)}
	}
	return m, nil
}

func checkName(s string) error {
	if len(s) > maxName {
		return fmt.Errorf("name of %d bytes, at most %d", len(s), maxName)
	}
	if !utf8.ValidString(s) || strings.ContainsFunc(s, func(r rune) bool { return !unicode.IsPrint(r) }) {
		return errors.New("name is not printable")
	}
	return nil
}
