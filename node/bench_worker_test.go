//go:build cgo && linux

package node

import (
	"bytes"
	"context"
	"encoding/csv"
	"encoding/json"
	"encoding/xml"
	"io"
	"strings"
	"testing"

	"kvasird/ggml"
)

func TestRoofline(t *testing.T) {
	tests := []struct {
		row   workerRow
		share float64
		bound string
	}{
		{workerRow{Batch: 1, Seconds: 1, Bytes: 500, Flops: 10, Memory: 1000, Peak: 100}, 0.5, "memory"},
		{workerRow{Batch: 8, Seconds: 2, Bytes: 500, Flops: 150, Memory: 1000, Peak: 100}, 0.75, "compute"},
		{workerRow{Batch: 8, Seconds: 0.25, Bytes: 500, Flops: 1, Memory: 1000, Peak: 100}, 2, "memory"}, // from a cache
	}
	for _, tt := range tests {
		if share, bound := tt.row.Roofline(); share != tt.share || bound != tt.bound {
			t.Errorf("%+v: %v of %s, want %v of %s", tt.row, share, bound, tt.share, tt.bound)
		}
	}
}

// TestBenchWorkerChild measures the shipped model as bench worker's child does.
func TestBenchWorkerChild(t *testing.T) {
	dir := t.TempDir()
	generated := benchModels[rooflineModel]
	defer func() { benchModels[rooflineModel] = generated }()
	small := generated // of the same form, made at once
	small.Embedding, small.FeedForward, small.Heads = 256, 256, 4
	benchModels[rooflineModel] = small
	rt, err := ggml.Open(ggml.Config{})
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	o := &BenchWorkerOptions{Child: rt.Variant(), Batches: "1,16", Models: "shipped", Dir: dir, Rounds: 1, Threads: 1}
	if err := BenchWorker(context.Background(), o, &out); err != nil {
		t.Fatal(err)
	}
	var rows []workerRow
	if err := json.Unmarshal(out.Bytes(), &rows); err != nil || len(rows) != 2 {
		t.Fatalf("%d rows, want 2: %v", len(rows), err)
	}
	// One token uses 4 of 32 experts of 3 × 256 × 256 weights.
	one, more := rows[0], rows[1]
	if want := 2.0 * 3 * 256 * 256 * 4; one.Flops != want || more.Flops != 16*want {
		t.Errorf("%v and %v flops, want %v and 16 times that", one.Flops, more.Flops, want)
	}
	if one.Bytes <= 0 || more.Bytes <= one.Bytes || more.Bytes > 8*one.Bytes {
		t.Errorf("16 tokens need %d bytes and one %d, want all of 32 experts at most", more.Bytes, one.Bytes)
	}
	for _, r := range rows {
		if share, _ := r.Roofline(); share <= 0 || r.TokensPerSecond() <= 0 || r.Memory <= 0 || r.Peak <= 0 {
			t.Errorf("%+v is not measured", r)
		}
	}

	var table bytes.Buffer
	if err := writeWorkerCSV(&table, rows); err != nil {
		t.Fatal(err)
	}
	if lines, err := csv.NewReader(&table).ReadAll(); err != nil || len(lines) != 3 || lines[2][2] != "16" {
		t.Errorf("CSV %v, %v", lines, err)
	}
	rows[0].Backend, rows[1].Backend = "<a>", "<a>"
	var drawing bytes.Buffer
	if err := writeWorkerSVG(&drawing, rows); err != nil {
		t.Fatal(err)
	}
	lines := 0
	for d := xml.NewDecoder(&drawing); ; {
		token, err := d.Token()
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if el, ok := token.(xml.StartElement); ok && el.Name.Local == "polyline" {
			lines++
			if points := strings.Fields(el.Attr[0].Value); len(points) != 2 {
				t.Errorf("a line of points %v, want 2", points)
			}
		}
	}
	if lines != 1 {
		t.Errorf("%d lines, want 1", lines)
	}
}

func TestBenchWorkerRefuses(t *testing.T) {
	for _, o := range []*BenchWorkerOptions{
		{Batches: "0", Rounds: 1, Threads: 1}, {Batches: "1,x", Rounds: 1, Threads: 1}, {Batches: "5000", Rounds: 1, Threads: 1},
		{Batches: "1", Threads: 1}, {Batches: "1", Rounds: 1}, {Batches: "1", Rounds: 1, Threads: 1, Models: "huge", Dir: t.TempDir()},
	} {
		if err := BenchWorker(context.Background(), o, io.Discard); err == nil {
			t.Errorf("%+v: no error", *o)
		}
	}
}
