package node

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"text/tabwriter"
	"time"

	"kvasird/ggml"
	"kvasird/node/api"
)

const (
	serverTokens  = 48  // of an answer
	serverContext = 256 // tokens of one client
	serverAnswers = 32  // of all clients in a turn, or two of each
)

// serverClients are the numbers of clients that ask at the same time.
var serverClients = []int{1, 8, 32}

// servers compares this program with llama.cpp's own server, in turns: the same
// model, threads, sequences and requests, by HTTP, streamed.
func (b *bench) servers() error {
	if b.Server == "" {
		return errors.New("it needs --server, the path of llama.cpp's llama-server: make bench-server builds one")
	}
	small, err := b.tinyModel()
	if err != nil {
		return err
	}
	wide, err := b.realModel()
	if err != nil {
		return err
	}
	fmt.Fprintf(b.out, "\nthrough HTTP, against llama.cpp's server: answers of %d tokens, %d threads each, medians of %d rounds\n", serverTokens, b.Threads, b.Rounds)
	t := tabwriter.NewWriter(b.out, 12, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprint(t, "model\tclients\ttokens/s\tllama.cpp\tratio\tfirst token\tllama.cpp\t\n")
	for _, m := range []struct{ name, path string }{{"shipped", small}, {"real widths", wide}} {
		if err := b.serveModel(t, m.name, m.path); err != nil {
			return fmt.Errorf("%s: %w", m.name, err)
		}
		if err := t.Flush(); err != nil {
			return err
		}
	}
	return nil
}

// serveModel compares both on one model.
func (b *bench) serveModel(out io.Writer, name, path string) error {
	model, err := b.rt.LoadModel(ggml.ModelConfig{Path: path, VocabOnly: true})
	if err != nil {
		return err
	}
	bias := noEnd(model).LogitBias
	model.Close()
	for end := range bias {
		bias[end] = -100 // as much as the API takes
	}
	ours, stop, err := b.startOurs(path)
	if err != nil {
		return err
	}
	defer stop()
	theirs, stop, err := b.startTheirs(path)
	if err != nil {
		return err
	}
	defer stop()
	for _, clients := range serverClients {
		load := &serverLoad{clients: clients, bias: bias}
		var speeds, firsts [2][]float64
		var ratios []float64
		for round := range b.Rounds + 1 {
			for i, url := range []string{ours, theirs} {
				speed, first, err := load.run(b.ctx, url, uint64(round))
				if err != nil {
					return fmt.Errorf("%s: %w", url, err)
				}
				if round > 0 { // the first is for warming up
					speeds[i], firsts[i] = append(speeds[i], speed), append(firsts[i], first.Seconds()*1e3)
				}
			}
			if round > 0 {
				ratios = append(ratios, speeds[0][round-1]/speeds[1][round-1])
			}
		}
		fmt.Fprintf(out, "%s\t%d\t%.0f\t%.0f\t%.2f\t%.0f ms\t%.0f ms\t\n", name, clients,
			median(speeds[0]), median(speeds[1]), median(ratios), median(firsts[0]), median(firsts[1]))
	}
	return nil
}

// startOurs runs this program with a model, and returns its address.
func (b *bench) startOurs(path string) (url string, stop func() error, err error) {
	most := serverClients[len(serverClients)-1]
	c, err := startChild(b.dir, fmt.Sprintf("server-%d", rand.Uint32()), "--model", path, "--experts", ExpertsHere, "--role", "backbone,entry",
		"--threads", fmt.Sprint(b.Threads), "--sequences", fmt.Sprint(most), "--context", fmt.Sprint(most*serverContext),
		"--listen", "/ip4/127.0.0.1/tcp/0", "--mdns", Off, "--http", "127.0.0.1:0")
	if err != nil {
		return "", nil, err
	}
	limit, cancel := context.WithTimeout(b.ctx, 5*time.Minute) // it reads all of the model three times
	defer cancel()
	st, err := c.await(limit, func(st *api.Status) bool { return serving(st) && st.HTTP != "" })
	if err != nil {
		return "", nil, errors.Join(err, c.stop())
	}
	return "http://" + st.HTTP, c.stop, nil
}

// startTheirs runs llama.cpp's server with a model, and returns its address.
func (b *bench) startTheirs(path string) (url string, stop func() error, err error) {
	most := serverClients[len(serverClients)-1]
	return b.startServer(path, "-np", fmt.Sprint(most), "-c", fmt.Sprint(most*serverContext))
}

// startServer runs llama.cpp's server with a model and more arguments, and returns its
// address once it is ready.
func (b *bench) startServer(path string, args ...string) (url string, stop func() error, err error) {
	addr, err := freeAddr()
	if err != nil {
		return "", nil, err
	}
	_, port, _ := net.SplitHostPort(addr)
	stop, words, err := startTool(b.Server, append([]string{"-m", path, "--host", "127.0.0.1", "--port", port,
		"-t", fmt.Sprint(b.Threads), "-tb", fmt.Sprint(b.Threads), "--log-disable"}, args...)...)
	if err != nil {
		return "", nil, err
	}
	for range 600 {
		resp, err := http.Get("http://" + addr + "/health")
		if err == nil {
			resp.Body.Close()
			if resp.StatusCode == http.StatusOK {
				return "http://" + addr, stop, nil
			}
		}
		select {
		case <-b.ctx.Done():
			return "", nil, errors.Join(b.ctx.Err(), stop())
		case <-time.After(100 * time.Millisecond):
		}
	}
	stop()
	return "", nil, fmt.Errorf("%s is not ready after a minute: %s", b.Server, strings.TrimSpace(words.String()))
}

// freeAddr is an address where nobody listens just now.
func freeAddr() (string, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	return l.Addr().String(), l.Close()
}

// startTool runs a program of llama.cpp. Its words may be read once it was stopped.
func startTool(path string, args ...string) (stop func() error, words *bytes.Buffer, err error) {
	words = &bytes.Buffer{}
	cmd := exec.Command(path, args...)
	cmd.Stderr = words
	cmd.SysProcAttr = dieWithParent(syscall.SIGTERM)
	if err := cmd.Start(); err != nil {
		return nil, nil, err
	}
	return func() error {
		cmd.Process.Kill()
		cmd.Wait()
		return nil
	}, words, nil
}

// serverLoad is what some clients ask in one turn.
type serverLoad struct {
	clients int
	bias    map[int32]float32 // so that no answer ends early
}

// run asks, and returns the tokens per second of all and the median time to a first
// token. The same turn has the same prompts, of which no two begin alike.
func (l *serverLoad) run(ctx context.Context, url string, turn uint64) (speed float64, first time.Duration, err error) {
	model, err := onlyModel(url)
	if err != nil {
		return 0, 0, err
	}
	var mu sync.Mutex // guards what follows, until all clients are done
	var firsts []time.Duration
	var errs []error
	tokens := 0
	var all sync.WaitGroup
	began := time.Now()
	for i := range l.clients {
		all.Go(func() {
			rng := rand.New(rand.NewPCG(turn, uint64(i)))
			for range max(2, serverAnswers/l.clients) {
				n, first, err := l.ask(ctx, url, model, rng)
				mu.Lock()
				tokens, firsts, errs = tokens+n, append(firsts, first), append(errs, err)
				mu.Unlock()
			}
		})
	}
	all.Wait()
	took := time.Since(began)
	for _, err := range errs {
		if err != nil {
			return 0, 0, err
		}
	}
	return float64(tokens) / took.Seconds(), median(firsts), nil
}

// onlyModel is the name of what a server serves.
func onlyModel(url string) (string, error) {
	resp, err := http.Get(url + "/v1/models")
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	var models struct {
		Data []struct {
			ID string `json:"id"`
		} `json:"data"`
	}
	if err := json.NewDecoder(io.LimitReader(resp.Body, 1<<20)).Decode(&models); err != nil || len(models.Data) != 1 {
		return "", fmt.Errorf("%d models are served, want one: %v", len(models.Data), err)
	}
	return models.Data[0].ID, nil
}

// ask asks for one answer.
func (l *serverLoad) ask(ctx context.Context, url, model string, rng *rand.Rand) (tokens int, first time.Duration, err error) {
	var prompt strings.Builder
	for range 16 {
		prompt.WriteString(strconv.Itoa(rng.IntN(10)) + " ")
	}
	body, err := json.Marshal(map[string]any{
		"model": model, "prompt": prompt.String(), "max_tokens": serverTokens, "temperature": 0, "logit_bias": l.bias,
		"stream": true, "stream_options": map[string]any{"include_usage": true},
	})
	if err != nil {
		return 0, 0, err
	}
	ctx, cancel := context.WithTimeout(ctx, 5*time.Minute)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url+"/v1/completions", bytes.NewReader(body))
	if err != nil {
		return 0, 0, err
	}
	req.Header.Set("Content-Type", "application/json")
	began := time.Now()
	req.Close = true // their server ends a connection after some requests, and a client then sees that as a failure
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0, 0, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(io.LimitReader(resp.Body, 1<<10))
		return 0, 0, fmt.Errorf("%s: %s", resp.Status, text)
	}
	lines := bufio.NewScanner(resp.Body)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		data, ok := strings.CutPrefix(lines.Text(), "data: ")
		if !ok || data == "[DONE]" {
			continue
		}
		if first == 0 {
			first = time.Since(began)
		}
		var event struct {
			Usage struct {
				Completion int `json:"completion_tokens"`
			} `json:"usage"`
		}
		if err := json.Unmarshal([]byte(data), &event); err != nil {
			return 0, 0, err
		}
		tokens = max(tokens, event.Usage.Completion)
	}
	if err := lines.Err(); err != nil {
		return 0, 0, err
	}
	if tokens != serverTokens {
		return 0, 0, fmt.Errorf("an answer has %d tokens, want %d", tokens, serverTokens)
	}
	return tokens, first, nil
}
