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
	socket := f.socketFlags()
	var req api.AskRequest
	stats := f.Bool("stats", false, "then print tokens, tokens/s and the time to the first token")
	f.BoolVar(&req.Raw, "raw", false, "complete the text as it is, without the model's chat template")
	f.StringVar(&req.System, "system", "", "system `message`")
	f.StringVar(&req.Model, "model", "", "`name` of the model (default: the only one)")
	f.IntVar(&req.MaxTokens, "max-tokens", 0, "longest answer in `tokens` (default: the daemon's)")
	temperature := f.Float64("temperature", 0, "0 takes the likeliest token each time")
	topP := f.Float64("top-p", 0, "sample among the likeliest tokens with this total `probability` (0: off)")
	seed := f.Uint("seed", 0, "`number` that a sampled answer can be repeated with")
	rest, err := f.parse(c)
	if err != nil {
		return err
	}
	if req.Prompt, err = prompt(c, f, rest); err != nil {
		return err
	}
	req.Temperature, req.TopP, req.Seed = float32(*temperature), float32(*topP), uint32(*seed)
	path, err := socket()
	if err != nil {
		return err
	}
	done, err := stream(ctx, c, client.New(path), req)
	if err != nil {
		return err
	}
	if *stats {
		fmt.Fprintln(c.err, statsLine(done))
	}
	return nil
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
	open := false
	done, err := cl.Ask(ctx, req, func(ev api.AskEvent) error {
		if ev.Note != "" {
			fmt.Fprintf(c.err, "(%s)\n", plain(ev.Note))
		}
		if ev.Text == "" {
			return nil
		}
		open = !strings.HasSuffix(ev.Text, "\n")
		_, err := io.WriteString(c.out, plain(ev.Text))
		return err
	})
	if open {
		io.WriteString(c.out, "\n")
	}
	return done, err
}

func statsLine(d api.AskDone) string {
	speed := "-"
	if s := d.TokensPerSecond(); s > 0 {
		speed = fmt.Sprintf("%.1f", s)
	}
	return fmt.Sprintf("%d tokens, %s tokens/s, first token after %.3f s; prompt %d tokens; ended by %s",
		d.Tokens, speed, d.FirstTokenSec, d.PromptTokens, d.Finish)
}
