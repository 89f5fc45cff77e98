package p2p

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/libp2p/go-libp2p/core/peer"
)

// The hello, version 1, on a stream of protocol /kvasir/<network>/hello/1. A node takes
// such a stream for any network and version, so that a stranger learns why it is refused.
//
// Both sides send at once, and without waiting, a frame of type frameHello with their
// record; each judges the other's and sends a frame of type frameVerdict. Who is accepted
// by both has passed. Frames have flags and id 0 and at most maxHello bytes of payload.
//
// Records and verdicts are maps of deterministic CBOR (RFC 8949, 4.2.1) with integer
// keys. Keys are only ever added, so unknown ones are skipped; refused are duplicate
// keys, indefinite lengths, tags, invalid UTF-8, trailing bytes, a wrong type, text that
// is too long or not printable, and lists that are too long.
//
//	record:  1 version of this format, uint     2 peer id, bytes
//	         3 agent, text                      4 network, text
//	         5 runtime pack, text               6 protocols, list of "name/version"
//	         7 backends, list of {1 name, 2 device, 3 accumulation precision}
//	         8 models, list of model ids        9 TCP port of the lane listener, 0 none
//	         10 ticket, bytes                   11 version of the revocation list, uint
//	        12 list of multiaddrs where it listens: in a hello through a relay, so that the
//	           other side can try to do without the relay
//	        13 whether it answers heartbeats from now on (ctl/1), bool
//	verdict: {} accepted, or 1 field, 2 want, 3 got, text
const (
	helloVersion = 1
	frameHello   = 1
	frameVerdict = 2

	// maxHello bounds a record or verdict in bytes.
	maxHello     = 16 << 10
	maxText      = 128 // bytes of any text
	maxID        = 64  // bytes of a peer id; one of an ed25519 key has 38
	maxProtocols = 32
	maxBackends  = 16
	maxModels    = 64
	maxAddrs     = 8
)

// Backend is a place where a node computes: a capability, never a reason to refuse.
type Backend struct {
	Name       string `cbor:"1,keyasint"` // ggml's name: "CPU", "Vulkan", "CUDA"
	Device     string `cbor:"2,keyasint"` // for people: "AMD Ryzen 7 5800X"
	Accumulate string `cbor:"3,keyasint"` // precision of sums: "f32", "f16", "q8"
}

// Capabilities are what a node can do at the moment.
type Capabilities struct {
	Backends []Backend
	Models   []string // model ids of which it holds a part
}

// Hello is what a peer says of itself.
type Hello struct {
	Version     uint32    `cbor:"1,keyasint"`
	ID          peer.ID   `cbor:"2,keyasint"`
	Agent       string    `cbor:"3,keyasint"`
	Network     string    `cbor:"4,keyasint"`
	Pack        string    `cbor:"5,keyasint"`
	Protocols   []string  `cbor:"6,keyasint"` // "experts/1"
	Backends    []Backend `cbor:"7,keyasint"`
	Models      []string  `cbor:"8,keyasint"`
	LanePort    uint16    `cbor:"9,keyasint"`            // TCP; 0: no lanes
	Ticket      []byte    `cbor:"10,keyasint,omitempty"` // bound to ID: of no use to others
	Revocations uint64    `cbor:"11,keyasint,omitempty"`
	Addrs       []string  `cbor:"12,keyasint,omitempty"`
	Heartbeats  bool      `cbor:"13,keyasint,omitempty"` // speaks ctl/1
}

// RefusedError says that one side refused the other. Errors of both sides name the same
// field and values.
type RefusedError struct {
	Peer   peer.ID // the other side
	Field  string  // "network", "invitation", "runtime pack", "hello version", "protocol experts", …
	Want   string  // what the refusing side has
	Got    string  // what the refused side has
	ByPeer bool    // the peer refused us
}

func (e *RefusedError) Error() string {
	// Got says what is wrong with it, Want what to do.
	if e.Field == fieldInvitation && e.ByPeer {
		return fmt.Sprintf("peer %s refused us: the invitation is %s: %s", e.Peer, e.Got, e.Want)
	}
	if e.Field == fieldInvitation {
		return fmt.Sprintf("peer %s refused: its invitation is %s: %s", e.Peer, e.Got, e.Want)
	}
	if e.ByPeer {
		return fmt.Sprintf("peer %s refused us: %s is %q there and %q here", e.Peer, e.Field, e.Want, e.Got)
	}
	return fmt.Sprintf("peer %s refused: %s is %q there and %q here", e.Peer, e.Field, e.Got, e.Want)
}

// verdict is the wire form of a refusal; all empty accepts.
type verdict struct {
	Field string `cbor:"1,keyasint,omitempty"`
	Want  string `cbor:"2,keyasint,omitempty"`
	Got   string `cbor:"3,keyasint,omitempty"`
}

// err is a *RefusedError, or nil if v accepts: of this node against the peer id, or of the
// peer against this node.
func (v verdict) err(id peer.ID, byPeer bool) error {
	if v.Field == "" {
		return nil
	}
	return &RefusedError{Peer: id, Field: v.Field, Want: v.Want, Got: v.Got, ByPeer: byPeer}
}

func encodeHello(h Hello) ([]byte, error) {
	if err := h.check(); err != nil {
		return nil, err
	}
	b, err := encMode.Marshal(h)
	if err == nil && len(b) > maxHello {
		err = fmt.Errorf("hello record of %d bytes, at most %d: hold fewer models", len(b), maxHello)
	}
	return b, err
}

func decodeHello(b []byte) (Hello, error) {
	var h Hello
	if err := decMode.Unmarshal(b, &h); err != nil {
		return Hello{}, fmt.Errorf("hello record: %w", err)
	}
	if err := h.check(); err != nil {
		return Hello{}, fmt.Errorf("hello record: %w", err)
	}
	return h, nil
}

// check applies the limits that hold for both directions.
func (h *Hello) check() error {
	if len(h.ID) == 0 || len(h.ID) > maxID {
		return fmt.Errorf("peer id of %d bytes, want 1 to %d", len(h.ID), maxID)
	}
	if _, err := peer.IDFromBytes([]byte(h.ID)); err != nil {
		return fmt.Errorf("peer id: %w", err)
	}
	if len(h.Protocols) > maxProtocols || len(h.Backends) > maxBackends || len(h.Models) > maxModels {
		return fmt.Errorf("%d protocols, %d backends, %d models: at most %d, %d, %d",
			len(h.Protocols), len(h.Backends), len(h.Models), maxProtocols, maxBackends, maxModels)
	}
	if len(h.Addrs) > maxAddrs {
		return fmt.Errorf("%d addresses, at most %d", len(h.Addrs), maxAddrs)
	}
	if len(h.Ticket) > maxTicket {
		return fmt.Errorf("ticket of %d bytes, at most %d", len(h.Ticket), maxTicket)
	}
	text := slices.Concat([]string{h.Agent, h.Network, h.Pack}, h.Protocols, h.Models, h.Addrs)
	for _, b := range h.Backends {
		text = append(text, b.Name, b.Device, b.Accumulate)
	}
	for _, s := range text {
		if err := checkText(s); err != nil {
			return err
		}
	}
	for _, p := range h.Protocols {
		if name, version, ok := strings.Cut(p, "/"); !ok || name == "" || version == "" {
			return fmt.Errorf("protocol %q is not of the form name/version", p)
		}
	}
	return nil
}

// checkText refuses what would not be fit for a log line or a terminal.
func checkText(s string) error {
	if len(s) > maxText {
		return fmt.Errorf("text of %d bytes, at most %d", len(s), maxText)
	}
	if !utf8.ValidString(s) || strings.ContainsFunc(s, func(r rune) bool { return !unicode.IsPrint(r) }) {
		return fmt.Errorf("text %q is not printable", s)
	}
	return nil
}

func encodeVerdict(v verdict) ([]byte, error) { return encMode.Marshal(v) }

func decodeVerdict(b []byte) (verdict, error) {
	var v verdict
	if err := decMode.Unmarshal(b, &v); err != nil {
		return verdict{}, fmt.Errorf("verdict: %w", err)
	}
	for _, s := range []string{v.Field, v.Want, v.Got} {
		if err := checkText(s); err != nil {
			return verdict{}, fmt.Errorf("verdict: %w", err)
		}
	}
	if v.Field == "" && v != (verdict{}) {
		return verdict{}, fmt.Errorf("verdict: reason without a field")
	}
	return v, nil
}

// judge says whether theirs, from a peer authenticated as id, may work with ours.
func judge(ours, theirs Hello, id peer.ID) verdict {
	switch {
	case theirs.Version != ours.Version:
		return verdict{"hello version", fmt.Sprint(ours.Version), fmt.Sprint(theirs.Version)}
	case theirs.ID != id:
		return verdict{"identity", id.String(), theirs.ID.String()}
	case theirs.Network != ours.Network:
		return verdict{"network", ours.Network, theirs.Network}
	case theirs.Pack != ours.Pack:
		return verdict{"runtime pack", ours.Pack, theirs.Pack}
	}
	return judgeProtocols(protocolVersions(ours.Protocols), protocolVersions(theirs.Protocols))
}

// judgeProtocols refuses when a protocol that both speak has no version in common. One
// that only one side speaks is a capability.
func judgeProtocols(ours, theirs map[string][]string) verdict {
	for _, name := range slices.Sorted(maps.Keys(ours)) {
		their, both := theirs[name]
		if !both {
			continue
		}
		if !slices.ContainsFunc(ours[name], func(v string) bool { return slices.Contains(their, v) }) {
			return verdict{clip("protocol " + name), clip(strings.Join(ours[name], ", ")), clip(strings.Join(their, ", "))}
		}
	}
	return verdict{}
}

func protocolVersions(list []string) map[string][]string {
	m := make(map[string][]string)
	for _, p := range list {
		name, version, _ := strings.Cut(p, "/")
		m[name] = append(m[name], version)
	}
	return m
}

// clip cuts s to what a verdict may carry.
func clip(s string) string {
	if len(s) <= maxText {
		return s
	}
	return strings.ToValidUTF8(s[:maxText], "")
}
