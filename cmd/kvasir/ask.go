package main

import (
	"context"
	"fmt"
	"io"
	"strings"

	"kvasird/node/api"
	"kvasird/node/client"
)

// ask prints an answer as it comes, on stdout alone; everything else goes to
// stderr.
func ask(ctx context.Context, c console, f *flags) error {
	f.daemonFlags()
	var req api.AskRequest
	stats := f.Bool("stats", false, "then print tokens, tokens/s and the time to the first token")
	f.BoolVar(&req.Raw, "raw", false, "complete the text as it is, without the model's chat template")
	f.StringVar(&req.Model, "model", "", "`name` of the model (default: the only one)")
	how := f.answerFlags()
	rest, err := f.parse(c)
	if err != nil {
		return err
	}
	if req.Prompt, err = prompt(c, f, rest); err != nil {
		return err
	}
	req.System, req.MaxTokens = how.system, how.maxTokens
	req.Temperature, req.TopP, req.Seed = float32(how.temperature), float32(how.topP), uint32(how.seed)
	daemon, err := f.daemon()
	if err != nil {
		return err
	}
	done, err := stream(ctx, c, daemon, req)
	if err != nil {
		return err
	}
	if *stats {
		fmt.Fprintln(c.err, answerStats{AskDone: done})
	}
	return nil
}

// answerFlags are the flags of those who ask a model.
type answerFlags struct {
	system            string
	maxTokens         int
	temperature, topP float64
	seed              uint
}

func (f *flags) answerFlags() *answerFlags {
	a := new(answerFlags)
	f.StringVar(&a.system, "system", "", "system `message`")
	f.IntVar(&a.maxTokens, "max-tokens", 0, "longest answer in `tokens` (default: the daemon's)")
	f.Float64Var(&a.temperature, "temperature", 0, "0 takes the likeliest token each time")
	f.Float64Var(&a.topP, "top-p", 0, "sample among the likeliest tokens with this total `probability` (0: off)")
	f.UintVar(&a.seed, "seed", 0, "`number` that a sampled answer can be repeated with")
	return a
}

// prompt joins the arguments; "-" alone reads stdin.
func prompt(c console, f *flags, words []string) (string, error) {
	if len(words) != 1 || words[0] != "-" {
		text := strings.Join(words, " ")
		if text == "" {
			return "", usagef("what is the question? Usage: %s \"question\", or %s - to read it from stdin", f.Name(), f.Name())
		}
		return text, nil
	}
	data, err := io.ReadAll(io.LimitReader(c.in, api.MaxRequest+1))
	if err != nil {
		return "", fmt.Errorf("read the question: %w", err)
	}
	if len(data) > api.MaxRequest {
		return "", fmt.Errorf("the question is longer than %d bytes", api.MaxRequest)
	}
	return string(data), nil
}

// stream prints the pieces. A line that was begun is ended, also on an error.
func stream(ctx context.Context, c console, cl *client.Client, req api.AskRequest) (api.AskDone, error) {
	out := answerWriter{out: c.out}
	defer out.end()
	return cl.Ask(ctx, req, func(ev api.AskEvent) error {
		if ev.Note != "" {
			fmt.Fprintf(c.err, "(%s)\n", plain(ev.Note))
		}
		return out.text(ev.Text)
	})
}
