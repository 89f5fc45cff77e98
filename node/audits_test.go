package node

import (
	"crypto/ed25519"
	"math"
	"os"
	"path/filepath"
	"testing"
	"time"

	"kvasird/experts"
	"kvasird/experts/audit"
	"kvasird/ggml/gguf"
)

// TestFindingsAreKept: what an audit found is a signed record on disk, and they are bounded.
func TestFindingsAreKept(t *testing.T) {
	key := ed25519.NewKeyFromSeed(make([]byte, 32))
	folder := filepath.Join(t.TempDir(), "findings")
	a := experts.Audited{
		Finding: audit.Finding{Outcome: audit.Wrong, Culprit: "liar", Against: []string{""}, Distance: math.Inf(1), Band: 0.1},
		Layer:   2, Expert: 5,
		Answers: []audit.Answer{{By: "liar", Rows: []float32{1, 2}}, {Rows: []float32{3, 4}}},
	}
	for i := range mostFindings + 3 {
		r := auditRecord("home-00", gguf.ModelID{1}, a, time.Unix(int64(1_000_000+i), 0))
		if err := keepFinding(folder, r, key); err != nil {
			t.Fatal(err)
		}
	}
	list, err := os.ReadDir(folder)
	if err != nil || len(list) != mostFindings {
		t.Fatalf("%d records, %v, want %d", len(list), err, mostFindings)
	}
	b, err := os.ReadFile(filepath.Join(folder, list[0].Name()))
	if err != nil {
		t.Fatal(err)
	}
	r, signer, err := audit.ParseRecord(b)
	if err != nil || !signer.Equal(key.Public()) || r.Time != 1_000_003 || r.Culprit != "liar" || !r.Wrong || r.Layer != 2 || r.Expert != 5 {
		t.Errorf("%+v, %v", r, err)
	}
}
