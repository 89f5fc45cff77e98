package node

import (
	"crypto/ed25519"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/libp2p/go-libp2p/core/peer"

	"kvasird/experts"
	"kvasird/experts/audit"
	"kvasird/ggml/gguf"
	"kvasird/p2p"
)

const (
	// findingsName is the folder of what audits found, in the data folder: a signed audit.Record a
	// file, of which the newest mostFindings are kept.
	findingsName = "findings"
	mostFindings = 256
	// auditInterval is how many answers there are to one that is audited where no network file says.
	auditInterval = 64
)

// auditInterval is how many answers of workers there are to one that is audited.
func (c *Config) auditInterval() int {
	if c.Genesis != nil {
		return c.Genesis.AuditInterval
	}
	return auditInterval
}

// band is how far what two peers compute may be apart; "" is this node.
func (n *Node) band(a, b string) float64 {
	if n.computesOnCPU(a) && n.computesOnCPU(b) {
		return audit.RoundingStep
	}
	return experts.UnknownBand
}

// computesOnCPU says whether a peer has no other backend, as it says; "" is this node.
func (n *Node) computesOnCPU(id string) bool {
	if id == "" {
		return n.device.Kind == "cpu"
	}
	p, err := peer.Decode(id)
	if err != nil {
		return false
	}
	its := n.host.Peer(p)
	return its != nil && !slices.ContainsFunc(its.Backends, func(b p2p.Backend) bool { return b.Name != "CPU" })
}

// found takes what audits of a model find: it is signed and kept, and who did wrong work has no pay
// for what was not settled yet.
func (n *Node) found(id gguf.ModelID) func(experts.Audited) {
	return func(a experts.Audited) {
		if a.Outcome == audit.Wrong {
			n.metering.forfeit(id, a.Culprit)
		}
		r := auditRecord(n.cfg.NetworkID(), id, a, time.Now())
		if err := keepFinding(filepath.Join(n.cfg.Data, findingsName), r, n.identity.PrivateKey()); err != nil {
			n.log.Warn("what an audit found is not kept", "error", err)
		}
	}
}

func auditRecord(network string, id gguf.ModelID, a experts.Audited, now time.Time) audit.Record {
	r := audit.Record{
		Network: network, Model: id.String(), Layer: uint32(a.Layer), Expert: uint32(a.Expert), Program: a.Program, Inputs: a.Inputs,
		Culprit: a.Culprit, Wrong: a.Outcome == audit.Wrong, Reason: a.Text(), Time: now.Unix(),
	}
	for _, o := range a.Answers {
		r.Answers = append(r.Answers, audit.RecordAnswer{By: o.By, Row: audit.RowBytes(o.Rows)})
	}
	return r
}

// keepFinding writes a record, in place of the oldest where there are many.
func keepFinding(folder string, r audit.Record, key ed25519.PrivateKey) error {
	b, err := r.Sign(key)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(folder, 0o700); err != nil {
		return err
	}
	list, err := os.ReadDir(folder) // by name, which begins with the time
	if err != nil {
		return err
	}
	for len(list) >= mostFindings {
		if err := os.Remove(filepath.Join(folder, list[0].Name())); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		list = list[1:]
	}
	of := sha256.Sum256(b)
	name := fmt.Sprintf("%012d-%s.cbor", r.Time, hex.EncodeToString(of[:6]))
	return os.WriteFile(filepath.Join(folder, name), b, 0o600)
}
