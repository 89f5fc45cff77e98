package p2p

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"github.com/libp2p/go-libp2p/core/peer"
)

// A revocation list, version 1, in a file and on the wire: its body, a map of
// deterministic CBOR, and the authority's ed25519 signature of 64 bytes over revokeDomain
// and the body.
//
//	1 format, uint          2 network id, text       3 version of the list, uint, from 1
//	4 serials, 16 bytes each                         5 peer ids, bytes
//
// 4 and 5 are sorted and without doubles, and left out when empty. A list replaces every
// one with a lower version, so it holds all that was ever revoked and may still be valid.
const (
	revokeFormat = 1
	revokeDomain = "kvasir revocations 1\n"

	// MaxRevocations bounds a list in bytes, maxRevoked its serials and its peers.
	MaxRevocations = 256 << 10
	maxRevoked     = 4096
)

// Revocations are the tickets and peers that a network's authority has put out. A nil one
// is empty, with version 0.
type Revocations struct {
	Version uint64
	Serials []Serial  // sorted
	Peers   []peer.ID // sorted

	raw []byte // as signed
}

type revocationsCBOR struct {
	Format  uint     `cbor:"1,keyasint"`
	Network string   `cbor:"2,keyasint"`
	Version uint64   `cbor:"3,keyasint"`
	Serials [][]byte `cbor:"4,keyasint,omitempty"`
	Peers   [][]byte `cbor:"5,keyasint,omitempty"`
}

// OpenRevocations reads a list and refuses one that is not the authority's.
func (g *Genesis) OpenRevocations(raw []byte) (*Revocations, error) {
	if len(raw) <= signatureSize || len(raw) > MaxRevocations {
		return nil, fmt.Errorf("revocation list of %d bytes: want %d to %d", len(raw), signatureSize+1, MaxRevocations)
	}
	if g == nil || g.Authority == "" {
		return nil, errors.New("revocation list: this network has no authority")
	}
	body, sig := raw[:len(raw)-signatureSize], raw[len(raw)-signatureSize:]
	key, err := authorityKey(g.Authority)
	if err != nil {
		return nil, err
	}
	if !signedBy(key, append([]byte(revokeDomain), body...), sig) {
		return nil, errors.New("revocation list is not signed by the network's authority")
	}
	var c revocationsCBOR
	if err := strictMode.Unmarshal(body, &c); err != nil {
		return nil, fmt.Errorf("revocation list: %v", err)
	}
	switch {
	case c.Format != revokeFormat:
		return nil, fmt.Errorf("revocation list of format %d: this kvasird knows %d", c.Format, revokeFormat)
	case c.Network != g.ID():
		return nil, fmt.Errorf("revocation list is for network %q, this is %s", c.Network, g.ID())
	case c.Version == 0:
		return nil, errors.New("revocation list of version 0")
	case !ascending(c.Serials) || !ascending(c.Peers):
		return nil, errors.New("revocation list is not sorted")
	}
	if again, err := encMode.Marshal(c); err != nil || !bytes.Equal(again, body) {
		return nil, errors.New("revocation list is not in deterministic CBOR")
	}
	r := &Revocations{Version: c.Version, raw: bytes.Clone(raw)}
	for _, s := range c.Serials {
		if len(s) != len(Serial{}) {
			return nil, fmt.Errorf("revocation list: serial of %d bytes", len(s))
		}
		r.Serials = append(r.Serials, Serial(s))
	}
	for _, p := range c.Peers {
		if _, err := peer.IDFromBytes(p); err != nil || len(p) > maxID {
			return nil, errors.New("revocation list: what should be a peer id is none")
		}
		r.Peers = append(r.Peers, peer.ID(p))
	}
	return r, nil
}

func ascending(list [][]byte) bool {
	for i := 1; i < len(list); i++ {
		if bytes.Compare(list[i-1], list[i]) >= 0 {
			return false
		}
	}
	return true
}

// Revoke signs the list that follows r with more serials and peers in it; r may be nil.
func (g *Genesis) Revoke(authority Identity, r *Revocations, serials []Serial, peers []peer.ID) (*Revocations, error) {
	if authority.id != g.Authority {
		return nil, g.wrongKey(authority)
	}
	if slices.Contains(peers, g.Authority) {
		return nil, errors.New("the network's authority can not be revoked")
	}
	c := revocationsCBOR{Format: revokeFormat, Network: g.ID(), Version: r.version() + 1}
	if r != nil {
		serials, peers = slices.Concat(r.Serials, serials), slices.Concat(r.Peers, peers)
	}
	for _, s := range serials {
		c.Serials = append(c.Serials, bytes.Clone(s[:]))
	}
	for _, p := range peers {
		c.Peers = append(c.Peers, []byte(p))
	}
	c.Serials, c.Peers = sortedOnce(c.Serials), sortedOnce(c.Peers)
	if len(c.Serials) > maxRevoked || len(c.Peers) > maxRevoked {
		return nil, fmt.Errorf("a revocation list holds at most %d tickets and as many peers: start a new network", maxRevoked)
	}
	body, err := encMode.Marshal(c)
	if err != nil {
		return nil, err
	}
	sig, err := authority.Sign(append([]byte(revokeDomain), body...))
	if err != nil {
		return nil, err
	}
	return g.OpenRevocations(append(body, sig...))
}

func sortedOnce(list [][]byte) [][]byte {
	slices.SortFunc(list, bytes.Compare)
	return slices.CompactFunc(list, bytes.Equal)
}

// Bytes is the list as the authority signed it.
func (r *Revocations) Bytes() []byte { return r.raw }

func (r *Revocations) version() uint64 {
	if r == nil {
		return 0
	}
	return r.Version
}

func (r *Revocations) hasSerial(s Serial) bool {
	if r == nil {
		return false
	}
	_, found := slices.BinarySearchFunc(r.Serials, s, func(a, b Serial) int { return bytes.Compare(a[:], b[:]) })
	return found
}

func (r *Revocations) hasPeer(id peer.ID) bool {
	if r == nil {
		return false
	}
	_, found := slices.BinarySearchFunc(r.Peers, id, cmp.Compare[peer.ID])
	return found
}

// ReadRevocations reads a list that WriteFile stored; without the file there is none, nil.
func (g *Genesis) ReadRevocations(path string) (*Revocations, error) {
	raw, err := readSmall(path, MaxRevocations)
	if raw == nil || err != nil {
		return nil, err
	}
	r, err := g.OpenRevocations(raw)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return r, nil
}

// WriteFile stores the list: after a crash the file has the old or the new one.
func (r *Revocations) WriteFile(path string) error {
	if err := writeAtomic(path, r.raw); err != nil {
		return fmt.Errorf("store the revocation list: %w", err)
	}
	return nil
}

// readSmall reads a file of at most limit bytes, or one more of a longer one; nil when
// there is none.
func readSmall(path string, limit int64) ([]byte, error) {
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return io.ReadAll(io.LimitReader(f, limit+1)) // not nil, even of an empty file
}

// writeAtomic replaces the file at path, mode 0600.
func writeAtomic(path string, data []byte) error {
	tmp, err := os.CreateTemp(filepath.Dir(path), ".new-*")
	if err != nil {
		return err
	}
	defer os.Remove(tmp.Name())
	_, err = tmp.Write(data)
	if err = errors.Join(err, tmp.Sync(), tmp.Close()); err != nil {
		return err
	}
	if err := os.Rename(tmp.Name(), path); err != nil {
		return err
	}
	return syncDir(filepath.Dir(path))
}
