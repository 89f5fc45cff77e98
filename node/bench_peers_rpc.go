package node

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"sync"
	"time"
)

// rpcPeer is llama.cpp's server, whose experts llama.cpp's RPC server computes in a
// process of its own, at the other end of a line. Without an RPC server it is the model
// alone.
type rpcPeer struct {
	url   string
	close []func() error
}

// openRPC starts both for so many streams.
func (b *bench) openRPC(path string, streams int, l line) (_ *rpcPeer, err error) {
	p := &rpcPeer{}
	defer func() {
		if err != nil {
			p.Close()
		}
	}()
	addr, err := freeAddr()
	if err != nil {
		return nil, err
	}
	host, port, _ := net.SplitHostPort(addr)
	stop, _, err := startTool(b.RPC, "-H", host, "-p", port, "-t", fmt.Sprint(b.Threads))
	if err != nil {
		return nil, err
	}
	p.close = append(p.close, stop)
	if err := awaitPort(b.ctx, addr); err != nil {
		return nil, fmt.Errorf("%s: %w", b.RPC, err)
	}
	if l != (line{}) {
		proxy, err := openProxy(addr, l)
		if err != nil {
			return nil, err
		}
		p.close = append(p.close, proxy.Close)
		addr = proxy.addr()
	}
	return p, p.serve(b, path, streams, "--rpc", addr, "-ot", "exps=RPC0["+addr+"]", "-ngl", "0", "-fit", "off")
}

// openPlain is llama.cpp's server with all of the model.
func (b *bench) openPlain(path string, streams int) (*rpcPeer, error) {
	p := &rpcPeer{}
	return p, p.serve(b, path, streams)
}

func (p *rpcPeer) serve(b *bench, path string, streams int, args ...string) error {
	url, stop, err := b.startServer(path, append([]string{"-np", fmt.Sprint(streams), "-c", fmt.Sprint(streams * rttContext)}, args...)...)
	if err == nil {
		p.url, p.close = url, append(p.close, stop)
	}
	return err
}

// awaitPort waits until somebody listens at an address.
func awaitPort(ctx context.Context, addr string) error {
	var err error
	for range 200 {
		var c net.Conn
		if c, err = net.Dial("tcp", addr); err == nil {
			return c.Close()
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(50 * time.Millisecond):
		}
	}
	return err
}

// run answers the texts at once, and gives the tokens per second of all of them behind
// the first ones, as the server counts them: HTTP is left out.
func (p *rpcPeer) run(ctx context.Context, texts []*rttText, n int) (answers [][]int32, rate float64, err error) {
	answers = make([][]int32, len(texts))
	rates, errs := make([]float64, len(texts)), make([]error, len(texts))
	var wg sync.WaitGroup
	for i, t := range texts {
		wg.Go(func() { answers[i], rates[i], errs[i] = p.answer(ctx, t, n) })
	}
	wg.Wait()
	for _, one := range rates {
		rate += one
	}
	return answers, rate, errors.Join(errs...)
}

func (p *rpcPeer) answer(ctx context.Context, t *rttText, n int) ([]int32, float64, error) {
	bias := [][2]float64{}
	for token, b := range t.sampling.LogitBias {
		bias = append(bias, [2]float64{float64(token), float64(b)})
	}
	body, err := json.Marshal(map[string]any{
		"prompt": t.prompt, "n_predict": n, "temperature": 0, "logit_bias": bias, "cache_prompt": false, "return_tokens": true,
	})
	if err != nil {
		return nil, 0, err
	}
	ctx, cancel := context.WithTimeout(ctx, 5*time.Minute)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, p.url+"/completion", bytes.NewReader(body))
	if err != nil {
		return nil, 0, err
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, 0, err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(io.LimitReader(resp.Body, 8<<20))
	if err != nil {
		return nil, 0, err
	}
	if resp.StatusCode != http.StatusOK {
		return nil, 0, fmt.Errorf("%s: %.200s", resp.Status, text)
	}
	var got struct {
		Tokens  []int32 `json:"tokens"`
		Timings struct {
			Rate float64 `json:"predicted_per_second"`
		} `json:"timings"`
	}
	if err := json.Unmarshal(text, &got); err != nil {
		return nil, 0, err
	}
	return got.Tokens, got.Timings.Rate, nil
}

// Close ends all processes, the latest first.
func (p *rpcPeer) Close() error {
	var errs []error
	for i := len(p.close) - 1; i >= 0; i-- {
		errs = append(errs, p.close[i]())
	}
	return errors.Join(errs...)
}
