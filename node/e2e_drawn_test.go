//go:build cgo && linux

package node

import (
	"encoding/json"
	"math/rand/v2"
	"net/http"
	"testing"
	"time"

	"kvasird/experts/place"
)

// rowsBy are the rows that each peer computed for a dispatcher, by layer.
func rowsBy(d *dispatchPart) map[string]map[int]uint64 {
	rows := map[string]map[int]uint64{}
	for _, p := range d.Peers() {
		rows[p.ID] = map[int]uint64{}
		for _, r := range p.Rows {
			rows[p.ID][r.Layer] = r.Rows
		}
	}
	return rows
}

// TestAnswersAreDrawn asks a swarm of three workers that hold all experts, with and without a
// seed: the answers are equal, and with one the rows of a layer go to the worker that the seed
// draws for it, but for what others were asked because it was late.
func TestAnswersAreDrawn(t *testing.T) {
	n := newNetwork(t, NewNetwork{})
	var peers []string
	var addrs []string
	for _, name := range []string{"w1", "w2", "w3"} {
		w, _ := n.here(name, "--role", "worker", "--model", n.whole)
		peers = append(peers, w.host.ID().String())
		addrs = append(addrs, "--peer", localAddr(must(w.Status(n.ctx))(t)))
	}
	entry, _ := n.here("entry", append(addrs, "--role", "backbone,entry", "--model", n.whole, "--experts", "remote", "--wait", "60")...)
	n.serves(entry)
	d := entry.dispatching()
	ask := func() (text string, tokens int, took time.Duration) {
		t.Helper()
		req := long(questions[0])
		req["max_tokens"], req["temperature"] = 40, 0
		began := time.Now()
		status, _, body := n.chat(req, nil)
		took = time.Since(began)
		var said struct {
			Choices []struct {
				Message struct {
					Content string `json:"content"`
				} `json:"message"`
			} `json:"choices"`
			Usage struct {
				Completion int `json:"completion_tokens"`
			} `json:"usage"`
		}
		if err := json.Unmarshal([]byte(body), &said); status != http.StatusOK || err != nil || len(said.Choices) != 1 {
			t.Fatalf("status %d, %v: %s", status, err, body)
		}
		return said.Choices[0].Message.Content, said.Usage.Completion, took
	}
	within := time.Now().Add(60 * time.Second)
	for ; ; ask() { // until all are known to compute
		if rows := rowsBy(d); len(rows) == len(peers) && rows[peers[0]][0] > 0 && rows[peers[1]][0] > 0 && rows[peers[2]][0] > 0 {
			break
		}
		if time.Now().After(within) {
			t.Fatalf("not all three compute: %v", rowsBy(d))
		}
	}
	want, _, _ := ask()
	rng := rand.New(rand.NewPCG(4, 2))
	var plain, drawn time.Duration
	var right, all uint64
	for range 8 {
		text, _, took := ask()
		if plain += took; text != want {
			t.Errorf("without a seed: %q, want %q", text, want)
		}
		var seed place.Seed
		for i := range seed {
			seed[i] = byte(rng.Uint32())
		}
		before := rowsBy(d)
		end := d.Draw(seed)
		text, _, took = ask()
		end()
		if drawn += took; text != want {
			t.Errorf("drawn: %q, want %q", text, want)
		}
		after := rowsBy(d)
		for layer := range entry.file.Layers() {
			best := peers[0]
			for _, p := range peers[1:] {
				if place.Rank(&seed, int32(layer), p) > place.Rank(&seed, int32(layer), best) {
					best = p
				}
			}
			for _, p := range peers {
				rows := after[p][layer] - before[p][layer]
				if all += rows; p == best {
					right += rows
				}
			}
		}
	}
	t.Logf("%.1f%% of %d rows by the drawn worker; 8 answers took %v without a seed, %v with one", 100*float64(right)/float64(all), all, plain, drawn)
	if all == 0 || right*10 < all*7 {
		t.Errorf("%d of %d rows were computed by the drawn worker, want most: a third is chance", right, all)
	}
}
