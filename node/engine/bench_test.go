//go:build cgo

package engine

import "testing"

// BenchmarkAnswers reads greedy answers of 200 tokens, one after the other: free,
// with log-probabilities, and with a grammar that takes nearly everything.
func BenchmarkAnswers(b *testing.B) {
	for name, extra := range map[string]Extra{
		"free": {}, "logprobs": {Logprobs: true, Top: 5}, "grammar": {Grammar: `root ::= [^\x00]*`},
	} {
		b.Run(name, func(b *testing.B) {
			e := open(b, Config{Sequences: 1})
			req := endless(b, e, questions[0], 200)
			for b.Loop() {
				g, err := e.StartExtra(b.Context(), req, extra)
				if err != nil {
					b.Fatal(err)
				}
				if _, err := read(b.Context(), g); err != nil || g.Generated() != 200 {
					b.Fatalf("%d tokens, %v", g.Generated(), err)
				}
			}
			b.ReportMetric(200*float64(b.N)/b.Elapsed().Seconds(), "tok/s")
		})
	}
}
