package meter

import (
	"context"
	"crypto/ed25519"
	"crypto/sha256"
	"errors"
	"net"
	"sync"
	"testing"
	"time"

	"kvasird/p2p"
	"kvasird/settle"
)

// testModel has two layers with experts of which a token uses 4, and a dense one between
// them: parts 0 to 7, of which number 4 is the dense layer's experts.
func testModel() *Model {
	m := &Model{ID: "model", layers: 3}
	for _, p := range [][2]uint64{{10, 1}, {100, 1}, {400, 4}, {300, 1}, {0, 1}, {100, 1}, {400, 4}, {50, 1}} {
		m.parts = append(m.parts, settle.Part{Weight: p[0], PerToken: p[1]})
	}
	return m
}

var (
	testNetwork = settle.Hash{1}
	testRequest = settle.QuoteID{2}
)

func keyOf(name string) ed25519.PrivateKey {
	seed := sha256.Sum256([]byte(name))
	return ed25519.NewKeyFromSeed(seed[:])
}

func node(name string) settle.Node { return settle.Node(keyOf(name).Public().(ed25519.PublicKey)) }

func peerOf(name string) string { return p2p.PeerOf(node(name)).String() }

// memory is a Keep that can fail.
type memory struct {
	mu     sync.Mutex
	values map[string][]byte
	full   bool
}

func (m *memory) Get(_ context.Context, key string) ([]byte, bool, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	v, ok := m.values[key]
	return v, ok, nil
}

func (m *memory) Put(_ context.Context, key string, value []byte) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.full {
		return errors.New("no room")
	}
	m.values[key] = value
	return nil
}

func newMemory() *memory { return &memory{values: map[string][]byte{}} }

func newTestSigner(t *testing.T, name string, keep Keep) *Signer {
	t.Helper()
	s, err := NewSigner(SignerConfig{Network: testNetwork, Self: peerOf(name), Key: keyOf(name), Keep: keep})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// swarm connects a meter with signers, or with whatever else answers.
type swarm struct {
	asker string
	serve map[string]func(peerID string, c Conn)
}

func (w *swarm) Dial(_ context.Context, peerID string) (Conn, error) {
	serve := w.serve[peerID]
	if serve == nil {
		return nil, errors.New("nobody is there")
	}
	near, far := net.Pipe()
	go func() {
		defer far.Close()
		serve(w.asker, far)
	}()
	return near, nil
}

func (w *swarm) add(name string, s *Signer) {
	w.serve[peerOf(name)] = func(peerID string, c Conn) { s.serve(peerID, c, nil) }
}

func newTestMeter(t *testing.T, d Dialer) *Meter {
	t.Helper()
	return meterOf(t, newTestSigner(t, "entry", newMemory()), d)
}

func meterOf(t *testing.T, s *Signer, d Dialer) *Meter {
	t.Helper()
	m, err := New(Config{Signer: s, Dialer: d, Wait: time.Second})
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func lines(partUnits ...uint64) (out []settle.Line) {
	for i := 0; i < len(partUnits); i += 2 {
		out = append(out, settle.Line{Part: uint32(partUnits[i]), Units: partUnits[i+1]})
	}
	return out
}
